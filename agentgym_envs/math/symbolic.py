r"""Whether an answer in LaTeX is the gold one: 0.5 for \frac12, 1 < x \le 2 for (1,2], 2, 1 for \{1,2\}, and not 25 for x^2+y^2=25.

A text that a model chose may take long whatever the bounds, so the comparison runs in another process (`agentgym.processes.isolate`), which
imports `agentgym_envs.math.symbolic_worker`.
"""

from __future__ import annotations

import importlib.util
import logging
import re

from agentgym.processes.isolate import WorkerDied, call_isolated

LONGEST_ANSWER = 500  # characters; a longer one is nobody's answer
SECONDS = 5.0  # for one comparison

_log = logging.getLogger(__name__)
_WHOLE = re.compile(r"-?\d{1,15}", re.ASCII)
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


def require_mpmath() -> None:
    """Check that answers can be compared.

    Raises:
        ModuleNotFoundError: the package `mpmath` is not installed.
    """
    if importlib.util.find_spec("mpmath") is None:
        raise ModuleNotFoundError("symbolic answers need the package mpmath: pip install 'agentgym-toolkit[math]'")


def same_answer(gold: str, answer: str, seconds: float = SECONDS) -> bool:
    """Whether an answer is the gold one, in any form that says the same; see `symbolic_worker`. Which is which matters.

    An answer that is too long, that cannot be read, that takes longer than `seconds` to compare, or that crashes the comparison
    is wrong.

    Raises:
        agentgym.processes.isolate.NoWorker: the comparison could not be started.
        agentgym.processes.isolate.IsolatedCallError: `mpmath` cannot be imported.
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
    """An answer without what stands around it: spaces, dollar signs, a full stop; Python's ** becomes ^."""
    answer = answer.strip()
    for opened, closed in _DELIMITERS:
        inner = answer[len(opened) : -len(closed)]
        if answer == f"{opened}{inner}{closed}" and closed not in inner:
            answer = inner.strip()
    return answer.removesuffix(".").rstrip().replace("**", "^")
