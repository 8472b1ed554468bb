"""Measurements: what a step amounts to, what is shown, and what stays in metrics.jsonl."""

import io
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from run_cases import clock, episode, group, learned, new_run

from agent_train.config.schema import Config, TrainerConfig
from agent_train.report.display import COLUMNS
from agent_train.report.metrics import Clock, eval_metrics, read_metrics, step_metrics
from agent_train.report.tracking import Tracker
from agent_train.trainer.run_folder import RunFolder
from agentgym.core.trajectory import Group


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return new_run(Config(trainer=TrainerConfig(name="one", runs_dir=str(tmp_path))))


def tracker(run: RunFolder, steps: int = 3, *, terminal: bool = False, width: int = 160) -> tuple[Tracker, io.StringIO]:
    screen = io.StringIO()
    return Tracker(run, steps, Console(file=screen, force_terminal=terminal, width=width)), screen


def test_laps_of_a_clock_add_up(monkeypatch):
    now = [10.0]
    monkeypatch.setattr("agent_train.report.metrics.time.monotonic", lambda: now[0])
    watch = Clock()
    for now[0], part in ((11.0, "rollout"), (13.0, "learn"), (17.0, "rollout")):
        watch.lap(part)
    assert watch.seconds == {"rollout": 1.0 + 4.0, "learn": 2.0}


def test_a_step_in_numbers():
    failed = episode("b", 2, error="RuntimeError: the server is gone")
    groups = [group("a", [1.0, 0.0]), Group("b", [*group("b", [1.0, 1.0]).trajectories, failed])]
    step = step_metrics(7, groups, clock(), 42, **learned())
    assert (step.step, step.episodes, step.failed, step.weights_checksum) == (7, 4, 1, 42)
    assert step.reward == step.success == 0.75, "a failed episode is no reward of 0"
    assert step.reward_std == pytest.approx(math.sqrt(0.1875))
    assert step.mixed_groups == 0.5
    assert step.turns == 2
    assert step.sampled_tokens == 5 * 2 * 3, "the tokens of a failed episode were sampled too"
    assert step.tokens_per_second == 15.0
    assert (step.rollout_seconds, step.learn_seconds, step.sync_seconds, step.step_seconds) == (2.0, 1.0, 0.5, 3.5)


def test_rewards_that_differ_by_rounding_alone_do_not_mix_a_group():
    groups = [group("a", [0.1 + 0.2, 0.3]), group("b", [0.3, 0.2])]
    step = step_metrics(1, groups, clock(), 0, **learned())
    assert step.mixed_groups == step.health.flat_groups == 0.5, "what is not mixed is flat"


def test_the_environment_s_numbers_have_means_over_the_episodes_that_tell_them():
    told = [{"success": 1.0, "dropped": 2.0}, {"success": 0.0, "dropped": 0.0, "doubted": 1.0}]
    played = [replace(episode(f"t{i}"), metrics=metrics) for i, metrics in enumerate(told)]
    failed = replace(episode("x", error="lost"), metrics={"dropped": 9.0})
    assert eval_metrics(1, [*played, failed]).env == {"doubted": 1.0, "dropped": 1.0}
    assert step_metrics(1, [Group("t", [*played, failed])], clock(), 0, **learned()).env == {
        "doubted": 1.0,
        "dropped": 1.0,
    }


def test_an_evaluation_in_numbers():
    played = [episode(f"t{i}", reward=float(i < 30)) for i in range(40)]
    metrics = eval_metrics(10, [*played, episode("x", error="lost")])
    assert (metrics.success, metrics.episodes, metrics.failed) == (0.75, 40, 1)
    assert 0.55 < metrics.low < 0.75 < metrics.high < 0.90


def test_an_evaluation_of_which_nothing_is_left_knows_nothing():
    metrics = eval_metrics(0, [episode("x", error="lost")])
    assert math.isnan(metrics.success)
    assert (metrics.low, metrics.high) == (0.0, 1.0)


def test_every_measurement_is_on_disk_at_once(run):
    track, screen = tracker(run)
    track.sft_step(1, 2, loss=3.0, tokens=100)
    track.evaluation(0, [episode("t", reward=0.0)])
    step = step_metrics(1, [group("a", [1.0, 0.0])], clock(), 7, **learned(entropy=0.5))
    track.train_step(replace(step, journal_turns=1200))
    records = read_metrics(run.metrics)  # the tracker is still open
    assert [(r["kind"], r["step"]) for r in records] == [("sft", 1), ("eval", 0), ("train", 1)]
    assert records[0]["loss"] == 3.0
    assert records[2]["update"]["entropy"] == 0.5
    assert records[2]["weights_checksum"] == 7
    assert "step 1: 1,200 turns were sampled before the run was resumed" in screen.getvalue()
    assert [r["elapsed"] for r in records] == sorted(r["elapsed"] for r in records)
    track.close()
    track.close()


