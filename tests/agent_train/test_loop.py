"""What a step of the loop computes between its parts: rows, who learns from them, the KL's coefficient, where the run is then."""

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest
from run_cases import update
from step_cases import algorithm, episode, group, rows_for

from agent_train.algorithms.selection import choose
from agent_train.config.schema import Config
from agent_train.learner.roles import lr_scale
from agent_train.trainer.progress import Progress
from agent_train.trainer.step import (
    AdvantageError,
    NothingPlayed,
    Played,
    after,
    give_advantages,
    learn,
    score,
    training_rows,
)
from agentgym.core.trajectory import Group


def config_of(**settings):
    return Config(algorithm=algorithm(**settings))


class Role:
    """A double of a learner's ranks, which writes down what it is asked for."""

    def __init__(self, number=-1.0):
        self.number, self.calls = number, []

    async def logprobs(self, rows):
        return [[self.number] * len(row.ids) for row in rows]

    values = logprobs

    async def update(self, rows, **given):
        self.calls.append(("update", len(rows), given))
        return update(kl_reference=0.3)

    async def update_critic(self, rows, **given):
        self.calls.append(("critic", len(rows), given))
        return "critic's metrics"

    async def update_prm(self, rows, logprobs, reference, outcomes, **given):
        self.calls.append(("prm", outcomes, logprobs[0][0], reference[0][0]))
        return "prm's metrics"


def job_of(**roles):
    return SimpleNamespace(**{"learner": Role(), **dict.fromkeys(("reference", "critic", "prm", "teacher")), **roles})


def test_a_linear_schedule_falls_from_one_to_a_last_step_that_still_learns():
    config = Config()
    assert [lr_scale(config, step, 50) for step in (1, 50)] == [1.0, 1.0]
    config.learner.schedule = "linear"
    assert [lr_scale(config, step, 4) for step in (1, 2, 3, 4)] == [1.0, 0.75, 0.5, 0.25]


def test_rows_are_of_what_takes_part_at_the_sampling_temperature():
    made = group("t", [[(2, 1.0)], [(3, 0.0)]])
    made.trajectories += [episode("t", 2, [(3, 100.0)], end="error"), episode("t", 3, [(0, 1.0)])]
    rows = training_rows(choose([made], algorithm(), 1), Played([made], [], 1), 0.7)
    assert [(row.trajectory, row.temperature) for row in rows] == [("t/0", 0.7), ("t/1", 0.7)]


def test_a_step_without_a_played_episode_says_what_failed_first():
    made = Group("t", [episode("t", 0, [(2, 1.0)], end="error")])
    with pytest.raises(NothingPlayed, match=r"not one of the 1 episodes of this training step.*broke"):
        training_rows(choose([made], algorithm(), 1), Played([made], [], 1), 1.0)


def test_a_step_of_which_the_filter_keeps_nothing_updates_nothing_and_goes_on():
    made = [group("t", [[(2, 1.0)], [(3, 1.0)]])]
    config = config_of(chosen={"name": "spread"})
    chosen = choose(made, config.algorithm, 1)
    job = job_of(critic=Role())
    assert training_rows(chosen, Played(made, [], 1), 1.0) == []
    scores = asyncio.run(score(config, job, []))
    give_advantages(config, chosen, [], scores, 0.0)
    learned = asyncio.run(learn(config, job, Progress(), chosen, [], scores))
    assert (learned.update, learned.critic, job.learner.calls, job.critic.calls) == (None, None, [], [])
    assert after(config, Progress(4, 7), Played(made, [], 1), learned) == Progress(5, 8, 0.0, 2, 5)


