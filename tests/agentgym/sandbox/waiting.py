"""Waiting for what threads and other processes do."""

import time


def until(true, what="it", seconds=60.0):
    """Wait for what must come to pass on any machine."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"{what} did not come to pass"
        time.sleep(0.002)
