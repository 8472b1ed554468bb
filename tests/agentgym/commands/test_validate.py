"""`agentgym validate`: what it proves of sound environments, and what it finds in others."""

import asyncio
import json
import random
import time

import pytest

from agentgym.checks.validate import validate
from agentgym.cli import main
from agentgym.core import registration
from agentgym.core.env import Env
from agentgym.core.messages import user
from agentgym.core.registration import EnvSpec, register
from agentgym.core.tasks import Task, TaskSet
from agentgym.rollout.episode import Limits


class Doubling(Env):
    """Twice a number."""

    @classmethod
    def default_tasks(cls, split="train"):
        if split not in ("train", "test"):
            raise ValueError(f"doubling has no split {split!r}; it has train, test")
        first = {"train": 0, "test": 100}[split]
        return TaskSet([Task(str(i), answer=2 * i) for i in range(first, first + 20)])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return [user(f"Twice {self.task.id}?")], {}

    def step(self, action):
        right = self.read(action) == str(self.task.answer)
        return self.outcome("Right." if right else "No.", float(right), terminated=True, success=right)

    def expert_action(self):
        return str(self.task.answer)

    def random_action(self, rng):
        return str(2 * rng.randrange(100, 120))


class WrongKey(Doubling):
    def expert_action(self):
        return "7" if self.task.id == "103" else super().expert_action()


class Generous(Doubling):
    """Pays for saying nothing."""

    def step(self, action):
        right = self.read(action) in ("", str(self.task.answer))
        return self.outcome("Well.", float(right), terminated=True, success=right)


class Leaking(Doubling):
    """The first test task is a train task by another name."""

    @classmethod
    def default_tasks(cls, split="train"):
        tasks = list(super().default_tasks(split))
        return TaskSet([Task("renamed", answer=tasks[0].answer - 200), *tasks[1:]] if split == "test" else tasks)


class FreeSilence(Doubling):
    """Guesses cost something, and saying nothing does not."""

    def step(self, action):
        said = self.read(action)
        right = said == str(self.task.answer)
        return self.outcome("Well.", -float(said != "" and not right), terminated=True, success=right)


class BarelyFree(Doubling):
    """As `FreeSilence`, for two of the tasks only: too few to tell from chance."""

    def step(self, action):
        said = self.read(action)
        right = said == str(self.task.answer)
        cost = self.task.id in ("101", "102") and said != ""
        return self.outcome("Well.", float(right) - float(cost and not right), terminated=True, success=right)


class Lottery(Doubling):
    def step(self, action):
        *rest, info = super().step(action)
        rest[0] = [user(f"Drawn: {random.random()}")]
        return *rest, info


class Falls(Doubling):
    def step(self, action):
        if self.task.id == "105":
            raise OSError("no space")
        return super().step(action)


class Unsolved(Doubling):
    """Its class has an expert, but none for these tasks."""

    def expert_action(self):
        raise NotImplementedError("nobody knows")


class Slow(Doubling):
    """Says how long a step may take."""

    step_seconds = 60.0

    def step(self, action):
        time.sleep(0.3)
        return super().step(action)


@pytest.fixture(autouse=True)
def registered():
    registration.load_plugins()
    before = dict(registration.registered_specs)
    yield
    registration.registered_specs.clear()
    registration.registered_specs.update(before)


def validated(env_class, capsys, *words):
    code = main(["validate", f"{__name__}:{env_class.__name__}", "-n", "10", "--json", *words])
    (result,) = json.loads(capsys.readouterr().out)
    return code, result


def states(result):
    return {finding["check"]: finding["state"] for finding in result["findings"]}


def test_a_sound_environment_is_proved(capsys):
    code, result = validated(Doubling, capsys)
    assert code == 0
    assert set(states(result).values()) == {"ok"}
    assert set(states(result)) == {"splits", "episodes", "gold", "floor", "repeats", "other process"}
    scores = {score["player"]: score for score in result["scores"]}
    assert (scores["gold"]["success"], scores["null"]["success"]) == (1.0, 0.0)
    assert scores["random"]["success"] < 0.5


