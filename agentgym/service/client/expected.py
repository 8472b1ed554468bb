"""What a served environment is made with, against what a client expects of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentgym.storage.jsonl import line_of

_ABSENT = "there is no such argument"


def difference(expects: Mapping[str, Any], made_with: Any) -> str:
    """How what a server makes its environment with differs from what is expected, in words; "" where it does not.

    Args:
        expects: arguments that it must have. What else it has does not count.
        made_with: all its arguments, as the server told them.
    """
    there = made_with if isinstance(made_with, dict) else {}
    for name, value in expects.items():
        # As JSON, which is how the server told it: a tuple here is a list there.
        if line_of(there.get(name, _ABSENT)) != line_of(value):
            what = f"{name}={there[name]!r}" if name in there else f"no {name}"
            return f"{name}={value!r} is expected, and the server makes it with {what}: serve it with that, or expect what it has"
    return ""
