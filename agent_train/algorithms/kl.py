"""KL(p || reference) from tokens that p sampled, as a number and as a loss. Distillation from a teacher.

Legend: T tokens of one packed micro-batch; p is the policy that is trained. Nats.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from agent_train.algorithms.losses import k3, keep, log_ratio

IMPORTANCE = ("none", "detached", "full")
# Of `lp - lref`; http://joschu.net/blog/kl-approx.html
ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {
    # Unbiased, of either sign. As a loss its gradient is noise with mean zero.
    "k1": lambda x_T: x_T,
    # Biased, but on-policy its gradient is that of the reverse KL.
    "k2": lambda x_T: 0.5 * x_T.square(),
    # Unbiased, never negative. Its gradient is rather that of the forward KL. It is constant beyond a log ratio of 20, where fp32 overflows.
    "k3": lambda x_T: k3(-x_T),
    # A penalty, no estimate of the KL.
    "abs": torch.abs,
}


def kl_estimate(name: str, logprobs_T: Tensor, reference_T: Tensor, mask_T: Tensor) -> Tensor:
    """kl_T by the estimator of that name, 0 outside the mask."""
    # Every estimate of two zeros is 0, so what is kept of the inputs keeps the result too.
    return _estimator(name)(keep(logprobs_T, mask_T).float() - keep(reference_T, mask_T).float())


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
        old_T: log-probabilities under the policy that sampled, or the proximal one in its place; read for `importance` only.
        value: estimator of the number.
        gradient: estimator whose gradient is taken, straight through the value; None takes that of `value`. With value k3
            and gradient k2 the number is never negative and the gradient that of the reverse KL.
        importance: "none"; "detached" multiplies by the off-policy ratio p / old as a constant; "full" lets its gradient take part,
            which makes the gradient unbiased (DeepSeek-V3.2, arXiv 2512.02556).
        max_value: bounds the estimate to +-max_value before the ratio multiplies it; its gradient stays as it is.
    """
    if importance not in IMPORTANCE:
        raise ValueError(f"importance must be one of {', '.join(IMPORTANCE)}, not {importance!r}")
    logprobs_T = keep(logprobs_T, mask_T).float()
    change_T = logprobs_T - keep(reference_T, mask_T).float()
    source_T = _estimator(gradient or value)(change_T)
    number_T = _estimator(value)(change_T).detach()
    if max_value is not None:
        number_T = number_T.clamp(-max_value, max_value)
    kl_T = number_T + (source_T - source_T.detach())
    if importance != "none":
        ratio_T = log_ratio(logprobs_T, keep(old_T, mask_T)).exp()
        kl_T = kl_T * (ratio_T.detach() if importance == "detached" else ratio_T)
    return kl_T


def adapted(coefficient: float, kl: float, target: float, samples: int, horizon: int) -> float:
    """The next coefficient: `coefficient * (1 + clip(kl / target - 1, +-0.2) * samples / horizon)` (arXiv 1909.08593).

    Args:
        samples: trajectories of the last step.
        horizon: trajectories over which the coefficient moves by at most a fifth; at least `samples`, so that it stays positive.
    """
    if not math.isfinite(kl) or not target > 0 or not horizon >= samples > 0:
        raise ValueError(f"cannot adapt to a KL of {kl} with target {target}, {samples} samples and horizon {horizon}")
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * samples / horizon)


def distillation_advantages(logprobs_T: Tensor, teacher_T: Tensor, mask_T: Tensor, coef: float = 1.0) -> Tensor:
    """`-coef * (log p - log teacher)` on each sampled token, without gradient (arXiv 2306.13649, 2306.08543); 0 elsewhere.

    With a policy-gradient loss its expectation is the gradient of the reverse KL to the teacher, one token ahead. Minus
    infinity, a token that the teacher rules out, counts as the clamp of the log ratio, 20.
    """
    return -coef * log_ratio(keep(logprobs_T.detach(), mask_T), keep(teacher_T.detach(), mask_T))


def _estimator(name: str) -> Callable[[Tensor], Tensor]:
    if name not in ESTIMATORS:
        raise ValueError(f"KL estimator must be one of {', '.join(ESTIMATORS)}, not {name!r}")
    return ESTIMATORS[name]
