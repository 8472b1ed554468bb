"""Compares vocabularies: samples hold the policy's token ids, so every model that reads them must mean the same by an id."""

from pathlib import Path
from typing import Any

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


class VocabularyError(ValueError):
    """A model beside the policy that means something else by an id. Says which model, and the first id."""


def check_folder(folder: str | Path, policy_dir: str | Path, name: str) -> None:
    """Raise VocabularyError unless a model's tokenizer gives every token of the policy's the same id. It may know more tokens.

    `name` is the setting that names the folder, for the error.
    """
    folder = Path(folder)
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise VocabularyError(
            f"{name}={folder}: has no tokenizer to compare with the policy's: copy the policy's there if the vocabularies are the same"
        )
    there, here = tokenizer_of(folder).get_vocab(), tokenizer_of(policy_dir).get_vocab()
    for token, number in sorted(here.items(), key=lambda item: item[1]):
        if there.get(token) != number:
            raise VocabularyError(
                f"{name}={folder}: another vocabulary than the policy's: token {token!r} is {number} for the policy and"
                f" {there.get(token, 'unknown')} there: take a model with the policy's tokenizer"
            )


def tokenizer_of(folder: str | Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))
