"""Trajectories: the turns of an episode, their tokens, and how it ended. Stored as JSON Lines."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentgym.core import agent_failure
from agentgym.core.messages import Message
from agentgym.storage.jsonl import line_of, mend

TOO_LONG = "the first request is longer than the model's context"
"""The error of an episode whose policy could not read even the opening."""


@dataclass
class Tokens:
    """The exact tokens of one turn, from a policy that works on token ids.

    Attributes:
        prompt_ids: everything the engine was given, P ids.
        completion_ids: what the engine sampled, C ids, a sampled stop token included.
        logprobs: C log-probabilities, in nats, of the sampled ids under the raw logits at the sampling temperature.
        versions: the weight version that sampled each id, C integers.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str = "stop"


@dataclass
class Turn:
    """One exchange: the messages since the previous turn, the reply (see `Reply`), and the environment's answer to it."""

    observation: list[Message]
    reply: Message
    reward: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)
    tokens: Tokens | None = None
    act_seconds: float = 0.0
    step_seconds: float = 0.0
    usage: dict[str, int] = field(default_factory=dict)
    finish_reason: str | None = None


@dataclass
class Trajectory:
    """One episode.

    Attributes:
        turns: in order. A failed episode keeps the turns before the failure.
        final_observation: the messages after the last reply.
        end: "terminated", "truncated" (by the environment), a limit of the loop ("max_turns", "tokens", "context",
            "time"), or "error".
        error: the failed call, where and after how long; None unless `end` is "error". An error is not a reward of 0.
        metrics: numbers of the last `info` (`success` as 0.0 or 1.0).
        metadata: also of a failure: `traceback` of an exception, `status` of an endpoint's refusal, `errors` of earlier tries.
    """

    id: str
    env: str
    task_id: str
    sample: int = 0
    seed: int | None = None
    turns: list[Turn] = field(default_factory=list)
    final_observation: list[Message] = field(default_factory=list)
    end: str = "terminated"
    error: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def reward(self) -> float:
        return sum(turn.reward for turn in self.turns)

    @property
    def failed(self) -> bool:
        """True if the environment, the sandbox back end or the endpoint failed; such a trajectory has no reward."""
        return self.end == "error"

    @property
    def agent_failure(self) -> str | None:
        cause = self.turns[-1].info.get(agent_failure.KEY) if self.turns and not self.failed else None
        return cause if isinstance(cause, str) else None

    @property
    def success(self) -> float:
        """1.0 or 0.0: the environment's `success`, else whether the reward is positive."""
        return self.metrics.get("success", float(self.reward > 0))

    @property
    def sampled_tokens(self) -> int:
        return sum(len(turn.tokens.completion_ids) for turn in self.turns if turn.tokens)

    def messages(self) -> list[Message]:
        out: list[Message] = []
        for turn in self.turns:
            out += [*turn.observation, turn.reply]
        return out + self.final_observation

    def to_json(self) -> dict[str, Any]:
        """A JSON object. A prompt that extends the previous tokens stores only what is new."""
        record = {k: v for k, v in vars(self).items() if k != "turns"}
        record["reward"] = self.reward
        turns: list[dict[str, Any]] = []
        context: list[int] = []
        for turn in self.turns:
            item = {k: v for k, v in vars(turn).items() if k != "tokens"}
            if turn.tokens:
                tokens = dict(vars(turn.tokens))
                prompt = tokens.pop("prompt_ids")
                shared = len(context) if context and prompt[: len(context)] == context else 0
                tokens.update(shared=shared, new_prompt_ids=prompt[shared:])
                context = prompt + turn.tokens.completion_ids
                item["tokens"] = tokens
            turns.append(item)
        record["turns"] = turns
        return record

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Trajectory":
        turns: list[Turn] = []
        context: list[int] = []
        for item in record["turns"]:
            tokens = item.get("tokens")
            if tokens:
                stored = dict(tokens)
                prompt = context[: stored.pop("shared")] + stored.pop("new_prompt_ids")
                tokens = Tokens(prompt_ids=prompt, **stored)
                context = prompt + tokens.completion_ids
            turns.append(Turn(**{**item, "tokens": tokens}))
        return cls(**{k: v for k, v in record.items() if k not in ("turns", "reward")}, turns=turns)


@dataclass
class Group:
    task_id: str
    trajectories: list[Trajectory]


def write_jsonl(path: str | Path, trajectories: Iterable[Trajectory]) -> None:
    """Append trajectories to a JSON Lines file. A last line cut off by a crash is removed first."""
    mend(Path(path))
    with Path(path).open("a", encoding="utf-8") as out:
        for trajectory in trajectories:
            out.write(line_of(trajectory.to_json()))


def read_jsonl(path: str | Path) -> Iterator[Trajectory]:
    """Trajectories of a file, without a last line cut off by a crash. Raises ValueError for any other broken line."""
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
            except ValueError as error:
                if not line.endswith("\n"):
                    return
                raise ValueError(f"{path}:{number}: not a trajectory: {error}") from error
            yield Trajectory.from_json(record)
