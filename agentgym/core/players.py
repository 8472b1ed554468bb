"""Environments with several players, who share an episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentgym.core.env import Env, Opening, Step
from agentgym.core.messages import user
from agentgym.core.trajectory import REWARDS, TURN_OF


class PlayersEnv(Env):
    """Base class of environments with named players, who act one at a time. In simultaneous rounds, tell nothing until all have acted.

    Gymnasium sees one agent that plays all sides: `step` takes the reply of the player whose turn it is, the observation is for
    the next player, and the reward is the first player's. `run_episode` keeps a conversation for each player. A subclass ends `reset` by `opening`, and `step` by `pass_to` or `end`.

    Attributes:
        players: their names. The first one's reward is the episode's.
        turn_of: the player who acts next.
    """

    players: tuple[str, ...] = ()
    turn_of: str = ""

    def _begun(self) -> Opening:
        self._told: dict[str, list[str]] = {player: [] for player in self.players}
        return super()._begun()

    def tell(self, text: str, *players: str) -> None:
        """Show a text to players, or to all if none is named, before they act next. "?" replaces characters that UTF-8 lacks."""
        readable = text.encode("utf-8", "replace").decode("utf-8")  # the words of a player are any text
        for player in players or self.players:
            self._told[player].append(readable)

    def opening(self, turn_of: str, **info: Any) -> Opening:
        """End `reset`: returns the observation of the first player to act."""
        self.turn_of = turn_of
        return [user(self._heard(turn_of))], {**info, TURN_OF: turn_of}

    def pass_to(self, turn_of: str, rewards: Mapping[str, float] | float = 0.0, **info: Any) -> Step:
        """End a step and go on with another player; returns that player's observation. `rewards` are by player, or one for all."""
        self.turn_of = turn_of
        return self._outcome(self._heard(turn_of), rewards, False, {**info, TURN_OF: turn_of})

    def end(self, rewards: Mapping[str, float] | float, **info: Any) -> Step:
        """End the episode; returns everything that players were told and have not seen."""
        left = dict.fromkeys(text for texts in self._told.values() for text in texts)
        return self._outcome("\n".join(left), rewards, True, info)

    def _heard(self, player: str) -> str:
        texts, self._told[player] = self._told[player], []
        return "\n".join(texts)

    def _outcome(self, text: str, rewards: Mapping[str, float] | float, terminated: bool, info: dict[str, Any]) -> Step:
        if not isinstance(rewards, Mapping):
            rewards = dict.fromkeys(self.players, rewards)
        if strangers := rewards.keys() - set(self.players):
            raise ValueError(f"{type(self).__name__}: rewards of {sorted(strangers)}, who are no players")
        shares = {player: float(rewards.get(player, 0.0)) for player in self.players}
        return self.outcome(text, shares[self.players[0]], terminated, **info, **{REWARDS: shares})
