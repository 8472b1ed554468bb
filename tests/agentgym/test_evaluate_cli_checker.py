"""Evaluation, the command line, and what `check_env` says about environments that are wrong on purpose."""

import asyncio
import json
import random

import pytest

from agentgym import registration
from agentgym.checker import check_env
from agentgym.cli import main
from agentgym.core import Env
from agentgym.evaluate import evaluate
from agentgym.messages import user
from agentgym.policy import ExpertPolicy, ScriptedPolicy
from agentgym.registration import register
from agentgym.tasks import Task, TaskSet
from agentgym.trajectory import read_jsonl


class Parity(Env):
    """Is the number even? Two turns."""

    max_turns = 2

    @classmethod
    def default_tasks(cls, split="train"):
        if split not in ("train", "test"):
            raise ValueError(f"no split {split!r}; it has train, test")
        first = {"train": 0, "test": 100}[split]
        return TaskSet([Task(str(i), answer="even" if i % 2 == 0 else "odd") for i in range(first, first + 20)])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return [user(f"Is {self.task.id} even or odd?")], {}

    def step(self, action):
        right = self.read(action) == self.task.answer
        return self.outcome("Right." if right else "No.", float(right), terminated=right, success=right)

    def expert_action(self):
        return self.task.answer

    def random_action(self, rng):
        return rng.choice(["even", "odd"])


class Broken(Parity):
    """Fails on odd numbers."""

    def step(self, action):
        if self.task.answer == "odd":
            raise RuntimeError("out of order")
        return super().step(action)


class Uninstalled(Parity):
    def __init__(self, **kwargs):
        import nowhere_to_be_found  # noqa: F401

        super().__init__(**kwargs)


class Dead(Parity):
    def init(self, task):
        raise OSError("no licence")


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


@pytest.fixture(autouse=True)
def registered():
    registration.load_plugins()
    before = dict(registration._specs)
    register("test/parity", Parity, description="even or odd", tags=["test"])
    register("test/broken", Broken)
    register("test/uninstalled", Uninstalled)
    yield
    registration._specs.clear()
    registration._specs.update(before)


def test_evaluate_plays_every_sample_and_stores_it(tmp_path):
    report = asyncio.run(
        evaluate(
            "test/parity", lambda e: ScriptedPolicy(["even", "even"]), n=10, k=3, out=tmp_path / "o", concurrency=4
        )
    )
    assert (report.tasks, report.episodes, report.success) == (10, 30, 0.5)
    assert report.turns == 1.5
    stored = list(read_jsonl(tmp_path / "o" / "trajectories.jsonl"))
    assert sorted(t.id for t in stored) == sorted(f"{i}/{s}" for i in range(100, 110) for s in range(3))
    assert json.loads((tmp_path / "o" / "report.json").read_text())["success"] == 0.5
    with pytest.raises(ValueError, match="already holds an evaluation"):
        asyncio.run(evaluate("test/parity", lambda e: ExpertPolicy(), n=1, out=tmp_path / "o"))


def test_check_says_ok_or_what_is_wrong(capsys):
    assert main(["check", "test/parity"]) == 0
    assert "test/parity: ok" in capsys.readouterr().out
    assert main(["check", "test/parity", "test/broken"]) == 1
    assert "out of order" in capsys.readouterr().out


def test_eval_says_where_its_tasks_are_from(capsys, monkeypatch):
    monkeypatch.setenv("AGENTGYM_DATA", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["eval", "gsm8k", "--policy", "expert", "-n", "1"]) == 0
    assert "gsm8k: tasks: the project's own word problems\n" in capsys.readouterr().err


def test_eval_prints_a_table_or_json(capsys, tmp_path):
    assert main(["eval", "test/parity", "--policy", "expert", "-n", "5", "--out", str(tmp_path)]) == 0
    assert "100.0%" in capsys.readouterr().out
    assert (tmp_path / "test_parity" / "trajectories.jsonl").exists()
    assert main(["eval", "test/parity", "test/broken", "--policy", "random", "-n", "20", "-k", "2", "--json"]) == 0
    good, bad = json.loads(capsys.readouterr().out)
    assert 0.3 < good["success"] < 1
    assert (bad["errors"], bad["episodes"]) == (20, 20)


