"""Symbolic equality of answers: what is the same, what is not, and texts that would compute for ever."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.processes.isolate import IsolatedCallError, NoWorker
from agentgym_envs.math import symbolic
from agentgym_envs.math.symbolic import LONGEST_ANSWER, plain, same_answer

pytest.importorskip("mpmath")

SAME = [
    (r"\frac{1}{2}", "0.5"),
    (r"\frac12", "1/2"),
    (r"\dfrac{7}{3}", "$7/3$"),
    (r"\frac{1}{3}", "0.333333"),
    (r"\sqrt{8}", r"2\sqrt2"),
    (r"\sqrt{2}", "sqrt(2)"),
    (r"\frac{\sqrt{6} + \sqrt{2}}{4}", r"\frac{1 + \sqrt{3}}{2\sqrt{2}}"),
    (r"2^{100}", "1267650600228229401496703205376"),
    ("12", "12."),
    ("12", r"\(12\)"),
    ("12", "$$12$$"),
    ("007", "7"),
    ("1000", "1,000"),
    (r"(-\infty, 3)", "x < 3"),
    ("x<3", r"(-\infty,3)"),
    ("[-1,2]", r"-1 \le x \le 2"),
    (r"[0,1)\cup(2,\infty)", r"(2,\infty) \cup [0,1)"),
    (r"\{2, 3\}", r"\{3, 2\}"),
    (r"\{2, 3\}", "3, 2"),
    (r"\{2, 3\}", r"x = 2 \text{ or } x = 3"),
    (r"\emptyset", r"\{\}"),
    ("(3, -1)", "(3,-1)"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
    ("x^2 + 2x + 1", "(x+1)^2"),
    ("x^2+1", "x**2 + 1"),
    (r"e^{3x}(3x^2 + 2x)", r"x e^{3x} (2 + 3x)"),
    (r"\sin^2 x", r"1 - \cos^2 x"),
    ("y = 2x + 1", "2x+1"),
    ("x = 5", "5"),
    (r"50\%", "50%"),
    (r"50\%", "0.5"),
    (r"50\%", "50"),
    (r"5\text{ cm}", "5"),
    ("60", "60 miles per hour"),
    (r"60\text{ km/h}", "60 km/h"),
    (r"60\text{ feet per second}", r"60 \text{ft}/\text{s}"),
    (r"120^\circ", "120"),
    (r"\$5", "5"),
    (r"\binom{5}{2}", "10"),
    ("(12, 102)", "(12,102)"),
    ("2, 3", "2, 3, 3"),
    (r"\text{Tuesday}", r"\text{tuesday}"),
]
DIFFERENT = [
    ("2", "3"),
    (r"\frac{1}{3}", "0.33"),
    ("7", "7.001"),
    ("(1, 2)", "[1, 2]"),
    ("(1, 2)", "(2, 1)"),
    (r"\{1, 2\}", r"\{1, 2, 3\}"),
    ("5", "5, 6"),
    ("x < 3", "x > 3"),
    ("x^2", "x^3"),
    ("a", "b"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}"),
    ("5", ""),
    ("5", "x"),
    ("5", "5 or 6"),
    (r"\sqrt{2}", "1.41"),
    ("2", r"\text{two}"),
    (r"60\text{ km}", "60 km/h"),
    ("60", "60 km/2"),
    ("0", r"\frac{0}{0}"),
    ("1", r"\infty"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_the_same_either_way_round(one, other):
    assert same_answer(one, other)
    assert same_answer(other, one)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_either_way_round(one, other):
    assert not same_answer(one, other)
    assert not same_answer(other, one)


@pytest.mark.parametrize(
    ("one", "other"), [("39", "7"), (r"\frac{1}{2}", "2"), ("(1, 2)", "(3, 4)"), ("x = 3", "x = 5")]
)
def test_no_text_is_two_different_answers_at_once(one, other):
    """Whoever states two guesses is right with one of them at most."""
    joiners = (
        " or ",
        ", ",
        " = ",
        r" \text{ or } ",
        "$ $",
        "$ or $",
        r" \approx ",
        r" \quad ",
        r" \\ ",
        "\n",
        ". ",
        r"\) \(",
        r"\lor ",
    )
    for joiner in joiners:
        both = f"{one}{joiner}{other}"
        assert not (same_answer(one, both) and same_answer(other, both)), both


@pytest.mark.parametrize(
    "hostile",
    [
        "9^{9^{9^{9}}}",
        "100000000!",
        r"\sum_{n=1}^{10^{30}} \frac{1}{n}",
        r"\int_0^1 \sin(\sin(\sin(\sin(x^{x^x})))) dx",
        r"\binom{10^{12}}{10^{11}}",
        "(" * 400,
        "{" * 400,
        r"\frac{" * 60,
        r"\sqrt{" * 70,
        "1" * 499,
        "x^" * 240 + "x",
        "__import__('os').system('touch /tmp/agentgym_broken')",
        r"\text{" + "a" * 400 + "}",
        "\x00\ud800",
        "1/0",
        "[" * 200 + "]" * 200,
    ],
)
def test_hostile_answers_are_wrong_and_cost_only_their_time(hostile):
    began = time.monotonic()
    assert not same_answer("42", hostile, seconds=1.0)
    assert time.monotonic() - began < 60
    assert same_answer("42", "6 * 7".replace("*", r"\cdot"))


def test_an_answer_that_is_too_long_is_wrong_even_if_it_is_the_same():
    long = "1+" * LONGEST_ANSWER + "1"
    assert not same_answer(long, long)


def test_the_same_text_is_the_same_answer_whatever_it_says():
    assert same_answer("9^{9^{9^{9}}}", "$9^{9^{9^{9}}}$", seconds=0.1)


def test_a_comparison_that_cannot_be_made_is_no_verdict(monkeypatch):
    for error in (NoWorker("none"), IsolatedCallError("ModuleNotFoundError: sympy")):

        def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr(symbolic, "call_isolated", fail)
        with pytest.raises(type(error)):
            same_answer("1/2", "0.5")


def test_a_missing_package_is_told(monkeypatch):
    monkeypatch.setattr(symbolic.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install .*\[math\]"):
        symbolic.require_mpmath()


@pytest.mark.parametrize(
    ("answer", "bare"),
    [("$x$", "x"), (r" \( x \) ", "x"), ("$1$ or $2$", "$1$ or $2$"), ("$", "$"), ("3.", "3"), ("", ""), ("$$", "")],
)
def test_what_stands_around_an_answer_is_taken_off(answer, bare):
    assert plain(answer) == bare


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40))
def test_no_text_raises_and_every_answer_equals_itself(text):
    assert same_answer(text, "17", seconds=5.0) in (True, False)
    assert same_answer(text, text) is bool(plain(text))
