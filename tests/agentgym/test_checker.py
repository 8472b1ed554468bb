"""What the checker says of environments that are sound, and of those that are wrong on purpose."""

import asyncio
import random
import time
from pathlib import Path

import pytest

from agentgym.checks.check_env import CHECKS, check_env, examine
from agentgym.core import registration
from agentgym.core.env import Env
from agentgym.core.messages import user
from agentgym.core.registration import register
from agentgym.core.tasks import Task, TaskSet


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


class Timed(Parity):
    def step(self, action):
        *rest, info = super().step(action)
        return *rest, {**info, "at": time.perf_counter()}


class GlobalRandom(Parity):
    def step(self, action):
        if self.read(action) == random.choice(["even", "odd"]):
            return self.outcome("Lucky.", success=False)
        return self.outcome("Unlucky.", success=False)


class ReseedsGlobally(Parity):
    def reset(self, *, seed=None, options=None):
        random.seed(1)
        return super().reset(seed=seed, options=options)


class OneForAll(Parity):
    """What an episode knows is in the class."""

    asked = ""

    def reset(self, *, seed=None, options=None):
        opening, info = super().reset(seed=seed, options=options)
        OneForAll.asked = self.task.id
        return opening, info

    def step(self, action):
        self.read(action)
        return self.outcome(f"I asked of {self.asked}.", success=False)


class Hashing(Parity):
    """Shows texts in the order in which a set has them, which is another one in every process."""

    def step(self, action):
        self.read(action)
        return self.outcome(" ".join({f"word{i}" for i in range(20)}), success=False)


class Hoarder(Parity):
    kept = []  # noqa: RUF012 - this is what is wrong with it

    def reset(self, *, seed=None, options=None):
        self.kept.append(bytearray(200_000))
        return super().reset(seed=seed, options=options)


class Mute(Parity):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]  # noqa: RUF012


class Twins(Parity):
    tools = [{"type": "function", "function": {"name": "look", "description": "Look."}}] * 2


class Gymnastic(Parity):
    def step(self, action):
        return super().step(action)[:4]


class NeverReset(Parity):
    def reset(self, *, seed=None, options=None):
        self.open = True
        return super().reset(seed=seed, options=options)

    def close(self):
        del self.open
        self.open = False


class Tuples(Parity):
    @classmethod
    def default_tasks(cls, split="train"):
        return TaskSet([Task(f"{split}{i}", answer="odd", metadata={"pair": (1, 2)}) for i in range(3)])


class Settings(Parity):
    def __init__(self, sides=None, **kwargs):
        super().__init__(**kwargs)


class Silent(Parity):
    def step(self, action):
        return *super().step(action)[:4], {}


class SameTask(Parity):
    @property
    def tasks(self):
        return TaskSet([Task("1", answer="odd"), Task("1b", answer="odd")])

    def _draw(self, seed):
        return self.tasks[0]


class Sleeps(Parity):
    def step(self, action):
        time.sleep(30)


class AsyncSleeps(AsyncParity):
    async def step(self, action):
        await self.nap()

    async def nap(self):
        await asyncio.sleep(30)


class Blocks(AsyncParity):
    async def step(self, action):
        time.sleep(30)


class SlowToMake(Parity):
    def __init__(self, **kwargs):
        time.sleep(30)


@pytest.fixture(autouse=True)
def registered():
    registration.load_plugins()
    before = dict(registration.registered_specs)
    register("test/parity", Parity, description="even or odd", tags=["test"])
    yield
    registration.registered_specs.clear()
    registration.registered_specs.update(before)


def named(env_class):
    return f"{__name__}:{env_class.__name__}"


