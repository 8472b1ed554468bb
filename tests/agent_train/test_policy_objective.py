"""What one optimizer step of the policy computes: the formulas through the whole worker, on a policy whose log-probabilities are
its weights, so that every number can be written down."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import settings as rounds
from hypothesis import strategies as st
from learner_cases import one_rank, write_model
from objective_cases import OF_BEHAVIOUR, learn, row_of, settings
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from agent_train.algorithms.policy_losses import m2po_limit
from agent_train.algorithms.reductions import MODES
from agent_train.config.extensions import losses
from agent_train.config.schema import AlgorithmConfig, CorrectionConfig, KlConfig
from agent_train.data.packing import batch_of
from agent_train.learner.policy_objective import policy_objective
from agent_train.report.trackers import numbers

NARROW = {"clip_low": 0.2, "clip_high": 0.28}
REDUCTIONS = [(mode, 9.0 if mode == "constant" else None) for mode in MODES]


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    with one_rank(write_model(tmp_path_factory.mktemp("model"))) as worker:
        yield worker


def logs(*numbers):
    return [math.log(number) for number in numbers]


def off_policy(worker, loss, ratios, advantages, old=None, reduction="token-mean", **loss_settings):
    """One row whose tokens have these ratios to what the loss divides by, which stands for the engine here."""
    old = old or [-1.5] * len(ratios)
    trained = [o + math.log(ratio) for o, ratio in zip(old, ratios, strict=True)]
    algorithm = settings(loss, proximal="behaviour", loss_settings=loss_settings, reduction=reduction)
    return learn(worker, [row_of(old, advantages)], trained, algorithm)


def corrected(worker, weights, advantages=None, lengths=None, **fields):
    """A step on policy whose tokens the engine thought `weights` times less likely than the trainer does."""
    trained = [-1.0] * len(weights)
    behaviour = [-1.0 - math.log(w) for w in weights]
    advantages, rows, at = advantages or [1.0] * len(weights), [], 0
    for length in lengths or [len(weights)]:
        rows.append(row_of(behaviour[at : at + length], advantages[at : at + length], first=1 + at))
        at += length
    return learn(worker, rows, trained, settings(**fields))


# FORMULAS 1d.


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "loss", "held"),
    [(1.5, 1, None, -1.28, 1), (0.5, 1, None, -0.5, 0), (1.5, -1, None, 1.5, 0), (5.0, -1, 3.0, 3.0, 1)],
)
def test_ppo_with_asymmetric_and_dual_clip(worker, ratio, advantage, dual, loss, held):
    found = off_policy(worker, "ppo", [ratio], [float(advantage)], **NARROW, dual_clip=dual)
    assert found.metrics.loss == pytest.approx(loss, abs=1e-6)
    assert found.metrics.ratio_mean == found.metrics.ratio_max == pytest.approx(ratio, rel=1e-6)
    assert found.metrics.clip_fraction == held
    assert found.grads[0] == pytest.approx([0.0 if held else -ratio * advantage], abs=1e-6)


@pytest.mark.parametrize(("loss", "given"), [("dppo", {"low": 0.1, "high": 0.1}), ("m2po", {"budget": 0.01})])
def test_tokens_beyond_their_range_are_held_back_though_something_pulls_at_them(worker, loss, given):
    """The first moved too far in its advantage's direction, the second against it, the third hardly."""
    found = off_policy(worker, loss, [2.0, 2.0, 1.01], [1.0, -1.0, 1.0], **given)
    assert found.metrics.clip_fraction == pytest.approx(1 / 3)
    assert (found.grads[0][0] != 0.0) == (loss == "dppo"), "its pull to the engine's policy"


