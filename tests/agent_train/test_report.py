"""The page about a run: whole in one file, right in its numbers, and safe whatever a model wrote."""

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from run_cases import clock, episode, group, learned, new_run

from agent_train.config.schema import Config, TrainerConfig
from agent_train.report.page import RESULT_KEYS, draw_curves, main, read_result, write_report, write_result
from agent_train.report.tracking import Tracker, step_metrics
from agent_train.trainer.run_folder import RunFolder
from agentgym.core.trajectory import write_jsonl
from agentgym.viewer.charts import Frame, Palette, Series, line_chart, nice_ticks, stacked_bars

SVG = "{http://www.w3.org/2000/svg}"
PALETTE = Palette(("#111111", "#222222"), text="#000000", grid="#eeeeee")
EVIL = "<script>alert('x')</script><img src=x onerror=alert(1)>\"'&"
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Reads a page as a browser would: which tags open, whether all are closed, and what they refer to."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.references: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def a_run(tmp_path: Path, steps: int = 4, said: str = "left") -> RunFolder:
    """A run of some steps, with evaluations before, in the middle and after."""
    run = new_run(Config(trainer=TrainerConfig(name="one", runs_dir=str(tmp_path / "runs"))), ["agent-train", EVIL])
    with Tracker(run, steps, Console(quiet=True)) as track:
        track.sft_step(1, 1, loss=2.0, tokens=10)
        for step in range(steps + 1):
            if step:
                groups = [group("a", [1.0, 0.0])]
                track.train_step(step_metrics(step, groups, clock(), 0, **learned()))
                write_jsonl(run.trajectories / f"train-{step:06d}.jsonl", groups[0].trajectories)
            if step % 2 == 0:
                played = [episode(f"t{i}{said}", reward=float(i < 2 + step), said=said) for i in range(8)]
                played.append(episode("lost", error=f"RuntimeError: {said}"))
                track.evaluation(step, played)
                write_jsonl(run.trajectories / f"eval-{step:06d}.jsonl", played)
    return run


def text_of(run: RunFolder) -> str:
    return write_report(run).read_text(encoding="utf-8")


def test_the_page_is_well_formed_and_needs_nothing_else(tmp_path):
    text = text_of(a_run(tmp_path))
    page = Page(text)
    assert page.open == []
    assert page.references == []
    assert "script" not in page.tags
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "prefers-color-scheme: dark" in text


def test_the_page_shows_the_numbers_of_the_run(tmp_path):
    words = " ".join(Page(text_of(a_run(tmp_path))).words)
    for fact in (
        "25.0%",
        "75.0%",
        "after step 4",
        "4 steps",
        "48",
        "1.0e-06",
        "held-out, start",
        "held-out tasks, before training",
        "held-out tasks, after step 4",
        "state 0",
        "RuntimeError: left",
    ):
        assert fact in words


def test_what_a_model_wrote_is_shown_and_never_run(tmp_path):
    page = Page(text_of(a_run(tmp_path, said=EVIL)))
    assert page.open == []
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert EVIL in "".join(page.words)


def test_successes_failures_and_errors_are_shown(tmp_path):
    text = text_of(a_run(tmp_path))
    for kind in ("success", "failure", "error"):
        assert len(re.findall(rf'<span class="badge \w+">{kind}</span>', text)) >= 2, (
            "of the first evaluation and of the last"
        )


def test_the_curves_have_as_many_points_as_were_measured(tmp_path):
    charts = [
        ElementTree.fromstring(svg)
        for svg in re.findall(r"<svg.*?</svg>", text_of(a_run(tmp_path, steps=6)), re.DOTALL)
    ]
    points = {chart.get("aria-label"): len(chart.findall(f"{SVG}circle")) for chart in charts}
    bars = {chart.get("aria-label"): len(chart.findall(f"{SVG}rect/{SVG}title")) for chart in charts}
    assert points["Success (band: 95% interval)"] == 4 + 6
    assert points["Training reward"] == points["Gradient norm"] == 6
    assert points["Warm start: loss, nats a token"] == 1
    assert bars["Seconds a step"] == 4 * 6


def test_sampled_tokens_are_shaded_by_how_unlikely_they_were(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    run = a_run(tmp_path)
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 3, "<b>": 4, "c": 5, "?": 0}, unk_token="?"))
    folder = run.checkpoints / "step-000004"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (run.checkpoints / "latest").write_text(folder.name)
    text = text_of(run)
    assert '<span class="token" style="--a: 0.38" title="50.0%">a</span>' in text
    assert 'title="25.0%">&lt;b&gt;</span><span title="100.0%">c</span>' in text
    assert Page(text).open == []


def test_the_page_can_be_made_again_from_the_folder_alone(tmp_path, capsys):
    run = a_run(tmp_path)
    first = text_of(run)
    run.report.unlink()
    assert main([str(run.path)]) == 0
    assert run.report.read_text(encoding="utf-8") == first
    assert capsys.readouterr().out.strip() == str(run.report)


def test_a_run_without_evaluation_or_with_a_cut_file_has_a_page(tmp_path):
    run = new_run(Config(trainer=TrainerConfig(name="two", runs_dir=str(tmp_path))))
    with Tracker(run, 1, Console(quiet=True)) as track:
        unknown = learned(loss=float("nan"), gap_mean=float("nan"))
        track.train_step(step_metrics(1, [group("a", [1.0, 0.0])], clock(), 0, **unknown))
    write_jsonl(run.trajectories / "train-000001.jsonl", [episode("a"), episode("b")])
    cut = (run.trajectories / "train-000001.jsonl").read_text()[:-20]
    (run.trajectories / "train-000001.jsonl").write_text(cut)
    words = " ".join(Page(text_of(run)).words)
    assert "training, step 1" in words
    assert "nan" not in words


