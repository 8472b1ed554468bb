"""Cells share one concurrency; what makes no sense to go on with stops the run and says why."""

import asyncio
import json
import time
from collections import Counter
from dataclasses import replace

import parity
import pytest
from endpoint_double import said, serving

from agentgym.cli import main
from agentgym.core.registration import EnvSpec
from agentgym.core.trajectory import read_jsonl
from agentgym.evaluate import Budget, agents
from agentgym.evaluate.plan import Cell
from agentgym.evaluate.run import MOST_REFUSALS, run_plan
from agentgym.evaluate.store import read_cell
from agentgym.evaluate.suite import Suite
from agentgym.policies.base import EndpointUsage, Reply

EXPERT = agents.built_in("expert")
RUNNING: Counter[str] = Counter()
MOST: Counter[str] = Counter()
OPEN: Counter[str] = Counter()


class Counted(parity.Parity):
    """Counts how many episodes run, and how many environments are open, at a time."""

    def __init__(self, name="", seconds=0.05, **more):
        super().__init__(**more)
        self.name, self.seconds = name, seconds
        OPEN["open"] += 1
        MOST["open"] = max(MOST["open"], OPEN["open"])

    async def step(self, action):
        RUNNING[self.name] += 1
        MOST["running"] = max(MOST["running"], RUNNING.total())
        MOST["cells"] = max(MOST["cells"], sum(count > 0 for count in RUNNING.values()))
        await asyncio.sleep(self.seconds)
        RUNNING[self.name] -= 1
        return super().step(action)

    def close(self):
        super().close()
        OPEN["open"] -= 1


class Broken(parity.Parity):
    def step(self, action):
        return {}["no such key"]


def cell(name, n=10, **kwargs):
    return Cell(EnvSpec(name, f"{__name__}:Counted", {"name": name, **kwargs}), EXPERT, n=n)


def played(cells, out, make=agents.policy_maker, watch=None, **more):
    return asyncio.run(run_plan(Suite("r", tuple(cells), **more), out, make=make, watch=watch))


@pytest.fixture(autouse=True)
def clean():
    for counter in (RUNNING, MOST, OPEN):
        counter.clear()


class Looking:
    """What a display is told."""

    def __init__(self):
        self.told = []

    def started(self, cell, total, done_before):
        self.told.append(("started", cell.name))

    def ended(self, cell, trajectory):
        self.told.append(("ended", cell.name))

    def finished(self, cell):
        self.told.append(("finished", cell.name))


def test_cells_run_at_the_same_time_and_no_more_episodes_than_asked_for(tmp_path):
    look = Looking()
    began = time.monotonic()
    results = played([cell(name) for name in "abcd"], tmp_path / "r", concurrency=8, watch=look)
    wall = time.monotonic() - began
    assert [c.episodes for c in results.cells] == [10, 10, 10, 10]
    assert (MOST["running"], MOST["cells"]) == (8, 4)
    assert OPEN["open"] == 0
    for name in "abcd":
        of_it = [what for what, which in look.told if which == f"{name}@expert"]
        assert of_it == ["started", *["ended"] * 10, "finished"]
    assert [what for what, _ in look.told[:4]] == ["started"] * 4
    assert results.seconds <= wall < sum(c.seconds for c in results.cells), "cells share the time of the run"


def test_a_place_whose_cell_has_nothing_left_helps_another(tmp_path):
    played([cell("short", n=2), cell("long", n=20)], tmp_path / "r", concurrency=6)
    assert MOST["running"] == 6


def test_with_one_place_cells_come_one_after_another(tmp_path):
    look = Looking()
    played([cell("a", n=3, seconds=0), cell("b", n=3, seconds=0)], tmp_path / "r", concurrency=1, watch=look)
    assert [which[0] for _, which in look.told] == ["a"] * 5 + ["b"] * 5
    assert MOST["running"] == 1


def test_equal_tasks_of_different_cells_are_told_apart_and_a_stopped_run_goes_on(tmp_path):
    cells = [cell("a", seconds=0.01), cell("b", seconds=0.01)]
    first = played(cells, tmp_path / "r", concurrency=4, budget=Budget(episodes=9))
    assert first.stopped == "episodes"
    assert 9 <= sum(c.episodes for c in first.cells) < 20
    assert all(c.episodes for c in first.cells)
    again = played(cells, tmp_path / "r", concurrency=4)
    assert [c.episodes for c in again.cells] == [10, 10]
    for file in (tmp_path / "r" / "episodes").iterdir():
        assert len(list(read_jsonl(file))) == len(read_cell(file)) == 10, "nothing was played twice"


def test_asked_to_stop_all_cells_do(tmp_path):
    async def go():
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(0.3, stop.set)
        cells = [cell(name, seconds=30) for name in "ab"] + [cell("c", seconds=0.01)]
        return await run_plan(Suite("r", tuple(cells), 6), tmp_path / "r", make=agents.policy_maker, stop=stop)

    results = asyncio.run(go())
    assert results.stopped == "interrupted"
    assert [c.episodes for c in results.cells] == [0, 0, 10]


