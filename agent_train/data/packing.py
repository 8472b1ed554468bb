"""Samples are dealt to optimizer steps and ranks and packed into micro-batches.

No padding: the samples of a micro-batch lie one after another and `cu_seqlens` says where each begins. Where prefixes
are shared, the first sample of a prefix group lies there whole, and then what the others have beyond the prefix: the
same numbers in fewer tokens, since each token still sees its own sample only. The weight of a token in the loss is
decided by `weighted`, over all samples of an optimizer step before they are dealt, so that any split gives the same
loss.

Legend: T tokens of one packed micro-batch, S samples (segments) in it.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain, compress, takewhile
from typing import Any

import torch
from torch import Tensor

from agent_train.algorithms.reductions import sample_weights
from agent_train.data.balance import TOKENS, Cost, balance
from agent_train.data.samples import TrainingSample

FILLER_ID = 0
# Prefix groups are tried whole as far as ranks stay balanced, and in pieces of at most these shares of a rank's part of the cost.
PIECES = (1, 2, 4, 8)
LEAST_SHARED = 32  # tokens; a shorter prefix of other groups is not worth a call of attention


@dataclass(frozen=True)
class Prefix:
    """Neighbouring samples of a micro-batch that share their first tokens, which lie in the first of them only."""

    first: int  # number of the first of them in the micro-batch
    samples: int  # their number
    length: int  # tokens that they share, none of them sampled


@dataclass(frozen=True)
class PrefixGroup:
    """Samples that share their first `prefix` tokens, none of them sampled, and have more; a sample by itself has prefix 0."""

    samples: tuple[TrainingSample, ...]
    prefix: int = 0

    @property
    def tokens(self) -> int:
        return sum(len(sample.ids) for sample in self.samples) - self.prefix * (len(self.samples) - 1)

    def costs(self, cost: Cost) -> list[int]:
        """The cost of each sample beyond the prefix."""
        return [cost.of(len(sample.ids) - self.prefix, sample.sampled, self.prefix) for sample in self.samples]

    def cost(self, cost: Cost) -> int:
        return sum(self.costs(cost)) + cost.of(self.prefix, 0)


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass. Everything is aligned to the token itself, as in `TrainingSample`."""

    ids_T: Tensor  # token ids, int64
    positions_T: Tensor  # position of each token in its own sample, int64
    mask_T: Tensor  # True on sampled tokens, which the loss is about
    behaviour_logprobs_T: Tensor  # the engine's log-probabilities (nats) of the sampled tokens, fp32
    versions_T: Tensor  # the engine's weight version of the sampled tokens, int64, -1 where it is not known
    advantages_T: Tensor  # the advantage of each sampled token, fp32
    reference_T: (
        Tensor  # log-probabilities under the reference policy, fp32; zeros where there is none, as the next two
    )
    values_T: Tensor  # the critic's values before the update
    targets_T: Tensor  # of the critic
    weights_T: Tensor  # weight in the loss, the same on every token of a sample, fp32; the mask says which count
    temperature_T: Tensor  # sampling temperature of each token's sample, fp32
    segment_T: Tensor  # number of each token's sample in the micro-batch, from 0, int64
    previous_T: Tensor  # place of the token before each token in its sample, which predicts it; the first's own. int64
    cu_seqlens: Tensor  # S+1 boundaries of the samples, int32, from 0 to T
    lengths: tuple[int, ...]  # the S lengths, on the host; behind the first sample of a `Prefix` without the prefix
    prefixes: tuple[Prefix, ...] = ()  # the shared prefixes, in order
    has_reference: bool = False  # every sample with sampled tokens has `reference`, and there is one
    start_T: Tensor | None = None  # log-probabilities of the trained policy at the start of the training step, if read

    @property
    def n_segments(self) -> int:
        return len(self.lengths)

    def to(self, device: torch.device) -> "MicroBatch":
        given = ((f.name, getattr(self, f.name)) for f in fields(self))
        return replace(self, **{k: v.to(device, non_blocking=True) for k, v in given if isinstance(v, Tensor)})


