"""Environments spread over a Ray cluster, as `env.placement=ray` asks for.

A worker is a Ray actor that holds `env.cpus` CPUs of a node and serves the run's environment there, as `agentgym serve` does. The
trainer is a client of all workers and balances its episodes over them. If a worker dies, its episodes are run again elsewhere,
and it is placed again.
"""

import asyncio
import logging
import math
import os
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from agent_train.cluster.lost import LostError, side_by_side
from agent_train.cluster.network import serving_address
from agent_train.cluster.placement import PlacementError, env_workers_wanted, rank_devices
from agent_train.config.schema import Config, first_line
from agent_train.report.timeline import Timeline
from agentgym.core.env import Env, close_unused
from agentgym.core.registration import EnvSpec, spec
from agentgym.rollout.episode import Limits
from agentgym.service.client.address import RemoteError
from agentgym.service.client.balance import pool_of
from agentgym.service.client.remote_env import RemoteEnv
from agentgym.service.protocol.frames import ServiceLimits
from agentgym.service.server.bounds import Bounds, raise_open_files
from agentgym.service.server.env_server import EnvServer, serve
from agentgym.service.server.settings import ServeSettings

NAME = "env"
PLACE_SECONDS = 120.0
START_SECONDS = 180.0
PLACE_POLL_SECONDS = 0.5
FIRST_REST, LONGEST_REST = 0.5, 30.0
# Variables that are the same on every node; folders (AGENTGYM_DATA) and secrets are each node's own.
_SHARED = ("AGENTGYM_RUN", "AGENTGYM_SANDBOX", "AGENTGYM_SANDBOX_URL")

log = logging.getLogger(__name__)


class EnvWorker:
    """An actor: a server of the run's environment, on the node where Ray put it."""

    def __init__(self) -> None:
        self._server: EnvServer | None = None

    def where(self) -> str:
        return str(ray.util.get_node_ip_address())

    async def start(
        self, spec: EnvSpec, token: str, limits: ServiceLimits, step: float, most: int, home: str, told: dict
    ) -> str:
        """Serve; the URL. On the trainer's own node only that node can reach it. `step`: seconds for one; 0: the environment says."""
        os.environ.update(told)
        limits = replace(limits, step_seconds=step or _step_seconds(spec))
        bounds = Bounds(open_files=raise_open_files(most))
        more = {"max_sessions": most, "tokens": {"trainer": token}, "limits": limits, "bounds": bounds}
        self._server = await serve(ServeSettings(envs={NAME: spec}, host=serving_address(home), port=0, **more))  # type: ignore[arg-type]
        return self._server.url

    async def wait(self) -> None:
        """Never return: a caller that waits learns when this process ends."""
        await asyncio.Event().wait()


def _step_seconds(spec: EnvSpec) -> float:
    """The environment's own `Limits.step_limit`. A node of the workers can make the environment, the trainer's may not."""
    env = spec.make()
    close_unused(env)
    return Limits().step_limit(env) or math.inf


