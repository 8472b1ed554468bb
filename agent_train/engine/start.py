"""The engine that a config names, started."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from agent_train.config.extensions import engines
from agent_train.config.schema import EngineConfig
from agent_train.engine.embedded import EmbeddedEngine
from agent_train.engine.vllm import Progress, VllmEngine


async def start_engine(
    config: EngineConfig,
    model_dir: str | Path,
    logs: str | Path,
    *,
    dtype: str = "float32",
    seed: int = 0,
    adapter_rank: int = 0,
    deterministic: bool = False,
    on_progress: Progress | None = None,
) -> VllmEngine | EmbeddedEngine:
    """Start the engine that `config.name` names and return when it answers; vLLM needs Ray running.

    An engine of your own is `async def mine(config, model_dir, logs, **more) -> Engine`, which gets the other arguments by name; its
    result has the methods of `EmbeddedEngine`.

    Args:
        logs: folder for the engine's logs.
        adapter_rank: rank of the adapters that a vLLM engine will load; 0: none.
        deterministic: a batch of the embedded engine waits for every announced session, not for `config.batch_wait`.
        on_progress: see `VllmEngine.start`.

    Raises:
        EngineError: it did not start.
        ValueError: there is no such engine.
    """
    start = engines.load(config.name)
    more = {"dtype": dtype, "seed": seed, "adapter_rank": adapter_rank, "deterministic": deterministic}
    return await start(config, model_dir, logs, **more, on_progress=on_progress)  # type: ignore[no-any-return]


async def start_vllm(
    config: EngineConfig, model_dir: str | Path, logs: str | Path, *, deterministic: bool, **more: Any
) -> VllmEngine:
    """vLLM servers."""
    return await VllmEngine.start(model_dir, config, logs, **more)


async def start_embedded(
    config: EngineConfig, model_dir: str | Path, logs: str | Path, *, dtype: str, deterministic: bool, **more: Any
) -> EmbeddedEngine:
    """An engine in this process; it writes no logs."""
    return await asyncio.to_thread(
        EmbeddedEngine,
        model_dir,
        config.max_model_len,
        dtype=dtype,
        max_concurrent=config.max_concurrent,
        batch_wait=None if deterministic else config.batch_wait,
        request_timeout=config.request_timeout,
    )
