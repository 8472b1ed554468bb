"""The selection of a step's episodes for training, and the penalty for their length. Pure functions on groups, after DAPO (arXiv 2503.14476).

Filters and dynamic sampling read rewards as the environment gave them; overlong shaping changes only the rewards that
advantages are computed from. Groups stay whole and keep their order, whatever ended first. Lengths count sampled
tokens, never what a tool wrote.

A filter is a function `(rewards, share)`: the rewards of each group's episodes, with None for an episode that takes no
part, and `algorithm.filter.share`. It returns the indices of the groups to keep, ascending.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent_train.algorithms.advantages import Rewards, has_spread, mean_of, reward_spread
from agent_train.algorithms.turn_rewards import fold_silent_turns
from agent_train.config.extensions import filters, reward_shaping
from agent_train.config.schema import AlgorithmConfig, OverlongConfig
from agent_train.data.players import apart, earned_by, had_without, part_of, player_of
from agentgym.core.trajectory import NO_LIMIT, Group, Trajectory, Turn


@dataclass(frozen=True)
class SelectionMetrics:
    """The share of a step that is trained on: a part of `StepMetrics`. Lengths are sampled tokens of an episode that did not fail."""

    rounds: int  # rollouts of the step
    groups: int  # groups that were played
    dropped_groups: int  # groups that are never trained on
    episodes: int  # episodes that are trained on; `length` is their mean length
    length: float
    dropped: int  # episodes that were played to an end and are not trained on; `dropped_length` is their mean length
    dropped_length: float
    masked: int  # dropped episodes that were truncated, in groups that are trained on
    short: int  # groups that dynamic sampling wanted and did not find
    penalty: float  # mean overlong penalty in the groups that are trained on, of each player's part of an episode
    carried: int = 0  # groups of the step before that are trained on
    left: int = 0  # groups that the next step is to train on


def more_groups(played: Sequence[Group], algorithm: AlgorithmConfig, wanted: int, rounds: int, carried: int = 0) -> int:
    """The number of further groups that dynamic sampling plays before the step trains; 0 to train with what there is.

    It is what the share kept so far makes likely to suffice for `wanted` groups with spread, beside those that are `carried` over, at
    least what is missing, at most `wanted`, and within `algorithm.filter.rounds` rollouts of `wanted` groups.
    """
    most = algorithm.filter.rounds * wanted
    kept = sum(has_spread(_rewards(group, algorithm.overlong)) for group in played)
    missing = wanted - carried - kept
    if rounds >= algorithm.filter.rounds or missing <= 0 or len(played) >= most:
        return 0
    likely = math.ceil(missing * len(played) / kept) if kept else wanted
    return min(max(missing, min(likely, wanted)), most - len(played))


def choose(
    played: Sequence[Group],
    algorithm: AlgorithmConfig,
    wanted: int,
    rounds: int = 1,
    carried: Sequence[Group] = (),
    oldest: float = math.inf,
) -> tuple[list[Group], SelectionMetrics]:
    """The groups that a step trains on, and counts of those left out.

    They are of those that the step before left, `carried`, and then of all that it played, in the order of their tasks. `oldest` is of
    its own `surplus`.
    """
    groups, left = _chosen(played, algorithm, wanted, carried, oldest)
    overlong, dynamic = algorithm.overlong, algorithm.filter.rounds > 1
    in_kept = [t for group in groups for t in group.trajectories if _took_part(t)]
    of_players = [t for group in apart(groups, algorithm.credit) for t in group.trajectories if _took_part(t)]
    trained = {id for group in groups for id in _trained(group, algorithm)}
    later = {id(group) for group in left}
    never = [group for group in (*carried, *played) if id(group) not in later]
    out = [t.sampled_tokens for g in never for t in g.trajectories if _took_part(t) and t.id not in trained]
    metrics = SelectionMetrics(
        rounds=rounds,
        groups=len(played),
        dropped_groups=len(never) - len(groups),
        episodes=len(trained),
        length=mean_of([t.sampled_tokens for t in in_kept if t.id in trained]),
        dropped=len(out),
        dropped_length=mean_of(out),
        masked=len(in_kept) - len(trained),
        short=max(wanted - len(groups), 0) if dynamic else 0,
        penalty=mean_of([penalty(t, overlong) for t in of_players]),
        carried=min(len(carried), len(groups)),
        left=len(left),
    )
    return groups, metrics


def _trained(group: Group, algorithm: AlgorithmConfig) -> set[str]:
    """The ids of the episodes that are in the loss; of those with players, where the part of one of them is."""
    found = set()
    for own in apart([group], algorithm.credit):
        in_loss = {t.id for t, trained_on in participants(own, algorithm.overlong) if trained_on}
        parts = zip(group.trajectories, own.trajectories, strict=True)
        found |= {whole.id for whole, part in parts if part.id in in_loss}
    return found


def surplus(
    played: Sequence[Group], algorithm: AlgorithmConfig, wanted: int, carried: Sequence[Group], oldest: float
) -> list[Group]:
    """Groups of dynamic sampling beyond those of `choose`, for the next step; all their tokens are of version `oldest` or newer.

    Their episodes get ids that are unique among steps. Without dynamic sampling there are none, and no filter is asked.
    """
    if algorithm.filter.rounds == 1:
        return []
    _, left = _chosen(played, algorithm, wanted, carried, oldest)
    return [Group(g.task_id, [replace(t, id=f"{t.id} before {oldest}") for t in g.trajectories]) for g in left]


def _chosen(
    played: Sequence[Group], algorithm: AlgorithmConfig, wanted: int, carried: Sequence[Group], oldest: float
) -> tuple[list[Group], list[Group]]:
    """The groups of the step, and those that the next one may train on."""
    chosen, rewards = algorithm.filter, [_rewards(group, algorithm.overlong) for group in played]
    kept = list(filters.load(chosen.name)(rewards, chosen.share))
    if kept != sorted(set(kept)) or not all(0 <= index < len(played) for index in kept):
        raise ValueError(f"filter {chosen.name!r} returns {kept}, not ascending indices of {len(played)} groups")
    useful = [*carried, *(played[index] for index in kept)]
    if chosen.rounds == 1:
        return useful, []
    return useful[:wanted], [group for group in useful[wanted:] if min(_versions(group), default=-1) >= oldest]


def participants(group: Group, overlong: OverlongConfig) -> list[tuple[Trajectory, bool]]:
    """The trajectories of a group that take part in advantages, with True for each that is in the loss.

    With `overlong.mask` a truncated one is not, since its quality is unknown; `overlong.baseline` says whether it takes
    part.
    """
    parts = zip(group.trajectories, _rewards(group, overlong), strict=True)
    return [(t, not (overlong.mask and is_truncated(t))) for t, reward in parts if reward is not None]


def is_truncated(trajectory: Trajectory) -> bool:
    """True if a limit of turns, tokens or time ended the episode, or its last answer is incomplete."""
    if trajectory.end not in NO_LIMIT:
        return not trajectory.failed
    last = trajectory.turns[-1].tokens if trajectory.turns else None
    return last is not None and last.finish_reason == "length"


def penalty(trajectory: Trajectory, overlong: OverlongConfig) -> float:
    """Overlong shaping's addition to a reward: 0 up to `length - buffer` sampled tokens, then linear to `-factor` at `length`."""
    if overlong.length is None:
        return 0.0
    over = trajectory.sampled_tokens - (overlong.length - overlong.buffer)
    return -overlong.factor * min(over / max(overlong.buffer, 1), 1.0) if over > 0 else 0.0


