"""Forks of a process that has imported much: what they ask takes no memory in it, and its own is shared with them."""

import ctypes
import gc
import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class SubprocessQueryError(RuntimeError):
    """The process ended without an answer; the message says how. Its traceback, if any, is on stderr."""


def subprocess_query(ask: Callable[[], Any]) -> Any:
    """Run `ask` in a forked process and return its result, which can be pickled. This process must have no threads yet."""
    context = multiprocessing.get_context("fork")
    reading, writing = context.Pipe(duplex=False)

    def answer() -> None:
        with suppress(KeyboardInterrupt):
            writing.send(ask())

    child = context.Process(target=answer)
    child.start()
    writing.close()
    try:
        return reading.recv()
    except EOFError:
        child.join()
        code = child.exitcode or 0
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise SubprocessQueryError(how) from None
    finally:
        reading.close()
        child.join()


def settle_memory() -> None:
    """Return free memory to the system and exempt existing objects from garbage collection, so that forks share their pages."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
    gc.freeze()
