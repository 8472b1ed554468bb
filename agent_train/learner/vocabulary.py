"""True if two models mean the same by a token id. Rows hold ids, so what reads the policy's has to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


class VocabularyError(ValueError):
    """A model beside the policy that means something else by an id. Says which model, and the first id."""


def check_folder(folder: str | Path, policy_dir: str | Path, name: str) -> None:
    """Refuse a model folder whose tokenizer does not give every token of the policy's the same id. It may know more tokens.

    Args:
        folder: of the model.
        policy_dir: the policy's folder.
        name: the setting that names the folder, for the error.

    Raises:
        VocabularyError: it differs, or has no tokenizer.
    """
    folder = Path(folder)
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise VocabularyError(
            f"{name}={folder}: has no tokenizer, so that nobody can tell whether it means the same by an id as the policy: copy"
            " the policy's there if it does"
        )
    there, here = vocabulary(folder), vocabulary(policy_dir)
    for token, number in sorted(here.items(), key=lambda item: item[1]):
        if there.get(token) != number:
            raise VocabularyError(
                f"{name}={folder}: another vocabulary than the policy's: token {token!r} is {number} for the policy and"
                f" {there.get(token, 'unknown')} there: take a model with the policy's tokenizer"
            )


def vocabulary(folder: str | Path) -> Mapping[str, int]:
    """The id of every token, those that were added too."""
    found: Mapping[str, int] = tokenizer_of(folder).get_vocab()
    return found


def tokenizer_of(folder: str | Path) -> Any:
    """The tokenizer of a model folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))
