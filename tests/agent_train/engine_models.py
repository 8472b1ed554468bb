"""Small models for the engine tests, and what transformers itself says about a completion."""

from pathlib import Path

import torch

from agent_train.config.schema import TinyConfig
from agent_train.learner.tiny import build_tiny
from agent_train.weights.sync import TensorInfo

MAX_LEN = 512
SHAPE = TinyConfig(hidden=64, layers=2, heads=2, intermediate=128, vocab=320)


def perturb(model: torch.nn.Module, seed: int, scale: float = 0.1) -> None:
    """Change every weight, so that distributions are far from uniform and differ between seeds."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def build(folder: Path) -> str:
    from transformers import AutoModelForCausalLM

    build_tiny(folder, ["up down left right 0123456789 the quick brown fox"] * 8, SHAPE, MAX_LEN, seed=0)
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    perturb(model, seed=1)
    model.save_pretrained(str(folder))
    return str(folder)


def reference_logprobs(model, prompt: list[int], ids: list[int], temperature: float) -> torch.Tensor:
    """transformers' log softmax(logits / temperature) of `ids` after `prompt`, with no cache and no padding."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def reference_greedy(model, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def manifest_of(tensors):
    """The manifest of named tensors, in their order."""
    return [TensorInfo(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors]
