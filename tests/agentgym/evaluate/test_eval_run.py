"""Playing: every episode once, in one start or in many, whatever ends them."""

import asyncio
import json
import random
import subprocess
import sys
import textwrap
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import parity
import pytest

from agentgym.core import registration
from agentgym.core.registration import EnvSpec, spec
from agentgym.core.tasks import Task, TaskSet
from agentgym.core.trajectory import Trajectory
from agentgym.evaluate import agents, evaluate
from agentgym.evaluate.budget import Budget, Prices
from agentgym.evaluate.plan import Cell
from agentgym.evaluate.results import results_of
from agentgym.evaluate.run import results_in, run_plan
from agentgym.evaluate.store import StoreError, open_store, read_cell, scan
from agentgym.evaluate.suite import Suite
from agentgym.policies.base import EndpointUsage, ExpertPolicy, Reply, ScriptedPolicy
from agentgym.rollout.episode import Limits

# What the environments do in this process, by task id; tests fill it.
FAILING: set[str] = set()
PLAYED: Counter[tuple[str, int]] = Counter()


class Parity(parity.Parity):
    """The same, counted, and out of order for some tasks."""

    def reset(self, *, seed=None, options=None):
        opened = super().reset(seed=seed, options=options)
        PLAYED[self.task.id, seed] += 1
        return opened

    def step(self, action):
        if self.task.id in FAILING:
            raise OSError("out of order")
        return super().step(action)


class AsyncParity(Parity):
    async def init(self, task):
        await asyncio.sleep(0)
        super().init(task)

    async def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options=options)

    async def step(self, action):
        await asyncio.sleep(0)
        return super().step(action)

    async def close(self):
        super().close()


class Renamed(Parity):
    """Says that it plays another task than it was given."""

    def init(self, task):
        super().init(replace(task, id=f"mine-{task.id}"))


class Twins(Parity):
    @classmethod
    def default_tasks(cls, split="train"):
        return TaskSet([Task("a"), Task("a")])


class Slow(Parity):
    """Answers after a while."""

    async def init(self, task):
        super().init(task)

    async def step(self, action):
        await asyncio.sleep(30 if self.task.id == "3" else 0.02)
        return super().step(action)


PARITY = EnvSpec("parity", f"{__name__}:Parity")
EXPERT, RANDOM = agents.built_in("expert"), agents.built_in("random")


@pytest.fixture(autouse=True)
def clean():
    FAILING.clear()
    PLAYED.clear()


def played(cells, out, make=agents.policy_maker, watch=None, **more):
    return asyncio.run(run_plan(Suite("r", tuple(cells), **more), out, make=make, watch=watch))


def is_complete(results):
    return all(cell.episodes == cell.planned for cell in results.cells)


def comparable(results):
    """What must not depend on when and how often a run was started."""
    record = results.to_json()
    for cell in record["cells"]:
        for name in ("seconds", "episode_seconds", "waited"):
            cell.pop(name)
    return record["cells"]


# ---- evaluate


def test_evaluate_plays_every_sample_of_every_task():
    found = asyncio.run(evaluate(PARITY, lambda e: ScriptedPolicy(["even", "even"]), n=10, k=3, concurrency=4))
    assert (found.tasks, found.samples, found.episodes, found.success, found.turns) == (10, 3, 30, 0.5, 1.5)
    assert dict(PLAYED) == {(str(task), sample): 1 for task in range(10) for sample in range(3)}


def test_evaluate_in_a_folder_goes_on_where_it_was(tmp_path):
    def play(n):
        return asyncio.run(evaluate(PARITY, lambda e: ExpertPolicy(), n=n, agent="mine", out=tmp_path / "o"))

    assert play(4).episodes == 4
    assert play(10).episodes == 10
    assert sum(PLAYED.values()) == 10
    assert json.loads((tmp_path / "o" / "results.json").read_text())["cells"][0]["agent"] == "mine"
    assert "<html" in (tmp_path / "o" / "report.html").read_text()


