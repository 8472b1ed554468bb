"""Trees of Python text made in many threads at once."""

import ast
import gc
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from agentgym_envs import syntax

SOURCE = "def f(x):\n" + "".join(f"    if x == {i}:\n        return [({i}, x), {{x: -x}}]\n" for i in range(40))


class Garbage:
    """Is collected at some time, in the middle of making a tree too, and lets other threads run then."""

    def __init__(self):
        self.cycle = self

    def __del__(self):
        time.sleep(1e-4)


@pytest.fixture
def _collecting():
    threshold = gc.get_threshold()
    gc.set_threshold(20)
    yield
    gc.set_threshold(*threshold)


def made(read, text):
    Garbage()
    return read(text)


@pytest.mark.usefixtures("_collecting")
def test_threads_make_whole_trees_at_once():
    with ThreadPoolExecutor(8) as threads:
        trees = list(threads.map(made, [syntax.program] * 200, [SOURCE] * 200))
        sums = list(threads.map(made, [syntax.expression] * 200, ["(" * 60 + "1 + 2" + ")" * 60] * 200))
    assert {ast.dump(tree) for tree in trees} == {ast.dump(ast.parse(SOURCE))}
    assert {ast.unparse(tree) for tree in sums} == {"1 + 2"}


@pytest.mark.parametrize("read", [syntax.program, syntax.expression])
def test_what_is_no_python_is_said(read):
    with pytest.raises(SyntaxError):
        read("1 +")
