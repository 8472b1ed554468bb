"""Evaluation, the command line, and what `check_env` says about environments that are wrong on purpose."""

import asyncio
import random

import pytest

from agentgym import registration
from agentgym.checker import check_env
from agentgym.cli import main
from agentgym.core import Env
from agentgym.messages import user
from agentgym.registration import register
from agentgym.tasks import Task, TaskSet


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


def test_check_says_ok_or_what_is_wrong(capsys):
    assert main(["check", "test/parity"]) == 0
    assert "test/parity: ok" in capsys.readouterr().out
    assert main(["check", "test/parity", "test/broken"]) == 1
    assert "out of order" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "test/parit"], "did you mean 'test/parity'"),
        (["check", "no.such:Env"], "cannot import module 'no.such'"),
        (["check", "gymnasium:FrozenLak-v1"], "Did you mean: `FrozenLake`"),
        (["check", "test/uninstalled"], "test/uninstalled: No module named 'nowhere_to_be_found'"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, words, capsys):
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["evla"], ["check"], ["eval", "test/parity", "--polcy", "x"]])
def test_a_wrong_command_line_is_one_line_and_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "--help)" in err


def test_async_environments_are_checked():
    assert check_env(AsyncParity()) == []


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
