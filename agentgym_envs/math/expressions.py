"""Tests if two expressions are equal: exactly if rational, else to 70 digits at many values of their variables.

Variables are real, and an expression has a value only where each root and logarithm is real, unless one of the two
contains `i`. Powers, factorials and arguments are bounded, so nothing here takes long.
"""

import math
import operator
import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from mpmath import mp

from agentgym_envs.math.latex_tokens import names
from agentgym_envs.math.latex_tree import Node

DIGITS = 100
TOLERANCE = mp.mpf(10) ** -70
MOST_BITS = 100_000  # of an exact power
LARGEST_FACTORIAL = 2_000
LARGEST_ARGUMENT = mp.mpf(10) ** 20
LARGEST_POWER = 10**7  # bits

ROUNDED_PLACES = 6  # minimum decimal places of a decimal that may approximate an infinite one
ARITHMETIC = names(
    "number symbol constant add negative multiply divide power root call factorial binomial percent degrees either"
)
_OF_MPMATH = names("floor ceil sin cos tan cot sec csc sinh cosh tanh asin acos atan")


class Undefined(ArithmeticError):
    """An expression has no value, or one out of bounds."""


def _nodes(node: Node) -> Iterator[Node]:
    yield node
    for part in node.args:
        yield from _nodes(part)


def is_expression(node: Node) -> bool:
    """True for a number or formula; False for a relation, list, set or point."""
    return all(n.op in ARITHMETIC and not (n.op == "constant" and n.name == "infty") for n in _nodes(node))


def symbols(node: Node) -> frozenset[str]:
    return frozenset(n.name for n in _nodes(node) if n.op == "symbol")


def has_i(node: Node) -> bool:
    return any((n.op, n.name) in (("constant", "i"), ("call", "cis")) for n in _nodes(node))


def equal(one: Node, other: Node) -> bool:
    exact = exact_value(one), exact_value(other)
    if None not in exact:
        return exact[0] == exact[1]
    return ratio_at_points(one, other, close)


def ratio_at_points(one: Node, other: Node, agree: Callable[[Any, Any], bool]) -> bool:
    """True if two expressions agree at every point where both have a value, at least three (one without variables)."""
    variables = sorted(symbols(one) | symbols(other))
    imaginary = has_i(one) or has_i(other)
    with mp.workdps(DIGITS):
        found = 0
        for point in _points(variables):
            try:
                values = value(one, point, imaginary), value(other, point, imaginary)
            except Undefined:
                continue
            if not agree(*values):
                return False
            found += 1
        return found >= (3 if variables else 1)


def close(a: Any, b: Any) -> bool:
    return bool(abs(a - b) <= TOLERANCE * max(1, abs(a), abs(b)))


def _points(variables: list[str]) -> Iterator[dict[str, Any]]:
    """Values of the variables: some positive, some of both signs, some small, some whole."""
    if not variables:
        yield {}
        return
    rng = random.Random(17)
    one = 10**30
    ranges = [(one, 4 * one, one)] * 5 + [(-3 * one, 3 * one, one)] * 8 + [(1, one, one)] * 4 + [(1, 13, 1)] * 5
    for low, high, unit in ranges:
        yield {name: mp.mpf(rng.randrange(low, high)) / unit for name in variables}


# ---- exact values


def exact_value(node: Node) -> Fraction | None:
    """The rational value of an expression; None if it has none or is out of bounds."""
    try:
        return _exact(node)
    except (Undefined, ZeroDivisionError):
        return None


def _exact(node: Node) -> Fraction:
    if node.op == "number":
        return node.value
    if node.op not in _EXACT:
        raise Undefined
    result = _EXACT[node.op](*map(_exact, node.args))
    if max(result.numerator.bit_length(), result.denominator.bit_length()) > MOST_BITS:
        raise Undefined
    return result


def _exact_power(base: Fraction, power: Fraction) -> Fraction:
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if power.denominator != 1 or size * abs(power) > MOST_BITS or (base == 0 and power <= 0):
        raise Undefined
    return base ** int(power)


def _exact_binomial(n: Fraction, k: Fraction) -> Fraction:
    if n.denominator != 1 or k.denominator != 1 or not 0 <= k <= n <= LARGEST_FACTORIAL:
        raise Undefined
    return Fraction(math.comb(int(n), int(k)))