def test_every_role_says_its_part():
    config = config_of(name="gae")
    _, rows = rows_for([group("t", [[(2, 1.0)]])], config.algorithm)
    job = job_of(reference=Role(-2.0), critic=Role(0.5), prm=Role(-3.0), teacher=Role(-4.0))
    greedy = [episode("t", 0, [(2, 0.5)]), episode("u", 0, [(2, 0.5)], end="error")]
    scores = asyncio.run(score(config, job, rows, greedy))
    assert (rows[0].reference[0], rows[0].values[0], scores.prm[0][0], scores.teacher[0][0]) == (-2.0, 0.5, -3.0, -4.0)
    assert scores.greedy == {"t": 0.5, "u": None}
    asyncio.run(score(config, job_of(), rows))
    assert (rows[0].reference, rows[0].values) == ([], []), "nothing of another step stays"


def updated(config, progress, **roles):
    made = [group("t", [[(2, 1.0)], [(2, 0.0)]])]
    made[0].trajectories.append(episode("t", 2, [(4, 1.0)], end="max_turns"))
    chosen = choose(made, config.algorithm, 1)
    rows = training_rows(chosen, Played(made, [], 1), 1.0)
    job = job_of(**roles)
    scores = asyncio.run(score(config, job, rows))
    give_advantages(config, chosen, rows, scores, 0.0)
    learned = asyncio.run(learn(config, job, progress, chosen, rows, scores))
    return job, learned, after(config, progress, Played(made, [], 1), learned)


def test_all_that_learns_learns_from_the_rows_in_the_loss():
    config = config_of(name="prime", overlong={"mask": True})
    roles = {"critic": Role(), "prm": Role(-3.0), "reference": Role(-2.0)}
    job, learned, _ = updated(config, Progress(6), **roles)
    given = {"lr_scale": 1.0, "kl_coef": 0.0, "version": 6}
    assert job.learner.calls == [("update", 2, given)]
    assert job.critic.calls == [("critic", 2, {"lr_scale": 1.0})]
    assert job.prm.calls == [("prm", {"t/0": 1.0, "t/1": 0.0, "t/2": 1.0}, -3.0, -2.0)]
    assert (learned.critic, learned.prm) == ("critic's metrics", "prm's metrics")


@pytest.mark.parametrize(("step", "policy"), [(0, 0), (1, 0), (2, 1)])
def test_the_critic_may_learn_alone_first(step, policy):
    config = config_of(name="gae")
    config.critic.alone_steps = 2
    job, learned, _ = updated(config, Progress(step), critic=Role(0.0))
    assert (len(job.learner.calls), len(job.critic.calls)) == (policy, 1)
    assert (learned.update is not None) == bool(policy)


@pytest.mark.parametrize(("place", "coef"), [("loss", 0.5), ("reward", 0.0)])
def test_the_loss_gets_the_kl_where_it_is_not_in_the_reward(place, coef):
    config = config_of(kl={"place": place, "coef": 0.5})
    job, learned, _ = updated(config, Progress(kl_coef=0.5), reference=Role())
    assert (job.learner.calls[0][2]["kl_coef"], learned.kl_coef) == (coef, 0.5)


def test_an_adaptive_coefficient_follows_the_measured_kl():
    config = config_of(kl={"coef": 0.5, "target": 0.1, "horizon": 30})
    _, _, progress = updated(config, Progress(kl_coef=0.5), reference=Role())
    assert progress.kl_coef == pytest.approx(0.5 * (1 + 0.2 * 3 / 30)), (
        "a KL of .3 is far above .1: up by a fifth at most"
    )
    fixed = dataclasses.replace(config.algorithm.kl, target=None)
    config.algorithm.kl = fixed
    assert updated(config, Progress(kl_coef=0.5), reference=Role())[2].kl_coef == 0.5


def test_rewards_that_the_advantage_cannot_take_end_the_run_with_its_key():
    made = [group("t", [[(2, -1.0)], [(2, 0.0)]])]
    config = config_of(name="maxrl")
    chosen, rows = rows_for(made, config.algorithm)
    with pytest.raises(AdvantageError, match=r"algorithm\.advantage\.name=maxrl: .*at least 0"):
        give_advantages(config, chosen, rows, asyncio.run(score(config, job_of(), rows)), 0.0)