@dataclass(frozen=True)
class RankBatch:
    """One rank's part of one optimizer step."""

    micro_batches: list[list[TrainingSample]]  # equally many on every rank, some without samples
    n_tokens: int  # sampled tokens of the whole step, over all ranks
    packed_tokens: int  # all tokens of the samples of the whole step, over all ranks
    prefixes: list[tuple[Prefix, ...]]  # the shared prefixes of each micro-batch

    @property
    def samples(self) -> list[TrainingSample]:
        return list(chain.from_iterable(self.micro_batches))

    def batches(self) -> list[MicroBatch]:
        return list(map(batch_of, self.micro_batches, self.prefixes))

    def with_numbers(self, numbers: Mapping[str, Mapping[str, Any]]) -> "RankBatch":
        """The same batch with fields of its samples, by their ids: `{"t/0#0": {"weight": 0.5}}`."""
        filled = [[replace(sample, **numbers[sample.id]) for sample in own] for own in self.micro_batches]
        return replace(self, micro_batches=filled)

    def by_sample(self, numbers: Sequence[Tensor]) -> list[list[list[float]]]:
        """The numbers of the tokens of each micro-batch as a list for each sample, as long as it; 0.0 on a prefix that lies elsewhere."""
        found = []
        for samples, prefixes, numbers_T in zip(self.micro_batches, self.prefixes, numbers, strict=True):
            starts = _starts(len(samples), prefixes)
            sizes = [len(sample.ids) - start for sample, start in zip(samples, starts, strict=True)]
            parts = numbers_T[: sum(sizes)].split(sizes) if samples else ()
            found.append([[0.0] * start + part.tolist() for start, part in zip(starts, parts, strict=True)])
        return found


def weighted(
    samples: Sequence[TrainingSample], reduction: str = "token-mean", length: float | None = None
) -> list[TrainingSample]:
    """All samples of one optimizer step with their weights in its loss; see `reductions.sample_weights`. `length` is of "constant" alone."""

    def numbered(names: list[str]) -> Tensor:
        numbers: dict[str, int] = {}
        return torch.tensor([numbers.setdefault(name, len(numbers)) for name in names], dtype=torch.int64)

    tokens_N = torch.tensor([sample.sampled for sample in samples])
    trajectories_N = numbered([sample.trajectory for sample in samples])
    groups_N = numbered([sample.group for sample in samples])
    weights_N = sample_weights(reduction, tokens_N, trajectories_N, groups_N, length)
    return [replace(each, weight=weight) for each, weight in zip(samples, weights_N.tolist(), strict=True)]


def split_steps(
    samples: Sequence[TrainingSample], parts: int, cost: Cost = TOKENS, groups_whole: bool = False
) -> list[list[TrainingSample]]:
    """Deal samples to `parts` optimizer steps of nearly equal cost, whole trajectories, whatever the order they come in.

    A reduction counts a trajectory once in each optimizer step. Samples whose trajectory has no name are each by
    themselves. With `groups_whole` groups stay whole, where there are at least `parts`. There are fewer lists where too
    few trajectories sampled a token.
    """
    ordered = _in_order(samples)
    units = _units((sample.trajectory or number, sample) for number, sample in enumerate(ordered))
    if groups_whole and len(groups := _units((sample.group, sample) for sample in ordered)) >= parts:
        units = groups
    costs = [sum(cost.of(len(sample.ids), sample.sampled) for sample in unit) for unit in units]
    dealt = [[sample for place in own for sample in units[place]] for own in balance(costs, parts)]
    return [part for part in dealt if any(sample.sampled for sample in part)] or [list(samples)]


def _units(named: Iterable[tuple[Hashable, TrainingSample]]) -> list[list[TrainingSample]]:
    units: dict[Hashable, list[TrainingSample]] = {}
    for name, sample in named:
        units.setdefault(name, []).append(sample)
    return list(units.values())


def rank_batches(
    samples: Sequence[TrainingSample],
    world: int,
    budget: int,
    reduction: str = "token-mean",
    length: float | None = None,
    cost: Cost = TOKENS,
    shared_prefix: bool = False,
) -> list[RankBatch]:
    """One optimizer step, weighed (see `weighted`) and dealt to `world` ranks: as many micro-batches on each, empty ones where a rank has fewer.

    Ranks wait for each other in every micro-batch, so that the first of all ranks cost about the same, and the second.
    The order of the samples does not matter. `budget` is the tokens of a micro-batch. With `shared_prefix` the prompt
    that samples of a group have in common is computed once, and what the prompts of other samples begin with.
    """
    n_tokens = sum(sample.sampled for sample in samples)
    if n_tokens == 0:
        raise ValueError(f"nothing to train on: {len(samples)} samples without a sampled token")
    weighed = weighted(samples, reduction, length)
    packed = [_pack(part, budget) for part in _split(weighed, world, budget, cost, shared_prefix)]
    most = max(len(bins) for bins in packed)
    packed_tokens = sum(len(sample.ids) for sample in samples)
    leveled = [_leveled(bins, most, budget, cost) for bins in packed]
    return [
        RankBatch(
            [[sample for group in groups for sample in group.samples] for groups in bins],
            n_tokens,
            packed_tokens,
            [_prefixes(groups) for groups in bins],
        )
        for bins in leveled
    ]


