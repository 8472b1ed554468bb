"""The server of the viewer, asked over HTTP as a browser asks it, and as an attacker does."""

import asyncio
import fcntl
import json
import os
import socket
from contextlib import asynccontextmanager
from dataclasses import replace
from urllib.parse import quote

import httpx
import pytest
from made_runs import HOSTILE, failed, hostile, play, policy_maker, write_evaluation, write_training

from agentgym.core.trajectory import write_jsonl
from agentgym.evaluate.run import results_in
from agentgym.viewer.export import static_files
from agentgym.viewer.run import Runs, roots_of
from agentgym.viewer.server import serve

PATIENCE = 60.0


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_evaluation(folder / "games", created=200.0)
    write_training(folder / "lake")
    run = write_evaluation(folder / "odd", [("wordle", "random")], n=2, k=1, created=100.0)
    (file,) = (run / "episodes").iterdir()
    first, second = play("wordle", policy_maker("random"), 2, 1)
    write_jsonl(file, [failed(first), hostile(second)])
    return folder


@asynccontextmanager
async def page(folder, host="127.0.0.1"):
    served = await serve(Runs(roots_of([folder])), host)
    try:
        async with httpx.AsyncClient(base_url=served.url, timeout=PATIENCE) as client:
            yield client
    finally:
        async with asyncio.timeout(PATIENCE):
            await served.close()


def ask(folder, *paths, **options):
    """The responses of a server that runs for as long as it takes."""

    async def asking():
        async with page(folder) as client:
            return [await client.get(path, **options) for path in paths]

    found = asyncio.run(asking())
    return found[0] if len(found) == 1 else found


def value(response):
    assert response.status_code == 200, response.text
    return response.json()


def test_runs_are_listed_newest_first(made):
    runs = value(ask(made, "api/runs"))["runs"]
    assert [run["id"] for run in runs] == ["lake", "games", "odd"]
    assert {"id", "name", "path", "kind", "created", "updated", "live", "episodes", "errors"} < set(runs[0])
    assert [(run["episodes"], run["errors"]) for run in runs] == [(20, 0), (12, 0), (3, 1)]


def test_a_run_has_its_details(made):
    games, lake = ask(made, "api/runs/games", "api/runs/lake")
    assert [cell["episodes"] for cell in value(games)["cells"]] == [6, 6]
    assert value(games)["results"] is None
    assert len(value(lake)["steps"]) == 5


def test_metrics_come_from_a_number_on(made):
    after = ("", "?after=3", "?after=5", "?after=9")  # the last one of a page that was open when the run went back
    whole, rest, none, less = ask(made, *(f"api/runs/lake/metrics{each}" for each in after))
    assert [r["kind"] for r in value(whole)["records"]] == ["eval", "train", "eval", "train", "eval"]
    assert value(rest) == {"records": value(whole)["records"][3:], "next": 5, "rewritten": 1}
    assert value(none) == value(less) == {"records": [], "next": 5, "rewritten": 1}


def test_episodes_come_in_parts(made):
    first = value(ask(made, "api/runs/games/episodes?limit=5"))
    assert (first["total"], first["matching"], len(first["rows"]), first["next"]) == (12, 12, 5, 5)
    assert (first["indexing"], first["searching"]) == (1.0, 1.0)
    last = value(ask(made, "api/runs/games/episodes?limit=5&offset=10"))
    assert (len(last["rows"]), last["next"]) == (2, None)
    keys = [row["key"] for row in value(ask(made, "api/runs/games/episodes"))["rows"]]
    assert len(set(keys)) == 12
    assert keys[:5] == [row["key"] for row in first["rows"]]


def test_episodes_are_filtered_by_the_address(made):
    found = value(ask(made, "api/runs/games/episodes?cell=frozen_lake@random&outcome=failure&sort=turns&order=desc"))
    turns = [row["turns"] for row in found["rows"]]
    assert turns == sorted(turns, reverse=True)
    assert {(row["cell"], row["agent"]) for row in found["rows"]} == {("frozen_lake@random", "random")}
    assert 0 < found["matching"] < 6


def test_a_text_is_found(made):
    found = value(ask(made, f"api/runs/odd/episodes?text={quote(HOSTILE.upper())}"))
    assert (found["matching"], found["rows"][0]["error"]) == (1, HOSTILE[:200])


