"""The vLLM servers of a run: placed by Ray, looked at when something fails, and started again when they are dead.

The health of a server is one of five states; `NEXT` has all ways between them, and `Servers._move` takes them.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import aiohttp

from agent_train.cluster.network import serving_address
from agent_train.engine.base import EngineError, EngineLostError
from agent_train.engine.http import get, healthy, post
from agent_train.report.timeline import Timeline
from agentgym.processes.vllm_server import ServerState, ServingError, VllmOptions, VllmServer

T = TypeVar("T")
Progress = Callable[[str, float], None]
HEALTHY, SUSPECT, DEAD, RESTARTING, STALE = "healthy", "suspect", "dead", "restarting", "stale"
NEXT = {
    RESTARTING: (STALE, DEAD),  # it answers; it did not start
    STALE: (HEALTHY, SUSPECT, DEAD),  # it has the present weights; a call failed; it has ended, or took no weights
    HEALTHY: (STALE, SUSPECT, DEAD),  # weights came to others alone, or not whole; else as above
    SUSPECT: (HEALTHY, STALE, DEAD),  # it answers /health, and has the present weights or not; it does not
    DEAD: (RESTARTING,),  # after a rest
}
RUNNING = (HEALTHY, SUSPECT, STALE)
FIRST_REST, LONGEST_REST = 0.5, 60.0  # before a start; each doubles the next, until the server serves
HEALTH_SECONDS = 60.0  # on a CPU a server answers nothing while it computes a step
GENERATE = "/inference/v1/generate"
HOMES = 16  # of episodes that the router remembers, for each that runs: long ones may rest while many short ones pass
IDLE_SECONDS = 10.0  # more than the limit of a request
_POLL_SECONDS = 0.25
_ACTOR_SECONDS = 60.0
_LIVE_SECONDS = 10.0
_DYING_SECONDS = 3.0

log = logging.getLogger(__name__)


def _now() -> float:
    return asyncio.get_running_loop().time()


class Router:
    """Picks among servers by their numbers, and counts the requests in flight to each."""

    def __init__(self, size: int, episodes: int, timeline: Timeline | None = None):
        self.in_flight = [0] * size
        self._timeline = timeline or Timeline()
        self._idle = asyncio.Event()  # set when the last request in flight has ended
        self._homes: OrderedDict[str, int] = OrderedDict()
        self._most = HOMES * episodes  # `episodes` run at a time

    def pick(self, among: Sequence[int], episode: str | None = None) -> int:
        """The server where `episode` was before, if it is named and that one is among them, else the least busy."""
        number = self._homes.get(episode, -1) if episode is not None else -1
        if number not in among:
            number = min(among, key=lambda each: self.in_flight[each])
        if episode is not None:
            self._homes[episode] = number
            self._homes.move_to_end(episode)
            if len(self._homes) > self._most:
                self._homes.popitem(last=False)
        self.in_flight[number] += 1
        return number

    @contextmanager
    def request(self, among: Sequence[int], episode: str | None) -> Iterator[int]:
        """A request is in flight to the server that is picked."""
        number = self.pick(among, episode)
        self._count(number)
        try:
            yield number
        finally:
            self.in_flight[number] -= 1
            self._count(number)
            if not any(self.in_flight):
                self._idle.set()

    def _count(self, number: int) -> None:
        self._timeline.count(("engine", number), "requests", self.in_flight[number])

    async def until_idle(self, seconds: float) -> None:
        """Return when no request is in flight, of which each may take so long; EngineError if they take longer."""
        self._idle.clear()
        try:
            if any(self.in_flight):
                await asyncio.wait_for(self._idle.wait(), seconds + IDLE_SECONDS)
        except TimeoutError as error:
            raise EngineError(f"requests in flight took longer than engine.request_timeout={seconds:g} s") from error


class _Server(VllmServer):
    def launch_for(self, home: str) -> str:
        """Start the server where processes of the node `home` reach it; its URL."""
        self.options = replace(self.options, host=serving_address(home))
        return self.launch()


@dataclass(eq=False)
class Server:
    """One server: its Ray actor, where it answers, its health and why it is so.

    Attributes:
        loaded: it has the weights that serve.
        limits: of the requests to it; the seconds that are left of each that stands still.
    """

    number: int
    actor: Any
    options: VllmOptions
    url: str = ""
    node: str = ""  # where it was put, if Ray did not choose
    state: str = RESTARTING
    why: str = ""
    loaded: bool = False
    limits: dict[asyncio.Timeout, float | None] = field(default_factory=dict)
    look: asyncio.Task[bool] | None = None

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

    async def why_ended(self) -> str:
        """Why the server or its actor has ended; "" if it has not."""
        try:
            state: ServerState = await self.call("state", seconds=_LIVE_SECONDS)
        except EngineError as error:
            return str(error)
        return "" if state.exit_code is None else self.obituary(state)


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
    _rests: dict[int, float] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _gone: float | None = None  # since when none runs

    def numbers(self, *states: str) -> list[int]:
        return [server.number for server in self.those(*states)]

    def those(self, *states: str) -> list[Server]:
        """The servers in these states. One that is started again is another, of the same number."""
        return [server for server in self.all if server.state in states]

    def _move(self, server: Server, state: str, why: str = "") -> bool:
        """Change the health of a server, told with its reason; False if it is not one from which a way leads there."""
        if server not in self.all or state not in NEXT[server.state]:
            return False
        if why:
            ways = (server.number, server.url, server.state, state, why.splitlines()[0])
            log.warning("vLLM server %d, %s: %s -> %s: %s", *ways)
        server.state, server.why = state, why
        self._gone = None if self.numbers(*RUNNING) else self._gone or _now()
        self._changed.set()
        return True

    async def start(self, on_progress: Progress | None, first: int) -> None:
        """Start the `first` servers, and return when each answers or its place is lost; the others, and the lost, wait for `fill`.

        EngineError, with the end of its log, if one cannot start or is late, or if none is left.
        """
        self.all = [Server(number, None, options, state=DEAD) for number, options in enumerate(self.options)]
        for number in range(first):
            self.all[number] = self._placed(number)
        await asyncio.gather(*(self._begin(server, on_progress) for server in self.all[:first]))
        if not self.numbers(STALE):
            raise EngineLostError(self.all[0].why)

    async def _begin(self, server: Server, on_progress: Progress | None) -> None:
        try:
            await self._come_up(server, on_progress)
            self._move(server, STALE)
        except EngineLostError as error:
            self._move(server, DEAD, f"it did not come: {error}")

    def fill(self) -> None:
        """Start the servers that did not come yet. Call it when the learner has its devices, which they would take."""
        for server in self.all:
            if server.state == DEAD and server.number not in self._restarting:
                self._restarting[server.number] = asyncio.create_task(self._restart(server))

    def _placed(self, number: int) -> Server:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options, held, node = self.options[number], dict(self.held[number]), ""
        if held["scheduling_strategy"] == "SPREAD":
            # By itself this may put all on one node, since they hold none of Ray's resources.
            others = Counter(server.node for server in self.all if server is not self.all[number])
            nodes = [each["NodeID"] for each in ray.nodes() if each["Alive"] and each["Resources"].get("CPU")]
            node = min(nodes, key=lambda each: (others[each], each == self.all[number].node))
            # Of soft ones, Ray may put each where the other is wanted. If the node dies meanwhile, the server is placed again.
            held["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        return Server(number, ray.remote(**held)(_Server).remote(options), options, node=node)

    async def _come_up(self, server: Server, on_progress: Progress | None = None) -> None:
        """Launch a server, and return when it answers."""
        import ray

        server.url = await server.call("launch_for", ray.get_runtime_context().get_node_id())
        begun = _now()
        while True:
            state = await server.call("state")
            seconds = _now() - begun
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
        """The servers in these states; waits while there is none, as long as one runs, else for `start_timeout` (EngineLostError)."""
        while not (found := self.numbers(*states)):
            if not self.all:
                raise EngineError("the vLLM engine is closed")
            self._changed.clear()
            left = None if self._gone is None else self._gone + self.start_timeout - _now()
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                states_of_all = "; ".join(f"{server.state}: {server.why}" for server in self.all)
                limit = f"{self.start_timeout:g} s (engine.start_timeout)"
                raise EngineLostError(f"no vLLM server came back within {limit}: {states_of_all}") from None
        return found

    async def settled(self) -> None:
        """Wait until no server is suspect."""
        if looks := [server.look for server in self.all if server.look]:
            await asyncio.wait(looks)

    async def stale(self) -> None:
        """Return when a server is stale."""
        while not self.numbers(STALE):
            self._changed.clear()
            await self._changed.wait()

    # ---- weights, and the requests that wait for them

    @asynccontextmanager
    async def limited(self, server: Server, seconds: float) -> AsyncIterator[None]:
        """Bound a request by the time in which its server serves: TimeoutError then, or when the server is dead."""
        async with asyncio.timeout(seconds) as limit:
            server.limits[limit] = None
            try:
                yield
            finally:
                del server.limits[limit]

    def stand_still(self, servers: Sequence[Server]) -> None:
        """Pause the time limits of requests to these until they `serve`."""
        for server in servers:
            for limit, left in server.limits.items():
                if left is None and not limit.expired():
                    server.limits[limit] = (limit.when() or 0.0) - _now()
                    limit.reschedule(None)

    def outdate(self, servers: Sequence[Server]) -> None:
        """Mark all others as stale: new weights come to these alone."""
        for server in self.all:
            server.loaded = False
            if server not in servers and server.state == HEALTHY:
                self._move(server, STALE, "others get new weights")

    def serve(self, servers: Sequence[Server]) -> None:
        """Mark these as having the present weights."""
        for server in servers:
            server.loaded = True
            if self._move(server, HEALTHY, "it has the present weights" if server.why else ""):
                self._rests.pop(server.number, None)
            server.why = ""
            for limit, left in server.limits.items():
                if left is not None and not limit.expired():
                    server.limits[limit] = None
                    limit.reschedule(_now() + left)

    def spoil(self, servers: Sequence[Server], why: str) -> None:
        """Mark these as perhaps having mixed weights."""
        for server in servers:
            self._move(server, STALE, why)

    # ---- failures

    async def of_all(self, servers: Sequence[Server], ask: Callable[[Server], Awaitable[T]]) -> list[T]:
        """The answer of each of these servers, each within its own limits.

        After a failure those are dead that did not answer; if all did, those that failed where others did not. Raises EngineError.
        """
        ends = await asyncio.gather(*map(ask, servers), return_exceptions=True)
        failed = {server: end for server, end in zip(servers, ends, strict=True) if isinstance(end, BaseException)}
        if not failed:
            return cast("list[T]", ends)
        silent = {server: end for server, end in failed.items() if not getattr(end, "status", 0)}
        blamed = silent or (failed if len(failed) < len(servers) else {})
        server, error = next(iter((blamed or failed).items()))
        told = await self._with_log(server, str(error))
        for each, why in blamed.items():
            self._lose(each, str(why))
        raise EngineError(told) from error

    async def _with_log(self, server: Server, problem: str) -> str:
        with contextlib.suppress(EngineError):  # which says less
            state: ServerState = await server.call("state", seconds=_LIVE_SECONDS)
            return f"{problem}; log: {server.options.log}\n{state.tail}"
        return f"{problem}; log: {server.options.log}"

    async def examine(self, server: Server, failure: EngineError) -> None:
        """After a failed request: return if the server is dead, so that another is asked, else raise the failure.

        It gets no requests meanwhile.
        """
        self._move(server, SUSPECT, str(failure))
        if await asyncio.shield(self.look_at(server)):
            raise failure

    def look_at(self, server: Server) -> asyncio.Task[bool]:
        """Look in the background whether a server answers (True), else it is dead."""
        if server.look is None or server.look.done():
            server.look = asyncio.create_task(self._answers(server))
        return server.look

    async def _answers(self, server: Server) -> bool:
        if server not in self.all or server.state not in RUNNING:
            return False
        if why := await self._why_dead(server) or await self._why_stuck(server):
            self._lose(server, why)
            return False
        if server.state == SUSPECT:
            self._move(server, HEALTHY if server.loaded else STALE, "it answers")
        return True

    async def _why_dead(self, server: Server) -> str:
        until = _now() + _DYING_SECONDS  # a process that was killed may take so long to end
        while True:
            answers = await healthy(self.client, server.url, HEALTH_SECONDS)
            why = await server.why_ended()
            if why or answers:
                return why
            if _now() > until:
                unwell = f"the vLLM server at {server.url} did not answer /health within {HEALTH_SECONDS:g} s"
                return await self._with_log(server, unwell)
            await asyncio.sleep(_POLL_SECONDS)

    async def _why_stuck(self, server: Server) -> str:
        """Why a server that answers /health computes nothing, as if its engine core, a process of its own, hangs; "" if it does.

        One that serves must sample a token, or its metrics must change: others may go first.
        """
        body = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "detokenize": False}}
        token = asyncio.create_task(post(self.client, server.url, GENERATE, body, math.inf, "a token"))
        seen: list[str] | None = None
        try:
            while True:
                text = await get(self.client, f"{server.url}/metrics", _LIVE_SECONDS) or ""
                told = [line for line in text.splitlines() if line.startswith("vllm:")]  # others are the HTTP server's
                if not told or not server.loaded or server.state not in (HEALTHY, SUSPECT):
                    return ""  # nothing is known of it, or it takes weights, during which it samples nothing
                if told == seen:
                    stuck = (
                        f"the vLLM server at {server.url} answers /health but computed nothing for {HEALTH_SECONDS:g} s"
                    )
                    return await self._with_log(server, stuck)
                seen = told
                if (await asyncio.wait([token], timeout=HEALTH_SECONDS))[0]:
                    return ""
        finally:
            token.cancel()
            await asyncio.gather(token, return_exceptions=True)

    async def find_dead(self) -> int:
        """Find the servers that have ended; returns how many died since the start."""

        async def find(server: Server) -> None:
            if why := await server.why_ended():
                self._lose(server, why)

        await asyncio.gather(*map(find, self.those(*RUNNING)))
        return self.losses

    def _lose(self, server: Server, why: str) -> None:
        """Start a server again."""
        if not self._move(server, DEAD, why):
            return
        self.losses += 1
        for limit in server.limits:
            if not limit.expired():
                limit.reschedule(_now())
        self._restarting[server.number] = asyncio.create_task(self._restart(server))

    async def _restart(self, dead: Server) -> None:
        """Start a server again, wherever Ray has room, until it answers. It is then stale."""
        number, begun = dead.number, time.monotonic()
        while True:
            rest = self._rests.get(number, FIRST_REST)
            self._rests[number] = min(2 * rest, LONGEST_REST)
            _kill(self.all[number])
            await asyncio.sleep(rest)
            self._move(self.all[number], RESTARTING, "it is started again")
            try:
                self.all[number] = server = self._placed(number)
                await self._come_up(server)
                break
            except Exception as error:  # whatever it is, the run waits for the server
                self._move(self.all[number], DEAD, f"it did not start: {error}")
        self._move(server, STALE, "it runs")
        self.timeline.add(("engine restart", number), "starts again", begun)

    async def close(self) -> None:
        import ray

        servers, self.all = self.all, []
        tasks = [*self._restarting.values(), *(server.look for server in servers if server.look)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._changed.set()
        ends = (server.call("stop", seconds=20.0) for server in servers if server.state in RUNNING)
        for result in await asyncio.gather(*ends, return_exceptions=True):
            # A server ends with its actor, which a signal to the whole process group may have ended already.
            if isinstance(result, BaseException) and not isinstance(result.__cause__, ray.exceptions.RayActorError):
                log.warning("a vLLM server did not stop cleanly: %s", result)
        for server in servers:
            _kill(server)


def _kill(server: Server) -> None:
    import ray

    # Where Ray has ended, its actors have too, and a call would start it again.
    with contextlib.suppress(Exception):
        if ray.is_initialized():
            ray.kill(server.actor)
