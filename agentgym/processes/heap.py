"""The heap of this process."""

import ctypes


def trim_heap() -> None:
    """Return free memory between blocks that are in use to the system, as `free` alone does not. With glibc only, elsewhere nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
