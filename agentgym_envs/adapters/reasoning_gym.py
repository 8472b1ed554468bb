"""Reasoning Gym's procedural data sets as environments. See README.md beside this file."""

import contextlib
import functools
import json
import random
import threading
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from agentgym.core.env import Env, Opening, Step
from agentgym.core.messages import Action, user
from agentgym.core.tasks import Task, TaskSet
from agentgym.processes.isolate import START_SECONDS, WAIT_SECONDS, WorkerDied, call_isolated
from agentgym.tools.text_forms import answer_in, spoken
from agentgym_envs.adapters.foreign import check_name, imported, plain, settings_key
from agentgym_envs.adapters.reasoning_gym_eval import evaluate_no_programs
from agentgym_envs.splits import check_split

with contextlib.suppress(ImportError):
    import reasoning_gym  # noqa: F401 - here: a worker that scores loads it before its time begins

_UNREADABLE = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    SyntaxError,
    RecursionError,
    MemoryError,
)
APART = 1_000_000_000  # between the seeds of the two splits
INSTRUCTION = "When you are done, put the final answer, and nothing else, between <answer> and </answer>."
_lock = threading.Lock()


class ReasoningGymEnv(Env):
    """A puzzle from a Reasoning Gym data set, answered in one message."""

    max_turns = 1

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any] | None = None,
        seed: int = 0,
        size: int = 1_000,
        score_timeout: float = 10.0,
        tasks: TaskSet | None = None,
        max_turns: int | None = None,
        render_mode: str | None = None,
    ):
        _check(name)
        super().__init__(tasks or self.default_tasks("train", name, settings, seed, size), max_turns, render_mode)
        self.name = name
        self._timeout = score_timeout
        self.step_seconds = WAIT_SECONDS + START_SECONDS + score_timeout  # others may be scored first
        self._entry: dict[str, Any] = {}

    @classmethod
    def default_tasks(
        cls,
        split: str = "train",
        name: str = "",
        settings: Mapping[str, Any] | None = None,
        seed: int = 0,
        size: int = 1_000,
    ) -> TaskSet:
        check_split(f"reasoning_gym:{name}", split)
        _check(name)
        settings_key(settings or {})
        start = seed if split == "train" else seed + APART
        where = {"name": name, "settings": dict(settings or {}), "seed": start, "size": size}
        _data(settings_key(where))
        return TaskSet(functools.partial(_task, where, split), name=f"{name}/{split}", source="generated", size=size)

    def init(self, task: Task) -> None:
        where, index = task.metadata.get("dataset"), task.metadata.get("index")
        if not isinstance(where, Mapping) or not isinstance(index, int):
            raise ValueError(f"task {task.id!r} is not from a reasoning_gym data set: take tasks from default_tasks")
        if where.get("name") != self.name:
            raise ValueError(f"task {task.id!r} is of {where.get('name')!r}, not of {self.name!r}")
        entry = _entry(where, index)
        if [str(entry["question"])] != [message["content"] for message in task.messages]:
            raise ValueError(
                f"task {task.id!r}: reasoning_gym regenerates a different puzzle: make the tasks again, or, if this version made"
                " them, set the same PYTHONHASHSEED in all processes"
            )
        self._entry = entry
        super().init(task)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        super().reset(seed=seed, options=options)
        return [user(f"{self._entry['question']}\n\n{INSTRUCTION}")], {}

    def step(self, action: Action) -> Step:
        """Score the answer: the content of the last `<answer>` tag, or all text after the last thought."""
        answer = answer_of(self.read(action))
        where = dict(self.current_task.metadata["dataset"])
        try:
            score = call_isolated(f"{__name__}:score", where, self._entry, answer, timeout=self._timeout)
            wrong = {"unreadable": True} if score is None else {}
        except TimeoutError:
            score, wrong = None, {"timed_out": True}
        except WorkerDied:  # of the answer, as by too much memory
            score, wrong = None, {"unreadable": True}
        return self.outcome([], score or 0.0, terminated=True, success=(score or 0.0) >= 1.0, **wrong)

    def expert_action(self) -> str:
        """The data set's own answer. A few data sets have none and accept any valid answer."""
        if self._entry["answer"] in (None, "None"):
            raise NotImplementedError(f"reasoning_gym:{self.name} has no expert")
        return f"<answer>{self._entry['answer']}</answer>"

    def random_action(self, rng: random.Random) -> str:
        return f"<answer>{rng.randint(-1000, 1000)}</answer>"


def answer_of(text: str) -> str:
    found = answer_in(text)
    return spoken(text).strip() if found is None else found.text


def score(where: Mapping[str, Any], entry: dict[str, Any], answer: str) -> float | None:
    """The data set's `score_answer` for an answer to one of its entries; None if it cannot parse the answer.

    Some data sets raise instead. The entry is valid, so such an exception is due to the answer.
    """
    try:
        data = _data(settings_key(where))
        evaluate_no_programs()
        return _mended(where["name"], float(data.score_answer(answer, entry)), answer, str(entry["answer"]))
    except _UNREADABLE:
        return None


def _mended(name: str, score: float, answer: str, right: str) -> float:
    """The score of an answer, also where the data set's own pays wrong ones in full."""
    if name == "complex_arithmetic" and "nan" in answer.lower():
        return 0.0  # whose distance from the result counts as none
    if name == "game_of_life_halting":  # any text counts as true, "False" too
        return float(answer.strip().casefold() == right.casefold())
    if name == "coin_flip" and 0.0 < score <= 1.0:  # the share of the shorter number that both begin with
        ours, theirs = (float(Fraction(text.replace(",", ""))) for text in (answer, right))
        lengths = sorted(len(f"{number:.10g}") for number in (ours, theirs))
        return score if abs(ours - theirs) <= 1e-4 else score * lengths[0] / lengths[1]
    return score


def _check(name: str) -> None:
    check_name("reasoning_gym", name, imported("reasoning_gym", "reasoning_gym.factory").DATASETS)


def _task(where: Mapping[str, Any], split: str, index: int) -> Task:
    entry = _entry(where, index)
    return Task(
        id=f"{where['name']}-{split}-{index}",
        messages=(user(str(entry["question"])),),
        answer=plain(entry["answer"]),
        metadata={"dataset": dict(where), "index": index},
    )


def _entry(where: Mapping[str, Any], index: int) -> dict[str, Any]:
    with _lock:  # some data sets keep mutable state
        return dict(_data(settings_key(where))[index])


@functools.lru_cache(maxsize=64)
def _data(key: str) -> Any:
    where = json.loads(key)
    factory = imported("reasoning_gym", "reasoning_gym.factory")
    try:
        return factory.create_dataset(where["name"], seed=where["seed"], size=where["size"], **where["settings"])
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"reasoning_gym:{where['name']} refuses its settings {where['settings']}: {error}") from error
