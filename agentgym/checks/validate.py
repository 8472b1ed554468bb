"""`validate`: shows that an environment measures what it should.

Gold answers earn the most, null and random policies the floor, and the same actions the same rewards, also in another process.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from agentgym.checks.findings import NOTE, OK, PROBLEM, Finding, said
from agentgym.core.messages import Message
from agentgym.core.registration import EnvSpec
from agentgym.core.tasks import Task, TaskSet
from agentgym.core.trajectory import Trajectory
from agentgym.evaluate.statistics import paired_difference, success_interval
from agentgym.policies.base import ExpertPolicy, Policy, RandomPolicy, Reply
from agentgym.rollout.episode import Episode, Limits, close_env, run_many
from agentgym.rollout.replays import ElsewhereError, replay, replay_elsewhere, shown

SPLITS = ("train", "validation", "test")
READ, READ_SECONDS = 20_000, 10.0  # tasks of each split that are compared, and how long they are read
REPLAYED = 10  # episodes of each player that are played again
_FEWEST = 5  # tasks that two players must both have played before a difference of theirs is called one
_CHARGE = "a reply that cannot be read must cost at least what a bad one does, or take a step in its place"
_NAMED = 3  # tasks that a finding names
# What tells tasks apart without being part of the problem.
_BESIDE_THE_PROBLEM = frozenset({"split", "source", "index", "id"})


@dataclass(frozen=True)
class Score:
    """The results of one policy. Failed episodes count in `errors` and in no other number.

    Attributes:
        player: "gold" (`expert_action`), "null" (says nothing), "random" (`random_action`, or random text).
        reward, reward_min, reward_max: mean, least and greatest; None if no episode ended.
        success, success_low, success_high: share of successes and its 95% interval.
        turns: mean replies of an episode.
    """

    player: str
    episodes: int
    errors: int
    reward: float | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    success: float | None = None
    success_low: float | None = None
    success_high: float | None = None
    turns: float | None = None


@dataclass
class Validation:
    env: str
    split: str
    tasks: int = 0
    scores: list[Score] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return all(finding.state != PROBLEM for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


async def validate(
    spec: EnvSpec,
    *,
    split: str = "test",
    n: int = 50,
    seed: int = 0,
    floor: float | None = None,
    concurrency: int = 16,
    limits: Limits | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Validation:
    """Prove an environment on the first n tasks of a split.

    Args:
        floor: the greatest share of successes that null and random play may have. None: null has none, and random play
            has fewer than gold.
        concurrency, limits: see `run_many`.
        say: told the next step.

    Raises:
        ValueError: no such split, or n below 1.
        ImportError, TypeError: the environment cannot be made.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, not {n}")
    started = time.perf_counter()
    limits = limits or Limits()
    bare: Any = spec.make().unwrapped
    has = {name: hasattr(bare, name) for name in ("expert_action", "random_action")}
    await close_env(bare)
    tasks = list(spec.tasks(split).take(n))
    if not tasks:
        raise ValueError(f"{spec.id}: the split {split!r} has no tasks")
    found = Validation(spec.id, split, len(tasks))

    say("reading the tasks of every split")
    found.findings += await asyncio.to_thread(compare_splits, spec)
    played: dict[str, list[Trajectory]] = {}
    for player, make_policy in _players(has, seed).items():
        say(f"{player}: {len(tasks)} episodes")
        episodes = [Episode(task, 0, seed) for task in tasks]
        played[player] = await run_many(
            spec.make, make_policy, episodes, concurrency=concurrency, limits=limits, env_id=spec.id
        )
        found.scores.append(score_of(player, played[player]))
    found.findings += _failures(played)
    found.findings += gold_is_best(played)
    scores = {score.player: score for score in found.scores}
    if floor is None or not scores["null"].success or scores["null"].success > floor:
        found.findings += silence_pays_least(played, has["random_action"])
    found.findings += floor_is_low(scores, floor, has["random_action"])
    found.findings += await _repeats(spec, played, {task.id: task for task in tasks}, limits, concurrency, say)
    found.seconds = time.perf_counter() - started
    return found


