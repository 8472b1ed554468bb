"""Multi-turn program synthesis, the base of `code_mbpp` and `code_humaneval`."""

import random
import re
from typing import Any, ClassVar, Literal

from agentgym.core.env import Env, Opening, Step
from agentgym.core.messages import Action, Message, Observation, assistant, instructed, text_of, user
from agentgym.core.tasks import Task, TaskSet
from agentgym.tools.text_forms import spoken
from agentgym.tools.toolset import ToolError, ToolSet
from agentgym_envs.code import grading
from agentgym_envs.code.problems import problem_of
from agentgym_envs.settings import check_choice, check_number

SUBMIT = "SUBMIT"
HINT = (
    f"I found no code. Write Python in a block that begins with ```python, to run it; with a line {SUBMIT} after the block,"
    " to submit it."
)
_PRINTED = 1500  # characters shown of a program's output
INSTRUCTION = f"""Write Python code in a block that begins with ```python and ends with ```. It is run, and you see which public \
tests fail and what it prints; then you can write it again. To submit the code, put a line with the word {SUBMIT} after the \
block: hidden tests judge it, and you are done. You have {{turns}}; after the last one the latest code counts as submitted."""


class CodeEnv(Env):
    """A programming problem over several turns: write code, see the result, submit it. See mbpp/README.md."""

    DATA: ClassVar = ("auto", "own")
    max_turns = 5
    sandbox_image = "python"

    def __init__(
        self,
        reward: Literal["all", "fraction"] = "all",
        timeout: float = 5.0,
        data: str = "auto",
        sandbox: str | None = None,
        tasks: TaskSet | None = None,
        max_turns: int | None = None,
        render_mode: str | None = None,
    ):
        super().__init__(tasks=tasks, max_turns=max_turns, render_mode=render_mode)
        check_choice("reward", reward, ("all", "fraction"))
        check_choice("data", data, self.DATA)
        self.reward = reward
        self.sandbox = sandbox
        check_number("timeout", timeout, 0.001, 10_000)
        self.timeout = float(timeout)
        # A run, and a sandbox for it; a second sandbox if the first has failed.
        self.step_seconds = 2 * self.timeout + 2 * grading.WAIT
        blocks = dict.fromkeys(("python", "python3", "py"), "run")
        self._labelled = ToolSet([self.run, self.submit], fenced=blocks)
        self._toolset = ToolSet([self.run, self.submit], fenced={**blocks, "": "run"})
        self.tools = self._toolset.schemas  # type: ignore[misc]

    def init(self, task: Task) -> None:
        problem_of(task)
        super().init(task)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        super().reset(seed=seed, options=options)
        self._problem = problem_of(self.current_task)
        self._code: str | None = None  # run or submitted last
        self._report: grading.Report | None = None  # on the submission
        turns = "one reply" if self.max_turns == 1 else f"{self.max_turns} replies"
        return instructed(self.current_task.messages, INSTRUCTION.replace("{turns}", turns)), {}

    def step(self, action: Action) -> Step:
        """Run or judge code. `info`: `success`; at the end also `verdict`, and assertions `passed` of `total`."""
        self.read(action)
        observation = self._answer(assistant(action))
        report = self._report or (grading.Report("none") if self._is_last else None)
        if report is None:
            return self.outcome(observation, success=False)
        earned = report.passed / report.total if self.reward == "fraction" else float(report.success)
        told = {name: getattr(report, name) for name in ("success", "verdict", "passed", "total")}
        return self.outcome(observation, earned, terminated=self._report is not None, **told)

    @property
    def _is_last(self) -> bool:
        return self.turn >= self.max_turns

    def _answer(self, message: Message) -> Observation:
        self._called = False
        results = self._toolset.answer(message) if message.get("tool_calls") else [user(self._answer_text(message))]
        if self._is_last and self._report is None and self._code is not None:
            self._called = False
            results.append(user(self.submit(self._code)))
        return results

    def _answer_text(self, message: Message) -> str:
        # A block without a language may show what the program prints.
        calls = self._labelled.calls_of(message) or self._toolset.calls_of(message)
        if isinstance(calls, str):
            return f"Error: {calls}"
        if not says_submit(text_of(message)):
            return self._toolset.call(calls[-1].name, calls[-1].arguments) if calls else HINT
        arguments = calls[-1].arguments if calls else {"code": self._code}
        return HINT if arguments.get("code") is None else self._toolset.call("submit", arguments)

    def run(self, code: str) -> str:
        """Run Python code against the public tests: shows which of them fail, and what the code prints.

        Args:
            code: the whole program.
        """
        if self._is_last:
            return self.submit(code)
        self._take(code)
        public = self._problem.public
        return _tried(self._grade(public or ("pass",)), bool(public))

    def submit(self, code: str) -> str:
        """Submit Python code as the final answer: hidden tests judge it, and the work ends.

        Args:
            code: the whole program.
        """
        self._take(code)
        self._report = self._grade(self._problem.tests)
        return _judged(self._report)

    def _take(self, code: str) -> None:
        if self._called:
            raise ToolError("not done: one call in a reply, please")
        self._called, self._code = True, code

    def _grade(self, tests: tuple[str, ...]) -> grading.Report:
        code, times = str(self._code), {"timeout": self.timeout, "budget": 2 * self.timeout}
        return grading.grade(self._problem, code, tests, backend=self.sandbox, **times)

    def expert_action(self) -> str:
        solution = problem_of(self.current_task).solution
        if not solution:
            raise ValueError(f"task {self.current_task.id!r} has no solution")
        return f"{fenced(solution)}\n{SUBMIT}"

    def random_action(self, rng: random.Random) -> str:
        names = problem_of(self.current_task).names
        code = "\n\n".join(f"def {name}(*args, **kwargs):\n    return {rng.randint(10**6, 10**9)}" for name in names)
        return fenced(code) + (f"\n{SUBMIT}" if rng.random() < 0.5 else "")


def says_submit(text: str) -> bool:
    """True if the first or last non-blank spoken line is the word that submits."""
    lines = [line.strip() for line in spoken(text).splitlines() if line.strip()]
    return bool(lines) and SUBMIT in (lines[0], lines[-1])


def fenced(code: str) -> str:
    fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", code)), default=0))
    return f"{fence}python\n{code.strip(chr(10))}\n{fence}"


def _judged(report: grading.Report) -> str:
    verdict = "Correct" if report.success else "Wrong"
    error = f"\n{report.error}" if report.error and not report.success else ""
    return f"{verdict}: {report.passed} of {report.total} hidden tests passed.{error}"


def _tried(report: grading.Report, has_public: bool) -> str:
    if report.error:
        parts = [f"The code does not run.\n{report.error}" if report.verdict != "ended" else report.error]
    elif has_public:
        parts = [f"{report.passed} of {report.total} public tests passed."]
    else:
        parts = ["The code loads. There are no public tests."]
    parts += [f"{failure['test']}\n  {failure['what'] or 'failed'}" for failure in report.failures]
    if report.output.strip():
        cut = "\n(the rest is cut)" if len(report.output) > _PRINTED else ""
        parts.append(f"It printed:\n{report.output[:_PRINTED].rstrip()}{cut}")
    return "\n\n".join(parts)
