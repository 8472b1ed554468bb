"""Validation of the settings of the modes sft, dpo and rm. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from agent_train.config.schema import Config
from agent_train.trainer.offline.records import DataError, form_of, read_examples

MODES = {
    "sft": "imitates the assistant's messages",
    "dpo": "prefers answers to others",
    "rm": "learns a reward model",
}


def wrong_files(config: Config) -> Iterator[str]:
    """Problems of a mode's data settings. The files are read whole."""
    data = config.data
    if config.mode != "dpo" and config.reference.path:
        yield f"reference.path={config.reference.path}: mode={config.mode} has no reference: leave it out"
    elif config.reference.path and not (Path(config.reference.path).expanduser() / "config.json").is_file():
        yield f"reference.path={config.reference.path}: no model folder there: it has no config.json"
    if config.sft.episodes:
        yield f"sft.episodes={config.sft.episodes}: is the warm start of mode=rl: leave it out"
    if config.trainer.record:
        yield f"trainer.record={config.trainer.record}: a record is of held-out episodes, and mode={config.mode} plays none: leave it out"
    if data.max_tokens is not None and data.max_tokens < 2:
        yield f"data.max_tokens={data.max_tokens}: must be at least 2: a token to read and one to learn"
    if data.train is None:
        yield f"data.train: is missing: mode={config.mode} {MODES[config.mode]} of a file: set data.train=FILE.jsonl"
        return
    if data.test is not None and Path(data.test).expanduser().resolve() == Path(data.train).expanduser().resolve():
        yield f"data.test={data.test}: is data.train too: what is held out needs a file of its own"
    for name, path in (("data.train", data.train), ("data.test", data.test)):
        try:
            if path is not None:
                read_examples(path, form_of(config), data.min_reward)
        except DataError as error:
            yield f"{name}: {error}"


def wrong_without_files(config: Config) -> Iterator[str]:
    """Settings of the other modes in mode=rl."""
    for name in ("train", "test"):
        if getattr(config.data, name) is not None:
            yield f"data.{name}={getattr(config.data, name)}: belongs to mode=sft, dpo or rm: mode=rl learns from episodes: set the mode, or leave it out"


def longest_row(config: Config) -> int | None:
    """Most tokens of a row: what `data.max_tokens` says, and no more than the model reads. None: any number."""
    bounds = [config.data.max_tokens, _model_reads(config)]
    return min((bound for bound in bounds if bound is not None), default=None)


def _model_reads(config: Config) -> int | None:
    if config.model.path is None:
        return config.engine.max_model_len  # a tiny model is built for so many
    try:
        found = json.loads((Path(config.model.path).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    text = found.get("text_config", found) if isinstance(found, dict) else {}
    longest = text.get("max_position_embeddings")
    return longest if isinstance(longest, int) else None
