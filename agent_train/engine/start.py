"""The engine that a config names, started."""

from __future__ import annotations

import asyncio
from pathlib import Path

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
    """Start it and return when it answers. See `VllmEngine.start` for `logs`, `adapter_rank` (vLLM alone) and `on_progress`; vLLM needs Ray running.

    Args:
        deterministic: whether a batch of the embedded engine waits for every session that is announced, not for `config.batch_wait`.

    Raises:
        EngineError: it did not start.
        ValueError: `config.name` is neither vllm nor embedded.
    """
    if config.name == "vllm":
        return await VllmEngine.start(
            model_dir, config, logs, dtype=dtype, seed=seed, adapter_rank=adapter_rank, on_progress=on_progress
        )
    if config.name == "embedded":
        return await asyncio.to_thread(
            EmbeddedEngine,
            model_dir,
            config.max_model_len,
            dtype=dtype,
            max_concurrent=config.max_concurrent,
            batch_wait=None if deterministic else config.batch_wait,
            request_timeout=config.request_timeout,
        )
    raise ValueError(f"engine.name is {config.name!r}: it must be vllm or embedded")
