"""Syntax trees of Python text, made by one thread at a time. SyntaxError or ValueError if the text is not Python.

CPython 3.11 counts a tree's depth for all threads together: two that parse at once can end with a SystemError.
"""

import ast
import threading

_one_at_a_time = threading.Lock()


def program(text: str) -> ast.Module:
    with _one_at_a_time:
        return ast.parse(text)


def expression(text: str) -> ast.Expression:
    with _one_at_a_time:
        return ast.parse(text, mode="eval")
