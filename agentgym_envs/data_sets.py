"""The data sets that these environments use, and how their files are made from Hugging Face rows."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from typing import Any

from agentgym.datasets import HubData
from agentgym.datasets.catalogue import DataSet, Rows
from agentgym.storage.jsonl import line_of

HUMANEVAL, MBPP, SVAMP = "humaneval/HumanEval.jsonl.gz", "mbpp/mbpp.jsonl", "svamp/svamp.jsonl"
XQUAD, HOTPOT = "xquad/xquad.en.json", "hotpot_qa/validation.jsonl"
DEFOG = ("restaurants", "scholar", "academic", "advising", "atis", "geography", "yelp")


def data_sets() -> list[DataSet]:
    return [*_math(), *_code(), *_search(), *_by_hand()]


def _math() -> list[DataSet]:
    gsm8k, svamp = HubData("openai/gsm8k", "main"), HubData("ChilleD/SVAMP")
    return [
        DataSet(
            "gsm8k",
            "7,473 train, 1,319 test",
            "MIT",
            "https://github.com/openai/grade-school-math",
            ("gsm8k/train.jsonl", "gsm8k/test.jsonl"),
            ("gsm8k", "gsm8k_tool", "gsm8k_python"),
            ((gsm8k, "train"), (gsm8k, "test")),
            _one_file_each("gsm8k/train.jsonl", "gsm8k/test.jsonl", keys=("question", "answer")),
        ),
        DataSet(
            "svamp",
            "1,000",
            "MIT",
            "https://github.com/arkilpatel/SVAMP",
            (SVAMP,),
            ("gsm8k_python",),
            ((svamp, "train"), (svamp, "test")),
            lambda parts: {SVAMP: _lines([r for rows in parts for r in rows], "ID Body Question Equation Answer Type")},
        ),
        DataSet(
            "math",
            "7,500 train, 500 test",
            "MIT",
            "https://github.com/hendrycks/math",
            ("math/train.jsonl", "math/test.jsonl"),
            ("math_python",),
            ((HubData("DigitalLearningGmbH/MATH-lighteval"), "train"), (HubData("HuggingFaceH4/MATH-500"), "test")),
            _one_file_each("math/train.jsonl", "math/test.jsonl", keys=("problem", "solution")),
        ),
    ]


def _code() -> list[DataSet]:
    mbpp = HubData("google-research-datasets/mbpp", "full")
    return [
        DataSet(
            "humaneval",
            "164",
            "MIT",
            "https://github.com/openai/human-eval",
            (HUMANEVAL,),
            ("code_humaneval",),
            ((HubData("openai/openai_humaneval", "openai_humaneval"), "test"),),
            # mtime=0: the same rows give the same bytes.
            lambda parts: {
                HUMANEVAL: gzip.compress(
                    _lines(parts[0], "task_id prompt entry_point canonical_solution test"), mtime=0
                )
            },
        ),
        DataSet(
            "mbpp",
            "974",
            "CC BY 4.0",
            "https://github.com/google-research/google-research/tree/master/mbpp",
            (MBPP,),
            ("code_mbpp",),
            tuple((mbpp, split) for split in ("prompt", "test", "validation", "train")),
            lambda parts: {
                MBPP: _lines(
                    sorted((r for rows in parts for r in rows), key=lambda r: int(r["task_id"])),
                    "text code task_id test_setup_code test_list challenge_test_list",
                )
            },
        ),
    ]


def _search() -> list[DataSet]:
    return [
        DataSet(
            "xquad",
            "240 paragraphs, 1,190 questions",
            "CC BY-SA 4.0",
            "https://github.com/google-deepmind/xquad",
            (XQUAD,),
            ("search",),
            # XQuAD's rows on the hub have no titles: SQuAD's, of which they are a part, have them under the same ids.
            (
                (HubData("google/xquad", "xquad.en"), "validation"),
                (HubData("rajpurkar/squad", "plain_text"), "validation"),
            ),
            lambda parts: {XQUAD: _xquad(*parts)},
        ),
        DataSet(
            "hotpot_qa",
            "7,405 questions, 10 paragraphs each",
            "CC BY-SA 4.0",
            "https://hotpotqa.github.io",
            (HOTPOT,),
            ("search",),
            ((HubData("hotpotqa/hotpot_qa", "distractor"), "validation"),),
            _one_file_each(HOTPOT, keys=("id", "question", "answer", "supporting_facts", "context")),
        ),
    ]


def _by_hand() -> list[DataSet]:
    """Data sets that Hugging Face does not offer in the form the environments read."""
    databases = tuple(f"text2sql/defog/db/{name}.sqlite" for name in DEFOG)
    return [
        DataSet(
            "defog",
            "210 questions, 7 databases",
            "Apache-2.0",
            "https://github.com/defog-ai/sql-eval and https://github.com/defog-ai/defog-data",
            ("text2sql/defog/questions_gen_sqlite.csv", *databases),
            ("sql",),
        ),
        DataSet(
            "chinook",
            "1 database",
            "MIT",
            "https://github.com/lerocha/chinook-database",
            ("text2sql/chinook/Chinook_Sqlite.sqlite",),
            ("sql",),
        ),
        DataSet(
            "wordle",
            "14,855 words",
            "MIT",
            "https://github.com/tabatkins/wordle-list",
            ("wordle/words",),
            ("wordle",),
        ),
    ]


def _one_file_each(*paths: str, keys: Sequence[str]) -> Callable[[Sequence[Rows]], dict[str, bytes]]:
    """Write each part to one file, as whole rows that have at least these keys."""

    def write(parts: Sequence[Rows]) -> dict[str, bytes]:
        for rows in parts:
            if not rows:
                raise ValueError("no rows")
            _ = [row[key] for row in rows for key in keys]
        return {path: "".join(map(line_of, rows)).encode() for path, rows in zip(paths, parts, strict=True)}

    return write


def _lines(rows: Rows, keys: str) -> bytes:
    """Rows as JSON Lines, reduced to these keys."""
    if not rows:
        raise ValueError("no rows")
    return "".join(line_of({key: row[key] for key in keys.split()}) for row in rows).encode()


def _xquad(questions: Rows, squad: Rows) -> bytes:
    """XQuAD in its official form: articles, paragraphs and questions in the order of the rows."""
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
    return json.dumps({"data": data, "version": "1.1"}, ensure_ascii=False).encode()
