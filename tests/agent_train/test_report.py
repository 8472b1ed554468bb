"""Reports and pictures made again from what a run left."""

import json
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from run_cases import clock, episode, group, learned, new_run

from agent_train.config.schema import Config, TrainerConfig
from agent_train.report.__main__ import main
from agent_train.report.curves import (
    RESULT_KEYS,
    Series,
    curves_svg,
    draw_curves,
    nice_ticks,
    read_result,
    write_result,
)
from agent_train.report.metrics import Summary, read_metrics, step_metrics
from agent_train.report.tracking import Tracker
from agentgym.core.trajectory import write_jsonl

SVG = "{http://www.w3.org/2000/svg}"


def test_a_report_is_made_again_from_the_folder_alone(tmp_path, capsys):
    run = new_run(Config(trainer=TrainerConfig(name="one", runs_dir=str(tmp_path / "runs"))))
    with Tracker(run, 1, Console(quiet=True)) as track:
        track.train_step(step_metrics(1, [group("a", [1.0, 0.0])], clock(), 0, **learned(loss=float("nan"))))
        write_jsonl(run.trajectories / "train-000001.jsonl", [episode("a"), episode("b", error="lost")])
    assert main([str(run.path)]) == 0
    assert capsys.readouterr().out.strip() == str(run.report)
    text = run.report.read_text(encoding="utf-8")
    data = json.loads(text.partition('id="agentgym-data">')[2].partition("</script>")[0])
    assert data["metrics"]["one"] == read_metrics(run.metrics)
    assert [row["task"] for row in data["rows"]["one"]] == ["a", "b"]


def test_a_folder_that_is_no_run_is_exit_code_2(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err


def a_result(path: Path, seed: int, end: float = 0.95) -> None:
    curve = [(0, 0.4), (10, 0.7), (20, end)]
    summary = Summary(minutes=7.123, steps=20, episodes=1, tokens=1, curve=curve)
    write_result(path, "toy", seed, summary, "agent-train +env=toy")


def test_a_result_has_exactly_its_keys(tmp_path):
    a_result(tmp_path / "results" / "toy-0.json", 0)
    record = json.loads((tmp_path / "results" / "toy-0.json").read_text())
    assert tuple(record) == RESULT_KEYS == ("env", "seed", "start", "end", "minutes", "curve", "command")
    assert record["curve"] == [[0, 0.4], [10, 0.7], [20, 0.95]]
    assert (record["start"], record["end"], record["minutes"]) == (0.4, 0.95, 7.12)


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
    assert len(picture.findall(f".//{SVG}circle")) == 9
    words = [text.text for text in picture.findall(f".//{SVG}text")]
    for word in ("toy", "seed 0", "seed 1", "seed 2", "training step", "held-out success", "0%", "100%"):
        assert word in words


def test_results_of_several_environments_are_told_apart(tmp_path):
    records = [{"env": env, "seed": 0, "curve": [[0, 0.5]]} for env in ("a", "b")]
    draw_curves(records, tmp_path / "x.svg")
    assert {"a 0", "b 0"} <= {
        text.text for text in ElementTree.parse(tmp_path / "x.svg").getroot().findall(f"{SVG}text")
    }


def circles(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    svg = ElementTree.fromstring(curves_svg([Series("s", points, [(x, y, y) for x, y in points])], "t"))
    return [(float(c.get("cx")), float(c.get("cy"))) for c in svg.findall(f".//{SVG}circle")]


def test_a_line_lies_where_its_numbers_say():
    (x0, y0), (x1, y1), (x2, y2) = circles([(0, 0.0), (5, 0.5), (10, 1.0)])
    assert x0 < x1 < x2
    assert y0 > y1 > y2
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1)
    assert y1 == pytest.approx((y0 + y2) / 2, abs=0.1)


@pytest.mark.parametrize("count", [1, 3, 7, 12])
def test_the_names_of_lines_neither_cover_each_other_nor_leave_the_picture(count):
    names = [f"a recipe of {i}, 3 seeds" for i in range(count)]
    svg = ElementTree.fromstring(curves_svg([Series(name, [(0, 0.0)]) for name in names], "mean, least and most"))
    found = [(t.text, int(t.get("x")), int(t.get("y"))) for t in svg.findall(f"{SVG}text")]
    lines = {}
    for text, left, row in found:
        lines.setdefault(row, []).append((left, left + 7 * len(text)))
    for spans in map(sorted, lines.values()):
        assert spans[0][0] >= 0
        assert spans[-1][1] <= 760
        assert all(end < following for (_, end), (following, _) in pairwise(spans))
    assert [text for text, _, _ in found] == ["mean, least and most", *names]
    (moved,) = svg.findall(f"{SVG}g")
    assert moved.get("transform") == f"translate(0 {max(lines) - 18})"
    assert int(svg.get("height")) == 420 + max(lines) - 18
    colors = [rect.get("fill") for rect in svg.findall(f"{SVG}rect")[1:]]
    assert len(set(colors)) == min(count, 8)


@pytest.mark.parametrize("points", [[], [(0, 0.0)], [(3, 0.5)], [(0, 0.2), (1, 0.2)], [(0, float("nan")), (1, 1.0)]])
def test_any_curve_lies_within_its_frame(points):
    for across, down in circles(points):
        assert 0 <= across <= 760
        assert 0 <= down <= 420


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.41, 0.97), (-3, 12), (1e-7, 4e-7), (0, 123456)])
def test_ticks_are_round_and_span_the_data(low, high):
    ticks = nice_ticks(low, high, 5)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert 2 <= len(ticks) <= 9
    sizes = [b - a for a, b in pairwise(ticks)]
    assert sizes == pytest.approx([sizes[0]] * len(sizes))
