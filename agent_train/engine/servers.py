"""The vLLM servers of a run: placed by Ray, looked at when they fail, and started again when they died.

A server serves, or is dead and being started again, or stale: it runs and has no weights of the run yet.
"""

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from agent_train.cluster.network import serving_address
from agent_train.engine.base import EngineError, EngineLostError
from agent_train.engine.http import healthy
from agent_train.report.timeline import Timeline
from agentgym.processes.vllm_server import ServerState, ServingError, VllmOptions, VllmServer

Progress = Callable[[str, float], None]
SERVES, STALE = "serves", "stale"
FIRST_REST, LONGEST_REST = 0.5, 30.0
HEALTH_SECONDS = 60.0  # on a CPU a server answers nothing while it computes a step
_POLL_SECONDS = 0.25
_REMEMBERED = 4096  # episodes
_ACTOR_SECONDS = 60.0
_LIVE_SECONDS = 10.0
_DYING_SECONDS = 3.0

log = logging.getLogger(__name__)


class Router:
    """Picks among servers by their numbers. Who is done with a picked one lowers its `in_flight`."""

    def __init__(self, size: int):
        self.in_flight = [0] * size
        self._homes: OrderedDict[str, int] = OrderedDict()

    def pick(self, among: Sequence[int], episode: str | None = None) -> int:
        """The server where `episode` was before, if it is named and that one is among them, else the least busy."""
        number = self._homes.get(episode, -1) if episode is not None else -1
        if number not in among:
            number = min(among, key=lambda each: self.in_flight[each])
        if episode is not None:
            self._homes[episode] = number
            self._homes.move_to_end(episode)
            if len(self._homes) > _REMEMBERED:
                self._homes.popitem(last=False)
        self.in_flight[number] += 1
        return number


class _Server(VllmServer):
    def launch_for(self, home: str) -> str:
        """Start the server where processes of the node `home` reach it; its URL."""
        self.options = replace(self.options, host=serving_address(home))
        return self.launch()


@dataclass(eq=False)
class Server:
    """One server: its Ray actor, where it answers, and its state, which of a dead one says why."""

    actor: Any
    options: VllmOptions
    url: str = ""
    state: str = STALE

    async def call(self, method: str, *arguments: Any, seconds: float = _ACTOR_SECONDS) -> Any:
        """Call a method of the actor's `_Server`. Raises EngineError if it fails, is gone or takes too long."""
        import ray

        actor = f"the Ray actor of the vLLM server at {self.url or 'no port yet'}"
        try:
            async with asyncio.timeout(seconds):
                return await getattr(self.actor, method).remote(*arguments)
        except ray.exceptions.RayTaskError as error:
            raise EngineError(str(error.cause if isinstance(error.cause, ServingError) else error)) from error
        except ray.exceptions.RayError as error:
            raise EngineLostError(f"{actor} is gone: {error}") from error
        except TimeoutError as error:
            raise EngineLostError(f"{actor} did not answer {method} within {seconds:g} s") from error

    def obituary(self, state: ServerState) -> str:
        return f"the vLLM server at {self.url} has exited with code {state.exit_code}; log: {self.options.log}\n{state.tail}"


