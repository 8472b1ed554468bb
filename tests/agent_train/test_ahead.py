"""Rollouts ahead of training: never staler than the bound, whole, in order; what ends first changes nothing."""

import asyncio
import json
import os
import random

import pytest
from fake_clock import with_fake_clock
from hypothesis import given, settings
from hypothesis import strategies as st
from in_turn import in_turn
from step_cases import group

from agent_train.algorithms.selection import choose
from agent_train.config.schema import Config, PoolsConfig
from agent_train.rollout.ahead import Rollouts
from agent_train.rollout.draws import Draws, pick_tasks
from agent_train.rollout.journal import Journal
from agent_train.rollout.sampler import admit
from agent_train.trainer.rl import left_by, play
from agent_train.trainer.schedule import derive_seed
from agentgym.core.tasks import Task, TaskSet

PER_STEP = 3


class Run:
    """A training loop whose episodes and updates only take time: the versions that each step's tokens were sampled with."""

    def __init__(self, staleness, steps, seconds, learning):
        self.staleness, self.steps, self.seconds, self.learning = staleness, steps, seconds, learning
        self.version = 0
        self.begun = {}  # by step: the version when its rollout began
        self.dies_at = None

    async def episode(self, step, place):
        tokens = []
        for turn in range(3):
            await asyncio.sleep(self.seconds[(step * PER_STEP + place + turn) % len(self.seconds)])
            tokens.append(self.version)
        return place, tokens

    async def play(self, step):
        assert step not in self.begun
        self.begun[step] = self.version
        found = await asyncio.gather(*(self.episode(step, step * PER_STEP + n) for n in range(PER_STEP)))
        if step == self.dies_at:
            raise RuntimeError("the engine is dead")
        return found

    async def train(self, version=0):
        """From a version on, which a checkpoint held; yields each step's rollout."""
        self.version, taken = version, {}
        rollouts = Rollouts(self.play, self.staleness, self.steps)
        try:
            while self.version < self.steps:
                step = self.version
                taken[step] = await rollouts.take(step)
                await asyncio.sleep(self.learning)
                self.version += 1
                if self.staleness:
                    rollouts.begin(self.version)
        finally:
            await rollouts.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            assert not others, "what was begun and not taken has ended"
        return taken


durations = st.lists(st.floats(0.0, 50.0), min_size=1, max_size=12)


@settings(deadline=None)
@given(st.integers(0, 4), st.integers(1, 9), durations, st.floats(0.0, 20.0), st.integers(0, 8))
def test_no_token_is_staler_than_the_bound_and_every_task_is_trained_once(staleness, steps, seconds, learning, resumed):
    run = Run(staleness, steps, seconds, learning)
    begin = min(resumed, steps)
    taken, _ = with_fake_clock(run.train(begin))
    assert list(taken) == list(range(begin, steps))
    places = [place for step in taken for place, _ in taken[step]]
    assert places == list(range(begin * PER_STEP, steps * PER_STEP))
    for step, episodes in taken.items():
        assert all(step - staleness <= version <= step for _, versions in episodes for version in versions)
        first, last = (admitted_at(place, begin, staleness) for place in (step * PER_STEP, (step + 1) * PER_STEP - 1))
        assert run.begun[step] == first == last == max(begin, step - staleness), "whole, and as soon as it may"


def admitted_at(trajectory, begin, staleness):
    """The version at which AReaL's formula, which counts single trajectories, lets this one start in a run from `begin` on."""
    done, version = begin * PER_STEP, begin
    given = {"batch": PER_STEP, "staleness": staleness, "accepted": done, "max_concurrent": 10**6}
    while not admit(**given, version=version, running=trajectory - done):
        version += 1
    return version


def test_learning_and_rollouts_share_the_time_as_soon_as_one_may_be_ahead():
    seconds = {s: with_fake_clock(Run(s, 20, [1.0], 3.0).train())[1] for s in (0, 1, 4)}
    assert seconds == {0: 20 * 6.0, 1: 3.0 + 20 * 3.0, 4: 3.0 + 20 * 3.0}


