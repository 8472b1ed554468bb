"""An episode whose environment fails goes on from its turns, within one start of a run; the engine is asked for nothing twice."""

from __future__ import annotations

from functools import partial
from itertools import chain

import journal_cases
import pytest
from journal_cases import episodes_of, exactly, failures, lines_of

from agentgym.core.registration import spec
from agentgym_envs.games.frozen_lake import FrozenLake


@pytest.fixture(scope="module")
def rollout(tmp_path_factory):
    """Plays two tasks, three episodes each, by a journal: the groups, the journal, and how often the engine answered."""
    return partial(journal_cases.rollout, journal_cases.build(tmp_path_factory.mktemp("policy")))


def failing(*plan, rains=False):
    """A lake of which the first episode of the first task fails in these turns, in one of its tries after the other.

    If it `rains`, that task's lake says so once it has failed.
    """
    first = next(iter(spec("frozen_lake").tasks("train"))).id
    left, victim = list(plan), []

    class Failing(FrozenLake):
        def step(self, action):
            observation, *rest = super().step(action)
            if self.task.id == first and left and self.turn == left[0] and victim in ([], [self.seed_of]):
                victim[:] = [self.seed_of]
                raise ConnectionError(f"lost in turn {left.pop(0)}")
            if rains and victim:
                observation = [{**message, "content": "It rains. " + message["content"]} for message in observation]
            return observation, *rest

        def reset(self, *, seed=None, options=None):
            self.seed_of = seed
            return super().reset(seed=seed, options=options)

    return Failing


def test_an_episode_whose_environment_fails_again_and_again_goes_on_from_its_turns(rollout, tmp_path):
    undisturbed, _, asked = rollout(tmp_path / "whole")
    groups, journal, again = rollout(tmp_path / "a", failing(2, 3, 1))
    assert exactly(groups) == exactly(undisturbed)
    assert again == asked, "the engine is asked for nothing twice"
    assert sum(failures(groups)) == 3
    assert (journal.retried, journal.answered, journal.diverged) == (2 + 1 + 3, 0, 0)
    turns = [sorted(map(str, chain(*lines_of(tmp_path / name)))) for name in ("a", "whole")]
    assert turns[0] == turns[1], "for a later start too"


def test_an_episode_that_fails_twice_in_a_turn_is_begun_anew_once(rollout, tmp_path):
    undisturbed, _, asked = rollout(tmp_path / "whole")
    groups, journal, again = rollout(tmp_path / "a", failing(2, 2))
    assert [t.messages() for t in episodes_of(groups)] == [t.messages() for t in episodes_of(undisturbed)]
    assert (again, journal.retried) == (asked + 2, 2)
    groups, journal, again = rollout(tmp_path / "b", failing(*[2] * 9))
    assert [t.failed for t in episodes_of(groups)].count(True) == 1
    assert sorted(failures(groups)) == [0] * 5 + [2]
    assert journal.retried == 2


def test_an_environment_that_says_otherwise_after_it_failed_begins_its_episode_anew(rollout, tmp_path):
    groups, journal, _ = rollout(tmp_path / "a", failing(2, rains=True))
    assert not any(t.failed for t in episodes_of(groups))
    assert max(failures(groups)) == 2, "the failure and the difference"
    assert journal.diverged == 1


def test_an_environment_that_cannot_be_made_is_tried_twice(rollout, tmp_path):
    made = []

    def make():
        made.append(1)
        raise ConnectionError("no server")

    groups, _, asked = rollout(tmp_path / "a", make)
    assert (failures(groups), asked, len(made)) == ([1] * 6, 0, 12)


def test_a_held_out_episode_goes_on_from_its_turns_too_and_none_of_them_is_on_disk(rollout, tmp_path):
    def evaluate(sampler, tasks, journal):
        return sampler.evaluate(tasks)

    undisturbed, _, asked = rollout(tmp_path / "a", play=evaluate)
    played, _, again = rollout(tmp_path / "a", failing(2, 1), play=evaluate)
    assert [t.messages() for t in played] == [t.messages() for t in undisturbed]
    assert again == asked
    assert lines_of(tmp_path / "a") == []
