"""Episodes that end in a patch leave predictions, which SWE-bench's own harness reads."""

import asyncio
import json

import pytest

from agentgym import Env, Task
from agentgym.core.registration import EnvSpec
from agentgym.core.tasks import TaskSet
from agentgym.core.trajectory import Trajectory, Turn
from agentgym.evaluate import evaluate
from agentgym.evaluate.agents import built_in
from agentgym.evaluate.plan import Cell
from agentgym.evaluate.predictions import write_predictions
from agentgym.evaluate.store import open_store
from agentgym.policies.base import ScriptedPolicy

DIFF = 'diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-"model_patch": 1\n+é\n'


class Patches(Env):
    """What the agent says is its patch."""

    @classmethod
    def default_tasks(cls, split):
        return TaskSet([Task(id=f"repo__name-{n}", messages=[{"role": "user", "content": "?"}]) for n in (2, 10)])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return self.task.messages, {}

    def step(self, action):
        return self.outcome([], 1.0, True, model_patch=self.read(action))


def episode(task: str, sample: int = 0, end: str = "terminated", **info) -> Trajectory:
    turns = [Turn([], {"role": "assistant", "content": "x"}, info=info)]
    return Trajectory(
        f"{task}/{sample}", "e", task, sample, turns=turns, end=end, error="e" if end == "error" else None
    )


def folder(path, *episodes: Trajectory, agents: tuple[str, ...] = ("expert",)):
    cells = [Cell(EnvSpec("e", "some.module:Env"), built_in(agent), n=5, k=2) for agent in agents]
    plan = [{**cell.to_json(), "tasks": 5, "first_task": "m"} for cell in cells]
    with open_store(path, plan, settings={}) as store:
        for cell in cells:
            for each in episodes:
                store.append(cell, each)
    return path


def predicted(path) -> dict[str, str]:
    return {name: told["model_patch"] for name, told in json.loads(path.read_text()).items()}


def test_an_evaluation_writes_its_patches_by_instance(tmp_path):
    asyncio.run(evaluate(f"{__name__}:Patches", lambda episode: ScriptedPolicy([DIFF]), out=tmp_path / "r"))
    told = json.loads((tmp_path / "r" / "preds.json").read_text())
    assert list(told) == ["repo__name-10", "repo__name-2"]
    [agent] = {one["model_name_or_path"] for one in told.values()}
    assert told["repo__name-2"] == {"instance_id": "repo__name-2", "model_name_or_path": agent, "model_patch": DIFF}


def test_an_episode_without_a_patch_has_the_empty_one_and_a_failed_one_has_none(tmp_path):
    run = folder(tmp_path / "r", episode("a", model_patch=DIFF), episode("b", end="context"), episode("c", end="error"))
    [written] = write_predictions(run)
    assert written == run / "preds.json"
    assert predicted(written) == {"a": DIFF, "b": ""}


def test_of_a_task_that_failed_and_was_played_again_the_last_patch_counts(tmp_path):
    run = folder(tmp_path / "r", episode("a", end="error"), episode("a", model_patch=DIFF))
    assert predicted(*write_predictions(run)) == {"a": DIFF}


def test_samples_and_cells_have_a_file_each(tmp_path):
    run = folder(tmp_path / "r", episode("a", model_patch=DIFF))
    assert write_predictions(run) == [run / "preds.json"]
    run = folder(run, episode("a", sample=1, model_patch="other"), agents=("expert", "null"))
    files = {path.name: predicted(path) for path in write_predictions(run)}
    assert files == {"e@expert-0.json": {"a": DIFF}, "e@expert-1.json": {"a": "other"}, "e@null-1.json": {"a": "other"}}
    assert not (run / "preds.json").exists()


@pytest.mark.parametrize("said", ["nothing", '"model_patch": "x"', {"patch": '"model_patch": 1'}])
def test_other_environments_leave_none(tmp_path, said):
    run = folder(tmp_path / "r", episode("a", said=said))
    assert write_predictions(run) == []
    assert not list(run.glob("preds*"))
    assert write_predictions(folder(tmp_path / "empty")) == []
