"""School word problems (GSM8K or SVAMP) with Python, compared exactly. See README.md beside this file."""

from typing import Any, Literal

from agentgym.core.tasks import TaskSet
from agentgym_envs.math.python_env import PythonEnv
from agentgym_envs.math.word_problems import load_svamp, load_word_problems
from agentgym_envs.settings import check_choice


class GSM8KPython(PythonEnv):
    r"""A school word problem with a Python session; see `agentgym_envs.math.python_env.PythonEnv`."""

    instruction = """Think step by step. You can compute with Python: reply with a block such as
```python
print(3 * (12 + 4))
```
and wait for what it prints. Variables are kept from block to block. When you are done, reply without a block and put the final answer, as a number alone, at the end after "####"."""
    hint = (
        "I found neither a block of Python nor an answer. Write a ```python block, or give the final answer after "
        '"####", for example "#### 42".'
    )

    def __init__(self, data: Literal["gsm8k", "svamp"] = "gsm8k", tasks: TaskSet | None = None, **settings: Any):
        check_choice("data", data, ("gsm8k", "svamp"))
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
