"""The advantages of a step, by the numbers that were computed by hand, on rows: joined over fan-out, put back on each."""

import dataclasses
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step_cases import advantages, algorithm, episode, example, firsts, group, samples_for

from agent_train.algorithms.advantage_inputs import AdvantageInputs
from agent_train.algorithms.advantages import group_advantages
from agent_train.algorithms.step_advantages import mean_and_spread, with_advantages
from agent_train.config.extensions import advantages as ADVANTAGES
from agentgym.core.trajectory import Group

NEAR = {"abs": 4e-6}  # the hand-computed numbers have no eps


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("group", {}, [0.866024, -0.866024, -0.866024, 0.866024, 0.707106, -0.707106]),
        ("group", {"std": "population"}, [1, -1, -1, 1, 1, -1]),
        ("group", {"std_level": "none"}, [0.5, -0.5, -0.5, 0.5, 1, -1]),
        ("group", {"std_level": "none", "mean_level": "none"}, [1, 0, 0, 1, 3, 1]),
        # LitePPO: the batch 1 0 0 1 3 1 has mean 1 and sample variance (0 + 1 + 1 + 0 + 4 + 0) / 5 = 1.2.
        ("group", {"std_level": "batch"}, [x / math.sqrt(1.2) for x in (0.5, -0.5, -0.5, 0.5, 1, -1)]),
        ("rloo", {}, [2 / 3, -2 / 3, -2 / 3, 2 / 3, 2, -2]),
        ("opo", {}, [0.7, -0.3, -0.3, 0.7, 1, -1]),
        ("maxrl", {}, [1, -1, -1, 1, 0.5, -0.5]),
        ("best_of", {}, [0, 0, 0, 0, 2, 0]),
        ("reinforce_pp", {}, [0.203906, -0.747657, -0.747657, 0.203906, 2.107033, 0.203906]),
        ("reinforce_pp_baseline", {}, [0.929802, -0.516557, -0.516557, 0.929802, 1.652982, -1.239736]),
        (
            "reinforce_pp_baseline",
            {"std": "population"},
            [0.964901, -0.536056, -0.536056, 0.964901, 1.715380, -1.286535],
        ),
        ("turn", {}, [0.866024, -0.866024, -0.866024, 0.866024, 0.707106, -0.707106]),
        ("gigpo", {"std_level": "none", "step_weight": 0.0}, [0.5, -0.5, -0.5, 0.5, 1, -1]),
        ("constant", {}, [1, 1, 1, 1, 1, 1]),
    ],
)
def test_the_common_example(name, changes, expected):
    found, _ = advantages(example(), algorithm(name, **changes))
    assert firsts(found) == pytest.approx(expected, **NEAR)


def test_the_default_is_grpo_to_the_last_bit():
    found, _ = advantages(example(), algorithm())
    exact = [*group_advantages([1.0, 0.0, 0.0, 1.0]), *group_advantages([3.0, 1.0])]
    assert firsts(found) == exact


def test_remax_takes_the_greedy_reward_away_from_every_return():
    settings = algorithm("remax")
    found, _ = advantages(example(), settings, {"greedy": {"a": 0.5, "b": 0.5}})
    assert firsts(found) == pytest.approx([0.5, -0.5, -0.5, 0.5, 2.5, 0.5])
    found, _ = advantages(example(), settings, {"greedy": {"a": 0.5, "b": None}})
    assert firsts(found)[4:] == [0.0, 0.0], "a greedy episode that failed leaves no baseline"
    found, _ = advantages([group("a", [[(2, 0.1)], [(3, 0.3)]])], settings, {"greedy": {"a": 0.1}})
    assert firsts(found) == [0.0, pytest.approx(0.2)], "no difference is exactly nought, also where fp32 rounds"
    with pytest.raises(ValueError, match="greedy episode of every task; task 'b' has none"):
        advantages(example(), settings, {"greedy": {"a": 0.5}})


# Tokens a a o o a of FORMULAS: two turns with an observation between them, in one row or in a row each.
VALUES = [0.1, 0.2, 0.5]


@pytest.mark.parametrize("samples", ["one", "many"])
def test_gae_runs_through_the_rows_of_a_trajectory_and_leaves_observations_out(samples):
    groups = [Group("t", [episode("t", 0, [(2, 0.0), (1, 1.0)], samples=samples)])]
    found, made = advantages(groups, algorithm("gae", lam=0.5), values=VALUES)
    assert len(made) == (1 if samples == "one" else 2)
    assert found["t/0"] == pytest.approx([0.375, 0.55, 0.5])
    targets = [x for row in made for x, on in zip(row.targets, row.mask, strict=True) if on]
    assert targets == pytest.approx([0.475, 0.75, 1.0])


