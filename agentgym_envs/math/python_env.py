"""A problem of mathematics over several turns, with a Python session in a sandbox."""

import ast
import random
from dataclasses import replace
from typing import Any

from agentgym import sandbox as sandboxes
from agentgym.core.env import Opening, Step
from agentgym.core.messages import Action
from agentgym.core.tasks import Task, TaskSet
from agentgym.sandbox import ExecResult, Sandbox, SandboxError, SandboxSpec, Session
from agentgym.tools.toolset import ToolSet, shortened
from agentgym_envs.math.arithmetic import parse
from agentgym_envs.math.word_problems import ToolProblemEnv, calculations_of

# The order of a set of strings, and so the output of code, must not change from run to run.
ENVIRONMENT = {"PYTHONHASHSEED": "0"}
_ENDED = (
    "Note: the Python process had ended since the last call; this code ran in a new one, without the old variables."
)
INIT_SECONDS = 110.0
RETRY_SECONDS = 30.0  # to acquire a sandbox within a step
RESET_SECONDS = 50.0  # to acquire a sandbox in `reset`; a little less than its limit in `Limits`


class PythonEnv(ToolProblemEnv):
    """A problem with the tool `python`, which fenced Python blocks call too; see `ToolProblemEnv`.

    One Python process runs the code of an episode, in a sandbox that `init` acquires (`reset` for later episodes) and
    the end of the episode releases. If the sandbox fails on the first code of an episode, a fresh one is tried once.
    """

    max_turns = 8
    judging_seconds = 0.0  # that an answer may take to compare

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
        self.sandbox, self.timeout, self.max_output = sandbox, timeout, max_output
        # A message's calls, of which the last may begin just in time, and a second sandbox if the first has failed.
        self.step_seconds = 3 * timeout + RETRY_SECONDS + self.judging_seconds
        self._spec = SandboxSpec(image=image, env=ENVIRONMENT)
        self._sandbox: Sandbox | None = None
        self._session: Session | None = None
        self._used = False  # True once code has run: a failure then loses state
        self._toolset = ToolSet([self.python], fenced={"python": "python", "py": "python"}, seconds=2 * timeout)
        self.tools = self._toolset.schemas  # type: ignore[misc]

    def expert_program(self) -> str:
        """Code that computes the answer, or "": it prints each calculation of the gold solution."""
        return "\n".join(f"print({ast.unparse(parse(text))})" for text in calculations_of(self.current_task))

    def init(self, task: Task) -> None:
        super().init(task)
        self._open(INIT_SECONDS)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        opened = super().reset(seed=seed, options=options)
        self._open(RESET_SECONDS)
        return opened

    def step(self, action: Action) -> Step:
        result = super().step(action)
        if not self.running:
            self._release()
        return result

    def close(self) -> None:
        self._release()
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

    def python(self, code: str) -> str:
        """Run Python code and return what it prints, and the value of an expression on its last line.
        Variables are kept from one call to the next. There is no network and no input.

        Args:
            code: the program text.
        """
        try:
            try:
                result = self._run(code)
            except SandboxError:
                if self._used:
                    raise
                self._release()
                self._open(RETRY_SECONDS)
                result = self._run(code)
        except (SandboxError, OSError, ValueError):
            self._release()  # it is unusable
            raise
        output = (part.strip("\n") for part in (result.stdout, result.stderr) if part.strip())
        parts = [shortened(part, self.max_output) for part in output]
        alive = self._session is not None and self._session.alive
        after = "its variables are kept" if alive else "the session was restarted, its variables are lost"
        if result.oom_killed:
            parts.append(f"Error: the code used more than {self._spec.memory >> 20} MB of memory; {after}.")
        elif result.timed_out:
            parts.append(f"Error: the code did not end within {self.timeout:g} seconds; {after}.")
        elif not alive:
            parts.append(f"Error: the code ended the Python process (exit code {result.exit_code}); {after}.")
        return "\n".join(parts) or "(nothing was printed)"

    def _open(self, seconds: float) -> None:
        """A sandbox without variables: one that is not used yet is kept, else a new one is acquired."""
        if self._used or self._sandbox is None or not self._sandbox.alive:
            self._release()
            self._sandbox = sandboxes.acquire(self._spec, backend=self.sandbox, timeout=seconds)

    def _run(self, code: str) -> ExecResult:
        if self._sandbox is None:
            raise SandboxError("no sandbox is held: call reset() first")
        if self._session is None or not self._session.alive:
            self._session = self._sandbox.session("python")
        try:
            result = self._session.run(code, timeout=self.timeout)
        except ValueError:  # its own background code ended it since the last call
            self._session = self._sandbox.session("python")
            result = self._session.run(code, timeout=self.timeout)
            result = replace(result, stderr=f"{result.stderr}\n{_ENDED}")
        self._used = True
        return result

    def _release(self) -> None:
        sandbox, self._sandbox, self._session, self._used = self._sandbox, None, None, False
        if sandbox is not None:
            sandbox.close()