@pytest.mark.parametrize(
    ("env_class", "check", "words"),
    [
        (WrongKey, "gold", "does not succeed on 1 of 10 tasks (103)"),
        (Generous, "floor", "an empty reply should earn nothing"),
        (FreeSilence, "floor", "on the same 10: a reply that cannot be read must cost at least what a bad one does"),
        (
            FreeSilence,
            "floor",
            "null play earns 0 a task, and expert_action no more (0): a reply that cannot be read must",
        ),
        (Leaking, "splits", "1 task(s) of test are tasks of train too (0 = renamed)"),
        (Lottery, "repeats", "episodes differ played again"),
        (Lottery, "other process", "episodes differ in another process"),
        (Falls, "episodes", "1 of 10 episodes of gold play failed"),
    ],
)
def test_what_is_not_so_is_a_problem_and_exit_code_1(env_class, check, words, capsys):
    code, result = validated(env_class, capsys)
    assert code == 1
    texts = [f["text"] for f in result["findings"] if f["check"] == check and f["state"] == "problem"]
    assert any(words in text for text in texts), result["findings"]


def test_silence_that_beats_random_play_by_chance_is_a_note(capsys):
    code, result = validated(BarelyFree, capsys)
    assert code == 0
    [text] = [f["text"] for f in result["findings"] if f["check"] == "floor" and f["state"] == "note"]
    assert "null play earns 0 a task, random play -0.1 on the same 10: that may be chance" in text


def test_an_error_is_no_score_of_zero(capsys):
    _, result = validated(Falls, capsys)
    gold = result["scores"][0]
    assert (gold["episodes"], gold["errors"], gold["success"]) == (9, 1, 1.0)


def test_the_floor_is_the_users_to_say(capsys):
    assert validated(Generous, capsys, "--floor", "1")[0] == 0
    code, result = validated(Generous, capsys, "--floor", "0.9")
    assert code == 1
    assert any("more than the floor of 90.0%" in f["text"] for f in result["findings"])


def test_what_is_declared_to_change_by_chance_is_not_replayed(capsys):
    register("test/lottery", f"{__name__}:Lottery", nondeterministic=True)
    assert main(["validate", "test/lottery", "-n", "5"]) == 0
    assert "not proved: it is registered with nondeterministic=True" in capsys.readouterr().out


def test_an_expert_that_is_for_other_tasks_of_its_class_is_none(capsys):
    code, result = validated(Unsolved, capsys)
    assert (code, states(result)["gold"]) == (0, "note")
    assert [score["player"] for score in result["scores"]] == ["null", "random"]


def test_without_an_expert_gold_is_not_proved(capsys, monkeypatch):
    monkeypatch.delattr(Doubling, "expert_action")
    monkeypatch.delattr(Doubling, "random_action")
    code, result = validated(Doubling, capsys)
    assert (code, states(result)["gold"]) == (0, "note")
    assert any("with random words" in f["text"] for f in result["findings"])


def test_people_get_a_table_and_progress(capsys):
    assert main(["validate", f"{__name__}:Doubling", "-n", "5"]) == 0
    out, err = capsys.readouterr()
    assert "gold" in out
    assert "100.0%" in out
    assert f"{__name__}:Doubling: null: 5 episodes" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--split", "tset"], "no split 'tset'"),
        (["-n", "0"], "at least 1"),
        (["-n", "-1", "--audit"], "at least 1"),
        (["--concurrency", "0"], "at least 1"),
        (["--floor", "5"], "a share from 0 to 1"),
        (["--floor", "1", "--audit"], "--floor does not go with --audit"),
        (["--kwargs", "[]"], "must be a JSON object"),
        (["--kwargs", '{"sides": 3}'], "takes no argument 'sides'"),
        (["--timeout", "0"], "must be positive"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(words, said, capsys):
    try:
        code = main(["validate", f"{__name__}:Doubling", *words])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_an_environment_whose_steps_take_long_by_its_own_word_has_that_long():
    found = asyncio.run(validate(EnvSpec("slow", Slow), n=2, limits=Limits(step_timeout=0.2)))
    assert [score["errors"] for score in found.scores] == [0, 0, 0], found.findings
