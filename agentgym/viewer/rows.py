"""Rows of the list of episodes, which stay in memory, and the means over them."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from sys import intern
from typing import Any

from agentgym.core import agent_failure
from agentgym.evaluate.results import CellResult, EpisodeNumbers, cause_in, finishes_of, results_of
from agentgym.evaluate.statistics import ClusteredMean

ERROR_CHARS = 200
ANSWER_CHARS = 200
_MOST_TAGS = 50


@dataclass(slots=True)
class EpisodeRow:
    """One line of a file of episodes. `start` and `size` are its place in bytes; for the rest see the package's ROW."""

    start: int
    size: int
    env: str
    task: str
    sample: int
    reward: float | None
    success: float | None
    end: str
    error: str | None
    cause: str | None
    turns: int
    tokens: int | None
    seconds: float | None
    cost: float | None
    tags: tuple[str, ...]
    difficulty: str | float | None
    finishes: tuple[str, ...] = ()
    expected: str | None = None
    given: str | None = None
    superseded: bool = False
    rewards: Mapping[str, float] | None = None
    agent_failure: str | None = None
    floor: float = 0.0

    @property
    def failed(self) -> bool:
        return self.end == "error"

    @property
    def outcome(self) -> str:
        return "error" if self.failed else "success" if self.success else "failure"


def row_of(record: Any, start: int, size: int) -> EpisodeRow:
    """The row of a stored episode. Raises ValueError for other JSON."""
    if not isinstance(record, dict) or not isinstance(record.get("turns"), list):
        raise ValueError("a line is not an episode: it has no list of turns")
    turns = [turn for turn in record["turns"] if isinstance(turn, dict)]
    calls = [*turns, *summaries_of(record)]
    reasons = (reason if isinstance(reason := call.get("finish_reason"), str) else None for call in calls)
    end = intern(str(record.get("end", "")))
    metadata, metrics = _object(record.get("metadata")), _object(record.get("metrics"))
    reward = success = None
    if end != "error":
        reward = number(record["reward"]) if "reward" in record else sum(number(t.get("reward")) or 0.0 for t in turns)
        success = number(metrics.get("success", float((reward or 0) > 0)))
    error = None if record.get("error") is None else str(record["error"])
    expected, given = _answers(turns, metadata)
    difficulty, tags = metadata.get("difficulty"), metadata.get("tags") or []
    broken = _object(turns[-1].get("info")).get(agent_failure.KEY) if turns and end != "error" else None
    return EpisodeRow(
        start=start,
        size=size,
        env=intern(str(record.get("env", ""))),
        task=str(record.get("task_id", "")),
        sample=int(number(record.get("sample")) or 0),
        reward=reward,
        success=success,
        end=end,
        error=error and error[:ERROR_CHARS],
        cause=intern(cause_in(error or "")) if end == "error" else None,
        turns=len(turns),
        tokens=_tokens(calls, metadata),
        seconds=number(record.get("seconds")),
        cost=number(metadata.get("cost")),
        tags=tuple(intern(str(tag)) for tag in (tags if isinstance(tags, list) else [tags])[:_MOST_TAGS]),
        difficulty=difficulty if isinstance(difficulty, str) else number(difficulty),
        finishes=finishes_of(reasons, end, error),
        expected=expected,
        given=given,
        rewards={intern(name): number(value) or 0.0 for name, value in _object(record.get("rewards")).items()} or None,
        agent_failure=intern(broken) if isinstance(broken, str) else None,
        floor=number(metadata.get("floor")) or 0.0,
    )


