"""The data sets that these environments use, and how their files are made from Hugging Face rows."""

import gzip
import json
from collections.abc import Callable, Sequence
from typing import Any

from agentgym.datasets import DataSet, HubData, Rows
from agentgym.storage.jsonl import line_of

HUMANEVAL, MBPP, SVAMP = "humaneval/HumanEval.jsonl.gz", "mbpp/mbpp.jsonl", "svamp/svamp.jsonl"
XQUAD, HOTPOT = "xquad/xquad.en.json", "hotpot_qa/validation.jsonl"
DEFOG, DEFOG_QUESTIONS = "text2sql/defog/db/{}.sqlite", "text2sql/defog/questions_gen_sqlite.csv"
CHINOOK = "text2sql/chinook/Chinook_Sqlite.sqlite"
WORDLE = "wordle/words"
GSM8K_HUB = HubData("openai/gsm8k", "main")
HUMANEVAL_HUB = HubData("openai/openai_humaneval", "openai_humaneval")
MBPP_HUB = HubData("google-research-datasets/mbpp", "full")
MATH_PARTS = {  # MATH-500 is a part of MATH's own test set, so the two share no problem.
    "train": (HubData("DigitalLearningGmbH/MATH-lighteval"), "train"),
    "test": (HubData("HuggingFaceH4/MATH-500"), "test"),
}
_SVAMP_HUB = HubData("ChilleD/SVAMP")


def _lines(rows: Rows, keys: str, *, whole: bool = False) -> bytes:
    """Rows that have at least these keys: whole, or these keys alone."""
    if not rows:
        raise ValueError("no rows")
    kept = [{key: row[key] for key in keys.split()} for row in rows]
    return "".join(map(line_of, rows if whole else kept)).encode()


def _each_whole(*paths: str, keys: str) -> Callable[[Sequence[Rows]], dict[str, bytes]]:
    """Write each part to one file."""
    return lambda parts: {path: _lines(rows, keys, whole=True) for path, rows in zip(paths, parts, strict=True)}


def _svamp(parts: Sequence[Rows]) -> dict[str, bytes]:
    return {SVAMP: _lines([r for rows in parts for r in rows], "ID Body Question Equation Answer Type")}


def _humaneval(parts: Sequence[Rows]) -> dict[str, bytes]:
    content = _lines(parts[0], "task_id prompt entry_point canonical_solution test")
    return {HUMANEVAL: gzip.compress(content, mtime=0)}  # mtime=0: the same rows give the same bytes


def _mbpp(parts: Sequence[Rows]) -> dict[str, bytes]:
    rows = sorted((r for rows in parts for r in rows), key=lambda r: int(r["task_id"]))
    return {MBPP: _lines(rows, "text code task_id test_setup_code test_list challenge_test_list")}


def _xquad(parts: Sequence[Rows]) -> dict[str, bytes]:
    """XQuAD in its official form: articles, paragraphs and questions in the order of the rows."""
    questions, squad = parts
    titles = {row["id"]: row["title"] for row in squad}
    articles: dict[str, dict[str, list[Any]]] = {}
    for row in questions:
        answers = [
            {"answer_start": int(start), "text": text}
            for start, text in zip(row["answers"]["answer_start"], row["answers"]["text"], strict=True)
        ]
        paragraphs = articles.setdefault(titles[row["id"]], {})
        asked = {"answers": answers, "id": row["id"], "question": row["question"]}
        paragraphs.setdefault(row["context"], []).append(asked)
    data = [
        {"title": title, "paragraphs": [{"context": text, "qas": asked} for text, asked in paragraphs.items()]}
        for title, paragraphs in articles.items()
    ]
    return {XQUAD: json.dumps({"data": data, "version": "1.1"}, ensure_ascii=False).encode()}


_ABOUT = {  # items, licence, source
    "gsm8k": ("7,473 train, 1,319 test", "MIT", "https://github.com/openai/grade-school-math"),
    "svamp": ("1,000", "MIT", "https://github.com/arkilpatel/SVAMP"),
    "math": ("7,500 train, 500 test", "MIT", "https://github.com/hendrycks/math"),
    "humaneval": ("164", "MIT", "https://github.com/openai/human-eval"),
    "mbpp": ("974", "CC BY 4.0", "https://github.com/google-research/google-research/tree/master/mbpp"),
    "xquad": ("240 paragraphs, 1,190 questions", "CC BY-SA 4.0", "https://github.com/google-deepmind/xquad"),
    "hotpot_qa": ("7,405 questions, 10 paragraphs each", "CC BY-SA 4.0", "https://hotpotqa.github.io"),
    "defog": (
        "210 questions, 7 databases",
        "Apache-2.0",
        "https://github.com/defog-ai/sql-eval and https://github.com/defog-ai/defog-data",
    ),
    "chinook": ("1 database", "MIT", "https://github.com/lerocha/chinook-database"),
    "wordle": ("14,855 words", "MIT", "https://github.com/tabatkins/wordle-list"),
}


def data_sets() -> list[DataSet]:
    gsm8k, math = ("gsm8k/train.jsonl", "gsm8k/test.jsonl"), ("math/train.jsonl", "math/test.jsonl")
    defog = tuple(map(DEFOG.format, ["restaurants", "scholar", "academic", "advising", "atis", "geography", "yelp"]))
    hotpot = _each_whole(HOTPOT, keys="id question answer supporting_facts context")
    # XQuAD's rows on the hub have no titles: SQuAD's, of which they are a part, have them under the same ids.
    xquad = (HubData("google/xquad", "xquad.en"), HubData("rajpurkar/squad", "plain_text"))

    def made(name: str, files: tuple[str, ...], envs: str, parts: Any = (), write: Any = None) -> DataSet:
        return DataSet(name, *_ABOUT[name], files, tuple(envs.split()), tuple(parts), write)

    def splits(hub: HubData, names: str) -> list[tuple[HubData, str]]:
        return [(hub, name) for name in names.split()]

    write_gsm8k, write_math = _each_whole(*gsm8k, keys="question answer"), _each_whole(*math, keys="problem solution")
    return [
        made("gsm8k", gsm8k, "gsm8k gsm8k_tool gsm8k_python", splits(GSM8K_HUB, "train test"), write_gsm8k),
        made("svamp", (SVAMP,), "gsm8k_python", splits(_SVAMP_HUB, "train test"), _svamp),
        made("math", math, "math_python", MATH_PARTS.values(), write_math),
        made("humaneval", (HUMANEVAL,), "code_humaneval", splits(HUMANEVAL_HUB, "test"), _humaneval),
        made("mbpp", (MBPP,), "code_mbpp", splits(MBPP_HUB, "prompt test validation train"), _mbpp),
        made("xquad", (XQUAD,), "search", ((hub, "validation") for hub in xquad), _xquad),
        made(
            "hotpot_qa", (HOTPOT,), "search", splits(HubData("hotpotqa/hotpot_qa", "distractor"), "validation"), hotpot
        ),
        # Hugging Face does not offer the following in the form that the environments read.
        made("defog", (DEFOG_QUESTIONS, *defog), "sql"),
        made("chinook", (CHINOOK,), "sql"),
        made("wordle", (WORDLE,), "wordle"),
    ]
