"""What the modes leave in `metrics.jsonl` and say at the end."""

import io
import math

import pytest
from rich.console import Console

from agent_train.report.metrics import FileStep, HeldOut, read_metrics
from agent_train.report.tracking import Tracker
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
