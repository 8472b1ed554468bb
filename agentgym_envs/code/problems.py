"""Programming problems: what a submission is put to, and how tasks hold it."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from agentgym.core.tasks import Task, TaskSet
from agentgym_envs.own_tasks import own_tasks
from agentgym_envs.syntax import expression, program

OWN_SOURCE = "the project's own programming tasks"


@dataclass(frozen=True)
class Problem:
    """A programming problem. A task holds one as its answer: a JSON object with these fields, `names` and `tests` at least.

    Attributes:
        names: the functions, classes and values that the tests take from the submission.
        tests: Python statements that put a submission to the test after it was submitted; usually one `assert` each.
        public: likewise, run whenever the agent asks; the agent sees them.
        prompt: code that the submission follows: imports, helpers, the head of a function. "" where there is none.
        setup: code that runs once before the tests: imports, helpers, values.
        solution: code that passes all tests. "" where none is known.
    """

    names: tuple[str, ...]
    tests: tuple[str, ...]
    public: tuple[str, ...] = ()
    prompt: str = ""
    setup: str = ""
    solution: str = ""

    def to_json(self) -> dict[str, Any]:
        """The problem as a task's answer, without the fields that are empty."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items() if v}


def problem_of(task: Task) -> Problem:
    """The problem that a task poses.

    Raises:
        ValueError: it has no messages, or its answer is no problem.
    """
    if not task.messages:
        raise ValueError(f"task {task.id!r} has no messages: the problem's text is missing")
    answer = task.answer
    fields = {"names", "tests", "public", "prompt", "setup", "solution"}
    if not isinstance(answer, dict) or not {"names", "tests"} <= set(answer) <= fields:
        raise ValueError(
            f"task {task.id!r}: the answer must be an object with names, tests and, if wanted, public, prompt, setup and"
            f" solution, not {answer!r:.100}"
        )
    for name, value in answer.items():
        texts = value if name in ("names", "tests", "public") else [value]
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"task {task.id!r}: {name} must be text, or a list of texts, not {value!r:.100}")
        for text in texts:
            _check_python(text, name, task.id)
    if not answer["names"] or not answer["tests"]:
        raise ValueError(f"task {task.id!r} has no {'names' if answer['tests'] else 'tests'}")
    given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in answer.items()}
    return Problem(**given)


def _check_python(text: str, field: str, task_id: str) -> None:
    try:
        program(text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"task {task_id!r}: {field} is not Python: {error}") from error


def names_between(solution: str, tests: Iterable[str]) -> tuple[str, ...]:
    """What tests take from a submission: the names of a solution's top level that they use, functions that they call first.

    Raises:
        ValueError: there is none.
    """
    defined: list[str] = []
    for node in program(solution).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            defined += [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    used = _used(tests)
    found = tuple(name for name in dict.fromkeys(reversed(defined)) if name in used)
    if not found:
        raise ValueError(f"the tests use nothing that the solution defines ({', '.join(defined) or 'nothing at all'})")
    return found


def imports_for(solution: str, tests: Iterable[str]) -> str:
    """The import statements of a solution whose names the tests use too."""
    used = _used(tests)
    lines = [
        ast.unparse(node)
        for node in program(solution).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any((alias.asname or alias.name).partition(".")[0] in used for alias in node.names)
    ]
    return "".join(f"{line}\n" for line in lines)


def _used(tests: Iterable[str]) -> set[str]:
    return {node.id for test in tests for node in ast.walk(program(test)) if isinstance(node, ast.Name)}


def doctests(prompt: str, name: str) -> tuple[str, ...]:
    """The examples of a function's docstring as assertions: `>>> f(1)` with a line `2` after it is `assert f(1) == 2`.

    Examples of another form are left out.
    """
    for node in program(prompt).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            lines = [line.strip() for line in (ast.get_docstring(node) or "").splitlines()]
            pairs = itertools.pairwise(lines)
            found = [_example(line[4:], result) for line, result in pairs if line.startswith(">>> ")]
            return tuple(test for test in found if test)
    return ()


def _example(call: str, result: str) -> str:
    try:
        expression(call)
        ast.literal_eval(expression(result))
    except (SyntaxError, ValueError):
        return ""
    return f"assert {call} == {result}"


def check_data(data: str) -> None:
    """Refuse a kind of data that there is not.

    Raises:
        ValueError: it is neither "auto" nor "own".
    """
    if data not in ("auto", "own"):
        raise ValueError(f'data must be "auto" or "own", not {data!r}')


def own_problems(env_id: str, split: str, make: Callable[[dict[str, Any], str], Task]) -> TaskSet:
    """The tasks that the package ships, 28 to train on and 12 to test with.

    Args:
        env_id: the environment.
        split: "train" or "test".
        make: makes a task of an id and a record with `name`, `head`, `text`, `public`, `tests`, `solution` and `split`.

    Raises:
        ValueError: they have no such split.
    """
    return own_tasks("agentgym_envs.code", "tasks.jsonl", split, make, name=env_id, source=OWN_SOURCE)