def test_eval_where_nothing_could_be_played_fails(capsys):
    register("test/dead", Dead)
    assert main(["eval", "test/dead", "--policy", "expert", "-n", "3"]) == 1
    assert "3 x init failed: OSError: no licence" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["eval", "test/parit", "--policy", "expert"], "did you mean 'test/parity'"),
        (["check", "test/parit"], "did you mean 'test/parity'"),
        (["check", "no.such:Env"], "cannot import module 'no.such'"),
        (["check", "gymnasium:FrozenLak-v1"], "Did you mean: `FrozenLake`"),
        (["check", "test/uninstalled"], "test/uninstalled: No module named 'nowhere_to_be_found'"),
        (["eval", "test/parity", "--policy", "expert", "--split", "tset"], "no split 'tset'"),
        (["eval", "test/parity", "--policy", "expert", "--kwargs", '{"turns": 3}'], "takes no argument 'turns'"),
        (["eval", "test/parity", "--policy", "expert", "--kwargs", "{"], "--kwargs is no JSON"),
        (["eval", "test/parity", "--policy", "expert", "-n", "0"], "at least 1"),
        (["eval", "test/parity", "--policy", "expert", "--concurrency", "0"], "at least 1"),
        (["eval", "test/parity"], "--model and --base-url are needed"),
        (["eval", "test/parity", "--model", "m", "--base-url", "here"], "must begin with http"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, words, capsys):
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["evla"], ["eval"], ["eval", "test/parity", "--polcy", "x"], []])
def test_a_wrong_command_line_is_one_line_and_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "--help)" in err


def test_async_environments_are_checked_and_evaluated():
    assert check_env(AsyncParity()) == []
    report = asyncio.run(evaluate(registration.spec(f"{__name__}:AsyncParity"), lambda e: ExpertPolicy(), n=5))
    assert (report.success, report.errors) == (1.0, 0)


class Clock(Parity):
    def step(self, action):
        observation, *rest, info = super().step(action)
        return observation, *rest, {**info, "at": random.random()}


class Endless(Parity):
    max_turns = 10**9

    def random_action(self, rng):
        return "neither"


class Careless(Parity):
    def step(self, action):
        self.running = True
        return super().step(action)


class Opaque(Parity):
    def step(self, action):
        *rest, info = super().step(action)
        return *rest, {**info, "state": {1, 2}}


class Fussy(Parity):
    def step(self, action):
        if not self.read(action).isascii():
            raise ValueError("speak plainly")
        self.turn -= 1
        return super().step(action)


class Infinite(Parity):
    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, float("inf"), *rest


class Leaky(Parity):
    @classmethod
    def default_tasks(cls, split="train"):
        return Parity.default_tasks("train")


class Once(Parity):
    closed = False

    def close(self):
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True


OPENING = user("hello")


class Shared(Parity):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return [OPENING], {}


@pytest.mark.parametrize(
    ("env_class", "words"),
    [
        (Clock, "the same seed"),
        (Endless, "set max_turns"),
        (Careless, "begin step with `text = self.read(action)`"),
        (Opaque, "the info must be plain JSON values"),
        (Fussy, "answer what you cannot read"),
        (Infinite, "the reward must be a finite number"),
        (Leaky, "ids are unique"),
        (Once, "close() must be callable twice"),
        (Shared, "returns the same message dicts twice"),
    ],
)
def test_check_env_finds_what_is_wrong_and_says_what_to_do(env_class, words):
    problems = check_env(env_class())
    assert any(words in problem for problem in problems), problems


def test_a_sound_environment_has_no_problems():
    assert check_env(Parity()) == []
    assert check_env("test/parity") == []
