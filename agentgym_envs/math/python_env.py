"""A problem of mathematics over several turns, with a Python session in a sandbox."""

import ast
import random
from typing import Any, ClassVar

from agentgym.core.env import Opening, Step
from agentgym.core.messages import Action
from agentgym.core.tasks import Task, TaskSet
from agentgym.tools.toolset import Tool, ToolSet
from agentgym_envs.math.arithmetic import parse
from agentgym_envs.math.problem_env import ToolProblemEnv
from agentgym_envs.math.python_session import PythonSession
from agentgym_envs.math.word_problems import calculations_of

_DESCRIPTION = (
    "Run Python code and return what it prints, and the value of an expression on its last line. "
    "Variables are kept from one call to the next. There is no network and no input."
)
_PARAMETERS = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "the program text."}},
    "required": ["code"],
    "additionalProperties": False,
}
RESET_SECONDS = 50.0  # to acquire a sandbox in `reset`; a little less than its limit in `Limits`


class PythonEnv(ToolProblemEnv):
    """A problem with the tool `python`, which fenced Python blocks call too; see `ToolProblemEnv`.

    One Python process runs the code of an episode, in a sandbox that `init` acquires (`reset` for later episodes) and
    the end of the episode releases. If the sandbox fails on the first code of an episode, a fresh one is tried once. A
    later failure ends the episode: as the agent's failure with reward 0.0 if the back end is up, else with
    `SandboxError`.
    """

    max_turns = 8
    tools: ClassVar[list[dict[str, Any]]] = [
        {"type": "function", "function": {"name": "python", "description": _DESCRIPTION, "parameters": _PARAMETERS}}
    ]

    def __init__(
        self,
        tasks: TaskSet | None = None,
        max_turns: int | None = None,
        sandbox: str | None = None,
        image: str = "python",
        timeout: float = 10.0,
        max_output: int = 4000,
        render_mode: str | None = None,
    ):
        if not timeout > 0 or max_output < 100:
            raise ValueError(f"timeout must be positive and max_output at least 100, not {timeout} and {max_output}")
        super().__init__(tasks=tasks, max_turns=max_turns, render_mode=render_mode)
        self.sandbox_image = image
        self._session = PythonSession(sandbox, image, timeout, max_output)
        run = Tool("python", _DESCRIPTION, _PARAMETERS, self._session.run)
        self._toolset = ToolSet([run], fenced={"python": "python", "py": "python"}, seconds=2 * timeout)

    def expert_program(self) -> str:
        """Code that computes the answer, or "": it prints each calculation of the gold solution."""
        return "\n".join(f"print({ast.unparse(parse(text))})" for text in calculations_of(self.current_task))

    def init(self, task: Task) -> None:
        super().init(task)
        self._session.open()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        opened = super().reset(seed=seed, options=options)
        self._session.open(RESET_SECONDS)
        return opened

    def step(self, action: Action) -> Step:
        result = super().step(action)
        if not self.running:
            self._session.close()
        return result

    def close(self) -> None:
        self._session.close()
        super().close()

    def expert_action(self) -> str:
        program = self.expert_program()
        if not program or self.turn > 0 or self.max_turns == 1:
            return self.expert_answer()
        return f"```python\n{program}\n```"

    def random_action(self, rng: random.Random) -> str:
        if rng.random() < 0.5:
            return self.random_answer(rng)
        return f"```python\nprint({rng.randint(0, 100)} {rng.choice('+-*')} {rng.randint(0, 100)})\n```"
