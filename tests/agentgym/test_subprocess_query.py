"""A question answered in a forked process."""

import os

import pytest

from agentgym.processes.subprocess_query import SubprocessQueryError, subprocess_query


def fail():
    raise ZeroDivisionError


def test_the_answer_comes_back():
    assert subprocess_query(lambda: {"a": ["ä", None]}) == {"a": ["ä", None]}


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (fail, "ended with exit code 1"),
        (lambda: os._exit(0), "ended with exit code 0"),
        (lambda: os.kill(os.getpid(), 9), "killed by signal 9"),
    ],
)
def test_a_process_without_an_answer_is_an_error_that_says_how_it_ended(ask, says):
    with pytest.raises(SubprocessQueryError, match=says):
        subprocess_query(ask)
