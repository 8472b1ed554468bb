"""Output of commands: JSON for programs, tables for people, on standard output."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from agentgym.storage.files import json_text

if TYPE_CHECKING:
    from rich.console import RenderableType

_WIDE = 10_000  # columns of a pipe: each row is one line, and nothing is cut off
_kept: list[TextIO | None] = []  # standard output, while only `print_json` may write there


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

    class Output(Console):
        def on_broken_pipe(self) -> None:
            raise  # noqa: PLE0704 - inside rich's handler: the command line says what a reader that left means

    width = None if sys.stdout.isatty() else _WIDE
    Output(width=width, highlight=False, markup=False, emoji=False).print(table)


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
