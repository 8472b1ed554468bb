"""What the modes leave in `metrics.jsonl` and say at the end."""

import asyncio
import io
import math
from dataclasses import replace

import pytest
from mode_cases import write_lines
from rich.console import Console

from agent_train.config.compose import compose
from agent_train.report.metrics import FileStep, HeldOut, read_metrics
from agent_train.report.tracking import Tracker
from agent_train.trainer.checkpoint import Checkpoint, Progress
from agent_train.trainer.offline.context import open_offline
from agent_train.trainer.offline.records import DataError
from agent_train.trainer.run_folder import RunFolder


def step_of(number, loss=0.5, **measures):
    told = {"epoch": 1, "tokens": 10, "grad_norm": 0.25, "lr": 1e-3, "skipped": False, "seconds": 2.0}
    return FileStep(kind="preference", step=number, steps=4, loss=loss, measures=measures, **told)


def held_out_of(step, loss, **measures):
    return HeldOut(step=step, loss=loss, measures=measures, examples=20)


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "one")
    for path in (folder.trajectories, folder.checkpoints, folder.logs):
        path.mkdir(parents=True)
    return folder


def tracked(run, *told):
    """Have a tracker told these, in order; what it printed."""
    out = io.StringIO()
    with Tracker(run, 4, Console(file=out, width=200)) as tracker:
        for one in told:
            (tracker.held_out if isinstance(one, HeldOut) else tracker.file_step)(one)
        tracker.finish()
    return out.getvalue()


def test_a_record_has_the_measures_beside_the_fields(run):
    step, held_out = step_of(1, accuracy=0.5, margin=0.1), held_out_of(0, 0.7, accuracy=0.25)
    tracked(run, held_out, step)
    for record, told in zip(read_metrics(run.metrics), (held_out, step), strict=True):
        assert {name: value for name, value in record.items() if name != "elapsed"} == told.record()
        assert record["accuracy"] == told.measures["accuracy"]


def test_a_number_that_is_not_finite_is_null_and_not_told(run):
    printed = tracked(run, step_of(1, math.nan, accuracy=math.nan, margin=0.1))
    (record,) = read_metrics(run.metrics)
    assert record["loss"] is record["accuracy"] is None
    assert "nan in the first step" in printed
    assert "margin 0.100" in printed
    assert "accuracy" not in printed


def test_each_step_is_a_line_and_the_end_compares_what_was_held_out(run):
    told = [held_out_of(0, 0.7, accuracy=0.25), step_of(1, accuracy=0.5), held_out_of(1, 0.6, accuracy=0.75)]
    printed = tracked(run, *told)
    assert "step 1/4  loss 0.5000  accuracy 50.0%  grad norm 0.250" in printed
    assert "held-out after step 1: loss 0.6000, accuracy 75.0% (20 examples)" in printed
    assert "loss 0.7000, accuracy 25.0%" in printed
    assert "1 steps, 10 learned tokens" in printed


def test_a_resumed_run_counts_what_came_before(run):
    tracked(run, held_out_of(0, 0.7), step_of(1))
    printed = tracked(run, step_of(2), held_out_of(2, 0.1))
    assert "2 steps, 20 learned tokens" in printed
    assert "loss 0.7000" in printed


def test_a_run_does_not_go_on_with_other_examples_than_it_began_with(run, tmp_path):
    """As of a run folder that got more episodes since: it would skip some examples, and learn others again."""
    two = [{"prompt": f"say {word}", "completion": word} for word in ("yes", "no")]
    data = write_lines(tmp_path / "data.jsonl", two)
    words = ["mode=sft", f"data.train={data}", "data.batch_rows=1", "data.epochs=3"]
    step = replace(step_of(2), kind="sft", steps=6)

    async def go_on():
        with Tracker(run, 9, Console(quiet=True)) as tracker:
            async with open_offline(compose(words), run, tracker, Checkpoint(tmp_path, Progress(2))):
                pass

    tracked(run, step)
    write_lines(data, [*two, {"prompt": "say it", "completion": "it"}])
    with pytest.raises(
        DataError, match=r"data\.jsonl: the run began with examples for 6 steps, and finds some for 9: give"
    ):
        asyncio.run(go_on())
