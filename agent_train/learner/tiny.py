"""A tiny policy built by code in seconds: Qwen3 architecture, its own byte-level tokenizer, a compact chat template."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_train.config.schema import TinyConfig
from agentgym.core.executor import close_env
from agentgym.core.messages import text_of
from agentgym.core.registration import make, spec
from agentgym.policies.base import ExpertPolicy
from agentgym.rollout.episode import Limits, run_episode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from agentgym.core.env import Env
    from agentgym.core.tasks import Task

PAD, END = "<|pad|>", "<|end|>"
SPECIAL_TOKENS = (PAD, END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
BYTES = 256
MISTAKES = 0.3  # share of random actions in the episodes whose texts make a tokenizer
SLOW_EPISODES = 4  # of them, where a step may take minutes
LONG_EPISODE = 1000  # turns at which one ends here, if its environment does not end it
# Head sizes that both transformers and every vLLM attention back end take (the CPU one is the narrowest).
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)

# Characters that never share a token: a digit, a line break, a capital that starts no word, a symbol. A grid such as " P _\n O G"
# or "SFFH" is therefore one token a cell wherever it stands. A cell keeps the space before it.
PIECES = r" ?\p{Lu}?[\p{Ll}\p{Lo}\p{Lm}\p{Lt}\p{M}]+| ?\p{Lu}|\p{N}|\n| ?[^\s\p{L}\p{M}\p{N}]|\s"

CHAT_TEMPLATE = """\
{%- set first = messages[0] if messages and messages[0].role == 'system' else none -%}
{%- if tools -%}
<|system|>{{ first.content + '\\n' if first else '' }}Tools:
{% for tool in tools %}{{ (tool.function if tool.function is defined else tool) | tojson }}
{% endfor %}Call one with <tool_call>{"name": NAME, "arguments": {...}}</tool_call><|end|>
{%- endif -%}
{%- for message in messages -%}
{%- if not (tools and first and loop.first) -%}
<|{{ message.role }}|>
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif -%}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{%- set called = call.function if call.function is defined else call -%}
<tool_call>{"name": {{ called.name | tojson }}, "arguments": {{ called.arguments if called.arguments is string else called.arguments | tojson }}}</tool_call>
{%- endfor -%}
<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}
"""


def build_tiny(folder: str | Path, texts: Iterable[str], tiny: TinyConfig, max_len: int, seed: int) -> None:
    """Write an ordinary Hugging Face folder: config, float32 weights, tokenizer, chat template. The same arguments give the same files.

    The tokenizer is trained on `texts`; it has at most `tiny.vocab` tokens. `max_len` is the longest sequence in
    tokens.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = train_tokenizer(texts, tiny.vocab, max_len)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=tiny.hidden,
        intermediate_size=tiny.intermediate,
        num_hidden_layers=tiny.layers,
        num_attention_heads=tiny.heads,
        num_key_value_heads=tiny.heads,
        head_dim=tiny.hidden // tiny.heads,
        max_position_embeddings=max_len,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).to(torch.float32)
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def train_tokenizer(texts: Iterable[str], vocab: int, max_len: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the compact chat template. Every byte is a token, so any text round-trips."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(TAGS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[token for token in SPECIAL_TOKENS if token not in (PAD, END)],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=max_len,
    )


def texts_of_env(env_id: str, kwargs: Mapping[str, Any] | None = None, n: int = 64, seed: int = 0) -> list[str]:
    """The texts of n episodes of an environment, to train a tokenizer on: each message's content, in order.

    The expert plays, with `MISTAKES`; without an expert it is the opening messages of n tasks. Of an environment whose steps may take
    minutes (`step_seconds`), `SLOW_EPISODES` at most.
    """
    return asyncio.run(_texts(env_id, dict(kwargs or {}), n, random.Random(seed)))


async def _texts(env_id: str, kwargs: dict[str, Any], n: int, rng: random.Random) -> list[str]:
    texts: list[str] = []
    env = make(env_id, **kwargs)
    try:
        tasks = replace(spec(env_id), kwargs={**spec(env_id).kwargs, **kwargs}).tasks("train")
        slow = env.get_wrapper_attr("step_seconds") is not None
        for _ in range(min(n, SLOW_EPISODES) if slow else n):
            texts += await _episode_texts(env, tasks[rng.randrange(len(tasks))], rng)
    finally:
        await close_env(env)
    return texts


async def _episode_texts(env: Env, task: Task, rng: random.Random) -> list[str]:
    """Of an episode that fails, the texts before: the run tells of failures when it plays."""
    if not env.has_wrapper_attr("expert_action"):
        return [text_of(message) for message in task.messages]
    expert = ExpertPolicy(MISTAKES if env.has_wrapper_attr("random_action") else 0.0, rng)
    seed = rng.randrange(2**31)
    played = await run_episode(env, expert, task, seed=seed, limits=Limits(max_turns=LONG_EPISODE))
    said = [message for turn in played.turns for message in (*turn.observation, turn.reply)]
    return [text_of(message) for message in (*said, *played.final_observation)]
