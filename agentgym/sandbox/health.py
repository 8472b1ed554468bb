"""Health of a back end: asked when a sandbox is lost after an agent's programs ran in it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from agentgym.sandbox.api import Sandbox, SandboxError

PROBE_SECONDS = 20.0  # in which a fresh sandbox must have started and run a program
KEPT_SECONDS = 2.0  # for which an answer holds: many sandboxes may be lost at once

_log = logging.getLogger("agentgym.sandbox")


class Health:
    """The health of one back end, asked by any thread.

    Args:
        open: makes a sandbox, and raises SandboxError where it cannot.
        unbroken_since: whether the back end has run without a restart since a moment of `time.monotonic`.
    """

    def __init__(self, open: Callable[[], Sandbox], unbroken_since: Callable[[float], bool] = lambda then: True):
        self._open = open
        self._unbroken_since = unbroken_since
        self._asking = threading.Lock()
        self._up = False
        self._asked = -KEPT_SECONDS

    def up_since(self, then: float) -> bool:
        """True if the back end was up since a moment and is up now: a fresh sandbox starts and runs `true`."""
        if not self._unbroken_since(then):
            return False
        with self._asking:
            if time.monotonic() >= self._asked + KEPT_SECONDS:
                self._up = self._probe()
                self._asked = time.monotonic()
        return self._up and self._unbroken_since(then)

    def _probe(self) -> bool:
        found: list[bool] = []

        def look() -> None:
            try:
                box = self._open()
                try:
                    found.append(box.exec(["true"]).ok)
                finally:
                    box.close()
            except (SandboxError, OSError) as error:
                _log.warning("the sandboxes' back end is down: %s", error)

        thread = threading.Thread(target=look, name="sandbox health", daemon=True)
        thread.start()
        thread.join(PROBE_SECONDS)
        return found == [True]
