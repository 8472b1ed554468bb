"""Programming problems: tests for a submission, and their form in a task."""

import ast
import contextlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from agentgym.core.tasks import Task, TaskSet
from agentgym_envs.splits import own_tasks
from agentgym_envs.syntax import expression, program


@dataclass(frozen=True)
class Problem:
    """A programming problem: a task's answer, as a JSON object with these fields, at least `names` and `tests`."""

    names: tuple[str, ...]  # functions, classes and values that the tests use of the submission
    tests: tuple[str, ...]  # Python statements that test a submission; usually one `assert` each
    public: tuple[str, ...] = ()  # tests that the agent sees and can run
    prompt: str = ""  # code that the submission continues: imports, helpers, a function's signature; or ""
    setup: str = ""  # code that runs once before the tests: imports, helpers, values
    solution: str = ""  # code that passes all tests, or ""

    def to_json(self) -> dict[str, Any]:
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items() if v}


def problem_of(task: Task) -> Problem:
    if not task.messages:
        raise ValueError(f"task {task.id!r} has no messages: the problem's text is missing")
    answer = task.answer
    if not isinstance(answer, dict) or not {"names", "tests"} <= set(answer) <= {f.name for f in fields(Problem)}:
        raise ValueError(
            f"task {task.id!r}: the answer must be an object with names, tests and, if wanted, public, prompt, setup and"
            f" solution, not {answer!r:.100}"
        )
    given: dict[str, Any] = {}
    for name, value in answer.items():
        texts = value if name in ("names", "tests", "public") else [value]
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"task {task.id!r}: {name} must be text, or a list of texts, not {value!r:.100}")
        try:
            for text in texts:
                program(text)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"task {task.id!r}: {name} is not Python: {error}") from error
        given[name] = tuple(value) if isinstance(value, list) else value
    if not given["names"] or not given["tests"]:
        raise ValueError(f"task {task.id!r} has no {'names' if given['tests'] else 'tests'}")
    return Problem(**given)


def names_between(solution: str, tests: Iterable[str]) -> tuple[str, ...]:
    """The top-level names of a solution that the tests use, last defined first."""
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
    """The imports of a solution, one a line, whose names the tests use."""
    used = _used(tests)
    imports = (node for node in program(solution).body if isinstance(node, ast.Import | ast.ImportFrom))
    return "".join(
        f"{ast.unparse(node)}\n"
        for node in imports
        if any((alias.asname or alias.name).partition(".")[0] in used for alias in node.names)
    )


def _used(tests: Iterable[str]) -> set[str]:
    return {node.id for test in tests for node in ast.walk(program(test)) if isinstance(node, ast.Name)}


def doctests(prompt: str, name: str) -> tuple[str, ...]:
    """A docstring's examples as assertions: `>>> f(1)` followed by a line `2` gives `assert f(1) == 2`.

    Examples in another form are skipped.
    """
    functions = (node for node in program(prompt).body if isinstance(node, ast.FunctionDef) and node.name == name)
    docstring = next((ast.get_docstring(node) for node in functions), None)
    found = []
    for line, result in itertools.pairwise(line.strip() for line in (docstring or "").splitlines()):
        if line.startswith(">>> "):
            with contextlib.suppress(SyntaxError, ValueError):
                expression(line[4:])
                ast.literal_eval(expression(result))
                found.append(f"assert {line[4:]} == {result}")
    return tuple(found)


def own_problems(env_id: str, split: str, make: Callable[[dict[str, Any], str], Task]) -> TaskSet:
    """The shipped tasks, 28 train and 12 test; `make` makes one from a record and an id."""
    source = "the project's own programming tasks"
    return own_tasks("agentgym_envs.code", "tasks.jsonl", split, make, name=env_id, source=source)