def test_what_a_crash_has_left_of_lines_is_named_and_the_rest_is_shown(tmp_path):
    run = a_run(tmp_path)
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    run.metrics.write_bytes(b"".join([*lines[:2], lines[2][:30], *lines[3:]]))
    file = sorted(run.trajectories.iterdir())[0]
    file.write_text("{\n" + file.read_text())
    words = " ".join(Page(text_of(run)).words)
    assert "1 line of metrics.jsonl cannot be read and are left out; the first is line 3" in words
    assert f"{file.name}:1: not a trajectory" in words
    assert "Held-out evaluations" in words


def test_a_folder_that_is_no_run_is_exit_code_2(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err


def a_result(path: Path, seed: int, end: float = 0.95) -> None:
    write_result(
        path,
        env="toy",
        seed=seed,
        start=0.4,
        end=end,
        minutes=7.123,
        curve=[(0, 0.4), (10, 0.7), (20, end)],
        command="agent-train +env=toy",
    )


def test_a_result_has_exactly_its_keys(tmp_path):
    a_result(tmp_path / "results" / "toy-0.json", 0)
    record = json.loads((tmp_path / "results" / "toy-0.json").read_text())
    assert tuple(record) == RESULT_KEYS == ("env", "seed", "start", "end", "minutes", "curve", "command")
    assert record["curve"] == [[0, 0.4], [10, 0.7], [20, 0.95]]
    write_result(
        tmp_path / "b.json", env="toy", seed=1, start=0, end=1, minutes=1, curve=[], command="c", details={"cores": 2}
    )
    assert read_result(tmp_path / "b.json")["details"] == {"cores": 2}


@pytest.mark.parametrize("text", ["{", "[]", '{"env": "x"}'])
def test_what_is_no_result_is_refused_by_name(tmp_path, text):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ValueError, match=r"bad\.json: not a result"):
        read_result(tmp_path / "bad.json")


def test_one_picture_of_several_results(tmp_path):
    for seed in range(3):
        a_result(tmp_path / f"{seed}.json", seed)
    out = tmp_path / "pictures" / "curves.svg"
    assert main(["--curves", str(out), *(str(tmp_path / f"{seed}.json") for seed in range(3))]) == 0
    picture = ElementTree.parse(out).getroot()
    assert len(picture.findall(f"{SVG}circle")) == 9
    words = [text.text for text in picture.findall(f"{SVG}text")]
    for word in ("toy", "seed 0", "seed 1", "seed 2", "training step", "held-out success", "0%", "100%"):
        assert word in words
    assert "var(" not in out.read_text()


def test_results_of_several_environments_are_told_apart(tmp_path):
    records = [{"env": env, "seed": 0, "curve": [[0, 0.5]]} for env in ("a", "b")]
    draw_curves(records, tmp_path / "x.svg")
    assert {"a 0", "b 0"} <= {
        text.text for text in ElementTree.parse(tmp_path / "x.svg").getroot().findall(f"{SVG}text")
    }


def circles(svg: str) -> list[tuple[float, float]]:
    return [(float(c.get("cx")), float(c.get("cy"))) for c in ElementTree.fromstring(svg).findall(f"{SVG}circle")]


def test_a_line_lies_where_its_numbers_say():
    points = circles(line_chart([Series("s", [(0, 0.0), (5, 0.5), (10, 1.0)])], Frame("t", y_range=(0, 1)), PALETTE))
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x0 < x1 < x2
    assert y0 > y1 > y2
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1)
    assert y1 == pytest.approx((y0 + y2) / 2, abs=0.1)


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(0, 0.0)],
        [(3, 5.0)],
        [(0, 2.0), (1, 2.0)],
        [(0, -1.0), (1, -3.0)],
        [(0, float("nan")), (1, 1.0)],
        [(0, 1e-9), (1, 3e-9)],
    ],
)
def test_any_data_makes_a_chart_within_its_frame(points):
    frame = Frame("t")
    for across, down in circles(line_chart([Series("s", points, [(x, y, y) for x, y in points])], frame, PALETTE)):
        assert 0 <= across <= frame.width
        assert 0 <= down <= frame.height


def test_bars_stand_on_each_other():
    svg = ElementTree.fromstring(stacked_bars(["a", "b"], [(1, [1.0, 3.0]), (2, [2.0, 0.0])], Frame("t"), PALETTE))
    bars = [r for r in svg.findall(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    (low, high) = bars[:2]
    assert float(high.get("height")) == pytest.approx(3 * float(low.get("height")), rel=0.02)
    assert float(high.get("y")) + float(high.get("height")) == pytest.approx(float(low.get("y")), abs=0.1)


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0.41, 0.97), (-3, 12), (1e-7, 4e-7), (5, 5), (0, 0), (-2, -2), (0, 123456)]
)
def test_ticks_are_round_and_span_the_data(low, high):
    ticks = nice_ticks(low, high, 5)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert 2 <= len(ticks) <= 9
    sizes = [b - a for a, b in pairwise(ticks)]
    assert sizes == pytest.approx([sizes[0]] * len(sizes))
