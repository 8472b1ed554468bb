"""Which tasks a step plays: a fixed sequence or difficulty pools; the same for a resumed run, whatever rollouts are under way."""

import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_train.config.compose import compose
from agent_train.config.schema import Config, ConfigError, PoolsConfig
from agent_train.config.validation import validate
from agent_train.rollout.draws import Draws, pick_tasks
from agent_train.rollout.pools import BANDS, Pools
from agent_train.trainer.checkpoint import CheckpointError
from agent_train.trainer.schedule import derive_seed

SIZE = 40
quickly = settings(max_examples=40, deadline=None)


def group(*outcomes):
    """A group by the successes of its episodes; None is an episode that failed."""
    return SimpleNamespace(trajectories=[SimpleNamespace(success=each, failed=each is None) for each in outcomes])


def config_of(wanted=4, rounds=1, staleness=0, seed=0, **pools):
    config = Config(pools=PoolsConfig(**pools))
    config.trainer.groups_per_step, config.trainer.staleness, config.trainer.seed = wanted, staleness, seed
    config.algorithm.filter.rounds = rounds
    return config


def outcome(task, step, seed=0):
    """A group of four episodes whose successes follow from task and step; tasks differ in how hard they are."""
    chance = random.Random(derive_seed(seed, task, step))
    return group(*(float(chance.random() < (task % 5) / 4) for _ in range(4)))


def loop(config, size, steps, begin=0, state=None, play=lambda step, drawn: len(drawn), give=outcome):
    """A training loop: the tasks that each step drew, those it played, and the state, as JSON, when each version began."""
    draws = Draws(config, size, state)
    drawn, played, states = {}, {}, {}
    for version in range(begin, steps):
        states[version] = json.dumps(draws.state())
        for step in range(version, min(version + config.trainer.staleness + 1, steps)):
            drawn[step] = list(draws.of_step(step))
        if config.trainer.staleness:  # rollouts begin before the checkpoint
            states[version] = json.dumps(draws.state())
        played[version] = drawn[version][: play(version, drawn[version])]
        draws.played(version, [give(task, version) for task in played[version]])
    return drawn, played, states


def flat(lists):
    return [task for each in lists.values() for task in each]


# ---- the sequence


def test_the_sequence_is_the_one_that_was_drawn_before_there_were_pools():
    assert pick_tasks(7, 0, 16, 3) == [0, 5, 1, 2, 4, 3, 6, 3, 6, 0, 5, 2, 1, 4, 3, 2]


