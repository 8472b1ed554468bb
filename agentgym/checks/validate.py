"""`validate`: shows that an environment measures what it should.

Gold answers earn the most, null and random policies the floor, and the same actions the same rewards, also in another process.
"""

import asyncio
import itertools
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from agentgym.checks.audit import limits_of
from agentgym.checks.contract import SPLITS, first_tasks, sizes_of, spread
from agentgym.checks.subject import PROBLEM, Finding, named, note, ok, problem, said
from agentgym.core.registration import EnvSpec
from agentgym.core.tasks import Task
from agentgym.core.trajectory import Trajectory
from agentgym.core.usage_error import making
from agentgym.evaluate.statistics import paired_difference, success_interval
from agentgym.policies.base import ExpertPolicy, NullPolicy, Policy, RandomPolicy, ScriptedPolicy
from agentgym.rollout.episode import Episode, Limits, close_env, run_many
from agentgym.rollout.replays import ElsewhereError, replay, replay_elsewhere, shown

_REPLAYED = 10  # episodes of each player that are played again
_FEWEST = 5  # tasks that two players must both have played before a difference of theirs is called one
_CHARGE = "a reply that cannot be read must cost at least what a bad one does, or take a step in its place"
_RANDOM_WORDS = " with random words, as there is no random_action(rng)"
_NAMED = 3  # tasks that a finding names
# Fields that tell tasks apart and are not part of the problem.
_BESIDE_THE_PROBLEM = frozenset({"split", "source", "index", "id"})


PlayerScore = dict[str, Any]
"""The results of one `player`: "gold" (`expert_action`), "null" (says nothing) or "random" (`random_action`, or random text).

`reward` is the mean, `success` has a 95% interval. Failed episodes count in `errors` and in no other number. None without episodes.
"""


