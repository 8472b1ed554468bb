"""Grades stored episodes again: replays their replies in the current environments."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from agentgym.agents.play import actions_of, rewarded
from agentgym.core.agent_failure import AGENT_FAILED
from agentgym.core.trajectory import Trajectory
from agentgym.evaluate.plan import Cell
from agentgym.evaluate.results import Results
from agentgym.evaluate.run import LABELS, labels_of, results_in, write_outcome
from agentgym.evaluate.store import Store, cells_of, effective, open_store, read_run, scan
from agentgym.policies.base import Reply, ScriptedPolicy
from agentgym.rollout.episode import Episode, Limits, close_env, run_many

BATCH = 512  # episodes that are in memory at a time
_BY_ENV = ("terminated", "truncated")
_OF_FAILURE = ("floor", "traceback", "status")  # metadata of an episode that failed
_NO_TASK = "the environment no longer has this task"


@dataclass
class Rescored:
    """One cell graded again. Means are over the episodes that were graded both times; None without any.

    Attributes:
        changed: of those graded, how many have another reward or another success.
        unfaithful: of these, how many were shown something else than when they were played, or ended elsewhere: the
            agent might have replied otherwise.
        failed: replays that failed; they are errors and no zeros.
        missing: episodes whose task the environment no longer has; errors too.
        failed_before: episodes that had failed when they were played, and stay so.
    """

    cell: str
    episodes: int = 0
    graded: int = 0
    changed: int = 0
    unfaithful: int = 0
    failed: int = 0
    missing: int = 0
    failed_before: int = 0
    old_reward: float | None = None
    new_reward: float | None = None
    old_success: float | None = None
    new_success: float | None = None


async def rescore(
    run: Path,
    out: Path,
    *,
    kwargs: Mapping[str, Any] | None = None,
    concurrency: int = 64,
    command: Sequence[str] = (),
    on_end: Callable[[Cell, Trajectory], None] = lambda cell, trajectory: None,
) -> tuple[list[Rescored], Results]:
    """Grade every episode of a run again, into a new run folder. Started again, it continues.

    Args:
        out: the folder to write; a new one, or one that this began.
        kwargs: of the environments, over those that the run was played with. The id of one of the run's environments is a
            key too: its value, another mapping, is for that environment alone.
        concurrency: see `run_many`.
        on_end: called with each episode as it was stored.

    Raises:
        ValueError: `run` holds no evaluation, `out` holds something else, an environment refuses its arguments, or `concurrency`
            is below 1.
        ImportError, TypeError: the current environment cannot be made.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, not {concurrency}")
    record = read_run(run)
    source = f"{record['name']} of {record['created']}"
    if (out / "run.json").exists() and read_run(out)["settings"].get("rescored") != source:
        raise ValueError(f"{out} holds another run: choose another folder")
    pairs: list[tuple[Cell, Path]] = []
    plan: list[dict[str, Any]] = []
    cells = cells_of(run, record)
    ids = {cell.env.id for cell, _ in cells}
    floors: dict[str, float] = {}
    for (cell, file), stored in zip(cells, record["cells"], strict=True):
        own = (kwargs or {}).get(cell.env.id, {})
        if not isinstance(own, Mapping):
            raise ValueError(f"the kwargs of {cell.env.id!r} alone must be an object, not {own!r}")
        added = {key: value for key, value in (kwargs or {}).items() if key not in ids} | dict(own)
        now = replace(cell, env=replace(cell.env, kwargs={**cell.env.kwargs, **added}))
        made = now.env.make()
        floors[now.name] = float(made.get_wrapper_attr("floor"))
        await close_env(made)
        plan.append({**now.to_json(), "tasks": stored["tasks"], "first_task": stored.get("first_task", "")})
        pairs.append((now, file))
    settings = {**record["settings"], "rescored": source, "concurrency": concurrency}
    step_timeout = (settings.get("limits") or {}).get("step_timeout", Limits.step_timeout)
    with open_store(out, plan, settings=settings, prices=record["prices"], command=command) as store:
        for cell, file in pairs:
            await _rescore_cell(store, cell, file, floors[cell.name], step_timeout, concurrency, on_end)
    results = write_outcome(out, results_in(out))
    return [_summed(cell, store.file_of(cell)) for cell, _ in pairs], results


