"""Arithmetic expressions written by a model: parsed with `ast`, never executed, computed exactly as fractions.

Length, exponents and the size of every intermediate number are bounded, so any text takes at most about a millisecond.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator
from fractions import Fraction

from agentgym_envs import syntax

MOST_CHARACTERS = 300
MOST_BITS = 1024  # of any numerator or denominator on the way: about 300 digits
MOST_EXPONENT = 100
SHOWN_DIGITS = 12  # of a number with no short decimal form

_OPERATORS: dict[type[ast.operator], tuple[str, Callable[[Fraction, Fraction], Fraction]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.FloorDiv: ("//", lambda a, b: Fraction(a // b)),
    ast.Mod: ("%", operator.mod),
    ast.Pow: ("**", lambda a, b: Fraction(a ** int(b))),
}
ALL_OPERATORS = frozenset(sign for sign, _ in _OPERATORS.values())

_SPELLINGS = str.maketrans(
    {"×": "*", "·": "*", "∙": "*", "⋅": "*", "÷": "/", "−": "-", "–": "-", "∕": "/", "[": "(", "]": ")"}
)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_CURRENCY = re.compile(r"[$€£¥]\s*(?=[\d.])")
_PERCENT = re.compile(r"(\d+\.?\d*|\.\d+)\s*%(?!\s*[\d(.])")  # "20%", not the remainder in "20 % 3"
_ALLOWED = re.compile(r"(?:[0-9.+\-*/%() ]|(?<=[0-9.])[eE](?=[-+0-9]))*")


class ArithmeticProblem(ValueError):
    """An expression cannot be parsed or computed; the message says why."""


def parse(expression: str, operators: frozenset[str] = ALL_OPERATORS) -> ast.expr:
    """Parse an expression of numbers, parentheses and the given operators; a sign before a number is none of them.

    Thousands separators, currency signs and the spellings × ÷ − ^ are accepted; `20%` is 20 / 100.
    """
    text = expression.strip()
    if not text:
        raise ArithmeticProblem("the expression is empty")
    if len(text) > MOST_CHARACTERS:
        raise ArithmeticProblem(f"the expression has {len(text)} characters; {MOST_CHARACTERS} is the limit")
    text = _THOUSANDS.sub("", text.translate(_SPELLINGS).replace("^", "**"))
    text = " ".join(_PERCENT.sub(r"(\1/100)", _CURRENCY.sub("", text)).split())
    readable = _ALLOWED.match(text)
    if readable is None or readable.end() < len(text):
        stray = text[readable.end() if readable else 0]
        raise ArithmeticProblem(f"{stray!r} cannot be in an expression: write numbers, operators and parentheses only")
    try:
        node = syntax.expression(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ArithmeticProblem(f"{expression.strip()!r:.100} is not an arithmetic expression") from error
    for part in ast.walk(node):
        if isinstance(part, ast.BinOp):
            sign = _OPERATORS[type(part.op)][0] if type(part.op) in _OPERATORS else "?"
            if sign not in operators:
                allowed = " ".join(known for known, _ in _OPERATORS.values() if known in operators)
                raise ArithmeticProblem(f"the operator {sign} is not allowed: use {allowed}")
        elif isinstance(part, ast.Call | ast.Tuple):
            raise ArithmeticProblem("write * between a number and a parenthesis")
        elif isinstance(part, ast.Constant):
            _literal(part)
        elif not isinstance(part, ast.UnaryOp | ast.operator | ast.unaryop):
            raise ArithmeticProblem("that is not an arithmetic expression")
    return node


def compute(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant):
        return _bounded(_literal(node))
    if isinstance(node, ast.UnaryOp):
        value = compute(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if not isinstance(node, ast.BinOp):
        raise ArithmeticProblem(f"{ast.unparse(node):.100} is not arithmetic")
    left, right = compute(node.left), compute(node.right)
    if isinstance(node.op, ast.Div | ast.FloorDiv | ast.Mod) and right == 0:
        raise ArithmeticProblem(f"division by zero in {ast.unparse(node):.100}")
    if isinstance(node.op, ast.Pow):
        if right.denominator != 1:
            raise ArithmeticProblem("an exponent must be a whole number")
        if abs(right) > MOST_EXPONENT or _bits(left) * abs(right) > MOST_BITS:  # refused before it takes forever
            raise ArithmeticProblem("the power is too large")
        if left == 0 and right < 0:
            raise ArithmeticProblem("division by zero: 0 to a negative power")
    return _bounded(_OPERATORS[type(node.op)][1](left, right))


def numbers_of(node: ast.expr) -> Iterator[Fraction]:
    return (_literal(part) for part in ast.walk(node) if isinstance(part, ast.Constant))


def written(value: Fraction) -> str:
    """A value as a decimal: exact if short, else rounded to `SHOWN_DIGITS` significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    for digits in range(1, SHOWN_DIGITS + 1):
        scaled = value * 10**digits
        if scaled.denominator == 1:
            whole, rest = divmod(abs(scaled.numerator), 10**digits)
            return f"{'-' if value < 0 else ''}{whole}.{rest:0{digits}d}"
    try:
        return f"{float(value):.{SHOWN_DIGITS}g}"
    except OverflowError:
        return str(round(value))


def _literal(node: ast.Constant) -> Fraction:
    """The number of a literal, as written: 0.1 is one tenth, not the nearest float."""
    if type(node.value) not in (int, float):
        raise ArithmeticProblem(f"{node.value!r} is not a number")
    try:
        return Fraction(repr(node.value))
    except ValueError as error:  # inf, from a literal such as 1e999
        raise ArithmeticProblem("a number is too large") from error


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MOST_BITS:
        raise ArithmeticProblem("a number on the way is too large")
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())