def test_a_long_rollout_is_waited_for_and_those_behind_it_go_on():
    """Of nine steps one takes a hundred times as long: with a bound of 4, four others are played meanwhile."""
    long = [100.0 if n == 4 * PER_STEP else 1.0 for n in range(9 * PER_STEP)]
    alone, ahead = (with_fake_clock(Run(s, 9, long, 2.0).train())[1] for s in (0, 4))
    assert ahead < alone - 4 * 3


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_dead_engine_ends_the_loop_at_its_step_and_leaves_nothing_running(staleness):
    run = Run(staleness, 6, [1.0, 7.0], 2.0)
    run.dies_at = 3
    with pytest.raises(RuntimeError, match="the engine is dead"):
        with_fake_clock(run.train())
    assert run.version == 3


class SampledRun(Run):
    """A run with dynamic sampling and the tasks that `Draws` gives, saved with each version as it would be.

    Four of five tasks differ in their rewards now and then. A round takes as long as the clock says. The versions of the tokens
    follow from task and step, as those do that a journal answers.
    """

    def __init__(self, config, seconds, learning):
        super().__init__(config.trainer.staleness, config.trainer.steps, seconds, learning)
        self.config, self.saved = config, {}
        self.trained = {}  # by step: its groups, and how many of them the step before had played

    async def collect(self, tasks, step, on_end, before, journal):
        began, place = self.version, len(before)
        await asyncio.sleep(self.seconds[(3 * step + place) % len(self.seconds)])
        assert step - self.staleness <= began <= self.version <= step
        return [self.group(task, step) for task in tasks]

    def group(self, task, step):
        chance = random.Random(derive_seed(task.id, step))
        made = group(task.id, [[(1, float(chance.random() < int(task.id) % 5 / 4))] for _ in range(2)])
        version = max(step - chance.randrange(self.staleness + 1), 0)
        for trajectory in made.trajectories:
            trajectory.turns[0].tokens.versions = [version]
        return made

    def differs(self, task, step):
        return len({t.reward for t in self.group(Task(task), step).trajectories}) > 1

    async def train(self, version=0, state=None):
        """From a version on, with what its checkpoint held; yields the tasks of each step."""
        self.version, played = version, {}
        draws, algorithm = Draws(self.config, len(TASKS), state), self.config.algorithm

        def play_next(step):
            before = (algorithm.filter.rounds > 1 and rollouts.before(step)) or draws.surplus
            return play(self.config, self, TASKS, None, step, draws.of_step(step), Journal(), before)

        rollouts = Rollouts(play_next, self.staleness, self.steps)
        while self.version < self.steps:
            self.saved[self.version] = json.dumps(draws.state())
            rollout, _ = await rollouts.take(self.version)
            played[self.version] = [each.task_id for each in rollout.groups]
            oldest = self.version + 1 - self.staleness
            wanted = self.config.trainer.groups_per_step
            kept, told = choose(rollout.groups, algorithm, wanted, rollout.rounds, rollout.carried, oldest)
            self.trained[self.version] = [[t.to_json() for t in each.trajectories] for each in kept], told.carried
            draws.played(self.version, rollout.groups, left_by(self.config, rollout, self.version))
            assert told.left == len(draws.surplus)
            await asyncio.sleep(self.learning)
            self.version += 1
            if self.staleness:
                rollouts.begin(self.version)
        return played


STEPS = 6  # of the real run
TASKS = TaskSet([Task(str(n)) for n in range(60)])


