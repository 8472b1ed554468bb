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

from agent_train.cluster.placement import gpu_share
from agent_train.config.schema import EngineConfig
from agent_train.engine.base import Completion, Engine, EngineError, Sampling
from agent_train.engine.http import ServerFailed, healthy, open_client, post
from agent_train.weights.sync import TensorInfo, WeightAddress, manifest_to_json
from agentgym.processes.vllm_server import ServerState, ServingError, VllmOptions, VllmServer, check_vllm

Progress = Callable[[str, float], None]
CONNECT_SECONDS = 150.0
LOAD_SECONDS = 600.0
MODEL_NAME = "policy"
WORKER_MARK = "AGENT_TRAIN_ENGINE_WORKER"  # variable of a server, by which its workers know to die with it
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for
_WORKER_EXTENSION = "agent_train.engine.vllm_worker.WeightReceiver"
_POLL_SECONDS = 0.25
_REMEMBERED = 4096  # episodes
_ACTOR_SECONDS = 60.0
_LIVE_SECONDS = 10.0
_DYING_SECONDS = 3.0

log = logging.getLogger(__name__)


class Router:
    """Picks among `size` replicas, numbered from 0. Who is done with a picked one lowers its `in_flight`; `dead` ones are left out."""

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
        self._client = open_client()
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
        """Start `config.replicas` servers and return when all answer; Ray must run. vLLM promises nothing `deterministic`.

        `logs` gets `vllm-0.log`, `vllm-1.log` ...; `on_progress` is called several times a second with the servers' last log line
        and the seconds since the start. EngineError, with the last lines of its log, if a server cannot start, exits or is late.
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
            self._check_whole()
            router, seconds = self._router, self._config.request_timeout
            number = router.pick(episode)
            try:
                answer = await self._post(number, "/inference/v1/generate", body, seconds, "generate")
                return _completion(answer["choices"][0])
            except ServerFailed as error:
                await self._examine(number, error)
            finally:
                router.in_flight[number] -= 1

    async def connect_weights(self, address: WeightAddress) -> None:
        step = self._config.tensor_parallel
        group = [address.host, address.port, address.world_size]
        ranks = [[*group, address.rank_offset + number * step] for number in range(len(self.replicas))]
        joining = (self._rpc(n, "connect_weights", own, CONNECT_SECONDS) for n, own in enumerate(ranks))
        await asyncio.gather(*joining)

    async def receive_weights(self, manifest: Sequence[TensorInfo], version: int) -> dict[str, int]:
        async with self._loading(f"weights of version {version} were not loaded whole", version):
            return await self._checksums("receive_weights", manifest_to_json(manifest), LOAD_SECONDS, version)

    async def load_adapter(self, folder: str | Path, version: int) -> dict[str, int]:
        """Serve the adapter of a folder (absolute, in PEFT's format, new each time) as a version; the checksum of each tensor."""
        path, before, name = os.fspath(folder), self._adapter, f"adapter-{next(self._adapters)}"
        async with self._loading(f"the adapter of version {version} was not loaded everywhere", version):
            sums = await self._checksums("adapter_checksums", path, _ACTOR_SECONDS, version)
            # A new name each time: vLLM would read an adapter that is loaded in place of another again at every step.
            body = {"lora_name": name, "lora_path": path}
            await self._on_all("/v1/load_lora_adapter", body, LOAD_SECONDS, "loading the adapter")
            if before is not None:
                body = {"lora_name": before}
                await self._on_all("/v1/unload_lora_adapter", body, _ACTOR_SECONDS, "dropping an adapter")
            self._adapter = name
            return sums

    @asynccontextmanager
    async def _loading(self, unfinished: str, version: int) -> AsyncIterator[None]:
        """Refuse to generate until the block has loaded a version everywhere; then clear the caches and raise the version."""
        self._check_whole()
        self._broken = unfinished
        yield
        # Requests in flight are begun again: what is in their cache is of the old weights.
        path = "/reset_prefix_cache?reset_running_requests=true"
        answers = await self._on_all(path, None, _ACTOR_SECONDS, "clearing the prefix cache")
        for replica, answer in zip(self.replicas, answers, strict=True):
            if not answer["success"]:
                raise EngineError(f"{replica.url} did not clear its prefix cache: old weights would answer")
        await self._set_version(version)
        self._broken = None

    def _check_whole(self) -> None:
        if self._broken:
            raise EngineError(f"the vLLM engine cannot be used any more: {self._broken}")

    async def _checksums(self, method: str, argument: str, seconds: float, version: int) -> dict[str, int]:
        """The result of a method on every worker, which must be the same in all."""
        calls = (self._rpc(number, method, [argument], seconds) for number in range(len(self.replicas)))
        answers = await asyncio.gather(*calls)
        sums: list[dict[str, int]] = [worker for workers in answers for worker in workers]
        if any(other != sums[0] for other in sums):
            raise EngineError(f"version {version} is not the same at the {len(sums)} workers")
        return sums[0]

    async def live(self) -> None:
        for number, replica in enumerate(self.replicas):
            state = await replica.call("state", _LIVE_SECONDS)
            if state.exit_code is not None:
                self._router.dead[number] = replica.obituary(state)
        if self._router.dead:
            raise EngineError("; ".join(self._router.dead.values()))

    async def close(self) -> None:
        import ray

        replicas, self.replicas = self.replicas, []
        self._router = Router(0)
        await self._client.close()
        for result in await asyncio.gather(*(each.call("stop", 20.0) for each in replicas), return_exceptions=True):
            # A server ends with its actor, which a signal to the whole process group may have ended already.
            if isinstance(result, BaseException) and not isinstance(result.__cause__, ray.exceptions.RayActorError):
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
            if await healthy(self._client, replica.url):
                return
            if seconds > self._config.start_timeout:
                limit = f"{self._config.start_timeout:g} s (engine.start_timeout)"
                late = f"the vLLM server was not ready within {limit}"
                raise EngineError(f"{late}; log: {replica.options.log}\n{state.tail}")
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

    async def _set_version(self, version: int) -> None:
        body = {"new_version": str(version)}
        await self._on_all("/update_weight_version", body, _ACTOR_SECONDS, "raising the weight version")
        self.version = version

    async def _on_all(self, path: str, body: dict[str, Any] | None, seconds: float, what: str) -> list[Any]:
        posts = (self._post(number, path, body, seconds, what) for number in range(len(self.replicas)))
        return await asyncio.gather(*posts)

    async def _post(self, number: int, path: str, body: dict[str, Any] | None, seconds: float, what: str) -> Any:
        url = self.replicas[number].url
        if path in ("/collective_rpc", "/v1/load_lora_adapter"):
            # Sent once, so on a connection that cannot be stale: a second `receive_weights` would wait for a past broadcast.
            async with open_client() as fresh:
                return await post(fresh, url, path, body, seconds, what, attempts=1)
        return await post(self._client, url, path, body, seconds, what)

    async def _examine(self, number: int, error: EngineError) -> None:
        """After a failure: bury the server if it is dead or dies in the next seconds, else raise the failure."""
        deadline = time.monotonic() + _DYING_SECONDS
        while number not in self._router.dead:
            if number >= len(self.replicas):
                raise EngineError("the vLLM engine was closed while it was generating") from error
            replica = self.replicas[number]
            state: ServerState = await replica.call("state", _LIVE_SECONDS)
            if state.exit_code is not None:
                self._router.dead[number] = replica.obituary(state)
            elif time.monotonic() > deadline:
                raise error
            else:
                await asyncio.sleep(_POLL_SECONDS)


def server_options(
    model_dir: str | Path,
    logs: str | Path,
    config: EngineConfig,
    *,
    number: int = 0,
    gpu_share: float = 0.0,
    dtype: str = "float32",
    seed: int = 0,
    adapter_rank: int = 0,
) -> VllmOptions:
    """The options of replica `number`: token ids in and out, log-probabilities of the sampling distribution, new weights.

    `gpu_share` is the part of a GPU that it may use (0: it runs on the CPU), `adapter_rank` the largest rank of adapters (0: none).
    """
    arguments = [
        *("--dtype", dtype),
        *("--seed", str(seed)),
        *("--max-model-len", str(config.max_model_len)),
        *("--max-num-seqs", str(config.max_concurrent)),
        *("--tensor-parallel-size", str(config.tensor_parallel)),
        *("--generation-config", "vllm"),
        *("--logprobs-mode", "processed_logprobs"),
        *("--worker-extension-cls", _WORKER_EXTENSION),
        *("--uvicorn-log-level", "warning"),
        *("--enable-scale-out", "--disable-log-stats"),
    ]
    environment = {WORKER_MARK: "1", "VLLM_SERVER_DEV_MODE": "1"}
    if gpu_share:
        arguments += ["--gpu-memory-utilization", str(config.gpu_memory_utilization * gpu_share)]
    else:
        arguments += ["--block-size", "32"]  # the default of 128 finds fewer prefixes of short prompts in the cache
        if config.tensor_parallel > 1:
            arguments += ["--distributed-executor-backend", "mp"]
    if adapter_rank:
        rank = min(rank for rank in ADAPTER_RANKS if rank >= adapter_rank)
        arguments += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "1", "--max-cpu-loras", "2"]
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    return VllmOptions(
        model_dir=str(Path(model_dir).resolve()),
        name=MODEL_NAME,
        log=str((Path(logs) / f"vllm-{number}.log").resolve()),
        gpu=gpu_share > 0,
        context=config.max_model_len,
        kv_cache_bytes=config.kv_cache_bytes,
        port=config.port + number if config.port else 0,
        arguments=arguments,
        environment=environment,
    )


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
