"""Evaluation: play cells, store every episode as it ends, and compute the results.

`evaluate` plays one environment with policies that the caller makes; `run_plan` plays a suite in a run folder, and resumes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.core.registration import EnvSpec, spec
from agentgym.core.tasks import Task
from agentgym.core.trajectory import Trajectory
from agentgym.evaluate.agents import MakePolicy
from agentgym.evaluate.budget import Budget, Prices, Spent, calls_of
from agentgym.evaluate.plan import AgentSpec, Cell
from agentgym.evaluate.predictions import write_predictions
from agentgym.evaluate.results import CellResult, EpisodeNumbers, Results, numbers_of, results_of, usage_of
from agentgym.evaluate.store import Key, Store, StoreError, cells_of, effective, open_store, read_run, scan
from agentgym.evaluate.suite import Suite
from agentgym.policies.base import KEY_REFUSED, EndpointUsage, Policy
from agentgym.rollout.episode import Batch, Episode, Limits, Rollout, run_batches, run_episode
from agentgym.service.client.lookup import held, told_of
from agentgym.storage.files import write_json
from agentgym.storage.jsonl import line_of
from agentgym.viewer.export import write_report

if TYPE_CHECKING:
    from agentgym.evaluate.display import LiveDisplay

LABELS = ("tags", "difficulty", "expected")  # metadata that an episode has from its task
LONGEST_EXPECTED = 2000
MOST_REFUSALS = 3  # episodes of an agent in a row whose key is refused; then the run is stopped
_ASKING = ("chat", "python", "playing")  # kinds of agents that use tokens
_COUNTED = frozenset({"prompt_tokens", "completion_tokens"})


async def evaluate(
    env: str | EnvSpec,
    make_policy: MakePolicy,
    *,
    split: str = "test",
    n: int | None = None,
    k: int = 1,
    seed: int = 0,
    concurrency: int = 64,
    limits: Limits | None = None,
    retries: int = 1,
    budget: Budget | None = None,
    prices: Prices | None = None,
    agent: str = "agent",
    out: Path | None = None,
    on_end: Callable[[Trajectory], None] | None = None,
) -> CellResult:
    """Play k episodes of each of the first n tasks of a split.

    Args:
        make_policy: makes the policy of one episode; each try gets a new one.
        n: how many tasks; None or more than there are: all.
        k, seed: episodes of each task; sample i is reset with seed `seed + i`.
        concurrency, limits, retries: see `run_many`.
        budget: limits of the whole evaluation.
        prices: what tokens cost, by the name of the model, which is `agent` here.
        agent: what results call the policies.
        out: a run folder, which holds every episode as it ends; given again, only what is missing or failed is played. None:
            nothing is stored.
        on_end: called with each trajectory as it ends.

    Raises:
        ValueError: n or k below 1, an unknown split, or `out` holds something else or is being written; the endpoint refuses
            the key, or a token or cost limit cannot be enforced, since the agent reports no usage.
    """
    env = env if isinstance(env, EnvSpec) else spec(env)
    limits = limits or Limits()
    cell = Cell(env, AgentSpec(agent, "python"), split, n, k, seed, limits.max_turns)
    suite = Suite(cell.name, (cell,), concurrency, retries, limits, budget or Budget(), prices)
    run, part = _Evaluation(suite, on_end=on_end), _played_cell(cell, make_policy)
    if out is not None:
        results = await _played_in_folder([part], Path(out), run, ())
        return next(found for found in results.cells if found.name == cell.name)
    await run.play([part])
    if run.problem is not None:
        raise ValueError(run.problem)
    return _result(cell, part.numbers, len(part.tasks), time.monotonic() - run.begun)


async def run_plan(
    suite: Suite,
    out: Path,
    *,
    make: Callable[[AgentSpec], MakePolicy | None],
    watch: LiveDisplay | None = None,
    begun: float | None = None,
    stop: asyncio.Event | None = None,
    command: Sequence[str] = (),
) -> Results:
    """Play cells in a run folder, all at once under one `concurrency`. Stored episodes are not played again.

    Args:
        suite: what to play. Cells that the folder holds may ask for more tasks and samples than before. The limits of the
            whole run include what its folder already holds.
        out: the folder; see `agentgym.evaluate.store`.
        make: makes the maker of an agent's policies; `agents.policy_maker`. None for an agent whose model is not served yet:
            its cells are planned, and another start plays them.
        begun: `time.monotonic()` of the start that `suite.budget.seconds` counts from; None: now.
        stop: once set, the episodes that run are cancelled and not stored, and the results so far are written.
        command: the command line, for the record.

    Returns the results of all cells in the folder, as they also stand in `results.json` and `report.html`.

    Raises:
        ValueError: a cell cannot be played, or the folder holds something else or is being written.
        StoreError: an episode could not be stored; what was stored before is safe.
    """
    run = _Evaluation(suite, watch, begun=begun or time.monotonic(), stop=stop or asyncio.Event())
    return await _played_in_folder(
        [_played_cell(cell, make(cell.agent)) for cell in suite.cells], Path(out), run, command
    )


def results_in(
    path: Path,
    stopped: str | None = None,
    seconds: Mapping[str, float] | None = None,
    total: float = 0.0,
    known: Mapping[str, Iterable[EpisodeNumbers]] | None = None,
) -> Results:
    """The results of a run folder, from its episodes alone.

    Args:
        seconds: wall time by cell; `total`: of the run.
        known: the numbers of a cell's episodes, by its name; of others the file is read.
    """
    record = read_run(path)
    cells = []
    for (cell, file), stored in zip(cells_of(path, record), record["cells"], strict=True):
        episodes = (known or {}).get(cell.name) or effective(file)
        cells.append(_result(cell, episodes, stored["tasks"], (seconds or {}).get(cell.name, 0.0)))
    return Results(record["name"], cells, stopped, total)


def _result(cell: Cell, episodes: Iterable[Trajectory | EpisodeNumbers], tasks: int, seconds: float) -> CellResult:
    named = {"env": cell.env.id, "agent": cell.agent.name, "split": cell.split}
    return results_of(episodes, **named, samples=cell.k, planned=tasks * cell.k, seconds=seconds, asked=cell.n)


@dataclass
class _PlayedCell:
    """A cell in this start of a run.

    Attributes:
        env: the cell's, which stays what its servers make as the run begins.
        known: what is known of it here, as `open_store` takes it.
        done: its episodes that are stored; `fresh`: all that are stored were played now, and have their `numbers`.
        left: episodes to play.
    """

    cell: Cell
    env: EnvSpec
    make_policy: MakePolicy | None
    tasks: dict[str, Task]
    known: dict[str, Any]
    done: set[Key] = field(default_factory=set)
    fresh: bool = True
    numbers: list[EpisodeNumbers] = field(default_factory=list)
    left: int = 0
    began: float | None = None
    ended: float | None = None

    def missing(self) -> list[Episode]:
        pairs = ((task, sample) for task in self.tasks.values() for sample in range(self.cell.k))
        return [Episode(t, s, self.cell.seed + s) for t, s in pairs if (t.id, s) not in self.done]


@dataclass
class _Evaluation:
    """State that all cells of a run share, with its usage so far. `problem`: the reason to stop."""

    suite: Suite
    watch: LiveDisplay | None = None
    on_end: Callable[[Trajectory], None] | None = None
    begun: float = field(default_factory=time.monotonic)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    spent: Spent = field(default_factory=Spent)
    store: Store | None = None
    stopped: str | None = None
    problem: str | None = None
    _running: dict[tuple[str, Key], list[Policy]] = field(default_factory=dict)
    _tries_of: dict[int, list[Policy]] = field(default_factory=dict)  # in `_running`, by the id of a policy in them
    _refusals: Counter[str] = field(default_factory=Counter)
    _shared: list[Policy] = field(default_factory=list)

    async def play(self, parts: Sequence[_PlayedCell]) -> None:
        for part in parts:
            part.left = len(part.missing())
        batches = [self._batch(part, part.make_policy) for part in parts if part.make_policy is not None]
        at_once, retries = self.suite.concurrency, self.suite.retries
        played = run_batches(batches, concurrency=at_once, retries=retries, go_on=self._goes_on)
        try:
            await self._until_stopped(asyncio.create_task(played))
        finally:
            for part in parts:
                if part.began is not None and part.ended is None:
                    self._finished(part)

    def _batch(self, part: _PlayedCell, make_policy: MakePolicy) -> Batch:
        if not part.left:
            self._started(part)
            self._finished(part)
        play: Rollout = run_episode
        if part.cell.agent.kind == "playing":
            from agentgym.agents.play import play_agent as play  # here: most agents need no gateway
        return Batch(
            part.env.make,
            lambda episode: self._policy(part, make_policy, episode),
            part.missing(),
            lambda _, trajectory: self._ended(part, trajectory),
            replace(self.suite.limits, max_turns=part.cell.max_turns),
            part.cell.env.id,
            lambda: self._started(part),
            play,
        )

    def _started(self, part: _PlayedCell) -> None:
        part.began = time.monotonic()
        if self.watch is not None:
            total = len(part.tasks) * part.cell.k
            self.watch.started(part.cell, total, total - part.left)

    def _finished(self, part: _PlayedCell) -> None:
        part.ended = time.monotonic()
        if self.watch is not None:
            self.watch.finished(part.cell)

    def _goes_on(self) -> bool:
        if self.stopped is None:
            seconds = time.monotonic() - self.begun
            self.stopped = self.suite.budget.reached(self.spent, seconds, self._running.values())
        return self.stopped is None

    async def _until_stopped(self, playing: asyncio.Task[Any]) -> None:
        """Wait for the episodes. Asked to stop, or past the limit of time and patience, cancel those that still run."""
        asked = asyncio.create_task(self.stop.wait())
        late = None
        if self.suite.budget.seconds is not None:
            late = max(0.0, self.begun + self.suite.budget.seconds + self.suite.budget.patience - time.monotonic())
        try:
            await asyncio.wait({playing, asked}, timeout=late, return_when=asyncio.FIRST_COMPLETED)
            if not playing.done() and self.problem is None:
                self.stopped = "interrupted" if self.stop.is_set() else "seconds"
        finally:
            asked.cancel()
            playing.cancel()
            await asyncio.wait({playing})
        if not playing.cancelled():
            playing.result()

    def _policy(self, part: _PlayedCell, make_policy: MakePolicy, episode: Episode) -> Policy:
        # Every try asks here before anything else of it happens, so these are the episodes that run.
        tries = self._running.setdefault((part.cell.name, (episode.task.id, episode.sample)), [])
        policy = make_policy(episode)
        if all(one is not policy for one in tries) and not self._is_shared(policy):
            tries.append(policy)
            self._tries_of[id(policy)] = tries
        return policy

    def _is_shared(self, policy: Policy) -> bool:
        """True if the policy plays several episodes: its calls cannot be attributed, so turns are counted instead."""
        calls = getattr(policy, "calls", None)
        if not isinstance(calls, EndpointUsage):
            return False
        if other := self._tries_of.pop(id(policy), None):
            self._shared.append(policy)
            other[:] = [one for one in other if one is not policy]
        return calls.requests > 0 or any(one is policy for one in self._shared)

    def _ended(self, part: _PlayedCell, trajectory: Trajectory) -> None:
        key = (part.cell.name, (trajectory.task_id, trajectory.sample))
        if key not in self._running:
            raise ValueError(f"{part.cell.env.id} reports task {trajectory.task_id!r}, but was given another task")
        part.left -= 1
        tries = self._running.pop(key)
        for policy in tries:
            self._tries_of.pop(id(policy), None)
        calls = calls_of(tries)
        trajectory.metadata |= labels_of(part.tasks[trajectory.task_id])
        if calls is not None:
            trajectory.metadata["calls"] = vars(calls)
        usage = usage_of(trajectory)
        prices = self.suite.prices
        cost = prices.cost(model_of(part.cell.agent), usage) if prices is not None and usage else None
        if cost is not None:
            trajectory.metadata["cost"] = cost
        trajectory.metadata["ended"] = time.time()
        if self.store is not None:
            self.store.append(part.cell, trajectory)
        if part.fresh:
            part.numbers.append(numbers_of(trajectory))
        self.spent += Spent.of(trajectory)
        if self.watch is not None:
            self.watch.ended(part.cell, trajectory)
        if self.on_end is not None:
            self.on_end(trajectory)
        if not part.left:
            self._finished(part)
        self._check_sense(part.cell.agent, trajectory, usage)

    def _check_sense(self, agent: AgentSpec, trajectory: Trajectory, usage: Mapping[str, int]) -> None:
        """Stop if the endpoint rejects the key, or if a limit cannot be enforced."""
        refused = trajectory.failed and trajectory.metadata.get("status") == KEY_REFUSED
        self._refusals[agent.name] = self._refusals[agent.name] + 1 if refused else 0
        limits = (self.suite.budget.tokens, self.suite.budget.cost, self.suite.limits.tokens)
        options = ("--token-limit", "--cost-limit", "--max-episode-tokens")
        kept = [option for option, limit in zip(options, limits, strict=True) if limit is not None]
        if self._refusals[agent.name] >= MOST_REFUSALS:
            self.stopped, words = "key", str(trajectory.error).partition("EndpointError: ")[2]
            self.problem = f"agent {agent.name}: the key is refused again and again: {words}"
        elif kept and _asked(agent, trajectory) and not _COUNTED & usage.keys():
            self.stopped = "uncounted"
            self.problem = (
                f"{kept[0]} cannot be enforced: agent {agent.name} does not report its token usage; set `usage` on its replies"
                " (`Reply(message, usage=...)`, or whole completions), or leave the limit out"
            )
        if self.problem is not None:
            self.stop.set()


async def _played_in_folder(parts: list[_PlayedCell], out: Path, run: _Evaluation, command: Sequence[str]) -> Results:
    """Play the missing episodes of a run folder, and write the results however they end."""
    suite = run.suite
    plan = [{**part.cell.to_json(), **part.known} for part in parts]
    settings = {
        "limits": {name: value for name, value in vars(suite.limits).items() if name != "max_turns"},
        "budget": suite.budget.to_json(),
        "retries": suite.retries,
        "concurrency": suite.concurrency,
    }
    prices = None if suite.prices is None else suite.prices.to_json()
    with open_store(out, plan, settings=settings, prices=prices, command=command) as store:
        run.store = store
        stored = {cell.name: scan(file) for cell, file in cells_of(out, store.record)}
        for found in stored.values():
            run.spent += found.spent
        for part in parts:
            before = stored[part.cell.name]
            part.done, part.fresh = before.done, not (before.done or before.failed)
        began = time.monotonic()
        try:
            await run.play(parts)
        except StoreError:
            with contextlib.suppress(OSError):  # the disk that took no episode may take no results either
                _write_results(out, "disk", parts, began)
            raise
        except asyncio.CancelledError:
            _write_results(out, "interrupted" if any(part.left for part in parts) else None, parts, began)
            raise
        # A limit that came with the last episode has stopped nothing.
        results = _write_results(out, run.stopped if any(part.left for part in parts) else None, parts, began)
        if run.problem is not None:
            raise ValueError(f"{run.problem} (episodes played so far are in {out})")
        return results


def _write_results(out: Path, stopped: str | None, parts: Sequence[_PlayedCell], began: float) -> Results:
    try:
        before = json.loads((out / "results.json").read_text(encoding="utf-8"))
        took, total = {cell["name"]: float(cell["seconds"]) for cell in before["cells"]}, float(before["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        took, total = {}, 0.0  # results are made anew from the episodes, which have no wall time
    for part in parts:
        if part.began is not None:
            took[part.cell.name] = took.get(part.cell.name, 0.0) + (part.ended or time.monotonic()) - part.began
    known = {part.cell.name: part.numbers for part in parts if part.fresh}
    return write_outcome(out, results_in(out, stopped, took, total + time.monotonic() - began, known))


def write_outcome(out: Path, results: Results) -> Results:
    """Write `results.json`, and what is made of it and of the episodes."""
    write_json(out / "results.json", results.to_json())
    write_predictions(out)
    write_report(out, "evaluation")
    return results


def _played_cell(cell: Cell, make_policy: MakePolicy | None) -> _PlayedCell:
    if cell.k < 1 or (cell.n is not None and cell.n < 1):
        raise ValueError(f"n and k must be at least 1, not {cell.n} and {cell.k}")
    found: dict[str, Task] = {}
    for task in cell.tasks():
        if task.id in found:
            raise ValueError(f"{cell.env.id}/{cell.split}: two tasks have the id {task.id!r}: task ids must be unique")
        found[task.id] = task
    if not found:
        raise ValueError(f"{cell.env.id}/{cell.split} has no tasks: --split names another split")
    first = next(iter(found.values()))
    line = line_of([first.id, first.messages, first.answer, first.seed])
    mark = hashlib.sha256(line.encode()).hexdigest()[:16]  # the same for any number of tasks of the same data
    known = {"tasks": len(found), "first_task": mark, "served": told_of(cell.env, cell.split)}
    return _PlayedCell(cell, held(cell.env), make_policy, found, known)


def labels_of(task: Task) -> dict[str, Any]:
    """The labels that results are grouped by, and the expected answer; of a long one, the start of its JSON."""
    named = {name: task.metadata.get(name) for name in ("tags", "difficulty")}
    labels = {name: label for name, label in named.items() if label not in (None, [], ())}
    if task.answer is not None:
        line = line_of(task.answer)
        labels["expected"] = task.answer if len(line) <= LONGEST_EXPECTED else line[:LONGEST_EXPECTED]
    return labels


def _asked(agent: AgentSpec, trajectory: Trajectory) -> bool:
    """True if a model was asked. An agent that plays by itself may not ask one."""
    return agent.kind in _ASKING and (
        bool(trajectory.turns) if agent.kind != "playing" else "steps" in trajectory.metadata
    )


def model_of(agent: AgentSpec) -> str:
    return agent.settings.get("model", agent.name)
