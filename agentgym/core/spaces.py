"""The Gymnasium spaces of chat: observations are lists of messages, actions are text or an assistant message."""

from typing import Any, TypeVar

import gymnasium
import numpy as np

from agentgym.core.messages import Action, Observation, problem_of, user

T = TypeVar("T")
_SAMPLE_ALPHABET = "abcdefghijklmnopqrstuvwxyz 0123456789.,!?<>{}\n\tàßñжשع漢字かな🙂"


def _random_text(rng: np.random.Generator) -> str:
    letters = list(_SAMPLE_ALPHABET)
    return "".join(letters[i] for i in rng.integers(0, len(letters), size=int(rng.integers(0, 40))))


class _TextSpace(gymnasium.Space[T]):
    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class MessagesSpace(_TextSpace[Observation]):
    """Observations: a list of chat messages with any unicode text. Samples are lists of user messages."""

    def sample(self, mask: Any = None, probability: Any = None) -> Observation:
        return [user(_random_text(self.np_random)) for _ in range(int(self.np_random.integers(1, 3)))]

    def contains(self, x: object) -> bool:
        return isinstance(x, list) and all(problem_of(m) is None for m in x)


class ActionSpace(_TextSpace[Action]):
    """Actions: any unicode text, or an assistant message. Samples are text."""

    def sample(self, mask: Any = None, probability: Any = None) -> Action:
        return _random_text(self.np_random)

    def contains(self, x: object) -> bool:
        return isinstance(x, str) or (isinstance(x, dict) and problem_of(x) is None and x["role"] == "assistant")
