"""Causes of errors and of cut answers, as results and the viewer count them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from sys import intern

from agentgym.core.trajectory import TOO_LONG

# Finish reasons of answers that are not what the model would have said: cut, withheld, or never asked for.
CUT = ("length", "content_filter", "context")

LONGEST_CAUSE = 300
# Parts in which failures of one kind differ: ids, addresses, numbers. An HTTP status or a line of code is another kind.
_OWN = re.compile(
    r"""(?P<kept>\b(?:answered|status)\ \d{3}\b|\.py:\d+|\bHTTP/[\d.]+)
    |\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b
    |\b(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?\b
    |\b0x[0-9a-fA-F]+\b
    |\b(?=[A-Za-z_-]*\d)[A-Za-z\d]+(?:[_-][A-Za-z\d]+)*[_-](?=[A-Za-z]*\d)[A-Za-z\d]{6,}\b
    |\b(?=[a-zA-Z]*\d)(?=\d*[a-zA-Z])[0-9a-zA-Z]{12,}\b|\b[0-9a-f]{12,}\b
    |(?<![A-Za-z\d.])\d+(?:[.,]\d+)*(?![A-Za-z\d])""",
    re.VERBOSE,
)


def cause_in(error: str) -> str:
    """An error without its task, turn and time, and with # for ids, addresses and numbers, so that like failures count together."""
    return _OWN.sub(lambda found: found["kept"] or "#", failure_in(error)[: 2 * LONGEST_CAUSE])[:LONGEST_CAUSE]


def failure_in(error: str) -> str:
    """An error without its task, turn and time."""
    text = error.strip()
    _, colon, rest = text.partition(": ")
    return re.sub(r" after [\d.]+ s\b", "", rest if colon else text) or "no message"


def finishes_of(reasons: Iterable[str | None], end: str, error: str | None) -> tuple[str, ...]:
    """The finish reasons of an episode's answers, each once, and "context" where a request was longer than the model reads."""
    found = {intern(reason): None for reason in reasons if reason}
    if end == "context" or (error or "").endswith(TOO_LONG):
        found["context"] = None
    elif end == "error" and "content_filter" in (error or ""):  # that of a prompt is a status, and no finish reason
        found["content_filter"] = None
    return tuple(found)
