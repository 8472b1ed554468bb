"""Scores an answer: exact match and word F1, with SQuAD's normalisation."""

import re
import string
from collections import Counter
from collections.abc import Sequence

_VERDICTS = frozenset(("yes", "no", "noanswer"))  # answers without partial credit
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(answer: str) -> str:
    """Lower case, without ASCII punctuation, the articles a, an, the, and extra spaces."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(answer: str, golds: Sequence[str]) -> float:
    return float(normalised(answer) in map(normalised, golds))


def f1(answer: str, golds: Sequence[str]) -> float:
    """The best word F1 of the answer with a gold answer, 0.0 to 1.0; 0.0 without gold answers.

    If the answer or a gold answer is yes or no, the score is 0 or 1, as in HotpotQA.
    """
    return max((_f1(normalised(answer), normalised(gold)) for gold in golds), default=0.0)


def _f1(answer: str, golden: str) -> float:
    """2 * precision * recall / (precision + recall) of two bags of words; two empty bags are equal."""
    words, gold = answer.split(), golden.split()
    if not words or not gold or not _VERDICTS.isdisjoint((answer, golden)):
        return float(words == gold)
    shared = (Counter(words) & Counter(gold)).total()
    return 2 * shared / (len(words) + len(gold))
