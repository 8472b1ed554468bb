"""`audit`: plays known hacks of an environment, which must earn no more than doing nothing, while gold answers succeed.

The environment lists them: `hacks(task)` returns a `Hack` for each.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from agentgym.core.messages import Action
from agentgym.core.registration import EnvSpec
from agentgym.core.tasks import Task
from agentgym.core.trajectory import Trajectory
from agentgym.core.usage_error import making
from agentgym.policies.base import ExpertPolicy, Policy, ScriptedPolicy
from agentgym.rollout.episode import Episode, Limits, close_env, run_many

GOLD = "gold"
_LONGEST = 100  # characters of a text of `info` that are kept


@dataclass(frozen=True)
class Hack:
    """A way to a reward for an unsolved task: replies, in turn. `what` describes it in a line."""

    name: str
    what: str
    actions: tuple[Action, ...]


@dataclass(frozen=True)
class Played:
    """One hack, or `GOLD`, on one task.

    Attributes:
        reward: None if the episode failed; `error` says why.
        ok: it earned no more than nothing and is no success; for gold: it is a success with a positive reward.
        told: short texts of the last `info`, by name: how the episode ended.
    """

    task: str
    hack: str
    what: str
    reward: float | None
    success: bool
    ok: bool
    told: dict[str, str] = field(default_factory=dict)
    error: str | None = None


@dataclass
class Audit:
    env: str
    played: list[Played] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return all(each.ok for each in self.played)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


async def audit(
    spec: EnvSpec,
    *,
    split: str = "test",
    n: int = 1,
    only: Sequence[str] = (),
    seed: int = 0,
    concurrency: int = 4,
    limits: Limits | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Audit:
    """Play the expert and every hack on the first n tasks of a split.

    Args:
        only: names of hacks; () for all.

    Raises ValueError for an unknown hack or a split without tasks, and TypeError for an environment that has no `hacks`.
    """
    started = time.perf_counter()
    with making(spec.id):
        bare: Any = await asyncio.to_thread(lambda: spec.make().unwrapped)
    if not hasattr(bare, "hacks"):
        raise TypeError(
            f"{spec.id} has no hacks(task), which returns an agentgym.checks.audit.Hack for each known hack"
        )
    limits = limits_of(bare, limits)
    tasks = list(spec.tasks(split).take(n))
    if not tasks:
        raise ValueError(f"{spec.id}: the split {split!r} has no tasks")
    chosen: dict[tuple[str, int], Hack | None] = {}
    episodes: list[Episode] = []
    for task in tasks:
        for place, hack in enumerate([None, *_hacks(bare, task, only)]):
            chosen[task.id, place] = hack
            episodes.append(Episode(task, place, seed))
    await close_env(bare)

    def policy(episode: Episode) -> Policy:
        hack = chosen[episode.task.id, episode.sample]
        return ExpertPolicy() if hack is None else ScriptedPolicy(hack.actions)

    def tell(trajectory: Trajectory) -> None:
        each = _played(chosen[trajectory.task_id, trajectory.sample], trajectory)
        say(f"{each.task}: {each.hack}: {'failed' if each.reward is None else f'{each.reward:g}'}")

    say(f"{len(episodes)} episodes")
    ended = await run_many(
        spec.make, policy, episodes, concurrency=concurrency, limits=limits, on_end=tell, env_id=spec.id
    )
    played = [_played(chosen[t.task_id, t.sample], t) for t in ended]
    return Audit(spec.id, played, time.perf_counter() - started)


def limits_of(env: Any, limits: Limits | None) -> Limits:
    """Limits in which a step has as many seconds as the environment says that it needs."""
    limits = limits or Limits()
    # Of the texts, "auto" asks the environment itself.
    if env.step_seconds is None or not isinstance(limits.step_timeout, int | float):
        return limits
    return replace(limits, step_timeout=max(limits.step_timeout, env.step_seconds))


def _hacks(env: Any, task: Task, only: Sequence[str]) -> list[Hack]:
    hacks: list[Hack] = list(env.hacks(task))
    known = [hack.name for hack in hacks]
    if unknown := [name for name in only if name not in known]:
        raise ValueError(f"no hack {unknown[0]!r}: there are {', '.join(known)}")
    return [hack for hack in hacks if not only or hack.name in only]


def _played(hack: Hack | None, trajectory: Trajectory) -> Played:
    name, what = (hack.name, hack.what) if hack else (GOLD, "the expert")
    if trajectory.failed or not trajectory.turns:
        error = trajectory.error or "the episode ended at once"
        return Played(trajectory.task_id, name, what, None, False, False, error=error)
    earned, success = trajectory.reward, bool(trajectory.success)
    ok = (success and earned > 0) if hack is None else (not success and earned <= 1e-9)
    texts = {key: value for key, value in trajectory.turns[-1].info.items() if isinstance(value, str) and value}
    told = {key: value[:_LONGEST] for key, value in texts.items() if "\n" not in value}
    return Played(trajectory.task_id, name, what, earned, success, ok, told)