def _answers(turns: list[dict[str, Any]], metadata: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The answer that was expected, and the one that was given: as the environment read it, or the reply's last line."""
    info = _object(turns[-1].get("info")) if turns else {}
    expected = _short(metadata.get("expected", info.get("expected")))
    given = _short(info.get("answer"))
    if given is None and expected is not None and turns:
        reply = turns[-1].get("reply")
        said = reply.get("content") if isinstance(reply, dict) else None
        given = _short(said.strip().rpartition("\n")[2]) if isinstance(said, str) else None
    return expected, given


def _short(answer: Any) -> str | None:
    """An answer as one short text; a list of one item is that item. None without an answer."""
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if answer is None or answer == "":
        return None
    try:
        text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    except RecursionError:  # deeper than JSON that is written, not than JSON that is read
        return None
    return text if len(text) <= ANSWER_CHARS else text[: ANSWER_CHARS - 1] + "…"


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def number(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    if isinstance(value, bool):
        return float(value)
    if not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:
        return None


def summaries_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The summaries of an episode that a memory made; most have none."""
    found = record.get("summaries")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _tokens(calls: list[dict[str, Any]], metadata: Mapping[str, Any]) -> int | None:
    """Tokens that the agent wrote, as results count them: by the endpoint over all tries, for each turn and summary, or the exact ones."""
    usage = _object(_object(metadata.get("calls")).get("usage"))
    if usage:
        count = number(usage.get("completion_tokens"))
        return None if count is None else int(count)
    counts = []
    for call in calls:
        tokens, usage = call.get("tokens"), _object(call.get("usage"))
        if number(usage.get("completion_tokens")) is not None:
            counts.append(usage["completion_tokens"])
        elif not usage and isinstance(tokens, dict) and isinstance(tokens.get("completion_ids"), list):
            counts.append(len(tokens["completion_ids"]))
    return int(sum(counts)) if counts else None


def texts_of(record: Mapping[str, Any]) -> Iterator[str]:
    """Every text of an episode that a reader sees: messages, thoughts, tool calls, and the error."""
    if isinstance(record.get("error"), str):
        yield record["error"]
    for turn in record["turns"]:
        if isinstance(turn, dict):
            yield from _message_texts(turn.get("observation"))
            yield from _message_texts([turn.get("reply")])
    for summary in summaries_of(record):
        yield from _message_texts([summary.get("reply")])
    yield from _message_texts(record.get("final_observation"))


def _message_texts(messages: Any) -> Iterator[str]:
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            yield from _leaves([value for name, value in message.items() if name not in ("role", "tool_call_id")])


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        inner = value if isinstance(value, list) else [i for name, i in value.items() if name not in ("type", "id")]
        for item in inner:
            yield from _leaves(item)


def means_of(rows: Sequence[EpisodeRow]) -> dict[str, float | None]:
    """Means of the completed episodes, with the 95% interval of `success`; None without any."""
    played = [row for row in rows if not row.superseded and not row.failed]
    success = ClusteredMean()
    for row in played:
        success.add(row.task, row.success or 0.0)
    low, high = success.share_interval() or (None, None)
    reward = sum(row.reward or 0.0 for row in played) / len(played) if played else None
    turns = sum(row.turns for row in played) / len(played) if played else None
    return {"reward": reward, "success": success.mean, "low": low, "high": high, "turns": turns}


def result_of(
    rows: Sequence[EpisodeRow], env: str, agent: str, split: str, samples: int, planned: int | None
) -> CellResult:
    """The result of a cell so far, from its rows: without counts of endpoints (requests, tokens read)."""
    numbers = [episode_numbers(row) for row in rows if not row.superseded]
    return results_of(numbers, env=env, agent=agent, split=split, samples=samples, planned=planned)


def episode_numbers(row: EpisodeRow) -> EpisodeNumbers:
    return EpisodeNumbers(
        task=row.task,
        sample=row.sample,
        cause=row.cause,
        end=row.end,
        reward=row.reward or 0.0,
        success=min(max(row.success or 0.0, 0.0), 1.0),
        turns=row.turns,
        seconds=row.seconds or 0.0,
        usage={} if row.tokens is None else {"completion_tokens": row.tokens},
        cost=row.cost,
        tags=row.tags,
        difficulty=row.difficulty,
        agent_failure=row.agent_failure,
        floor=row.floor,
        finishes=row.finishes,
        rewards=row.rewards,
    )
