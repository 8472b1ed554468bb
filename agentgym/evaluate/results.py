"""Results of an evaluation: the numbers of each cell and of the whole run. Of trajectories, only numbers stay in memory."""

import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from sys import intern
from typing import Any

from agentgym.core.trajectory import TOO_LONG, Trajectory
from agentgym.evaluate.plan import cell_name
from agentgym.evaluate.statistics import ClusteredMean, Interval, passes

FORMAT = 1
COMMONEST_ERRORS = 10
# Above this share of episodes with an answer that was cut, results say so.
MUCH_CUT = 0.05
# Numbers as difficulty get ranges where there are more than this many.
MOST_DIFFICULTIES = 10
HISTOGRAM_BINS = 20
_LEVELS = ("trivial", "very easy", "easy", "medium", "moderate", "intermediate", "hard", "challenging", "difficult")


@dataclass(frozen=True, slots=True)
class EpisodeNumbers:
    """The numbers of one episode that the statistics need: some hundred bytes.

    Attributes:
        usage: tokens by kind, over all tries; `prompt_tokens` and `completion_tokens` where they were counted.
        cause: of the error, without its task, turn and time; None where the episode was played.
        agent_failure: the cause where the agent's own programs broke the episode, which was played.
        floor: the environment's least reward.
        rewards: of each player; None in an environment of one agent.
    """

    task: str
    sample: int
    cause: str | None
    end: str
    reward: float
    success: float
    turns: int
    seconds: float
    usage: Mapping[str, int]
    cost: float | None
    tags: tuple[str, ...]
    difficulty: str | float | None
    requests: int = 0
    retries: Mapping[str, int] | None = None
    waited: float = 0.0
    agent_failure: str | None = None
    floor: float = 0.0
    finishes: tuple[str, ...] = ()
    rewards: Mapping[str, float] | None = None

    @property
    def failed(self) -> bool:
        return self.cause is not None


def numbers_of(trajectory: Trajectory) -> EpisodeNumbers:
    metadata = trajectory.metadata
    calls: Mapping[str, Any] = metadata.get("calls") or {}
    tags = metadata.get("tags") or ()
    difficulty = metadata.get("difficulty")
    if not isinstance(difficulty, str | int | float | None):
        difficulty = str(difficulty)
    return EpisodeNumbers(
        task=trajectory.task_id,
        sample=trajectory.sample,
        cause=intern(cause_in(trajectory.error or "")) if trajectory.failed else None,
        end=intern(trajectory.end),
        reward=trajectory.reward,
        success=min(max(trajectory.success, 0.0), 1.0),
        turns=len(trajectory.turns),
        seconds=trajectory.seconds,
        usage=usage_of(trajectory),
        requests=calls.get("requests", 0),
        retries=calls.get("retries"),
        waited=calls.get("waited", 0.0),
        cost=metadata.get("cost"),
        tags=tuple(intern(str(tag)) for tag in (tags if isinstance(tags, list | tuple) else [tags])),
        difficulty=difficulty,
        agent_failure=trajectory.agent_failure,
        floor=metadata.get("floor", 0.0),
        finishes=finishes_of((call.finish_reason for call in trajectory.calls()), trajectory.end, trajectory.error),
        rewards=trajectory.rewards or None,
    )


def usage_of(trajectory: Trajectory) -> dict[str, int]:
    """Tokens of an episode by kind: the endpoint's count over all tries, else that of each turn and summary, or of its exact tokens."""
    calls = trajectory.metadata.get("calls") or {}
    return calls.get("usage") or summed(
        {"prompt_tokens": len(call.tokens.prompt_ids), "completion_tokens": len(call.tokens.completion_ids)}
        if call.tokens and not call.usage
        else call.usage
        for call in trajectory.calls()
    )


