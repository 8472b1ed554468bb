r"""Whether two answers in LaTeX are the same, by `math-verify`: \frac12 and 0.5, (1,2] and 1 < x \le 2, {1,2} and 2, 1.

SymPy can compute for ever over a text that a model chose, so the comparison runs in another process (`agentgym.isolate`), which
imports `agentgym_envs.math.symbolic_worker`.
"""

from __future__ import annotations

import importlib.util
import logging
import re

from agentgym.isolate import WorkerDied, call_isolated

LONGEST_ANSWER = 500  # characters; a longer one is nobody's answer
SECONDS = 5.0  # for one comparison

_log = logging.getLogger(__name__)
_WHOLE = re.compile(r"-?\d{1,15}", re.ASCII)
_PERCENT = re.compile(r"\\?%$")
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


def require_math_verify() -> None:
    """Check that answers can be compared.

    Raises:
        ModuleNotFoundError: the package `math-verify` is not installed.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ModuleNotFoundError("symbolic answers need the package math-verify: pip install 'agentgym-toolkit[math]'")


def same_answer(one: str, other: str, seconds: float = SECONDS) -> bool:
    """Whether two answers are the same value, set, interval, matrix or expression; which is which does not matter.

    Decimals agree to 6 places. A percent sign may be there or not. An answer that is too long, that cannot be read, that
    takes longer than `seconds` to compare, or that crashes the comparison is the same as nothing.

    Raises:
        agentgym.isolate.NoWorker: the comparison could not be started.
        agentgym.isolate.IsolatedCallError: `math-verify` cannot be imported.
    """
    one, other = plain(one), plain(other)
    if not one or not other or max(len(one), len(other)) > LONGEST_ANSWER:
        return False
    if one == other:
        return True
    if _WHOLE.fullmatch(one) and _WHOLE.fullmatch(other):
        return int(one) == int(other)
    try:
        compare = "agentgym_envs.math.symbolic_worker:same"
        return bool(call_isolated(compare, _in_dollars(one), _in_dollars(other), timeout=seconds))
    except (TimeoutError, WorkerDied) as error:
        _log.info("counted as different: %r and %r: %s", one, other, error)
        return False


def plain(answer: str) -> str:
    """An answer without what stands around it: spaces, dollar signs, a full stop; Python's ** becomes ^."""
    answer = answer.strip()
    for opened, closed in _DELIMITERS:
        inner = answer[len(opened) : -len(closed)]
        if answer == f"{opened}{inner}{closed}" and closed not in inner:
            answer = inner.strip()
    return answer.removesuffix(".").rstrip().replace("**", "^")


def _in_dollars(answer: str) -> str:
    """An answer as math-verify finds it in a text; a percent sign counts only outside the dollars."""
    bare = _PERCENT.sub("", answer)
    return f"${bare.rstrip()}$" + ("\\%" if bare != answer else "")
