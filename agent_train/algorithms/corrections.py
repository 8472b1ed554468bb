"""Corrections for data that another policy sampled.

p is trained, o is the proximal policy (the trainer's, at the start of the step), b is the behaviour policy (the
engine's, maybe of an older version). The loss's ratio covers p / o; what is left, o / b, is the gap, which `gap_of`
decides on once, so that nothing is weighted twice. The weights of a correction are constants. They multiply the policy
term of the loss per token, after its clip; never the KL, the entropy or the reduction weights: what a mask drops stays
in the denominator.

Legend: T tokens of one packed micro-batch, S samples (segments) in it. Log-probabilities in nats; `segment_T` numbers
the samples.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from agent_train.algorithms.losses import MAX_LOG_RATIO, keep, segment_means, segment_sums
from agent_train.config.extensions import corrections

PROXIMAL = ("recomputed", "interpolated", "behaviour")
LEVELS = ("token", "sequence", "geometric")


@dataclass(frozen=True)
class Gap:
    old_T: Tensor  # log-probabilities that the loss's ratio divides by, without gradient
    # `log(o / b)` without gradient, 0 outside the mask; None where the ratio divides by b already
    log_weight_T: Tensor | None


def gap_of(
    proximal: str,
    logprobs_T: Tensor,
    behaviour_T: Tensor,
    mask_T: Tensor,
    recomputed_T: Tensor | None = None,
    share_T: Tensor | None = None,
) -> Gap:
    """The denominator of the loss's ratio, and the gap that it leaves.

    Args:
        proximal: "recomputed": o is `recomputed_T`, the decoupled objective (arXiv 2110.00641, 2505.24298).
            "interpolated": o lies between b and p at `share_T` (see `proximal_share`), without a pass of its own (AReaL).
            "behaviour": the ratio divides by b; it covers everything, so nothing is left to correct.
        recomputed_T: of the trainer at the start of the step; `logprobs_T.detach()` where there is one update per step.
    """
    if proximal not in PROXIMAL:
        raise ValueError(f"proximal must be one of {', '.join(PROXIMAL)}, not {proximal!r}")
    given = {"recomputed": recomputed_T is not None, "interpolated": share_T is not None}
    if any(is_given != (name == proximal) for name, is_given in given.items()):
        raise ValueError(f"proximal {proximal!r}: 'recomputed' takes recomputed_T alone, 'interpolated' share_T alone")
    behaviour_T = keep(behaviour_T, mask_T).float().detach()
    if recomputed_T is not None:
        old_T = keep(recomputed_T, mask_T).float().detach()
    elif share_T is not None:
        now_T = keep(logprobs_T, mask_T).float().detach()
        old_T = behaviour_T + keep(share_T, mask_T) * (now_T - behaviour_T)
    else:
        return Gap(behaviour_T, None)
    return Gap(old_T, old_T - behaviour_T)


def proximal_share(behaviour_version_T: Tensor, proximal_version: int, now_version: int) -> Tensor:
    """The place of the proximal policy between the behaviour policy (0) and the trained one (1), by versions.

    `(v_proximal - v_behaviour) / (v_now - v_behaviour)`, one per token since an episode may cross an update; 1 where
    the trained policy has not moved away from the proximal one. AReaL (arXiv 2505.24298) takes this instead of a second
    pass.
    """
    if proximal_version > now_version:
        raise ValueError(f"the proximal policy has version {proximal_version}, after the present {now_version}")
    if proximal_version == now_version:
        return torch.ones(behaviour_version_T.shape, dtype=torch.float32, device=behaviour_version_T.device)
    born_T = behaviour_version_T.clamp(max=proximal_version).float()
    return (proximal_version - born_T) / (now_version - born_T)


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

    Args:
        level: of the weight: "token" is o / b of the token, "sequence" the product over its sample, "geometric" the geometric
            mean over its sample; None gives 1.
        cap: weights above it are cut to it; None cuts nothing.
        band_level: of the number that must lie in [low, high], else the weight is 0; None drops nothing.
    """
    if gap.log_weight_T is None:
        raise ValueError(
            "the loss's ratio divides by the behaviour policy already; a correction would weigh the gap twice"
        )
    if (cap is not None and not cap > 0) or not 0 <= low < high:
        raise ValueError(f"need a positive cap and 0 <= low < high, not cap {cap}, low {low}, high {high}")
    weights_T = torch.ones_like(gap.log_weight_T)
    if level is not None:
        weights_T = level_ratios(level, gap.log_weight_T, mask_T, segment_T, n_segments)
        weights_T = weights_T if cap is None else weights_T.clamp(max=cap)
    if band_level is not None:
        ratio_T = level_ratios(band_level, gap.log_weight_T, mask_T, segment_T, n_segments)
        weights_T = keep(weights_T, (ratio_T >= low) & (ratio_T <= high))
    return keep(weights_T, mask_T)


def level_ratios(level: str, log_weight_T: Tensor, mask_T: Tensor, segment_T: Tensor, n_segments: int) -> Tensor:
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, not {level!r}")
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
    """Raise ValueError for settings that would weigh one gap twice, or leave half of one out.

    `loss_divides_by_behaviour`: the loss has the ratio p / b inside (DPPO, AIPO, M2PO).
    """
    if proximal not in PROXIMAL:
        raise ValueError(f"proximal must be one of {', '.join(PROXIMAL)}, not {proximal!r}")
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
    tokens is above `delta`, nats. The reduction weights stay as they are.
    """
    drift_T = keep(old_T, mask_T).float() - keep(logprobs_T, mask_T).float()
    drift_S = segment_means(drift_T, mask_T, segment_T, n_segments)
    return (drift_S > delta)[segment_T] & (keep(advantages_T, mask_T) < 0)