def test_the_critic_may_learn_with_a_lambda_of_its_own():
    groups = [Group("t", [episode("t", 0, [(2, 0.0), (1, 1.0)])])]
    found, (row,) = advantages(groups, algorithm("gae", lam=0.5, value_lam=1.0), values=VALUES)
    assert found["t/0"] == pytest.approx([0.375, 0.55, 0.5])
    assert [x for x, on in zip(row.targets, row.mask, strict=True) if on] == pytest.approx([1.0, 1.0, 1.0])


@pytest.mark.parametrize("samples", ["one", "many"])
def test_bilevel_gae_by_turns(samples):
    groups = [Group("t", [episode("t", 0, [(2, 1.0), (2, 2.0)], samples=samples)])]
    settings = algorithm("bilevel_gae", gamma=0.9, lam=0.8, turn_gamma=0.5)
    found, made = advantages(groups, settings, values=[0.5, 0.4, 0.3, 0.2])
    assert found["t/0"] == pytest.approx([0.8824, 1.42, 1.176, 1.8])
    targets = [x for row in made for x, on in zip(row.targets, row.mask, strict=True) if on]
    assert targets == pytest.approx([1.3824, 1.82, 1.476, 2.0])


def test_a_turn_of_reward_nought_is_a_turn():
    groups = [Group("t", [episode("t", 0, [(1, 0.0), (1, 2.0)])])]
    found, _ = advantages(groups, algorithm("bilevel_gae", turn_gamma=0.5, turn_lam=1.0), values=[0.4, 0.2])
    # B_2 = 1.8; B_1 = 0 + .5 * .2 - .4 + .5 * 1.8 = .6
    assert found["t/0"] == pytest.approx([0.6, 1.8])


def test_a_wrong_critic_biases_no_target_of_lambda_one_across_turns_either():
    """Turns a a, o a a a: the target is the return, 1, whatever the critic says, here 5. The advantage has its own lambdas."""
    groups = [Group("t", [episode("t", 0, [(2, 0.0), (3, 1.0)])])]
    settings = algorithm("bilevel_gae", turn_gamma=1.0, turn_lam=0.5, value_lam=1.0)
    found, (row,) = advantages(groups, settings, values=[5.0] * 5)
    # B_2 = 1 - 5 = -4; B_1 = 0 + 5 - 5 + .5 * -4 = -2
    assert found["t/0"] == pytest.approx([-2.0] * 2 + [-4.0] * 3)
    assert [x for x, on in zip(row.targets, row.mask, strict=True) if on] == pytest.approx([1.0] * 5)


def test_length_adaptive_lambda_counts_the_sampled_tokens_of_the_trajectory():
    groups = [Group("t", [episode("t", 0, [(2, 0.0), (2, 1.0)], samples="many")])]
    found, _ = advantages(groups, algorithm("gae", lam_alpha=0.5), values=[0.0, 0.0, 0.0, 0.0])
    # 4 tokens: lambda = 1 - 1 / (.5 * 4) = .5, and the reward of the last falls by half with every token.
    assert found["t/0"] == pytest.approx([0.125, 0.25, 0.5, 1.0])


@pytest.mark.parametrize("samples", ["one", "many"])
def test_returns_are_discounted_by_sampled_tokens_over_all_rows(samples):
    groups = [Group("t", [episode("t", 0, [(2, 0.0), (1, 1.0)], samples=samples)])]
    found, _ = advantages(groups, algorithm("remax", gamma=0.9), {"greedy": {"t": 0.0}})
    assert found["t/0"] == pytest.approx([0.81, 0.9, 1.0])


@pytest.mark.parametrize("samples", ["one", "many"])
def test_gigpo_by_the_states_that_agents_were_shown(samples):
    two = [
        episode("t", 0, [(1, 0.0), (1, 1.0)], samples=samples, states=["s0", "s1"]),
        episode("t", 1, [(1, 0.0), (1, 0.0)], samples=samples, states=["s0", "s2"]),
    ]
    found, _ = advantages([Group("t", two)], algorithm("gigpo", std_level="none"))
    assert [*found["t/0"], *found["t/1"]] == pytest.approx([0.975, 0.5, -0.975, -0.5])
    found, _ = advantages([Group("t", two)], algorithm("gigpo"))
    assert [*found["t/0"], *found["t/1"]] == pytest.approx([1.414212, 0.707106, -1.414212, -0.707106], abs=4e-6)