def test_numbers_that_are_not_finite_are_null(run):
    track, _ = tracker(run)
    track.train_step(step_metrics(1, [group("a", [1.0])], clock(), 0, **learned(grad_norm=math.inf, loss=math.nan)))
    track.close()
    text = run.metrics.read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert json.loads(text)["update"]["grad_norm"] is None


def test_a_last_line_that_a_crash_cut_off_is_left_out(run):
    track, _ = tracker(run)
    for step in (1, 2):
        track.sft_step(step, 2, loss=1.0, tokens=1)
    track.close()
    text = run.metrics.read_text()
    run.metrics.write_text(text[:-10])
    assert [r["step"] for r in read_metrics(run.metrics)] == [1]


@pytest.mark.parametrize("torn", [b'{"kind": "tr', b"\0\0\0", b"\xff\xfe", b"7", b"{}", b'{"step": 3}'])
def test_a_broken_line_in_the_middle_is_left_out(run, torn):
    run.metrics.write_bytes(b'{"kind": "a", "step": 1}\n' + torn + b'\n{"kind": "a", "step": 3}\n{"ki')
    assert [record["step"] for record in read_metrics(run.metrics)] == [1, 3]


def test_off_a_terminal_each_step_is_one_line(run):
    track, screen = tracker(run)
    with track:
        track.phase("starting vLLM", "1 s: [INFO] loading")
        track.phase("starting vLLM", "2 s: [INFO] loading")
        track.evaluation(0, [episode("t")])
        lags = {"0": {"mean": 1e-6}, "2": {"mean": 0.02}}
        for step in (1, 2):
            track.train_step(step_metrics(step, [group("a", [1.0, 0.0])], clock(), 0, **learned(gap_by_lag=lags)))
    lines = screen.getvalue().splitlines()
    assert len(lines) == 4, "a phase is not printed again for every new detail"
    assert "starting vLLM: 1 s: [INFO] loading" in lines[0]
    assert "held-out success after step 0: 100.0%" in lines[1]
    for words in (
        "step 1/3",
        "reward 0.500",
        "success 50.0%",
        "6 tokens/s",
        "rollout 2.0 s",
        "learn 1.0 s",
        "sync 0.50 s",
        "gap 1.0e-06",
        "grad norm 0.500",
        "gap by lag 0: 1.0e-06, 2: 2.0e-02",
        "left",
    ):
        assert words in lines[2]
    assert "\x1b" not in screen.getvalue()


@pytest.mark.parametrize("gone", ["reader", "room"])
def test_a_run_goes_on_without_an_output_and_says_so_once(run, monkeypatch, capfd, gone):
    """As under `agent-train ... | head`, and `> FILE` on a full disk."""
    if gone == "reader":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open("/dev/full", os.O_WRONLY)
    out = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stdout", out)
    with Tracker(run, 3) as track:
        track.note("a line")
        track.evaluation(0, [episode("t")])
        track.finish()
    out.close()  # as at the end of the process: nothing is held back
    assert [record["kind"] for record in read_metrics(run.metrics)] == ["eval"]
    (told,) = capfd.readouterr().err.splitlines()
    assert told.startswith("agent-train: the run goes on, but nothing more is shown: [Errno ")