def test_superseded_episodes_are_hidden_unless_asked_for(made):
    hidden, shown = ask(made, "api/runs/odd/episodes", "api/runs/odd/episodes?superseded=1")
    assert (value(hidden)["total"], value(hidden)["matching"], value(shown)["matching"]) == (3, 3, 4)
    assert [row["superseded"] for row in value(shown)["rows"]] == [False, False, True, False]


def test_every_row_leads_to_its_episode(made):
    for id in ("games", "odd", "lake"):
        rows = value(ask(made, f"api/runs/{id}/episodes?superseded=1"))["rows"]
        answers = ask(made, *(f"api/runs/{id}/episodes/{quote(row['key'], safe='')}" for row in rows))
        for row, answer in zip(rows, answers, strict=True):
            found = value(answer)
            assert found["row"] == row
            assert (found["episode"]["task_id"], found["episode"]["sample"]) == (row["task"], row["sample"])
            assert len(found["episode"]["turns"]) == row["turns"]


def test_tokens_have_their_texts(made):
    row = value(ask(made, "api/runs/lake/episodes?cell=eval-000002"))["rows"][0]
    assert (row["step"], row["agent"], row["env"]) == (2, "policy", "frozen_lake")
    found = value(ask(made, f"api/runs/lake/episodes/{row['key']}"))
    texts = found["tokens"]
    for turn in found["episode"]["turns"]:
        ids = turn["tokens"]["completion_ids"]
        assert len(ids) == len(turn["tokens"]["logprobs"])
        assert "".join(texts[str(id)] for id in ids) == turn["reply"]["content"] + "<|end|>"
    first = found["episode"]["turns"][0]
    prompt = "".join(texts[str(id)] for id in first["tokens"]["new_prompt_ids"])
    assert first["observation"][0]["content"].splitlines()[0] in prompt
    assert row["tokens"] == sum(len(t["tokens"]["completion_ids"]) for t in found["episode"]["turns"])


def test_without_a_tokenizer_there_are_no_texts(made, tmp_path):
    import shutil

    shutil.copytree(made / "lake", tmp_path / "lake")
    shutil.rmtree(tmp_path / "lake" / "checkpoints")
    row = value(ask(tmp_path, "api/runs/lake/episodes"))["rows"][0]
    assert value(ask(tmp_path, f"api/runs/lake/episodes/{row['key']}"))["tokens"] is None


def test_a_part_of_a_character_is_shown_by_its_bytes(tmp_path):
    from made_runs import byte_tokenizer

    from agentgym.viewer.answers import token_decoder

    tokenizer = byte_tokenizer()
    (tmp_path / "model").mkdir()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    decode = token_decoder(tmp_path.resolve())
    ids = tokenizer.encode("€a", add_special_tokens=False).ids
    assert [decode(id) for id in ids] == ["<E2>", "<82>", "<AC>", "a"]
    assert decode(1_000_000) is None


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("api/runs/nothing", 404, "there is no run 'nothing'"),
        ("api/runs/games/episodes/no:1", 404, "no episode 'no:1'"),
        ("api/runs/games/episodes/frozen_lake@expert:3", 404, "no episode"),
        ("api/runs/games/episodes/frozen_lake@expert:-1", 404, "no episode"),
        ("api/runs/games/episodes/frozen_lake@expert:²", 404, "no episode"),
        ("api/runs/games/episodes/" + "9" * 5000, 404, "no episode"),
        ("api/runs/games/episodes?limit=all", 400, "limit is a number, not 'all'"),
        ("api/runs/games/episodes?cell=other", 404, "no cell 'other'"),
        ("api/runs/lake/metrics?after=-1", 400, "after is a whole number"),
        ("api/compare?a=games", 404, "there is no run ''"),
        ("api/compare?a=nothing&b=games", 404, "there is no run 'nothing'"),
        ("api/events?run=nothing", 404, "there is no run 'nothing'"),
        ("api/other", 404, "Not Found"),
        ("nothing.js", 404, "Not Found"),
    ],
)
def test_what_is_not_there_is_told_as_json(made, path, status, words):
    response = ask(made, path)
    assert response.status_code == status
    assert words in response.json()["error"]
    assert response.headers["Content-Type"].startswith("application/json")


