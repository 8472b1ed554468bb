"""Ask a question in a forked process, so that the modules it imports take no memory in this one."""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any


class SubprocessQueryError(RuntimeError):
    """The process ended without an answer; the message says how. Its traceback, if any, is on stderr."""


def subprocess_query(ask: Callable[[], Any]) -> Any:
    """Run `ask` in a forked process and return its result, which must be JSON. This process must have no threads yet."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _answer(ask, writing)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code or not answer:
        raise SubprocessQueryError(f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}")
    return json.loads(answer)


def _answer(ask: Callable[[], Any], writing: int) -> None:
    code = 1
    try:
        answer = json.dumps(ask())
        with os.fdopen(writing, "w", encoding="utf-8") as pipe:
            pipe.write(answer)
        code = 0
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
