"""One episode's code: runs and submissions, and the feedback on them."""

from __future__ import annotations

import re
from collections.abc import Callable

from agentgym.core.messages import Message, Observation, text_of, user
from agentgym.tools.text_forms import spoken
from agentgym.tools.toolset import ToolError, ToolSet
from agentgym_envs.code.grading import Report
from agentgym_envs.code.problems import Problem

SUBMIT = "SUBMIT"
HINT = (
    f"I found no code. Write Python in a block that begins with ```python, to run it; with a line {SUBMIT} after the block,"
    " to submit it."
)
_FENCED = dict.fromkeys(("python", "python3", "py", ""), "run")
_PRINTED = 1500  # characters shown of a program's output


def tools_for(take: Callable[[str, str], str]) -> ToolSet:
    """The tools of an attempt; both call `take(verb, code)`. A Python block counts as a call of `run`."""

    def run(code: str) -> str:
        """Run Python code against the public tests: shows which of them fail, and what the code prints.

        Args:
            code: the whole program.
        """
        return take("run", code)

    def submit(code: str) -> str:
        """Submit Python code as the final answer: hidden tests judge it, and the work ends.

        Args:
            code: the whole program.
        """
        return take("submit", code)

    return ToolSet([run, submit], fenced=_FENCED)


class Attempt:
    """An agent's attempts at one problem."""

    def __init__(self, problem: Problem, grade: Callable[[Problem, str, tuple[str, ...]], Report]):
        self.problem = problem
        self.code: str | None = None
        self.report: Report | None = None
        self.last = False
        self._grade = grade
        self._busy = False  # True once this reply has made its call
        self._tools = tools_for(self.take)

    def take(self, verb: str, code: str) -> str:
        if self._busy:
            raise ToolError("not done: one call in a reply, please")
        self._busy = True
        self.code = code
        if verb == "submit" or self.last:
            self.report = self._grade(self.problem, code, self.problem.tests)
            return judged(self.report)
        public = self.problem.public
        return _told(self._grade(self.problem, code, public or ("pass",)), bool(public))

    def answer(self, message: Message, last: bool) -> Observation:
        self.last, self._busy = last, False
        observation = self._tools.answer(message) if message.get("tool_calls") else [user(self._answer_text(message))]
        if last and self.report is None and self.code is not None:
            self._busy = False
            observation.append(user(self.take("submit", self.code)))
        return observation

    def _answer_text(self, message: Message) -> str:
        """Process a text reply; the last of its calls and blocks counts."""
        calls = self._tools.calls_of(message)
        if isinstance(calls, str):
            return f"Error: {calls}"
        if not says_submit(text_of(message)):
            return self._tools.call(calls[-1].name, calls[-1].arguments) if calls else HINT
        arguments = calls[-1].arguments if calls else {"code": self.code}
        return HINT if arguments.get("code") is None else self._tools.call("submit", arguments)


def says_submit(text: str) -> bool:
    """True if the first or last non-blank spoken line is the word that submits."""
    lines = [line.strip() for line in spoken(text).splitlines() if line.strip()]
    return bool(lines) and SUBMIT in (lines[0], lines[-1])


def fenced(code: str) -> str:
    """Code as a Python block, with a fence longer than any in the code."""
    fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", code)), default=0))
    return f"{fence}python\n{code.strip(chr(10))}\n{fence}"


def judged(report: Report) -> str:
    """The verdict on a submission as text; of the hidden tests it reveals only how many passed."""
    if report.success:
        return f"Correct: {report.passed} of {report.total} hidden tests passed."
    return f"Wrong: {report.passed} of {report.total} hidden tests passed." + (
        f"\n{report.error}" if report.error else ""
    )


def _told(report: Report, has_public: bool) -> str:
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
