"""The program behind the session "python": it runs one cell of code after another in one namespace.

A cell arrives as a frame on standard input and is answered with "0" or "1" on descriptor 3. Both are moved out of the way.
"""

from __future__ import annotations

import ast
import linecache
import os
import signal
import sys
import traceback
import types
from contextlib import suppress
from typing import BinaryIO

PARSE_ONLY: int = ast.PyCF_ONLY_AST


def receive(requests: BinaryIO) -> str | None:
    head = requests.read(4)
    return requests.read(int.from_bytes(head, "big")).decode("utf-8", "surrogatepass") if len(head) == 4 else None


def run(text: str, name: str, space: dict) -> bool:
    """Run a cell and show the value of an expression at its end. True if it raised nothing."""
    try:
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        # Without `dont_inherit` this file's own `from __future__` would hold in cells too.
        tree = compile(text, name, "exec", PARSE_ONLY, dont_inherit=True)
        value = None
        if tree.body and isinstance(last := tree.body[-1], ast.Expr):
            tree.body.pop()
            value = compile(ast.Expression(last.value), name, "eval", dont_inherit=True)
        whole = compile(tree, name, "exec", dont_inherit=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            exec(whole, space)
            if value:
                sys.displayhook(eval(value, space))
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == "<string>":
            trace = trace.tb_next
        if isinstance(error, SyntaxError) and error.text is None and error.filename:  # one that is found after parsing
            error.text = linecache.getline(error.filename, error.lineno or 0)
        traceback.print_exception(type(error), error, trace)
        return False
    return True


def main() -> None:
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.dup(3)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.close(3)
    process = os.getpid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # but while a cell runs
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    number = 0
    while (text := receive(requests)) is not None:
        number += 1
        good = run(text, f"<cell {number}>", module.__dict__)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed or replaced by a cell
                stream.flush()
        if os.getpid() != process:  # a fork in the cell: only the first process answers
            os._exit(0)
        os.write(replies, b"\0\0\0\x01" + (b"0" if good else b"1"))


if __name__ == "__main__":
    main()