def turn_rewards(trajectory: Trajectory, algorithm: AlgorithmConfig) -> list[float]:
    """The rewards of the turns with sampled tokens that are trained on, after `algorithm.reward_shaping`; the last includes the overlong penalty.

    A summary is a turn of reward 0.
    """
    shaping = algorithm.reward_shaping
    given = [turn.reward for turn in trajectory.turns] if shaping is None else reward_shaping.load(shaping)(trajectory)
    shaped = [float(reward) for reward in given]
    if len(shaped) != len(trajectory.turns) or not all(math.isfinite(reward) for reward in shaped):
        turns = len(trajectory.turns)
        raise ValueError(f"reward shaping returns {shaped}, not a finite number for each of {turns} turns")
    left, calls = iter(shaped), trajectory.calls()
    of_calls = [next(left) if isinstance(call, Turn) else 0.0 for call in calls]
    rewards = fold_silent_turns(of_calls, [call.trained for call in calls])
    rewards[-1] += penalty(trajectory, algorithm.overlong)
    return rewards


def greedy_rewards(
    greedy: Sequence[Trajectory], groups: Sequence[Group], algorithm: AlgorithmConfig
) -> dict[str, float | None]:
    """Of each of the groups, which are `apart`: what the greedy episode of its task earned its player, None if that failed."""
    played, found = {t.task_id: t for t in greedy}, dict[str, float | None]()
    for group in groups:
        player = player_of(group)
        whole = played.get(group.task_id if player is None else group.task_id.removesuffix(f" {player}"))
        if whole is None:
            continue
        part = whole if player is None else part_of(whole, player, algorithm.credit)
        if whole.failed:
            found[group.task_id] = None
        elif part.trained_tokens:
            found[group.task_id] = math.fsum(turn_rewards(part, algorithm))
        elif player is None:
            found[group.task_id] = whole.reward
        else:  # the episode ended before the player's turn
            earned = math.fsum(earned_by(turn, player, algorithm.credit) for turn in whole.turns)
            found[group.task_id] = earned - had_without(whole, player, algorithm.credit)
    return found


