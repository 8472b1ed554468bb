"""What new weights cost on their way from the learner to the engine, by every transport, against a raw copy of the same bytes.

A model of random weights takes one AdamW step on random tokens; the sender is this process, the receiver another one. What is
timed ends when the receiver has all tensors in its memory and both sides' checksums are equal. The raw copy of a collective is
one gloo broadcast, that of files is `shutil.copyfile`, which reads and writes once. Files lie in TMPDIR, and what was written
before is removed in between.

python benchmarks/weights.py [--out FILE.json] [--models 0.1B,0.5B] [--rounds N]
"""

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from found import write

from agent_train.weights.collective import broadcast_buckets, checksum, make_group, receive_buckets
from agent_train.weights.files import WeightCopy
from agent_train.weights.sync import TensorInfo, WeightAddress, free_port

# Shapes of SmolLM2-135M and Qwen2-0.5B, whose heads are tied to the embeddings.
NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
SHAPES = {
    "tiny": ((64, 2, 4, 2, 128), 512),
    "0.1B": ((576, 30, 9, 3, 1536), 49_152),
    "0.5B": ((896, 24, 14, 2, 4864), 151_936),
}
LR, TOKENS = 1e-6, 32
GOAL_SECONDS, GOAL_BYTES = 2.0, 0.2


@dataclass
class Cost:
    """Seconds of wall time, and of the CPU in both processes."""

    wall: float
    cpu: float


@dataclass
class Stepped:
    """The weights of a model before and after a step, in bfloat16."""

    old: list[torch.Tensor]
    new: list[torch.Tensor]
    manifest: list[TensorInfo]

    @property
    def size(self) -> int:
        return sum(tensor.nbytes for tensor in self.new)


def step(name: str) -> Stepped:
    """One step of AdamW at a learning rate of 1e-6, whose state is made for one tensor at a time."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape, vocab = SHAPES[name]
    config = Qwen2Config(vocab_size=vocab, tie_word_embeddings=True, **dict(zip(NAMES, shape, strict=True)))
    model = Qwen2ForCausalLM(config)
    ids = torch.randint(vocab, (1, TOKENS))
    model(input_ids=ids, labels=ids).loss.backward()
    found = Stepped([], [], [])
    for key, parameter in model.named_parameters():
        found.manifest.append(TensorInfo(key, tuple(parameter.shape), "bfloat16"))
        found.old.append(parameter.detach().bfloat16())
        torch.optim.AdamW([parameter], lr=LR, weight_decay=0.0).step()
        parameter.grad = None
        found.new.append(parameter.detach().bfloat16())
    return found


def receive(link: Connection) -> None:
    """The receiver: does what it is told, and answers with the checksums that it found and its CPU seconds."""
    torch.set_num_threads(1)
    copy, group = WeightCopy(), None
    while True:
        what, *given = link.recv()
        link.send("begins")
        begun, answer = time.process_time(), {}
        if what == "join":
            group = make_group(given[0], 1, "cpu")
        elif what == "raw":
            group.process_group.broadcast([torch.empty(given[0], dtype=torch.uint8)], from_rank_0()).wait()
        elif what == "collective":
            answer = {name: checksum(tensor) for name, tensor in receive_buckets(group, given[0])}
        else:
            answer = copy.read(*given)
        link.send((answer, time.process_time() - begun))


def from_rank_0() -> Any:
    options = torch.distributed.BroadcastOptions()
    options.rootRank = 0
    return options


class Receiver:
    """The receiver's process, and its CPU seconds so far."""

    def __init__(self) -> None:
        self.link, there = multiprocessing.Pipe()
        self.cpu = 0.0
        self.process = multiprocessing.get_context("spawn").Process(target=receive, args=(there,), daemon=True)
        self.process.start()

    def told(self, *what: Any, meanwhile: Callable[[], Any] = dict) -> tuple[Any, Any]:
        """The receiver's checksums, and what the sender's part returned."""
        self.link.send(what)
        self.link.recv()
        sent = meanwhile()
        arrived, cpu = self.link.recv()
        self.cpu += cpu
        return arrived, sent

    def timed(self, rounds: int, move: Callable[[int], Any], remove: Path | None = None) -> Cost:
        """The least of some rounds, each of which is given its number; what the one before wrote is removed."""
        found = []
        for number in range(rounds):
            if remove is not None and remove.exists():
                (shutil.rmtree if remove.is_dir() else os.remove)(remove)
            wall, cpu = time.perf_counter(), time.process_time() + self.cpu
            move(number)
            found.append((time.perf_counter() - wall, time.process_time() + self.cpu - cpu))
        return Cost(*(min(each) for each in zip(*found, strict=True)))


