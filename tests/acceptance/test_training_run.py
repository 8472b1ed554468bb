"""One small run with vLLM, by the command of the README, and everything that it promises to leave behind."""

import dataclasses
import json
import math

import pytest
from checkpoints import generates, weights_checksum
from training_process import SMALL, training

from agent_train.learner.measures import UpdateMetrics
from agent_train.report.metrics import EvalMetrics, SftMetrics, StepMetrics
from agentgym.core.trajectory import read_jsonl

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.slow]
STEPS = 2
SETTINGS = (*SMALL, "learner.workers=2", f"trainer.steps={STEPS}", "trainer.eval_episodes=32")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with training(tmp_path_factory.mktemp("runs"), "+env=frozen_lake", *SETTINGS) as run:
        run.wait()
        run.left = run.left_behind(0)
        yield run


def test_it_ends_with_exit_code_0_and_without_a_complaint(run) -> None:
    assert run.process.returncode == 0, run.told()
    assert run.err == ""


def test_it_says_what_it_does_step_by_step_and_ends_with_a_table(run) -> None:
    told = ["starting Ray", "starting the engine", "warm start", "held-out success after step 0"]
    told += [f"step {step}/{STEPS}  reward" for step in range(1, STEPS + 1)]
    told += [f"held-out success after step {STEPS}", f"{run.folder.name}: finished", "success at the end"]
    places = [run.out.find(words) for words in told]
    assert -1 not in places, run.out
    assert places == sorted(places)
    for words in ("tokens/s", "rollout", "learn", "sync", "report.html", "metrics.jsonl"):
        assert words in run.out


def test_it_ran_vllm_and_two_learners_and_nothing_of_it_is_left(run) -> None:
    for title in ("vllm.entrypoints.openai.api_server", "multiprocessing.spawn", "ray::_Actor", "raylet"):
        assert run.saw(title), sorted(run.titles)
    assert run.left == []