@dataclass(frozen=True, kw_only=True)
class Part:
    """The episodes with one tag, or of one difficulty; for the fields see docs/evaluation.md."""

    tasks: int
    episodes: int
    errors: int
    reward: float | None
    reward_low: float | None
    reward_high: float | None
    success: float | None
    success_low: float | None
    success_high: float | None
    reward_with_errors: float | None = None
    success_with_errors: float | None = None


@dataclass(frozen=True, kw_only=True)
class CellResult(Part):
    """The results of one agent on one environment; for the fields see docs/evaluation.md. Failed episodes are in no mean."""

    env: str
    agent: str
    split: str
    samples: int
    planned: int
    pass_at: dict[int, float]
    pass_hat: dict[int, float]
    turns: float | None
    episode_seconds: float | None
    pass_at_interval: dict[int, Interval] = field(default_factory=dict)
    pass_hat_interval: dict[int, Interval] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    tokens_per_episode: dict[str, float] = field(default_factory=dict)
    cost: float | None = None
    requests: int = 0
    retries: dict[str, int] = field(default_factory=dict)
    waited: float = 0.0
    ends: dict[str, int] = field(default_factory=dict)
    finish_reasons: dict[str, int] = field(default_factory=dict)
    cut: int = 0
    error_texts: dict[str, int] = field(default_factory=dict)
    agent_failures: dict[str, int] = field(default_factory=dict)
    by_tag: dict[str, Part] = field(default_factory=dict)
    by_difficulty: dict[str, Part] = field(default_factory=dict)
    rewards: dict[str, Any] | None = None
    players: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    asked: int | None = None

    @property
    def name(self) -> str:
        return cell_name(self.env, self.split, self.agent)

    @property
    def much_cut(self) -> bool:
        """True if so many answers were cut that scores measure the limits rather than the model."""
        return self.cut > MUCH_CUT * (self.episodes + self.errors)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "CellResult":
        """The reverse of `to_json`; keys that other versions write are passed over."""
        values = {field.name: record[field.name] for field in fields(cls) if field.name in record}
        for key in ("pass_at", "pass_hat", "pass_at_interval", "pass_hat_interval"):
            by_k = values.get(key, {}).items()
            values[key] = {int(k): tuple(value) if isinstance(value, list) else value for k, value in by_k}
        for key in ("by_tag", "by_difficulty"):
            values[key] = {name: Part(**part) for name, part in values.get(key, {}).items()}
        return cls(**values)


@dataclass(frozen=True)
class Results:
    """The results of a whole run: `results.json`.

    Attributes:
        stopped: the limit that ended the run before all was played, "interrupted", "disk" (it is full), "key" (the endpoint
            refuses it) or "uncounted" (a limit of tokens cannot be kept); None where all was played.
        seconds: wall time, over all the times that the run was started.
    """

    name: str
    cells: list[CellResult]
    stopped: str | None = None
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        rest = {"name": self.name, "stopped": self.stopped, "seconds": self.seconds}
        return {"format": FORMAT, **rest, "cells": [cell.to_json() for cell in self.cells]}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Results":
        """The reverse of `to_json`. Raises ValueError for an unknown format."""
        if record.get("format") != FORMAT:
            raise ValueError(f"results of format {record.get('format')!r}; this version reads format {FORMAT}")
        cells = [CellResult.from_json(cell) for cell in record["cells"]]
        return cls(record["name"], cells, record["stopped"], record["seconds"])