@pytest.mark.parametrize("first", [{"cell": [0, 0]}, (0, 0)])
def test_gigpo_by_the_states_that_the_environment_names(first):
    """No two observations are equal here, as where they count the turns."""
    two = [
        episode("t", 0, [(1, 0.0), (1, 1.0)], states=["turn 1 of a", "turn 2 of a"]),
        episode("t", 1, [(1, 0.0), (1, 0.0)], states=["turn 1 of b", "turn 2 of b"]),
    ]
    found, _ = advantages([Group("t", two)], algorithm("gigpo", std_level="none"))
    assert [*found["t/0"], *found["t/1"]] == pytest.approx([0.5, 0.5, -0.5, -0.5])
    for trajectory, second in zip(two, ("left", "right"), strict=True):
        trajectory.metadata["state"] = first
        # That of the last turn is where the episode ended: no turn began there.
        trajectory.turns[0].info["state"], trajectory.turns[1].info["state"] = second, "end"
    found, _ = advantages([Group("t", two)], algorithm("gigpo", std_level="none"))
    assert [*found["t/0"], *found["t/1"]] == pytest.approx([0.975, 0.5, -0.975, -0.5])


def test_turns_are_supervised_by_their_own_and_later_rewards():
    two = [episode("t", 0, [(1, 1.0), (2, 0.0)]), episode("t", 1, [(2, 0.0), (1, 1.0)])]
    found, _ = advantages([Group("t", two)], algorithm("turn", std="population", eps=0.0))
    assert found == {"t/0": [0.0, -1.0, -1.0], "t/1": [0.0, 0.0, 1.0]}


def test_a_turn_in_which_nothing_was_sampled_gives_its_reward_to_the_one_before():
    two = [episode("t", 0, [(1, 1.0), (0, 2.0), (1, 0.5)]), episode("t", 1, [(1, 0.0)])]
    found, _ = advantages([Group("t", two)], algorithm("turn", std_level="none"))
    # Rewards 3, .5 and 0, mean 7/6.
    assert found["t/0"] == pytest.approx([3.5 - 14 / 6, 0.5 - 7 / 6])


@pytest.mark.parametrize("samples", ["one", "many"])
def test_prime_adds_what_its_model_says_of_later_tokens(samples):
    two = [
        episode("t", 0, [(1, 0.0), (1, 1.0)], samples=samples),
        episode("t", 1, [(1, 0.0), (1, 0.0)], samples=samples),
    ]
    settings = algorithm("prime", prime_beta=0.5)
    lists = {"prm": [-0.5, -0.1, -1.0, -1.0], "reference": [-0.9, -0.7, -0.6, -0.8]}
    found, _ = advantages([Group("t", two)], settings, **lists)
    # Process rewards .2 .3 and -.2 -.1: baselines are the other's mean, -.15 and .25. Outcomes: 1 and -1.
    assert found["t/0"] == pytest.approx([1 + 0.35 + 0.45, 1 + 0.45])
    assert found["t/1"] == pytest.approx([-1 - 0.45 - 0.35, -1 - 0.35])


def test_distillation_follows_the_teacher_token_by_token():
    groups = [Group("t", [episode("t", 0, [(2, 0.0)])])]
    found, _ = advantages(groups, algorithm("distill"), {"teacher_coef": 2.0}, teacher=[-0.2, -1.5])
    assert found["t/0"] == pytest.approx([2 * 0.3, -2 * 1.0])


def test_what_an_advantage_needs_and_nobody_gave_is_named():
    for name, needed in (("prime", "prm"), ("distill", "teacher"), ("gae", "values")):
        with pytest.raises(ValueError, match=f"'{name}': sample 'a/0#0' has 4 tokens, but 0 {needed}"):
            advantages(example(), algorithm(name), reference=[0.0] * 14)
    with pytest.raises(ValueError, match="unknown advantage 'grpo'"):
        advantages(example(), algorithm("grpo"))


