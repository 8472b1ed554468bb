"""HumanEval: complete a function from its signature and docstring. See README.md beside this file."""

from typing import Any

from agentgym import datasets
from agentgym.core.messages import user
from agentgym.core.tasks import Task, TaskSet
from agentgym_envs.code.env import CodeEnv
from agentgym_envs.code.problems import Problem, doctests, own_problems
from agentgym_envs.data_sets import HUMANEVAL, HUMANEVAL_HUB
from agentgym_envs.settings import check_choice
from agentgym_envs.splits import check_split


class CodeHumanEval(CodeEnv):
    """HumanEval over several turns, with public tests from the docstring and hidden tests at the end; see `CodeEnv`."""

    @classmethod
    def default_tasks(cls, split: str = "train", data: str = "auto") -> TaskSet:
        """HumanEval's 164 problems as "test", the shipped tasks as "train": HumanEval is for testing only."""
        check_choice("data", data, cls.DATA)
        check_split("code_humaneval", split)

        def shipped() -> TaskSet:
            return own_problems("code_humaneval", split, _own_task)

        if data == "own" or split == "train":
            return shipped()
        name = f"code_humaneval/{split}"
        return datasets.load(HUMANEVAL, split, name=name, parse=_humaneval_task, shipped=shipped, hub=HUMANEVAL_HUB)


def _humaneval_task(record: dict[str, Any], place: int) -> Task:
    prompt, name = record["prompt"], record["entry_point"]
    problem = Problem(
        names=(name,),
        tests=(f"check({name})",),
        public=doctests(prompt, name),
        prompt=prompt,
        # The tests use the prompt's own helpers, not those of the submission.
        setup=f"{prompt}\n\n{record['test']}",
        solution=prompt + record["canonical_solution"],
    )
    return _task(record["task_id"].replace("/", "-").lower(), problem, "test")


def _own_task(record: dict[str, Any], id: str) -> Task:
    public, name = tuple(record["public"]), record["name"]
    examples = [test.removeprefix("assert ").rpartition(" == ") for test in public]
    lines = [record["text"], *(line for call, _, result in examples for line in (f">>> {call}", result))]
    docstring = "\n".join(f"    {line}" for line in lines)
    prompt = f'{record["head"]}\n    """\n{docstring}\n    """\n'
    problem = Problem((name,), (*public, *record["tests"]), public, prompt, solution=record["solution"])
    return _task(id, problem, record["split"])


def _task(id: str, problem: Problem, split: str) -> Task:
    asked = f"Complete this Python function:\n\n```python\n{problem.prompt.strip(chr(10))}\n```"
    return Task(id, (user(asked),), problem.to_json(), metadata={"split": split})
