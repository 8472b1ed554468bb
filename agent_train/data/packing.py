"""Rows -> shares of the ranks -> packed micro-batches.

No padding: the rows of a micro-batch lie one after another and `cu_seqlens` says where each begins. Where prefixes are shared, a
tree of rows lies as its first row, whole, and then what the other rows have beyond the prefix. What a token weighs in the loss
is decided here, once, by `weights_of`: over all rows of an optimizer step, before they are dealt to ranks and micro-batches, so that
losses are plain weighted sums and any split gives the same number.

Legend: T tokens of one packed micro-batch, S rows (segments) in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from agent_train.algorithms.reductions import row_weights
from agent_train.data.balance import TOKENS, Cost, balance
from agent_train.data.prefixes import PrefixGroup, alone, cut, trees_of
from agent_train.data.samples import TrainingSample

FILLER_ID = 0
# Trees are tried whole as far as ranks stay balanced, and in pieces of at most these shares of a rank's part of the cost.
PIECES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Prefix:
    """Neighbouring rows of a micro-batch that share their first tokens, which lie in the first of them only.

    Attributes:
        first: number of the first of them in the micro-batch.
        rows: how many there are.
        length: tokens that they share, none of them sampled.
    """

    first: int
    rows: int
    length: int


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass. Everything is aligned to the token itself, as in `TrainingSample`.

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
        lengths: the S lengths, on the host; of a row behind the first of a `Prefix`, without the prefix.
        prefixes: what rows share, in order; none where each row lies there whole.
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
    prefixes: tuple[Prefix, ...] = ()

    @property
    def n_segments(self) -> int:
        """The number of samples, S."""
        return len(self.lengths)

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch with its tensors on a device."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return MicroBatch(
            **{k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in values.items()}
        )


@dataclass(frozen=True)
class RankBatch:
    """One rank's part of one optimizer step.

    Attributes:
        micro_batches: the rows of each micro-batch; equally many on every rank, some without rows.
        n_tokens: sampled tokens of the whole step, over all ranks.
        packed_tokens: all tokens of the rows of the whole step, over all ranks.
        prefixes: for each micro-batch what its rows share; empty where nothing is.
    """

    micro_batches: list[list[TrainingSample]]
    n_tokens: int
    packed_tokens: int
    prefixes: list[tuple[Prefix, ...]] = field(default_factory=list)

    def batches(self) -> list[MicroBatch]:
        """The micro-batches' tensors, on the host."""
        shared = self.prefixes or [()] * len(self.micro_batches)
        return [batch_of(rows, prefixes) for rows, prefixes in zip(self.micro_batches, shared, strict=True)]

    def with_numbers(self, numbers: Mapping[str, Mapping[str, Any]]) -> RankBatch:
        """The same batch with fields of its samples, by their ids: `{"t/0#0": {"weight": 0.5}}`."""
        filled = [[replace(sample, **numbers[sample.id]) for sample in own] for own in self.micro_batches]
        return replace(self, micro_batches=filled)

    def by_row(self, numbers: Sequence[Tensor]) -> list[list[list[float]]]:
        """A number for each token of each micro-batch as lists, one for each row, as long as it; 0.0 where a prefix is not its own."""
        shared = self.prefixes or [()] * len(self.micro_batches)
        found = []
        for rows, prefixes, numbers_T in zip(self.micro_batches, shared, numbers, strict=True):
            starts = _starts(len(rows), prefixes)
            sizes = [len(row.ids) - start for row, start in zip(rows, starts, strict=True)]
            parts = numbers_T[: sum(sizes)].split(sizes) if rows else ()
            found.append([[0.0] * start + part.tolist() for start, part in zip(starts, parts, strict=True)])
        return found


def sampled(rows: Iterable[TrainingSample]) -> int:
    """The number of sampled tokens in the samples."""
    return sum(row.sampled for row in rows)


def weights_of(
    samples: Sequence[TrainingSample], reduction: str = "token-mean", length: float | None = None
) -> list[float]:
    """The weight of each sample of one optimizer step. Its denominators count these samples and no others.

    Args:
        samples: of all ranks and micro-batches.
        reduction: one of `reductions.MODES`.
        length: of "constant" alone.

    Raises:
        ValueError: see `reductions.row_weights`.
    """
    trajectories = _numbered([sample.trajectory for sample in samples])
    groups = _numbered([sample.group for sample in samples])
    tokens_R = torch.tensor([sample.sampled for sample in samples])
    return row_weights(reduction, tokens_R, torch.tensor(trajectories), torch.tensor(groups), length).tolist()


def _numbered(names: Sequence[str]) -> list[int]:
    numbers: dict[str, int] = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]


