r"""Compares an answer in LaTeX with the gold one: 0.5 matches \frac12, and 1 < x \le 2 matches (1,2].

A model's text may take long to compare despite all bounds, so this runs in a process that imports `symbolic_worker`.
"""

import importlib.util
import logging
import re

from agentgym.core.install import pip_install
from agentgym.processes.isolate import WorkerDied, call_isolated

LONGEST_ANSWER = 500  # characters
SECONDS = 5.0  # for one comparison

_log = logging.getLogger(__name__)
_WHOLE = re.compile(r"-?\d{1,15}", re.ASCII)
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


def require_mpmath() -> None:
    if importlib.util.find_spec("mpmath") is None:
        raise ModuleNotFoundError(f"symbolic answers need the package mpmath: {pip_install('agentgym-toolkit[math]')}")


def same_answer(gold: str, answer: str, seconds: float = SECONDS) -> bool:
    """True if an answer is equivalent to the gold one; see `symbolic_worker`. The comparison is not symmetric.

    An answer that is too long, cannot be parsed, or takes longer than `seconds` to compare is wrong.
    """
    gold, answer = plain(gold), plain(answer)
    if not gold or not answer or max(len(gold), len(answer)) > LONGEST_ANSWER:
        return False
    if gold == answer:
        return True
    if _WHOLE.fullmatch(gold) and _WHOLE.fullmatch(answer):
        return int(gold) == int(answer)
    try:
        return bool(call_isolated("agentgym_envs.math.symbolic_worker:same", gold, answer, timeout=seconds))
    except (TimeoutError, WorkerDied) as error:
        _log.info("counted as different: %r and %r: %s", gold, answer, error)
        return False


def plain(answer: str) -> str:
    """An answer without surrounding spaces, dollar signs and full stop; Python's ** becomes ^."""
    answer = answer.strip()
    for opened, closed in _DELIMITERS:
        inner = answer[len(opened) : -len(closed)]
        if answer == f"{opened}{inner}{closed}" and closed not in inner:
            answer = inner.strip()
    return answer.removesuffix(".").rstrip().replace("**", "^")