def by_collective(receiver: Receiver, model: Stepped, rounds: int) -> list[dict[str, Any]]:
    address = WeightAddress("127.0.0.1", free_port("127.0.0.1"), 2)
    _, group = receiver.told("join", address, meanwhile=lambda: make_group(address, 0, "cpu"))
    flat = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in model.new])

    def raw(_: int) -> None:
        receiver.told("raw", model.size, meanwhile=lambda: group.process_group.broadcast([flat], from_rank_0()).wait())

    def ours(_: int) -> None:
        arrived, sent = receiver.told(
            "collective", model.manifest, meanwhile=lambda: broadcast_buckets(group, model.manifest, model.new)
        )
        assert arrived == sent

    least = receiver.timed(rounds, raw)
    return [row("collective", model.size, receiver.timed(rounds, ours), least)]


def by_files(receiver: Receiver, model: Stepped, rounds: int, folder: Path) -> list[dict[str, Any]]:
    copy = WeightCopy()

    def whole(_: int) -> None:
        sent = copy.write(model.manifest, model.new, folder / "whole", keep=False)
        assert receiver.told("read", folder / "whole", False)[0] == sent

    cost = receiver.timed(rounds, whole, folder / "whole")
    file = folder / "whole" / "model.safetensors"
    raw = receiver.timed(rounds, lambda _: shutil.copyfile(file, folder / "copy"), folder / "copy")
    (folder / "copy").unlink()
    sent = copy.write(model.manifest, model.old, folder / "whole", keep=True)
    assert receiver.told("read", folder / "whole", True)[0] == sent

    def delta(number: int) -> None:  # there and back again
        sent = copy.write_changes(model.manifest, model.old if number % 2 else model.new, folder / "changes")
        assert receiver.told("read", folder / "changes", True)[0] == sent

    changed = receiver.timed(rounds, delta, folder / "changes")
    size = sum(path.stat().st_size for path in (folder / "changes").iterdir())
    return [row("disk", model.size, cost, raw), row("delta", size, changed, raw)]


def row(transport: str, size: int, cost: Cost, raw: Cost) -> dict[str, Any]:
    over = {"wall_of_raw": cost.wall / raw.wall, "cpu_of_raw": cost.cpu / raw.cpu}
    return {"transport": transport, "bytes": size, "wall": cost.wall, "cpu": cost.cpu, **over}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", default="0.1B,0.5B")
    parser.add_argument("--rounds", type=int, default=3, help="of which the least counts")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    sys.stdout.write(
        "| model | transport | MB | of the bytes | s (of the raw copy) | CPU s (of the raw copy) | goal |\n"
    )
    sys.stdout.write("|---|---|---|---|---|---|---|\n")
    for name in args.models.split(","):
        model, receiver = step(name), Receiver()
        with tempfile.TemporaryDirectory() as folder:
            found = by_collective(receiver, model, args.rounds) + by_files(receiver, model, args.rounds, Path(folder))
        receiver.process.terminate()
        for each in found:
            share = each["bytes"] / model.size
            met = share <= GOAL_BYTES if each["transport"] == "delta" else each["wall_of_raw"] <= GOAL_SECONDS
            seconds = f"{each['wall']:.2f} ({each['wall_of_raw']:.1f}) | {each['cpu']:.2f} ({each['cpu_of_raw']:.1f})"
            sizes = f"{each['bytes'] / 1e6:.1f} | {share:.3f}"
            sys.stdout.write(f"| {name} | {each['transport']} | {sizes} | {seconds} | {'met' if met else 'MISSED'} |\n")
            rows.append({"model": name, "share": share, **each})
    write(args.out, rows=rows)


if __name__ == "__main__":
    main()