def test_the_kl_in_the_reward_costs_the_tokens_of_gae_and_the_score_of_grpo():
    groups = [Group("t", [episode("t", 0, [(2, 1.0)]), episode("t", 1, [(1, 0.0)])])]
    kl = {"place": "reward", "value": "k1", "coef": 0.1}
    lists = {"reference": [-1.0, -0.7, -0.5], "values": [0.0, 0.0, 0.0]}
    # log p is -.5: k1 is .5, .2 and 0.
    found, _ = advantages(groups, algorithm("gae", kl=kl), kl_coef=0.1, **lists)
    assert [*found["t/0"], *found["t/1"]] == pytest.approx([1 - 0.05 - 0.02, 1 - 0.02, 0.0])
    found, _ = advantages(groups, algorithm("group", std_level="none", kl=kl), kl_coef=0.1, **lists)
    assert firsts(found) == pytest.approx([0.93 / 2, -0.93 / 2])
    found, _ = advantages(
        groups, algorithm("group", std_level="none", kl={**kl, "place": "loss"}), kl_coef=0.1, **lists
    )
    assert firsts(found) == [0.5, -0.5]


def test_the_kl_in_the_reward_counts_for_turns_too():
    two = [episode("t", 0, [(1, 1.0), (1, 0.0)]), episode("t", 1, [(1, 0.0), (1, 1.0)])]
    kl = {"place": "reward", "value": "k1"}
    settings = algorithm("turn", std_level="none", kl=kl)
    found, _ = advantages([Group("t", two)], settings, kl_coef=1.0, reference=[-0.5, -0.6, -0.5, -0.5])
    # Rewards 1 -.1 and 0 1, mean .475.
    assert found["t/0"] == pytest.approx([0.525 - 0.575, -0.575])
    assert found["t/1"] == pytest.approx([-0.475 + 0.525, 0.525])


def test_whitening_counts_the_tokens_in_the_loss():
    found, samples = advantages(example(), algorithm("group", std_level="none", whiten=True))
    # The same numbers as REINFORCE++-baseline, whose baseline and whitening are these.
    expected = [0.929802, -0.516557, -0.516557, 0.929802, 1.652982, -1.239736]
    assert firsts(found) == pytest.approx(expected, **NEAR)
    assert mean_and_spread(samples) == pytest.approx((0.0, math.sqrt(13 / 14)), abs=1e-5)


@pytest.mark.parametrize(
    ("name", "changes"), [("reinforce_pp_baseline", {}), ("group", {"std_level": "none", "whiten": True})]
)
def test_an_episode_that_is_not_in_the_loss_is_in_the_baseline_and_not_in_the_whitening(name, changes):
    def with_cut(size):
        groups = [group("a", [[(2, 1.0)], [(4, 0.0)]])]
        groups[0].trajectories.append(episode("a", 2, [(size, 0.0)], end="max_turns"))
        found, samples = advantages(groups, algorithm(name, overlong={"mask": True}, **changes))
        assert mean_and_spread([s for s in samples if s.trajectory != "a/2"]) == pytest.approx(
            (0.0, math.sqrt(5 / 6)), abs=1e-5
        )
        return firsts(found)[:2]

    # 2/3 on two tokens and -1/3 on four: mean 0, sample variance (8/9 + 4/9) / 5. How long the cut one is does not matter.
    assert with_cut(3) == with_cut(50) == pytest.approx([2 / 3 / math.sqrt(4 / 15), -1 / 3 / math.sqrt(4 / 15)], **NEAR)


@pytest.mark.parametrize(
    "name", sorted(set(ADVANTAGES.shipped) - {"gae", "bilevel_gae", "remax", "prime", "distill", "constant"})
)
def test_a_group_of_one_and_one_without_spread_get_exactly_nought(name):
    groups = [group("one", [[(2, 3.0)]]), group("same", [[(2, 1.0)], [(3, 1.0)]])]
    if name == "reinforce_pp":  # which knows no groups
        groups = [group("same", [[(2, 1.0)], [(3, 1.0)]])]
    found, _ = advantages(groups, algorithm(name))
    assert set(firsts(found)) == {0.0}


def test_what_failed_or_sampled_nothing_is_in_no_baseline():
    others = [[(2, 1.0)], [(4, 0.0)]]
    plain = firsts(advantages([group("a", others)], algorithm())[0])
    added = group("a", others)
    added.trajectories += [episode("a", 2, [(3, 100.0)], end="error"), episode("a", 3, [(0, 50.0)])]
    assert firsts(advantages([added], algorithm())[0]) == plain


def test_an_episode_that_shaping_masks_counts_in_the_baseline_or_not():
    groups = [group("a", [[(2, 1.0)], [(4, 0.0)]])]
    groups[0].trajectories.append(episode("a", 2, [(4, 0.0)], end="max_turns"))
    counted = advantages(groups, algorithm(std_level="none", overlong={"mask": True}))[0]
    assert list(counted) == ["a/0", "a/1", "a/2"]
    assert firsts(counted) == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    left = advantages(groups, algorithm(std_level="none", overlong={"mask": True, "baseline": False}))[0]
    assert left == {"a/0": [0.5] * 2, "a/1": [-0.5] * 4}