@dataclass
class Servers:
    """All servers of a run, by their numbers.

    Attributes:
        held: Ray's resources and placement of each.
        start_timeout: seconds until one must answer.
    """

    options: Sequence[VllmOptions]
    held: Sequence[Mapping[str, Any]]
    start_timeout: float
    client: aiohttp.ClientSession
    timeline: Timeline = field(default_factory=Timeline)
    all: list[Server] = field(default_factory=list)
    losses: int = 0  # servers that died so far
    _restarting: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def numbers(self, *states: str) -> list[int]:
        return [number for number, server in enumerate(self.all) if server.state in states]

    async def start(self, on_progress: Progress | None) -> None:
        """Start all, and return when all answer. EngineError, with the end of its log, if one cannot start or is late."""
        self.all = [self._placed(number) for number in range(len(self.options))]
        for server in self.all:
            await self._launch(server)
        await asyncio.gather(*(self._ready(server, on_progress) for server in self.all))

    def _placed(self, number: int) -> Server:
        import ray

        options = self.options[number]
        return Server(ray.remote(**self.held[number])(_Server).remote(options), options)

    async def _launch(self, server: Server) -> None:
        import ray

        server.url = await server.call("launch_for", ray.get_runtime_context().get_node_id())

    async def _ready(self, server: Server, on_progress: Progress | None) -> None:
        begun = time.monotonic()
        while True:
            state = await server.call("state")
            seconds = time.monotonic() - begun
            if state.exit_code is not None:
                killed = state.exit_code < 0  # by a signal; one that ends by itself would do so again
                raise (EngineLostError if killed else EngineError)(server.obituary(state))
            if await healthy(self.client, server.url):
                self.timeline.add(("engine", self.all.index(server)), "vLLM starts", begun)
                return
            if seconds > self.start_timeout:
                late = f"the vLLM server was not ready within {self.start_timeout:g} s (engine.start_timeout)"
                raise EngineError(f"{late}; log: {server.options.log}\n{state.tail}")
            if on_progress:
                on_progress(state.last_line, seconds)
            await asyncio.sleep(_POLL_SECONDS)

    async def some(self, *states: str) -> list[int]:
        """The servers in these states; waits for one that is being started again. EngineError if none comes."""
        deadline = time.monotonic() + self.start_timeout
        while not (found := self.numbers(*states)):
            if not self.all:
                raise EngineError("the vLLM engine is closed")
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - time.monotonic())
            except TimeoutError:
                states_of_all = "; ".join(server.state for server in self.all)
                limit = f"{self.start_timeout:g} s (engine.start_timeout)"
                raise EngineLostError(f"no vLLM server came back within {limit}: {states_of_all}") from None
        return found

    async def stale(self) -> None:
        """Return when a server is stale."""
        while not self.numbers(STALE):
            self._changed.clear()
            await self._changed.wait()

    def serve(self, numbers: Sequence[int]) -> None:
        """These have the present weights."""
        for number in numbers:
            self.all[number].state = SERVES
        self._changed.set()

    async def examine(self, number: int, error: EngineError) -> None:
        """After a failure: start the server again if it is dead, or dies in the next seconds, or hangs; else raise the failure."""
        deadline, hangs = time.monotonic() + _DYING_SECONDS, False
        server = self.all[number] if self.all else None
        while server is not None and server in self.all and server.state in (SERVES, STALE):
            if why := await self._why_lost(server, hangs):
                self._lose(number, why)
            elif hangs:
                raise error
            else:
                hangs = time.monotonic() > deadline
                await asyncio.sleep(_POLL_SECONDS)

    async def find_lost(self, hangs: bool = False) -> int:
        """Start those again that died, or with `hangs` do not answer; how many did so since the start."""
        for number in self.numbers(SERVES, STALE):
            server = self.all[number]
            if (why := await self._why_lost(server, hangs)) and server in self.all:
                self._lose(number, why)
        return self.losses

    async def _why_lost(self, server: Server, hangs: bool) -> str:
        try:
            state: ServerState = await server.call("state", seconds=_LIVE_SECONDS)
        except EngineError as error:
            return str(error)
        if state.exit_code is not None:
            return server.obituary(state)
        if not hangs or await healthy(self.client, server.url, HEALTH_SECONDS):
            return ""
        why = f"the vLLM server at {server.url} did not answer /health within {HEALTH_SECONDS:g} s"
        return f"{why}; log: {server.options.log}\n{state.tail}"

    def _lose(self, number: int, why: str) -> None:
        if self.all[number].state not in (SERVES, STALE):
            return
        log.warning("%s; it is started again", why.splitlines()[0])
        self.all[number].state = why
        self.losses += 1
        self._restarting[number] = asyncio.create_task(self._restart(number))

    async def _restart(self, number: int) -> None:
        """Start a server anew, wherever Ray has room, until it answers. It is stale then."""
        rest, begun = FIRST_REST, time.monotonic()
        while True:
            _kill(self.all[number])
            server = self._placed(number)
            server.state = self.all[number].state
            self.all[number] = server
            try:
                await self._launch(server)
                await self._ready(server, None)
                break
            except EngineError as error:
                log.warning("vLLM server %d did not start again: %s", number, error)
                server.state = str(error)
                await asyncio.sleep(rest)
                rest = min(2 * rest, LONGEST_REST)
        server.state = STALE
        self._changed.set()
        self.timeline.add(("engine restart", number), "starts again", begun)

    async def close(self) -> None:
        import ray

        for task in self._restarting.values():
            task.cancel()
        await asyncio.gather(*self._restarting.values(), return_exceptions=True)
        servers, self.all = self.all, []
        self._changed.set()
        ends = (server.call("stop", seconds=20.0) for server in servers if server.state in (SERVES, STALE))
        for result in await asyncio.gather(*ends, return_exceptions=True):
            # A server ends with its actor, which a signal to the whole process group may have ended already.
            if isinstance(result, BaseException) and not isinstance(result.__cause__, ray.exceptions.RayActorError):
                log.warning("a vLLM server did not stop cleanly: %s", result)
        for server in servers:
            _kill(server)


def _kill(server: Server) -> None:
    import ray

    with contextlib.suppress(Exception):  # Ray has ended, and its actors with it
        ray.kill(server.actor)
