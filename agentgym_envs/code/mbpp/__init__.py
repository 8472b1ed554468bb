"""MBPP: write a short function from a request and a first test. See README.md beside this file."""

from typing import Any

from agentgym import datasets
from agentgym.core.messages import user
from agentgym.core.tasks import Task, TaskSet
from agentgym_envs.code.env import CodeEnv
from agentgym_envs.code.problems import Problem, imports_for, names_between, own_problems
from agentgym_envs.data_sets import MBPP, MBPP_HUB
from agentgym_envs.settings import check_choice
from agentgym_envs.splits import check_split

SPLITS = {"prompt": range(1, 11), "test": range(11, 511), "validation": range(511, 601), "train": range(601, 975)}


class CodeMBPP(CodeEnv):
    """MBPP over several turns, with one public test and hidden tests at the end; see `CodeEnv`."""

    @classmethod
    def default_tasks(cls, split: str = "train", data: str = "auto") -> TaskSet:
        """MBPP's "train" (374), "validation" (90), "test" (500) or "prompt" (10); the shipped tasks without it."""
        check_choice("data", data, cls.DATA)
        check_split("code_mbpp", split, SPLITS)

        def shipped() -> TaskSet:
            return own_problems("code_mbpp", split, _own_task)

        if data == "own":
            return shipped()
        found = datasets.load(MBPP, split, name=f"code_mbpp/{split}", parse=_mbpp_task, shipped=shipped, hub=MBPP_HUB)
        # The file holds all splits.
        return TaskSet([t for t in found if t.metadata["split"] == split], name=found.name, source=found.source)


def _mbpp_task(record: dict[str, Any], place: int) -> Task:
    number = int(record["task_id"])
    split = next((name for name, numbers in SPLITS.items() if number in numbers), None)
    if split is None:
        raise ValueError(f"MBPP has no task {number}")
    code, setup, *tests = (
        text.replace("\r\n", "\n") for text in (record["code"], record["test_setup_code"], *record["test_list"])
    )
    problem = Problem(
        names=names_between(code, (*tests, setup)),
        tests=tuple(tests),
        public=tuple(tests[:1]),
        setup=imports_for(code, (*tests, setup)) + setup,
        solution=code,
    )
    return _task(f"mbpp-{number}", record["text"].strip(), problem, split)


def _own_task(record: dict[str, Any], id: str) -> Task:
    public = tuple(record["public"])
    problem = Problem((record["name"],), (*public, *record["tests"]), public, solution=record["solution"])
    return _task(id, record["text"], problem, record["split"])


def _task(id: str, text: str, problem: Problem, split: str) -> Task:
    examples = "\n".join(problem.public)
    before = f", which runs after\n\n{problem.setup.strip()}" if problem.setup.strip() else ""
    asked = f"{text}\n\nYour code must pass this test{before}:\n\n{examples}"
    return Task(id, (user(asked),), problem.to_json(), metadata={"split": split})