def _exact_factorial(n: Fraction) -> Fraction:
    if n.denominator != 1 or not 0 <= n <= LARGEST_FACTORIAL:
        raise Undefined
    return Fraction(math.factorial(int(n)))


_EXACT: dict[str, Callable[..., Fraction]] = {
    "add": operator.add,
    "negative": operator.neg,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "percent": lambda a: a / 100,
    "power": _exact_power,
    "binomial": _exact_binomial,
    "factorial": _exact_factorial,
}


# ---- values at a point


def value(node: Node, point: dict[str, Any], imaginary: bool = False) -> Any:
    """The value of an expression at mpmath's current precision."""
    found = _value(node, point, imaginary)
    if mp.isnan(found) or mp.isinf(found):
        raise Undefined
    return found


def _value(node: Node, point: dict[str, Any], imaginary: bool) -> Any:
    if node.op == "number":
        return mp.mpf(node.value.numerator) / node.value.denominator
    if node.op == "symbol":
        return point[node.name]
    if node.op == "constant":
        return {"pi": +mp.pi, "e": +mp.e, "i": mp.j}.get(node.name) or undefined()
    parts = [value(part, point, imaginary) for part in node.args]
    if node.op in ("power", "root"):
        base, power = parts
        exponent = exact_value(node.args[1])
        if node.op == "root":
            exponent = 1 / exponent if exponent else None
            power = 1 / power if power else undefined()
        return _power(base, power, exponent, imaginary)
    operate = _OPERATIONS.get(node.name if node.op == "call" else node.op)
    bounded = node.op == "call" and node.name not in ("abs", "ln", "log")
    if operate is None or (bounded and any(abs(part) > LARGEST_ARGUMENT for part in parts)):
        raise Undefined
    try:
        found = operate(*parts)
    except (ValueError, ZeroDivisionError, TypeError, OverflowError):
        raise Undefined from None
    if isinstance(found, mp.mpc) and not imaginary:
        raise Undefined
    return found


def undefined() -> Any:
    raise Undefined


def _power(base: Any, power: Any, exponent: Fraction | None, imaginary: bool) -> Any:
    """For real values, a negative base has roots of odd degree."""
    if base == 0:
        return mp.mpf(0) if mp.re(power) > 0 else undefined()
    if abs(mp.log(abs(base), 2)) * abs(power) > LARGEST_POWER:
        raise Undefined
    if exponent is not None and exponent.denominator == 1:
        return base ** int(exponent)
    if not imaginary and base < 0:
        if exponent is not None and exponent.denominator % 2:
            return (-1 if exponent.numerator % 2 else 1) * mp.power(-base, power)
        if power == mp.floor(power):
            return base ** int(power)
        raise Undefined
    return mp.power(base, power)


def _logarithm(x: Any, base: Any = 10) -> Any:
    if x == 0 or base in (0, 1):
        raise Undefined
    return mp.log(x) / mp.log(base)


def _whole(part: Any) -> int:
    return int(part) if part == mp.floor(part) else undefined()


_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(mp, name) for name in _OF_MPMATH},
    "add": operator.add,
    "negative": operator.neg,
    "multiply": operator.mul,
    "divide": lambda a, b: a / b if b else undefined(),
    "percent": lambda a: a / 100,
    "degrees": lambda a: a * mp.pi / 180,
    "factorial": lambda a: mp.factorial(a) if abs(a) <= LARGEST_FACTORIAL else undefined(),
    "binomial": lambda n, k: mp.binomial(n, k) if max(abs(n), abs(k)) <= LARGEST_FACTORIAL else undefined(),
    "abs": abs,
    "exp": lambda a: mp.exp(a) if abs(a) < LARGEST_POWER else undefined(),
    "ln": lambda a: mp.log(a) if a else undefined(),
    "lg": _logarithm,
    "log": _logarithm,
    "cis": lambda a: mp.exp(mp.j * a),
    "gcd": lambda *parts: mp.mpf(math.gcd(*map(_whole, parts))),
    "lcm": lambda *parts: mp.mpf(math.lcm(*map(_whole, parts))),
    "max": lambda *parts: max(parts),
    "min": lambda *parts: min(parts),
}