def results_of(
    episodes: Iterable[Trajectory | EpisodeNumbers],
    *,
    env: str,
    agent: str = "",
    split: str = "test",
    samples: int = 1,
    planned: int | None = None,
    seconds: float = 0.0,
    asked: int | None = None,
) -> CellResult:
    """The result of a cell. Trajectories may come one by one from a file: only their numbers are kept.

    Args:
        episodes: one for each task and sample, failed ones included.
        planned: episodes that were asked for; None: as many as are stored.
    """
    numbers = [e if isinstance(e, EpisodeNumbers) else numbers_of(e) for e in episodes]
    played = [e for e in numbers if not e.failed]
    tries, successes = Counter(e.task for e in played), Counter(e.task for e in played if e.success > 0)
    pass_at, pass_hat, at_interval, hat_interval = passes([(n, successes[t]) for t, n in tries.items()], samples)
    costs = [e.cost for e in numbers if e.cost is not None or e.usage]
    counted = [e.usage for e in played if e.usage]
    tagged: dict[str, list[EpisodeNumbers]] = defaultdict(list)
    for e in numbers:
        for tag in dict.fromkeys(e.tags):
            tagged[tag].append(e)
    return CellResult(
        env=env,
        agent=agent,
        split=split,
        samples=samples,
        planned=len(numbers) if planned is None else planned,
        **asdict(_part(numbers)),
        pass_at=pass_at,
        pass_hat=pass_hat,
        pass_at_interval=at_interval,
        pass_hat_interval=hat_interval,
        turns=_mean([e.turns for e in played]),
        episode_seconds=_mean([e.seconds for e in played]),
        tokens=summed(e.usage for e in numbers),
        tokens_per_episode={kind: total / len(counted) for kind, total in summed(counted).items()},
        cost=math.fsum(cost for cost in costs if cost is not None) if costs and None not in costs else None,
        requests=sum(e.requests for e in numbers),
        retries=summed(e.retries or {} for e in numbers),
        waited=math.fsum(e.waited for e in numbers),
        ends=dict(Counter(e.end for e in numbers)),
        finish_reasons=dict(Counter(reason for e in numbers for reason in e.finishes)),
        cut=sum(any(reason in CUT for reason in e.finishes) for e in numbers),
        error_texts=dict(Counter(e.cause for e in numbers if e.cause is not None).most_common(COMMONEST_ERRORS)),
        agent_failures=dict(Counter(e.agent_failure for e in played if e.agent_failure is not None)),
        by_tag={tag: _part(part) for tag, part in sorted(tagged.items())},
        by_difficulty={name: _part(alike) for name, alike in _by_difficulty(numbers).items()},
        rewards=_histogram([e.reward for e in played]),
        players=_by_player([e.rewards for e in played if e.rewards]),
        seconds=seconds,
        asked=asked,
    )


def _part(numbers: Sequence[EpisodeNumbers]) -> Part:
    reward, success = ClusteredMean(), ClusteredMean()
    for e in numbers:
        if not e.failed:
            reward.add(e.task, e.reward)
            success.add(e.task, e.success)
    reward_low, reward_high = reward.interval() or (None, None)
    success_low, success_high = success.share_interval() or (None, None)
    failed = reward.count < len(numbers)
    return Part(
        tasks=len({e.task for e in numbers}),
        episodes=reward.count,
        errors=len(numbers) - reward.count,
        reward=reward.mean,
        reward_low=reward_low,
        reward_high=reward_high,
        success=success.mean,
        success_low=success_low,
        success_high=success_high,
        reward_with_errors=_mean([e.floor if e.failed else e.reward for e in numbers]) if failed else None,
        success_with_errors=_mean([0.0 if e.failed else e.success for e in numbers]) if failed else None,
    )