@pytest.mark.parametrize(
    ("loss", "advantages", "value", "grads", "given"),
    [
        ("gspo", [1.0, 1.0], -1.1, [-0.55, -0.55], NARROW),
        ("gspo_token", [1.0, 1.0], -1.1, [-0.55, -0.55], NARROW),
        ("cispo", [1.0, 1.0], 0.797397, [-0.64, -0.4], NARROW),
        ("sapo", [1.0, -1.0], -0.704453, [-0.786448, 0.289855], {}),
        ("gmpo", [1.0, 1.0], -0.894703, [0.0, -0.447352], {"clip_low": 0.502527, "clip_high": 0.28}),
        ("topr", [1.0, -1.0], None, [-0.5, 0.3025], {}),
        ("raft_pp", [1.0, -1.0], -0.64, [0.0, 0.0], NARROW),
        ("kimi", [1.0, 1.0], None, [(-1 + 0.1 * math.log(2)) / 2, (-1 + 0.1 * math.log(0.605)) / 2], {"tau": 0.1}),
        ("aipo", [1.0, 1.0], None, [-0.75, -0.3025], {"cap": 1.5}),
        ("m2po", [1.0, 1.0], -1.3025, [-1.0, -0.3025], {"budget": 9.0}),
        ("m2po", [1.0, 1.0], -0.3025, [0.0, -0.3025], {"budget": 0.3}),
        ("reinforce", [1.0, -1.0], None, [-0.5, 0.5], {}),
    ],
)
def test_losses_of_two_tokens_with_ratios_2_and_0605(worker, loss, advantages, value, grads, given):
    found = off_policy(worker, loss, [2.0, 0.605], advantages, old=[-1.0, -1.0], **given)
    if value is not None:
        assert found.metrics.loss == pytest.approx(value, abs=2e-6)
    assert found.grads[0] == pytest.approx(grads, abs=2e-6)


@pytest.mark.parametrize("loss", ["gspo", "gmpo"])
def test_a_loss_of_whole_rows_refuses_credit_that_it_would_average_away(worker, loss):
    """Else the gradient of these advantages is 0, and nobody is told."""
    row, trained = row_of([-1.0] * 4, [1.0, 1.0, -1.0, -1.0]), [-1.0] * 4
    with pytest.raises(ValueError, match=f"'{loss}' needs one advantage .* gspo_token"):
        learn(worker, [row], trained, settings(loss))
    assert learn(worker, [row], trained, settings("gspo_token")).grads[0] == pytest.approx([-0.25] * 2 + [0.25] * 2)


def test_dppo_drops_by_the_change_of_probability(worker):
    trained, sampled = logs(0.5, 0.3, 0.2), logs(0.4, 0.3, 0.5)
    algorithm = settings("dppo", reduction="seq-mean-token-sum", loss_settings={"low": 0.2, "high": 0.2, "tau": 1e-3})
    found = learn(worker, [row_of(sampled, [1.0, 1.0, -1.0])], trained, algorithm)
    assert found.metrics.loss == pytest.approx(-2.249111, abs=2e-6)
    assert abs(found.grads[0][2]) < 0.01


@pytest.mark.parametrize(("advantage", "kept"), [(-1.0, 0.0), (1.0, 1.0)])
def test_opsm_drops_what_should_be_done_less_in_a_row_that_has_drifted(worker, advantage, kept):
    rows = [row_of([-0.8, -0.8], [advantage] * 2), row_of([-0.95], [1.0], first=3)]
    found = learn(worker, rows, [-1.0] * 3, settings(correction=CorrectionConfig(drift=0.1)))
    assert found.grads[0] == pytest.approx([-kept / 3, -kept / 3, -1 / 3], abs=1e-6)
    assert found.metrics.dropped_fraction == pytest.approx(0.0 if kept else 2 / 3)
    assert found.metrics.correction_mean == pytest.approx(1.0 if kept else 1 / 3)


# FORMULAS 1e: weights 3, 0.8 and 0.1, A = 1, ratio 1.


