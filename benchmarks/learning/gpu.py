"""Tokens a second, MFU and memory of training steps on one GPU, in bf16, for the shapes of Qwen3-0.6B and 4B.

Memory stands beside what `agent-train plan` says of it. The models have random weights: nothing is downloaded. Run by `learner.py`, or alone: `python benchmarks/learning/gpu.py`.
The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from flops import SHAPES, Shape, peak_of, training_flops, utilisation

from agent_train.config.model_folder import shape_of
from agent_train.config.schema import Config
from agent_train.data.samples import TrainingSample
from agent_train.learner.parallel import deal_to_ranks
from agent_train.learner.worker import LearnerWorker
from agent_train.plan.formulas import rank_bytes

CONTEXTS = (4096, 16384)
STEP_TOKENS = 65536
PROMPT = 512


def write_model(shape: Shape, folder: Path) -> None:
    from transformers import Qwen3ForCausalLM

    config = shape.config(max_position_embeddings=max(CONTEXTS), dtype="bfloat16")
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")


def rows_of_length(length: int, vocab: int) -> list[TrainingSample]:
    """STEP_TOKENS tokens in rows of this length, each after a prompt of PROMPT tokens."""
    rng, rows = random.Random(0), []
    for number in range(STEP_TOKENS // length):
        mask = [position >= PROMPT for position in range(length)]
        row = TrainingSample(
            [rng.randrange(vocab) for _ in range(length)], mask, [0.0] * length, id=str(number), trajectory=str(number)
        )
        rows.append(dataclasses.replace(row, advantages=row.spread(rng.gauss(0, 1))))
    return rows


def settings(context: int, checkpointing: bool, compiled: bool) -> Config:
    config = Config()
    learner = dataclasses.replace(
        config.learner,
        workers=1,
        microbatch_tokens=max(context, 16384),
        gradient_checkpointing=checkpointing,
        compile=compiled,
    )
    return dataclasses.replace(config, learner=learner, model=dataclasses.replace(config.model, dtype="bfloat16"))


def measure_one(
    name: str, shape: Shape, folder: Path, context: int, compiled: bool, steps: int, profile: Path | None
) -> dict[str, Any]:
    """The fastest of `steps` updates after one that is not counted, and one more under the profiler."""
    config = settings(context, checkpointing=shape.parameters > 10**9, compiled=compiled)
    found = shape_of(folder)
    assert found is not None
    worker = LearnerWorker(0, 1, config, "cuda")
    worker.start("127.0.0.1", worker.open_store("127.0.0.1"), str(folder))
    try:
        dealt = deal_to_ranks(rows_of_length(context, shape.vocab), config.learner)[0]
        seconds = []
        for _ in range(steps + 1):
            torch.cuda.synchronize()
            began = time.perf_counter()
            worker.update([dealt])
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        if profile:
            with torch.profiler.profile() as recorded:
                worker.update([dealt])
                torch.cuda.synchronize()
            table = recorded.key_averages().table(sort_by="self_cuda_time_total", row_limit=40)
            (profile / f"{name}-{context}{'-compiled' * compiled}.txt").write_text(table)
    finally:
        dist.destroy_process_group()
    rate = dealt.packed_tokens / min(seconds[1:])
    flops = training_flops(shape, context, dealt.n_tokens / dealt.packed_tokens)
    peak = peak_of(torch.cuda.get_device_name())
    return {
        "model": name,
        "context": context,
        "compiled": compiled,
        "tokens_per_second": round(rate),
        "teraflops": round(rate * flops / 1e12, 1),
        "mfu": round(utilisation(rate, flops, peak), 4) if peak else None,
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
        "planned_gb": round(sum(rank_bytes(found, config, ranks=1).values()) / 1e9, 1),
    }


def measure(steps: int, profile: Path | None) -> list[dict[str, Any]]:
    """One row for each model, context, and with its blocks compiled or not."""
    rows = []
    for name, shape in SHAPES.items():
        with tempfile.TemporaryDirectory(prefix="agentgym-gpu-") as folder:
            write_model(shape, Path(folder))
            for context, compiled in itertools.product(CONTEXTS, (False, True)):
                torch.compiler.reset()
                gc.collect()  # the learner before: its compiled blocks refer to themselves
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                rows.append(measure_one(name, shape, Path(folder), context, compiled, steps, profile))
                print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="of which the fastest counts (default: 3)")
    parser.add_argument("--profile", type=Path, help="folder for what torch's profiler says of one step of each")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu.py: torch finds no CUDA here, so nothing is measured")
    print(json.dumps({"device": torch.cuda.get_device_name(), "rows": measure(args.steps, args.profile)}))


if __name__ == "__main__":
    main()
