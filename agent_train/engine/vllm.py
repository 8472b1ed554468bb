"""vLLM as the engine: servers in Ray actors, token ids in and out over HTTP, weights by a collective.

Requests go to `/inference/v1/generate`, which speaks token ids only and says which weight version sampled each token.
"""

import asyncio
import itertools
import logging
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from agent_train.cluster.placement import gpu_share
from agent_train.config.schema import EngineConfig
from agent_train.engine.base import Completion, Engine, EngineError, Sampling
from agent_train.engine.http import ServerFailed, healthy, open_client, post
from agent_train.engine.server import server_options
from agent_train.weights.sync import TensorInfo, WeightAddress, manifest_to_json
from agentgym.processes.vllm_server import ServerState, ServingError, VllmOptions, VllmServer, check_vllm

Progress = Callable[[str, float], None]
CONNECT_SECONDS = 150.0
LOAD_SECONDS = 600.0
_POLL_SECONDS = 0.25
_REMEMBERED = 4096  # episodes
_UNUSABLE = "the vLLM engine cannot be used any more"
_ACTOR_SECONDS = 60.0
_LIVE_SECONDS = 10.0
_DYING_SECONDS = 3.0

log = logging.getLogger(__name__)


class Router:
    """Picks among `size` replicas, numbered from 0. A picked one is busy until `done`."""

    def __init__(self, size: int):
        self.in_flight = [0] * size
        self.dead: dict[int, str] = {}
        self._homes: OrderedDict[str, int] = OrderedDict()

    def pick(self, episode: str | None = None) -> int:
        """A living replica: where `episode` was before if it is named, else the least busy. EngineError if none lives."""
        living = [number for number in range(len(self.in_flight)) if number not in self.dead]
        if not living:
            raise EngineError("; ".join(self.dead.values()) or "the engine has no replica")
        home = self._homes.get(episode) if episode is not None else None
        number = home if home in living else min(living, key=lambda each: self.in_flight[each])
        if episode is not None:
            self._homes[episode] = number
            self._homes.move_to_end(episode)
            if len(self._homes) > _REMEMBERED:
                self._homes.popitem(last=False)
        self.in_flight[number] += 1
        return number

    def done(self, number: int) -> None:
        self.in_flight[number] -= 1

    def bury(self, number: int, why: str) -> None:
        """Leave a replica out from now on."""
        self.dead.setdefault(number, why)


@dataclass
class Replica:
    """One server: its Ray actor, and where it answers."""

    actor: Any
    options: VllmOptions
    url: str = ""

    async def call(self, method: str, seconds: float = _ACTOR_SECONDS) -> Any:
        """Call a method of the actor's `VllmServer`. Raises EngineError if it fails, is gone or takes too long."""
        import ray

        actor = f"the Ray actor of the vLLM server at {self.url or 'no port yet'}"
        try:
            async with asyncio.timeout(seconds):
                return await getattr(self.actor, method).remote()
        except ray.exceptions.RayTaskError as error:
            raise EngineError(str(error.cause if isinstance(error.cause, ServingError) else error)) from error
        except ray.exceptions.RayError as error:
            raise EngineError(f"{actor} is gone: {error}") from error
        except TimeoutError as error:
            raise EngineError(f"{actor} did not answer {method} within {seconds:g} s") from error

    def obituary(self, state: ServerState) -> str:
        return f"the vLLM server at {self.url} has exited with code {state.exit_code}; log: {self.options.log}\n{state.tail}"


