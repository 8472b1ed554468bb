"""The registry: what every loss has in common, how a user's own is named, and what its mistakes say."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_train.algorithms.policy_loss import INPUTS, LossInputs, PolicyLoss, policy_loss
from agent_train.algorithms.policy_losses import ppo_clip
from agent_train.config.extensions import losses

NAMES = sorted(losses.shipped)
WIDE = {name: {"clip_low": 0.2, "clip_high": 0.28} for name in ("gspo", "gspo_token", "gmpo")}


def inputs(logprobs, old, advantages, mask, lengths):
    sampled_T = torch.tensor(old)
    return LossInputs(
        logprobs_T=torch.tensor(logprobs, requires_grad=True),
        advantages_T=torch.tensor(advantages),
        mask_T=torch.tensor(mask),
        old_T=sampled_T,
        behaviour_T=sampled_T,
        segment_T=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        n_segments=len(lengths),
        drift_limit=torch.tensor(math.inf),
    )


def gradient(loss_T, at):
    return torch.autograd.grad(loss_T.sum(), at.logprobs_T)[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
def test_rubbish_in_masked_cells_reaches_neither_loss_nor_gradient(name, rubbish):
    mask = [True, False, True, False]
    clean = inputs([-1.0, 0.0, -2.0, 0.0], [-1.1, 0.0, -1.9, 0.0], [1.0, 0.0, -1.0, 0.0], mask, [2, 2])
    dirty = inputs(
        [-1.0, rubbish, -2.0, rubbish], [-1.1, rubbish, -1.9, rubbish], [1.0, rubbish, -1.0, rubbish], mask, [2, 2]
    )
    loss = policy_loss(name, WIDE.get(name))
    assert loss(dirty).tolist() == loss(clean).tolist()
    assert loss(dirty).isfinite().all()
    assert gradient(loss(dirty), dirty).tolist() == gradient(loss(clean), clean).tolist()
    assert gradient(loss(dirty), dirty)[[1, 3]].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", NAMES)
def test_at_the_old_policy_every_loss_has_the_policy_gradient(name):
    at = inputs([-1.0, -0.2, -3.0, -2.0], [-1.0, -0.2, -3.0, -2.0], [1.0, 1.0, -2.0, -2.0], [True] * 4, [2, 2])
    loss = policy_loss(name)
    # RAFT++ drops what has a negative advantage, which is its point.
    expected = [-1.0, -1.0, 0.0, 0.0] if name == "raft_pp" else [-1.0, -1.0, 2.0, 2.0]
    assert gradient(loss(at), at).tolist() == pytest.approx(expected, abs=1e-6)
    assert loss.with_clip_mask(at)[1].any() == (name == "raft_pp")


@pytest.mark.parametrize("name", ["ppo", "gspo", "gspo_token", "gmpo"])
def test_at_the_old_policy_the_loss_is_minus_the_advantage_and_nothing_is_clipped(name):
    at = inputs([-1.0, -0.2, -3.0, -2.0], [-1.0, -0.2, -3.0, -2.0], [1.0, 1.0, -2.0, -2.0], [True] * 4, [2, 2])
    loss = policy_loss(name)
    assert loss(at).tolist() == [-1.0, -1.0, 2.0, 2.0]
    assert not loss.with_clip_mask(at)[1].any()


@pytest.mark.parametrize("name", NAMES)
def test_no_advantage_no_gradient_at_the_old_policy(name):
    at = inputs([-1.0, -2.0], [-1.0, -2.0], [0.0, 0.0], [True, True], [2])
    loss = policy_loss(name)
    assert gradient(loss(at), at).tolist() == [0.0, 0.0]
    assert not loss.with_clip_mask(at)[1].any()


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_inputs_give_a_loss_in_full(name):
    at = inputs([-1.0, -2.0], [-1.0, -2.0], [1.0, -1.0], [True, True], [2])
    loss_T = policy_loss(name)(replace(at, old_T=at.old_T.bfloat16(), logprobs_T=at.logprobs_T.detach().bfloat16()))
    assert loss_T.dtype == torch.float32


FLOATS = st.lists(
    st.tuples(st.floats(-4, -0.1), st.floats(-2, 2), st.sampled_from([-1.0, 0.0, 2.0])), min_size=1, max_size=6
)


@settings(max_examples=50, deadline=None)
@given(FLOATS, st.sampled_from([None, 3.0]))
def test_held_is_what_the_clip_of_ppo_holds_back(tokens, dual):
    old, drift, advantages = (list(column) for column in zip(*tokens, strict=True))
    at = inputs([o + d for o, d in zip(old, drift, strict=True)], old, advantages, [True] * len(old), [len(old)])
    loss = policy_loss("ppo", {"dual_clip": dual})
    ratio_T, gain_T = (at.logprobs_T - at.old_T).exp(), at.advantages_T
    held_T = ((gain_T > 0) & (ratio_T > 1.28)) | ((gain_T < 0) & ((ratio_T < 0.8) | (ratio_T > (dual or math.inf))))
    assert loss.with_clip_mask(at)[1].tolist() == held_T.tolist()


def test_held_comes_with_the_loss_and_leaves_its_graph_whole_and_no_gradient_behind():
    at = inputs([-0.1, -1.5], [-1.0, -1.0], [1.0, 1.0], [True, True], [2])
    loss_T, clip_mask_T = policy_loss("ppo").with_clip_mask(at)
    assert clip_mask_T.tolist() == [True, False]
    assert at.logprobs_T.grad is None
    assert loss_T.tolist() == policy_loss("ppo")(at).tolist()
    assert gradient(loss_T, at).tolist() == pytest.approx([0.0, -math.exp(-0.5)])


@pytest.mark.parametrize("name", NAMES)
def test_the_signature_says_what_a_loss_needs(name):
    loss = policy_loss(name)
    assert ("behaviour_T" in loss.reads) == (name in {"dppo", "aipo", "m2po"})
    assert ("old_T" in loss.reads) == (name not in {"dppo", "aipo", "m2po", "reinforce"})
    assert loss.reads <= set(INPUTS)
    assert not set(loss.settings) & set(INPUTS)


def test_settings_are_the_defaults_and_what_is_set():
    assert policy_loss("ppo", {"clip_high": 0.4}).settings == {"clip_low": 0.2, "clip_high": 0.4, "dual_clip": None}
    at = inputs([-0.5], [-1.0], [1.0], [True], [1])
    assert policy_loss("ppo", {"clip_high": 0.4})(at).item() == pytest.approx(-1.4)


def own(logprobs_T, advantages_T, entropy_T, *, width=0.5, must):
    return -advantages_T * logprobs_T * width * must - 0.0 * entropy_T


def offset(logprobs_T):
    return 1.0 - logprobs_T


def of_two(logprobs_T, mask_T):
    return logprobs_T[:2]


def without_gradient(logprobs_T, advantages_T):
    return -advantages_T * logprobs_T.detach()


def not_finite(logprobs_T):
    return logprobs_T.square().neg().sqrt()


def failing(logprobs_T):
    raise RuntimeError("no such thing")


def deaf(advantages_T):
    return advantages_T


def greedy(logprobs_T, **everything):
    return logprobs_T


HERE = __name__
constant = 3


def test_a_loss_of_ones_own_is_named_by_where_it_is():
    loss = policy_loss(f"{HERE}:own", {"must": 2.0})
    assert isinstance(loss, PolicyLoss)
    assert loss.reads == {"logprobs_T", "advantages_T", "entropy_T"}
    assert loss.settings == {"width": 0.5, "must": 2.0}
    at = replace(inputs([-3.0, math.nan], [0.0, 0.0], [1.0, 1.0], [True, False], [2]), entropy_T=torch.zeros(2))
    assert loss(at).tolist() == [3.0, 0.0]


def test_a_loss_of_ones_own_need_not_know_of_masks_or_of_half_precision():
    at = inputs([-3.015625, math.nan], [0.0, 0.0], [1.0, 1.0], [True, False], [2])
    loss_T = policy_loss(f"{HERE}:offset")(replace(at, logprobs_T=at.logprobs_T.detach().bfloat16()))
    assert loss_T.dtype == torch.float32
    assert loss_T.tolist() == [4.015625, 0.0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gsop", {}, r"unknown policy loss 'gsop': did you mean gspo\?"),
        ("no_such_module:loss", {}, "cannot import module 'no_such_module'"),
        (f"{HERE}:nothing_here", {}, "has no 'nothing_here'"),
        (f"{HERE}:constant", {}, "is a int, not a function"),
        (f"{HERE}:own", {}, "no value for must"),
        (f"{HERE}:own", {"must": 1.0, "widht": 2.0}, "no setting 'widht'; it has must, width"),
        (f"{HERE}:own", {"must": 1.0, "old_T": 2.0}, "no setting 'old_T'"),
        ("reinforce", {"clip_low": 0.2}, "no setting 'clip_low'; it has none"),
        ("ppo", {"clip_low": "0.2"}, "clip_low must be a number, not '0.2'"),
        ("ppo", {"clip_low": math.nan}, "clip_low must be a number, not nan"),
        ("ppo", {"dual_clip": 0.5}, "dual_clip must be above 1"),
        (f"{HERE}:of_two", {}, r"returns \(2,\), not one number for each of 4 tokens"),
        (f"{HERE}:without_gradient", {}, "no gradient at the old policy"),
        (f"{HERE}:not_finite", {}, "are not all finite"),
        (f"{HERE}:failing", {}, "fails: RuntimeError: no such thing"),
        (f"{HERE}:deaf", {}, "no parameter logprobs_T"),
        (f"{HERE}:greedy", {}, "its parameter everything must be one that is given by its name"),
    ],
)
def test_a_mistake_is_told_before_anything_is_trained(name, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        policy_loss(name, options)
    assert "\n" not in str(caught.value)


def test_what_a_micro_batch_lacks_is_named():
    at = inputs([-1.0], [-1.0], [1.0], [True], [1])
    with pytest.raises(ValueError, match="'ppo' reads old_T, which this micro-batch does not have"):
        policy_loss("ppo")(replace(at, old_T=None))


def test_names_are_known_without_torch():
    code = "import sys; from agent_train.config.extensions import losses; losses.path('gspo'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
    assert losses.path("ppo") == f"{ppo_clip.__module__}:{ppo_clip.__name__}"