def _split(
    samples: Sequence[TrainingSample], parts: int, budget: int, cost: Cost, shared_prefix: bool
) -> list[list[PrefixGroup]]:
    """Deal samples to ranks, in prefix groups where prefixes are shared; the most expensive part first."""
    if not shared_prefix:
        return _dealt(_alone(samples), parts, cost)
    groups = prefix_groups_of(samples)
    most = -(-_total(groups, cost) // parts)
    candidates = [
        _dealt([piece for group in groups for piece in _pieces(group, budget, most // share, cost)], parts, cost)
        for share in (PIECES if parts > 1 else PIECES[:1])
    ]
    # In the first all groups are as large as they can be.
    return min(candidates, key=lambda dealt: max(_total(part, cost) for part in dealt))


def _dealt(groups: Sequence[PrefixGroup], parts: int, cost: Cost) -> list[list[PrefixGroup]]:
    return [[groups[place] for place in own] for own in balance([group.cost(cost) for group in groups], parts)]


def _total(groups: Iterable[PrefixGroup], cost: Cost) -> int:
    return sum(group.cost(cost) for group in groups)


def _pieces(group: PrefixGroup, budget: int, most: int, cost: Cost) -> list[PrefixGroup]:
    """The group in about as few pieces as keep to the budget and cost no more than `most` besides the prefix.

    Samples that do not even by themselves go alone.
    """
    most += cost.of(group.prefix, 0)

    def fit(pieces: Iterable[PrefixGroup]) -> bool:
        return all(piece.tokens <= budget and piece.cost(cost) <= most for piece in pieces)

    fits = [fit([PrefixGroup((sample,), group.prefix)]) for sample in group.samples]
    apart = _alone(sample for sample, fitted in zip(group.samples, fits, strict=True) if not fitted)
    fitting = tuple(compress(group.samples, fits))
    group = PrefixGroup(fitting, group.prefix)
    parts = -(-(group.tokens - group.prefix) // max(1, budget - group.prefix))
    while parts < len(fitting):
        pieces = [group] if parts == 1 else _cut(group, parts, cost)
        if fit(pieces):
            return apart + pieces
        parts += max(1, parts // 16)
    return apart + _alone(fitting)


def _pack(groups: Iterable[PrefixGroup], budget: int) -> list[list[PrefixGroup]]:
    """Micro-batches of at most `budget` tokens, first fit, the largest first; a larger prefix group has its own."""
    bins: list[list[PrefixGroup]] = []
    loads: list[int] = []
    for group in sorted(groups, key=lambda group: -group.tokens):
        place = next((i for i, load in enumerate(loads) if load + group.tokens <= budget), len(bins))
        if place == len(bins):
            bins.append([])
            loads.append(0)
        bins[place].append(group)
        loads[place] += group.tokens
    return bins


def _leveled(bins: list[list[PrefixGroup]], parts: int, budget: int, cost: Cost) -> list[list[PrefixGroup]]:
    """The same groups in `parts` micro-batches of nearly equal cost where these keep to the budget, the most expensive first.

    They lie side by side by length.
    """
    chosen = _dealt(list(chain.from_iterable(bins)), parts, cost)
    if not all(len(own) < 2 or sum(group.tokens for group in own) <= budget for own in chosen):
        chosen = sorted(bins, key=lambda own: -_total(own, cost)) + [[] for _ in range(parts - len(bins))]
    return [sorted(own, key=lambda group: (group.prefix == 0, -len(group.samples[0].ids))) for own in chosen]


def _prefixes(groups: Sequence[PrefixGroup]) -> tuple[Prefix, ...]:
    firsts = accumulate((len(group.samples) for group in groups), initial=0)
    pairs = zip(firsts, groups, strict=False)
    return tuple(Prefix(first, len(group.samples), group.prefix) for first, group in pairs if group.prefix)


def _starts(n_samples: int, prefixes: Iterable[Prefix]) -> list[int]:
    """For each sample, the number of its first tokens that lie elsewhere."""
    starts = [0] * n_samples
    for prefix in prefixes:
        starts[prefix.first + 1 : prefix.first + prefix.samples] = [prefix.length] * (prefix.samples - 1)
    return starts


def _in_order(samples: Iterable[TrainingSample]) -> list[TrainingSample]:
    """The longest first, and samples of equal length in an order that does not depend on the one they came in."""
    return sorted(samples, key=lambda sample: (-len(sample.ids), sample.group, sample.trajectory, sample.ids))


def _alone(samples: Iterable[TrainingSample]) -> list[PrefixGroup]:
    return [PrefixGroup((sample,)) for sample in _in_order(samples)]


def prefix_groups_of(samples: Iterable[TrainingSample]) -> list[PrefixGroup]:
    """The prefix groups of samples; those that share nothing stay by themselves.

    Of a group that has a name, samples with the same prompt, which is what comes before the first sampled token, go
    together. Others join the longest such prompt that their own begins with, the rest by what its prompts have in common.
    What is left of all groups shares what its prompts begin with: the same system prompt and tools.
    """
    named: dict[str, list[TrainingSample]] = {}
    for sample in _in_order(samples):
        named.setdefault(sample.group, []).append(sample)
    left = _alone(named.pop("", []))
    found: list[PrefixGroup] = []
    for own in named.values():
        for each in _within_group(own):
            (found if each.prefix else left).append(each)
    found += _across_groups([each.samples[0] for each in left])
    return sorted(
        found, key=lambda each: (-len(each.samples[0].ids), each.samples[0].group, each.samples[0].trajectory)
    )


def _across_groups(samples: Iterable[TrainingSample]) -> list[PrefixGroup]:
    alike: dict[tuple[int, ...], list[TrainingSample]] = {}
    for sample in samples:
        alike.setdefault(_prompt(sample)[:LEAST_SHARED], []).append(sample)
    found = []
    for beginning, own in alike.items():
        worth = len(own) > 1 and len(beginning) == LEAST_SHARED
        found += [PrefixGroup(tuple(_in_order(own)), _common(own))] if worth else _alone(own)
    return found


def _cut(group: PrefixGroup, parts: int, cost: Cost) -> list[PrefixGroup]:
    """The group as `parts` groups with fewer samples, of nearly equal cost; each holds the prefix."""
    dealt = [tuple(group.samples[place] for place in own) for own in balance(group.costs(cost), parts)]
    return [PrefixGroup(samples, group.prefix if len(samples) > 1 else 0) for samples in dealt if samples]


def _within_group(samples: Sequence[TrainingSample]) -> list[PrefixGroup]:
    prompts: dict[tuple[int, ...], list[TrainingSample]] = {}
    for sample in samples:
        prompts.setdefault(_prompt(sample), []).append(sample)
    # The longest first: a sample joins the first that its prompt begins with.
    shared = sorted((prompt for prompt, own in prompts.items() if prompt and len(own) > 1), key=lambda p: (-len(p), p))
    members: dict[tuple[int, ...], list[TrainingSample]] = {prompt: prompts.pop(prompt) for prompt in shared}
    left: list[TrainingSample] = []
    for prompt, own in prompts.items():
        home = next((known for known in shared if prompt[: len(known)] == known), None)
        (left if home is None else members[home]).extend(own)
    found = [PrefixGroup(tuple(_in_order(own)), len(prompt)) for prompt, own in members.items()]
    common = _common(left)
    return found + ([PrefixGroup(tuple(_in_order(left)), common)] if len(left) > 1 and common else _alone(left))


def _common(samples: Iterable[TrainingSample]) -> int:
    """The number of first tokens that all prompts share."""
    return sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*map(_prompt, samples), strict=False)))


def _prompt(sample: TrainingSample) -> tuple[int, ...]:
    """The tokens before the first sampled one, without the last token in any case."""
    end = sample.mask.index(True) if True in sample.mask else len(sample.ids) - 1
    return tuple(sample.ids[:end])


def batch_of(samples: Sequence[TrainingSample], prefixes: Sequence[Prefix] = ()) -> MicroBatch:
    """The tensors of one micro-batch, on the host; samples are packed in this order.

    Without samples it holds one filler token that no loss looks at: a rank without work still joins the collectives.
    """
    if not samples:
        samples = [TrainingSample(ids=[FILLER_ID], mask=[False], logprobs=[0.0])]
    starts = _starts(len(samples), prefixes)
    lengths = tuple(len(sample.ids) - start for sample, start in zip(samples, starts, strict=True))
    sizes = torch.tensor(lengths)
    cu_seqlens = [0, *accumulate(lengths)]
    positions_T = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)])
    previous_T = torch.arange(cu_seqlens[-1]) - (positions_T > 0).long()
    for prefix in prefixes:
        branches = cu_seqlens[prefix.first + 1 : prefix.first + prefix.samples]
        previous_T[branches] = cu_seqlens[prefix.first] + prefix.length - 1

    def spread(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(sizes)

    def joined(name: str, missing: float = 0.0) -> list[Any]:
        values = [getattr(sample, name) or [missing] * len(sample.ids) for sample in samples]
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
        weights_T=spread([sample.weight for sample in samples]),
        temperature_T=spread([sample.temperature for sample in samples]),
        segment_T=torch.arange(len(samples)).repeat_interleave(sizes),
        previous_T=previous_T,
        cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32),
        lengths=lengths,
        prefixes=tuple(prefixes),
        has_reference=any(sample.sampled for sample in samples)
        and all(sample.reference or not sample.sampled for sample in samples),
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