@pytest.mark.parametrize(
    ("name", "numbers", "loss", "cut", "dropped"),
    [
        ("tis", {"cap": 2.0}, -0.966667, 1, 0),
        ("icepop", {"low": 0.5, "high": 2.0}, -0.266667, 0, 2),
        ("seq-mask-tis", {"low": 0.5, "high": 2.0}, -1.3, 0, 0),
        ("sequence-is", {}, -0.24, 0, 0),
        ("geometric-is", {}, -(0.24 ** (1 / 3)), 0, 0),
        ("sequence-mask", {"low": 0.5}, 0.0, 0, 3),
        ("geometric-mask", {"low": 0.5}, -1.0, 0, 0),
    ],
)
def test_a_correction_weighs_the_policy_loss_and_leaves_the_denominator(worker, name, numbers, loss, cut, dropped):
    found = corrected(worker, [3.0, 0.8, 0.1], correction=CorrectionConfig(name=name, **numbers))
    assert found.metrics.loss == pytest.approx(loss, abs=1e-6)
    assert sum(found.grads[0]) == pytest.approx(loss, abs=1e-6)
    assert found.metrics.ratio_max == 1.0
    assert found.metrics.cut_fraction == pytest.approx(cut / 3)
    assert found.metrics.dropped_fraction == pytest.approx(dropped / 3)
    assert found.metrics.correction_mean == pytest.approx(-loss, abs=1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=[mode for mode, _ in REDUCTIONS])
def test_a_row_that_a_mask_drops_stays_in_every_denominator(worker, reduction):
    mode, length = reduction
    weights, lengths = [5.0, 1.0, 1.0, 1.0], [1, 3]
    masked = corrected(
        worker,
        weights,
        lengths=lengths,
        correction=CorrectionConfig(name="icepop", low=0.5, high=2.0),
        reduction=mode,
        reduction_length=length,
    )
    whole = corrected(worker, weights, lengths=lengths, reduction=mode, reduction_length=length)
    assert masked.grads[0] == pytest.approx([0.0, *whole.grads[0][1:]], abs=1e-7)


def test_kl_and_entropy_are_never_weighed_by_a_correction(worker):
    correction = CorrectionConfig(name="icepop", low=0.9, high=1.1, drift=0.5)
    behaviour, reference = logs(0.5, 0.05, 0.3), logs(0.6, 0.2, 0.1)
    trained = logs(0.5, 0.5, 0.3)
    row = row_of(behaviour, [0.0] * 3, reference=[math.nan, *reference])
    found = learn(
        worker, [row], trained, settings(correction=correction, entropy_coef=0.06), entropy=[1.0, 2.0, 3.0], kl_coef=0.3
    )
    differences = [r - t for r, t in zip(reference, trained, strict=True)]
    assert found.metrics.dropped_fraction == pytest.approx(1 / 3)
    assert found.grads[0] == pytest.approx([0.1 * (1 - math.exp(x)) for x in differences], abs=1e-6)
    assert found.entropy_grads[0] == pytest.approx([-0.02] * 3)
    kl = sum(math.exp(x) - x - 1 for x in differences) / 3
    assert found.metrics.kl_reference == pytest.approx(kl, abs=1e-6)
    assert found.metrics.loss_kl == pytest.approx(0.3 * kl, abs=1e-6)
    assert found.metrics.loss_entropy == pytest.approx(-0.12, abs=1e-6)
    assert found.metrics.loss == pytest.approx(found.metrics.loss_kl + found.metrics.loss_entropy, abs=1e-6)
    assert found.metrics.loss_policy == 0.0
    assert found.metrics.kl_coef == 0.3


