"""The tokens and rewards that an advantage reads: the samples of one training step, by trajectory and group.

Legend: T tokens of all samples of the step, S trajectories, K turns with sampled tokens.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from agent_train.algorithms.kl import kl_estimate
from agent_train.algorithms.losses import segment_sums
from agent_train.algorithms.turn_rewards import place, turn_segments
from agent_train.config.schema import AlgorithmConfig
from agent_train.data.samples import TrainingSample
from agentgym.core.trajectory import Group


class AdvantageInputs:
    """The trajectories of a step that take part in advantages, by group, and their samples, in the order of the groups.

    Trajectories without samples take no part; the samples of one are in the order of its turns. `greedy` is, for remax,
    the reward of each task's greedy episode by the task's id, None where it failed; `teacher_coef`, for distill, the
    weight of a nat of difference; `kl_coef` the present coefficient of the KL, read where `algorithm.kl.place` is
    reward.
    """

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        groups: Sequence[Group],
        samples: Sequence[TrainingSample],
        greedy: Mapping[str, float | None] | None = None,
        teacher_coef: float = 1.0,
        kl_coef: float = 0.0,
    ):
        of_trajectory: dict[str, list[TrainingSample]] = {}
        for sample in samples:
            if len(sample.rewards) != len(sample.turn_ends):
                raise ValueError(
                    f"sample {sample.id!r}: {len(sample.turn_ends)} turns and {len(sample.rewards)} rewards"
                )
            of_trajectory.setdefault(sample.trajectory, []).append(sample)
        self.algorithm, self.settings = algorithm, algorithm.advantage
        self.groups = [[t for t in group.trajectories if t.id in of_trajectory] for group in groups]
        self.trajectories = list(chain.from_iterable(self.groups))
        self.samples = [sample for t in self.trajectories for sample in of_trajectory.pop(t.id)]
        if of_trajectory:
            raise ValueError(f"samples of {sorted(of_trajectory)[0]!r}, which takes no part in this step")
        self.greedy, self.teacher_coef, self.kl_coef = greedy or {}, teacher_coef, kl_coef

    @property
    def std(self) -> str:
        """The deviation of formulas with a single one: "sample", "population" or "none"."""
        return "none" if self.settings.std_level == "none" else self.settings.std

    @cached_property
    def turn_rewards(self) -> list[list[list[float]]]:
        """The rewards of each trajectory's turns, by group, less the KL of their tokens where the reward includes it."""
        rewards_K = self._rewards_K
        if self._kl_T is not None:
            kl_K = segment_sums(self._kl_T, self.mask_T, self.turn_T, len(rewards_K))
            rewards_K = rewards_K.float() - self.kl_coef * kl_K
        rest = iter(rewards_K.tolist())
        turns = Counter(sample.trajectory for sample in self.samples for _ in sample.rewards)
        return [[[next(rest) for _ in range(turns[t.id])] for t in group] for group in self.groups]

    @property
    def rewards(self) -> list[list[float]]:
        return [[math.fsum(turns) for turns in group] for group in self.turn_rewards]

    @cached_property
    def rewards_T(self) -> Tensor:
        """The reward of each turn on its last sampled token, with the KL as in `turn_rewards`."""
        rewards_T = place(self._rewards_K, self.mask_T, self.turn_T)
        return rewards_T if self._kl_T is None else rewards_T - self.kl_coef * self._kl_T

    @property
    def lengths(self) -> list[list[int]]:
        lengths: Counter[str] = Counter()
        for sample in self.samples:
            lengths[sample.trajectory] += sample.sampled
        return [[lengths[trajectory.id] for trajectory in group] for group in self.groups]

    @property
    def in_loss(self) -> list[list[bool]]:
        """True if each trajectory is in the loss, by group. One that is not still counts in its group's baseline."""
        in_loss = {sample.trajectory: sample.in_loss for sample in self.samples}
        return [[in_loss[trajectory.id] for trajectory in group] for group in self.groups]

    @cached_property
    def mask_T(self) -> Tensor:
        return self.tokens("mask").bool()

    @cached_property
    def segment_T(self) -> Tensor:
        """The number of each token's trajectory, int64."""
        numbers = {trajectory.id: number for number, trajectory in enumerate(self.trajectories)}
        segments = torch.tensor([numbers[sample.trajectory] for sample in self.samples], dtype=torch.int64)
        return segments.repeat_interleave(torch.tensor([len(sample.ids) for sample in self.samples]))

    @cached_property
    def turn_T(self) -> Tensor:
        """The number of each token's turn, over all trajectories, int64."""
        return turn_segments(
            [len(sample.ids) for sample in self.samples], [sample.turn_ends for sample in self.samples]
        )

    @cached_property
    def trained_T(self) -> Tensor:
        """True on the sampled tokens that are in the loss."""
        return self.mask_T & torch.tensor(list(chain.from_iterable(self.in_loss)))[self.segment_T]

    def tokens(self, name: str) -> Tensor:
        """One of the lists of every sample, such as "values", on all tokens; fp64."""
        lists = [getattr(sample, name) for sample in self.samples]
        for sample, own in zip(self.samples, lists, strict=True):
            if len(own) != len(sample.ids):
                raise ValueError(
                    f"advantage {self.settings.name!r}: sample {sample.id!r} has {len(sample.ids)} tokens, but {len(own)} {name}"
                )
        return torch.tensor(list(chain.from_iterable(lists)), dtype=torch.float64)

    def on_tokens(self, values: Sequence[Sequence[float]]) -> Tensor:
        """A number for each trajectory, by group, on all of its sampled tokens; fp64."""
        return self._spread(list(chain.from_iterable(values)), self.segment_T)

    def on_turns(self, values: Sequence[Sequence[Sequence[float]]]) -> Tensor:
        """Numbers for the turns of each trajectory, by group, on the sampled tokens of each turn; fp64."""
        return self._spread([own for group in values for turns in group for own in turns], self.turn_T)

    def by_sample(self, values_T: Tensor) -> dict[str, list[float]]:
        """The numbers of all tokens as a list for each sample, by its id."""
        parts = values_T.split([len(sample.ids) for sample in self.samples])
        return {sample.id: part.tolist() for sample, part in zip(self.samples, parts, strict=True)}

    @cached_property
    def _kl_T(self) -> Tensor | None:
        """The KL of each token that the reward includes (InstructGPT, arXiv 2203.02155), before its coefficient; None for none."""
        if self.algorithm.kl.place != "reward" or not self.kl_coef:
            return None
        return kl_estimate(self.algorithm.kl.value, self.tokens("logprobs"), self.tokens("reference"), self.mask_T)

    @property
    def _rewards_K(self) -> Tensor:
        return torch.tensor([reward for sample in self.samples for reward in sample.rewards], dtype=torch.float64)

    def _spread(self, values: Sequence[float], index_T: Tensor) -> Tensor:
        return torch.where(self.mask_T, torch.tensor(values, dtype=torch.float64)[index_T], 0.0)