def sampled(staleness, rounds, pools, seed=0):
    config = Config(pools=PoolsConfig(groups=pools, revisit=3))
    config.algorithm.filter.name, config.algorithm.filter.rounds = "spread", rounds
    config.trainer.staleness, config.trainer.steps, config.trainer.groups_per_step = staleness, 7, 2
    config.trainer.seed = seed
    return config


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 3), st.integers(1, 4), st.integers(0, 2), durations, durations, st.integers(0, 6))
def test_dynamic_sampling_ahead_plays_the_same_tasks_whatever_ends_first_and_after_a_resume(
    staleness, rounds, pools, seconds, others, version
):
    config = sampled(staleness, rounds, pools)
    run = SampledRun(config, seconds, 2.0)
    played, _ = with_fake_clock(run.train())
    assert with_fake_clock(SampledRun(config, others, 9.0).train())[0] == played
    again = SampledRun(config, others, 0.5)
    resumed = with_fake_clock(again.train(version, json.loads(run.saved[version])))[0]
    assert resumed == {step: tasks for step, tasks in played.items() if step >= version}
    assert again.trained == {step: groups for step, groups in run.trained.items() if step >= version}
    for step, tasks in played.items():
        assert len(set(tasks)) == len(tasks) <= rounds * 2
        spread = sum(run.differs(task, step) for task in tasks)
        assert spread + run.trained[step][1] >= 2 or len(tasks) == min(rounds * 2, 60)
    if not pools:
        order = [str(n) for n in pick_tasks(60, 0, 60, 0)]
        everything = [task for tasks in played.values() for task in tasks]
        assert sorted(set(everything)) == sorted(everything), "56 tasks at most, of an epoch of 60"
        assert staleness or everything == order[: len(everything)]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 3), st.integers(2, 4), st.integers(0, 99))
def test_a_group_with_spread_is_trained_on_once_in_its_step_or_the_next_one_unless_it_is_too_old_then(
    staleness, rounds, seed
):
    run = SampledRun(sampled(staleness, rounds, 0, seed), [1.0], 2.0)
    played, _ = with_fake_clock(run.train())
    trained = {step: [group[0]["task_id"] for group in groups] for step, (groups, _) in run.trained.items()}
    for step, (groups, carried) in run.trained.items():
        assert trained[step][carried:] == [task for task in played[step] if run.differs(task, step)][: 2 - carried]
        assert all(task in played[step - 1] for task in trained[step][:carried])
        versions = [v for group in groups for t in group for turn in t["turns"] for v in turn["tokens"]["versions"]]
        assert all(step - staleness <= version <= step for version in versions)
        for task in (task for task in played[step] if run.differs(task, step)):
            young = run.group(Task(task), step).trajectories
            young = min(t.turns[0].tokens.versions[0] for t in young) >= step + 1 - staleness
            once = (trained[step] + trained.get(step + 1, [])).count(task)
            assert once == 1 or (once == 0 and (not young or step == run.steps - 1))
    assert staleness or not any(carried for _, carried in run.trained.values()), "one version is too old"


def test_groups_that_wait_at_a_checkpoint_are_trained_on_by_the_run_that_goes_on_from_it():
    waited = 0
    for seed in range(12):
        run = SampledRun(sampled(1, 5, 0, seed), [1.0], 2.0)
        run.config.trainer.groups_per_step = 4
        with_fake_clock(run.train())
        for version, saved in run.saved.items():
            if json.loads(saved)["surplus"]:
                again = SampledRun(run.config, [3.0, 1.0], 0.5)
                with_fake_clock(again.train(version, json.loads(saved)))
                assert again.trained == {step: groups for step, groups in run.trained.items() if step >= version}
                waited += again.trained[version][1]
    assert waited > 3


@pytest.mark.parametrize(("left", "rounds"), [(0, 2), (1, 1), (2, 1)])
def test_what_the_step_before_leaves_is_not_played_for_again(left, rounds):
    """A round of two tasks, of which one differs in its rewards: with one that was left the step has the two that it wants."""
    config, run = sampled(1, 3, 0), SampledRun(sampled(1, 3, 0), [1.0], 2.0)
    places = sorted(range(len(TASKS)), key=lambda place: not run.differs(str(place), 0))
    useful, drawn = places[:left], [places[10], places[-1], *places[11:15]]
    before = [run.group(TASKS[place], 0) for place in useful]
    rollout, _ = with_fake_clock(play(config, run, TASKS, None, 0, drawn, Journal(), before))[0]
    assert (rollout.rounds, list(rollout.carried)) == (rounds, before)


