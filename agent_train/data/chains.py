"""The rows of a step, those of each trajectory joined in order, as the formulas want them.

A return, a discount or a process reward runs from one row of a trajectory into the next, so its rows are one chain. What is
computed over the tokens of all chains is put back on the rows.

Legend: T tokens of all rows of the step, S chains, K turns with sampled tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from agent_train.algorithms.selection import Outcome
from agent_train.algorithms.turn_rewards import turn_segments
from agent_train.data.samples import TrainingSample
from agentgym.core.trajectory import Group, Trajectory

X = TypeVar("X")


@dataclass(frozen=True)
class Chain:
    """One trajectory that takes part.

    Attributes:
        trajectory: what was played.
        rows: its rows, in the order of its turns.
        rewards: one for each of its turns with sampled tokens.
        trained: whether it is in the loss. One that is not still counts in its group's baseline.
    """

    trajectory: Trajectory
    rows: list[TrainingSample]
    rewards: tuple[float, ...]
    trained: bool


@dataclass(frozen=True)
class Chains:
    """All trajectories of a step that take part. `groups` holds the numbers of the chains of each group."""

    chains: list[Chain]
    groups: list[list[int]]

    @classmethod
    def of(cls, groups: Sequence[Group], rows: Iterable[TrainingSample], outcomes: Mapping[str, Outcome]) -> Chains:
        """Find the rows of every trajectory that takes part, by its id.

        Raises:
            ValueError: a trajectory that takes part has no rows or not as many turns as its rows; or rows are left over.
        """
        rows_of: dict[str, list[TrainingSample]] = {}
        for row in rows:
            rows_of.setdefault(row.trajectory, []).append(row)
        chains: list[Chain] = []
        numbers: list[list[int]] = []
        for group in groups:
            numbers.append([])
            for trajectory in group.trajectories:
                outcome = outcomes[trajectory.id]
                if outcome.rewards is None:
                    continue
                own = rows_of.pop(trajectory.id, [])
                turns = sum(len(row.turn_ends) for row in own)
                if turns != len(outcome.rewards):
                    raise ValueError(
                        f"{trajectory.id}: its rows have {turns} turns, its rewards {len(outcome.rewards)}"
                    )
                numbers[-1].append(len(chains))
                chains.append(Chain(trajectory, own, outcome.rewards, outcome.trained))
        if rows_of:
            raise ValueError(f"rows of {sorted(rows_of)[0]!r}, which takes no part in this step")
        return cls(chains, numbers)

    @cached_property
    def rows(self) -> list[TrainingSample]:
        """The rows of chain 0, then those of chain 1, and so on."""
        return [row for one in self.chains for row in one.rows]

    @cached_property
    def mask_T(self) -> Tensor:
        """True on sampled tokens."""
        return joined(self.rows, "mask").bool()

    @cached_property
    def segment_T(self) -> Tensor:
        """The chain of each token."""
        sizes = torch.tensor([sum(len(row.ids) for row in one.rows) for one in self.chains], dtype=torch.int64)
        return torch.arange(len(self.chains)).repeat_interleave(sizes)

    @cached_property
    def turn_T(self) -> Tensor:
        """The turn of each token, numbered over all chains."""
        return turn_segments([len(row.ids) for row in self.rows], [row.turn_ends for row in self.rows])

    @cached_property
    def trained_T(self) -> Tensor:
        """True on the sampled tokens that are in the loss."""
        return self.mask_T & torch.tensor([one.trained for one in self.chains])[self.segment_T]

    @property
    def lengths(self) -> list[int]:
        """Sampled tokens of each chain."""
        return [sum(row.sampled for row in one.rows) for one in self.chains]

    def grouped(self, values: Sequence[X]) -> list[list[X]]:
        """A value for each chain, by group."""
        return [[values[number] for number in numbers] for numbers in self.groups]

    def flat(self, grouped: Sequence[Sequence[X]]) -> list[X]:
        """The reverse of `grouped`."""
        found = {
            number: value
            for numbers, values in zip(self.groups, grouped, strict=True)
            for number, value in zip(numbers, values, strict=True)
        }
        return [found[number] for number in range(len(self.chains))]

    def on_tokens(self, values_S: Sequence[float]) -> Tensor:
        """A number for each chain, on its sampled tokens; fp64."""
        return self._spread(torch.tensor(values_S, dtype=torch.float64), self.segment_T)

    def on_turns(self, values: Sequence[Sequence[float]]) -> Tensor:
        """For each chain a number for each of its turns, on the sampled tokens of the turn; fp64."""
        return self._spread(torch.tensor(list(chain.from_iterable(values)), dtype=torch.float64), self.turn_T)

    def split_turns(self, values_K: Sequence[float]) -> list[list[float]]:
        """The numbers of all turns, by chain."""
        rest = iter(values_K)
        return [[next(rest) for _ in one.rewards] for one in self.chains]

    def put_back(self, name: str, values_T: Tensor) -> None:
        """Set a list of every row from the numbers of all tokens."""
        for row, part in zip(self.rows, values_T.split([len(row.ids) for row in self.rows]), strict=True):
            setattr(row, name, part.tolist())

    def _spread(self, values: Tensor, index_T: Tensor) -> Tensor:
        return torch.where(self.mask_T, values[index_T], 0.0)


def joined(rows: Sequence[TrainingSample], name: str) -> Tensor:
    """One of the lists of every row, one after another; fp64.

    Raises:
        ValueError: a row has not as many of them as tokens.
    """
    for row in rows:
        if len(getattr(row, name)) != len(row.ids):
            raise ValueError(
                f"row of trajectory {row.trajectory!r}: {len(row.ids)} tokens, but {len(getattr(row, name))} {name}"
            )
    return torch.tensor(list(chain.from_iterable(getattr(row, name) for row in rows)), dtype=torch.float64)
