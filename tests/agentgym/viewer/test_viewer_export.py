"""One HTML file with the page and its data: whole, safe, and what the server would have said."""

import asyncio
import base64
import hashlib
import json
import re

import httpx
import pytest
from exported_page import Page
from made_runs import HOSTILE, failed, hostile, play, policy_maker, write_evaluation, write_training

from agentgym.core.trajectory import write_jsonl
from agentgym.viewer import export as module
from agentgym.viewer.export import embedded, export, page_of, static_files
from agentgym.viewer.run import Runs, roots_of
from agentgym.viewer.server import serve


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_evaluation(folder / "games", created=200.0)
    write_training(folder / "lake", steps=1)
    run = write_evaluation(folder / "odd", [("wordle", "random")], n=2, k=1, created=100.0)
    (file,) = (run / "episodes").iterdir()
    first, second = play("wordle", policy_maker("random"), 2, 1)
    write_jsonl(file, [failed(first), hostile(second), hostile(second, "\ud800 http://evil.example/x.js \u2029 ]]>")])
    return folder


@pytest.fixture(scope="module")
def exported(made, tmp_path_factory):
    path = tmp_path_factory.mktemp("out") / "runs.html"
    return export(Runs(roots_of([made])), path, 1000)


@pytest.fixture(scope="module")
def page(exported):
    return Page(exported.path.read_text(encoding="utf-8"))


def asked(folder, paths):
    async def asking():
        served = await serve(Runs(roots_of([folder])))
        async with httpx.AsyncClient(base_url=served.url, timeout=20) as client:
            found = [(await client.get(path)).json() for path in paths]
        await served.close()
        return found

    return asyncio.run(asking())


def without_times(value):
    """Whether a training run is live depends on when it is asked."""
    return json.loads(json.dumps(value).replace('"live": true', '"live": false'))


def test_the_data_are_what_the_server_answers(made, exported, page):
    data = page.data
    ids = [run["id"] for run in data["runs"]]
    assert sorted(ids) == ["games", "lake", "odd"]
    runs, *rest = asked(
        made, ["api/runs", *(f"api/runs/{id}" for id in ids), *(f"api/runs/{id}/metrics" for id in ids)]
    )
    assert without_times(data["runs"]) == without_times(runs["runs"])
    for id, details, metrics in zip(ids, rest[:3], rest[3:], strict=True):
        assert without_times(data["details"][id]) == without_times(details)
        assert data["metrics"][id] == metrics["records"]
        (listed,) = asked(made, [f"api/runs/{id}/episodes?superseded=1"])
        assert data["rows"][id] == listed["rows"]
        keys = [row["key"] for row in listed["rows"] if not row["superseded"]]
        assert set(data["episodes"][id]) == set(keys)
        for key, answer in zip(keys, asked(made, [f"api/runs/{id}/episodes/{key}" for key in keys]), strict=True):
            assert data["episodes"][id][key] == answer
    (compared,) = asked(made, ["api/compare?a=odd&b=games"])
    assert data["compare"]["odd games"] == compared
    assert (exported.runs, exported.episodes, exported.note) == (3, sum(map(len, data["episodes"].values())), None)
    assert exported.bytes == exported.path.stat().st_size


def test_what_a_model_wrote_ends_no_element(page):
    tags = [tag for tag, _ in page.elements]
    own = [tag for tag, _ in Page(static_files()["index.html"][1].decode()).elements]
    assert tags.count("script") == own.count("script") + 1
    assert tags.count("img") == own.count("img")
    assert page.data["rows"]["odd"][-2]["task"] == HOSTILE


def test_the_page_asks_for_nothing(exported, page):
    for tag, attrs in page.elements:
        for name in ("src", "href", "action", "srcset", "data", "poster"):
            assert (attrs.get(name) or "#").startswith(("#", "data:")), (tag, attrs)
    text = exported.path.read_text(encoding="utf-8")
    code = re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.DOTALL)
    outside = set(re.findall(r"https?://[\w./-]+", code)) - {"http://www.w3.org/2000/svg"}
    assert outside == set()
    assert not re.search(r"@import|url\((?!['\"]?data:)", code)


