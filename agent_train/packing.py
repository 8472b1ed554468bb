"""Rows -> shares of the ranks -> packed micro-batches.

No padding: the rows of a micro-batch lie one after another and `cu_seqlens` says where each begins. What a token weighs in the
loss is decided here, once, by `weigh`: over all rows of an optimizer step, before they are dealt to ranks and micro-batches, so
that losses are plain weighted sums and any split gives the same number.

Legend: T tokens of one packed micro-batch, S rows (segments) in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, chain

import torch
from torch import Tensor

from agent_train.algorithms.reductions import row_weights
from agent_train.rows import Row

FILLER_ID = 0


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass reads. Everything is aligned to the token itself, as in `Row`.

    Attributes:
        ids_T: token ids, int64.
        positions_T: position of each token in its own row, int64.
        mask_T: True on sampled tokens, which the loss is about.
        behaviour_logprobs_T: the engine's log-probabilities (nats) of the sampled tokens, fp32.
        versions_T: the engine's weight version of the sampled tokens, int64, -1 where it is not known.
        advantages_T: the advantage of each sampled token, fp32.
        reference_T: log-probabilities under the reference policy, fp32; zeros where there is none. So are the next two.
        values_T: the critic's values before the update.
        targets_T: what the critic learns.
        weights_T: weight of each token in the loss, the same on every token of a row, fp32; the mask says which count.
        temperature_T: sampling temperature of each token's row, fp32.
        segment_T: number of each token's row in the micro-batch, from 0, int64.
        previous_T: position of the token before each token in its row, which predicts it; its own for the first. int64.
        cu_seqlens: S+1 row boundaries, int32, from 0 to T.
        lengths: the S lengths, on the host.
    """

    ids_T: Tensor
    positions_T: Tensor
    mask_T: Tensor
    behaviour_logprobs_T: Tensor
    versions_T: Tensor
    advantages_T: Tensor
    reference_T: Tensor
    values_T: Tensor
    targets_T: Tensor
    weights_T: Tensor
    temperature_T: Tensor
    segment_T: Tensor
    previous_T: Tensor
    cu_seqlens: Tensor
    lengths: tuple[int, ...]

    @property
    def n_segments(self) -> int:
        """How many rows there are, S."""
        return len(self.lengths)

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch with its tensors on a device."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return MicroBatch(
            **{k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in values.items()}
        )


@dataclass(frozen=True)
class Share:
    """One rank's part of one optimizer step.

    Attributes:
        micro_batches: the rows of each micro-batch; equally many on every rank, some without rows.
        n_tokens: sampled tokens of the whole step, over all ranks.
        packed_tokens: all tokens of the whole step, over all ranks.
    """

    micro_batches: list[list[Row]]
    n_tokens: int
    packed_tokens: int


def sampled(rows: Iterable[Row]) -> int:
    """How many sampled tokens the rows hold."""
    return sum(row.sampled for row in rows)


def weigh(rows: Sequence[Row], reduction: str = "token-mean", length: float | None = None) -> None:
    """Set the weight of all rows of one optimizer step, the only rows that its denominators count.

    Args:
        rows: of all ranks and micro-batches.
        reduction: one of `reductions.MODES`.
        length: of "constant" alone.

    Raises:
        ValueError: see `reductions.row_weights`.
    """
    trajectories = _numbered([row.trajectory for row in rows])
    groups = _numbered([row.group for row in rows])
    tokens_R = torch.tensor([row.sampled for row in rows])
    weights_R = row_weights(reduction, tokens_R, torch.tensor(trajectories), torch.tensor(groups), length)
    for row, weight in zip(rows, weights_R.tolist(), strict=True):
        row.weight = weight


def _numbered(names: Sequence[str]) -> list[int]:
    numbers: dict[str, int] = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]


def split_ranks(rows: Sequence[Row], parts: int) -> list[list[Row]]:
    """Deal rows to `parts` lists with nearly equal token counts: the longest first, each to the least loaded list.

    The same rows always give the same lists. A list may be empty when there are fewer rows than parts.

    Raises:
        ValueError: `parts` is below 1.
    """
    if parts < 1:
        raise ValueError(f"rows are split into at least 1 part, not {parts}")
    loads = [0] * parts
    dealt: list[list[Row]] = [[] for _ in range(parts)]
    for row in _longest_first(rows):
        lightest = loads.index(min(loads))
        loads[lightest] += len(row.ids)
        dealt[lightest].append(row)
    return dealt