def _by_player(rewards: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean reward of each player, over the episodes that have it."""
    of_player: dict[str, list[float]] = defaultdict(list)
    for episode in rewards:
        for player, reward in episode.items():
            of_player[player].append(reward)
    return {player: math.fsum(own) / len(own) for player, own in of_player.items()}


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in counts:
        for name, count in one.items():
            total[name] = total.get(name, 0) + count
    return total


def _by_difficulty(numbers: Iterable[EpisodeNumbers]) -> dict[str, list[EpisodeNumbers]]:
    def order(e: EpisodeNumbers) -> tuple[int, float, str]:
        if not isinstance(e.difficulty, str):
            return 0, float(e.difficulty or 0), ""
        known = e.difficulty.lower()
        return 1, _LEVELS.index(known) if known in _LEVELS else len(_LEVELS), e.difficulty

    rated = [e for e in numbers if e.difficulty is not None]
    name = _difficulty_names([v for v in {e.difficulty for e in rated} if v is not None])
    found: dict[str, list[EpisodeNumbers]] = defaultdict(list)
    for e in sorted(rated, key=order):
        found[name(e.difficulty)].append(e)
    return found


def _difficulty_names(values: Sequence[str | float]) -> Callable[[Any], str]:
    """The label of each difficulty: the text, or a numeric range; ranges have about equal counts."""
    if len(values) <= MOST_DIFFICULTIES or any(isinstance(v, str) for v in values):
        return lambda value: f"{value:g}" if isinstance(value, float) else str(value)
    ordered = sorted(v for v in values if not isinstance(v, str))
    ranges = MOST_DIFFICULTIES // 2
    edges = [i * len(ordered) // ranges for i in range(ranges + 1)]
    texts = {edge: f"{ordered[edge]:g} to {ordered[end - 1]:g}" for edge, end in pairwise(edges)}
    return lambda value: texts[edges[bisect_right(edges, bisect_left(ordered, value)) - 1]]


def _histogram(rewards: Sequence[float]) -> dict[str, Any] | None:
    """Episodes by reward, in equal ranges from low to high; one range where all rewards are equal."""
    if not rewards:
        return None
    low, high = min(rewards), max(rewards)
    counts = [0] * HISTOGRAM_BINS if high > low else [len(rewards)]
    for reward in rewards if high > low else ():
        # Halves, so that the distance between the ends of what a float can hold is one too.
        share = (reward / 2 - low / 2) / (high / 2 - low / 2)
        counts[min(int(share * HISTOGRAM_BINS), HISTOGRAM_BINS - 1)] += 1
    return {"low": low, "high": high, "counts": counts}


# Finish reasons of answers that are not what the model would have said: cut, withheld, or never asked for.
CUT = ("length", "content_filter", "context")

LONGEST_CAUSE = 300
# Parts in which failures of one kind differ: ids, addresses, numbers. An HTTP status, a line of code or a version is another kind.
_OWN = re.compile(
    r"""(?P<kept>\b(?:answered|status)\ \d{3}\b|\.py:\d+|\bHTTP/[\d.]+|(?<=[\w,\]])(?:[<>~=!]=|[<>])\d[\d.]*)
    |\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b
    |\b(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?\b
    |\b0x[0-9a-fA-F]+\b
    |\b(?=[A-Za-z_-]*\d)[A-Za-z\d]+(?:[_-][A-Za-z\d]+)*[_-](?=[A-Za-z]*\d)[A-Za-z\d]{6,}\b
    |\b(?=[a-zA-Z]*\d)(?=\d*[a-zA-Z])[0-9a-zA-Z]{12,}\b|\b[0-9a-f]{12,}\b
    |(?<![A-Za-z\d.])\d+(?:[.,]\d+)*(?![A-Za-z\d])""",
    re.VERBOSE,
)


def cause_in(error: str) -> str:
    """An error without its task, turn and time, and with # for ids, addresses and numbers, so that like failures count together."""
    return _OWN.sub(lambda found: found["kept"] or "#", failure_in(error)[: 2 * LONGEST_CAUSE])[:LONGEST_CAUSE]


def failure_in(error: str) -> str:
    """An error without its task, turn and time."""
    text = error.strip()
    _, colon, rest = text.partition(": ")
    return re.sub(r" after [\d.]+ s\b", "", rest if colon else text) or "no message"


def finishes_of(reasons: Iterable[str | None], end: str, error: str | None) -> tuple[str, ...]:
    """The finish reasons of an episode's answers, each once, and "context" where a request was longer than the model reads."""
    found = {intern(reason): None for reason in reasons if reason}
    if end == "context" or (error or "").endswith(TOO_LONG):
        found["context"] = None
    elif end == "error" and "content_filter" in (error or ""):  # that of a prompt is a status, and no finish reason
        found["content_filter"] = None
    return tuple(found)
