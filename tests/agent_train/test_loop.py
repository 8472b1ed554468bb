"""What a step of the loop computes between its parts: samples, who learns from them, the KL's coefficient, where the run is then."""

import asyncio
import dataclasses
import math
from contextlib import nullcontext

import pytest
from run_cases import update
from step_cases import algorithm, episode, group, samples_for

from agent_train.algorithms.selection import choose
from agent_train.config.schema import Config
from agent_train.learner.role_start import Models
from agent_train.learner.roles import lr_scale
from agent_train.report.metrics import Clock
from agent_train.rollout.ahead import Rollout
from agent_train.trainer.checkpoint import Progress
from agent_train.trainer.rl import (
    StepError,
    add_reward_model_scores,
    after,
    give_advantages,
    learn,
    score_with_models,
    train_on,
    training_samples,
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

    async def update_prm(self, samples, outcomes, **given):
        self.calls.append(("prm", outcomes, samples[0].prm[0], samples[0].reference[0]))
        return "prm's metrics"


def models_of(**roles):
    return Models(**{"policy": Role(), **roles})


def test_a_linear_schedule_falls_from_one_to_a_last_step_that_still_learns():
    config = Config()
    assert [lr_scale(config, step, 50) for step in (1, 50)] == [1.0, 1.0]
    config.learner.schedule = "linear"
    assert [lr_scale(config, step, 4) for step in (1, 2, 3, 4)] == [1.0, 0.75, 0.5, 0.25]


def test_samples_are_of_what_takes_part_at_the_sampling_temperature():
    made = group("t", [[(2, 1.0)], [(3, 0.0)]])
    made.trajectories += [episode("t", 2, [(3, 100.0)], end="error"), episode("t", 3, [(0, 1.0)])]
    config = config_of()
    config.sampling.temperature = 0.7
    samples = training_samples(config, [made], [made])
    assert [(each.id, each.trajectory, each.temperature) for each in samples] == [
        ("t/0#0", "t/0", 0.7),
        ("t/1#0", "t/1", 0.7),
    ]


def test_a_step_without_a_played_episode_says_what_failed_first():
    made = Group("t", [episode("t", 0, [(2, 1.0)], end="error")])
    with pytest.raises(StepError, match=r"not one of the 1 episodes of this training step.*broke"):
        training_samples(config_of(), [made], [made])


def backwards(rewards, share):
    return list(reversed(range(len(rewards))))


def not_finite(trajectory):
    return [math.nan] * len(trajectory.turns)


@pytest.mark.parametrize(
    ("settings", "shaping", "words"),
    [
        ({"chosen": {"name": f"{__name__}:backwards"}}, None, "not ascending indices of 2 groups"),
        ({}, f"{__name__}:not_finite", r"reward shaping returns \[nan\], not a finite number"),
    ],
    ids=["filter", "shaping"],
)
def test_a_function_of_the_user_s_own_that_returns_nonsense_ends_the_step_in_one_line(settings, shaping, words):
    config = config_of(**settings)
    config.algorithm.reward_shaping = shaping
    groups = [group(task, [[(2, 1.0)], [(3, 0.0)]]) for task in ("a", "b")]
    step = train_on(config, models_of(), Progress(), Rollout(groups, [], 1), Clock(), nullcontext(), None)
    with pytest.raises(StepError, match=words):
        asyncio.run(step)


def test_a_step_of_which_the_filter_keeps_nothing_updates_nothing_and_goes_on():
    made = [group("t", [[(2, 1.0)], [(3, 1.0)]])]
    config = config_of(chosen={"name": "spread"})
    kept, selection = choose(made, config.algorithm, 1)
    models = models_of(critic=Role())
    assert training_samples(config, made, kept) == []
    assert asyncio.run(score_with_models(config, models, [])) == give_advantages(config, kept, [], [], 0.0) == []
    assert asyncio.run(learn(config, models, Progress(), kept, [])) == (None, None, None)
    assert models.policy.calls == models.critic.calls == []
    assert after(config, Progress(4), made, selection.episodes, None) == Progress(5, 0.0, 2, 5)


def test_every_model_scores_the_samples_and_writes_into_none():
    config = config_of(name="gae")
    _, samples = samples_for([group("t", [[(2, 1.0)]])], config.algorithm)
    models = models_of(reference=Role(-2.0), critic=Role(0.5), prm=Role(-3.0), teacher=Role(-4.0))
    (scored,) = asyncio.run(score_with_models(config, models, samples))
    assert (scored.reference[0], scored.values[0], scored.prm[0], scored.teacher[0]) == (-2.0, 0.5, -3.0, -4.0)
    assert scored.id == samples[0].id
    assert samples[0].reference == samples[0].values == samples[0].prm == samples[0].teacher == []
    with pytest.raises(dataclasses.FrozenInstanceError):
        samples[0].reference = [0.0]


def test_a_reward_model_adds_its_score_of_the_last_sample_to_the_last_turn():
    class RewardModel:
        async def scores(self, samples):
            return [10.0 + number for number in range(len(samples))]

    made = group("t", [])
    made.trajectories.append(episode("t", 0, [(2, 0.5), (2, 1.0)], samples="many"))
    _, samples = samples_for([made], algorithm())
    scored = asyncio.run(add_reward_model_scores(models_of(reward_model=RewardModel()), samples))
    assert [each.rewards for each in scored] == [[0.5], [12.0]]
    assert [each.rewards for each in samples] == [[0.5], [1.0]]
    assert asyncio.run(add_reward_model_scores(models_of(), samples)) == samples


def test_remax_reads_the_greedy_episodes_that_did_not_fail():
    config = config_of(name="remax")
    kept, samples = samples_for([group("t", [[(2, 1.0)]]), group("u", [[(2, 1.0)]])], config.algorithm)
    greedy = [episode("t", 0, [(2, 0.25)]), episode("u", 0, [(2, 0.25)], end="error")]
    found = give_advantages(config, kept, samples, greedy, 0.0)
    assert [each.advantages[-1] for each in found] == [0.75, 0.0]


def test_the_greedy_baseline_is_shaped_and_penalised_as_the_rewards_are():
    config = config_of(name="remax", overlong={"length": 3, "buffer": 2})
    kept, samples = samples_for([group("t", [[(2, 1.0)]])], config.algorithm)
    (sample,) = give_advantages(config, kept, samples, [episode("t", 0, [(3, 0.25)])], 0.0)
    assert sample.advantages[-1] == (1.0 - 0.5) - (0.25 - 1.0)


def updated(config, progress, **roles):
    made = [group("t", [[(2, 1.0)], [(2, 0.0)]])]
    made[0].trajectories.append(episode("t", 2, [(4, 1.0)], end="max_turns"))
    kept, selection = choose(made, config.algorithm, 1)
    models = models_of(**roles)
    samples = asyncio.run(score_with_models(config, models, training_samples(config, made, kept)))
    samples = give_advantages(config, kept, samples, [], 0.0)
    update, critic, prm = asyncio.run(learn(config, models, progress, kept, samples))
    return models, (update, critic, prm), after(config, progress, made, selection.episodes, update)


def test_all_that_learns_learns_from_the_samples_in_the_loss():
    config = config_of(name="prime", overlong={"mask": True})
    roles = {"critic": Role(), "prm": Role(-3.0), "reference": Role(-2.0)}
    models, (_, critic, prm), _ = updated(config, Progress(6), **roles)
    given = {"lr_scale": 1.0, "kl_coef": 0.0, "version": 6}
    assert models.policy.calls == [("update", 2, given)]
    assert models.critic.calls == [("critic", 2, {"lr_scale": 1.0})]
    assert models.prm.calls == [("prm", {"t/0": 1.0, "t/1": 0.0, "t/2": 1.0}, -3.0, -2.0)]
    assert (critic, prm) == ("critic's metrics", "prm's metrics")


@pytest.mark.parametrize(("step", "policy"), [(0, 0), (1, 0), (2, 1)])
def test_the_critic_may_learn_alone_first(step, policy):
    config = config_of(name="gae")
    config.critic.alone_steps = 2
    models, (update, _, _), _ = updated(config, Progress(step), critic=Role(0.0))
    assert (len(models.policy.calls), len(models.critic.calls)) == (policy, 1)
    assert (update is not None) == bool(policy)


@pytest.mark.parametrize(("place", "coef"), [("loss", 0.5), ("reward", 0.0)])
def test_the_loss_gets_the_kl_where_it_is_not_in_the_reward(place, coef):
    config = config_of(kl={"place": place, "coef": 0.5})
    models, _, progress = updated(config, Progress(kl_coef=0.5), reference=Role())
    assert (models.policy.calls[0][2]["kl_coef"], progress.kl_coef) == (coef, 0.5)


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
    kept, samples = samples_for(made, config.algorithm)
    with pytest.raises(StepError, match=r"algorithm\.advantage\.name=maxrl: .*at least 0"):
        give_advantages(config, kept, samples, [], 0.0)
