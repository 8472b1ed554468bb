"""JSON objects that options are given."""

from __future__ import annotations

import json
from typing import Any

from agentgym.core.usage_error import UsageError


def json_object(text: str, option: str) -> dict[str, Any]:
    """The JSON object that an option was given.

    Raises:
        UsageError: it is none.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{option} is no JSON: {error}: {text}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{option} must be a JSON object, not {text}")
    return value
