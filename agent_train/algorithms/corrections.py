"""Corrections for data that another policy sampled.

p is trained, o is the proximal policy (the trainer's, at the start of the step), b is the behaviour policy (the
engine's, maybe of an older version). The loss's ratio covers p / o; what is left, o / b, is the gap. A correction
multiplies the policy term per token, after its clip; never the KL, the entropy or the reduction weights: what a mask
drops stays in the denominator.

Legend: T tokens of one packed micro-batch, S samples (segments) in it. Log-probabilities in nats.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from agent_train.algorithms.losses import MAX_LOG_RATIO, keep, segment_means, segment_sums
from agent_train.config.extensions import corrections


@dataclass(frozen=True)
class Gap:
    old_T: Tensor  # log-probabilities that the loss's ratio divides by, without gradient
    # `log(o / b)` without gradient, 0 outside the mask; None where the ratio divides by b already
    log_weight_T: Tensor | None


def gap_of(behaviour_T: Tensor, mask_T: Tensor, old_T: Tensor | None = None) -> Gap:
    """The gap between b and o, whose log-probabilities are `old_T`: the decoupled objective (arXiv 2110.00641, 2505.24298).

    With None the ratio divides by b: it covers everything, so nothing is left to correct.
    """
    behaviour_T = keep(behaviour_T, mask_T).float().detach()
    if old_T is None:
        return Gap(behaviour_T, None)
    old_T = keep(old_T, mask_T).float().detach()
    return Gap(old_T, old_T - behaviour_T)


def interpolated(
    logprobs_T: Tensor, behaviour_T: Tensor, version_T: Tensor, proximal_version: int, now_version: int
) -> Tensor:
    """Log-probabilities of a proximal policy between b and p, by versions, in place of a second pass (AReaL, arXiv 2505.24298).

    It lies at `(v_proximal - v_behaviour) / (v_now - v_behaviour)`, one per token since an episode may cross an update;
    at p where that has not moved away from the proximal one. `version_T` is of the weights that sampled each token.
    """
    if proximal_version == now_version:
        return logprobs_T.detach()
    born_T = version_T.clamp(max=proximal_version).float()
    share_T = (proximal_version - born_T) / (now_version - born_T)
    return behaviour_T + share_T * (logprobs_T.detach() - behaviour_T)


@torch.no_grad()
def correction(
    gap: Gap,
    mask_T: Tensor,
    segment_T: Tensor,
    n_segments: int,
    *,
    level: str | None = "token",
    cap: float | None = None,
    band_level: str | None = None,
    low: float = 0.0,
    high: float = float("inf"),
) -> Tensor:
    """The factor of each token's policy loss: an importance weight, cut at `cap`, inside a band; 0 outside it. fp32, no gradient.

    The weight of `level` "token" is o / b of the token, of "sequence" the product over its sample, of "geometric" the
    geometric mean over its sample; of None 1. Where the number of `band_level` does not lie in [low, high], it is 0;
    None drops nothing.
    """
    if gap.log_weight_T is None:
        raise ValueError(
            "the loss's ratio divides by the behaviour policy already; a correction would weigh the gap twice"
        )
    weights_T = torch.ones_like(gap.log_weight_T)
    if level is not None:
        weights_T = _level_ratios(level, gap.log_weight_T, mask_T, segment_T, n_segments)
        weights_T = weights_T if cap is None else weights_T.clamp(max=cap)
    if band_level is not None:
        ratio_T = _level_ratios(band_level, gap.log_weight_T, mask_T, segment_T, n_segments)
        weights_T = keep(weights_T, (ratio_T >= low) & (ratio_T <= high))
    return keep(weights_T, mask_T)


def _level_ratios(level: str, log_weight_T: Tensor, mask_T: Tensor, segment_T: Tensor, n_segments: int) -> Tensor:
    if level == "sequence":
        log_weight_T = segment_sums(log_weight_T, mask_T, segment_T, n_segments)[segment_T]
    elif level == "geometric":
        log_weight_T = segment_means(log_weight_T, mask_T, segment_T, n_segments)[segment_T]
    return log_weight_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


# The corrections that `algorithm.correction.name` names; the numbers (cap, low, high) are the user's. One of your own is a function of
# the same arguments: `(gap, mask_T, segment_T, n_segments, *, cap, low, high)`, which returns a weight for each token.
# Truncated importance sampling (fengyao.notion.site/off-policy-rl; arXiv 2505.24298 per token): takes cap.
tis = partial(correction, level="token", band_level=None)
# IcePop (arXiv 2510.18855): takes low and high.
icepop = partial(correction, level="token", band_level="token")
# The sample's geometric mean decides on the sample, the tokens keep their weights (richardli.xyz/rl-collapse).
seq_mask_tis = partial(correction, level="token", band_level="geometric")
# The product of the sample on every token (richardli.xyz/rl-collapse): takes cap.
sequence_is = partial(correction, level="sequence", band_level=None)
# The sample's geometric mean on every token: takes cap.
geometric_is = partial(correction, level="geometric", band_level=None)
# Samples are kept or dropped whole, by their product or their geometric mean; nothing is weighted.
sequence_mask = partial(correction, level=None, band_level="sequence")
geometric_mask = partial(correction, level=None, band_level="geometric")


def check_one_weight(proximal: str, name: str | None, loss_divides_by_behaviour: bool) -> None:
    """Raise ValueError for settings that would weigh one gap twice, or leave half of one out."""
    if name is not None:
        corrections.path(name)
    if loss_divides_by_behaviour and proximal != "behaviour":
        raise ValueError(f"this loss divides by the behaviour policy: set proximal to behaviour, not {proximal!r}")
    if name is not None and proximal == "behaviour":
        raise ValueError(
            f"correction {name!r} weighs the gap to the behaviour policy, but the loss's ratio covers it already"
        )


@torch.no_grad()
def drifted(
    logprobs_T: Tensor,
    old_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    segment_T: Tensor,
    n_segments: int,
    delta: float,
) -> Tensor:
    """Off-policy sequence masking, DeepSeek-V3.2 (arXiv 2512.02556): True on the tokens to leave out of the policy loss.

    Those with a negative advantage in samples from which the policy has drifted: the mean of `lo - lp` over the sampled
    tokens is above `delta`, nats.
    """
    drift_T = keep(old_T, mask_T).float() - keep(logprobs_T, mask_T).float()
    drift_S = segment_means(drift_T, mask_T, segment_T, n_segments)
    return (drift_S > delta)[segment_T] & (keep(advantages_T, mask_T) < 0)
