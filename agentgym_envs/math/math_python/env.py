"""Mathematics with Python; answers (numbers, expressions, sets, intervals, matrices) are compared symbolically."""

from __future__ import annotations

import random

from agentgym.core.tasks import Task, TaskSet
from agentgym.tools.text_forms import FinalAnswer, answer_in
from agentgym_envs.math.math_python.tasks import check_problem, load_problems
from agentgym_envs.math.python_env import PythonEnv
from agentgym_envs.math.symbolic import require_mpmath, same_answer

INSTRUCTION = r"""Solve the problem. You can compute with Python: reply with a block such as
```python
from fractions import Fraction
print(sum(Fraction(1, n) for n in range(1, 5)))
```
and wait for what it prints. Variables are kept from block to block. When you are done, reply without a block and put the final answer in \boxed{}, for example \boxed{\frac{25}{12}}."""
HINT = (
    "I found neither a block of Python nor an answer. Write a ```python block, or put the final answer in \\boxed{}, "
    "for example \\boxed{\\frac{25}{12}}."
)


class MathPython(PythonEnv):
    r"""A problem of mathematics with a Python session.

    The answer is the content of the last `\boxed{}` in a reply without a call. It is right if it is equivalent to the
    task's answer: `\frac{1}{2}`, `1/2` and `0.5` are equal. A comparison that takes over 5 seconds counts as wrong.

    See `agentgym_envs.math.python_env.PythonEnv` for the rest and the settings. Tasks need `messages` and an `answer`
    in LaTeX, without dollar signs.
    """

    instruction = INSTRUCTION
    hint = HINT

    @classmethod
    def default_tasks(cls, split: str = "train") -> TaskSet:
        """MATH's "train" (7,500) or MATH-500 as "test"; the shipped problems (40 and 12) without them."""
        return load_problems(split)

    @staticmethod
    def check(task: Task) -> None:
        require_mpmath()
        check_problem(task)

    def stated(self, text: str) -> FinalAnswer | None:
        return answer_in(text, "boxed")

    def judge(self, answer: str) -> bool:
        return same_answer(str(self.current_task.answer), answer)

    def expert_program(self) -> str:
        return str(self.current_task.metadata.get("program", ""))

    def expert_answer(self) -> str:
        return f"The answer is \\boxed{{{self.current_task.answer}}}."

    def random_answer(self, rng: random.Random) -> str:
        return f"\\boxed{{{rng.randint(0, 1000)}}}"
