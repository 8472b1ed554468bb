"""Splits episodes of several players into an episode for each, of which samples and advantages are made.

A group of episodes becomes a group for each player, whose baseline is of that player alone. What a player earns between two turns
of its own counts with the first of them; before its first turn, with that.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from agent_train.data.samples import TrainingSample
from agentgym.core.trajectory import Group, Trajectory, Turn, shares

WITHOUT = "without"
"""In the last info: the reward that the episode would have had without a player, by name."""


def apart(groups: Sequence[Group], credit: str = "own") -> list[Group]:
    """The groups, those with players as one for each player. `credit` is `algorithm.credit`."""
    found = []
    for group in groups:
        players = dict.fromkeys(turn.player for t in group.trajectories for turn in t.turns if turn.player is not None)
        found += [
            Group(f"{group.task_id} {player}", [part_of(t, player, credit) for t in group.trajectories])
            for player in players
        ] or [group]
    return found


def by_policy(
    groups: Sequence[Group], samples: Sequence[TrainingSample], own: Collection[str]
) -> list[tuple[str | None, list[Group], list[TrainingSample]]]:
    """Groups that are `apart` and their samples by who learns from them: the run's policy (None), then each player of `own`."""

    def learner_of(player: str | None) -> str | None:
        return player if player in own else None

    groups_of: dict[str | None, list[Group]] = {name: [] for name in (None, *own)}
    samples_of: dict[str | None, list[TrainingSample]] = {name: [] for name in groups_of}
    for group in groups:
        groups_of[learner_of(player_of(group))].append(group)
    for sample in samples:
        samples_of[learner_of(sample.player)].append(sample)
    return [(name, groups_of[name], samples_of[name]) for name in groups_of]


def parts(trajectory: Trajectory) -> list[Trajectory]:
    """The episode of each player; the episode itself where it has none."""
    return [group.trajectories[0] for group in apart([Group(trajectory.task_id, [trajectory])])]


def part_of(trajectory: Trajectory, player: str, credit: str) -> Trajectory:
    """The episode as a player saw it, with what it earned: by `credit` its "own" rewards, the episode's ("team"), or the "difference" it made.

    The last is less what the episode would have earned without the player (Wolpert and Tumer 2001, 10.1142/S0219525901000188).
    """
    turns: list[Turn] = []
    metadata, early = dict(trajectory.metadata), 0.0
    state = metadata.pop("state", None)
    places = []  # of each turn of the episode: the player's turns before it
    for turn in trajectory.turns:
        places.append(len(turns))
        if turn.player == player:
            info = {name: value for name, value in turn.info.items() if name != "state"}
            if state is not None:  # the state before a turn is in the info before it
                (turns[-1].info if turns else metadata)["state"] = state
            turns.append(replace(turn, info=info, reward=0.0 if turns else early))
        state = turn.info.get("state")
        earned = earned_by(turn, player, credit)
        if turns:
            turns[-1].reward += earned
        else:
            early += earned
    if turns:
        turns[-1].reward -= had_without(trajectory, player, credit)
    own = [replace(s, turn=[*places, len(turns)][s.turn]) for s in trajectory.summaries if s.player == player]
    part = replace(trajectory, turns=turns, summaries=own, metadata=metadata)
    return replace(part, id=f"{part.id} {player}", task_id=f"{part.task_id} {player}")


def earned_by(turn: Turn, player: str, credit: str) -> float:
    """A player's reward for a step: its own, or with another `credit` the shared one."""
    return shares(turn.reward, turn.info, [player])[player] if credit == "own" else turn.reward


def had_without(trajectory: Trajectory, player: str, credit: str) -> float:
    """The episode's reward without the player if the credit is the difference to it; else 0."""
    last = trajectory.turns[-1].info if trajectory.turns and credit == "difference" else {}
    without: Mapping[str, float] = last.get(WITHOUT, {})
    return without.get(player, 0.0)


def player_of(group: Group) -> str | None:
    """The player of a group that is `apart`."""
    return next((turn.player for t in group.trajectories for turn in t.turns), None)
