"""School word problems: GSM8K if available, else 40 shipped problems; SVAMP (arXiv 2103.07191); and bases of environments.

The bases pose any problem of mathematics; a subclass says which, if not these.
"""

import random
import re
from typing import Any, ClassVar

from agentgym import datasets
from agentgym.core.env import Env, Opening, Step
from agentgym.core.messages import Action, assistant, instructed, user
from agentgym.core.tasks import Task, TaskSet
from agentgym.tools.text_forms import FinalAnswer
from agentgym.tools.toolset import ToolSet
from agentgym_envs.data_sets import GSM8K_HUB, SVAMP
from agentgym_envs.math.answers import number_of, stated_answer
from agentgym_envs.math.arithmetic import compute, parse, written
from agentgym_envs.splits import check_split, own_tasks, split_of

_ANNOTATION = re.compile(r"<<([^<>]*)>>")  # GSM8K marks every calculation: 3 + 4 = <<3+4=7>>7


def load_word_problems(split: str = "train") -> TaskSet:
    """The tasks of a split, from `AGENTGYM_DATA`, Hugging Face or the package; `source` says which.

    A task has the question as its message, the gold number (text) as its answer and the worked solution in GSM8K's form
    in `metadata["solution"]`. `metadata["difficulty"]` is the number of marked calculations in it, if any.
    """
    check_split("gsm8k", split)
    return datasets.load(
        f"gsm8k/{split}.jsonl",
        split,
        name=f"gsm8k/{split}",
        parse=lambda record, place: _task(record, f"gsm8k-{split}-{place}", split),
        shipped=lambda: own_word_problems(split),
        hub=GSM8K_HUB,
    )


def own_word_problems(split: str) -> TaskSet:
    own, source = "agentgym_envs.math", "the project's own word problems"
    return own_tasks(own, "problems.jsonl", split, lambda r, id: _task(r, id, split), name="gsm8k", source=source)


def _task(record: dict[str, Any], id: str, split: str) -> Task:
    solution = record["answer"]
    gold = solution.rpartition("####")[2].strip()
    if number_of(gold) is None:
        raise ValueError(f"no gold number after '####' in the answer {solution!r:.200}")
    metadata = {"split": split, "solution": solution}
    steps = len(_ANNOTATION.findall(solution))
    return Task(id, (user(record["question"]),), gold, metadata=metadata | ({"difficulty": steps} if steps else {}))


def solution_of(task: Task) -> str:
    """A right reply: the worked solution without annotations, or the bare answer without one."""
    solution = task.metadata.get("solution")
    return _ANNOTATION.sub("", solution) if isinstance(solution, str) else f"#### {task.answer}"


def calculations_of(task: Task) -> list[str]:
    """The expressions annotated in the worked solution, in order, without their results."""
    marks = _ANNOTATION.findall(str(task.metadata.get("solution", "")))
    return [mark.rpartition("=")[0] for mark in marks if "=" in mark]


def load_svamp(split: str = "train") -> TaskSet:
    """The problems of a split, by a hash of their text, from `svamp/svamp.jsonl` in the data folder."""
    check_split("svamp", split)
    file = datasets.require("svamp", SVAMP)

    def task(record: dict[str, Any], place: int) -> Task:
        body = record["Body"].strip()
        question = f"{body}{'' if body.endswith(('.', ',', '?')) else ','} {record['Question'].strip()}"
        answer = written(compute(parse(str(record["Answer"]))))
        solution = f"<<{record['Equation'].strip()}={answer}>>\n#### {answer}"
        return Task(f"svamp-{place}", (user(question),), answer, metadata={"solution": solution})

    found = TaskSet.from_jsonl(file, parse=task, name="svamp")
    tasks = [task for task in found if split_of(str(task.messages[0]["content"])) == split]
    return TaskSet(tasks, name=f"svamp/{split}", source=str(file))


class ProblemEnv(Env):
    """Poses a task's messages, with the class's `instruction` at the end of the last."""

    instruction: ClassVar[str]

    @classmethod
    def default_tasks(cls, split: str = "train") -> TaskSet:
        """GSM8K's "train" (7,473) or "test" (1,319); the shipped problems (30 and 10) without it."""
        return load_word_problems(split)

    def check(self, task: Task) -> None:
        """Raise ValueError if the task's answer has the wrong form."""
        if number_of(str(task.answer)) is None:
            raise ValueError(
                f"task {task.id!r}: the answer must be a number, as text or as a value, not {task.answer!r:.100}"
            )

    def init(self, task: Task) -> None:
        if not task.messages:
            raise ValueError(f"task {task.id!r} has no messages: the question is missing")
        self.check(task)
        super().init(task)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        super().reset(seed=seed, options=options)
        return instructed(self.current_task.messages, self.instruction), {}

    def expert_answer(self) -> str:
        return solution_of(self.current_task)

    def random_answer(self, rng: random.Random) -> str:
        """A well-formed final reply that is almost surely wrong."""
        return f"#### {rng.randint(0, 1000)}"


class ToolProblemEnv(ProblemEnv):
    """A problem over several turns with tools, which a subclass puts into `_toolset`.

    A reply that calls tools gets the results. A reply without a call that states an answer ends the episode: reward 1.0
    for the right one, else 0.0. Any other reply gets a hint.
    """

    hint: ClassVar[str]
    _toolset: ToolSet

    def stated(self, text: str) -> FinalAnswer | None:
        """The answer that a reply states: the number after "####", in `\\boxed{}` or after "answer is"."""
        answer = stated_answer(text)
        if answer is None:
            return None
        short = written(answer)
        return FinalAnswer(short if number_of(short) == answer else str(answer))

    def judge(self, answer: str) -> bool:
        """True if an answer is right: numbers are compared exactly."""
        return number_of(answer) == number_of(str(self.current_task.answer))

    def step(self, action: Action) -> Step:
        """Run the calls, or judge the answer. `info`: `success`; after an answer also `answer` and `expected`."""
        text = self.read(action)
        results = self._toolset.answer(assistant(action))
        if results:
            return self.outcome(results, success=False)
        stated = self.stated(text)
        if stated is None or stated.problem:
            told = self.hint if stated is None else f"I cannot read the answer: {stated.problem}."
            return self.outcome(told, success=False)
        right = self.judge(stated.text)
        info = {"success": right, "answer": stated.text, "expected": str(self.current_task.answer)}
        return self.outcome("Correct." if right else "Wrong.", float(right), terminated=True, **info)