def all_groups(rewards: Sequence[Rewards], share: float) -> list[int]:
    return list(range(len(rewards)))


def with_spread(rewards: Sequence[Rewards], share: float) -> list[int]:
    """Keep the groups whose rewards differ: the others teach nothing (DAPO, arXiv 2503.14476)."""
    return [index for index, group in enumerate(rewards) if has_spread(group)]


def uncertain(rewards: Sequence[Rewards], share: float) -> list[int]:
    """StarPO-S (RAGEN, arXiv 2504.20073): keep the share of the groups, rounded up, whose rewards differ most; of equal ones the earlier.

    The share may include groups without spread: a critic learns from them.
    """
    spreads = [reward_spread(group) for group in rewards]
    # 0.07 of 100 groups is 7.000000000000001 in floating point; it means 7.
    return sorted(_widest_first(spreads)[: math.ceil(share * len(rewards) - 1e-9)])


def nucleus(rewards: Sequence[Rewards], share: float) -> list[int]:
    """RAGEN's nucleus filter: the fewest groups, widest first, that hold `share` of the step's whole reward spread, none without spread."""
    spreads = [reward_spread(group) for group in rewards]
    goal = share * math.fsum(spreads) * (1 - 1e-9)
    kept: list[int] = []
    for index in _widest_first(spreads):
        if not spreads[index] or (kept and math.fsum(spreads[i] for i in kept) >= goal):
            break
        kept.append(index)
    return sorted(kept)


def _widest_first(spreads: Sequence[float]) -> list[int]:
    return sorted(range(len(spreads)), key=lambda index: -spreads[index])


def _versions(group: Group) -> list[int]:
    calls = (call for trajectory in group.trajectories for call in trajectory.calls() if call.tokens)
    return [version for call in calls if call.tokens for version in call.tokens.versions]


def _took_part(trajectory: Trajectory) -> bool:
    return not trajectory.failed and trajectory.trained_tokens > 0


def _rewards(group: Group, overlong: OverlongConfig) -> list[float | None]:
    """As the environment gave them; None for those that are in no baseline."""
    out = overlong.mask and not overlong.baseline
    return [float(t.reward) if _took_part(t) and not (out and is_truncated(t)) else None for t in group.trajectories]