async def _rescore_cell(
    store: Store,
    cell: Cell,
    file: Path,
    floor: float,
    step_timeout: Any,
    concurrency: int,
    on_end: Callable[[Cell, Trajectory], None],
) -> None:
    """Grade a cell's episodes. `floor` is the reward of those whose task is gone, where errors count as failures."""
    there = scan(store.file_of(cell))
    tasks = {task.id: task for task in cell.tasks()}
    # Failed episodes are copied once; failed replays are tried again.
    both = there.done | there.failed
    waiting = (t for t in effective(file) if (t.task_id, t.sample) not in (both if t.failed else there.done))
    while batch := list(islice(waiting, BATCH)):
        before = {(t.task_id, t.sample): t for t in batch}

        def keep(trajectory: Trajectory, before: Mapping[tuple[str, int], Trajectory] = before) -> None:
            graded = _merged(before[trajectory.task_id, trajectory.sample], trajectory)
            if trajectory.task_id in tasks:
                kept = {name: value for name, value in graded.metadata.items() if name not in LABELS}
                graded.metadata = kept | labels_of(tasks[trajectory.task_id])
            store.append(cell, graded)
            on_end(cell, graded)

        for stored in batch:
            if stored.failed:
                stored.metadata.pop("rescored", None)  # of an earlier replay: this one has not replayed it
                store.append(cell, stored)
                on_end(cell, stored)
            elif stored.task_id not in tasks:
                error = f"{stored.env}, task {stored.task_id!r}, turn 0: {_NO_TASK}"
                failed = replace(stored, turns=[], final_observation=[], end="error", error=error, metrics={})
                keep(replace(failed, metadata={**stored.metadata, "floor": floor}))
        await run_many(
            cell.env.make,
            lambda episode, before=before: _policy(before[episode.task.id, episode.sample]),  # type: ignore[misc]
            [Episode(tasks[t.task_id], t.sample, t.seed) for t in batch if not t.failed and t.task_id in tasks],
            concurrency=concurrency,
            limits=Limits(
                max_turns=None if cell.agent.kind == "playing" else cell.max_turns, step_timeout=step_timeout
            ),
            on_end=keep,
            env_id=cell.env.id,
        )


def _policy(stored: Trajectory) -> ScriptedPolicy:
    replies = [Reply(action) for action in actions_of(stored)]
    if stored.agent_failure == AGENT_FAILED and replies:  # in place of its last action
        replies[-1] = replace(replies[-1], failure=AGENT_FAILED)
    # Where the loop or the policy ended the episode and not the environment, it is ended there again.
    return ScriptedPolicy(replies, "replayed" if stored.end in _BY_ENV else stored.end)


def _merged(stored: Trajectory, again: Trajectory) -> Trajectory:
    """The stored episode with the grades of its replay; the agent's side stays unchanged.

    `metadata["rescored"]` has the reward and the success before, and `differs`: the first turn at which the agent would
    have been shown something else, or the number of turns where only these or the end differ, or None.
    """
    steps = stored.metadata.get("steps")
    shown = (
        [step["observation"] for step in steps] if steps is not None else [turn.observation for turn in stored.turns]
    )
    alike = len(again.turns) == len(shown) and again.end == stored.end
    other = (n for n, (was, now) in enumerate(zip(shown, again.turns, strict=False)) if was != now.observation)
    differs = None if again.failed else next(other, None if alike else len(again.turns))
    places = [step["turn"] for step in steps] if steps is not None else range(len(stored.turns))
    turns = stored.turns if steps is not None else stored.turns[: len(again.turns)]
    turns = rewarded([replace(turn, reward=0.0, info={}, step_seconds=0.0) for turn in turns], places, again.turns)
    grades = {"reward": stored.reward, "success": stored.success, "differs": differs}
    failure = {name: again.metadata[name] for name in _OF_FAILURE if again.failed and name in again.metadata}
    return replace(
        stored,
        turns=turns,
        final_observation=again.final_observation,
        end=again.end,
        error=again.error,
        metrics=again.metrics,
        metadata={**stored.metadata, **failure, "rescored": grades},
    )


def _summed(cell: Cell, file: Path) -> Rescored:
    found, sums = Rescored(cell.name), [0.0, 0.0, 0.0, 0.0]
    for trajectory in effective(file):
        found.episodes += 1
        was = trajectory.metadata.get("rescored")
        if was is None:
            found.failed_before += 1
        elif trajectory.failed and (trajectory.error or "").endswith(_NO_TASK):
            found.missing += 1
        elif trajectory.failed:
            found.failed += 1
        else:
            found.graded += 1
            found.changed += (was["reward"], was["success"]) != (trajectory.reward, trajectory.success)
            found.unfaithful += was["differs"] is not None
            grades = (was["reward"], trajectory.reward, was["success"], trajectory.success)
            sums = [total + grade for total, grade in zip(sums, grades, strict=True)]
    if found.graded:
        means = [total / found.graded for total in sums]
        found.old_reward, found.new_reward, found.old_success, found.new_success = means
    return found