def test_its_policy_lets_exactly_its_own_scripts_and_styles_run(page):
    (policy,) = [a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        inside = [text for t, a, text in page.texts if t == tag and a.get("type") != "application/json"]
        hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'" for t in inside]
        assert hashes
        assert rules[f"{tag}-src"].split() == hashes
    first = next(i for i, (tag, attrs) in enumerate(page.elements) if attrs.get("http-equiv"))
    assert not [tag for tag, _ in page.elements[:first] if tag in ("script", "style", "link")]


def test_scripts_stand_in_their_order_behind_the_data(page):
    named = [a["src"] for t, a in Page(static_files()["index.html"][1].decode()).elements if t == "script"]
    scripts = [(attrs, text) for tag, attrs, text in page.texts if tag == "script"]
    assert scripts[0][0].get("id") == "agentgym-data"
    assert [text for _, text in scripts[1:]] == [static_files()[name][1].decode() for name in named]


def test_fewer_episodes_are_taken_from_each_cell_in_turn_and_the_rest_is_told(made, tmp_path):
    found = export(Runs(roots_of([made / "games"])), tmp_path / "few.html", 4)
    data = Page(found.path.read_text()).data
    keys = list(data["episodes"]["games"])
    assert [key.partition(":")[0] for key in keys] == ["frozen_lake@expert", "frozen_lake@random"] * 2
    assert len(data["rows"]["games"]) == 12
    assert found.note == data["note"] == "games: 4 of 12 episodes are in this file"


def test_a_file_grows_only_so_large(made, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 20_000)
    monkeypatch.setattr(module, "MOST_ROWS", 5)
    found = export(Runs(roots_of([made / "games"])), tmp_path / "small.html", 1000)
    assert 0 < found.episodes < 12
    assert f"{found.episodes} of 12 episodes" in found.note
    assert "5 of 12 rows" in found.note


@pytest.mark.parametrize("name", ["runs", "episodes.jsonl", "page.txt"])
def test_only_a_page_is_written(made, tmp_path, name):
    (tmp_path / name).write_text("precious")
    with pytest.raises(ValueError, match=r"ends in \.html"):
        export(Runs(roots_of([made])), tmp_path / name, 1)
    assert (tmp_path / name).read_text() == "precious"


def test_no_runs_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no runs in"):
        export(Runs(roots_of([tmp_path])), tmp_path / "x.html", 1)
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize(
    "text", ["</script>", "<!--<script>", "</SCRIPT >", "\u2028\u2029", "\ud83d", "&lt;", "]]>", "\x00\x1f\x7f"]
)
def test_any_text_comes_back_from_the_inside_of_a_script(text):
    inside = embedded({text: [text]})
    assert "<" not in inside
    assert inside.isascii()
    assert Page(f'<script id="agentgym-data">{inside}</script>').data == {text: [text]}


def test_the_pages_own_files_can_stand_inside_one_page():
    """No end of an element, no comment, no other file: the export puts them into the page as they are."""
    files = {name: content.decode() for name, (_, content) in static_files().items()}
    for name, content in files.items():
        assert "<!--" not in content
        if name.endswith(".js"):
            assert "</script" not in content.lower()
        if name.endswith(".css"):
            assert "</style" not in content.lower()
            assert not re.search(r"""@import|url\((?!['"]?(?:data:|#))""", content, re.IGNORECASE)
    page = page_of({})
    used = {a.get("src") or a.get("href") for t, a in Page(files["index.html"]).elements if t in ("script", "link")}
    assert used - {"data:,"} == files.keys() - {"index.html"}, "every file is linked, and all links are of these files"
    markup = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
    assert not re.search(r"""\b(?:src|href|action)\s*=\s*["'](?!#|data:)""", markup, re.IGNORECASE)
