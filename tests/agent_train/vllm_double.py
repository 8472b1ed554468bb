"""A double of vLLM servers on a fake clock, for faults that real ones do not show on demand. Engine, router and health are the real ones.

A server samples, as each token, the version of the weights that it truly has. Its faults, by path or by method of its workers, are
"hang", "refuse" (500), "die", "stop" (it hangs in all, as after SIGSTOP), or seconds that it takes longer.
"""

import asyncio
import itertools
import json
import math
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from types import SimpleNamespace
from typing import Any

import ray

from agent_train.config.schema import EngineConfig
from agent_train.engine import servers, vllm
from agent_train.engine.base import EngineError
from agent_train.engine.http import ServerFailed, open_client
from agent_train.engine.servers import Server, Servers
from agent_train.weights.collective import CONNECT_SECONDS
from agent_train.weights.sync import TensorInfo, WeightAddress, WeightTransferError, sync
from agentgym.processes.vllm_server import ServerState, VllmOptions

TOKEN = 1.0  # seconds
CALL = 0.1
START = 30.0
PORTS = itertools.count()


@dataclass(eq=False)
class Process:
    """One server, from its start to its end."""

    url: str
    joined: dict[int, set[int]]  # ranks, by the port of their weight group
    faults: dict[str, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    version: str = "default"
    weights: int = -1
    sampled: int = 0
    exit_code: int | None = None

    def __post_init__(self) -> None:
        self.ended, self.runs, self.computes, self.goes_on = (asyncio.Event() for _ in range(4))
        for event in (self.runs, self.computes, self.goes_on):
            event.set()
        self.places = asyncio.Semaphore(1000)  # requests that are computed at a time
        self.ready = asyncio.get_running_loop().time() + START

    def kill(self) -> None:
        self.exit_code = -9
        self.ended.set()

    def stop(self) -> None:
        self.runs.clear()

    def stop_core(self) -> None:
        """It computes nothing more, and answers /health and /metrics."""
        self.computes.clear()

    async def answered(self, name: str, body: dict[str, Any]) -> Any:
        ways = [asyncio.ensure_future(self._answer(name, body)), asyncio.ensure_future(self.ended.wait())]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            if self.ended.is_set():
                raise ServerFailed(f"{self.url} closed the connection")
            return ways[0].result()
        finally:
            for way in ways:
                way.cancel()

    async def _answer(self, name: str, body: dict[str, Any]) -> Any:
        await self.runs.wait()
        self.asked.append(name)
        fault = self.faults.get(name)
        await asyncio.sleep(CALL + (fault if isinstance(fault, float) else 0))
        if fault in ("die", "stop"):
            self.kill() if fault == "die" else self.stop()
        if fault in ("hang", "die", "stop"):
            await asyncio.Event().wait()
        if fault == "refuse":
            raise ServerFailed(f"{self.url}: it cannot", 500)
        if name == "/inference/v1/generate":
            async with self.places:
                return await self._generate(body["sampling_params"]["max_tokens"])
        if name == "/pause":
            self.goes_on.clear()
        if name == "/resume":
            self.goes_on.set()
        if name == "/update_weight_version":
            self.version = body["new_version"]
        if name == "receive_weights":
            self.weights = json.loads(body["args"][0])[0]["shape"][0]
        if name == "connect_weights":
            return {"results": [await self._missed(*body["args"])]}
        await self.runs.wait()
        answers = {"/reset_prefix_cache": {"success": True}, "receive_weights": {"results": [{"w": self.weights}]}}
        return answers.get(name, {})

    async def _missed(self, host: str, port: int, world: int, rank: int) -> list[int]:
        self.joined.setdefault(port, set()).add(rank)
        until = asyncio.get_running_loop().time() + CONNECT_SECONDS
        while (missed := set(range(1, world)) - self.joined[port]) and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(CALL)
        return sorted(missed)

    async def _generate(self, count: int) -> dict[str, Any]:
        ids, versions = [], []
        for _ in range(count):
            await asyncio.sleep(TOKEN)
            await self.runs.wait()
            await self.computes.wait()
            await self.goes_on.wait()
            self.sampled += 1
            ids.append(self.weights)
            versions.append(self.version)
        lengths = [(version, len(list(same))) for version, same in groupby(versions)]
        bounds = pairwise([sum(length for _, length in lengths[:n]) for n in range(len(lengths) + 1)])
        spans = [{"version": v, "start": a, "end": b} for (v, _), (a, b) in zip(lengths, bounds, strict=True)]
        told = {"token_ids": ids, "logprobs": {"content": [{"logprob": -1.0}] * count}, "weight_versions": spans}
        return {"choices": [{**told, "finish_reason": "length"}]}


class ServerDouble(Server):
    """A server whose Ray actor and process are a `Process`, `actor`."""

    async def call(self, method: str, *arguments: Any, seconds: float = 0.0) -> Any:
        await asyncio.sleep(CALL)
        process = self.actor
        if method == "launch_for":
            self.actor = process = await process()
            return process.url
        return ServerState(1, process.exit_code, "", "the end of its log") if method == "state" else process.kill()


class Machine(Servers):
    """Places doubles, which begin with `faults`. While it is `full` none starts."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.full, self.faults = False, dict[str, Any]()
        self.processes, self._joined = dict[str, Process](), dict[int, set[int]]()

    def _placed(self, number: int) -> Server:
        async def start() -> Process:
            if self.full:
                raise EngineError("there is no room")
            process = Process(f"http://{len(self.processes)}", self._joined, dict(self.faults))
            self.processes[process.url] = process
            return process

        return ServerDouble(number, start, self.options[number])

    def at(self, number: int) -> Process:
        return self.processes[self.all[number].url]

    async def post(self, client, url, path, body, seconds, what, *, attempts=3) -> Any:
        name = (body or {}).get("method", path.partition("?")[0])
        if url not in self.processes or asyncio.get_running_loop().time() < self.processes[url].ready:
            raise ServerFailed(f"{what}: {url} cannot be reached")
        try:
            async with asyncio.timeout(None if seconds == math.inf else seconds):
                return await self.processes[url].answered(name, body or {})
        except TimeoutError:
            raise EngineError(f"{what}: {url} did not answer within {seconds:g} s") from None

    async def events(self, client, url, path, body, what):
        """The first token at once, the others at the end."""
        yield {"choices": [{"token_ids": [self.processes[url].weights], "logprobs": {"content": [{"logprob": -1.0}]}}]}
        (choice,) = (await self.post(client, url, path, body, math.inf, what))["choices"]
        rest = {"token_ids": choice["token_ids"][1:], "logprobs": {"content": choice["logprobs"]["content"][1:]}}
        yield {"choices": [{**choice, **rest}]}

    async def get(self, client, url, seconds) -> str:
        """The metrics of a server: the tokens that it has sampled."""
        return f"vllm:generation_tokens_total {self.processes[url.removesuffix('/metrics')].sampled}"

    async def healthy(self, client, url, seconds=2.0) -> bool:
        process = self.processes[url]
        try:
            async with asyncio.timeout(seconds):
                await process.answered("/health", {})
        except (TimeoutError, EngineError):
            return False
        return asyncio.get_running_loop().time() >= process.ready


@dataclass
class Sender:
    """A double of a learner with weights of a `version`. The first `fails` of its transfers break down."""

    version: int = 1
    fails: int = 0
    groups: list[int] = field(default_factory=list)

    def manifest(self) -> list[TensorInfo]:
        return [TensorInfo("w", (self.version,), "float32")]

    async def weight_address(self, receivers: int) -> WeightAddress:
        self.groups.append(receivers)
        return WeightAddress("127.0.0.1", next(PORTS), 1 + receivers)

    async def connect_weights(self, address: WeightAddress) -> None:
        await asyncio.sleep(CALL)

    async def send_weights(self) -> dict[str, int]:
        await asyncio.sleep(CALL)
        self.fails -= 1
        if self.fails >= 0:
            raise WeightTransferError("the link is down")
        return {"w": self.version}

    async def send(self, engine, version: int) -> int:
        self.version = version
        return await sync(self, engine, version)


@asynccontextmanager
async def engine_of_doubles(monkeypatch, replicas=2, version=1, **settings):
    """An engine whose servers have weights of a version."""
    config = EngineConfig(replicas=replicas, max_model_len=512, **settings)
    options = [VllmOptions("model", "policy", f"vllm-{number}.log", gpu=False) for number in range(replicas)]
    machine = Machine(options, [{}] * replicas, config.start_timeout, open_client())
    monkeypatch.setattr(vllm, "post", machine.post)
    monkeypatch.setattr(vllm, "events", machine.events)
    monkeypatch.setattr(servers, "post", machine.post)
    monkeypatch.setattr(servers, "get", machine.get)
    monkeypatch.setattr(servers, "healthy", machine.healthy)
    # Where no Ray runs, asking it would start one.
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "home"))
    engine = vllm.VllmEngine(machine, config, "")
    try:
        await machine.start(None, replicas)
        await Sender().send(engine, version)
        yield engine
    finally:
        await engine.close()
