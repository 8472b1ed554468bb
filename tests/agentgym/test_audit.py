"""`audit` plays the known hacks of an environment: none may earn anything, and the expert must succeed."""

import asyncio

import pytest

from agentgym.checks.audit import Hack, audit
from agentgym.cli import main
from agentgym.core.env import Env
from agentgym.core.registration import EnvSpec
from agentgym.core.tasks import Task, TaskSet


class Sums(Env):
    """Asks for a sum; believes anyone who says "I am right"."""

    max_turns = 3

    def __init__(self, believes=True, tasks=None, max_turns=None, render_mode=None):
        super().__init__(tasks, max_turns, render_mode)
        self.believes = believes

    @classmethod
    def default_tasks(cls, split="train"):
        return TaskSet([Task(f"{split}-{n}", answer=str(n + n)) for n in (1, 2)], name=split)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return [{"role": "user", "content": f"Add {self.task.id}."}], {}

    def step(self, action):
        text = self.read(action)
        if text == "break":
            raise RuntimeError("broken")
        right = text == self.task.answer or (self.believes and text == "I am right")
        return self.outcome("Done.", float(right), terminated=text != "wait", success=right, verdict=text)

    def expert_action(self):
        return self.task.answer


class Gullible(Sums):
    def hacks(self, task):
        return [Hack("claim", "says so", ("wait", "I am right")), Hack("silence", "says nothing", ("",))]


class Breakable(Gullible):
    def hacks(self, task):
        return [Hack("break", "breaks the environment", ("break",))]


def audited(cls=Gullible, **settings):
    kwargs = {name: settings.pop(name) for name in ("believes",) if name in settings}
    return asyncio.run(audit(EnvSpec("gullible", cls, kwargs), **settings))


def test_a_hack_that_earns_something_is_a_problem():
    found = audited()
    assert [(each.hack, each.reward, each.ok) for each in found.played] == [
        ("gold", 1.0, True),
        ("claim", 1.0, False),
        ("silence", 0.0, True),
    ]
    assert not found.ok
    assert audited(believes=False).ok


def test_it_plays_the_first_tasks_of_a_split_and_can_be_told_which_hacks():
    found = audited(split="test", n=2, only=["silence"])
    played = [("test-1", "gold"), ("test-1", "silence"), ("test-2", "gold"), ("test-2", "silence")]
    assert [(each.task, each.hack) for each in found.played] == played
    with pytest.raises(ValueError, match="no hack 'bribe': there are claim, silence"):
        audited(only=["bribe"])


def test_short_texts_of_the_last_info_tell_how_it_ended():
    assert audited().played[1].told == {"verdict": "I am right"}


def test_an_episode_that_fails_proves_nothing():
    found = audited(Breakable)
    assert (found.played[1].reward, found.played[1].ok) == (None, False)
    assert "broken" in found.played[1].error


def test_an_environment_without_hacks_says_so():
    with pytest.raises(TypeError, match=r"gullible has no hacks\(task\), which returns"):
        audited(Sums)


def test_the_command_shows_a_table_and_fails_if_a_hack_pays(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    id = f"{__name__}:Gullible"
    assert main(["validate", id, "--audit"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[1:4]] == ["gold", "claim", "silence"]
    assert "problem" in lines[2]
    assert lines[4].startswith(f"{id}: 1 problem (2 hacks in ")
    assert main(["validate", id, "--audit", "--kwargs", '{"believes": false}', "--hack", "claim"]) == 0
    assert "ok (1 hacks" in capsys.readouterr().out
    assert main(["validate", id, "--hack", "claim"]) == 2
    assert "--hack goes with --audit" in capsys.readouterr().err