@pytest.mark.parametrize(
    ("kl", "values", "grads"),
    [
        ({"value": "k1"}, (0.5, -1.0), (1.0, 1.0)),
        ({"value": "k2"}, (0.125, 0.5), (0.5, -1.0)),
        ({"value": "k3"}, (0.106531, 0.718282), (1 - math.exp(-0.5), 1 - math.e)),
        ({"value": "abs"}, (0.5, 1.0), (1.0, -1.0)),
        ({"value": "k3", "gradient": "k2"}, (0.106531, 0.718282), (0.5, -1.0)),
        ({"value": "k3", "max_value": 0.5}, (0.106531, 0.5), (1 - math.exp(-0.5), 1 - math.e)),
        # On policy the ratio is 1, and its gradient adds the value to that of the estimate.
        ({"value": "k1", "importance": "full"}, (0.5, -1.0), (1.5, 0.0)),
        ({"value": "k1", "importance": "detached"}, (0.5, -1.0), (1.0, 1.0)),
    ],
)
def test_kl_in_the_loss_by_every_estimator(worker, kl, values, grads):
    row = row_of([-1.0, -2.0], [0.0, 0.0], reference=[0.0, -1.5, -1.0])
    algorithm = settings(kl=KlConfig(coef=1.0, **kl), reduction="seq-mean-token-sum")
    found = learn(worker, [row], [-1.0, -2.0], algorithm, kl_coef=1.0)
    assert found.metrics.loss_kl == pytest.approx(sum(values), abs=1e-6)
    assert found.grads[0] == pytest.approx(list(grads), abs=1e-6)


def test_the_importance_of_the_kl_is_that_of_the_policy_at_the_start_of_the_training_step(worker):
    """Also of a loss that reads no proximal policy itself. The first step moves the token by 0.2; then p / o is e^0.2."""
    row = row_of([-5.0], [1.0], reference=[0.0, -1.0])
    algorithm = settings("reinforce", kl=KlConfig(coef=1.0, value="k2", importance="detached"))
    found = learn(worker, [row], [-1.0], algorithm, kl_coef=1.0, updates=2, lr=0.2)
    assert found.grads[0] == pytest.approx([-1.0])
    assert found.grads[1] == pytest.approx([-1.0 + math.exp(0.2) * 0.2])


def test_a_kl_whose_coefficient_is_zero_is_measured_and_not_in_the_loss(worker):
    row = row_of([-1.0, -2.0], [0.0, 0.0], reference=[0.0, -1.5, -1.0])
    found = learn(worker, [row], [-1.0, -2.0], settings(kl=KlConfig(coef=0.1, place="reward", value="k1")))
    assert found.grads[0] == [0.0, 0.0]
    assert found.metrics.kl_reference == pytest.approx(-0.25)
    assert found.metrics.loss_kl == found.metrics.kl_coef == 0.0


# One weight for one gap.


def test_what_is_recomputed_is_corrected_and_what_divides_by_the_engine_is_not(worker):
    """The gap o / b is 3: it is in the weight, or in the ratio, but the gradient is 3 and not 9 either way."""
    unclipped = {"clip_low": 1.0, "clip_high": 99.0}
    correction = CorrectionConfig(name="tis")
    for fields in ({"correction": correction}, {"proximal": "behaviour"}):
        found = corrected(worker, [3.0], **fields, loss_settings=unclipped)
        assert found.grads[0] == pytest.approx([-3.0], rel=1e-6)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"proximal": "behaviour", "correction": CorrectionConfig(name="tis")}, "covers it already"),
        *(({"loss": loss, "proximal": "recomputed"}, "set proximal to behaviour") for loss in OF_BEHAVIOUR),
    ],
)
def test_settings_that_weigh_one_gap_twice_make_no_objective(fields, problem):
    with pytest.raises(ValueError, match=problem):
        policy_objective(AlgorithmConfig(**fields))


# The proximal policy.


