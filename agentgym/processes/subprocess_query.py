"""A question about environments, answered in a process of its own: what it imports takes no memory in this one."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from agentgym.core.usage_error import UsageError


def told_apart(ask: Callable[[], Any]) -> Any:
    """What `ask` returns, which JSON must be able to hold. For a process that has no threads yet.

    Raises:
        UsageError: as `ask` does, or its process died.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _tell(ask, writing)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if not said:
        code = os.waitstatus_to_exitcode(status)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise UsageError(f"the environments cannot be imported: the process that tried {how}")
    told = json.loads(said)
    if "mistake" in told:
        raise UsageError(told["mistake"])
    return told["answer"]


def _tell(ask: Callable[[], Any], writing: int) -> None:
    """The child's part; does not return."""
    code = 1
    try:
        try:
            told = {"answer": ask()}
        except UsageError as mistake:
            told = {"mistake": str(mistake)}
        with os.fdopen(writing, "w", encoding="utf-8") as pipe:
            json.dump(told, pipe)
        code = 0
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
