"""Rows of one group that begin with the same prompt, as trees: the prompt once, then what follows it in each row.

A tree of rows holds the same numbers as the rows by themselves, since each token still sees its own row only. It holds fewer tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agent_train.data.balance import Cost, balance
from agent_train.data.samples import TrainingSample


@dataclass(frozen=True)
class PrefixGroup:
    """Rows that share their first `prefix` tokens, none of them sampled; a row by itself is a tree of one with prefix 0.

    Each row has at least one more token, and as long as nothing is cut off, the longer rows come first.
    """

    rows: tuple[TrainingSample, ...]
    prefix: int = 0

    @property
    def tokens(self) -> int:
        """The number of tokens with the prefix counted once."""
        return sum(len(row.ids) for row in self.rows) - self.prefix * (len(self.rows) - 1)

    def cost(self, cost: Cost) -> int:
        """Of the whole tree."""
        branches = sum(cost.of(len(row.ids) - self.prefix, row.sampled, self.prefix) for row in self.rows)
        return branches + cost.of(self.prefix, 0)


def in_order(rows: Iterable[TrainingSample]) -> list[TrainingSample]:
    """The longest first, and rows of equal length in an order that does not depend on the one they came in."""
    return sorted(rows, key=lambda row: (-len(row.ids), row.group, row.trajectory, row.ids))


def alone(rows: Iterable[TrainingSample]) -> list[PrefixGroup]:
    """Each row by itself."""
    return [PrefixGroup((row,)) for row in in_order(rows)]


def trees_of(rows: Iterable[TrainingSample]) -> list[PrefixGroup]:
    """The trees of rows whose groups have names; rows that share nothing stay by themselves.

    Rows with the very same prompt, which is what comes before the first sampled token, make a tree. Other rows of the group join
    the longest such prompt that their own begins with (later rows of a trajectory do). What is left of the group becomes one
    tree of what its prompts have in common.
    """
    groups: dict[str, list[TrainingSample]] = {}
    found: list[PrefixGroup] = []
    for row in in_order(rows):
        if row.group:
            groups.setdefault(row.group, []).append(row)
        else:
            found.append(PrefixGroup((row,)))
    for own in groups.values():
        found += _trees_of_group(own)
    return sorted(found, key=lambda tree: (-len(tree.rows[0].ids), tree.rows[0].group, tree.rows[0].trajectory))


def cut(tree: PrefixGroup, parts: int, cost: Cost) -> list[PrefixGroup]:
    """The tree as `parts` trees with fewer rows, of nearly equal cost; each holds the prefix."""
    costs = [cost.of(len(row.ids) - tree.prefix, row.sampled, tree.prefix) for row in tree.rows]
    dealt = [tuple(tree.rows[place] for place in own) for own in balance(costs, parts)]
    return [PrefixGroup(rows, tree.prefix if len(rows) > 1 else 0) for rows in dealt if rows]


def _trees_of_group(rows: Sequence[TrainingSample]) -> list[PrefixGroup]:
    prompts: dict[tuple[int, ...], list[TrainingSample]] = {}
    for row in rows:
        prompts.setdefault(_prompt(row), []).append(row)
    # The longest first: a row joins the first that its prompt begins with.
    shared = sorted((prompt for prompt, own in prompts.items() if prompt and len(own) > 1), key=lambda p: (-len(p), p))
    members: dict[tuple[int, ...], list[TrainingSample]] = {prompt: prompts.pop(prompt) for prompt in shared}
    left: list[TrainingSample] = []
    for prompt, own in prompts.items():
        home = next((known for known in shared if prompt[: len(known)] == known), None)
        (left if home is None else members[home]).extend(own)
    trees = [PrefixGroup(tuple(in_order(own)), len(prompt)) for prompt, own in members.items()]
    common = _common([_prompt(row) for row in left])
    return trees + ([PrefixGroup(tuple(in_order(left)), common)] if len(left) > 1 and common else alone(left))


def _prompt(row: TrainingSample) -> tuple[int, ...]:
    """The tokens before the first sampled one, without the last token in any case."""
    end = row.mask.index(True) if True in row.mask else len(row.ids) - 1
    return tuple(row.ids[:end])


def _common(prompts: Sequence[tuple[int, ...]]) -> int:
    """The number of first tokens that all have in common."""
    if not prompts:
        return 0
    # All lie between the two in the order of tuples, and so agree as far as these do.
    least, most = min(prompts), max(prompts)
    differing = (place for place, (a, b) in enumerate(zip(least, most, strict=False)) if a != b)
    return next(differing, min(len(least), len(most)))
