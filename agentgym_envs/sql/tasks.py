"""Questions as tasks: defog's if available, and the shipped ones over the shipped databases and Chinook."""

import csv
from pathlib import Path

from agentgym import datasets
from agentgym.core.messages import user
from agentgym.core.tasks import Task, TaskSet
from agentgym_envs.data_sets import CHINOOK, DEFOG, DEFOG_QUESTIONS
from agentgym_envs.settings import check_choice
from agentgym_envs.splits import check_split, own_records

SOURCES = ("auto", "defog", "own", "chinook")
DEFOG_TEST = ("restaurants", "scholar")  # databases that no training question is about
# Rows of the file, from 0, whose gold queries use a missing table ...
WITHOUT_TABLE = {137, 149, 154}
# ... or find only NULL, so any query that finds nothing would be right.
FINDS_NOTHING = {168, 170, 171, 174, 177, 179, 180, 184, 186, 187}
# Words that ask for an order of rows. Gold queries often sort although the question does not ask for it.
ORDER_WORDS = ("order", "ordered", "sort", "sorted", "alphabetically", "ascending", "descending", "starting")


def load_questions(split: str = "train", data: str = "auto") -> TaskSet:
    """The questions of a split; "auto" is defog if its files are found, else own with a notice.

    A task has the question as its message, gold queries as its answer (a list, any is right), and in its metadata
    `database` and `ordered`, true if the order of rows counts.
    """
    check_split("sql", split)
    check_choice("sql: data", data, SOURCES)
    if data == "chinook":
        datasets.require(data, CHINOOK)
        return _written(split, ("chinook",))
    if data == "defog" or (data == "auto" and datasets.locate(DEFOG_QUESTIONS) is not None):
        return _defog(datasets.require("defog", DEFOG_QUESTIONS), split)
    tasks = _written(split, ("library", "railway"))
    if data == "auto":
        where = f"set {datasets.FOLDER_VARIABLE} to a folder with {DEFOG_QUESTIONS}"
        datasets.tell_shipped(tasks, f"For defog's questions {where}.")
    return tasks


def _written(split: str, databases: tuple[str, ...]) -> TaskSet:
    tasks = []
    for place, record in enumerate(own_records("agentgym_envs.sql", "questions.jsonl")):
        if record["split"] == split and record["database"] in databases:
            name = record["database"]
            about = {"split": split, "database": name, "ordered": record.get("ordered", False), "tags": [name]}
            tasks.append(Task(f"{name}-{split}-{place}", (user(record["question"]),), record["gold"], metadata=about))
    return TaskSet(tasks, name=f"sql/{split}", source=f"the project's own questions over {' and '.join(databases)}")


def _defog(path: Path, split: str) -> TaskSet:
    """defog's questions over the available databases.

    A row of the file may have several queries, separated by semicolons: alternative choices of columns.
    """
    with path.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    tasks = []
    for place, row in enumerate(rows):
        name, question = row["db_name"], row["question"].strip()
        if ("test" if name in DEFOG_TEST else "train") != split or place in WITHOUT_TABLE | FINDS_NOTHING:
            continue
        if datasets.locate(DEFOG.format(name)) is None:
            continue
        if row["instructions"]:
            question = f"{question}\n\n{row['instructions'].strip()}"
        words = row["question"].lower().replace(",", " ").replace(".", " ").split()
        about = {
            "split": split,
            "database": f"defog/{name}",
            "category": row["query_category"],
            "tags": [row["query_category"]],
            "ordered": any(word in ORDER_WORDS for word in words),
        }
        golds = [query.strip() for query in row["query"].split(";") if query.strip()]
        tasks.append(Task(f"defog-{place}", (user(question),), golds, metadata=about))
    return TaskSet(tasks, name=f"sql/{split}", source=str(path))