def test_the_penalty_for_length_comes_with_the_last_turn():
    groups = [group("a", [[(3, 1.0), (4, 1.0)], [(2, 2.0)]])]
    found, _ = advantages(groups, algorithm("turn", std_level="none", overlong={"length": 10, "buffer": 4}))
    # 7 sampled tokens cost .25. Rewards 1 .75 and 2, mean 1.25.
    assert found["a/0"] == pytest.approx([-0.25 - 0.5] * 3 + [-0.5] * 4)
    assert found["a/1"] == pytest.approx([0.75] * 2)


def test_samples_that_do_not_fit_the_trajectories_are_refused():
    settings = algorithm()
    kept, samples = samples_for(example(), settings)
    with pytest.raises(ValueError, match=r"sample 'a/0#0': 1 turns and 0 rewards"):
        AdvantageInputs(settings, kept, [dataclasses.replace(samples[0], rewards=[]), *samples[1:]])
    stranger = samples_for([group("c", [[(2, 1.0)], [(2, 0.0)]])], settings)[1]
    with pytest.raises(ValueError, match=r"samples of 'c/0', which takes no part"):
        AdvantageInputs(settings, kept, samples + stranger)


def test_maxrl_refuses_rewards_below_nought():
    with pytest.raises(ValueError, match="at least 0"):
        advantages([group("a", [[(1, -1.0)], [(1, 1.0)]])], algorithm("maxrl"))


TURNS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=3)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(set(ADVANTAGES.shipped) - {"prime", "distill"})),
    groups=st.lists(st.lists(TURNS, min_size=1, max_size=3), min_size=1, max_size=4),
    seed=st.integers(0, 9),
    fan_out=st.sampled_from(["one", "many"]),
)
def test_the_order_of_groups_and_of_other_trajectories_rows_changes_nothing(name, groups, seed, fan_out):
    rng = random.Random(seed)
    made = [
        Group(f"g{g}", [episode(f"g{g}", k, turns, samples=fan_out) for k, turns in enumerate(group)])
        for g, group in enumerate(groups)
    ]
    greedy = {group.task_id: 0.25 for group in made}
    chosen = algorithm(name, gamma=0.9, lam=0.8)
    kept, samples = samples_for(made, chosen)
    samples = [dataclasses.replace(sample, values=[rng.random() for _ in sample.ids]) for sample in samples]
    before = with_advantages(AdvantageInputs(chosen, kept, samples, greedy), samples)
    queues = {}
    for sample in samples:
        queues.setdefault(sample.trajectory, []).append(sample)
    mixed = []
    while queues:
        name_of = rng.choice(sorted(queues))
        mixed.append(queues[name_of].pop(0))
        if not queues[name_of]:
            del queues[name_of]
    shuffled = list(kept)
    rng.shuffle(shuffled)
    made = with_advantages(AdvantageInputs(chosen, shuffled, mixed, greedy), mixed)
    after = {sample.id: sample for sample in made}
    for sample in before:
        assert after[sample.id].advantages == pytest.approx(sample.advantages, abs=1e-6)
        assert after[sample.id].targets == pytest.approx(sample.targets, abs=1e-6)
        assert all(math.isfinite(a) for a in sample.advantages)


def above_the_worst(inputs):
    """An advantage as a user writes it: the reward less the worst of its group."""
    return inputs.on_tokens([[reward - min(rewards) for reward in rewards] for rewards in inputs.rewards])


def by_trajectory(inputs):
    """A mistake: one number for each trajectory, not for each token."""
    return torch.ones(len(inputs.trajectories))


def test_a_users_own_function_is_an_advantage_by_its_path():
    found, _ = advantages(example(), algorithm(f"{__name__}:above_the_worst"))
    assert firsts(found) == [1.0, 0.0, 0.0, 1.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("no_such_module:f", "cannot import module 'no_such_module'.*No module named"),
        (f"{__name__}:nothing", "has no 'nothing'"),
        (f"{__name__}:NEAR", "is a dict, not a function"),
        (f"{__name__}:by_trajectory", r"returns \(6,\), not one number for each of 26 tokens"),
    ],
)
def test_a_users_own_function_that_is_no_advantage_is_refused(path, problem):
    with pytest.raises(ValueError, match=problem):
        advantages(example(), algorithm(path))
