"""Differences of two policies on tokens that one of them sampled: the KL to a reference, distillation, the mismatch with the engine.

Legend: T tokens of one packed micro-batch; p is the policy that is trained. Nats.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from agent_train.algorithms.losses import MAX_LOG_RATIO, k3, keep, log_ratio

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
    return ESTIMATORS[name](keep(logprobs_T, mask_T).float() - keep(reference_T, mask_T).float())


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

    `value` estimates the number, and the gradient is that of `gradient`, straight through; with k3 and k2 the number is
    never negative and the gradient that of the reverse KL. `importance` "detached" multiplies by the off-policy ratio p
    / old as a constant; "full" lets its gradient take part, which makes the gradient unbiased (DeepSeek-V3.2, arXiv
    2512.02556). `max_value` bounds the number before the ratio multiplies it; its gradient stays as it is.
    """
    logprobs_T = keep(logprobs_T, mask_T).float()
    change_T = logprobs_T - keep(reference_T, mask_T).float()
    source_T = ESTIMATORS[gradient or value](change_T)
    number_T = ESTIMATORS[value](change_T).detach()
    if max_value is not None:
        number_T = number_T.clamp(-max_value, max_value)
    kl_T = number_T + (source_T - source_T.detach())
    if importance != "none":
        ratio_T = log_ratio(logprobs_T, keep(old_T, mask_T)).exp()
        kl_T = kl_T * (ratio_T.detach() if importance == "detached" else ratio_T)
    return kl_T


def adapted(coefficient: float, kl: float, target: float, samples: int, horizon: int) -> float:
    """The next coefficient: `coefficient * (1 + clip(kl / target - 1, +-0.2) * samples / horizon)` (arXiv 1909.08593).

    `samples` are the trajectories of the last step, `horizon` those over which the coefficient moves by at most a
    fifth.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * samples / horizon)


def distillation_advantages(logprobs_T: Tensor, teacher_T: Tensor, mask_T: Tensor, coef: float = 1.0) -> Tensor:
    """`-coef * (log p - log teacher)` on each sampled token, without gradient (arXiv 2306.13649, 2306.08543); 0 elsewhere.

    With a policy-gradient loss its expectation is the gradient of the reverse KL to the teacher, one token ahead. A
    token that the teacher rules out counts as the clamp of the log ratio, 20.
    """
    return -coef * log_ratio(keep(logprobs_T.detach(), mask_T), keep(teacher_T.detach(), mask_T))


@torch.no_grad()
def mismatch_sums(log_ratio_T: Tensor, mask_T: Tensor) -> dict[str, Tensor]:
    """Sums for `mismatch` over one micro-batch, fp64, of `log(o / b)` of tokens that b sampled. Ratios are cut at e^+-20."""
    x_T = keep(log_ratio_T, mask_T).double()
    one_T = mask_T.double()
    ratio_T = keep(x_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), mask_T)
    return {
        "tokens": one_T.sum(),
        "k1": (-x_T).sum(),
        "k3": k3(x_T).sum(),
        "abs": x_T.abs().sum(),
        "ratio": ratio_T.sum(),
        "ratio_squared": ratio_T.square().sum(),
        "chi_square": (ratio_T - one_T).square().sum(),
    }


def mismatch(total: Mapping[str, float]) -> dict[str, float]:
    """Means over sampled tokens from `mismatch_sums` of all micro-batches and ranks; nats. Without tokens all is 0, and `ess` 1.

    `k1` is KL(b || o), of either sign, `k3` the same, never negative. `chi_square`, the mean of (o / b - 1)^2, is what
    importance weights cost in variance. `ess` is the effective sample size of the weights o / b as a share of the
    tokens.
    """
    mean = {name: number / (total["tokens"] or 1) for name, number in total.items()}
    return {
        **{name: mean[name] for name in ("k1", "k3", "chi_square", "abs")},
        "ess": mean["ratio"] ** 2 / mean["ratio_squared"] if total["tokens"] else 1.0,
    }
