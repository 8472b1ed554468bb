"""Mathematics with Python; answers (numbers, expressions, sets, intervals, matrices) are compared symbolically.

See README.md beside this file. The tasks are those of MATH if available, else 52 shipped problems.
"""

import math
import random
import re
from typing import Any

from agentgym import datasets
from agentgym.core.messages import text_of, user
from agentgym.core.tasks import Task, TaskSet
from agentgym.processes.isolate import START_SECONDS, WAIT_SECONDS
from agentgym.tools.text_forms import FinalAnswer, answer_in
from agentgym_envs.data_sets import MATH_PARTS
from agentgym_envs.math.python_env import PythonEnv
from agentgym_envs.math.symbolic import SECONDS, plain, require_mpmath, same_answer
from agentgym_envs.splits import check_split, own_tasks


class MathPython(PythonEnv):
    r"""A problem of mathematics with a Python session; see `agentgym_envs.math.python_env.PythonEnv`."""

    judging_seconds = START_SECONDS + WAIT_SECONDS + SECONDS

    instruction = r"""Solve the problem. You can compute with Python: reply with a block such as
```python
from fractions import Fraction
print(sum(Fraction(1, n) for n in range(1, 5)))
```
and wait for what it prints. Variables are kept from block to block. When you are done, reply without a block and put the final answer in \boxed{}, for example \boxed{\frac{25}{12}}."""
    hint = (
        "I found neither a block of Python nor an answer. Write a ```python block, or put the final answer in "
        "\\boxed{}, for example \\boxed{\\frac{25}{12}}."
    )

    @classmethod
    def default_tasks(cls, split: str = "train") -> TaskSet:
        """MATH's "train" (7,500) or MATH-500 as "test"; the shipped problems (40 and 12) without them.

        `metadata` has `subject`, and `program` (prints the answer) for shipped problems or `solution` (worked) for MATH.
        """
        check_split("math_python", split)
        hub, hub_split = MATH_PARTS[split]
        return datasets.load(
            f"math/{split}.jsonl",
            hub_split,
            name=f"math/{split}",
            parse=lambda record, place: task_of(record, f"math-{split}-{place}", split),
            shipped=lambda: own_problems(split),
            hub=hub,
        )

    def check(self, task: Task) -> None:
        require_mpmath()
        answer = task.answer
        if not isinstance(answer, str | int | float) or isinstance(answer, bool) or not str(answer).strip():
            raise ValueError(f"task {task.id!r}: the answer must be LaTeX or a number, not {answer!r:.100}")

    def stated(self, text: str) -> FinalAnswer | None:
        return answer_in(text, "boxed")

    def judge(self, answer: str) -> bool:
        gold = str(self.current_task.answer)
        return not said_again(text_of(self.current_task.messages[-1]), gold, answer) and same_answer(gold, answer)

    def expert_program(self) -> str:
        return str(self.current_task.metadata.get("program", ""))

    def expert_answer(self) -> str:
        return f"The answer is \\boxed{{{self.current_task.answer}}}."

    def random_answer(self, rng: random.Random) -> str:
        return f"\\boxed{{{rng.randint(0, 1000)}}}"


def own_problems(split: str) -> TaskSet:
    package, source = "agentgym_envs.math.math_python", "the project's own problems"
    return own_tasks(package, "problems.jsonl", split, lambda r, id: task_of(r, id, split), name="math", source=source)


_FORMULA = re.compile(r"\$\$?([^$]+)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.DOTALL)
_UNSQUEEZED = re.compile(r"\s+|\\(?:left|right)\b|\\[,;!: ]|[.,]$")
_FRAC = re.compile(r"\\[dt]?frac(?:(\d)(\d)|(?=\{))")
_COMPUTED = re.compile(r"[-+*/^!|<>]|\\[a-zA-Z]|\)\(")
_NUMBER = re.compile(r"-?\d[\d.]*|-?(?:\\frac\{(\d{1,15})\}\{(\d{1,15})\}|(\d{1,15})/(\d{1,15}))")


def said_again(question: str, gold: str, answer: str) -> bool:
    r"""True if an answer is a formula of the question: \sin 75^\circ is no answer to "What is $\sin 75^\circ$?".

    A number, also a fraction in lowest terms, and the gold answer as it is written may be in the question.
    """
    said = _squeezed(plain(answer))
    formulas = [next(filter(None, groups)) for groups in _FORMULA.findall(question)]
    asked = {_squeezed(part) for formula in formulas for part in (formula, *formula.split("="))}
    if said not in asked or said == _squeezed(plain(gold)) or not _COMPUTED.search(said):
        return False
    number = _NUMBER.fullmatch(said)
    return number is None or math.gcd(*(int(part) for part in number.groups() if part)) > 1


def _squeezed(latex: str) -> str:
    """LaTeX without spaces, and with one way to write a fraction."""
    return _UNSQUEEZED.sub(
        "", _FRAC.sub(lambda found: rf"\frac{{{found[1]}}}{{{found[2]}}}" if found[1] else r"\frac", latex.strip())
    )


_BOXED_WITHOUT_BRACES = re.compile(r"\\boxed\s+([^\s$.{]+)")  # in two of MATH's solutions


def task_of(record: dict[str, Any], id: str, split: str) -> Task:
    """A task from a record: `problem`, and `answer`, or `solution` with the answer in its last `\\boxed{}` as in MATH."""
    answer = record.get("answer")
    if not answer:
        stated = answer_in(str(record.get("solution", "")), "boxed")
        bare = _BOXED_WITHOUT_BRACES.findall(str(record.get("solution", "")))
        answer = (stated.text if stated else "") or (bare[-1] if bare else "")
    if not answer:
        raise ValueError(f"{id}: no answer, and none in \\boxed{{}} in the solution")
    subject = record.get("subject") or record.get("type") or ""
    metadata = {"split": split, "subject": subject}
    metadata |= {key: record[key] for key in ("level", "program", "solution") if record.get(key)}
    if subject:
        metadata["tags"] = [subject]
    if level := re.fullmatch(r"(?:Level )?(\d+)", str(record.get("level", ""))):
        metadata["difficulty"] = int(level[1])
    return Task(id, (user(record["problem"]),), str(answer), metadata=metadata)