class _Silent:
    async def act(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply:
        return Reply({"role": "assistant", "content": ""})


class _Babble:
    def __init__(self, rng: random.Random):
        self._rng = rng

    async def act(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply:
        words = [self._rng.choice(("yes", "no", "0", "1", "42", "a", "left", "the answer")) for _ in range(3)]
        return Reply({"role": "assistant", "content": " ".join(words)})


def _players(has: dict[str, bool], seed: int) -> dict[str, Callable[[Episode], Policy]]:
    def rng(episode: Episode) -> random.Random:
        return random.Random(f"{seed} {episode.task.id}")

    players: dict[str, Callable[[Episode], Policy]] = {}
    if has["expert_action"]:
        players["gold"] = lambda episode: ExpertPolicy()
    players["null"] = lambda episode: _Silent()
    players["random"] = lambda episode: (
        RandomPolicy(rng=rng(episode)) if has["random_action"] else _Babble(rng(episode))
    )
    return players


def score_of(player: str, trajectories: Sequence[Trajectory]) -> Score:
    ended = [t for t in trajectories if not t.failed]
    if not ended:
        return Score(player, 0, len(trajectories))
    rewards = [t.reward for t in ended]
    low, high = success_interval([[t.success] for t in ended])
    return Score(
        player,
        len(ended),
        len(trajectories) - len(ended),
        sum(rewards) / len(ended),
        min(rewards),
        max(rewards),
        sum(t.success for t in ended) / len(ended),
        low,
        high,
        sum(len(t.turns) for t in ended) / len(ended),
    )


def _failures(played: dict[str, list[Trajectory]]) -> list[Finding]:
    found = []
    for player, trajectories in played.items():
        if failed := [t for t in trajectories if t.failed]:
            text = f"{len(failed)} of {len(trajectories)} episodes of {player} play failed: {failed[0].error}"
            found.append(Finding("episodes", PROBLEM, text))
    return found or [Finding("episodes", OK, f"{sum(map(len, played.values()))} played, none failed")]


def gold_is_best(played: dict[str, list[Trajectory]]) -> list[Finding]:
    """Gold answers succeed on every task, and no other policy earns more on any of them."""
    if "gold" not in played:
        return [Finding("gold", NOTE, "not proved: there is no expert_action(), which says the right next action")]
    gold = {t.task_id: t for t in played["gold"] if not t.failed}
    found = []
    if lost := [id for id, t in gold.items() if not t.success]:
        text = f"expert_action does not succeed on {len(lost)} of {len(gold)} tasks ({_some(lost)}): the expert, the answer or"
        found.append(Finding("gold", PROBLEM, f"{text} the grading is wrong there"))
    for player in ("null", "random"):
        more = [
            t.task_id
            for t in played[player]
            if not t.failed and t.task_id in gold and t.reward > gold[t.task_id].reward + 1e-9
        ]
        if more:
            text = f"{player} play earns more than expert_action on {len(more)} of {len(gold)} tasks ({_some(more)})"
            # Luck may beat a sound expert, against an opponent that errs, say; silence may not, nor luck on the whole.
            lucky = player == "random" and _mean(played[player]) < _mean(played["gold"])
            found.append(Finding("gold", NOTE if lucky else PROBLEM, text))
    if any(finding.state == PROBLEM for finding in found) or not gold:
        return found
    rewards = [t.reward for t in gold.values()]
    spread = f"{min(rewards):g}" if min(rewards) == max(rewards) else f"{min(rewards):g} to {max(rewards):g}"
    return [Finding("gold", OK, f"succeeds on all {len(gold)} tasks, reward {spread}"), *found]


def silence_pays_least(played: dict[str, list[Trajectory]], own_random: bool) -> list[Finding]:
    """The null policy earns less than gold answers on average, and no more than the random policy.

    Silence that pays teaches silence: a policy that does badly learns to say nothing.
    """
    found = []
    null, random_play = played["null"], played["random"]
    if any(not t.failed for t in played.get("gold", ())) and any(not t.failed for t in null):
        silent, best = _mean(null), _mean(played["gold"])
        if silent >= best - 1e-9:
            text = f"null play earns {silent:.4g} a task, and expert_action no more ({best:.4g})"
            found.append(Finding("floor", PROBLEM, f"{text}: {_CHARGE}"))
    tasks = {t.task_id: t.reward for t in random_play if not t.failed}
    pairs = [(tasks[t.task_id], t.reward) for t in null if not t.failed and t.task_id in tasks]
    if not pairs or (difference := paired_difference(pairs)).mean <= 1e-9:
        return found
    text = f"null play earns {difference.b:.4g} a task, random play {difference.a:.4g} on the same {len(pairs)}"
    if not own_random:
        text += " with random words, as there is no random_action(rng)"
    # Two interval widths from 0, not one: of environments where silence is as good as random play, one in 40 would fail.
    if (
        difference.low is not None
        and len(pairs) >= _FEWEST
        and difference.mean > 2 * (difference.mean - difference.low)
    ):
        found.append(Finding("floor", PROBLEM, f"{text}: {_CHARGE}"))
    else:
        found.append(Finding("floor", NOTE, f"{text}: that may be chance; play more tasks (-n)"))
    return found


def _mean(trajectories: Sequence[Trajectory]) -> float:
    rewards = [t.reward for t in trajectories if not t.failed]
    return sum(rewards) / len(rewards) if rewards else 0.0


def floor_is_low(scores: dict[str, Score], floor: float | None, own_random: bool) -> list[Finding]:
    """Null and random policies rarely succeed."""
    gold, found = scores.get("gold"), []
    for player in ("null", "random"):
        score = scores[player]
        if score.success is None or score.success_low is None or score.success_high is None:
            continue
        reach = (
            f"{player} play succeeds in {score.success:.1%} (95%: {score.success_low:.1%} to {score.success_high:.1%})"
        )
        if player == "random" and not own_random:
            reach += " with random words, as there is no random_action(rng)"
        if floor is not None and score.success > floor:
            found.append(Finding("floor", PROBLEM, f"{reach}, more than the floor of {floor:.1%}"))
        elif floor is None and player == "null" and score.success > 0:
            text = f"{reach}: an empty reply should earn nothing; if it may, say how much with --floor"
            found.append(Finding("floor", PROBLEM, text))
        elif floor is None and gold is not None and gold.success is not None and score.success >= gold.success:
            found.append(Finding("floor", PROBLEM, f"{reach}, no less than gold: the tasks tell nobody apart"))
        else:
            found.append(Finding("floor", OK, reach))
    return found


async def _repeats(
    spec: EnvSpec,
    played: dict[str, list[Trajectory]],
    tasks: dict[str, Task],
    limits: Limits,
    concurrency: int,
    say: Callable[[str], None],
) -> list[Finding]:
    if spec.nondeterministic:
        return [Finding("repeats", NOTE, "not proved: it is registered with nondeterministic=True")]
    before = [t for trajectories in played.values() for t in trajectories[:REPLAYED] if not t.failed]
    again = [
        (Episode(tasks[t.task_id], number, t.seed), [turn.reply for turn in t.turns]) for number, t in enumerate(before)
    ]
    say(f"replaying {len(again)} episodes here")
    found = _compared(
        "repeats", "played again", before, await replay(spec, again, limits=limits, concurrency=concurrency)
    )
    say(f"replaying {len(again)} episodes in another process")
    try:
        there = await replay_elsewhere(spec, again, limits=limits, timeout=60 + 3 * sum(t.seconds for t in before))
    except (ElsewhereError, ValueError) as error:
        return [*found, Finding("other process", PROBLEM, str(error))]
    return [*found, *_compared("other process", "in another process", before, there)]


def _compared(check: str, how: str, before: Sequence[Trajectory], after: Sequence[Trajectory]) -> list[Finding]:
    different = []
    for one, two in zip(before, after, strict=True):
        if two.failed:
            different.append(f"{one.task_id} fails ({two.error})")
        elif (turn := _first_difference(shown(one), shown(two))) is not None:
            different.append(f"{one.task_id} at turn {turn}")
    if different:
        text = f"{len(different)} of {len(before)} episodes differ {how} with the same task, seed and replies: {_some(different)}"
        advice = "draw from self.np_random and the task only, and depend on no order of sets"
        return [Finding(check, PROBLEM, f"{text}: {advice}")]
    return [Finding(check, OK, f"{len(before)} episodes give the same observations and rewards {how}")]


def _first_difference(one: Sequence[str], two: Sequence[str]) -> int | None:
    pairs = itertools.zip_longest(one, two)
    return next((turn for turn, (a, b) in enumerate(pairs) if a != b), None)


def compare_splits(spec: EnvSpec) -> list[Finding]:
    """Every split loads, ids are unique over all of them, and no two splits share a problem."""
    found, read = [], {}
    for split in SPLITS:
        try:
            tasks = spec.tasks(split)
        except ValueError:
            continue
        except Exception as error:
            found.append(Finding("splits", PROBLEM, f"the split {split!r} does not load: {said(error)}"))
            continue
        read[split] = _first_tasks(tasks), len(tasks)
    for name in ("train", "test"):
        if name not in read:
            found.append(Finding("splits", NOTE, f"there is no split {name!r}"))
    ids = Counter(task.id for tasks, _ in read.values() for task in tasks)
    if twice := [id for id, count in ids.items() if count > 1]:
        text = f"{len(twice)} task id(s) come more than once ({_some(twice)}): ids are unique over all splits"
        found.append(Finding("splits", PROBLEM, text))
    problems = {split: {_problem(task): task.id for task in tasks} for split, (tasks, _) in read.items()}
    for one, two in itertools.combinations(problems, 2):
        if shared := problems[one].keys() & problems[two].keys():
            names = _some([f"{problems[one][key]} = {problems[two][key]}" for key in sorted(shared)])
            text = f"{len(shared)} task(s) of {two} are tasks of {one} too ({names}): keep one of the two"
            found.append(Finding("splits", PROBLEM, text))
    sizes = ", ".join(
        f"{split} {total:,}" + (f" ({len(tasks):,} read)" if len(tasks) < total else "")
        for split, (tasks, total) in read.items()
    )
    if any(finding.state == PROBLEM for finding in found):
        return found
    return [*found, Finding("splits", OK, f"{sizes}; no problem is in two of them")]


def _first_tasks(tasks: TaskSet) -> list[Task]:
    until = time.monotonic() + READ_SECONDS
    return list(itertools.takewhile(lambda _: time.monotonic() < until, itertools.islice(tasks, READ)))


def _problem(task: Task) -> str:
    """The content of a task, without its id; without its seed too, where it has other content."""
    metadata = {key: value for key, value in task.metadata.items() if key not in _BESIDE_THE_PROBLEM}
    content = [list(task.messages), task.answer, metadata]
    return json.dumps(content if any(content) else task.seed, sort_keys=True, default=str)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
