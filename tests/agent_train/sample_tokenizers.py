"""The tokenizers that the tests of rendering are held against: two real ones, the tiny one, and one with many encodings."""

from __future__ import annotations

import functools
from pathlib import Path

import mistral_common
from transformers import PreTrainedTokenizerFast

from agent_train.learner.tiny import train_tokenizer
from agent_train.rollout.renderer import Renderer

LAKE = ["P you, G goal, O hole, _ ice. Reach G.\nP _ _ O\n_ O _ _\n_ _ O G", "right", "left", "up", "down", "You fell."]
MISTRAL = Path(mistral_common.__file__).parent / "data"

# What Qwen3's does, in short: thoughts of earlier turns are left out, the last answer keeps its own.
FORGETFUL = """\
{%- for message in messages -%}
<|{{ message.role }}|>
{%- set content = message.content -%}
{%- if message.role == 'assistant' and message.reasoning_content and loop.last -%}
<think>{{ message.reasoning_content }}</think>
{%- elif message.role == 'assistant' and not loop.last -%}
{%- set content = content.split('</think>')[-1] -%}
{%- endif -%}
{{ content }}<|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}
"""

INST = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' %} {{ message.content }}</s>{% else %}[INST] {{ message.content }}[/INST]{% endif -%}
{%- endfor -%}
"""


@functools.cache
def tiny() -> PreTrainedTokenizerFast:
    return train_tokenizer(LAKE * 4, 400, 1024)


@functools.cache
def many_encodings() -> PreTrainedTokenizerFast:
    """Its vocabulary has a, aa, aaa, ...: a text of them has many encodings, and `encode` gives one."""
    return train_tokenizer(["a" * n for n in (2, 3, 4, 8)] * 8, 300, 1024)


@functools.cache
def tekken() -> PreTrainedTokenizerFast:
    """Mistral NeMo's: byte-level, 131,072 tokens, its own chat template."""
    from transformers.integrations.mistral import convert_tekken_tokenizer

    return convert_tekken_tokenizer(str(MISTRAL / "tekken_240718.json"))


@functools.cache
def sentencepiece() -> PreTrainedTokenizerFast:
    """Mistral 7B v3's: sentencepiece, whose decoder drops the space at the start of a text. 32,768 tokens."""
    import shutil
    import tempfile

    from transformers import LlamaTokenizer

    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(MISTRAL / "mistral_instruct_tokenizer_240323.model.v3", Path(folder) / "tokenizer.model")
        tokenizer = LlamaTokenizer.from_pretrained(folder)
    tokenizer.chat_template = INST
    return tokenizer


@functools.cache
def forgetful() -> PreTrainedTokenizerFast:
    tokenizer = train_tokenizer(LAKE * 4, 400, 1024)
    tokenizer.chat_template = FORGETFUL
    return tokenizer


TOKENIZERS = {"tiny": tiny, "many_encodings": many_encodings, "tekken": tekken, "sentencepiece": sentencepiece}


@functools.cache
def renderer(name: str) -> Renderer:
    return Renderer({**TOKENIZERS, "forgetful": forgetful}[name]())


@functools.cache
def ordinary_ids(name: str) -> range:
    """Ids of the vocabulary's long middle, without control tokens (each of these tokenizers has them at its start)."""
    tokenizer = renderer(name).tokenizer
    first = max(i for i in (*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder) if i < len(tokenizer) // 2) + 1
    return range(first, len(tokenizer))