@pytest.mark.parametrize("loss", sorted(losses.shipped))
def test_on_policy_every_loss_is_that_of_the_policy_gradient(worker, loss):
    """Ratio exactly 1, nothing clipped, and the gradient of -A log p."""
    advantages = [0.5, 0.5, -2.0]
    trained = [-1.25, -0.5, -2.0]
    rows = [row_of(trained[:2], advantages[:2]), row_of(trained[2:], advantages[2:], first=3)]
    found = learn(worker, rows, trained, settings(loss))
    expected = [max(a, 0.0) if loss == "raft_pp" else a for a in advantages]
    assert found.metrics.ratio_mean == found.metrics.ratio_max == 1.0
    assert found.metrics.kl_k1 == found.metrics.kl_k3 == found.metrics.gap_max == 0.0
    assert found.metrics.clip_fraction == (pytest.approx(1 / 3) if loss == "raft_pp" else 0.0)
    assert found.grads[0] == pytest.approx([-a / 3 for a in expected], abs=1e-6)


def test_the_second_optimizer_step_divides_by_the_policy_at_the_start(worker):
    row = row_of([-1.0, -1.0], [1.0, -1.0])
    found = learn(worker, [row], [-1.0, -1.0], settings(loss_settings=NARROW), updates=2, lr=0.2)
    # The first moves the log-probabilities by 0.1 either way; the second has these ratios.
    up, down = math.exp(0.1), math.exp(-0.1)
    assert found.grads[0] == pytest.approx([-0.5, 0.5], abs=1e-6)
    assert found.grads[1] == pytest.approx([-up / 2, down / 2], abs=1e-6)
    assert found.metrics.ratio_max == pytest.approx(up, abs=1e-6)
    assert found.metrics.ratio_mean == pytest.approx((2 + up + down) / 4, abs=1e-6)
    assert found.metrics.gap_max == 0.0


@pytest.mark.parametrize("updates", [1, 2, 3])
def test_a_pass_of_its_own_is_made_only_for_the_later_steps_and_only_where_something_reads_it(worker, updates):
    def passes(loss, **fields):
        calls = []
        algorithm = settings(loss, **fields)
        scored = worker.score
        worker.score = lambda batches: calls.append(len(batches)) or scored(batches)
        try:
            learn(worker, [row_of([-1.0], [1.0], versions=[-1, 0])], [-1.0], algorithm, updates=updates, version=0)
        finally:
            del worker.score
        return len(calls)

    assert passes("ppo") == updates - 1
    assert passes("reinforce") == 0
    assert passes("reinforce", correction=CorrectionConfig(name="tis", cap=2.0)) == updates - 1
    assert passes("ppo", proximal="behaviour") == passes("ppo", proximal="interpolated") == 0
    assert passes("m2po") == updates


def test_an_interpolated_proximal_policy_lies_between_engine_and_trainer_by_versions(worker):
    """Two optimizer steps from version 3: in the second, two thirds of the life of a token of version 2 lie before."""
    row = row_of([-1.3, -1.3], [1.0, 1.0], versions=[-1, 2, 3])
    algorithm = settings(proximal="interpolated", loss_settings={"clip_low": 1.0, "clip_high": 9.0})
    found = learn(worker, [row], [-1.0, -1.0], algorithm, updates=2, lr=0.2, version=3)
    assert found.grads[0] == pytest.approx([-0.5, -0.5], abs=1e-7)
    # Now both are at -0.9, which is 0.4 from the engine. Versions in optimizer steps: 4 or 6, proximal 6, now 7.
    old = [-1.3 + 2 / 3 * 0.4, -1.3]
    assert found.grads[1] == pytest.approx([-math.exp(-0.9 - o) / 2 for o in old], abs=1e-6)


@pytest.mark.parametrize(
    ("row", "version", "problem"),
    [
        (row_of([-1.0], [1.0]), 1, "version that sampled"),
        (row_of([-1.0], [1.0], versions=[-1, 0]), None, "trainer's weights"),
    ],
)
def test_an_interpolated_proximal_policy_needs_versions(worker, row, version, problem):
    with pytest.raises(ValueError, match=problem):
        learn(worker, [row], [-1.0], settings(proximal="interpolated"), version=version)


