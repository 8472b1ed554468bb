"""Episodes and measurements that the tests of tracking and report share."""

import math
from typing import Any

from agent_train.algorithms.selection import SelectionMetrics
from agent_train.learner.measures import UpdateMetrics
from agent_train.report.metrics import Clock
from agent_train.trainer.resume import run_path
from agent_train.trainer.run_folder import RunFolder
from agentgym.core.messages import assistant, user
from agentgym.core.trajectory import Group, Tokens, Trajectory, Turn


def episode(
    task: str, sample: int = 0, *, reward: float = 1.0, error: str | None = None, said: str = "left", turns: int = 2
) -> Trajectory:
    """An episode of some turns, three sampled tokens each; the reward comes with the last."""
    exchanged = [
        Turn(
            observation=[user(f"state {i}")],
            reply=assistant(said),
            reward=reward if i == turns - 1 else 0.0,
            tokens=Tokens([1, 2], [3, 4, 5], [math.log(0.5), math.log(0.25), 0.0], [0, 0, 0]),
        )
        for i in range(turns)
    ]
    return Trajectory(
        id=f"{task}/{sample}",
        env="toy",
        task_id=task,
        sample=sample,
        turns=exchanged,
        final_observation=[user("over")],
        end="error" if error else "terminated",
        error=error,
        metrics={} if error else {"success": float(reward > 0)},
        seconds=0.5,
    )


def group(task: str, rewards: list[float]) -> Group:
    return Group(task, [episode(task, i, reward=reward) for i, reward in enumerate(rewards)])


def update(**changed: Any) -> UpdateMetrics:
    values = dict.fromkeys(UpdateMetrics.__dataclass_fields__, 0.0)
    return UpdateMetrics(**{**values, "gap_by_lag": {}, "gap_mean": 1e-6, "grad_norm": 0.5, "entropy": 1.25, **changed})


def learned(**changed: Any) -> dict[str, Any]:
    """What a step reports besides its episodes: one group of two, both trained on."""
    selection = SelectionMetrics(1, 1, 0, 2, 6.0, 0, 0.0, 0, 0, 0.0)
    return {"selection": selection, "advantages": (0.0, 1.0), "update": update(**changed)}


def clock(rollout: float = 2.0, learn: float = 1.0, sync: float = 0.5) -> Clock:
    made = Clock()
    made.seconds = {"rollout": rollout, "score": 0.0, "learn": learn, "sync": sync}
    return made


def new_run(config, command=()):
    """The folder of a run that begins, as `open_run` leaves it."""
    run = RunFolder(run_path(config))
    run.write_settings(config, command)
    return run