def pack(rows: Sequence[Row], budget: int) -> list[list[Row]]:
    """Group rows into micro-batches of at most `budget` tokens, first fit, the longest first.

    A row longer than the budget gets a micro-batch of its own. Rows of equal length come to lie side by side, which
    attention uses.

    Raises:
        ValueError: `budget` is below 1.
    """
    if budget < 1:
        raise ValueError(f"a micro-batch holds at least 1 token, not {budget}: see learner.microbatch_tokens")
    bins: list[list[Row]] = []
    loads: list[int] = []
    for row in _longest_first(rows):
        size = len(row.ids)
        place = next((i for i, load in enumerate(loads) if load + size <= budget), None)
        if place is None:
            bins.append([row])
            loads.append(size)
        else:
            bins[place].append(row)
            loads[place] += size
    return bins


def shares(
    rows: Sequence[Row], world: int, budget: int, reduction: str = "token-mean", length: float | None = None
) -> list[Share]:
    """One optimizer step, weighed and dealt to `world` ranks: as many micro-batches on each, empty ones where a rank has fewer.

    Args:
        rows: of the whole optimizer step.
        world: ranks.
        budget: tokens of a micro-batch.
        reduction: see `weigh`, as for `length`.
        length: of the reduction "constant".

    Raises:
        ValueError: no sampled token in any row; or a row whose lists differ in length, whose first token is in the mask, or
            whose temperature is not positive.
    """
    for row in rows:
        _check(row)
    n_tokens = sampled(rows)
    if n_tokens == 0:
        raise ValueError(f"nothing to train on: {len(rows)} rows without a sampled token")
    weigh(rows, reduction, length)
    packed = [pack(part, budget) for part in split_ranks(rows, world)]
    most = max(len(bins) for bins in packed)
    packed_tokens = sum(len(row.ids) for row in rows)
    return [Share(bins + [[] for _ in range(most - len(bins))], n_tokens, packed_tokens) for bins in packed]


def batch_of(rows: Sequence[Row]) -> MicroBatch:
    """The tensors of one micro-batch, on the host.

    Without rows it holds one filler token that no loss looks at: a rank without work still runs every layer, since the
    other ranks wait for it in each collective.

    Args:
        rows: what to pack, in this order; `shares` has checked and `weigh` has weighed them.
    """
    if not rows:
        rows = [Row(ids=[FILLER_ID], mask=[False], logprobs=[0.0])]
    lengths = tuple(len(row.ids) for row in rows)
    sizes = torch.tensor(lengths)
    positions_T = torch.cat([torch.arange(n) for n in lengths])

    def spread(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(sizes)

    def joined(name: str) -> Tensor:
        """A number for each token; zeros for the rows that have none."""
        values = [getattr(row, name) or [0.0] * len(row.ids) for row in rows]
        return torch.tensor(list(chain.from_iterable(values)), dtype=torch.float32)

    return MicroBatch(
        ids_T=torch.tensor(list(chain.from_iterable(row.ids for row in rows))),
        positions_T=positions_T,
        mask_T=torch.tensor(list(chain.from_iterable(row.mask for row in rows)), dtype=torch.bool),
        behaviour_logprobs_T=joined("logprobs"),
        versions_T=torch.tensor(list(chain.from_iterable(row.versions or [-1] * len(row.ids) for row in rows))),
        advantages_T=joined("advantages"),
        reference_T=joined("reference"),
        values_T=joined("values"),
        targets_T=joined("targets"),
        weights_T=spread([row.weight for row in rows]),
        temperature_T=spread([row.temperature for row in rows]),
        segment_T=torch.arange(len(rows)).repeat_interleave(sizes),
        previous_T=torch.arange(sum(lengths)) - (positions_T > 0).long(),
        cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        lengths=lengths,
    )


def _longest_first(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: -len(row.ids))


def _check(row: Row) -> None:
    size = len(row.ids)
    where = f"row of trajectory {row.trajectory!r}"
    if not size or len(row.mask) != size or len(row.logprobs) != size:
        raise ValueError(
            f"{where}: {size} ids, {len(row.mask)} mask values, {len(row.logprobs)} logprobs; need as many of each, at least 1"
        )
    for name in ("versions", "advantages", "reference", "values", "targets"):
        if len(getattr(row, name)) not in (0, size):
            raise ValueError(f"{where}: {size} ids and {len(getattr(row, name))} {name}; need as many, or none")
    if row.mask[0]:
        raise ValueError(
            f"{where}: its first token is marked as sampled, but nothing comes before it that could predict it"
        )
    if not row.temperature > 0:
        raise ValueError(f"{where}: temperature must be positive to train on, not {row.temperature}")
