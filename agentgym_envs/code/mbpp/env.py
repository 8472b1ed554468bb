"""MBPP: write a short function from a request and a first test."""

from __future__ import annotations

from typing import Any

from agentgym import datasets
from agentgym.core.messages import user
from agentgym.core.tasks import Task, TaskSet
from agentgym_envs.code.env import CodeEnv
from agentgym_envs.code.problems import Problem, check_data, imports_for, names_between, own_problems
from agentgym_envs.splits import check_split

HUB = datasets.HubData("google-research-datasets/mbpp", "full")
FILE = "mbpp/mbpp.jsonl"
SPLITS = {"prompt": range(1, 11), "test": range(11, 511), "validation": range(511, 601), "train": range(601, 975)}


class CodeMBPP(CodeEnv):
    """MBPP over several turns, with one public test and hidden tests at the end.

    Settings, replies and rewards are those of `CodeEnv`.
    """

    @classmethod
    def default_tasks(cls, split: str = "train", data: str = "auto") -> TaskSet:
        """MBPP's "train" (374), "validation" (90), "test" (500) or "prompt" (10); the shipped tasks without it."""
        return load_mbpp(split, data)


def load_mbpp(split: str = "train", data: str = "auto") -> TaskSet:
    """The tasks of a split, from `AGENTGYM_DATA`, Hugging Face or the package; `source` says which."""
    check_data(data)
    check_split("code_mbpp", split, SPLITS)
    if data == "own":
        return own_mbpp(split)
    found = datasets.load(
        FILE, split, name=f"code_mbpp/{split}", parse=mbpp_task, shipped=lambda: own_mbpp(split), hub=HUB
    )
    # The file holds all splits.
    return TaskSet([t for t in found if t.metadata["split"] == split], name=found.name, source=found.source)


def mbpp_task(record: dict[str, Any], place: int) -> Task:
    number = int(record["task_id"])
    split = next((name for name, numbers in SPLITS.items() if number in numbers), None)
    if split is None:
        raise ValueError(f"MBPP has no task {number}")
    code, setup = _lines(record["code"]), _lines(record["test_setup_code"])
    tests = tuple(_lines(test) for test in record["test_list"])
    problem = Problem(
        names=names_between(code, (*tests, setup)),
        tests=tests,
        public=tests[:1],
        setup=imports_for(code, (*tests, setup)) + setup,
        solution=code,
    )
    return _task(f"mbpp-{number}", record["text"].strip(), problem, split)


def own_mbpp(split: str) -> TaskSet:
    return own_problems("code_mbpp", split, _own_task)


def _own_task(record: dict[str, Any], id: str) -> Task:
    public = tuple(record["public"])
    problem = Problem(
        names=(record["name"],), tests=(*public, *record["tests"]), public=public, solution=record["solution"]
    )
    return _task(id, record["text"], problem, record["split"])


def _task(id: str, text: str, problem: Problem, split: str) -> Task:
    examples = "\n".join(problem.public)
    before = f", which runs after\n\n{problem.setup.strip()}" if problem.setup.strip() else ""
    asked = f"{text}\n\nYour code must pass this test{before}:\n\n{examples}"
    return Task(id, (user(asked),), problem.to_json(), metadata={"split": split})


def _lines(text: str) -> str:
    return text.replace("\r\n", "\n")
