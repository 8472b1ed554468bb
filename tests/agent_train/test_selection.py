"""Which episodes a step trains on: whole groups in their order, whatever ended first, and a count of all that was left out."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_cases import algorithm, episode, group

from agent_train.algorithms.selection import (
    choose,
    is_truncated,
    more_groups,
    participants,
    penalty,
    surplus,
    turn_rewards,
)
from agent_train.config.schema import AlgorithmConfig, Config, OverlongConfig
from agent_train.rollout.draws import Draws
from agent_train.rollout.journal import Journal
from agent_train.trainer.rl import play
from agentgym.core.messages import assistant
from agentgym.core.tasks import Task, TaskSet
from agentgym.core.trajectory import Group, Tokens, Trajectory, Turn


def no_journal():
    return Journal(Path(os.devnull), print)


def rewarded(task, *rewards):
    return group(task, [[(2, reward)] for reward in rewards])


STEP = [
    rewarded("flat", 1.0, 1.0),
    rewarded("wide", 0.0, 1.0),
    rewarded("narrow", 0.5, 0.7),
    rewarded("zero", 0.0, 0.0),
]


@pytest.mark.parametrize(
    ("chosen", "kept"),
    [
        ({"name": "none"}, ["flat", "wide", "narrow", "zero"]),
        ({"name": "spread"}, ["wide", "narrow"]),
        ({"name": "uncertain", "share": 0.25}, ["wide"]),
        ({"name": "uncertain", "share": 0.75}, ["flat", "wide", "narrow"]),
        # Spreads .5 and .1: the first alone holds five sixths.
        ({"name": "top_p", "share": 0.8}, ["wide"]),
        ({"name": "top_p", "share": 0.9}, ["wide", "narrow"]),
    ],
)
def test_a_filter_keeps_whole_groups_in_their_order(chosen, kept):
    groups, found = choose(STEP, algorithm(chosen=chosen), wanted=4)
    assert [g.task_id for g in groups] == kept
    assert (found.groups, found.dropped_groups) == (4, 4 - len(kept))
    assert found.episodes == 2 * len(kept)
    assert found.dropped == 8 - 2 * len(kept)


def test_an_unknown_filter_is_refused():
    with pytest.raises(ValueError, match="unknown filter 'best'"):
        choose(STEP, algorithm(chosen={"name": "best"}), wanted=4)


def test_a_filter_looks_at_rewards_as_the_environment_gave_them():
    """Two right answers of different length do not become a group that differs by what shaping takes."""
    both = group("t", [[(2, 1.0)], [(9, 1.0)]])
    settings = algorithm(chosen={"name": "spread"}, overlong={"length": 10, "buffer": 4})
    assert choose([both], settings, 1)[0] == []
    assert turn_rewards(both.trajectories[1], settings) == [0.25]


@pytest.mark.parametrize(("size", "expected"), [(6, 0.0), (7, -0.25), (10, -1.0), (12, -1.0)])
def test_the_penalty_for_length_by_the_tokens_that_were_sampled(size, expected):
    whole = episode("t", 0, [(size - 2, 0.0), (2, 1.0)])  # what the environment said in between is not counted
    assert penalty(whole, OverlongConfig(length=10, buffer=4)) == expected
    assert penalty(whole, OverlongConfig()) == 0.0


def test_without_a_buffer_the_penalty_is_a_step():
    settings = OverlongConfig(length=10, factor=0.5)
    assert [penalty(episode("t", 0, [(size, 1.0)]), settings) for size in (10, 11)] == [0.0, -0.5]


def test_an_episode_is_cut_by_a_limit_or_where_its_last_answer_is_not_whole():
    assert [
        is_truncated(episode("t", 0, [(2, 1.0)], end=end)) for end in ("terminated", "truncated", "max_turns", "error")
    ] == [False, True, True, False]
    assert is_truncated(episode("t", 0, [(2, 1.0)], finish="length"))
    assert not is_truncated(episode("t", 0, [(2, 1.0), (0, 0.0)], finish="length"))


@pytest.mark.parametrize("baseline", [True, False])
def test_a_cut_episode_is_out_of_the_loss_and_in_the_baseline_or_not(baseline):
    made = rewarded("t", 1.0, 0.0)
    made.trajectories.append(episode("t", 2, [(5, 0.5)], end="max_turns"))
    settings = algorithm(overlong={"mask": True, "baseline": baseline})
    found = choose([made], settings, 1)[1]
    parts = [(t.id, in_loss) for t, in_loss in participants(made, settings.overlong)]
    assert parts == [("t/0", True), ("t/1", True), *[("t/2", False)] * baseline]
    assert (found.masked, found.dropped, found.dropped_length) == (1, 1, 5.0)
    assert (found.episodes, found.length) == (2, 2.0)
    assert all(in_loss for _, in_loss in participants(made, OverlongConfig())), (
        "nothing is masked unless it is asked for"
    )


@pytest.mark.parametrize("cut", ["X", "O"])
def test_an_episode_of_players_is_trained_on_where_the_part_of_one_of_them_is(cut):
    """The episode's last turn is O's; each player's part is truncated by its own last turn."""

    def turn(player, reward):
        return Turn(
            [],
            assistant("x"),
            reward,
            player=player,
            tokens=Tokens([1], [2], [0.0], [0], "length" if player == cut else "stop"),
        )

    played = [Trajectory(f"t/{n}", "e", "t", n, turns=[turn("X", 0.0), turn("O", float(n))]) for n in range(2)]
    _, selection = choose([Group("t", played)], algorithm(overlong={"mask": True}), 1)
    assert (selection.episodes, selection.masked, selection.dropped) == (2, 0, 0)