def test_dynamic_sampling_waits_for_one_step_while_others_go_on():
    """Steps of up to four rounds of 1 s, updates of 3 s: with a bound of 2 the rounds are hidden behind the updates."""
    times = {s: with_fake_clock(SampledRun(sampled(s, 4, 0), [1.0], 3.0).train())[1] for s in (0, 2)}
    assert times[0] > 7 * (3 + 1)
    assert times[2] <= 4 + 7 * 3


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_trains_on_older_versions_within_the_bound_and_is_replayed_to_the_bit(in_shared_ray, forks, tmp_path):
    words = ["+env=frozen_lake", "engine=embedded", "learner.workers=1", "trainer.staleness=2", "trainer.eval_every=4"]
    words += ["trainer.groups_per_step=4", "algorithm.group_size=3", "trainer.eval_episodes=4", "sft.episodes=16"]
    words += [f"trainer.runs_dir={tmp_path}"]
    words += ["algorithm.filter.name=spread", "algorithm.filter.rounds=2"]
    words += ["env.kwargs.shaping=1.0", "trainer.deterministic=true", "trainer.dump=[1,5]", "learner.schedule=constant"]
    words += ["model.tiny.hidden=64", "model.tiny.heads=2", "model.tiny.intermediate=128", "model.tiny.layers=1"]

    commands = [
        [*words, "trainer.name=run", f"trainer.steps={STEPS}"],
        ["replay", str(tmp_path / "run"), "step=1", f"through={STEPS}"],
        # Of this step the checkpoint before it was kept for it.
        ["replay", str(tmp_path / "run"), "step=5", "learner.lr=0.5"],
    ]
    _, replayed, other = in_turn(forks, commands, {**os.environ, **in_shared_ray}, 800)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    found = [record for record in lines if record["kind"] == "train"]
    assert [record["step"] for record in found] == list(range(1, STEPS + 1))
    lags = [record["update"] and record["update"]["staleness_max"] for record in found]
    assert lags[0] == 0
    assert max(lags) in (1, 2), "within the bound, and not without use of it"
    panels = {lag for record in found if record["update"] for lag in record["update"]["gap_by_lag"]}
    assert panels == {str(lag) for lag in range(int(max(lags)) + 1)}
    tasks = [json.loads(line)["task_id"] for n in range(1, STEPS + 1) for line in rollout(tmp_path, n)]
    groups = sum(record["selection"]["groups"] for record in found)
    assert len(tasks) == groups * 3
    assert len(set(tasks)) == groups > STEPS * 4, (
        "no task is played twice, and dynamic sampling played more than one round"
    )

    assert len({record["weights_checksum"] for record in found}) == STEPS
    assert "from step-000000 of run, with its own settings\n" in replayed
    told = [line for line in replayed.splitlines() if line.startswith("step ")]
    assert told == [f"step {step}: the same weights, bit for bit" for step in range(1, STEPS + 1)]
    assert "from step-000004 of run, with learner.lr=0.5 (" in other
    assert "\nstep 5: other weights; " in other
    for episode in map(json.loads, rollout(tmp_path, STEPS)):
        schedule = episode["metadata"]["schedule"]
        versions = [version for turn in episode["turns"] for version in turn["tokens"]["versions"]]
        assert schedule["began"] < schedule["ended"]
        assert schedule["version"] <= min(versions), "no token is older than its episode"


def rollout(folder, step):
    return (folder / "run" / "trajectories" / f"train-{step:06d}.jsonl").read_text().splitlines()
