"""A problem of mathematics over several turns, with a Python session in a sandbox."""

from __future__ import annotations

import random
from abc import abstractmethod
from typing import Any, ClassVar

from agentgym.core.env import Step
from agentgym.core.messages import Action, assistant
from agentgym.core.tasks import Task, TaskSet
from agentgym.tools.text_forms import FinalAnswer
from agentgym.tools.toolset import Tool, ToolSet
from agentgym_envs.math.problem_env import ProblemEnv
from agentgym_envs.math.python_session import PythonSession

FENCED = {"python": "python", "py": "python"}


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


class PythonEnv(ProblemEnv):
    """A problem with a Python session; the base of `MathPython` and `GSM8KPython`.

    A reply may call the tool `python`, natively (`tool_calls`) or in its text (`<tool_call>...</tool_call>`, or fenced
    Python blocks), and gets the printed output. A reply without a call that states an answer ends the episode: reward
    1.0 for the right one, else 0.0. Any other reply gets a hint. Every reply takes a turn.

    One Python process runs the code of an episode, in a sandbox that `init` acquires (`reset` for later episodes) and
    the end of the episode releases. If the sandbox fails on the first code of an episode, a fresh one is tried once. A
    later failure ends the
    episode: as the agent's failure with reward 0.0 if the back end is up, else with `SandboxError`.

    Args:
        tasks: see `agentgym.Env`.
        max_turns: replies, 8 by default.
        sandbox: "docker", "bubblewrap" or "auto"; None: what `AGENTGYM_SANDBOX` says, else "auto".
        image: of the sandbox.
        timeout: seconds for one call. The calls of one reply have twice that; later ones are skipped.
        max_output: characters returned of stdout and of stderr per call.
        render_mode: unused, as in every text environment.
    """

    max_turns = 8
    tools: ClassVar[list[dict[str, Any]]] = [
        {"type": "function", "function": {"name": "python", "description": _DESCRIPTION, "parameters": _PARAMETERS}}
    ]
    hint: ClassVar[str]

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
        self._tools = ToolSet(
            [Tool("python", _DESCRIPTION, _PARAMETERS, self._session.run)], fenced=FENCED, seconds=2 * timeout
        )

    @abstractmethod
    def stated(self, text: str) -> FinalAnswer | None:
        """The answer that a reply states, or None."""

    @abstractmethod
    def judge(self, answer: str) -> bool:
        """True if an answer is right."""

    @abstractmethod
    def expert_program(self) -> str:
        """Code that computes the answer, or ""."""

    @abstractmethod
    def expert_answer(self) -> str:
        """A reply that states the right answer."""

    @abstractmethod
    def random_answer(self, rng: random.Random) -> str:
        """A well-formed final reply that is almost surely wrong."""

    def init(self, task: Task) -> None:
        super().init(task)
        self._session.open()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        opened = super().reset(seed=seed, options=options)
        self._session.open(RESET_SECONDS)
        return opened

    def step(self, action: Action) -> Step:
        """Run the calls, or judge the answer. `info`: `success`; after an answer also `answer` and `expected`."""
        result = self._step(action)
        if not self.running:
            self._session.close()
        return result

    def close(self) -> None:
        self._session.close()
        super().close()

    def _step(self, action: Action) -> Step:
        text = self.read(action)
        results = self._tools.answer(assistant(action))
        if results:
            return self.outcome(results, success=False)
        stated = self.stated(text)
        if stated is None or stated.problem:
            told = self.hint if stated is None else f"I cannot read the answer: {stated.problem}."
            return self.outcome(told, success=False)
        right = self.judge(stated.text)
        return self.outcome(
            "Correct." if right else "Wrong.",
            float(right),
            terminated=True,
            success=right,
            answer=stated.text,
            expected=str(self.current_task.answer),
        )

    def expert_action(self) -> str:
        """The gold program as a fenced block, then the answer; the answer at once if there is one turn."""
        program = self.expert_program()
        if not program or self.turn > 0 or self.max_turns == 1:
            return self.expert_answer()
        return f"```python\n{program}\n```"

    def random_action(self, rng: random.Random) -> str:
        if rng.random() < 0.5:
            return self.random_answer(rng)
        return f"```python\nprint({rng.randint(0, 100)} {rng.choice('+-*')} {rng.randint(0, 100)})\n```"
