"""Rows: what a trajectory becomes when it is trained on.

Legend: T tokens of one row or one packed micro-batch. Everything is aligned to the token itself: `mask[t]`,
`logprobs[t]` and the advantage at t speak of `ids[t]`, which the model predicts from position t-1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agentgym.core.trajectory import Tokens, Trajectory


@dataclass
class TrainingSample:
    """One sequence to train on: the turns of a trajectory whose prompts extend one another token for token.

    Attributes:
        ids: T token ids, exactly as the engine was given and returned them.
        mask: T booleans, True where the policy sampled the id. Never True at position 0.
        logprobs: T behaviour log-probabilities of the sampled ids, 0.0 elsewhere.
        versions: T weight versions of the sampled ids, -1 elsewhere.
        turn_ends: positions just past the last sampled token of each turn.
        trajectory: id of the trajectory; rows of the same one lie in the order of its turns.
        group: id of its group.
        temperature: the sampling temperature, which divides the trainer's logits too.
        weight: what each of its sampled tokens weighs in the loss of its optimizer step; `packing.weigh` sets it.
        advantages: T advantages of the sampled ids, 0.0 elsewhere.
        reference: T log-probabilities of the sampled ids under the reference policy. This and what follows is empty where nothing
            asks for it.
        values: T values that the critic gave before the update.
        targets: T values that the critic learns.
    """

    ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    versions: list[int] = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)
    trajectory: str = ""
    group: str = ""
    temperature: float = 1.0
    weight: float = 0.0
    advantages: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    targets: list[float] = field(default_factory=list)

    @property
    def sampled(self) -> int:
        """How many of its tokens were sampled."""
        return sum(self.mask)

    def spread(self, number: float) -> list[float]:
        """The number on each sampled token, 0.0 elsewhere."""
        return [number if sampled else 0.0 for sampled in self.mask]


def rows_of(trajectory: Trajectory, temperature: float = 1.0) -> list[TrainingSample]:
    """The rows of a trajectory, by the prefix rule.

    A turn extends the row while its prompt begins with all of the row's ids, token for token; otherwise the next row
    begins with that prompt. Turns without sampled tokens add nothing; a trajectory of such turns gives no rows.

    Args:
        trajectory: turns with `tokens`; turns without (another policy's) are left out.
        temperature: the sampling temperature.

    Raises:
        ValueError: a turn's ids, log-probabilities and versions differ in number, or its prompt is empty.
    """
    rows: list[TrainingSample] = []
    for number, turn in enumerate(trajectory.turns):
        if turn.tokens is None or not turn.tokens.completion_ids:
            continue
        _check_tokens(turn.tokens, f"trajectory {trajectory.id}, turn {number}")
        if not rows or turn.tokens.prompt_ids[: len(rows[-1].ids)] != rows[-1].ids:
            rows.append(
                TrainingSample([], [], [], trajectory=trajectory.id, group=trajectory.task_id, temperature=temperature)
            )
        _extend(rows[-1], turn.tokens)
    return rows


def _extend(row: TrainingSample, tokens: Tokens) -> None:
    """Append what a prompt has beyond the row, unmasked, and the sampled ids, masked."""
    bridge, sampled = tokens.prompt_ids[len(row.ids) :], tokens.completion_ids
    row.ids += [*bridge, *sampled]
    row.mask += [False] * len(bridge) + [True] * len(sampled)
    row.logprobs += [0.0] * len(bridge) + tokens.logprobs
    row.versions += [-1] * len(bridge) + tokens.versions
    row.turn_ends.append(len(row.ids))


def _check_tokens(tokens: Tokens, where: str) -> None:
    sizes = (len(tokens.completion_ids), len(tokens.logprobs), len(tokens.versions))
    if len(set(sizes)) > 1:
        raise ValueError(
            f"{where}: {sizes[0]} sampled ids, {sizes[1]} log-probabilities and {sizes[2]} versions; each id needs one of each"
        )
    if not tokens.prompt_ids:
        raise ValueError(f"{where}: the prompt is empty, so nothing predicts the first sampled id")