@dataclass
class Validation:
    env: str
    split: str
    tasks: int = 0
    scores: list[PlayerScore] = field(default_factory=list)
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
    """Prove an environment on the first n tasks of a split; `say` is told each step.

    `floor` is the greatest share of successes that null and random play may have. None: null has none, and random play has
    fewer than gold. Raises ValueError if there is no such split or n is below 1.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, not {n}")
    started = time.perf_counter()
    with making(spec.id):
        tasks = list(spec.tasks(split).take(n))
        bare: Any = spec.make().unwrapped
    limits = limits_of(bare, limits)
    expert, own_random = hasattr(bare, "expert_action"), hasattr(bare, "random_action")
    await close_env(bare)
    if not tasks:
        raise ValueError(f"{spec.id}: the split {split!r} has no tasks")
    found = Validation(spec.id, split, len(tasks))

    say("reading the tasks of every split")
    found.findings += named("splits", await asyncio.to_thread(compare_splits, spec))
    played: dict[str, list[Trajectory]] = {}
    failures: list[Finding] = []
    for player, make in _players(expert, own_random, seed).items():
        say(f"{player}: {len(tasks)} episodes")
        episodes = [Episode(task, 0, seed) for task in tasks]
        played[player] = await run_many(
            spec.make, make, episodes, concurrency=concurrency, limits=limits, env_id=spec.id
        )
        if player == "gold" and all("NotImplementedError" in (t.error or "") for t in played[player]):
            del played[player]  # a class with an expert for some of its environments, and this is none of them
            continue
        found.scores.append(score_of(player, played[player]))
        if failed := [t for t in played[player] if t.failed]:
            text = f"{len(failed)} of {len(played[player])} episodes of {player} play failed"
            failures += problem(f"{text}: {failed[0].error}")
    failures = failures or ok(f"{sum(map(len, played.values()))} played, none failed")
    found.findings += named("episodes", failures) + named("gold", gold_is_best(played))
    scores = {score["player"]: score for score in found.scores}
    if floor is None or not scores["null"]["success"] or scores["null"]["success"] > floor:
        found.findings += named("floor", silence_pays_least(played, own_random))
    found.findings += named("floor", floor_is_low(scores, floor, own_random))
    found.findings += await _repeats(spec, played, {task.id: task for task in tasks}, limits, concurrency, say)
    found.seconds = time.perf_counter() - started
    return found


def _players(expert: bool, own_random: bool, seed: int) -> dict[str, Callable[[Episode], Policy]]:
    def by_chance(episode: Episode) -> Policy:
        rng = random.Random(f"{seed} {episode.task.id}")
        if own_random:
            return RandomPolicy(rng=rng)
        words = ("yes", "no", "0", "1", "42", "a", "left", "the answer")
        return ScriptedPolicy(lambda messages: " ".join(rng.choice(words) for _ in range(3)))

    gold: dict[str, Callable[[Episode], Policy]] = {"gold": lambda episode: ExpertPolicy()} if expert else {}
    return {**gold, "null": lambda episode: NullPolicy(), "random": by_chance}


def score_of(player: str, trajectories: Sequence[Trajectory]) -> PlayerScore:
    ended = [t for t in trajectories if not t.failed]
    score: PlayerScore = {"player": player, "episodes": len(ended), "errors": len(trajectories) - len(ended)}
    names = ("reward", "reward_min", "reward_max", "success", "success_low", "success_high", "turns")
    if not ended:
        return score | dict.fromkeys(names)
    rewards = [t.reward for t in ended]
    success = sum(t.success for t in ended) / len(ended)
    interval = success_interval([[t.success] for t in ended])
    turns = sum(len(t.turns) for t in ended) / len(ended)
    return score | dict(zip(names, (_mean(ended), min(rewards), max(rewards), success, *interval, turns), strict=True))


def _mean(trajectories: Sequence[Trajectory]) -> float:
    rewards = [t.reward for t in trajectories if not t.failed]
    return sum(rewards) / len(rewards) if rewards else 0.0


def gold_is_best(played: dict[str, list[Trajectory]]) -> list[Finding]:
    """Gold answers succeed on every task, and no other policy earns more on any of them."""
    if "gold" not in played:
        return note("not proved: there is no expert_action(), which says the right next action")
    gold = {t.task_id: t for t in played["gold"] if not t.failed}
    found = []
    if lost := [id for id, t in gold.items() if not t.success]:
        text = f"expert_action does not succeed on {len(lost)} of {len(gold)} tasks ({_some(lost)})"
        found += problem(f"{text}: the expert, the answer or the grading is wrong there")
    for player in ("null", "random"):
        both = [t for t in played[player] if not t.failed and t.task_id in gold]
        if more := [t.task_id for t in both if t.reward > gold[t.task_id].reward + 1e-9]:
            text = f"{player} play earns more than expert_action on {len(more)} of {len(gold)} tasks ({_some(more)})"
            # Luck may beat a sound expert, against an opponent that errs, say; silence may not, nor luck on the whole.
            lucky = player == "random" and _mean(played[player]) < _mean(played["gold"])
            found += note(text) if lucky else problem(text)
    if any(finding.state == PROBLEM for finding in found) or not gold:
        return found
    return ok(f"succeeds on all {len(gold)} tasks, reward {spread([t.reward for t in gold.values()])}") + found


def silence_pays_least(played: dict[str, list[Trajectory]], own_random: bool) -> list[Finding]:
    """The null policy earns less than gold answers on average, and no more than the random policy.

    If silence pays, a policy that does badly learns silence.
    """
    found = []
    null, random_play = played["null"], played["random"]
    if any(not t.failed for t in played.get("gold", ())) and any(not t.failed for t in null):
        silent, best = _mean(null), _mean(played["gold"])
        if silent >= best - 1e-9:
            found += problem(f"null play earns {silent:.4g} a task, and expert_action no more ({best:.4g}): {_CHARGE}")
    tasks = {t.task_id: t.reward for t in random_play if not t.failed}
    pairs = [(tasks[t.task_id], t.reward) for t in null if not t.failed and t.task_id in tasks]
    if not pairs or (difference := paired_difference(pairs)).mean <= 1e-9:
        return found
    text = f"null play earns {difference.b:.4g} a task, random play {difference.a:.4g} on the same {len(pairs)}"
    text += "" if own_random else _RANDOM_WORDS
    # Two interval widths from 0, not one: of environments where silence is as good as random play, one in 40 would fail.
    low = -math.inf if difference.low is None or len(pairs) < _FEWEST else difference.low
    if difference.mean > 2 * (difference.mean - low):
        return found + problem(f"{text}: {_CHARGE}")
    return found + note(f"{text}: that may be chance; play more tasks (-n)")


def floor_is_low(scores: dict[str, PlayerScore], floor: float | None, own_random: bool) -> list[Finding]:
    """Null and random policies rarely succeed."""
    gold, found = scores.get("gold", {}).get("success"), []
    for player in ("null", "random"):
        if (success := scores[player]["success"]) is None:
            continue
        interval = f"95%: {scores[player]['success_low']:.1%} to {scores[player]['success_high']:.1%}"
        reach = f"{player} play succeeds in {success:.1%} ({interval})"
        if player == "random" and not own_random:
            reach += _RANDOM_WORDS
        if floor is not None and success > floor:
            found += problem(f"{reach}, more than the floor of {floor:.1%}")
        elif floor is None and player == "null" and success > 0:
            found += problem(f"{reach}: an empty reply should earn nothing; if it may, say how much with --floor")
        elif floor is None and gold is not None and success >= gold:
            found += problem(f"{reach}, no less than gold: the tasks tell nobody apart")
        else:
            found += ok(reach)
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
        return named("repeats", note("not proved: it is registered with nondeterministic=True"))
    before = [t for trajectories in played.values() for t in trajectories[:_REPLAYED] if not t.failed]
    again = [(Episode(tasks[t.task_id], i, t.seed), [turn.reply for turn in t.turns]) for i, t in enumerate(before)]
    say(f"replaying {len(again)} episodes here")
    here = _compared("played again", before, await replay(spec, again, limits=limits, concurrency=concurrency))
    say(f"replaying {len(again)} episodes in another process")
    try:
        there = await replay_elsewhere(spec, again, limits=limits, timeout=60 + 3 * sum(t.seconds for t in before))
        elsewhere = _compared("in another process", before, there)
    except (ElsewhereError, ValueError) as error:
        elsewhere = problem(str(error))
    return named("repeats", here) + named("other process", elsewhere)


def _compared(how: str, before: Sequence[Trajectory], after: Sequence[Trajectory]) -> list[Finding]:
    different = []
    for one, two in zip(before, after, strict=True):
        pairs = enumerate(itertools.zip_longest(shown(one), shown(two)))
        if two.failed:
            different.append(f"{one.task_id} fails ({two.error})")
        elif (turn := next((turn for turn, (a, b) in pairs if a != b), None)) is not None:
            different.append(f"{one.task_id} at turn {turn}")
    if different:
        text = f"{len(different)} of {len(before)} episodes differ {how} with the same task, seed and replies: {_some(different)}"
        return problem(f"{text}: draw from self.np_random and the task only, and depend on no order of sets")
    return ok(f"{len(before)} episodes give the same observations and rewards {how}")


def compare_splits(spec: EnvSpec) -> list[Finding]:
    """Every split loads, ids are unique over all of them, and no two splits share a problem."""
    found, read = [], {}
    for split in SPLITS:
        try:
            tasks = spec.tasks(split)
        except ValueError:
            continue
        except Exception as error:
            found += problem(f"the split {split!r} does not load: {said(error)}")
            continue
        read[split] = first_tasks(tasks, 20_000, 10.0), len(tasks)
    for name in ("train", "test"):
        if name not in read:
            found += note(f"there is no split {name!r}")
    ids = Counter(task.id for tasks, _ in read.values() for task in tasks)
    if twice := [id for id, count in ids.items() if count > 1]:
        text = f"{len(twice)} task id(s) come more than once ({_some(twice)})"
        found += problem(f"{text}: ids are unique over all splits")
    problems = {split: {_problem(task): task.id for task in tasks} for split, (tasks, _) in read.items()}
    for one, two in itertools.combinations(problems, 2):
        if shared := problems[one].keys() & problems[two].keys():
            names = _some([f"{problems[one][key]} = {problems[two][key]}" for key in sorted(shared)])
            found += problem(f"{len(shared)} task(s) of {two} are tasks of {one} too ({names}): keep one of the two")
    if any(finding.state == PROBLEM for finding in found):
        return found
    return found + ok(f"{sizes_of(read)}; no problem is in two of them")


def _problem(task: Task) -> str:
    """The content of a task, without its id; without its seed too, where it has other content."""
    metadata = {key: value for key, value in task.metadata.items() if key not in _BESIDE_THE_PROBLEM}
    content = [list(task.messages), task.answer, metadata]
    return json.dumps(content if any(content) else task.seed, sort_keys=True, default=str)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