def test_a_kl_in_the_loss_needs_the_reference_of_every_row(worker):
    with pytest.raises(ValueError, match=r"'t7'.*reference"):
        learn(worker, [row_of([-1.0], [1.0], trajectory="t7")], [-1.0], settings(), kl_coef=0.1)


# The panel.


def test_the_panel_between_engine_and_trainer(worker):
    ratios = [2.0, 0.5, 1.0, 0.25]
    found = corrected(worker, ratios)
    mean = sum(ratios) / 4
    squares = sum(r * r for r in ratios) / 4
    expected = {
        "gap_k1": -sum(logs(*ratios)) / 4,
        "gap_k3": sum(r - 1 - math.log(r) for r in ratios) / 4,
        "gap_chi_square": sum((r - 1) ** 2 for r in ratios) / 4,
        "gap_ess": mean**2 / squares,
        "gap_mean": sum(map(abs, logs(*ratios))) / 4,
        "gap_max": math.log(4),
    }
    assert {name: getattr(found.metrics, name) for name in expected} == pytest.approx(expected, abs=1e-6)
    # No row has a reference, and what is not there is not measured.
    assert found.metrics.kl_reference == 0.0


def test_staleness_is_the_mean_lag_of_the_tokens_whose_version_is_known(worker):
    row = row_of([-1.0] * 4, [1.0] * 4, versions=[-1, 3, 5, 5, -1])
    found = learn(worker, [row], [-1.0] * 4, settings(), version=6)
    assert found.metrics.staleness == pytest.approx((3 + 1 + 1) / 3)
    assert found.metrics.staleness_max == 3
    assert learn(worker, [row], [-1.0] * 4, settings()).metrics.staleness == 0.0


def test_the_panel_of_each_lag_is_that_of_its_own_tokens(worker):
    """Of five tokens two were sampled by the present weights, two by those three versions before, one by unknown ones."""
    ratios = [2.0, 0.5, 4.0, 0.25, 8.0]
    rows = [
        row_of([-1.0 - math.log(r) for r in ratios[:3]], [1.0] * 3, versions=[-1, 6, 3, 6]),
        row_of([-1.0 - math.log(r) for r in ratios[3:]], [1.0] * 2, first=4, versions=[-1, 3, -1]),
    ]
    by_lag = {"0": [2.0, 4.0], "3": [0.5, 0.25]}
    expected = {
        lag: {
            "tokens": 2,
            "mean": sum(map(abs, logs(*own))) / 2,
            "k1": -sum(logs(*own)) / 2,
            "k3": sum(r - 1 - math.log(r) for r in own) / 2,
            "chi_square": sum((r - 1) ** 2 for r in own) / 2,
            "ess": (sum(own) / 2) ** 2 / (sum(r * r for r in own) / 2),
        }
        for lag, own in by_lag.items()
    }
    for budget in (4, 8):
        metrics = learn(worker, rows, [-1.0] * 5, settings(), budget=budget, updates=2, version=6, staleness=4).metrics
        assert metrics.gap_by_lag.keys() == expected.keys(), "lags that no token has are left out"
        for lag, panel in metrics.gap_by_lag.items():
            assert panel == pytest.approx(expected[lag] | {"tokens": 4}, abs=1e-6), "of both optimizer steps"
    assert learn(worker, rows, [-1.0] * 5, settings(), version=6).metrics.gap_by_lag == {}
    assert learn(worker, rows, [-1.0] * 5, settings(), staleness=4).metrics.gap_by_lag == {}


# What may not change anything.


