"""The texts of a program synthesis episode: a submission's mark, code blocks, and results for the agent."""

import re

from agentgym.tools.text_forms import spoken
from agentgym_envs.code.grading import Report

SUBMIT = "SUBMIT"
HINT = (
    f"I found no code. Write Python in a block that begins with ```python, to run it; with a line {SUBMIT} after the block,"
    " to submit it."
)
_PRINTED = 1500  # characters shown of a program's output


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
    verdict = "Correct" if report.success else "Wrong"
    error = f"\n{report.error}" if report.error and not report.success else ""
    return f"{verdict}: {report.passed} of {report.total} hidden tests passed.{error}"


def tried(report: Report, has_public: bool) -> str:
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
