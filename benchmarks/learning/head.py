"""What the chunked head saves: log-probabilities and entropies of sampled tokens, forward and backward, against the dense way.

The dense way holds all logits, tokens x vocabulary, several times over; the chunked head of `agent_train/learner/head.py`
holds those of a chunk of tokens, or of tokens and vocabulary, and computes them again in the backward pass. Every measurement runs in a process of its own,
forked after the imports, whose peak memory is read when it ends; memory counts from where the inputs are made.

python benchmarks/learning/head.py [--tokens 512] [--chunk 128] [--vocab-chunk 8192] [--hidden 128]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import resource
import time
from typing import Any

import torch

from agent_train.learner.head import chunked_head

VOCABULARIES = (32_768, 65_536, 151_936)
MIB = 1024  # ru_maxrss counts KiB on Linux
M_MMAP_THRESHOLD = -3

Answer = tuple[torch.Tensor, torch.Tensor]


def dense(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor, *chunks: int
) -> Answer:
    log_p = ((hidden @ weight.T).float() / temperature[:, None]).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


SIDES = ("dense", "chunked", "chunked_vocab")


def one(job: tuple[str, int, int, int, int, int]) -> dict[str, Any]:
    """Forward and backward of one side, once: seconds, peak MiB beyond the inputs, and numbers to compare the sides by."""
    side, vocabulary, tokens, width, chunk, vocab_chunk = job
    torch.set_num_threads(1)
    # glibc's allocator keeps middling blocks for later use, which would count as use: have it give them back at once.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(vocabulary, width, generator=generator) * 0.05).requires_grad_()
    hidden = torch.randn(tokens, width, generator=generator).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    temperature = torch.ones(tokens)
    head = dense if side == "dense" else chunked_head
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, cpu = time.perf_counter(), time.process_time()
    logprobs, entropy = head(hidden, weight, targets, temperature, chunk, vocab_chunk if side == "chunked_vocab" else 0)
    (logprobs.sum() + 0.01 * entropy.sum()).backward()
    cpu, seconds = time.process_time() - cpu, time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seen = [logprobs.mean().item(), entropy.mean().item(), hidden.grad.norm().item(), weight.grad.norm().item()]
    return {"seconds": seconds, "cpu_seconds": cpu, "mib": (peak - before) / MIB, "seen": seen}


def measure(
    quick: bool = False, rounds: int = 2, tokens: int = 512, width: int = 128, chunk: int = 128, vocab_chunk: int = 8192
) -> list[dict[str, Any]]:
    """All sides at every vocabulary, in turn, `rounds` times; the least of each."""
    vocabularies = VOCABULARIES[:1] if quick else VOCABULARIES
    jobs = [(side, v, tokens, width, chunk, vocab_chunk) for v in vocabularies for side in SIDES]
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {job: [] for job in jobs}
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for _ in range(rounds):
            for job in jobs:
                found[job].append(pool.apply(one, (job,)))
    rows = []
    for vocabulary in vocabularies:
        own = {job[0]: runs for job, runs in found.items() if job[1] == vocabulary}
        seen = torch.tensor([own[side][0]["seen"] for side in SIDES], dtype=torch.float64)
        if not torch.allclose(seen, seen[:1].expand_as(seen), rtol=1e-4):
            raise RuntimeError(f"the sides differ at {vocabulary}: {seen.tolist()}")
        row: dict[str, Any] = {"vocabulary": vocabulary, "tokens": tokens, "width": width, "chunk": chunk}
        row["vocab_chunk"] = vocab_chunk
        for side, runs in own.items():
            for name, digits in (("cpu_seconds", 3), ("mib", 0)):
                row[f"{side}_{name}"] = round(min(run[name] for run in runs), digits)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512, help="sampled tokens of a micro-batch (default: 512)")
    parser.add_argument("--hidden", type=int, default=128, help="width of the hidden states (default: 128)")
    parser.add_argument("--chunk", type=int, default=128, help="tokens of one chunk (default: 128)")
    parser.add_argument("--vocab-chunk", type=int, default=8192, help="entries of one chunk (default: 8192)")
    parser.add_argument("--rounds", type=int, default=2, help="of which the least counts (default: 2)")
    parser.add_argument("--quick", action="store_true", help="the smallest vocabulary only")
    args = parser.parse_args()
    rows = measure(args.quick, args.rounds, args.tokens, args.hidden, args.chunk, args.vocab_chunk)
    print(f"\n{args.tokens} tokens of width {args.hidden}, fp32, one CPU thread; CPU s (peak MiB)\n")
    print(
        f"| vocabulary | dense | chunks of {args.chunk} tokens | and of {args.vocab_chunk} entries |\n|---|---|---|---|"
    )
    for row in rows:
        cells = [f"{row[f'{side}_cpu_seconds']:.2f} ({row[f'{side}_mib']:,.0f})" for side in SIDES]
        print(f"| {row['vocabulary']:,} | {' | '.join(cells)} |")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