@pytest.mark.parametrize("loss", sorted(losses.shipped))
def test_learning_rate_zero_leaves_the_mismatch_where_it_was(worker, loss):
    rows = [row_of([-1.1, -0.7], [1.0, 1.0]), row_of([-2.0], [-1.0], first=3)]
    found = [learn(worker, rows, [-1.0, -0.8, -2.2], settings(loss), updates=2) for _ in range(3)]
    panels = [(f.metrics.gap_k1, f.metrics.gap_k3, f.metrics.gap_chi_square, f.metrics.gap_max) for f in found]
    assert panels[0] == panels[1] == panels[2]
    assert found[0].grads == found[2].grads


@pytest.mark.parametrize("loss", sorted(losses.shipped))
def test_nan_in_every_masked_cell_leaves_loss_and_gradient_finite(worker, loss):
    """The table's log-probability and entropy of the prompt's token are NaN too, and so is its reference."""
    row = row_of([-1.1, -0.7], [1.0, 1.0], reference=[math.nan, -1.0, -1.0], values=[math.nan] * 3)
    algorithm = settings(loss, entropy_coef=0.1, correction=CorrectionConfig(drift=0.2))
    found = learn(worker, [row], [-1.0, -0.9], algorithm, updates=2, kl_coef=0.1)
    assert found.metrics.skipped == 0
    numbers = [value for value in vars(found.metrics).values() if isinstance(value, float)]
    assert all(map(math.isfinite, [*numbers, *found.grads[0], *found.grads[1]]))
    assert any(found.grads[0])


TOKENS = st.tuples(st.floats(-3.0, -0.1), st.floats(-0.4, 0.4), st.floats(-2.0, 2.0))
ROWS = st.lists(st.lists(TOKENS, min_size=1, max_size=5), min_size=2, max_size=8)


@pytest.mark.parametrize("loss", sorted(losses.shipped))
@given(tokens=ROWS, order=st.randoms(use_true_random=False), reduction=st.sampled_from(REDUCTIONS))
@rounds(max_examples=12, deadline=None)
def test_no_loss_and_no_reduction_sees_the_order_or_the_micro_batches(worker, loss, tokens, order, reduction):
    """1, 2 or 4 micro-batches and more, with correction, KL and entropy; rows of one trajectory and of one group among them."""
    correction = CorrectionConfig(name=None if loss in OF_BEHAVIOUR else "seq-mask-tis", low=0.8, high=1.2, drift=0.05)
    algorithm = settings(
        loss, reduction=reduction[0], reduction_length=reduction[1], entropy_coef=0.01, correction=correction
    )
    rows, trained = [], []
    for number, row in enumerate(tokens):
        own = [p for p, _, _ in row]
        gain = row[0][2]
        made = row_of(
            [p + gap for p, gap, _ in row],
            # Losses of whole sequences have one advantage for each.
            [gain] * len(row),
            first=1 + len(trained),
            trajectory=f"t{number // 2}",
            group=f"g{number // 3}",
            reference=[math.nan, *[p - 0.3 for p in own]],
            versions=[-1, *[len(trained + own[:place]) % 3 for place in range(len(own))]],
        )
        rows.append(made)
        trained += own
    longest = max(len(row.ids) for row in rows)
    given = {"kl_coef": 0.2, "version": 2, "staleness": 2}
    whole = learn(worker, rows, trained, algorithm, **given)
    for budget in (longest, 2 * longest, 4 * longest):
        order.shuffle(rows)
        split = learn(worker, rows, trained, algorithm, budget=budget, **given)
        assert split.grads[0] == pytest.approx(whole.grads[0], abs=1e-6)
        found, expected = (dict(numbers({**vars(x.metrics), "seconds": 0.0})) for x in (split, whole))
        assert found == pytest.approx(expected, abs=1e-5, rel=1e-5)