ATTACKS = [
    "/../../../../etc/passwd",
    "/..%2f..%2f..%2f..%2fetc%2fpasswd",
    "/%2e%2e/%2e%2e/etc/passwd",
    "//etc/passwd",
    "/static/../server.py",
    "/server.py",
    "/__init__.py",
    "/api/runs/..",
    "/api/runs/..%2f..%2fsecret",
    "/api/runs/%2fetc%2fpasswd",
    "/api/runs/games/episodes/..%2f..%2f..%2fsecret:0",
    "/api/runs/games/episodes/%2fetc%2fpasswd:0",
    "/api/runs/games%2f..%2f..%2fsecret/episodes",
    "/api/runs/games/episodes/..%00:0",
    "/api/runs/games/metrics?after=..%2f",
    "/api/events?run=..%2f..%2fsecret",
]


def raw(port, request):
    """The answer to bytes that no well-behaved client would send."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


@pytest.mark.parametrize("path", ATTACKS)
def test_no_address_leads_out(made, tmp_path, path):
    (made.parent / "secret").write_text("root: a secret")

    async def asking():
        async with page(made) as client:
            request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
            return await asyncio.to_thread(raw, client.base_url.port, request)

    answer = asyncio.run(asking())
    assert answer.split(b" ", 2)[1] in (b"404", b"400")
    assert b"root:" not in answer
    assert b"import" not in answer


def test_a_page_of_somebody_else_cannot_ask_by_a_name_that_leads_here(made):
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", ""):
        response = ask(made, "api/runs", headers={"Host": host})
        assert response.status_code == 403, host
        assert "games" not in response.text
    for host in ("localhost", "localhost:9999", "127.0.0.1:1", "[::1]:7", "LOCALHOST"):
        assert ask(made, "api/runs", headers={"Host": host}).status_code == 200, host


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_get_is_answered(made, method):
    async def asking():
        async with page(made) as client:
            return await client.request(method, "api/runs")

    response = asyncio.run(asking())
    assert response.status_code == 405
    assert "Access-Control-Allow-Origin" not in response.headers


def test_every_answer_forbids_what_the_page_does_not_need(made):
    for response in ask(made, "", "index.html", "api/runs", "api/runs/nothing", "nothing"):
        policy = response.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Referrer-Policy"] == "no-referrer"


def test_another_host_needs_the_token_of_its_address(made):
    async def asking():
        async with page(made, "0.0.0.0") as client:
            base = str(client.base_url)
            token = base.rstrip("/").rpartition("/")[2]
            bare = base.removesuffix(f"{token}/")
            other = token[:-1] + ("y" if token.endswith("x") else "x")
            named = {"Host": "my.machine:80"}
            with_token = await client.get(f"{base}api/runs", headers=named)
            return token, with_token, [await client.get(bare + path) for path in ("", "api/runs", f"{other}/")]

    token, with_token, without = asyncio.run(asking())
    assert len(token) >= 32
    assert with_token.status_code == 200
    assert [response.status_code for response in without] == [404, 404, 404]
    assert not any("games" in response.text or token in response.text for response in without)


def test_the_pages_files_are_served_and_not_sent_twice(made):
    async def asking():
        async with page(made) as client:
            for name, (_, content) in static_files().items():
                first = await client.get(name)
                assert first.content == content
                again = await client.get(name, headers={"If-None-Match": first.headers["ETag"]})
                assert (again.status_code, again.content) == (304, b"")
            assert (await client.get("")).content == static_files()["index.html"][1]

    assert "index.html" in static_files()
    asyncio.run(asking())


def test_two_runs_are_compared_as_the_command_does(tmp_path, capsys):
    """With episodes that failed, that were played again, and with tokens counted in each way that there is."""
    from agentgym.cli import main

    for name, kind in (("a", "random"), ("b", "expert")):
        run = write_evaluation(tmp_path / name, [("wordle", kind)], n=5, k=2)
        (file,) = (run / "episodes").iterdir()
        one, two, three, four, *rest = play("wordle", policy_maker(kind), 5, 2)
        file.unlink()
        calls = {"requests": 3, "usage": {"prompt_tokens": 5, "completion_tokens": 70}}
        turns = [replace(turn, usage={"completion_tokens": 9}) for turn in two.turns]
        write_jsonl(
            file, [failed(one), failed(two), replace(one, metadata={"calls": calls}), replace(three, turns=turns)]
        )
        write_jsonl(file, [failed(three), failed(four), *(rest if name == "a" else rest[:-1])])
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert value(ask(tmp_path, "api/compare?a=a&b=b")) == printed
    assert {"success", "tokens"} <= set(printed["cells"][0]["measures"])
    assert printed["cells"][0]["errors_a"] == 2


def test_the_details_of_a_cell_are_those_of_the_results_before_these_are_written(tmp_path):
    run = write_evaluation(tmp_path / "run", [("wordle", "random")], n=4, k=2)
    (file,) = (run / "episodes").iterdir()
    (lost,) = play("wordle", policy_maker("random"), 1, 1)
    write_jsonl(file, [replace(failed(lost), task_id="lost")])
    (cell,) = value(ask(tmp_path, "api/runs/run"))["cells"]
    (told,) = results_in(run).to_json()["cells"]
    same = (
        "episodes",
        "errors",
        "ends",
        "error_texts",
        "by_tag",
        "by_difficulty",
        "rewards",
        "reward_low",
        "success_high",
    )
    assert {name: cell["result"][name] for name in same} == {name: told[name] for name in same}
    (cause,) = cell["result"]["error_texts"]
    found = value(ask(tmp_path, f"api/runs/run/episodes?cause={quote(cause)}"))
    assert [row["task"] for row in found["rows"]] == ["lost"]


def test_training_runs_are_compared_by_their_last_evaluations(made):
    found = value(ask(made, "api/compare?a=lake&b=lake"))
    assert [(cell["env"], cell["agent_a"]) for cell in found["cells"]] == [("frozen_lake", "step 2")]


def test_a_comparison_is_made_again_when_a_run_has_grown(tmp_path):
    run = write_evaluation(tmp_path / "run", [("frozen_lake", "expert")], n=2, k=1)
    (file,) = (run / "episodes").iterdir()
    more = play("frozen_lake", policy_maker("expert"), 3, 1)[2:]

    async def asking():
        async with page(tmp_path) as client:
            before = await client.get("api/compare?a=run&b=run")
            write_jsonl(file, more)
            return before, await client.get("api/compare?a=run&b=run")

    before, after = asyncio.run(asking())
    assert [value(r)["cells"][0]["episodes_a"] for r in (before, after)] == [2, 3]


def test_a_run_that_names_files_elsewhere_is_not_compared(tmp_path):
    run = write_evaluation(tmp_path / "runs" / "run", [("frozen_lake", "expert")], n=1, k=1)
    manifest = json.loads((run / "run.json").read_text())
    (tmp_path / "secret.jsonl").write_text("root: a secret")
    for file in ("../../secret.jsonl", str(tmp_path / "secret.jsonl")):
        manifest["cells"][0]["file"] = file
        (run / "run.json").write_text(json.dumps(manifest))
        response = ask(tmp_path / "runs", "api/compare?a=run&b=run")
        assert (response.status_code, "is not a regular file inside the run" in response.text) == (400, True)
    os.mkfifo(run / "episodes" / "pipe.jsonl")
    manifest["cells"][0]["file"] = "episodes/pipe.jsonl"
    (run / "run.json").write_text(json.dumps(manifest))
    assert ask(tmp_path / "runs", "api/compare?a=run&b=run").status_code == 400


def test_long_answers_are_compressed_for_those_who_take_it(made):
    path = "api/runs/games/episodes"
    zipped, plain = ask(made, path), ask(made, path, headers={"Accept-Encoding": "identity"})
    assert zipped.headers["Content-Encoding"] == "gzip"
    assert "Content-Encoding" not in plain.headers
    assert zipped.json() == plain.json()


def test_numbers_that_json_does_not_have_are_null(tmp_path):
    run = write_evaluation(tmp_path / "run", [("frozen_lake", "expert")], n=1, k=1)
    (file,) = (run / "episodes").iterdir()
    record = json.loads(file.read_text())
    record["turns"][0]["info"] |= {"nan": float("nan"), "large": 12345.5}
    file.write_text(json.dumps(record).replace("12345.5", "1e999") + "\n")
    row = value(ask(tmp_path, "api/runs/run/episodes"))["rows"][0]
    text = ask(tmp_path, f"api/runs/run/episodes/{row['key']}").text
    info = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in the answer"))["episode"]["turns"][0][
        "info"
    ]
    assert (info["nan"], info["large"]) == (None, None)


async def next_event(lines):
    async with asyncio.timeout(PATIENCE):
        async for line in lines:
            if line.startswith("data: "):
                return json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended")


def test_a_live_run_is_followed(tmp_path):
    run = write_evaluation(tmp_path / "run", [("frozen_lake", "expert")], n=1, k=1)
    (file,) = (run / "episodes").iterdir()
    more = play("frozen_lake", policy_maker("expert"), 3, 1)[1:]
    lock = os.open(run / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)

    async def following():
        async with page(tmp_path) as client, client.stream("GET", "api/events?run=run") as stream:
            assert stream.headers["Content-Type"] == "text/event-stream"
            assert "default-src 'none'" in stream.headers["Content-Security-Policy"]
            lines = stream.aiter_lines()
            heard = [await next_event(lines)]
            key = (await client.get("api/runs/run/episodes")).json()["rows"][0]["key"]
            write_jsonl(file, more[:1])
            heard.append(await next_event(lines))
            with file.open("a") as out:
                out.write('{"half a line')
            write_jsonl(file, more[1:])
            heard.append(await next_event(lines))
            os.close(lock)
            heard.append(await next_event(lines))
            rows = (await client.get("api/runs/run/episodes")).json()["rows"]
            return heard, key, rows

    heard, key, rows = asyncio.run(following())
    assert [(e["run"], e["episodes"], e["live"]) for e in heard] == [
        ("run", 1, True),
        ("run", 2, True),
        ("run", 3, True),
        ("run", 3, False),
    ]
    assert rows[0]["key"] == key, "a key stays the same as the file grows"


def test_the_server_ends_though_somebody_listens(made):
    async def ending():
        served = await serve(Runs(roots_of([made])))
        client = httpx.AsyncClient(base_url=served.url, timeout=PATIENCE)
        async with client, client.stream("GET", "api/events?run=games") as stream:
            await next_event(stream.aiter_lines())
            async with asyncio.timeout(PATIENCE / 2):
                await served.close()

    asyncio.run(ending())


def test_many_ask_while_a_large_file_is_read(tmp_path, monkeypatch):
    """The first answers are of a part; asked again, all is there, each episode once."""
    run = write_evaluation(tmp_path / "run", [("frozen_lake", "expert")], n=1, k=1)
    (file,) = (run / "episodes").iterdir()
    record = json.loads(file.read_text())
    with file.open("a") as out:
        for i in range(3000):
            out.write(json.dumps(record | {"task_id": f"t{i}"}) + "\n")
    monkeypatch.setattr("agentgym.viewer.answers.PATIENCE", 0.001)
    monkeypatch.setattr("agentgym.viewer.answers.SEARCH_PATIENCE", 0.001)

    async def asking():
        async with page(tmp_path) as client:
            parts = await asyncio.gather(*(client.get("api/runs/run/episodes?text=left&sort=task") for _ in range(8)))
            assert all(part.status_code == 200 for part in parts)
            async with asyncio.timeout(PATIENCE):
                while True:
                    found = (await client.get("api/runs/run/episodes?limit=1")).json()
                    if found["indexing"] == 1.0:
                        return [part.json() for part in parts], found

    parts, whole = asyncio.run(asking())
    assert any(part["indexing"] < 1 or part["searching"] < 1 for part in parts)
    assert all(part["matching"] <= part["total"] <= 3001 for part in parts)
    assert (whole["total"], whole["matching"]) == (3001, 3001)


def test_a_failure_of_the_viewer_itself_is_told(made, monkeypatch):
    monkeypatch.setattr("agentgym.viewer.answers.details", lambda run: 1 / 0)
    response = ask(made, "api/runs/games")
    assert response.status_code == 500
    assert "ZeroDivisionError" in response.json()["error"]
