"""KL(p || reference) from tokens that p sampled: as a number, as a loss, and as part of the reward.

Legend: T tokens of one packed micro-batch, S rows (segments) in it; p is the policy that is trained. Nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from agent_train.algorithms.losses import k3 as k3_of_log_ratio
from agent_train.algorithms.losses import keep, log_ratio
from agent_train.algorithms.segments import segment_sums
from agent_train.algorithms.turn_rewards import place

IMPORTANCE = ("none", "detached", "full")


def k1(logprobs_T: Tensor, reference_T: Tensor) -> Tensor:
    """`lp - lref`: unbiased, of either sign. As a loss its gradient is noise with mean zero."""
    return logprobs_T - reference_T


def k2(logprobs_T: Tensor, reference_T: Tensor) -> Tensor:
    """`(lp - lref)^2 / 2`: biased, but on-policy its gradient is that of the reverse KL."""
    return 0.5 * (logprobs_T - reference_T).square()


def k3(logprobs_T: Tensor, reference_T: Tensor) -> Tensor:
    """`exp(lref - lp) - (lref - lp) - 1`: unbiased, never negative. Its gradient is rather that of the forward KL.

    Beyond a log ratio of 20 it stays at its value there and has no gradient, since fp32 would overflow.
    """
    return k3_of_log_ratio(reference_T - logprobs_T)


def absolute(logprobs_T: Tensor, reference_T: Tensor) -> Tensor:
    """`|lp - lref|`: a penalty, no estimate of the KL."""
    return (logprobs_T - reference_T).abs()


# http://joschu.net/blog/kl-approx.html
ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}


def kl_loss(
    logprobs_T: Tensor,
    reference_T: Tensor,
    old_T: Tensor,
    mask_T: Tensor,
    value: str = "k3",
    gradient: str | None = None,
    importance: str = "none",
    max_value: float | None = None,
) -> Tensor:
    """The KL term of the loss per token, 0 outside the mask; to be multiplied by its coefficient and summed with weights.

    Args:
        logprobs_T: of the policy that is trained, with gradient.
        reference_T: of the reference policy.
        old_T: of the policy that sampled (or of the proximal one that stands for it); read for `importance` only.
        mask_T: True on sampled tokens.
        value: estimator of the number.
        gradient: estimator whose gradient is taken, straight through the value; None takes that of `value`. With value k3
            and gradient k2 the number is never negative and the gradient that of the reverse KL.
        importance: what the off-policy ratio p / old does: "none" leaves it out, "detached" multiplies by it as a constant,
            "full" lets its gradient take part, which makes the gradient unbiased (DeepSeek-V3.2, arXiv 2512.02556).
        max_value: bounds the estimate to +-max_value before the ratio multiplies it; its gradient stays as it is.

    Raises:
        ValueError: an unknown estimator or `importance`.
    """
    gradient = gradient or value
    if importance not in IMPORTANCE:
        raise ValueError(f"importance must be one of {', '.join(IMPORTANCE)}, not {importance!r}")
    # Every estimate of two zeros is 0, so what is kept of the inputs keeps the result too.
    logprobs_T, reference_T = keep(logprobs_T, mask_T).float(), keep(reference_T, mask_T).float()
    source_T = estimator(gradient)(logprobs_T, reference_T)
    number_T = estimator(value)(logprobs_T, reference_T).detach()
    if max_value is not None:
        number_T = number_T.clamp(-max_value, max_value)
    kl_T = number_T + (source_T - source_T.detach())
    if importance != "none":
        ratio_T = log_ratio(logprobs_T, keep(old_T, mask_T).float()).exp()
        kl_T = kl_T * (ratio_T.detach() if importance == "detached" else ratio_T)
    return kl_T


def estimator(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The estimator of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in ESTIMATORS:
        raise ValueError(f"KL estimator must be one of {', '.join(ESTIMATORS)}, not {name!r}")
    return ESTIMATORS[name]


@torch.no_grad()
def kl_rewards(
    scores_S: Tensor,
    logprobs_T: Tensor,
    reference_T: Tensor,
    mask_T: Tensor,
    segment_T: Tensor,
    coefficient: float,
    value: str = "k1",
) -> Tensor:
    """rewards_T: minus the KL on every sampled token, plus each row's score on its last sampled token. InstructGPT (2203.02155).

    A row without sampled tokens gives nothing: its score stands nowhere. An advantage that knows no tokens (GRPO) takes
    `kl_scores`.
    """
    logprobs_T, reference_T = keep(logprobs_T, mask_T).float(), keep(reference_T, mask_T).float()
    return place(scores_S, mask_T, segment_T) - coefficient * estimator(value)(logprobs_T, reference_T)


@torch.no_grad()
def kl_scores(
    scores_S: Tensor,
    logprobs_T: Tensor,
    reference_T: Tensor,
    mask_T: Tensor,
    segment_T: Tensor,
    coefficient: float,
    value: str = "k1",
) -> Tensor:
    """scores_S less the KL of all sampled tokens of each row: KL in reward for group-relative advantages."""
    logprobs_T, reference_T = keep(logprobs_T, mask_T).float(), keep(reference_T, mask_T).float()
    kl_T = estimator(value)(logprobs_T, reference_T)
    return scores_S.float() - coefficient * segment_sums(kl_T, mask_T, segment_T, len(scores_S))


def adapted(coefficient: float, kl: float, target: float, samples: int, horizon: int) -> float:
    """The next coefficient: `coefficient * (1 + clip(kl / target - 1, +-0.2) * samples / horizon)` (arXiv 1909.08593).

    Args:
        coefficient: of the last step.
        kl: mean measured in it.
        target: of the KL, positive.
        samples: trajectories of the last step.
        horizon: trajectories over which the coefficient moves by at most a fifth; at least `samples`, so that it stays
            positive.

    Raises:
        ValueError: `kl` is not finite, `target` is not positive, or `horizon` is below `samples`.
    """
    if not math.isfinite(kl) or not target > 0 or not horizon >= samples > 0:
        raise ValueError(f"cannot adapt to a KL of {kl} with target {target}, {samples} samples and horizon {horizon}")
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * samples / horizon)
