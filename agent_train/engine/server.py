"""How the trainer starts a vLLM server: token ids in and out, log-probabilities of the sampling distribution, new weights."""

from pathlib import Path

from agent_train.config.schema import EngineConfig
from agentgym.processes.vllm_server import VllmOptions

MODEL_NAME = "policy"
WORKER_MARK = "AGENT_TRAIN_ENGINE_WORKER"  # variable of a server, by which its workers know to die with it
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for
_WORKER_EXTENSION = "agent_train.engine.vllm_worker.WeightReceiver"


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
    """The options of one server of an engine.

    Args:
        logs: folder of its log, `vllm-{number}.log`.
        number: of the replica; it listens on `config.port + number`.
        gpu_share: the part of a GPU that it may use; 0: it runs on the CPU.
        adapter_rank: the largest rank of adapters that it takes; 0: none.
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
