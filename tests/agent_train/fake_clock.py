"""Time that passes only while nothing is to do."""

import asyncio


class FakeClock(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer as soon as nothing else is to do. Nothing may run in a thread."""

    now = 0.0

    def time(self):
        return self.now

    def _run_once(self):
        timers = [] if self._ready else [timer.when() for timer in self._scheduled if not timer.cancelled()]
        self.now = max(self.now, min(timers, default=0.0))
        super()._run_once()


def with_fake_clock(coroutine):
    """The result of a coroutine, and the seconds that have passed."""
    with asyncio.Runner(loop_factory=FakeClock) as runner:
        return runner.run(coroutine), runner.get_loop().now
