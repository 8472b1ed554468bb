"""Memory of a process that has imported all it needs, and will live long."""

from __future__ import annotations

import ctypes
import gc


def settle_memory() -> None:
    """Give back what imports have left over, and let the collector never write to what is there now: forks would share nothing
    of it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)
    gc.freeze()