def test_broken_results_and_an_agent_without_a_name_stop_nothing(tmp_path):
    for content in ("{", "[]", '{"cells": [{"name": "x"}]}'):
        found = asyncio.run(evaluate(PARITY, lambda e: ExpertPolicy(), n=3, agent="", out=tmp_path / "r"))
        assert (found.episodes, found.agent) == (3, "")
        (tmp_path / "r" / "results.json").write_text(content)


def test_evaluate_tells_of_each_episode():
    seen = []
    asyncio.run(evaluate(PARITY, lambda e: ExpertPolicy(), n=3, on_end=lambda t: seen.append(t.id)))
    assert sorted(seen) == ["0/0", "1/0", "2/0"]


def test_environments_may_be_asynchronous():
    found = asyncio.run(evaluate(spec(f"{__name__}:AsyncParity"), lambda e: ExpertPolicy(), n=5))
    assert (found.success, found.errors) == (1.0, 0)


@pytest.mark.parametrize(
    ("env", "more", "words"),
    [
        (PARITY, {"n": 0}, "at least 1"),
        (PARITY, {"k": 0}, "at least 1"),
        (PARITY, {"concurrency": 0}, "concurrency must be at least 1"),
        (PARITY, {"retries": -1}, "retries must be at least 0"),
        (PARITY, {"split": "tset"}, "no split 'tset'"),
        (EnvSpec("t", f"{__name__}:Twins"), {}, "two tasks have the id 'a'"),
        (EnvSpec("r", f"{__name__}:Renamed"), {}, "reports task 'mine-"),
    ],
)
def test_what_cannot_be_counted_is_refused(env, more, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        asyncio.run(evaluate(env, lambda e: ExpertPolicy(), **more))
    if not words.startswith("reports"):  # which only the play shows
        with pytest.raises(ValueError, match=words):
            asyncio.run(evaluate(env, lambda e: ExpertPolicy(), out=tmp_path / "r", **more))
        assert not (tmp_path / "r").exists()


# ---- a plan


def test_a_plan_is_played_once_and_again_not_at_all(tmp_path):
    cells = [Cell(PARITY, EXPERT, n=5, k=2), Cell(PARITY, RANDOM, n=5, k=2)]
    first = played(cells, tmp_path / "r", concurrency=3)
    assert [(c.name, c.episodes, c.planned) for c in first.cells] == [
        ("parity@expert", 10, 10),
        ("parity@random", 10, 10),
    ]
    assert (first.stopped, is_complete(first)) == (None, True)
    assert comparable(played(cells, tmp_path / "r")) == comparable(first)
    assert set(PLAYED.values()) == {2}  # once by each agent
    stored = json.loads((tmp_path / "r" / "results.json").read_text())
    assert stored == first.to_json() | {k: stored[k] for k in ("seconds", "cells")}
    assert first.cells[0].by_tag["number"].episodes == first.cells[0].by_difficulty["easy"].episodes == 10


def test_failed_episodes_are_played_again_and_count_no_more(tmp_path):
    cells = [Cell(PARITY, EXPERT, n=6)]
    FAILING.update({"2", "5"})
    first = played(cells, tmp_path / "r", retries=0)
    assert (first.cells[0].episodes, first.cells[0].errors, first.cells[0].reward) == (4, 2, 1.0)
    FAILING.discard("2")
    second = played(cells, tmp_path / "r", retries=1)
    assert (second.cells[0].episodes, second.cells[0].errors) == (5, 1)
    assert PLAYED["0", 0] == 1
    assert PLAYED["5", 0] == 3
    file = tmp_path / "r" / "episodes" / "parity@expert.jsonl"
    assert (scan(file).failed, scan(file).spent.episodes) == ({("5", 0)}, 8)
    assert len(read_cell(file)["5", 0].metadata["errors"]) == 1


class Asking:
    """Says "even", and counts as an endpoint's policy does; the first try of a task fails."""

    failed: set[str] = set()  # noqa: RUF012 - shared on purpose

    def __init__(self, episode):
        self.calls = EndpointUsage()
        self.task = episode.task.id

    async def act(self, messages, tools):
        self.calls.requests += 1
        self.calls.retries["429"] = self.calls.retries.get("429", 0) + 1
        for kind, count in (("prompt_tokens", 100), ("completion_tokens", 10)):
            self.calls.usage[kind] = self.calls.usage.get(kind, 0) + count
        if self.task not in self.failed:
            self.failed.add(self.task)
            raise OSError("gone")
        return Reply({"role": "assistant", "content": "even"}, usage={"prompt_tokens": 100, "completion_tokens": 10})


def test_what_all_tries_of_an_episode_asked_is_stored_with_it(tmp_path):
    Asking.failed.clear()
    prices = Prices.from_json({"m": {"input": 1.0, "output": 10.0}})
    results = played(
        [Cell(PARITY, agents.chat("m", "http://localhost/v1"), n=1)],
        tmp_path / "r",
        make=lambda agent: Asking,
        retries=1,
        prices=prices,
        limits=Limits(max_turns=1),
    )
    [trajectory] = read_cell(tmp_path / "r" / "episodes" / "parity@m.jsonl").values()
    assert trajectory.metadata["calls"]["usage"] == {"prompt_tokens": 200, "completion_tokens": 20}
    assert trajectory.metadata["calls"]["requests"] == 2
    assert trajectory.metadata["cost"] == pytest.approx(400e-6)
    assert abs(trajectory.metadata["ended"] - time.time()) < 60
    assert (trajectory.metadata["tags"], trajectory.metadata["difficulty"]) == (["number"], "easy")
    assert trajectory.metadata["expected"] == ("odd" if int(trajectory.task_id) % 2 else "even")
    assert results.cells[0].retries == {"429": 2}
    assert results.cells[0].cost == pytest.approx(400e-6)


def test_the_cost_of_a_cell_is_unknown_where_that_of_an_episode_is():
    """As where prices came with a later start."""
    calls = {"usage": {"prompt_tokens": 9}}
    told = [Trajectory(f"{n}/0", "e", str(n), metadata={"calls": calls, "cost": 0.5}) for n in range(2)]
    free = Trajectory("3/0", "e", "3")
    assert results_of([*told, free], env="e").cost == 1.0
    assert results_of([*told, Trajectory("4/0", "e", "4", metadata={"calls": calls})], env="e").cost is None


def test_one_policy_for_all_episodes_is_counted_by_turns(tmp_path):
    """Whose the calls of a shared object were, nobody knows."""
    Asking.failed.clear()
    shared = Asking(type("E", (), {"task": Task("0")}))
    Asking.failed.add("0")
    found = asyncio.run(evaluate(PARITY, lambda e: shared, n=8, limits=Limits(max_turns=1), out=tmp_path / "r"))
    assert found.episodes == 8
    lines = [json.loads(line) for line in (tmp_path / "r" / "episodes" / "parity@agent.jsonl").read_text().splitlines()]
    assert sum("calls" in line["metadata"] for line in lines) <= 1


@pytest.mark.parametrize("concurrency", [1, 2, 8])
@pytest.mark.parametrize("many", [1, 2])
def test_tokens_of_shared_policies_are_counted_once(many, concurrency):
    shared = [Asking(type("E", (), {"task": Task("0")})) for _ in range(many)]
    Asking.failed.add("0")
    found = asyncio.run(
        evaluate(
            PARITY, lambda e: shared[int(e.task.id) % many], n=8, limits=Limits(max_turns=1), concurrency=concurrency
        )
    )
    assert found.tokens == {"prompt_tokens": 800, "completion_tokens": 80}


def test_an_agent_that_does_not_play_now_is_planned_and_plays_later(tmp_path):
    cells = [Cell(PARITY, EXPERT, n=5), Cell(PARITY, RANDOM, n=5)]
    first = played(cells, tmp_path / "r", make=lambda a: agents.policy_maker(a) if a == EXPERT else None)
    assert [(c.episodes, c.planned) for c in first.cells] == [(5, 5), (0, 5)]
    second = played(cells, tmp_path / "r", make=lambda a: agents.policy_maker(a) if a == RANDOM else None)
    assert is_complete(second)
    assert set(PLAYED.values()) == {2}


def test_a_watch_hears_everything_in_order(tmp_path):
    heard = []

    class EvalObserver:
        def started(self, cell, total, done_before):
            heard.append(("started", cell.name, total, done_before))

        def ended(self, cell, trajectory):
            heard.append(("ended", cell.name, trajectory.id))

        def finished(self, cell):
            heard.append(("finished", cell.name))

    played([Cell(PARITY, EXPERT, n=2)], tmp_path / "r", watch=EvalObserver(), concurrency=1)
    name = "parity@expert"
    assert heard == [("started", name, 2, 0), ("ended", name, "0/0"), ("ended", name, "1/0"), ("finished", name)]
    heard.clear()
    played([Cell(PARITY, EXPERT, n=2, k=2)], tmp_path / "r", watch=EvalObserver(), concurrency=1)
    assert heard[0] == ("started", name, 4, 2)
    assert len(heard) == 4


# ---- stopped


@pytest.mark.parametrize("stops", [1, 7, 19])
def test_a_run_stopped_by_a_limit_goes_on_to_the_same_results(tmp_path, stops):
    cells = [Cell(PARITY, EXPERT, n=5, k=2), Cell(PARITY, RANDOM, n=5, k=2)]
    whole = played(cells, tmp_path / "whole")
    part = played(cells, tmp_path / "part", budget=Budget(episodes=stops), concurrency=4)
    assert part.stopped == "episodes"
    assert sum(cell.episodes for cell in part.cells) == stops
    assert sum(cell.planned for cell in part.cells) == 20
    assert comparable(played(cells, tmp_path / "part")) == comparable(whole)


def test_a_limit_that_comes_with_the_last_episode_has_stopped_nothing(tmp_path):
    results = played([Cell(PARITY, EXPERT, n=5, k=2)], tmp_path / "r", budget=Budget(episodes=10))
    assert (results.stopped, is_complete(results)) == (None, True)


def test_a_limit_that_keeps_failed_episodes_from_being_played_again_has_stopped_the_run(tmp_path):
    FAILING.add("1")
    cells = [Cell(PARITY, EXPERT, n=5)]
    first = played(cells, tmp_path / "r", budget=Budget(episodes=5))
    assert (first.stopped, first.cells[0].errors) == (None, 1)
    FAILING.clear()
    again = played(cells, tmp_path / "r", budget=Budget(episodes=5))
    assert (again.stopped, again.cells[0].errors) == ("episodes", 1)


def test_asked_to_stop_it_stores_no_half_episode_and_writes_results(tmp_path):
    async def scene():
        stop = asyncio.Event()
        cells = [Cell(EnvSpec("slow", f"{__name__}:Slow"), EXPERT, n=6)]
        suite = Suite("r", tuple(cells), concurrency=2)
        going = asyncio.create_task(run_plan(suite, tmp_path / "r", make=agents.policy_maker, stop=stop))
        while len(PLAYED) < 6:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        stop.set()
        return await asyncio.wait_for(going, 20)

    results = asyncio.run(scene())
    assert results.stopped == "interrupted"
    assert (results.cells[0].episodes, results.cells[0].planned) == (5, 6)
    assert ("3", 0) not in read_cell(tmp_path / "r" / "episodes" / "slow@expert.jsonl")
    assert json.loads((tmp_path / "r" / "results.json").read_text())["stopped"] == "interrupted"


def test_past_the_limit_of_time_running_episodes_get_some_patience_only(tmp_path):
    cells = [Cell(EnvSpec("slow", f"{__name__}:Slow"), EXPERT, n=6), Cell(PARITY, EXPERT, n=6)]
    started = time.monotonic()
    results = played(cells, tmp_path / "r", budget=Budget(seconds=0.5, patience=0.3), concurrency=2)
    assert results.stopped == "seconds"
    assert [(c.episodes, c.planned) for c in results.cells] == [(5, 6), (6, 6)]
    assert time.monotonic() - started < 15


def test_cancelled_from_outside_it_writes_results_too(tmp_path):
    async def scene():
        cells = [Cell(EnvSpec("slow", f"{__name__}:Slow"), EXPERT, n=4)]
        await asyncio.wait_for(run_plan(Suite("r", tuple(cells)), tmp_path / "r", make=agents.policy_maker), 2)

    with pytest.raises(TimeoutError):
        asyncio.run(scene())
    assert results_in(tmp_path / "r").cells[0].episodes == 3
    assert json.loads((tmp_path / "r" / "results.json").read_text())["stopped"] == "interrupted"


def test_a_full_disk_stops_the_run_and_what_was_stored_stays(tmp_path, monkeypatch):
    from agentgym.evaluate.store import Store

    append, room = Store.append, iter(range(4))

    def until_full(self, cell, trajectory):
        if next(room, None) is None:
            raise StoreError("cannot store an episode: No space left on device")
        append(self, cell, trajectory)

    monkeypatch.setattr(Store, "append", until_full)
    with pytest.raises(StoreError, match="No space left"):
        played([Cell(PARITY, EXPERT)], tmp_path / "r", concurrency=3)
    monkeypatch.undo()
    assert results_in(tmp_path / "r").cells[0].episodes == 4
    assert played([Cell(PARITY, EXPERT)], tmp_path / "r").cells[0].episodes == 20


def test_a_folder_that_is_being_written_is_refused(tmp_path):
    cells = [Cell(PARITY, EXPERT, n=2)]
    with (
        open_store(tmp_path / "r", [], settings={}),
        pytest.raises(ValueError, match="is being written by another process"),
    ):
        played(cells, tmp_path / "r")
    assert is_complete(played(cells, tmp_path / "r"))


RUN = textwrap.dedent(
    """
    import asyncio, sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    from test_eval_run import EXPERT, PARITY, RANDOM, played
    from agentgym.evaluate.plan import Cell
    cells = [Cell(PARITY, agent, k=20) for agent in (EXPERT, RANDOM)]
    print("begins", flush=True)
    played(cells, Path(sys.argv[2]), concurrency=8)
    """
)


def test_killed_at_any_moment_and_started_again_it_is_as_if_undisturbed(tmp_path):
    """`kill -9` three times while it plays, then to the end: every episode is stored once, with the same results."""
    here, rng = str(Path(__file__).parent), random.Random(1)
    file = tmp_path / "r" / "episodes" / "parity@expert.jsonl"

    def lines():
        return sum(p.read_bytes().count(b"\n") for p in (tmp_path / "r" / "episodes").glob("*")) if file.exists() else 0

    for _ in range(3):
        before = lines()
        run = subprocess.Popen([sys.executable, "-c", RUN, here, str(tmp_path / "r")], stdout=subprocess.PIPE)
        assert run.stdout.readline() == b"begins\n"
        deadline = time.monotonic() + 30
        while lines() == before and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.03))
        run.kill()
        run.wait()
        run.stdout.close()
    cells = [Cell(PARITY, agent, k=20) for agent in (EXPERT, RANDOM)]
    assert 3 <= lines() < 800, "no start was killed while it played"
    resumed = played(cells, tmp_path / "r")
    for cell in cells:
        stored = (tmp_path / "r" / "episodes" / f"{cell.name}.jsonl").read_bytes().splitlines()
        keys = Counter((r["task_id"], r["sample"]) for r in map(json.loads, stored))
        assert keys == {(str(task), sample): 1 for task in range(20) for sample in range(20)}
    assert comparable(resumed) == comparable(played(cells, tmp_path / "whole"))


def test_registered_environments_are_found_by_their_id():
    registration.load_plugins()
    assert asyncio.run(evaluate("frozen_lake", lambda e: ExpertPolicy(), n=2)).episodes == 2