# ---- what makes no sense to go on with


def test_a_key_that_is_refused_stops_the_run_after_a_few_requests(tmp_path, capsys):
    asked = []

    def refuse(body):
        asked.append(body)
        return 401, "Incorrect API key provided: wrong"

    with serving(refuse) as url:
        words = ["eval", "frozen_lake", "--model", "double", "--base-url", url, "-n", "60", "--concurrency", "4"]
        assert main([*words, "--out", str(tmp_path / "r"), "--quiet"]) == 2
    told = capsys.readouterr().err
    assert "the key is refused again and again" in told
    assert "Incorrect API key provided" in told
    assert len(asked) <= MOST_REFUSALS + 4, "and no episode is tried twice"
    assert json.loads((tmp_path / "r" / "results.json").read_text())["stopped"] == "key"


def test_one_refusal_among_answers_stops_nothing(tmp_path):
    asked = []

    def sometimes(body):
        asked.append(body)
        return (401, "no") if len(asked) % 3 == 0 else said("right")

    with serving(sometimes) as url:
        chat = agents.chat("double", url)
        lake = replace(cell("x"), env=EnvSpec("parity", "parity:Parity"), agent=chat, n=20)
        results = played([lake], tmp_path / "r", concurrency=1, retries=0)
    assert (results.stopped, results.cells[0].errors > 3) == (None, True)


class Secretive:
    """An agent that does not tell what it uses."""

    async def act(self, messages, tools):
        return "even"


class Telling:
    async def act(self, messages, tools):
        return Reply({"role": "assistant", "content": "even"}, usage={"prompt_tokens": 60, "completion_tokens": 40})


class Counting:
    def __init__(self):
        self.calls = EndpointUsage()

    async def act(self, messages, tools):
        self.calls.usage["prompt_tokens"] = self.calls.usage.get("prompt_tokens", 0) + 100
        return "even"


PARITY = f"{parity.__name__}:Parity"


@pytest.mark.parametrize("limit", [["--token-limit", "500"], ["--max-episode-tokens", "500"]])
def test_a_limit_of_tokens_is_refused_where_nobody_tells_what_an_agent_uses(limit, tmp_path, capsys):
    words = ["eval", PARITY, "--agent", f"{__name__}:Secretive", "--concurrency", "2", *limit]
    assert main([*words, "--out", str(tmp_path / "r"), "--quiet"]) == 2
    assert f"{limit[0]} cannot be enforced" in capsys.readouterr().err
    [file] = (tmp_path / "r" / "episodes").iterdir()
    assert len(file.read_text().splitlines()) <= 2


@pytest.mark.parametrize("agent", ["Telling", "Counting"])
def test_a_limit_of_tokens_binds_an_agent_that_tells(agent, tmp_path):
    words = ["eval", PARITY, "--agent", f"{__name__}:{agent}", "--token-limit", "500", "--concurrency", "1", "--quiet"]
    assert main([*words, "--out", str(tmp_path / "r")]) == 3


def test_a_limit_of_cost_needs_a_price_of_an_agent_too(tmp_path, capsys):
    (tmp_path / "prices.yaml").write_text("other: {input: 1, output: 1}")
    words = ["eval", PARITY, "--agent", f"{__name__}:Telling", "--cost-limit", "0.001", "--no-store", "--quiet"]
    assert main(words) == 2
    assert "needs a table of prices" in capsys.readouterr().err
    assert main([*words, "--prices", str(tmp_path / "prices.yaml")]) == 2
    assert f"the table lacks '{__name__}:Telling'" in capsys.readouterr().err
    (tmp_path / "prices.yaml").write_text(f'"{__name__}:*": {{input: 1, output: 1}}')
    assert main([*words, "--concurrency", "1", "--prices", str(tmp_path / "prices.yaml")]) == 3


def test_an_endpoint_that_counts_no_tokens_cannot_keep_a_limit_either(tmp_path, capsys):
    with serving(lambda body: said("even", usage=None)) as url:
        words = ["eval", PARITY, "--model", "double", "--base-url", url, "--token-limit", "500", "--no-store"]
        assert main([*words, "--quiet"]) == 2
    assert "--token-limit cannot be enforced" in capsys.readouterr().err


def test_the_error_of_an_environment_has_file_line_and_traceback(tmp_path):
    results = played([replace(cell("x", n=3), env=EnvSpec("x", f"{__name__}:Broken"))], tmp_path / "r", retries=0)
    [(cause, times)] = results.cells[0].error_texts.items()
    assert times == 3
    assert cause.startswith("step failed: KeyError: 'no such key' (test_eval_parallel.py:")
    assert cause.endswith("in step)")
    [file] = (tmp_path / "r" / "episodes").iterdir()
    for trajectory in read_jsonl(file):
        text = trajectory.metadata["traceback"]
        assert text.startswith("Traceback")
        assert text.endswith("KeyError: 'no such key'\n")
        assert 'return {}["no such key"]' in text
        assert "lanes.py" not in text
