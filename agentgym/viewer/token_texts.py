"""Texts of token ids, by the tokenizer that a training run saved."""

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from agentgym.viewer.run import Run, is_inside, text_in

_lock = threading.Lock()


def token_texts(run: Run, episode: Mapping[str, Any]) -> dict[str, str] | None:
    """The text of each token id of an episode; None without ids, a saved tokenizer, or the package `tokenizers`."""
    ids = sorted(set(_ids(episode)))
    decode = token_decoder(run.path) if ids and run.kind == "training" else None
    if decode is None:
        return None
    return {str(id): text for id in ids if (text := decode(id)) is not None}


def token_decoder(run: Path) -> Callable[[int], str | None] | None:
    """The function from a token id to its text; None without a saved tokenizer or the package `tokenizers`.

    An id that is only a part of a character is written by its bytes: `<E2 82>`. An id outside the vocabulary gives None.

    Args:
        run: the folder of a training run, resolved: the tokenizer is that of its latest checkpoint, or of its first model.
    """
    path = _tokenizer_file(run)
    if path is None:
        return None
    with _lock:
        tokenizer = _tokenizer(path, path.stat().st_mtime_ns)
    if tokenizer is None:
        return None
    return lambda id: _text(tokenizer, id)


def _ids(episode: Mapping[str, Any]) -> Iterator[int]:
    for turn in episode["turns"]:
        tokens = turn.get("tokens") if isinstance(turn, dict) else None
        if isinstance(tokens, dict):
            for name in ("new_prompt_ids", "completion_ids"):
                yield from (id for id in tokens.get(name) or () if isinstance(id, int))


def _tokenizer_file(run: Path) -> Path | None:
    latest = text_in(run, "checkpoints/latest").strip()
    folders = [run / "checkpoints" / latest] if latest and "\0" not in latest else []
    for folder in [*folders, run / "model"]:
        path = folder / "tokenizer.json"
        if is_inside(path, run) and path.is_file():
            return path
    return None


@lru_cache(maxsize=4)
def _tokenizer(path: Path, written: int) -> Any:
    """The tokenizer in a file; `written` makes a new file a new one. None if it cannot be made."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # the package raises nothing narrower
        return None


def _text(tokenizer: Any, id: int) -> str | None:
    piece = tokenizer.id_to_token(id) if 0 <= id < 2**32 else None
    if piece is None:
        return None
    text = tokenizer.decode([id], skip_special_tokens=False)
    if "\ufffd" not in text:
        return text
    letters = _byte_letters()
    if piece and all(letter in letters for letter in piece):
        return "<" + " ".join(f"{letters[letter]:02X}" for letter in piece) + ">"
    return text


@lru_cache(maxsize=1)
def _byte_letters() -> dict[str, int]:
    """The letters by which byte-level tokenizers write bytes: itself where it can be printed, else one from U+0100 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
