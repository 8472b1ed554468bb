"""Memory of a long-lived process after its imports."""

import ctypes
import gc


def settle_memory() -> None:
    """Return free memory to the system and exempt existing objects from garbage collection, so that forks share their pages."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
    gc.freeze()
