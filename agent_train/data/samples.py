"""A trajectory as training samples: token ids with their masks, log-probabilities and advantages.

Legend: T tokens of one sample. Every list of T is aligned to the token itself: `mask[t]`, `logprobs[t]` and
`advantages[t]` belong to `ids[t]`, which the model predicts from position t-1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from agentgym.core.trajectory import Tokens, Trajectory


@dataclass(frozen=True)
class TrainingSample:
    """One sequence to train on: turns of a trajectory whose prompts extend one another token for token.

    A sample never changes. Scores and advantages are added by `dataclasses.replace`, which keeps the id.
    """

    ids: list[int]  # T token ids, exactly as the engine was given and returned them
    mask: list[bool]  # T booleans, True where the policy sampled the id. Never True at position 0.
    logprobs: list[float]  # T behaviour log-probabilities of the sampled ids, 0.0 elsewhere
    id: str = ""  # unique among the samples of a step
    versions: list[int] = field(default_factory=list)  # T weight versions of the sampled ids, -1 elsewhere
    turn_ends: list[int] = field(default_factory=list)  # positions just past the last sampled token of each turn
    rewards: list[float] = field(default_factory=list)  # reward of each turn
    in_loss: bool = True  # whether it is trained on; if not, it still counts in the baseline of its group
    trajectory: str = ""  # id of the trajectory; samples of the same one are in the order of its turns
    group: str = ""  # id of its group
    player: str | None = None  # whose turns they are, in an environment with several players
    temperature: float = 1.0  # the sampling temperature, which divides the trainer's logits too
    weight: float = 0.0  # weight of each sampled token in the loss of its optimizer step, from `packing.weighted`
    # T advantages of the sampled ids, 0.0 elsewhere. Empty until computed, as are the lists below.
    advantages: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)  # T log-probabilities under the reference policy
    values: list[float] = field(default_factory=list)  # T values of the critic, before the update
    targets: list[float] = field(default_factory=list)  # T targets of the critic
    prm: list[float] = field(default_factory=list)  # T log-probabilities of the sampled ids under PRIME's reward model
    teacher: list[float] = field(default_factory=list)  # T log-probabilities of the sampled ids under the teacher

    @property
    def sampled(self) -> int:
        return sum(self.mask)

    def spread(self, number: float) -> list[float]:
        """The number on each sampled token, 0.0 elsewhere."""
        return [number if sampled else 0.0 for sampled in self.mask]


def samples_of(
    trajectory: Trajectory, temperature: float = 1.0, rewards: Sequence[float] | None = None, in_loss: bool = True
) -> list[TrainingSample]:
    """Split a trajectory into samples by the prefix rule.

    A turn extends the last sample while its prompt begins with all of the sample's ids, token for token; otherwise it begins the
    next sample. A summary is such a turn, and the turn after it begins a sample. The calls of an agent that plays by itself are a
    tree: a call extends the sample whose ids are the longest beginning of its prompt, and of branches each repeats their common
    beginning, which is not trained there. What is unusable of a turn is read and not trained. `rewards` are those of each turn
    with tokens that are trained; other turns add nothing. Raises ValueError for tokens that do not fit together, or too few or
    many rewards.
    """
    is_tree = "agent" in trajectory.metadata
    found: list[TrainingSample] = []
    left = iter(rewards or [])
    for number, turn in enumerate(trajectory.calls()):
        tokens = turn.tokens
        if tokens is None or not tokens.completion_ids:
            continue
        _check(tokens, f"trajectory {trajectory.id}, turn {number}")
        open_ends = found if is_tree else found[-1:]  # advantages of turns need their order
        fitting = [sample for sample in open_ends if tokens.prompt_ids[: len(sample.ids)] == sample.ids]
        if not fitting:
            empty = TrainingSample([], [], [], f"{trajectory.id}#{len(found)}", trajectory=trajectory.id)
            begun = replace(empty, group=trajectory.task_id, temperature=temperature, in_loss=in_loss)
            found.append(replace(begun, player=turn.player))
        sample = max(fitting, key=lambda each: len(each.ids), default=found[-1])
        bridge, sampled, is_trained = tokens.prompt_ids[len(sample.ids) :], tokens.completion_ids, turn.trained > 0
        sample.ids.extend([*bridge, *sampled])
        sample.mask.extend([False] * len(bridge) + [is_trained] * len(sampled))
        sample.logprobs.extend([0.0] * len(bridge) + (tokens.logprobs if is_trained else [0.0] * len(sampled)))
        sample.versions.extend([-1] * len(bridge) + (tokens.versions if is_trained else [-1] * len(sampled)))
        if is_trained:
            sample.turn_ends.append(len(sample.ids))
            sample.rewards.append(next(left, 0.0))
    turns = sum(len(sample.turn_ends) for sample in found)
    if rewards is not None and len(rewards) != turns:
        raise ValueError(f"trajectory {trajectory.id}: {turns} turns with sampled tokens and {len(rewards)} rewards")
    return [sample for sample in found if sample.turn_ends]


def _check(tokens: Tokens, where: str) -> None:
    sizes = (len(tokens.completion_ids), len(tokens.logprobs), len(tokens.versions))
    if len(set(sizes)) > 1:
        raise ValueError(
            f"{where}: {sizes[0]} sampled ids, {sizes[1]} log-probabilities and {sizes[2]} versions; each id needs one of each"
        )
    if not tokens.prompt_ids:
        raise ValueError(f"{where}: the prompt is empty, so nothing predicts the first sampled id")