@dataclass
class EnvWorkers:
    """The workers of a run. `placed_env` makes and closes them."""

    config: Config
    spec: EnvSpec  # of the environment that they serve
    note: Callable[[str], None]  # told what happens to them
    most: int  # sessions that each takes: all of them, so that those that are left can take over
    timeline: Timeline
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    nodes: list[str] = field(default_factory=list)  # Ray's id of the node of each
    actors: dict[int, Any] = field(default_factory=dict)
    urls: dict[int, str] = field(default_factory=dict)  # where each is now
    first: tuple[str, ...] = ()  # where each was first; these stay their names when they move
    client: EnvSpec | None = None  # makes clients of them all
    calls: dict[str, list[int]] = field(default_factory=dict)  # by URL: the worker's number, and its calls in flight

    def make(self) -> Env:
        """A new environment, on the worker that has the most room. It opens no session yet."""
        env = cast(EnvSpec, self.client).make()
        cast(RemoteEnv, env.unwrapped).watch = self._count
        env.unwrapped.spec = self.spec  # type: ignore[assignment]  # episodes are recorded by the environment's own id
        return env

    def _count(self, url: str, more: int) -> None:
        count = self.calls[url]
        count[1] += more
        self.timeline.count(("env worker", count[0]), "calls", count[1])

    async def start(self, count: int, token_file: str) -> None:
        """Place and start this many, side by side. Clients read their token in `token_file`."""
        self.nodes = await _nodes_of(count, self.config)
        async with side_by_side() as starting:
            for number in range(count):
                starting.create_task(self._start(number))
        self.first = tuple(self.urls[number] for number in range(count))
        found = spec(",".join(f"{url}/{NAME}" for url in self.first))
        self.client = replace(found, kwargs={**found.kwargs, "token_file": token_file})

    async def _start(self, number: int) -> None:
        there = NodeAffinitySchedulingStrategy(self.nodes[number], soft=True)  # elsewhere if the node is gone
        make = ray.remote(num_cpus=self.config.env.cpus, scheduling_strategy=there, max_restarts=0)(EnvWorker)
        actor = self.actors[number] = make.remote()
        told = {name: os.environ[name] for name in _SHARED if name in os.environ}
        home = ray.get_runtime_context().get_node_id()
        try:
            free = f"{ray.available_resources().get('CPU', 0):g} CPUs are free in the cluster"
            node = await _within(actor.where.remote(), PLACE_SECONDS, f"env worker {number} found no place ({free})")
            # A session waits while the engine answers, and before while a server starts, the learner learns and weights load.
            engine = self.config.engine
            patience = engine.request_timeout + engine.start_timeout + self.config.learner.timeout
            limits = ServiceLimits(idle_seconds=ServiceLimits().idle_seconds + patience)
            step = self.config.env.step_timeout
            start = actor.start.remote(self.spec, self.token, limits, step, self.most, home, told)
            url = await _within(start, START_SECONDS, f"env worker {number} on {node} did not start")
            self.urls[number], self.calls[url] = url, [number, 0]
        except RayTaskError as error:
            raise PlacementError(f"env worker {number}: {error.cause}") from error
        except RayError as error:
            raise LostError(f"env worker {number} died while it started: {first_line(error)}") from error
        log.info("env worker %d serves at %s", number, self.urls[number])

    async def keep(self, number: int) -> None:
        """Place a worker again whenever it dies, until cancelled."""
        while True:
            try:
                await self.actors[number].wait.remote()
            except Exception as error:  # of Ray, or of what nobody thought of: the run needs a worker in any case
                self.note(f"env worker {number} at {self.urls[number]} died and is placed again: {first_line(error)}")
            before, rest, begun = self.urls[number], FIRST_REST, time.monotonic()
            while not await self._started(number):
                await asyncio.sleep(rest)
                rest = min(2 * rest, LONGEST_REST)
            pool_of(self.first).move(before, self.urls[number])
            self.timeline.add(("env worker restart", number), "starts again", begun)
            self.note(f"env worker {number} is back, at {self.urls[number]}")

    async def _started(self, number: int) -> bool:
        try:
            await self._start(number)
        except Exception as error:
            log.warning("env worker %d did not start again: %r", number, error)
            self._kill(number)
            return False
        return True

    def close(self) -> None:
        """Kill the workers; their servers end with them."""
        for number in list(self.actors):
            self._kill(number)

    def _kill(self, number: int) -> None:
        # After ray.shutdown() the actors are gone, and a call would start Ray again.
        if ray.is_initialized():
            ray.kill(self.actors[number], no_restart=True)


@asynccontextmanager
async def placed_env(
    config: Config, env: EnvSpec, note: Callable[[str], None], timeline: Timeline
) -> AsyncIterator[EnvWorkers]:
    """Spread an environment over the cluster that Ray is connected to. `note` is told when a worker dies, and when it is back."""
    nodes = [float(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]  # busy or not
    count = env_workers_wanted(config, nodes)
    # A rollout that waits for places keeps its environments: each of those ahead, the step's and an evaluation have their own.
    most = config.engine.max_concurrent * config.engine.servers * (config.trainer.staleness + 2)
    workers = EnvWorkers(config, env, note, most, timeline)
    # This user's alone; in the folder that goes with the run's own Ray, even if the run is killed.
    with tempfile.NamedTemporaryFile("w", prefix="agent-train-", dir=os.environ.get("TMPDIR")) as token_file:
        token_file.write(workers.token)
        token_file.flush()
        keepers: list[asyncio.Task[None]] = []
        try:
            await workers.start(count, token_file.name)
            try:
                await asyncio.to_thread(workers.make)
            except (RemoteError, ValueError) as error:
                raise PlacementError(str(error)) from error
            keepers += [asyncio.create_task(workers.keep(number)) for number in range(count)]
            yield workers
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            workers.close()


async def _nodes_of(count: int, config: Config) -> list[str]:
    """The node of each worker. Ranks start later, and each needs a whole CPU of one node: room for them is asked for too.

    Raises PlacementError if there is none within PLACE_SECONDS.
    """
    ranks = rank_devices(config, int(ray.cluster_resources().get("GPU", 0)))
    room = placement_group([*[{"CPU": config.env.cpus}] * count, *ranks], strategy="SPREAD")
    deadline = time.monotonic() + PLACE_SECONDS
    try:
        while not await asyncio.to_thread(room.wait, PLACE_POLL_SECONDS):
            if time.monotonic() > deadline:
                free = f"{ray.available_resources().get('CPU', 0):g} CPUs are free in the cluster"
                parts = f"{count} env workers of {config.env.cpus:g} CPUs and the learner's {len(ranks)} ranks"
                raise PlacementError(f"{parts} found no place together ({free}) within {PLACE_SECONDS:g} s")
        nodes = placement_group_table(room)["bundles_to_node_id"]
    finally:
        remove_placement_group(room)
    return [nodes[number] for number in range(count)]


async def _within(reference: Any, seconds: float, otherwise: str) -> Any:
    """The result of a Ray call; PlacementError if it takes too long."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(reference.future()), seconds)
    except TimeoutError:
        raise PlacementError(f"{otherwise} within {seconds:g} s") from None
