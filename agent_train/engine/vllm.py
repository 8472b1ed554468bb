"""vLLM as the engine: servers in Ray actors, token ids in and out over HTTP, weights by a collective or by files.

Requests go to `/inference/v1/generate`, which speaks token ids only and says which weight version sampled each token.
"""

import asyncio
import itertools
import math
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_train.cluster.placement import COLOCATED_SHARE, gpu_share
from agent_train.config.schema import EngineConfig
from agent_train.engine.base import Completion, Engine, EngineError, EngineLostError, Load, Sampling
from agent_train.engine.http import events, get, open_client, post
from agent_train.engine.servers import GENERATE, HEALTHY, STALE, Progress, Router, Server, Servers
from agent_train.report.timeline import Timeline
from agent_train.weights.sync import TensorInfo, WeightAddress, manifest_to_json
from agentgym.processes.vllm_server import VllmOptions, check_vllm

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

CONNECT_SECONDS = 150.0
LOAD_SECONDS = 600.0
MODEL_NAME = "policy"
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for
_WORKER_EXTENSION = "agent_train.engine.vllm_worker.WeightReceiver"
_RPC_SECONDS = 60.0
_TRIES = 5  # of a request whose servers die one after another: it may be the cause
_LIVE_SECONDS = 10.0
_WAITING, _CACHE = "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
_GAUGE = re.compile(rf"^({_WAITING}|{_CACHE})\{{.*\}} (\S+)$", re.MULTILINE)