def shares(
    rows: Sequence[TrainingSample],
    world: int,
    budget: int,
    reduction: str = "token-mean",
    length: float | None = None,
    cost: Cost = TOKENS,
    shared_prefix: bool = False,
) -> list[RankBatch]:
    """One optimizer step, weighed and dealt to `world` ranks: as many micro-batches on each, empty ones where a rank has fewer rows.

    Ranks wait for each other in every micro-batch, so that the first of all ranks cost about the same, and the second. The same
    rows in another order are dealt in the same way.

    Args:
        rows: of the whole optimizer step.
        world: ranks.
        budget: tokens of a micro-batch; a shared prefix counts once.
        reduction: see `weights_of`, as for `length`.
        length: of the reduction "constant".
        cost: of the model, by which the work is balanced.
        shared_prefix: whether what the rows of a group have in common before their first sampled token is computed once.

    Raises:
        ValueError: no sampled token in any row; or a row whose lists differ in length, whose first token is in the mask, or
            whose temperature is not positive.
    """
    for row in rows:
        check_sample(row)
    n_tokens = sampled(rows)
    if n_tokens == 0:
        raise ValueError(f"nothing to train on: {len(rows)} rows without a sampled token")
    weights = weights_of(rows, reduction, length)
    rows = [replace(row, weight=weight) for row, weight in zip(rows, weights, strict=True)]
    packed = [_pack(part, budget) for part in _split(rows, world, budget, cost, shared_prefix)]
    most = max(len(bins) for bins in packed)
    packed_tokens = sum(len(row.ids) for row in rows)
    leveled = [_leveled(bins, most, budget, cost) for bins in packed]
    return [
        RankBatch([_rows(trees) for trees in bins], n_tokens, packed_tokens, [_prefixes(trees) for trees in bins])
        for bins in leveled
    ]