def test_the_metrics_are_complete_and_finite(run) -> None:
    kinds = {"sft": SftMetrics, "eval": EvalMetrics, "train": StepMetrics}
    for record in run.metrics:
        wanted = {field.name for field in dataclasses.fields(kinds[record["kind"]])} | {"kind", "elapsed"}
        assert set(record) == wanted
        absent = {"agent", "critic", "players", "prm", "pools"} & set(record)  # which the default job has not
        assert {name for name, value in record.items() if value is None} == absent
        parts = [value for value in record.values() if isinstance(value, dict)]
        numbers = [n for part in (record, *parts) for n in part.values() if not isinstance(n, str | dict | None)]
        assert all(map(math.isfinite, numbers)), record
        assert None not in [n for part in parts for n in part.values()], record
    in_order = [(record["kind"], record["step"]) for record in run.metrics if record["kind"] != "sft"]
    assert in_order == [("eval", 0), *(("train", step) for step in range(1, STEPS + 1)), ("eval", STEPS)]
    warm = run.of_kind("sft")
    assert [record["step"] for record in warm] == list(range(1, warm[0]["steps"] + 1))
    assert warm[-1]["loss"] < warm[0]["loss"]
    assert all(set(record["update"]) == set(UpdateMetrics.__dataclass_fields__) for record in run.of_kind("train"))
    assert all(record["failed"] == 0 for record in run.metrics if record["kind"] != "sft")
    assert all(record["episodes"] == 16 for record in run.of_kind("train"))


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_an_update_begins_on_policy(run, step: int) -> None:
    update = run.of_kind("train")[step - 1]["update"]
    assert update["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert update["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert update["clip_fraction"] == 0


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_engine_and_trainer_agree_on_the_probability_of_what_was_sampled(run, step: int) -> None:
    update = run.of_kind("train")[step - 1]["update"]
    assert update["tokens"] > 0
    assert 0 < update["gap_mean"] < 1e-4
    assert update["gap_max"] < 1e-3


def test_every_step_changes_the_weights(run) -> None:
    steps = run.of_kind("train")
    assert steps[0]["update"]["grad_norm"] > 0
    assert len({record["weights_checksum"] for record in steps}) == STEPS


def test_the_checkpoint_holds_what_the_engine_held_and_generates(run) -> None:
    assert (run.folder / "checkpoints" / "latest").read_text().strip() == f"step-{STEPS:06d}"
    assert weights_checksum(run.checkpoint) == run.of_kind("train")[-1]["weights_checksum"]
    assert generates(run.checkpoint)


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_every_trajectory_is_kept_with_its_tokens_and_the_version_that_sampled_them(run, step: int) -> None:
    trajectories = list(read_jsonl(run.folder / "trajectories" / f"train-{step:06d}.jsonl"))
    assert len(trajectories) == 16
    assert len({t.id for t in trajectories}) == 16
    record = run.of_kind("train")[step - 1]
    turns = [turn for t in trajectories for turn in t.turns]
    assert all(turn.tokens is not None for turn in turns)
    assert {version for turn in turns for version in turn.tokens.versions} == {step - 1}
    assert sum(len(turn.tokens.completion_ids) for turn in turns) == record["sampled_tokens"]
    assert sum(t.reward for t in trajectories) / 16 == pytest.approx(record["reward"])


@pytest.mark.parametrize("step", [0, STEPS])
def test_the_evaluated_trajectories_are_kept_too(run, step: int) -> None:
    trajectories = list(read_jsonl(run.folder / "trajectories" / f"eval-{step:06d}.jsonl"))
    assert len({t.task_id for t in trajectories}) == 32
    assert {v for t in trajectories for turn in t.turns for v in turn.tokens.versions} == {step}


def test_training_and_held_out_tasks_are_disjoint(run) -> None:
    played = {
        kind: {t.task_id for file in run.folder.glob(f"trajectories/{kind}-*.jsonl") for t in read_jsonl(file)}
        for kind in ("train", "eval")
    }
    assert len(played["train"]) == 4 * STEPS
    assert not played["train"] & played["eval"]


def test_the_report_has_curves_and_trajectories(run) -> None:
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    for step in (0, STEPS):
        played = read_jsonl(run.folder / "trajectories" / f"eval-{step:06d}.jsonl")
        assert any(t.task_id in page for t in played)


def test_the_result_is_the_curve_and_the_command(run) -> None:
    result = json.loads((run.folder / "result.json").read_text())
    assert set(result) == {"env", "seed", "start", "end", "minutes", "curve", "command"}
    curve = [[record["step"], record["success"]] for record in run.of_kind("eval")]
    assert [tuple(point) for point in result["curve"]] == [(step, round(success, 4)) for step, success in curve]
    assert (result["start"], result["end"]) == (result["curve"][0][1], result["curve"][-1][1])
    assert (result["env"], result["seed"]) == ("frozen_lake", 0)
    assert result["command"].startswith("agent-train +env=frozen_lake ")
    assert result["minutes"] > 0


def test_the_timeline_has_every_part_of_the_run(run) -> None:
    events = json.loads((run.folder / "timeline.json").read_text() + "]")
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    names = {name: {each["name"] for each in events if rows[each["tid"]] == name} for name in rows.values()}
    assert {"start", "evaluation", "checkpoint", "rollout", "score", "learn", "sync"} <= names["loop 0"]
    for rank in range(2):
        assert {"sft", "update", "send_weights"} <= names[f"policy rank {rank}"]
    assert {"requests of engine 0", f"loads version {STEPS}"} <= names["engine 0"]
    assert {"engine", "environment"} <= names["episode 15"]
    updates = [each for each in events if each["name"] == "update" and rows[each["tid"]] == "policy rank 0"]
    told = sum(record["learn_seconds"] for record in run.of_kind("train"))
    assert sum(each["dur"] for each in updates) / 1e6 == pytest.approx(told, rel=0.2)


def test_the_settings_and_versions_are_kept(run) -> None:
    assert f"steps: {STEPS}" in (run.folder / "config.yaml").read_text()
    versions = json.loads((run.folder / "versions.json").read_text())
    assert versions["packages"]["torch"]


def test_the_prefix_cache_is_cleared_after_every_weight_sync(run) -> None:
    log = (run.folder / "logs" / "vllm-0.log").read_text()
    assert log.count("Successfully reset prefix cache") == 1 + STEPS
