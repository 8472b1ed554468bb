"""On-policy distillation: the student samples, the teacher says how likely each token would have been.

Legend: T tokens of one packed micro-batch.
"""

from __future__ import annotations

from torch import Tensor

from agent_train.algorithms.losses import keep, log_ratio


def distillation_advantages(logprobs_T: Tensor, teacher_T: Tensor, mask_T: Tensor, coef: float = 1.0) -> Tensor:
    """`-coef * (log p - log teacher)` on each sampled token, 0 elsewhere, without gradient (arXiv 2306.13649, 2306.08543).

    With a policy-gradient loss its expectation is the gradient of the reverse KL to the teacher, one token ahead. No group and
    no baseline: each token has its own. It may be added to advantages of rewards.

    Args:
        logprobs_T: under the policy that is trained, or that sampled.
        teacher_T: under the teacher, of the same ids, from a model or from an endpoint. Minus infinity, a token that the teacher
            rules out, counts as the clamp of the log ratio, 20.
        mask_T: True on sampled tokens.
        coef: what a nat weighs.
    """
    return -coef * log_ratio(keep(logprobs_T.detach(), mask_T), keep(teacher_T.detach(), mask_T))