@pytest.mark.parametrize("noted", [False, True])
def test_a_run_goes_on_when_its_terminal_is_closed(run, monkeypatch, noted):
    ours, its = os.openpty()
    with os.fdopen(its, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr("agent_train.report.display.REFRESH_PER_SECOND", 1e-3)
        with Tracker(run, 3) as track:
            assert track._display.console.is_terminal
            os.close(ours)
            if noted:
                track.note("a line")
            track.train_step(step_metrics(1, [group("a", [1.0, 0.0])], clock(), 0, **learned()))
            assert track.finish().steps == 1


def test_off_a_terminal_a_long_step_shows_its_progress_and_a_quick_one_does_not(run, monkeypatch):
    now = 100.0
    monkeypatch.setattr("agent_train.report.display.time.monotonic", lambda: now)
    track, screen = tracker(run)
    with track:
        track.activity("playing step 1")
        track.episode_ended(episode("a"))
        assert not screen.getvalue()
        now += 16
        track.episode_ended(episode("a", 1, error="no such table"))
        track.episode_ended(episode("a"))
        assert screen.getvalue().splitlines() == [
            "[    16 s] playing step 1, 16 s, 2 episodes ended, 1 failed (no such table)"
        ]
        now += 1
        track.activity("training step 1")
        assert screen.getvalue().splitlines()[1:] == ["[    17 s] training step 1"], "what came before was long"
        now += 1
        track.activity("playing step 2")
        assert len(screen.getvalue().splitlines()) == 2


def test_a_failed_episode_is_told_with_its_error(run):
    track, screen = tracker(run)
    failed = episode("a", 1, error="Traceback\nRuntimeError: no such [table]")
    for one in (episode("a"), failed):
        track.episode_ended(one)
    played = [episode("a"), failed]
    track.train_step(step_metrics(1, [Group("a", played)], clock(), 0, **learned()), played)
    track.close()
    assert (
        "step 1: 1 of 2 episodes failed and were left out; the last error: RuntimeError: no such [table]"
        in screen.getvalue()
    )


def test_a_step_tells_the_error_of_its_own_episodes_also_if_they_failed_after_they_had_ended(run):
    """As those of a group do that its judge could not judge. Meanwhile an episode of another step fails."""
    track, screen = tracker(run)
    played = [episode("a", 0), episode("a", 1)]
    for one in (*played, episode("b", error="no such table")):
        track.episode_ended(one)
    for one in played:
        one.end, one.error = "error", "judge of 2 candidates: no readable verdict"
    track.train_step(step_metrics(1, [Group("a", played)], clock(), 0, **learned()), played)
    track.close()
    told = "2 of 2 episodes failed and were left out; the last error: judge of 2 candidates: no readable verdict"
    assert f"step 1: {told}" in screen.getvalue()


def test_text_of_models_in_errors_and_names_ends_no_run_and_commands_no_terminal(run, capsys):
    with Tracker(run, 3) as track:
        metrics = step_metrics(1, [group("a", [1.0, 0.0])], clock(), 0, **learned())
        failed = episode("t", error="ValueError: no move \ud83d\x1b[2J")
        track.train_step(replace(metrics, failed=1, env={"calls/\ud83d": 2.0}), [failed])
        track.note("a file \udcff")
    out = capsys.readouterr().out
    assert r"the last error: ValueError: no move \ud83d\x1b[2J" in out
    assert r"a file \udcff" in out
    assert read_metrics(run.metrics)[0]["env"] == {"calls/\ud83d": 2.0}


def test_an_episode_that_was_run_again_is_counted_and_told(run):
    track, screen = tracker(run)
    again = episode("a", 1)
    again.metadata["errors"] = ["frozen_lake at http://there:8000: the session is lost"]
    for one in (episode("a"), again):
        track.episode_ended(one)
    step = step_metrics(1, [Group("a", [episode("a"), again])], clock(), 0, **learned())
    track.train_step(step, [episode("a"), again])
    track.episode_ended(again)
    track.evaluation(1, [again])
    track.close()
    assert (step.episodes, step.failed, step.retried) == (2, 0, 1)
    assert [record["retried"] for record in read_metrics(run.metrics)] == [1, 1]
    told = "run again after an error; the last: frozen_lake at http://there:8000: the session is lost"
    assert f"step 1: 1 of 2 episodes were {told}" in screen.getvalue()
    assert "1 episodes, 1 run again after an error" in screen.getvalue()


@pytest.mark.parametrize("width", [80, 160])
def test_on_a_terminal_a_table_of_the_last_steps_lives(run, width):
    track, screen = tracker(run, terminal=True, width=width)
    with track:
        track.train_step(step_metrics(1, [group("a", [1.0, 0.0])], clock(), 0, **learned()))
        track.evaluation(1, [episode("t")])
        track.phase("rollout")
        track.episode_ended(episode("a"))
    shown = screen.getvalue()
    for words in (*COLUMNS, "0.500", "100.0%", "1/3"):
        assert words in shown
    assert ("grad norm" in shown) == (width == 160)


def test_the_closing_table_and_the_summary(run):
    track, screen = tracker(run)
    with track:
        for step, rewards in ((0, [1.0, 0.0]), (2, [1.0, 1.0]), (3, [1.0, 1.0, 1.0, 0.0])):
            track.evaluation(step, [episode(f"t{i}", reward=r) for i, r in enumerate(rewards)])
        track.train_step(step_metrics(1, [group("a", [1.0, 0.0])], clock(), 0, **learned()))
        (run.checkpoints / "step-000001").mkdir()
        (run.checkpoints / "latest").write_text("step-000001\n")
        summary = track.finish("interrupted")
    assert summary.curve == [(0, 0.5), (2, 1.0), (3, 0.75)]
    assert (summary.steps, summary.episodes, summary.tokens) == (1, 2, 12)
    shown = screen.getvalue()
    for words in (
        "one: interrupted",
        "50.0%",
        "75.0%",
        "100.0%",
        "12 sampled tokens",
        "metrics.jsonl",
        "step-000001",
        "report.html",
    ):
        assert words in shown


def test_a_run_that_measured_nothing_has_a_closing_table(run):
    track, screen = tracker(run)
    summary = track.finish("failed")
    assert summary.curve == []
    assert "not measured" in screen.getvalue()
