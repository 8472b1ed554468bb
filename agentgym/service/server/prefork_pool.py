"""Workers that were forked ahead: the next session takes one and waits for no fork."""

from __future__ import annotations

import itertools
import socket
from collections import OrderedDict

from agentgym.service.server.forks import Forks


class PreforkPool:
    """Processes that wait to be told which session is theirs.

    Args:
        forks: where they come from.
        count: how many are kept ready; 0: none.
    """

    def __init__(self, forks: Forks, count: int):
        self._forks = forks
        self._count = count
        self._ready: OrderedDict[str, socket.socket] = OrderedDict()
        self._keys = (f"spare {number}" for number in itertools.count())

    def __len__(self) -> int:
        return len(self._ready)

    def fill(self) -> None:
        """Fork as many as are missing. Not called for one that died: where they die at once, that would have no end."""
        while len(self._ready) < self._count and self._forks.ready:
            try:
                key, control = self.fresh()
            except OSError:  # this process may open no more files; it is tried again
                return
            self._ready[key] = control

    def fresh(self) -> tuple[str, socket.socket]:
        """A process that is forked now: its key at `forks`, and where it is told things. Raises `OSError`: no files are left."""
        key = next(self._keys)
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        self._forks.fork(key, {"waits": True}, [theirs.detach()])
        return key, control

    def take(self) -> tuple[str, socket.socket]:
        """The one that has waited longest, or where there is none, a fresh one."""
        return self._ready.popitem(last=False) if self._ready else self.fresh()

    def lost(self, key: str) -> bool:
        """A process ended; whether it was one of these."""
        control = self._ready.pop(key, None)
        if control is not None:
            control.close()
        return control is not None

    def close(self) -> None:
        """Let all of them go: who waits for nobody ends."""
        for control in self._ready.values():
            control.close()
        self._ready.clear()
