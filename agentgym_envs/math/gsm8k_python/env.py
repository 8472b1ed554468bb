"""School word problems (GSM8K or SVAMP) over several turns with Python, compared exactly."""

from __future__ import annotations

import ast
import random
from typing import Any, Literal

from agentgym.core.tasks import TaskSet
from agentgym.tools.text_forms import FinalAnswer
from agentgym_envs.math.answers import number_of, stated_answer
from agentgym_envs.math.arithmetic import parse, written
from agentgym_envs.math.python_env import PythonEnv
from agentgym_envs.math.word_problems import calculations_of, load_svamp, load_word_problems, solution_of

INSTRUCTION = """Think step by step. You can compute with Python: reply with a block such as
```python
print(3 * (12 + 4))
```
and wait for what it prints. Variables are kept from block to block. When you are done, reply without a block and put the final answer, as a number alone, at the end after "####"."""
HINT = (
    'I found neither a block of Python nor an answer. Write a ```python block, or give the final answer after "####", '
    'for example "#### 42".'
)
DATA = ("gsm8k", "svamp")


class GSM8KPython(PythonEnv):
    r"""A school word problem with a Python session.

    The answer is what a reply without a call states after "####", in `\boxed{}` or after "answer is"; numbers are
    compared exactly, as in `gsm8k`. See `agentgym_envs.math.python_env.PythonEnv` for the rest.

    Args:
        data: "gsm8k" or "svamp".
        settings: those of `PythonEnv`.
    """

    instruction = INSTRUCTION
    hint = HINT

    def __init__(self, data: Literal["gsm8k", "svamp"] = "gsm8k", tasks: TaskSet | None = None, **settings: Any):
        if data not in DATA:
            raise ValueError(f"data must be one of {', '.join(DATA)}, not {data!r}")
        super().__init__(tasks=tasks, **settings)
        self.data = data

    @classmethod
    def default_tasks(cls, split: str = "train", data: str = "gsm8k") -> TaskSet:
        return load_svamp(split) if data == "svamp" else load_word_problems(split)

    @property
    def tasks(self) -> TaskSet:
        if self._tasks is None and self.spec is None:
            self._tasks = self.default_tasks("train", self.data)
        return super().tasks

    def stated(self, text: str) -> FinalAnswer | None:
        answer = stated_answer(text)
        if answer is None:
            return None
        short = written(answer)
        return FinalAnswer(short if number_of(short) == answer else str(answer))

    def judge(self, answer: str) -> bool:
        return number_of(answer) == number_of(str(self.current_task.answer))

    def expert_program(self) -> str:
        return "\n".join(f"print({ast.unparse(parse(text))})" for text in calculations_of(self.current_task))

    def expert_answer(self) -> str:
        return solution_of(self.current_task)

    def random_answer(self, rng: random.Random) -> str:
        return f"#### {rng.randint(0, 1000)}"
