"""A policy loss as the learner holds it: a function, the inputs that it reads, and its settings.

Its parameters are named like the fields of `LossInputs`; any other is a setting, which the config fills:
`mine(logprobs_T, old_T, advantages_T, *, width=0.2)`. It returns one loss per token, and need not know of masks.

Legend: T tokens of one packed micro-batch.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from agent_train.algorithms.losses import keep, single
from agent_train.config.extensions import losses


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a policy loss for one packed micro-batch. Those that no loss reads may be missing."""

    logprobs_T: Tensor  # log-probabilities (nats) under the policy that is trained, with gradient
    advantages_T: Tensor  # of each token
    mask_T: Tensor  # True on the sampled tokens; elsewhere the others may hold anything
    old_T: Tensor | None = None  # log-probabilities under the proximal policy
    behaviour_T: Tensor | None = None  # log-probabilities under the policy that sampled, from the engine
    entropy_T: Tensor | None = None  # entropy (nats) of the trained policy at each token, with gradient
    segment_T: Tensor | None = None  # number of each token's sample in the micro-batch, int64, from 0
    n_segments: int | None = None  # number of samples
    drift_limit: Tensor | None = None  # a scalar of the whole optimizer step, from `m2po_limit`


INPUTS = tuple(field.name for field in fields(LossInputs))
# Per token and of floats: a masked cell of these may hold anything.
_KEPT = ("logprobs_T", "advantages_T", "old_T", "behaviour_T", "entropy_T")


@dataclass(frozen=True)
class PolicyLoss:
    """A loss with its settings. Calling it gives loss_T, fp32, 0 outside the mask, to be summed with weights."""

    name: str
    function: Callable[..., Tensor]
    reads: frozenset[str]
    settings: Mapping[str, Any]

    def __call__(self, inputs: LossInputs) -> Tensor:
        given = {name: getattr(inputs, name) for name in INPUTS if name in self.reads}
        missing = [name for name, value in given.items() if value is None]
        if missing:
            raise ValueError(
                f"policy loss {self.name!r} reads {', '.join(missing)}, which this micro-batch does not have"
            )
        for name in _KEPT:
            if name in given:
                given[name] = keep(single(given[name]), inputs.mask_T)
        loss_T = self.function(**given, **self.settings)
        if not isinstance(loss_T, Tensor) or loss_T.shape != inputs.mask_T.shape:
            shape = tuple(loss_T.shape) if isinstance(loss_T, Tensor) else type(loss_T).__name__
            raise ValueError(
                f"policy loss {self.name!r} returns {shape}, not one number for each of {len(inputs.mask_T)} tokens"
            )
        return keep(loss_T, inputs.mask_T)

    def with_clip_mask(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """loss_T and clip_mask_T: True on tokens that have an advantage without a part in the gradient: a clip or a range holds them back."""

        def gradient(advantages_T: Tensor) -> Tensor:
            # Not through the model: FSDP would take that for the backward pass, and gather the weights once more.
            apart_T = inputs.logprobs_T.detach().requires_grad_()
            loss_T = self(replace(inputs, logprobs_T=apart_T, advantages_T=advantages_T))
            return torch.autograd.grad(loss_T.sum(), apart_T)[0]

        # Without advantages a pull to another policy remains, which holds nothing back.
        pull_T = gradient(torch.zeros_like(inputs.advantages_T)) if "advantages_T" in self.reads else 0.0
        held_T = gradient(inputs.advantages_T) == pull_T
        return self(inputs), (keep(inputs.advantages_T, inputs.mask_T) != 0) & held_T


def policy_loss(name: str, settings: Mapping[str, Any] | None = None) -> PolicyLoss:
    """The loss of this name with these settings, tried on a few tokens.

    Raises ValueError for no such loss or setting, a setting without a value or of the wrong kind, and a function that
    fails on the few tokens, or gives them another shape, a number that is not finite, or no gradient.
    """
    function = losses.load(name)
    parameters = inspect.signature(function).parameters
    if "logprobs_T" not in parameters:
        raise ValueError(
            f"policy loss {name!r} has no parameter logprobs_T, so it cannot change the policy; it may read {', '.join(INPUTS)}"
        )
    for key, parameter in parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"policy loss {name!r}: its parameter {key} must be one that is given by its name")
    known = {key: p for key, p in parameters.items() if key not in INPUTS}
    chosen = {key: p.default for key, p in known.items() if p.default is not p.empty} | dict(settings or {})
    for key, value in chosen.items():
        if key not in known:
            raise ValueError(
                f"policy loss {name!r} has no setting {key!r}; it has {', '.join(sorted(known)) or 'none'}"
            )
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
        if isinstance(known[key].default, float) and not number:
            raise ValueError(f"policy loss {name!r}: {key} must be a number, not {value!r}")
    absent = [key for key in known if key not in chosen]
    if absent:
        raise ValueError(f"policy loss {name!r}: no value for {', '.join(absent)}; set it")
    loss = PolicyLoss(name, function, frozenset(parameters) & frozenset(INPUTS), chosen)
    _try(loss)
    return loss


def _try(loss: PolicyLoss) -> None:
    """Compute a loss of four tokens at the old policy, one of them masked and full of NaN: rather now than after a rollout."""
    mask_T = torch.tensor([True, True, False, True])
    logprobs_T = torch.tensor([-0.5, -1.0, math.nan, -2.0], requires_grad=True)
    sampled_T = logprobs_T.detach()
    inputs = LossInputs(
        logprobs_T=logprobs_T,
        advantages_T=torch.tensor([1.0, 1.0, math.nan, -1.0]),
        mask_T=mask_T,
        old_T=sampled_T,
        behaviour_T=sampled_T,
        entropy_T=torch.tensor([1.0, 1.0, math.nan, 1.0]),
        segment_T=torch.tensor([0, 0, 1, 1]),
        n_segments=2,
        drift_limit=torch.tensor(math.inf),
    )
    try:
        with torch.enable_grad():
            total = loss(inputs).sum()
        grad_T = torch.autograd.grad(total, logprobs_T)[0] if total.requires_grad else torch.zeros(4)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"policy loss {loss.name!r} fails: {type(error).__name__}: {error}") from error
    if not (total.isfinite() and grad_T.isfinite().all()):
        raise ValueError(
            f"policy loss {loss.name!r}: loss {total.item()} and gradient {grad_T.tolist()} are not all finite"
        )
    if not grad_T.any():
        raise ValueError(f"policy loss {loss.name!r} has no gradient at the old policy: is logprobs_T detached?")