@given(size=st.integers(1, 12), groups=st.integers(1, 7), seed=st.integers(0, 3))
def test_no_epoch_repeats_or_skips_a_task(size, groups, seed):
    picked = [task for step in range(3 * size) for task in pick_tasks(size, step * groups, groups, seed)]
    for epoch in range(len(picked) // size):
        assert sorted(picked[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_the_order_of_tasks_follows_from_place_and_seed_alone():
    orders = [[task for step in range(10) for task in pick_tasks(50, step * 5, 5, seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert [pick_tasks(50, first, 5, 0) for first in (35, 15)] == [orders[0][35:40], orders[0][15:20]]
    assert orders[0] != list(range(50))
    assert pick_tasks(50, 500, 50, 0) != pick_tasks(50, 550, 50, 0)


@quickly
@given(st.integers(1, 12), st.integers(1, 7), st.integers(0, 3), st.integers(0, 4))
def test_without_pools_each_step_plays_the_next_tasks_of_the_sequence_at_any_staleness(size, wanted, seed, staleness):
    played = loop(config_of(wanted, 1, staleness, seed), size, 9)[1]
    assert flat(played) == pick_tasks(size, 0, 9 * wanted, seed)


@quickly
@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 4), st.lists(st.integers(0, 99), min_size=9, max_size=9))
def test_dynamic_sampling_goes_on_in_the_sequence_where_the_step_before_stopped(size, wanted, rounds, more):
    def play(step, drawn):
        return wanted + more[step] % (wanted * (rounds - 1) + 1)

    played = flat(loop(config_of(wanted, rounds), size, 9, play=play)[1])
    assert played == pick_tasks(size, 0, len(played), 0)


lengths = st.lists(st.integers(0, 99), min_size=10, max_size=10)


@quickly
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), lengths)
def test_rollouts_under_way_share_no_task_and_skip_none(wanted, rounds, staleness, more):
    def play(step, drawn):
        assert len(drawn) == wanted * rounds
        return wanted + more[step] % (len(drawn) - wanted + 1)

    _, played, states = loop(config_of(wanted, rounds, staleness), 1000, 10, play=play)
    for version, text in states.items():
        state = json.loads(text)
        found = [*flat({n: played[n] for n in range(version)}), *flat(state["drawn"]), *state["left"]]
        assert sorted(found) == sorted(pick_tasks(1000, 0, state["taken"], 0) if version or staleness else [])


def test_what_a_step_leaves_is_what_the_next_draw_takes_first():
    """Two rounds of two tasks, one version ahead: steps 0 and 1 draw eight; step 0 leaves two, which step 2 begins with."""
    order = pick_tasks(SIZE, 0, 12, 0)
    drawn = loop(config_of(2, 2, 1), SIZE, 3, play=lambda step, tasks: 2)[0]
    assert drawn == {0: order[:4], 1: order[4:8], 2: [*order[2:4], *order[8:10]]}


# ---- bands


@pytest.mark.parametrize(
    ("groups", "band"),
    [
        ([], "unseen"),
        ([(None, None)], "unseen"),
        ([(0, 0, 0, 0)], "unsolved"),
        ([(0, 0, 0, None)], "unsolved"),
        ([(1, 0, 0, 0, 0)], "hard"),  # 1/5
        ([(1, 0, 0, 0)], "medium"),  # 1/4 is not below it
        ([(1, 1), (0, 1), (1, 0)], "medium"),  # 2/3
        ([(0, 0), (1, 1), (1, 1), (1, 0)], "easy"),  # the last three: 5/6
        ([(0, 0), (1, 1), (1, 1), (1, 1)], "solved"),
        ([(1, 1), (0, 0), (0, 0), (0, 1)], "hard"),  # the last three: 1/6
    ],
)
def test_a_band_is_the_mean_solve_rate_of_the_last_groups(groups, band):
    pools = Pools(PoolsConfig(groups=3), 0, range(1))
    for step, outcomes in enumerate(groups):
        pools.put_back(step, pools.take(step, 1), [group(*outcomes)])
    assert pools.band(0) == band


def only(**weights):
    return dict.fromkeys(BANDS, 0.0) | weights


def test_a_step_draws_of_each_band_what_has_waited_longest():
    """Six tasks. Step 0 finds 0 hard, 1 easy; later steps draw easy tasks alone as long as there are any."""
    pools = Pools(PoolsConfig(groups=2, weights=only(easy=1.0), revisit=9), 0, range(6))
    hard, easy = group(1, 0, 0, 0, 0, 0, 0, 0), group(1, 1, 1, 1, 1, 1, 1, 0)
    assert pools.take(0, 4) == [0, 1, 2, 3], "no band with a weight has a task: the others in their order"
    told = pools.put_back(0, [0, 1, 2, 3], [hard, easy, easy])
    assert told.tasks == {"unseen": 3, "unsolved": 0, "hard": 1, "medium": 0, "easy": 2, "solved": 0}
    assert told.played == dict.fromkeys(BANDS, 0.0) | {"unseen": 1.0}
    assert pools.take(1, 1) == [1]
    pools.put_back(1, [1], [easy])
    assert pools.take(2, 2) == [2, 1]
    told = pools.put_back(2, [2, 1], [hard, easy])  # 2: (1/8 + 7/8) / 2
    assert (told.tasks["medium"], told.tasks["easy"], told.played["easy"]) == (1, 1, 1.0)


def test_what_was_never_or_always_solved_retires_and_comes_back():
    """With two groups each: task 0 is never solved, 1 always, 2 half of the time. After step 1 the first two rest for 3 steps."""
    pools = Pools(PoolsConfig(groups=2, weights=only(unsolved=1.0, solved=1.0, medium=1e-9), revisit=3), 0, range(3))
    found = {0: group(0, 0), 1: group(1, 1), 2: group(0, 1)}
    for step, retired in ((0, 0), (1, 2)):
        drawn = pools.take(step, 3)
        assert set(drawn) == {0, 1, 2}
        assert pools.put_back(step, drawn, [found[task] for task in drawn]).retired == retired
    for step in (2, 3):
        assert pools.take(step, 1) == [2]
        pools.put_back(step, [2], [found[2]])
    assert sorted(pools.take(4, 2)) == [0, 1], "step 1 and 3 steps"
    assert pools.put_back(4, [0, 1], [group(0, 1), group(1, 1)]).retired == 1, (
        "task 0 is hard by now, task 1 rests again"
    )


def test_the_retired_come_back_early_if_nothing_else_is_there():
    pools = Pools(PoolsConfig(groups=1, weights=only(unseen=1.0, hard=1.0), revisit=100), 0, range(2))
    for task in (0, 1):
        assert pools.take(task, 1) == [task]
        pools.put_back(task, [task], [group(0, 0)])
    assert pools.take(2, 2) == [0, 1], "the one that retired first comes first"


def test_bands_are_drawn_as_often_as_their_weights_say():
    """4,000 draws of 3 to 1: the share of the unseen is 0.75, give or take 0.03 (four standard deviations)."""
    pools = Pools(PoolsConfig(groups=1, weights=only(unseen=3.0, medium=1.0)), 0, range(9000))
    pools.put_back(0, drawn := pools.take(0, 4000), [group(0, 1)] * 4000)
    share = sum(pools.band(task) == "unseen" for task in pools.take(1, 4000)) / 4000
    assert len(drawn) == 4000
    assert share == pytest.approx(0.75, abs=0.03)


weights = st.fixed_dictionaries({band: st.sampled_from([0.0, 1.0, 3.0]) for band in BANDS}).filter(
    lambda found: any(found.values())
)


@quickly
@given(weights, st.integers(1, 3), st.integers(1, 9), st.integers(0, 9))
def test_a_band_without_a_weight_is_drawn_from_only_if_no_other_has_a_task(weights, groups, revisit, seed):
    pools = Pools(PoolsConfig(groups=groups, weights=weights, revisit=revisit), seed, range(12))
    for step in range(30):
        drawn = pools.take(step, 3)
        left = {band for band, tasks in pools.state()["waiting"].items() if tasks}
        for task in drawn:
            if not weights[pools.band(task)]:
                assert not any(weights[band] for band in left)
        pools.put_back(step, drawn, [outcome(task, step, seed) for task in drawn])


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(0, 2), st.integers(1, 3), st.integers(0, 9))
def test_every_task_is_played_again_and_again(groups, revisit, staleness, rounds, seed):
    config = config_of(2, rounds, staleness, seed, groups=groups, revisit=revisit)
    played = loop(config, 12, 200, play=lambda step, drawn: 2 + step % (len(drawn) - 1))[1]
    for begin in (0, 100):
        assert {task for step in range(begin, begin + 100) for task in played[step]} == set(range(12))


# ---- resuming, and rollouts under way

runs = st.fixed_dictionaries(
    {
        "wanted": st.integers(1, 4),
        "rounds": st.integers(1, 3),
        "staleness": st.integers(0, 3),
        "seed": st.integers(0, 9),
        "groups": st.integers(0, 3),
        "revisit": st.integers(1, 9),
    }
)


def some(step, drawn):
    return max(1, len(drawn) - step % 3)


@quickly
@given(runs, st.integers(0, 11))
def test_a_resumed_run_draws_what_the_undisturbed_one_drew(run, version):
    config = config_of(**run)
    drawn, played, states = loop(config, SIZE, 12, play=some)
    again = loop(config, SIZE, 12, version, json.loads(states[version]), play=some)
    assert again[0] == {step: tasks for step, tasks in drawn.items() if step >= version}
    assert again[1] == {step: tasks for step, tasks in played.items() if step >= version}
    assert again[2] == {step: state for step, state in states.items() if step >= version}


@quickly
@given(runs, st.integers(0, 11))
def test_a_draw_reads_the_results_of_steps_before_the_bound_and_of_no_other(run, changed):
    config = config_of(**run)
    drawn = loop(config, SIZE, 12, play=some)[0]
    other = loop(config, SIZE, 12, play=some, give=lambda task, step: outcome(task, step, seed=int(step >= changed)))[0]
    known = range(changed + run["staleness"] + 1)
    assert [drawn[step] for step in known if step < 12] == [other[step] for step in known if step < 12]


@quickly
@given(runs.filter(lambda run: run["groups"]))
def test_no_task_is_in_two_rollouts_under_way_and_none_is_lost(run):
    config = config_of(**run)
    for state in map(json.loads, loop(config, SIZE, 12, play=some)[2].values()):
        waiting = [*flat(state["waiting"]), *flat(state["drawn"]), *(task for _, task in state["retired"])]
        assert sorted(waiting) == list(range(SIZE))


def test_the_bands_of_a_record_count_every_task():
    config = config_of(4, 1, 1, groups=2)
    draws = Draws(config, SIZE)
    for step in range(20):
        draws.of_step(step + 1)
        drawn = draws.of_step(step)
        told = draws.played(step, [outcome(task, step) for task in drawn])
        pools = draws._source
        assert told.tasks == {band: Counter(map(pools.band, range(SIZE)))[band] for band in BANDS}
        assert sum(told.tasks.values()) == SIZE
        assert sum(told.played.values()) == 1.0


def test_other_tasks_than_those_of_the_checkpoint_are_refused():
    state = Draws(config_of(), SIZE).state()
    with pytest.raises(CheckpointError, match="the run drew from 40 tasks and finds 39: give it those it began with"):
        Draws(config_of(), SIZE - 1, state)


# ---- settings


def refused(*words):
    with pytest.raises(ConfigError) as caught:
        validate(compose(["+env=frozen_lake", "engine=embedded", "learner.workers=1", *words]))
    return caught.value.problems


def test_pools_that_cannot_be_are_refused():
    assert refused("pools.groups=2", "pools.weights.eazy=1") == [
        "pools.weights.eazy=1: no such band: take unseen, unsolved, hard, medium, easy, solved"
    ]
    assert refused("pools.groups=2", "pools.weights.easy=-1") == [
        "pools.weights.easy=-1: must be a number of 0 or more"
    ]
    assert refused("pools.groups=2", *(f"pools.weights.{band}=0" for band in BANDS)) == [
        "pools.weights: all are 0: at least one band must be drawn from"
    ]
    assert refused("pools.groups=2", "pools.hard=0.8") == ["pools.hard=0.8: must be at most pools.easy=0.75"]
    assert refused("pools.revisit=9") == [
        "pools.revisit=9: has no effect without pools.groups: set that too, or leave this out"
    ]
    assert refused("pools.groups=2", "trainer.groups_per_step=40000", "trainer.staleness=2") == [
        "pools.groups=2: frozen_lake has 100000 tasks, but rollouts in flight take 120000: "
        "lower trainer.groups_per_step, or leave the pools out"
    ]


def test_a_weight_is_set_alone():
    config = compose(["+env=frozen_lake", "pools.groups=2", "pools.weights.easy=0"])
    assert config.pools.weights == {**PoolsConfig().weights, "easy": 0.0}
    with pytest.raises(ConfigError, match=r"pools\.weights\.easy: .*'often'"):
        compose(["+env=frozen_lake", "pools.groups=2", "pools.weights.easy=often"])