def test_a_failed_episode_takes_no_part_and_is_in_no_length():
    made = rewarded("t", 1.0, 0.0)
    made.trajectories += [episode("t", 2, [(7, 9.0)], end="error"), episode("t", 3, [(0, 9.0)])]
    assert [t.id for t, _ in participants(made, OverlongConfig(mask=True))] == ["t/0", "t/1"]
    found = choose([made], algorithm(), 1)[1]
    assert (found.episodes, found.dropped, found.length) == (2, 0, 2.0)


ROUNDS = {"name": "spread", "rounds": 3}


def test_dynamic_sampling_asks_for_what_is_missing_and_stops_at_its_bound():
    settings = algorithm(chosen=ROUNDS)
    assert more_groups(STEP[:2], settings, wanted=2, rounds=1) == 2, "half of them differed"
    assert more_groups(STEP[1:3], settings, wanted=2, rounds=1) == 0
    assert more_groups(STEP[:1] * 4, settings, wanted=2, rounds=2) == 2
    assert more_groups(STEP[:1] * 6, settings, wanted=2, rounds=3) == 0
    assert more_groups(STEP[:1], algorithm(chosen={"name": "spread"}), wanted=4, rounds=1) == 0


def played(kept, sampled):
    """Groups of which `kept` differ in their rewards."""
    return [rewarded(str(i), 0.0, float(i < kept)) for i in range(sampled)]


@pytest.mark.parametrize(
    ("kept", "sampled", "more"),
    [(0, 0, 8), (4, 8, 8), (7, 8, 2), (0, 8, 8), (4, 28, 4), (8, 20, 0), (9, 20, 0), (5, 32, 0)],
)
def test_dynamic_sampling_asks_for_what_is_likely_to_suffice(kept, sampled, more):
    settings = algorithm(chosen={"name": "spread", "rounds": 4})
    assert more_groups(played(kept, sampled), settings, wanted=8, rounds=1) == more


def test_dynamic_sampling_counts_what_is_short_and_what_is_too_much():
    settings = algorithm(chosen=ROUNDS)
    short = choose(STEP, settings, wanted=3, rounds=3)[1]
    assert (short.short, short.rounds, short.dropped_groups) == (1, 3, 2)
    kept, much = choose(STEP, settings, wanted=1, rounds=2)
    assert [g.task_id for g in kept] == ["wide"], "the first in order, whatever ended first"
    assert much.dropped_groups == 3


def test_what_is_left_is_young_enough_for_the_next_step_and_has_names_of_its_own():
    """STEP was sampled by version 0. Its "narrow" group is left, and the next step plays that task again."""
    settings = algorithm(chosen=ROUNDS)
    assert surplus(STEP, settings, 1, [], oldest=1) == []
    assert surplus(STEP, algorithm(chosen={"name": "spread"}), 1, [], oldest=0) == [], "no dynamic sampling"
    (left,) = surplus(STEP, settings, 1, [], oldest=0)
    told = choose(STEP, settings, 1, oldest=0)[1]
    assert (told.left, told.dropped_groups, told.dropped) == (1, 2, 4)
    kept, told = choose(STEP[2:], settings, 2, carried=[left])
    assert [g.task_id for g in kept] == ["narrow", "narrow"]
    assert len({t.id for g in kept for t in g.trajectories}) == told.episodes == 4
    assert (told.carried, told.groups, told.dropped_groups, told.dropped, told.short) == (1, 2, 1, 2, 0)


@settings(deadline=None)
@given(
    spreads=st.lists(st.booleans(), min_size=60, max_size=60),
    wanted=st.integers(1, 4),
    rounds=st.integers(1, 5),
    steps=st.integers(1, 4),
)
def test_no_task_is_skipped_and_none_is_played_twice_whatever_dynamic_sampling_does(spreads, wanted, rounds, steps):
    """The state of the draws says where the next step begins, also for a run that starts again from it."""
    config = Config(algorithm=algorithm(chosen={"name": "spread", "rounds": rounds}))
    config.trainer.groups_per_step = wanted
    seen = []

    async def collect(tasks, step, on_end, before, journal):
        assert [task.id for task in before] == seen[len(seen) - len(before) :] if before else True
        seen.extend(task.id for task in tasks)
        return [rewarded(task.id, 0.0, float(spreads[int(task.id)])) for task in tasks]

    tasks = TaskSet([Task(str(i)) for i in range(60)])
    sampler = SimpleNamespace(collect=collect)
    state, total = None, 0
    for step in range(steps):
        draws = Draws(config, len(tasks), state)
        drawn = draws.of_step(step)
        rollout, _ = asyncio.run(play(config, sampler, tasks, None, step, drawn, no_journal()))
        groups, rollouts = rollout.groups, rollout.rounds
        assert rollouts <= rounds
        assert len(groups) <= rounds * wanted
        useful = sum(spreads[int(g.task_id)] for g in groups)
        assert useful >= wanted or rollouts == rounds or len(groups) == rounds * wanted
        draws.played(step, groups)
        state, total = draws.state(), total + len(groups)
    assert len(seen) == total
    assert len(set(seen[:60])) == min(len(seen), 60)


def test_groups_that_are_empty_are_left_out():
    assert choose([Group("t", [])], algorithm(chosen={"name": "spread"}), 1)[0] == []


def test_an_agent_failure_is_in_the_baseline_and_is_trained_on_and_an_error_is_not():
    whole = rewarded("t", 1.0, 0.0, 0.0)
    broken, failed = whole.trajectories[1:]
    broken.turns[-1].info["agent_failure"] = "sandbox_lost"
    failed.end, failed.error = "error", "e, task 't', turn 1: step failed"
    assert [(t.id, in_loss) for t, in_loss in participants(whole, OverlongConfig())] == [("t/0", True), ("t/1", True)]
    assert turn_rewards(broken, AlgorithmConfig()) == [0.0]
