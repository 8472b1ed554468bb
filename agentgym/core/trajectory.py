"""Trajectories: the turns of an episode, their tokens, and how it ended. Stored as JSON Lines."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentgym.core import agent_failure
from agentgym.core.messages import Message
from agentgym.storage.jsonl import line_of_any, mend

NO_LIMIT = ("terminated", "agent")
"""Ends that no limit made."""
TURN_OF = "turn_of"
"""In the info of `reset` and `step`: the player who acts next, in an environment with several players."""
REWARDS = "rewards"
"""In the info of `step` there: what each player earned by it. Without it each earned the step's reward."""
TOO_LONG = "the first request is longer than the model's context"
"""The error of an episode whose policy could not read even the opening."""


@dataclass
class Tokens:
    """The exact tokens of one turn, from a policy that works on token ids.

    Attributes:
        prompt_ids: the P ids of the prompt.
        completion_ids: the C sampled ids, a sampled stop token included.
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
    """One exchange: the messages since the player's previous turn, the reply (see `Reply`), and the environment's answer to it.

    Of an agent that plays by itself it is a call of its model: the messages behind those that the call goes on from, and the reply.
    `unusable` says why its sampled tokens are not trained on; None: they are.
    """

    observation: list[Message]
    reply: Message
    reward: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)
    tokens: Tokens | None = None
    act_seconds: float = 0.0
    step_seconds: float = 0.0
    usage: dict[str, int] = field(default_factory=dict)
    finish_reason: str | None = None
    player: str | None = None  # who replied, in an environment with several players
    unusable: str | None = None

    @property
    def trained(self) -> int:
        """Sampled tokens that can be trained on."""
        return len(self.tokens.completion_ids) if self.tokens and self.unusable is None else 0


@dataclass
class Summary:
    """A policy's summary of its work between two turns, which replaces the conversation from there on.

    The environment does not see it. Its tokens are sampled like those of a turn, and trained on like them.

    Attributes:
        turn: the number of turns before it.
        request: the messages that request it, after the conversation so far.
    """

    turn: int
    request: list[Message]
    reply: Message
    tokens: Tokens | None = None
    act_seconds: float = 0.0
    usage: dict[str, int] = field(default_factory=dict)
    finish_reason: str | None = None
    player: str | None = None

    @property
    def trained(self) -> int:
        return len(self.tokens.completion_ids) if self.tokens else 0


@dataclass
class Trajectory:
    """One episode.

    Attributes:
        turns: in order. A failed episode keeps the turns before the failure.
        summaries: in order. The last one may have been cut off, which ends the episode ("context").
        final_observation: the messages after the last reply.
        end: "terminated", "truncated" (by the environment), a limit of the loop ("max_turns", "tokens", "cost", "context",
            "time"), "agent", or "error". "context": the model could not have read the next prompt and answered it. "agent": one
            that plays by itself has left before the end.
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
    summaries: list[Summary] = field(default_factory=list)
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
    def rewards(self) -> dict[str, float]:
        """Each player's reward, by name; {} in an environment of one agent."""
        total: dict[str, float] = {turn.player: 0.0 for turn in self.turns if turn.player is not None}
        for turn in self.turns if total else ():
            total = dict.fromkeys(turn.info.get(REWARDS, {}), 0.0) | total
            total = {player: total[player] + reward for player, reward in shares(turn.reward, turn.info, total).items()}
        return total

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
        return sum(len(call.tokens.completion_ids) for call in self.calls() if call.tokens)

    @property
    def trained_tokens(self) -> int:
        """Sampled tokens that can be trained on."""
        return sum(call.trained for call in self.calls())

    def calls(self) -> list[Turn | Summary]:
        """The turns and the summaries, in the order in which the model was asked."""
        if not self.summaries:
            return list(self.turns)
        found: list[Turn | Summary] = []
        for number in range(len(self.turns) + 1):
            found += [summary for summary in self.summaries if summary.turn == number]
            found += self.turns[number : number + 1]
        return found

    def judged(self, observation: list[Message], reward: float, info: dict[str, Any]) -> None:
        """Count what the environment says of an episode that was cut off, at the last turn."""
        last, earned = self.turns[-1], {}
        if self.rewards:
            before, now = (shares(r, i, self.rewards) for r, i in ((last.reward, last.info), (reward, info)))
            earned = {REWARDS: {player: before[player] + now[player] for player in before}}
        last.reward, last.info = last.reward + reward, {**last.info, **info, **earned}
        self.final_observation = [*self.final_observation, *observation]

    def messages(self) -> list[Message]:
        out: list[Message] = []
        for turn in self.turns:
            out += [*turn.observation, turn.reply]
        return out + self.final_observation

    def to_json(self) -> dict[str, Any]:
        """A JSON object. A prompt that extends the tokens of the call before, or of another one, stores only what is new."""
        record = {k: v for k, v in vars(self).items() if k not in ("turns", "summaries")}
        record |= {"reward": self.reward} | ({"rewards": self.rewards} if self.rewards else {})
        turns: list[dict[str, Any]] = []
        summaries: list[dict[str, Any]] = []
        contexts: list[list[int]] = []
        for call in self.calls():
            seldom = {name for name in ("player", "unusable") if getattr(call, name, None) is None}
            item = {k: v for k, v in vars(call).items() if k not in {"tokens", *seldom}}
            if call.tokens:
                tokens = dict(vars(call.tokens))
                prompt = tokens.pop("prompt_ids")
                places = range(len(contexts) - 1, -1, -1)
                found = next((place for place in places if prompt[: len(contexts[place])] == contexts[place]), None)
                if found not in (None, len(contexts) - 1):
                    tokens["of"] = found
                shared = 0 if found is None else len(contexts[found])
                tokens.update(shared=shared, new_prompt_ids=prompt[shared:])
                contexts.append(prompt + call.tokens.completion_ids)
                item["tokens"] = tokens
            (turns if isinstance(call, Turn) else summaries).append(item)
        return record | {"turns": turns} | ({"summaries": summaries} if summaries else {})

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Trajectory":
        given = {k: v for k, v in record.items() if k not in ("turns", "summaries", "reward", "rewards")}
        turns = [Turn(**item) for item in record["turns"]]
        found = cls(**given, turns=turns, summaries=[Summary(**item) for item in record.get("summaries", ())])
        contexts: list[list[int]] = []
        for call in found.calls():
            stored: Any = call.tokens  # as `to_json` wrote it
            if stored:
                tokens = dict(stored)
                shared, of = tokens.pop("shared"), tokens.pop("of", -1)
                prompt = (contexts[of][:shared] if shared else []) + tokens.pop("new_prompt_ids")
                call.tokens = Tokens(prompt_ids=prompt, **tokens)
                contexts.append(prompt + call.tokens.completion_ids)
        return found


def shares(reward: float, info: Mapping[str, Any], players: Iterable[str]) -> dict[str, float]:
    """Each player's reward for a step."""
    given: Mapping[str, float] | None = info.get(REWARDS)
    return {player: reward if given is None else given.get(player, 0.0) for player in players}


@dataclass
class Group:
    task_id: str
    trajectories: list[Trajectory]


def write_jsonl(path: str | Path, trajectories: Iterable[Trajectory]) -> None:
    """Append trajectories to a JSON Lines file. A last line cut off by a crash is removed first."""
    mend(Path(path))
    with Path(path).open("a", encoding="utf-8") as out:
        for trajectory in trajectories:
            out.write(line_of_any(trajectory.to_json()))


def read_jsonl(path: str | Path) -> Iterator[Trajectory]:
    """Trajectories of a file, without a last line cut off by a crash. Raises ValueError for any other broken line."""
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                raise ValueError(f"{path}:{number}: not a trajectory: {error}") from error
            yield Trajectory.from_json(record)
