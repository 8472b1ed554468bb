"""Shared by the commands: environment and JSON options, and output as JSON for programs or tables for people."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from agentgym.core.usage_error import UsageError, usage_errors
from agentgym.storage.files import json_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from agentgym.core.registration import EnvSpec

ENVS = "id, module:Class, file.py or file.py:Class, or prefix:NAME of another package's"
_WIDE = 10_000  # columns of a pipe: each row is one line, and nothing is cut off
_kept: list[TextIO | None] = []  # standard output, while only `print_json` may write there


def find_modules(run: Path | None = None) -> None:
    """Let modules of the current folder be imported, and those of a run folder from the folders of that run."""
    folders = [os.getcwd()]
    if run is not None and (run / "run.json").is_file():
        from agentgym.evaluate.store import read_run

        folders += read_run(run).get("folders", [])
    # At the end, where a file there cannot stand in for a module of that name.
    sys.path.extend(folder for folder in dict.fromkeys(folders) if folder not in sys.path)


def spec_of(id: str, kwargs: Mapping[str, Any] | None = None) -> EnvSpec:
    """The spec of an environment named by the user, `kwargs` over its own, its class imported. Raises UsageError."""
    from agentgym.core.registration import UnknownEnvError, spec

    find_modules()
    try:
        with usage_errors(ImportError, TypeError):
            found = spec(_in_file(id) if ".py" in id else id)
            found.load()
            return replace(found, kwargs={**found.kwargs, **kwargs}) if kwargs else found
    except UnknownEnvError as error:
        project = "." if (Path(id) / "__init__.py").is_file() and Path("pyproject.toml").is_file() else id
        if not (Path(project) / "pyproject.toml").is_file():
            raise UsageError(str(error)) from error
        remedy = f"the package in the folder {id} is not installed: pip install -e {shlex.quote(project)}"
        raise UsageError(f"{error}; {remedy}") from error
    except ValueError as error:
        raise UsageError(str(error)) from error


def _in_file(named: str) -> str:
    """`module:Class` of `file.py:Class`, or of `file.py` if it defines one environment."""
    from agentgym.core.env import Env
    from agentgym.core.extensions import import_module

    path, _, name = named.partition(":")
    file = Path(path)
    if file.suffix != ".py":
        return named
    if not file.is_file():
        raise UsageError(f"{path}: there is no such file")
    folder = file.resolve().parent
    parts = [file.stem]
    while (folder / "__init__.py").exists():  # a module of a package is imported as such
        parts.insert(0, folder.name)
        folder = folder.parent
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    module = import_module(".".join(parts), path)
    if Path(module.__file__ or "").resolve() != file.resolve():
        raise UsageError(f"{path}: the module {module.__name__!r} is another file, {module.__file__}: rename yours")
    if not name:
        classes = [member for member in vars(module).values() if isinstance(member, type) and issubclass(member, Env)]
        names = [each.__name__ for each in classes if each.__module__ == module.__name__]
        if len(names) != 1:
            there = f"defines {', '.join(names)}: write {path}:{names[0]}" if names else "defines no agentgym.Env"
            raise UsageError(f"{path} {there}")
        name = names[0]
    return f"{module.__name__}:{name}"


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}: {text}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, not {text}")
    return value


def set_run(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int], json: str) -> None:
    """Set a command's function, and add its last option, `--json`, which `json` describes."""
    parser.add_argument("--json", action="store_true", help=json)
    parser.set_defaults(run=run)


def add_kwargs(parser: Any, about: str, option: str = "--kwargs") -> None:
    parser.add_argument(option, type=json_object, default={}, metavar="JSON", help=about)


@contextlib.contextmanager
def json_alone() -> Iterator[None]:
    """Send everything that environments and agents print to standard error within this context."""
    _kept.append(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _kept.pop()


def print_json(value: Any) -> None:
    """One JSON document, the only thing on standard output of a command with `--json`."""
    out = _kept[-1] if _kept else sys.stdout
    if out is not None:
        print(json_text(value), file=out, flush=True)


def print_table(table: RenderableType) -> None:
    """A table as wide as the terminal; into a pipe or a file as wide as it needs."""
    from rich.console import Console

    class PipeConsole(Console):
        def on_broken_pipe(self) -> None:
            raise  # noqa: PLE0704 - inside rich's handler: the command line says what a reader that left means

    width = None if sys.stdout.isatty() else _WIDE
    PipeConsole(width=width, highlight=False, markup=False, emoji=False).print(table)


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False, **first: Any) -> None:
    """Rows as a table. With `numbers`, all columns but the first hold numbers; `first` are settings of the first one."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for place, column in enumerate(columns):
        settings = first if place == 0 else {"justify": "right"} if numbers else {}
        table.add_column(column, **settings)
    for row in rows:
        table.add_row(*row)
    print_table(table)
