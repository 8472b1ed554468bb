"""`check_env` and `examine`, which an author runs before publishing an environment."""

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from agentgym.checks import contract
from agentgym.checks.subject import NOTE, OK, PROBLEM, Finding, Hung, Played, Subject, home_of, named, said
from agentgym.core.env import Env
from agentgym.core.registration import EnvSpec, spec

TIMEOUT = 30.0
_BEAT = 0.1  # seconds between signs of life
Check = Callable[[Subject, list[Played]], Awaitable[list[Finding]]]
# In their order: `values` plays the episodes that the rest compares with, `close` is the last.
_FIRST: tuple[Check, ...] = (contract.spec, contract.tasks, contract.tools, contract.values)
_SAME: tuple[Check, ...] = (contract.repeats, contract.concurrency, contract.other_process)
_REST: tuple[Check, ...] = (
    contract.seeds,
    contract.process_state,
    contract.any_action,
    contract.end,
    contract.rewards,
    contract.gymnasium,
    contract.memory,
    contract.close,
)
_ALWAYS: tuple[Check, ...] = (contract.any_action, contract.close)  # which need no episode to compare with


def _name(check: Check) -> str:
    return check.__name__.replace("_", " ")


CHECKS = tuple(map(_name, (*_FIRST, *_SAME, *_REST)))


def check_env(env: Env | str | EnvSpec, timeout: float = TIMEOUT) -> list[str]:
    return [str(finding) for finding in examine(env, timeout=timeout) if finding.state == PROBLEM]


def examine(
    env: Env | str | EnvSpec, *, timeout: float = TIMEOUT, on_beat: Callable[[], None] = lambda: None
) -> list[Finding]:
    """Examine an environment from outside: reset it, step it with good and bad actions, close it, many times.

    Returns at least one finding for each check that was done, in order.

    Args:
        env: an id, spec or "module:Class" to make it by; or an environment, of which less can be seen.
        timeout: seconds for one call. A longer call is reported, and ends the examination.
        on_beat: called now and then while Python can run, so that a watchdog notices a call that holds the interpreter.
    """
    if not timeout > 0:
        raise ValueError(f"the timeout must be positive, not {timeout:g}")
    watched = _Watched(spec(env) if isinstance(env, str) else env, timeout)
    # A thread, so that an `async def` method that blocks its event loop cannot block who waits here.
    thread = threading.Thread(target=lambda: asyncio.run(watched.run()), name="agentgym check", daemon=True)
    on_beat()
    thread.start()
    while not watched.done.wait(_BEAT):
        on_beat()
        if time.monotonic() - watched.beat > timeout + 1:
            return [*watched.found, watched.blocked(thread)]
    if watched.refused is not None:
        raise watched.refused
    return watched.found


class _Watched:
    """An examination in a thread, which other threads can watch."""

    def __init__(self, what: Any, timeout: float):
        self.found: list[Finding] = []
        self.beat = time.monotonic()
        self.refused: Exception | None = None
        self.done = threading.Event()  # set before the thread ends, which an `async def` call that hangs may prevent
        self._what = what
        self._timeout = timeout
        self._subject: Subject | None = None
        self._check = "making the environment"

    def blocked(self, thread: threading.Thread) -> Finding:
        frame = sys._current_frames().get(thread.ident or 0)
        place = self._subject.home.place_in(frame) if self._subject else ""
        advice = "await what takes long, or make the method a plain `def`, which runs in a thread of its own"
        text = f"an `async def` method blocks the event loop for more than {self._timeout:g} s: {advice}"
        return Finding(self._check, PROBLEM, text, place)

    async def run(self) -> None:
        self._beat()
        try:
            await self._examine()
        except Hung as hung:
            self.found.append(Finding("spec", PROBLEM, str(hung), hung.place))
        except Exception as error:
            self.refused = error
        finally:
            self.done.set()
            if self._subject is not None:
                # A call that was given up ends first, or the executor would take its end for the call's.
                await asyncio.sleep(0)
                self._subject.executor.stop()

    def _beat(self) -> None:
        self.beat = time.monotonic()
        asyncio.get_running_loop().call_later(_BEAT, self._beat)

    async def _examine(self) -> None:
        if isinstance(self._what, EnvSpec):
            self._subject = await Subject.made(self._what, self._timeout)
        else:
            known = self._what.unwrapped.spec
            known = known if isinstance(known, EnvSpec) else None
            self._subject = Subject(self._what, known, home_of(self._what), self._timeout)
        alone: list[Played] = []
        for check in self._chosen(self._subject):
            name = self._check = _name(check)
            try:
                found = await check(self._subject, alone)
            except Hung as hung:
                self.found.append(Finding(name, PROBLEM, str(hung), hung.place))
                break
            except Exception as error:
                found = [Finding(name, PROBLEM, said(error), self._subject.home.place_of(error))]
            self.found += named(name, found) or [Finding(name, OK)]
        if rest := [name for name in CHECKS if name not in {finding.check for finding in self.found}]:
            self.found.append(Finding("the rest", NOTE, f"not looked at before this is mended: {', '.join(rest)}"))

    def _chosen(self, subject: Subject) -> Iterator[Check]:
        """The checks to be done, by what those before have found."""
        yield from _FIRST
        if any(finding.check == "values" and finding.state == PROBLEM for finding in self.found):
            yield from _ALWAYS
            return
        if subject.spec is not None and subject.spec.nondeterministic:
            self.found += [Finding(_name(check), NOTE, "not looked at: nondeterministic=True") for check in _SAME]
        else:
            yield from _SAME
        yield from _REST