def test_the_limit_of_m2po_is_of_the_whole_step_and_not_of_a_micro_batch(worker):
    drifts = [0.5, 0.1, 0.05, 0.3, 0.0, 0.2]
    # The last two have moved against their advantage: neither counts, and neither is dropped.
    rows = [row_of([-1.0 - drift], [1.0], first=1 + i) for i, drift in enumerate(drifts)]
    rows += [row_of([-3.0], [-1.0], first=7), row_of([0.0], [1.0], first=8)]
    limit = m2po_limit(torch.tensor(drifts), 0.02)
    found = learn(worker, rows, [-1.0] * 8, settings("m2po", loss_settings={"budget": 0.02}), budget=2)
    stay = [drift < limit for drift in drifts]
    assert [grad != 0 for grad in found.grads[0]] == [*stay, True, True]
    assert not all(stay)


def test_the_loss_is_imported_once_for_a_worker_and_may_be_ones_own(worker, monkeypatch):
    made = []
    objective = "agent_train.learner.worker.policy_objective"
    monkeypatch.setattr(objective, lambda settings: made.append(settings) or policy_objective(settings))
    algorithm = settings("objective_cases:doubled", loss_settings={"factor": 3.0})
    rows = [row_of([-1.0], [1.0], first=1 + i) for i in range(4)]
    found = learn(worker, rows, [-1.0] * 4, algorithm, budget=2, updates=2)
    assert found.grads[0] == pytest.approx([-0.75] * 4)
    assert len(made) == 1


def test_the_metrics_of_an_update_are_plain_numbers(worker):
    row = row_of([-1.0], [1.0], versions=[-1, 0])
    record = dataclasses.asdict(learn(worker, [row], [-1.0], settings(), version=1, staleness=1).metrics)
    panels = record.pop("gap_by_lag")
    assert all(type(value) in (int, float) for value in [*record.values(), *panels["1"].values()])


@pytest.mark.parametrize("loss", sorted(losses.shipped))
def test_nothing_is_read_back_to_the_host_inside_a_loss(loss):
    """Tensors without numbers raise where a number is asked of them."""
    correction = CorrectionConfig(name=None if loss in OF_BEHAVIOUR else "seq-mask-tis", cap=2.0, low=0.5, drift=0.1)
    algorithm = settings(loss, correction=correction, entropy_coef=0.1, kl=KlConfig(coef=0.1, importance="full"))
    rows = [row_of([-1.0, -2.0], [1.0, 1.0], reference=[0.0, -1.0, -1.0], versions=[-1, 0, 1])]
    batch, objective = batch_of(rows), policy_objective(algorithm)
    with FakeTensorMode() as mode:
        fake = {
            f.name: mode.from_tensor(x)
            for f in dataclasses.fields(batch)
            if isinstance(x := getattr(batch, f.name), torch.Tensor)
        }
        batch = dataclasses.replace(batch, **fake)
        logprobs_T, entropy_T = (torch.empty(3, requires_grad=True) for _ in range(2))
        batch = dataclasses.replace(batch, start_T=torch.empty(3), has_reference=True)
        given = {"number": 1, "steps": 2, "kl_coef": 0.1, "version": 1, "drift_limit": torch.empty(()), "lags": 2}
        total, sums, _ = objective.contribute(batch, (logprobs_T * 1.0, entropy_T), **given)
        total.backward()
        assert logprobs_T.grad.shape == entropy_T.grad.shape == (3,)
        with pytest.raises(DataDependentOutputException):
            sums["tokens"].item()


@pytest.mark.parametrize("proximal", ["recomputed", "interpolated"])
def test_in_the_first_optimizer_step_the_ratio_is_one_to_the_last_bit(worker, proximal):
    """Whatever the engine said: an interpolation would come back to the trainer's number but for rounding."""
    trained = [-0.1 - 0.37 * i for i in range(20)]
    row = row_of([-7.3 / (i + 1) for i in range(20)], [1.0] * 20, versions=[-1] + [0] * 20)
    metrics = learn(worker, [row], trained, settings(proximal=proximal), version=1).metrics
    assert metrics.ratio_max == metrics.ratio_mean == 1.0
    assert metrics.kl_k1 == metrics.kl_k3 == 0.0
