"""Syntax trees of Python text, made by one thread at a time.

CPython 3.11 keeps one count of a tree's depth for all threads: where two make trees at once, as environments in threads of
their own do, one of them ends with a SystemError that is nobody's fault.
"""

from __future__ import annotations

import ast
import threading

_one_at_a_time = threading.Lock()


def program(text: str) -> ast.Module:
    """The tree of a program. SyntaxError or ValueError if it is none."""
    with _one_at_a_time:
        return ast.parse(text)


def expression(text: str) -> ast.Expression:
    """The tree of an expression. SyntaxError or ValueError if it is none."""
    with _one_at_a_time:
        return ast.parse(text, mode="eval")