class VllmEngine(Engine):
    """One or more vLLM servers that hold the same weights. Make it with `VllmEngine.start`.

    A server that dies or hangs is started again, and takes part from the next load of weights on. Limits count only the time in
    which a server serves: a request waits for restarts and loads, which have limits of their own.
    """

    def __init__(self, servers: Servers, config: EngineConfig, key: str, adapter_rank: int = 0):
        self.servers = servers
        self.max_model_len = config.max_model_len
        self.key = key
        self._config = config
        self._router = Router(config.replicas, config.replicas * config.max_concurrent, servers.timeline)
        self._serving = asyncio.Event()  # cleared while weights are loaded
        self._serving.set()
        self._group: list[Server] = []  # whose workers are in the weight group, or have fetched weights
        self._adapter: str | None = None
        self._adapters = itertools.count(1)
        self._asleep = False
        # Level 2 drops the weights. Adapters come without the others, which level 1 keeps in host memory.
        self._sleep_level = 1 if adapter_rank else 2

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        model_dir: str | Path,
        logs: str | Path,
        *,
        on_progress: Progress | None = None,
        adapter_rank: int = 0,
        deterministic: bool = False,
        timeline: Timeline | None = None,
        bundles: "PlacementGroup | None" = None,
        first: int | None = None,
        **more: Any,
    ) -> "VllmEngine":
        """Start `config.replicas` servers and return when all answer; Ray must run. vLLM promises nothing `deterministic`.

        Beyond the `first` servers, for which there is room, they start after weights are loaded, and whenever there is room.
        Server i takes a part of bundle i, if there are `bundles`. `logs` gets `vllm-0.log`, `vllm-1.log` ...; `on_progress` is
        called several times a second with the servers' last log line and the seconds since the start. EngineError, with the
        last lines of its log, if a server cannot start, exits or is late.
        """
        import ray

        if problem := check_vllm():
            raise EngineError(f"{problem}; or use engine=embedded")
        key = secrets.token_urlsafe(32)
        share = gpu_share(int(ray.cluster_resources().get("GPU", 0)), "vllm", config.placement)
        given = {"gpu_share": share, "key": key, "adapter_rank": adapter_rank, **more}
        options = [server_options(model_dir, logs, config, number=n, **given) for n in range(config.replicas)]
        held = [server_room(config, share, number, bundles) for number in range(config.replicas)]
        servers = Servers(options, held, config.start_timeout, open_client(key), timeline or Timeline())
        engine = cls(servers, config, key, adapter_rank)
        try:
            await engine.servers.start(on_progress, first or config.replicas)
            present = servers.those(STALE)
            await engine._set_version(present, 0)
            engine.servers.serve(present)
            if config.adaptive and not await engine.loads():
                raise EngineError(
                    "engine.adaptive=true: this vLLM tells no load at /metrics, as with --disable-log-stats: leave it out"
                )
        except BaseException:
            await engine.close()
            raise
        return engine

    @property
    def receivers(self) -> int:
        return len(self.servers.numbers(HEALTHY, STALE)) * self._config.tensor_parallel

    @property
    def connected(self) -> bool:
        present = self.servers.those(HEALTHY, STALE)
        return bool(present) and self._group == present

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, episode: str | None = None) -> Completion:
        return await self._generate(prompt_ids, sampling, episode, None)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, episode: str | None, told: Callable[[list[int]], None]
    ) -> Completion:
        """As `generate`, and EngineError if a server dies after it has told ids: no other would sample the same."""
        return await self._generate(prompt_ids, sampling, episode, told)

    async def _generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        episode: str | None,
        told: Callable[[list[int]], None] | None,
    ) -> Completion:
        self.check_request(prompt_ids, sampling)
        began = False

        def tell(ids: list[int]) -> None:
            nonlocal began
            if told is not None:
                began = True
                told(ids)

        params = {**sampling_params(sampling), "detokenize": False}
        body: dict[str, Any] = {"token_ids": list(prompt_ids), "sampling_params": params}
        for _ in range(_TRIES):
            while (serving := await self.servers.some(HEALTHY)) and not self._serving.is_set():
                await self._serving.wait()
            with self._router.request(serving, episode) as number:
                server = self.servers.all[number]
                try:
                    return await self._ask(server, body, None if told is None else tell)
                except EngineError as error:
                    failure = error
                except asyncio.CancelledError:
                    self.servers.look_at(server)
                    raise
            await self.servers.examine(server, failure)
            if began:
                raise failure
        raise EngineError(f"generate: {_TRIES} servers died of this request or beside it, the last of: {failure}")

    async def _ask(self, server: Server, body: dict[str, Any], told: Callable[[list[int]], None] | None) -> Completion:
        if self._adapter is not None:
            body["model"] = self._adapter
        if self._config.keep_cache:
            body["cache_salt"] = f"version {self.version}"  # nobody else reads keys and values of this version
        seconds = self._config.request_timeout
        try:
            async with self.servers.limited(server, seconds):
                if told is not None:
                    return _completion(await self._streamed(server, body, told))
                answer = await self._post(server, GENERATE, body, math.inf, "generate")
        except TimeoutError as error:
            raise EngineError(f"generate: {server.url} is dead or did not answer within {seconds:g} s") from error
        return _completion(answer["choices"][0])

    async def _streamed(
        self, server: Server, body: dict[str, Any], told: Callable[[list[int]], None]
    ) -> dict[str, Any]:
        """The choice of an answer that comes in pieces, put together."""
        ids: list[int] = []
        logprobs: list[dict[str, Any]] = []
        choice: dict[str, Any] = {}
        async for event in events(self.servers.client, server.url, GENERATE, {**body, "stream": True}, "generate"):
            if not event.get("choices"):
                if "error" in event:
                    raise EngineError(f"generate: {server.url} failed within an answer: {event['error']}")
                continue
            choice = event["choices"][0]
            logprobs += (choice.get("logprobs") or {}).get("content") or []
            if new := choice.get("token_ids"):
                ids += new
                told(new)
        if not choice.get("finish_reason"):
            raise EngineError(f"generate: {server.url} told no end of an answer")
        return {**choice, "token_ids": ids, "logprobs": {"content": logprobs}}

    async def connect_weights(self, address: WeightAddress) -> None:
        step = self._config.tensor_parallel
        # One that came back since the address was made is in the next group.
        present = self.servers.those(HEALTHY, STALE)[: (address.world_size - address.rank_offset) // step]
        first = {server.number: address.rank_offset + place * step for place, server in enumerate(present)}
        group = [address.host, address.port, address.world_size]
        self._group = present

        async def join(server: Server) -> list[list[int]]:
            return await self._rpc(server, "connect_weights", [*group, first[server.number]], CONNECT_SECONDS)

        async with self._grouped():
            missed = {
                rank for workers in await self.servers.of_all(present, join) for ranks in workers for rank in ranks
            }
            if missed:
                raise EngineError(f"ranks {sorted(missed)} of {address.world_size} did not join the weight group")

    @asynccontextmanager
    async def _grouped(self) -> AsyncIterator[None]:
        """Mark that this side has left the weight group if the block fails."""
        try:
            yield
        except BaseException:
            self._group = []
            raise

    async def receive_weights(self, manifest: Sequence[TensorInfo], version: int) -> dict[str, int]:
        return await self._load("receive_weights", manifest_to_json(manifest), version)

    async def fetch_weights(self, folder: str | Path) -> list[dict[str, int]]:
        await self.servers.some(HEALTHY, STALE)
        self._group = self.servers.those(HEALTHY, STALE)
        arguments = [os.fspath(folder), self._keeps]
        answers = await self._rpc_of_all(self._group, "fetch_weights", arguments, LOAD_SECONDS)
        return [worker for workers in answers for worker in workers]

    async def load_fetched(self, version: int) -> dict[str, int]:
        return await self._load("load_fetched", self._keeps, version)

    @property
    def _keeps(self) -> bool:
        return self._config.weights == "delta"

    async def _load(self, method: str, argument: Any, version: int) -> dict[str, int]:
        """Load new weights into the servers of the group by a method of their workers; the checksum of each tensor."""
        members = [server for server in self.servers.those(HEALTHY, STALE) if server in self._group]
        if not members:
            raise EngineLostError("every vLLM server that takes new weights died")
        async with self._grouped(), self._loading(members, version):
            return await self._checksums(members, method, argument, LOAD_SECONDS, version)

    async def load_adapter(self, folder: str | Path, version: int) -> dict[str, int]:
        path, before, name = os.fspath(folder), self._adapter, f"adapter-{next(self._adapters)}"
        await self.servers.some(HEALTHY, STALE)
        present = self.servers.those(HEALTHY, STALE)
        async with self._loading(present, version, in_flight="end"):
            had = self.servers.those(HEALTHY)
            sums = await self._checksums(present, "adapter_checksums", path, _RPC_SECONDS, version)
            # A new name each time: vLLM would read an adapter that is loaded in place of another again at every step.
            body = {"lora_name": name, "lora_path": path}
            await self._on_all(present, "/v1/load_lora_adapter", body, LOAD_SECONDS, "loading the adapter")
            if before is not None:
                body = {"lora_name": before}
                await self._on_all(had, "/v1/unload_lora_adapter", body, _RPC_SECONDS, "dropping an adapter")
            self._adapter = name
            return sums

    @asynccontextmanager
    async def _loading(self, present: Sequence[Server], version: int, in_flight: str = "go on") -> AsyncIterator[None]:
        """Let the block load a version into the servers given, while nothing is generated; then clear caches and raise the version.

        New requests wait here, since servers that pause one after another would answer some of them with old weights. Those in
        flight stand still and "go on" with the new weights, or are waited for to "end": they name their adapter. After an error
        these servers are stale.
        """
        begun = time.monotonic()
        self._serving.clear()
        paused = any(self._router.in_flight) and in_flight == "go on"
        try:
            if self._asleep:
                await self._on_all(present, "/wake_up?tags=weights", None, LOAD_SECONDS, "waking up")
            if paused:
                self.servers.stand_still(present)
                await self._on_all(present, "/pause?mode=keep&clear_cache=false", None, _RPC_SECONDS, "pausing")
            else:
                await self._router.until_idle(self._config.request_timeout)
            self.servers.outdate(present)
            yield
            if self._asleep:
                await self._on_all(present, "/wake_up?tags=kv_cache", None, LOAD_SECONDS, "waking up")
            if not (paused and self._config.keep_cache):
                await self._clear_caches(present)
            await self._set_version(present, version)
            await self._on_all(present, "/resume", None, _RPC_SECONDS, "going on")
            self._asleep = False
            self.servers.serve(present)
            self.servers.fill()
        except BaseException as error:
            self.servers.spoil(present, f"version {version} was not loaded whole: {error}")
            raise
        finally:
            for server in present:
                self.servers.timeline.add(("engine", server.number), f"loads version {version}", begun)
            self._serving.set()

    async def _clear_caches(self, present: Sequence[Server]) -> None:
        # Requests in flight are begun again: what is in their cache is of the old weights.
        path = "/reset_prefix_cache?reset_running_requests=true"
        answers = await self._on_all(present, path, None, _RPC_SECONDS, "clearing the prefix cache")
        for server, answer in zip(present, answers, strict=True):
            if not answer["success"]:
                raise EngineError(f"{server.url} did not clear its prefix cache: old weights would answer")

    async def _checksums(
        self, present: Sequence[Server], method: str, argument: Any, seconds: float, version: int
    ) -> dict[str, int]:
        """The result of a method on every worker, which must be the same in all."""
        answers = await self._rpc_of_all(present, method, [argument], seconds)
        sums: list[dict[str, int]] = [worker for workers in answers for worker in workers]
        if any(other != sums[0] for other in sums):
            raise EngineError(f"version {version} is not the same at the {len(sums)} workers")
        return sums[0]

    async def sleep(self) -> None:
        self._serving.clear()
        self._asleep = True

        async def one(server: Server) -> None:
            server.loaded = False
            try:
                await self._post(server, f"/sleep?level={self._sleep_level}", None, LOAD_SECONDS, "falling asleep")
            except EngineError as error:
                await self.servers.examine(server, error)

        await asyncio.gather(*map(one, self.servers.those(HEALTHY, STALE)))

    @property
    def lacks_weights(self) -> bool:
        return bool(self.servers.numbers(STALE))

    async def stale(self) -> None:
        while True:
            await self.servers.stale()
            if self._serving.is_set():
                return
            await self._serving.wait()  # a server that comes back while the others sleep gets its weights with them

    async def losses(self) -> int:
        return await self.servers.find_dead()

    async def loads(self) -> list[Load]:
        serving = self.servers.those(HEALTHY)
        asked = (get(self.servers.client, f"{server.url}/metrics", _LIVE_SECONDS) for server in serving)
        told = [dict(_GAUGE.findall(text or "")) for text in await asyncio.gather(*asked)]
        return [Load(int(float(own[_WAITING])), float(own[_CACHE])) for own in told if len(own) == 2]

    async def live(self) -> None:
        await self.servers.settled()
        await self.servers.some(HEALTHY, STALE)

    async def close(self) -> None:
        await self.servers.close()
        await self.servers.client.close()

    async def _rpc(self, server: Server, method: str, arguments: list[Any], seconds: float) -> list[Any]:
        """The answers of a method in each worker of a server."""
        body = {"method": method, "args": arguments}
        return list((await self._post(server, "/collective_rpc", body, seconds, method))["results"])

    async def _rpc_of_all(
        self, present: Sequence[Server], method: str, arguments: list[Any], seconds: float
    ) -> list[list[Any]]:
        return await self.servers.of_all(present, lambda server: self._rpc(server, method, arguments, seconds))

    async def _set_version(self, present: Sequence[Server], version: int) -> None:
        body = {"new_version": str(version)}
        await self._on_all(present, "/update_weight_version", body, _RPC_SECONDS, "raising the weight version")
        self.version = version

    async def _on_all(
        self, present: Sequence[Server], path: str, body: dict[str, Any] | None, seconds: float, what: str
    ) -> list[Any]:
        return await self.servers.of_all(present, lambda server: self._post(server, path, body, seconds, what))

    async def _post(self, server: Server, path: str, body: dict[str, Any] | None, seconds: float, what: str) -> Any:
        if path in ("/collective_rpc", "/v1/load_lora_adapter"):
            # Sent once, so on a connection that cannot be stale: a second `receive_weights` would wait for a past broadcast.
            async with open_client(self.key) as fresh:
                return await post(fresh, server.url, path, body, seconds, what, attempts=1)
        return await post(self.servers.client, server.url, path, body, seconds, what)


def server_room(
    config: EngineConfig, share: float, number: int, bundles: "PlacementGroup | None" = None
) -> dict[str, Any]:
    """Ray's resources for a server that takes a `share` of each of its GPUs: a part of its bundle, beside ranks, if there are any."""
    if bundles is not None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(bundles, number)
        return {"num_cpus": 0, "num_gpus": COLOCATED_SHARE, "scheduling_strategy": strategy}
    # Servers that hold no resource of Ray's would all go to one node.
    strategy = "DEFAULT" if share else "SPREAD"
    return {"num_cpus": 0, "num_gpus": config.tensor_parallel * share, "scheduling_strategy": strategy}


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
    key: str = "",
) -> VllmOptions:
    """The options of replica `number`: token ids in and out, log-probabilities of the sampling distribution, new weights.

    `gpu_share` is the part of a GPU that it may use (0: it runs on the CPU), `adapter_rank` the largest rank of adapters (0: none).
    """
    arguments = [
        *("--dtype", dtype),
        *("--seed", str(seed % 2**32)),  # numpy's are no larger; requests have seeds of their own
        *("--max-model-len", str(config.max_model_len)),
        *("--max-num-seqs", str(config.max_concurrent)),
        *("--tensor-parallel-size", str(config.tensor_parallel)),
        *("--generation-config", "vllm"),
        *("--logprobs-mode", "processed_logprobs"),
        *("--worker-extension-cls", _WORKER_EXTENSION),
        *("--uvicorn-log-level", "warning"),
        "--enable-scale-out",
    ]
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    if gpu_share:
        arguments += ["--gpu-memory-utilization", str(config.gpu_memory_utilization * gpu_share)]
        if config.placement == "colocated":
            arguments += ["--enable-sleep-mode"]  # elsewhere vLLM refuses it, and falling asleep gives back nothing
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
        key=key,
        servers=config.replicas,
        arguments=arguments,
        environment=environment,
    )


def sampling_params(sampling: Sampling) -> dict[str, Any]:
    """`sampling` as vLLM's parameters: log-probabilities of the sampled tokens, and stops only at the ids that it names."""
    params = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "logprobs": 0,
    }
    if sampling.seed is not None:
        params["seed"] = sampling.seed % (1 << 63)
    return params


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