def _split(
    rows: Sequence[TrainingSample], parts: int, budget: int, cost: Cost, shared_prefix: bool
) -> list[list[PrefixGroup]]:
    """Deal rows to ranks, in trees where prefixes are shared; the most expensive part first."""
    if parts < 1:
        raise ValueError(f"rows are dealt to at least 1 rank, not {parts}")
    if not shared_prefix:
        return _dealt(alone(rows), parts, cost)
    trees = trees_of(rows)
    most = -(-sum(tree.cost(cost) for tree in trees) // parts)
    candidates = [
        _dealt([piece for tree in trees for piece in _pieces(tree, budget, most // share, cost)], parts, cost)
        for share in (PIECES if parts > 1 else PIECES[:1])
    ]
    # In the first all trees are as large as they can be.
    return min(candidates, key=lambda dealt: max(_total(part, cost) for part in dealt))


def _dealt(trees: Sequence[PrefixGroup], parts: int, cost: Cost) -> list[list[PrefixGroup]]:
    return [[trees[place] for place in own] for own in balance([tree.cost(cost) for tree in trees], parts)]


def _total(trees: Iterable[PrefixGroup], cost: Cost) -> int:
    return sum(tree.cost(cost) for tree in trees)


def _pieces(tree: PrefixGroup, budget: int, most: int, cost: Cost) -> list[PrefixGroup]:
    """The tree in as few pieces as keep to the budget and cost no more than `most` besides the prefix, or row by row."""
    most += cost.of(tree.prefix, 0)
    for parts in range(1, len(tree.rows)):
        pieces = [tree] if parts == 1 else cut(tree, parts, cost)
        if all(p.tokens <= budget and p.cost(cost) <= most for p in pieces):
            return pieces
    return alone(tree.rows)


def _pack(trees: Iterable[PrefixGroup], budget: int) -> list[list[PrefixGroup]]:
    """Micro-batches of at most `budget` tokens, first fit, the largest first; a larger prefix group has its own."""
    if budget < 1:
        raise ValueError(f"a micro-batch holds at least 1 token, not {budget}: see learner.microbatch_tokens")
    bins: list[list[PrefixGroup]] = []
    loads: list[int] = []
    for tree in sorted(trees, key=lambda tree: -tree.tokens):
        place = next((i for i, load in enumerate(loads) if load + tree.tokens <= budget), None)
        if place is None:
            bins.append([tree])
            loads.append(tree.tokens)
        else:
            bins[place].append(tree)
            loads[place] += tree.tokens
    return bins


def _leveled(bins: list[list[PrefixGroup]], parts: int, budget: int, cost: Cost) -> list[list[PrefixGroup]]:
    """The same trees in `parts` micro-batches of nearly equal cost where these keep to the budget, the most expensive first.

    They lie side by side by length.
    """
    trees = [tree for own in bins for tree in own]
    level = _dealt(trees, parts, cost)
    kept = all(len(own) < 2 or sum(tree.tokens for tree in own) <= budget for own in level)
    chosen = (
        level if kept else sorted(bins, key=lambda own: -_total(own, cost)) + [[] for _ in range(parts - len(bins))]
    )
    return [sorted(own, key=lambda tree: (tree.prefix == 0, -len(tree.rows[0].ids))) for own in chosen]


def _rows(trees: Iterable[PrefixGroup]) -> list[TrainingSample]:
    return [row for tree in trees for row in tree.rows]


def _prefixes(trees: Sequence[PrefixGroup]) -> tuple[Prefix, ...]:
    firsts = accumulate((len(tree.rows) for tree in trees), initial=0)
    return tuple(
        Prefix(first, len(tree.rows), tree.prefix) for first, tree in zip(firsts, trees, strict=False) if tree.prefix
    )


def _starts(n_rows: int, prefixes: Iterable[Prefix]) -> list[int]:
    """Of each row, how many of its first tokens lie elsewhere."""
    starts = [0] * n_rows
    for prefix in prefixes:
        starts[prefix.first + 1 : prefix.first + prefix.rows] = [prefix.length] * (prefix.rows - 1)
    return starts


def batch_of(rows: Sequence[TrainingSample], prefixes: Sequence[Prefix] = ()) -> MicroBatch:
    """The tensors of one micro-batch, on the host.

    Without rows it holds one filler token that no loss looks at: a rank without work still runs every layer, since the
    other ranks wait for it in each collective.

    Args:
        rows: what to pack, in this order; `shares` has checked and `weights_of` has weighed them.
        prefixes: what neighbouring rows share.
    """
    if not rows:
        rows = [TrainingSample(ids=[FILLER_ID], mask=[False], logprobs=[0.0])]
    starts = _starts(len(rows), prefixes)
    lengths = tuple(len(row.ids) - start for row, start in zip(rows, starts, strict=True))
    sizes = torch.tensor(lengths)
    cu_seqlens = [0, *accumulate(lengths)]
    positions_T = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)])
    previous_T = torch.arange(cu_seqlens[-1]) - (positions_T > 0).long()
    for prefix in prefixes:
        branches = cu_seqlens[prefix.first + 1 : prefix.first + prefix.rows]
        previous_T[branches] = cu_seqlens[prefix.first] + prefix.length - 1

    def spread(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(sizes)

    def joined(name: str, missing: float = 0.0) -> list[Any]:
        """A number for each token; `missing` for the rows that have none."""
        values = [getattr(row, name) or [missing] * len(row.ids) for row in rows]
        return list(chain.from_iterable(own[start:] for own, start in zip(values, starts, strict=True)))

    def fp32(name: str) -> Tensor:
        return torch.tensor(joined(name), dtype=torch.float32)

    return MicroBatch(
        ids_T=torch.tensor(joined("ids")),
        positions_T=positions_T,
        mask_T=torch.tensor(joined("mask"), dtype=torch.bool),
        behaviour_logprobs_T=fp32("logprobs"),
        versions_T=torch.tensor(joined("versions", -1)),
        advantages_T=fp32("advantages"),
        reference_T=fp32("reference"),
        values_T=fp32("values"),
        targets_T=fp32("targets"),
        weights_T=spread([row.weight for row in rows]),
        temperature_T=spread([row.temperature for row in rows]),
        segment_T=torch.arange(len(rows)).repeat_interleave(sizes),
        previous_T=previous_T,
        cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32),
        lengths=lengths,
        prefixes=tuple(prefixes),
    )


def check_sample(sample: TrainingSample) -> None:
    """Raises ValueError if lists differ in length, the first token is in the mask, or the temperature is not positive."""
    size = len(sample.ids)
    where = f"sample of trajectory {sample.trajectory!r}"
    if not size or len(sample.mask) != size or len(sample.logprobs) != size:
        raise ValueError(
            f"{where}: {size} ids, {len(sample.mask)} mask values, {len(sample.logprobs)} logprobs; "
            "need as many of each, at least 1"
        )
    for name in ("versions", "advantages", "reference", "values", "targets"):
        if len(getattr(sample, name)) not in (0, size):
            raise ValueError(f"{where}: {size} ids and {len(getattr(sample, name))} {name}; need as many, or none")
    if sample.mask[0]:
        raise ValueError(f"{where}: its first token is marked as sampled, but no token before it predicts it")
    if not sample.temperature > 0:
        raise ValueError(f"{where}: temperature must be positive to train on, not {sample.temperature}")
