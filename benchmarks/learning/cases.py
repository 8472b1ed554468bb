"""What both sides train on: a model folder, and the rows of one optimizer step. The same arguments give the same files."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

WORDS = (
    *("ice", "goal", "hole", "edge", "left", "right", "up", "down"),
    *("open", "corner", "lake", "walk", "turn", "far", "near"),
)
LONGEST = 1024


@dataclass(frozen=True)
class Case:
    """A model's shape and how many rows of what length a step has. Lengths are tokens, drawn evenly from the two bounds.

    Attributes:
        vocab: of the model; the tokenizer has fewer entries, and ids are drawn from those it has.
        lengths: "varied": completions whose logarithm is normal around `completion`, cut to a twelfth and to four times
            it, as what a policy samples; "equal": all prompts and all completions have the same length.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocab: int
    groups: int
    group_size: int
    prompt: int
    completion: int
    lengths: str


TINY = Case("1M, varied", 128, 4, 4, 384, 512, groups=8, group_size=8, prompt=96, completion=64, lengths="varied")
CASES = (
    TINY,
    replace(TINY, name="1M, equal", lengths="equal"),
    Case("44M, varied", 512, 8, 8, 1536, 32768, groups=2, group_size=8, prompt=96, completion=64, lengths="varied"),
)
QUICK = replace(
    TINY, name="quick", hidden=64, heads=2, layers=2, intermediate=96, groups=2, group_size=4, completion=16
)


def write_case(case: Case, folder: Path) -> Path:
    """`folder/model` and `folder/case.json`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from agent_train.learner.tiny import train_tokenizer

    rng = random.Random(0)
    prompts = [_prompt(rng, case) for _ in range(case.groups)]
    tokenizer = train_tokenizer(prompts, min(case.vocab, 512), LONGEST)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=case.vocab,
        hidden_size=case.hidden,
        intermediate_size=case.intermediate,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.heads // 2,
        head_dim=case.hidden // case.heads,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    plain = [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids]
    groups = [
        {
            "prompt": prompt,
            "ids": tokenizer(prompt)["input_ids"],
            "completions": [[rng.choice(plain) for _ in range(_length(rng, case))] for _ in range(case.group_size)],
            "rewards": [float(rng.random() < 0.5) for _ in range(case.group_size)],
        }
        for prompt in prompts
    ]
    folder.joinpath("case.json").write_text(json.dumps({"settings": asdict(case), "groups": groups}))
    return folder


def read_case(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "case.json").read_text())


def tokens_of(groups: list[dict[str, Any]]) -> int:
    """Tokens of all rows, prompts counted with each row."""
    return sum(len(group["ids"]) + len(ids) for group in groups for ids in group["completions"])


def reward_of(ids: list[int]) -> float:
    """A reward of what was sampled, for steps that generate: it differs from row to row and costs nothing."""
    return sum(ids) % 7 / 7


def _prompt(rng: random.Random, case: Case) -> str:
    """As many words as tokens: the tokenizer is trained on them, and most become one token."""
    words = case.prompt if case.lengths == "equal" else rng.randint(case.prompt // 2, case.prompt * 3 // 2)
    return " ".join(rng.choice(WORDS) for _ in range(words))


def _length(rng: random.Random, case: Case) -> int:
    if case.lengths == "equal":
        return case.completion
    return max(case.completion // 12, min(4 * case.completion, round(case.completion * rng.lognormvariate(0, 0.8))))
