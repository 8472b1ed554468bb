"""Equations and inequalities as answers: which of them state a value, and which are equivalent."""

from collections.abc import Callable
from typing import Any

from mpmath import mp

from agentgym_envs.math.expressions import (
    DIGITS,
    Undefined,
    close,
    equal,
    is_expression,
    ratio_at_points,
    symbols,
    value,
)
from agentgym_envs.math.latex_tree import Node
from agentgym_envs.math.regions import TURNED

Same = Callable[[Node, Node], bool]


def same_relation(gold: Node, answer: Node, same: Same) -> bool:
    """True if an answer matches the gold one, where at least one of them is a relation.

    An equation that names a value ("x = 5", "AB = 5") matches that value, in both directions. Any other gold equation
    needs an equation with the same solutions: the sides differ by a constant factor.
    """
    if gold.op != "relation":
        return any(same(gold, found) for found in resolved(answer))
    stated = named(gold)
    if answer.op != "relation":
        return stated is not None and same(stated[1], answer)
    if gold.name == answer.name and all(sign == ":" for sign in gold.name.split()):
        return len(gold.args) == len(answer.args) and all(map(same, gold.args, answer.args))
    given = named(answer)
    if stated and given and stated[0] == given[0] and (not symbols(stated[1]) or same(stated[1], given[1])):
        return same(stated[1], given[1])
    if stated and not symbols(stated[1]) and stated[0].op == "symbol":
        return False  # gold x = 5 matches neither 2x = 10 nor y = 5
    return _equivalent(gold, answer)


def is_name(node: Node) -> bool:
    """True if a node only names something: x, AB, f(x), f(2), (x, y), sin A."""
    if node.op == "symbol":
        return True
    if node.op in ("row", "list"):
        return all(part.op == "symbol" for part in node.args)
    if node.op == "call":
        return node.name not in ("abs", "floor", "ceil") and all(map(is_name, node.args))
    if node.op != "multiply":
        return False
    function, argument = node.args
    return is_name(function) and (is_name(argument) or argument.op in ("number", "row"))


def named(relation: Node) -> tuple[Node, Node] | None:
    """Name and value of "name = value" or "value = name"; None for another relation."""
    if relation.op != "relation" or relation.name != "=":
        return None
    left, right = relation.args
    if is_name(left):
        return left, right
    return (right, left) if is_name(right) else None


def resolved(relation: Node) -> list[Node]:
    """The value that a chain of equations gives a name, or the common value of its sides; [] if they differ.

    Approximate decimals of the chain follow, if they are rounded correctly.
    """
    signs = relation.name.split()
    if signs == ["in"] and is_name(relation.args[0]):
        return [relation.args[1]]
    if any(sign not in ("=", "approx") for sign in signs):
        return []
    parts = list(relation.args)
    first = signs.index("approx") + 1 if "approx" in signs else len(parts)
    exact, about = parts[:first], parts[first:]
    if len(exact) > 1 and is_name(exact[0]):
        exact = exact[1:]
    elif len(exact) > 1 and is_name(exact[-1]):
        exact = exact[:-1]
    if any(not _equal_sides(exact[0], side) for side in exact[1:]):
        return []
    if about and not all(_is_about(exact[0], decimal) for decimal in about):
        return []
    return [exact[-1], *about]


def _equal_sides(one: Node, other: Node) -> bool:
    return one == other or (is_expression(one) and is_expression(other) and equal(one, other))


def _is_about(exact: Node, decimal: Node) -> bool:
    """True if a decimal is a value rounded or cut at its last digit."""
    bare = decimal.args[0] if decimal.op == "unit" else decimal
    bare = bare.args[0] if bare.op == "negative" else bare
    if bare.op != "number" or not is_expression(exact) or symbols(exact):
        return False
    places = len(bare.name.partition(".")[2])
    with mp.workdps(DIGITS):
        try:
            return bool(abs(abs(value(exact, {})) - value(bare, {})) < mp.mpf(10) ** -places)
        except Undefined:
            return False


def _equivalent(gold: Node, answer: Node) -> bool:
    """True if two relations have sides that differ by a constant factor, positive for inequalities."""
    if len(gold.args) != 2 or len(answer.args) != 2 or not all(map(is_expression, (*gold.args, *answer.args))):
        return False
    if symbols(gold) != symbols(answer):
        return False
    sign, other = gold.name, answer.name
    if TURNED.get(other) == sign:
        answer = Node("relation", (answer.args[1], answer.args[0]), sign)
    elif other != sign:
        return False
    return sign in ("=", "ne", *TURNED) and _proportional(gold, answer, positive=sign in TURNED)


def _proportional(gold: Node, answer: Node, positive: bool) -> bool:
    one, other = (Node("add", (r.args[0], Node("negative", (r.args[1],)))) for r in (gold, answer))
    factor: list[Any] = []

    def agree(a: Any, b: Any) -> bool:
        if close(a, 0) or close(b, 0):
            return close(a, 0) and close(b, 0)
        factor.append(a / b)
        return close(factor[0], factor[-1]) and (not positive or factor[-1] > 0)

    return ratio_at_points(one, other, agree) and bool(factor)