def line_of(text):
    """Of this file: where a text stands for the first time."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)


def test_a_sound_environment_has_no_problems_and_every_check_is_told():
    found = examine("test/parity")
    assert [f for f in found if f.state == "problem"] == []
    assert list(dict.fromkeys(finding.check for finding in found)) == list(CHECKS)
    texts = {finding.check: finding.text for finding in found}
    assert texts["tasks"] == "train 20, test 20"
    assert texts["rewards"].startswith("3 random episodes earned ")


def test_an_object_is_checked_as_far_as_can_be():
    assert check_env(Parity()) == []
    notes = {finding.check for finding in examine(Parity()) if finding.state == "note"}
    assert {"spec", "concurrency", "other process"} <= notes


def test_async_environments_are_checked():
    assert check_env(AsyncParity()) == []
    assert check_env(named(AsyncParity)) == []


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
        (Gymnastic, "step must return (observation, reward, terminated, truncated, info)"),
        (Mute, "look has no description"),
        (Twins, "two tools are called 'look'"),
        (Tuples, "changes on its way through JSON"),
    ],
)
def test_what_is_wrong_is_found_and_said_with_what_to_do(env_class, words):
    problems = check_env(env_class())
    assert any(words in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("env_class", "check", "words"),
    [
        (GlobalRandom, "process state", "an episode changes Python's global random state: draw from self.np_random"),
        (ReseedsGlobally, "process state", "seed nothing global"),
        (OneForAll, "concurrency", "keep what an episode changes in self"),
        (Hashing, "other process", "do not depend on the order of sets"),
        (Hoarder, "memory", "let go in reset of what the last episode made"),
        (NeverReset, "close", "close() must be callable before any reset; it raised AttributeError"),
    ],
)
def test_what_only_others_of_its_kind_show_is_found(env_class, check, words):
    problems = {finding.check: str(finding) for finding in examine(named(env_class)) if finding.state == "problem"}
    assert words in problems.get(check, ""), problems


@pytest.mark.parametrize(
    ("env_class", "check", "words"),
    [
        (Silent, "rewards", "info has no 'success' on the last step"),
        (SameTask, "seeds", "all draw the same task"),
        (Parity, "spec", "named by value, not registered"),
    ],
)
def test_what_is_only_worth_knowing_is_a_note(env_class, check, words):
    found = {finding.check: finding for finding in examine(named(env_class))}
    assert found[check].state == "note"
    assert words in found[check].text


def test_what_changes_by_chance_is_not_compared_where_the_author_says_so():
    spec = register("test/timed", Timed, nondeterministic=True)
    assert check_env(spec) == []
    notes = [finding.check for finding in examine(spec) if "nondeterministic" in finding.text]
    assert notes == ["repeats", "concurrency", "other process"]


@pytest.mark.parametrize(
    ("env_class", "words", "line"),
    [
        (Sleeps, "step had not returned after 0.5 s", "        time.sleep(30)"),
        (AsyncSleeps, "step had not returned after 0.5 s", "        await asyncio.sleep(30)"),
        (Blocks, "an `async def` method blocks the event loop", ""),
        (SlowToMake, "making the environment had not returned after 0.5 s", ""),
    ],
)
def test_a_call_that_hangs_is_named_with_its_line_and_holds_nobody_up(env_class, words, line):
    started = time.monotonic()
    found = examine(named(env_class), timeout=0.5)
    assert time.monotonic() - started < 15
    problem = next(finding for finding in found if finding.state == "problem")
    assert words in problem.text
    assert "test_checker.py:" in problem.place
    if line:
        assert problem.place.endswith(f":{line_of(line)}")
    assert check_env(named(Parity)) == [], "the checker is usable after a call that hangs"


def test_the_place_of_an_exception_is_the_authors_line():
    problem = next(finding for finding in examine(named(Fussy)) if finding.state == "problem")
    assert problem.place.endswith(f"test_checker.py:{line_of('raise ValueError(' + chr(34) + 'speak plainly')}")


def test_settings_that_cannot_go_to_another_process_are_told():
    spec = register("test/settings", Settings, kwargs={"sides": {1, 2}})
    assert any("cannot go to another process" in problem for problem in check_env(spec))


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_timeout_is_positive(seconds):
    with pytest.raises(ValueError, match="must be positive"):
        examine("test/parity", timeout=seconds)
