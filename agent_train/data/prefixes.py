"""Samples of one group that begin with the same prompt: the prompt once, then what follows it in each sample.

A prefix group holds the same numbers as its samples by themselves, since each token still sees its own sample only, in
fewer tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from agent_train.data.balance import Cost, balance
from agent_train.data.samples import TrainingSample


@dataclass(frozen=True)
class PrefixGroup:
    """Samples that share their first `prefix` tokens, none of them sampled; a sample by itself is a group of one with prefix 0.

    Each sample has at least one more token. The longer ones come first, unless `cut` has dealt them out.
    """

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


def in_order(samples: Iterable[TrainingSample]) -> list[TrainingSample]:
    """The longest first, and samples of equal length in an order that does not depend on the one they came in."""
    return sorted(samples, key=lambda sample: (-len(sample.ids), sample.group, sample.trajectory, sample.ids))


def alone(samples: Iterable[TrainingSample]) -> list[PrefixGroup]:
    return [PrefixGroup((sample,)) for sample in in_order(samples)]


def prefix_groups_of(samples: Iterable[TrainingSample]) -> list[PrefixGroup]:
    """The prefix groups of samples whose `group` has a name; samples that share nothing stay by themselves.

    Samples with the very same prompt, which is what comes before the first sampled token, go together. Others join the
    longest such prompt that their own begins with. The rest of the group goes together by what its prompts have in
    common.
    """
    named: dict[str, list[TrainingSample]] = {}
    for sample in in_order(samples):
        named.setdefault(sample.group, []).append(sample)
    found = alone(named.pop("", []))
    for own in named.values():
        found += _within_group(own)
    return sorted(
        found, key=lambda each: (-len(each.samples[0].ids), each.samples[0].group, each.samples[0].trajectory)
    )


def cut(group: PrefixGroup, parts: int, cost: Cost) -> list[PrefixGroup]:
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
    found = [PrefixGroup(tuple(in_order(own)), len(prompt)) for prompt, own in members.items()]
    prompts_left = zip(*map(_prompt, left), strict=False)
    common = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, prompts_left))
    return found + ([PrefixGroup(tuple(in_order(left)), common)] if len(left) > 1 and common else alone(left))


def _prompt(sample: TrainingSample) -> tuple[int, ...]:
    """The tokens before the first sampled one, without the last token in any case."""
    end = sample.mask.index(True) if True in sample.mask else len(sample.ids) - 1
    return tuple(sample.ids[:end])