class VllmEngine(Engine):
    """One or more vLLM servers that hold the same weights. Make it with `VllmEngine.start`."""

    def __init__(self, replicas: list[Replica], config: EngineConfig):
        self.replicas = replicas
        self.max_model_len = config.max_model_len
        self.receivers = config.replicas * config.tensor_parallel
        self._config = config
        self._router = Router(len(replicas))
        self._client: aiohttp.ClientSession | None = None
        self._broken: str | None = None
        self._adapter: str | None = None
        self._adapters = itertools.count(1)

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        model_dir: str | Path,
        logs: str | Path,
        *,
        on_progress: Progress | None = None,
        deterministic: bool = False,
        **more: Any,
    ) -> "VllmEngine":
        """Start `config.replicas` servers and return when all answer. Ray must run. `more`: see `server_options`.

        Args:
            logs: folder for `vllm-0.log`, `vllm-1.log` ...
            on_progress: called several times a second with the servers' last log line and the seconds since the start.
            deterministic: not promised by vLLM.

        Raises:
            EngineError: vLLM is not installed, a port is in use, a server exited or was late. Ends with the last lines of its log.
        """
        import ray

        if problem := check_vllm():
            raise EngineError(f"{problem}; or use engine=embedded")
        share = gpu_share(int(ray.cluster_resources().get("GPU", 0)), "vllm")
        actor_class = ray.remote(num_cpus=0, num_gpus=config.tensor_parallel * share)(VllmServer)
        replicas = []
        for number in range(config.replicas):
            options = server_options(model_dir, logs, config, number=number, gpu_share=share, **more)
            replicas.append(Replica(actor_class.remote(options), options))
        engine = cls(replicas, config)
        try:
            for replica in replicas:
                replica.url = await replica.call("launch")
            await asyncio.gather(*(engine._ready(replica, on_progress) for replica in replicas))
            await engine._set_version(0)
        except BaseException:
            await engine.close()
            raise
        return engine

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, episode: str | None = None) -> Completion:
        self.check_request(prompt_ids, sampling)
        body = _request_body(prompt_ids, sampling)
        if self._adapter is not None:
            body["model"] = self._adapter
        while True:
            number = self._router.pick(episode)
            try:
                answer = await self._post(
                    number, "/inference/v1/generate", body, self._config.request_timeout, "generate"
                )
                return _completion(answer["choices"][0])
            except ServerFailed as error:
                await self._examine(number, error)
            finally:
                self._router.done(number)

    async def connect_weights(self, address: WeightAddress) -> None:
        step = self._config.tensor_parallel
        group = [address.host, address.port, address.world_size]
        offsets = [address.rank_offset + number * step for number in self._numbers]
        joining = (self._rpc(n, "connect_weights", [*group, o], CONNECT_SECONDS) for n, o in enumerate(offsets))
        await asyncio.gather(*joining)

    async def receive_weights(self, manifest: Sequence[TensorInfo], version: int) -> dict[str, int]:
        async with self._loading(f"weights of version {version} were not loaded whole", version):
            return await self._checksums("receive_weights", manifest_to_json(manifest), LOAD_SECONDS, version)

    async def load_adapter(self, folder: str | Path, version: int) -> dict[str, int]:
        """Serve the adapter of a folder (absolute, in PEFT's format, new each time) as a version; the checksum of each tensor."""
        path, before, name = os.fspath(folder), self._adapter, f"adapter-{next(self._adapters)}"
        async with self._loading(f"the adapter of version {version} was not loaded everywhere", version):
            sums = await self._checksums("adapter_checksums", path, _ACTOR_SECONDS, version)
            await asyncio.gather(*(self._swap_adapter(number, name, path, before) for number in self._numbers))
            self._adapter = name
            return sums

    @asynccontextmanager
    async def _loading(self, unfinished: str, version: int) -> AsyncIterator[None]:
        """Refuse to generate until the block has loaded a version everywhere; then clear the caches and raise the version."""
        if self._broken:
            raise EngineError(f"{_UNUSABLE}: {self._broken}")
        self._broken = unfinished
        yield
        await asyncio.gather(*(self._reset_cache(number) for number in self._numbers))
        await self._set_version(version)
        self._broken = None

    async def _checksums(self, method: str, argument: str, seconds: float, version: int) -> dict[str, int]:
        """The result of a method on every worker, which must be the same in all."""
        answers = await asyncio.gather(*(self._rpc(number, method, [argument], seconds) for number in self._numbers))
        sums: list[dict[str, int]] = [worker for workers in answers for worker in workers]
        if any(other != sums[0] for other in sums):
            raise EngineError(f"version {version} is not the same at the {len(sums)} workers")
        return sums[0]

    @property
    def _numbers(self) -> range:
        return range(len(self.replicas))

    async def live(self) -> None:
        for number, replica in enumerate(self.replicas):
            state = await replica.call("state", _LIVE_SECONDS)
            if state.exit_code is not None:
                self._router.bury(number, replica.obituary(state))
        if self._router.dead:
            raise EngineError("; ".join(self._router.dead.values()))

    async def close(self) -> None:
        import ray

        replicas, self.replicas = self.replicas, []
        self._router = Router(0)
        if self._client is not None:
            await self._client.close()
            self._client = None
        for result in await asyncio.gather(*(each.call("stop", 20.0) for each in replicas), return_exceptions=True):
            if isinstance(result, BaseException):
                log.warning("a vLLM server did not stop cleanly: %s", result)
        for replica in replicas:
            ray.kill(replica.actor)

    async def _ready(self, replica: Replica, on_progress: Progress | None) -> None:
        begun = time.monotonic()
        while True:
            state = await replica.call("state")
            seconds = time.monotonic() - begun
            if state.exit_code is not None:
                raise EngineError(replica.obituary(state))
            if await healthy(self._http(), replica.url):
                return
            if seconds > self._config.start_timeout:
                limit = f"{self._config.start_timeout:g} s (engine.start_timeout)"
                raise EngineError(
                    f"the vLLM server was not ready within {limit}; log: {replica.options.log}\n{state.tail}"
                )
            if on_progress:
                on_progress(state.last_line, seconds)
            await asyncio.sleep(_POLL_SECONDS)

    async def _rpc(self, number: int, method: str, arguments: list[Any], seconds: float) -> list[Any]:
        body = {"method": method, "args": arguments}
        try:
            answer = await self._post(number, "/collective_rpc", body, seconds, method)
        except (EngineError, ValueError) as error:
            state = await self.replicas[number].call("state", _LIVE_SECONDS)
            raise EngineError(f"{error}; log: {self.replicas[number].options.log}\n{state.tail}") from error
        return list(answer["results"])

    async def _swap_adapter(self, number: int, name: str, path: str, before: str | None) -> None:
        """A new name each time: vLLM would read an adapter that is loaded in place of another again at every step."""
        body = {"lora_name": name, "lora_path": path}
        await self._post(number, "/v1/load_lora_adapter", body, LOAD_SECONDS, "loading the adapter")
        if before is not None:
            body = {"lora_name": before}
            await self._post(number, "/v1/unload_lora_adapter", body, _ACTOR_SECONDS, "dropping an adapter")

    async def _reset_cache(self, number: int) -> None:
        # Requests in flight are begun again: what is in their cache is of the old weights.
        path = "/reset_prefix_cache?reset_running_requests=true"
        answer = await self._post(number, path, None, _ACTOR_SECONDS, "clearing the prefix cache")
        if not answer["success"]:
            raise EngineError(f"{self.replicas[number].url} did not clear its prefix cache: old weights would answer")

    async def _set_version(self, version: int) -> None:
        for number in self._numbers:
            body = {"new_version": str(version)}
            await self._post(number, "/update_weight_version", body, _ACTOR_SECONDS, "raising the weight version")
        self.version = version

    async def _post(self, number: int, path: str, body: dict[str, Any] | None, seconds: float, what: str) -> Any:
        if self._broken and path.startswith("/inference"):
            raise EngineError(f"{_UNUSABLE}: {self._broken}")
        url = self.replicas[number].url
        if path in ("/collective_rpc", "/v1/load_lora_adapter"):
            # Sent once, so on a connection that cannot be stale: a second `receive_weights` would wait for a past broadcast.
            async with open_client() as fresh:
                return await post(fresh, url, path, body, seconds, what, attempts=1)
        return await post(self._http(), url, path, body, seconds, what)

    async def _examine(self, number: int, error: EngineError) -> None:
        """After a failure: bury the server if it is dead or dies in the next seconds, else raise the failure."""
        deadline = time.monotonic() + _DYING_SECONDS
        while number not in self._router.dead:
            if number >= len(self.replicas):
                raise EngineError("the vLLM engine was closed while it was generating") from error
            replica = self.replicas[number]
            state: ServerState = await replica.call("state", _LIVE_SECONDS)
            if state.exit_code is not None:
                self._router.bury(number, replica.obituary(state))
            elif time.monotonic() > deadline:
                raise error
            else:
                await asyncio.sleep(_POLL_SECONDS)

    def _http(self) -> aiohttp.ClientSession:
        if self._client is None:
            self._client = open_client()
        return self._client


def _request_body(prompt_ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
    params = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }
    if sampling.seed is not None:
        params["seed"] = sampling.seed % (1 << 63)
    return {"token_ids": list(prompt_ids), "sampling_params": params}


def _completion(choice: dict[str, Any]) -> Completion:
    ids = choice["token_ids"]
    reason = choice["finish_reason"]
    if reason not in ("stop", "length"):
        raise EngineError(f"generate: the vLLM server ended a request with finish_reason {reason!r}")
    logprobs = [item["logprob"] for item in choice["logprobs"]["content"]]
    versions: list[int] = []
    for span in choice["weight_versions"]:
        versions += [int(span["version"])] * (span["end"] - span["start"])
    if not len(ids) == len(logprobs) == len(versions):
        counts = f"{len(ids)} ids, {len(logprobs)} log-probabilities, {len(versions)} versions"
        raise EngineError(f"generate: {counts} in one answer")
    return Completion(ids, logprobs, versions, reason)
