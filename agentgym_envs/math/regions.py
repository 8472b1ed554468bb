r"""Subsets of the real line: (1, 2], 1 < x \le 2 and \mathbb{R} \setminus \{0\} as sets that can be compared.

A region is a list of pieces between two cuts. A cut lies just before or just after a number: (1, 2] goes from after 1
to after 2.
"""

from dataclasses import dataclass
from typing import Any

from mpmath import mp

from agentgym_envs.math.expressions import DIGITS, Undefined, is_expression, symbols, undefined, value
from agentgym_envs.math.latex_tree import Node

Cut = tuple[Any, int]  # a number, and 0 for before it or 1 for after it
_START: Cut = (mp.mpf("-inf"), 1)
_END: Cut = (mp.mpf("inf"), 0)
TURNED = {"<": ">", ">": "<", "le": "ge", "ge": "le"}  # inequalities, read from right to left
_INEQUALITIES = frozenset(("<", ">", "le", "ge", "ne"))


@dataclass(frozen=True)
class Region:
    """A subset of the real line, and the variable that lies in it, or ""."""

    pieces: tuple[tuple[Cut, Cut], ...]
    name: str = ""


def is_region(node: Node) -> bool:
    if node.op in ("union", "intersection", "without", "row", "set", "domain"):
        return True
    if node.op == "relation":
        signs = node.name.split()
        return bool(_INEQUALITIES & set(signs)) or (signs == ["in"] and is_region(node.args[1]))
    return node.op == "list" and node.name in ("and", "or") and any(map(is_region, node.args))


def same_region(one: Node, other: Node) -> bool:
    """True if two nodes are the same subset of the real line, of the same variable if both name one."""
    with mp.workdps(DIGITS):
        try:
            first, second = _region(one), _region(other)
        except Undefined:
            return False
    named = {first.name, second.name} - {""}
    return first.pieces == second.pieces and len(named) < 2


def _region(node: Node) -> Region:
    if node.op == "domain" and node.name == "R":
        return Region(((_START, _END),))
    if node.op == "row":
        return _interval(node)
    if node.op == "set":
        points = [_number(item) for item in node.args]
        return Region(_tidy([((x, 0), (x, 1)) for x in points]))
    if node.op in ("union", "intersection", "without", "list"):
        return _joined(node)
    if node.op == "relation":
        return _related(node)
    raise Undefined


def _joined(node: Node) -> Region:
    regions = [_region(part) for part in node.args]
    names = {region.name for region in regions} - {""}
    if len(names) > 1 or (node.op == "list" and node.name not in ("and", "or")):
        raise Undefined
    pieces = regions[0].pieces
    for region in regions[1:]:
        if node.op == "union" or node.name == "or":
            pieces = _tidy([*pieces, *region.pieces])
        elif node.op == "without":
            pieces = _intersection(pieces, _complement(region.pieces))
        else:
            pieces = _intersection(pieces, region.pieces)
    return Region(pieces, "".join(names))


def _interval(node: Node) -> Region:
    if len(node.args) != 2:
        raise Undefined
    low, high = map(_number, node.args)
    if not low < high:
        raise Undefined
    opened, closed = node.name[0], node.name[1]
    if (mp.isinf(low) and opened == "[") or (mp.isinf(high) and closed == "]"):
        raise Undefined
    start = _START if mp.isinf(low) else (low, int(opened == "("))
    return Region(((start, _END if mp.isinf(high) else (high, int(closed == "]"))),))


def _number(node: Node) -> Any:
    if node.op == "negative":
        return -_number(node.args[0])
    if node.op == "constant" and node.name == "infty":
        return mp.mpf("inf")
    if not is_expression(node) or symbols(node):
        raise Undefined
    return _rounded(value(node, {}))


def _rounded(x: Any) -> Any:
    return mp.mpf(0) if abs(x) < mp.mpf(10) ** -60 else mp.mpf(mp.nstr(x, 60))


def _related(node: Node) -> Region:
    signs = node.name.split()
    names = symbols(node)
    if signs == ["in"]:
        inner = _region(node.args[1])
        if node.args[0].op != "symbol":
            raise Undefined
        return Region(inner.pieces, node.args[0].name)
    if len(names) != 1 or not all(is_expression(part) or _is_infinite(part) for part in node.args):
        raise Undefined
    (name,) = names
    pieces: tuple[tuple[Cut, Cut], ...] = ((_START, _END),)
    for left, sign, right in zip(node.args, signs, node.args[1:], strict=False):
        pieces = _intersection(pieces, _solved(left, sign, right, name))
    return Region(pieces, name)


def _is_infinite(node: Node) -> bool:
    bare = node.args[0] if node.op == "negative" else node
    return bare.op == "constant" and bare.name == "infty"


def _solved(left: Node, sign: str, right: Node, name: str) -> tuple[tuple[Cut, Cut], ...]:
    """The solutions of an inequality that is linear, or an absolute value of something linear."""
    if _is_infinite(left) or _is_infinite(right):
        return ((_START, _END),) if sign in ("<", ">") else undefined()
    if right.op == "call" and right.name == "abs":
        left, right = right, left
        sign = TURNED.get(sign, sign)
    if left.op == "call" and left.name == "abs" and not symbols(right):
        inside, minus = left.args[0], Node("negative", (right,))
        if sign in ("<", "le"):
            return _intersection(_solved(inside, sign, right, name), _solved(minus, sign, inside, name))
        if sign in (">", "ge"):
            return _tidy([*_solved(inside, sign, right, name), *_solved(minus, sign, inside, name)])
        raise Undefined
    difference = Node("add", (left, Node("negative", (right,))))
    at = [value(difference, {name: mp.mpf(x)}) for x in (0, 1, 2, 5)]
    slope = at[1] - at[0]
    straight = max(abs(at[2] - at[0] - 2 * slope), abs(at[3] - at[0] - 5 * slope)) < mp.mpf(10) ** -70
    if not straight or slope == 0:
        raise Undefined
    root = _rounded(-at[0] / slope)
    if slope < 0:
        sign = TURNED.get(sign, sign)
    return {
        "<": ((_START, (root, 0)),),
        "le": ((_START, (root, 1)),),
        ">": (((root, 1), _END),),
        "ge": (((root, 0), _END),),
        "ne": ((_START, (root, 0)), ((root, 1), _END)),
        "=": (((root, 0), (root, 1)),),
    }.get(sign) or undefined()


def _tidy(pieces: list[tuple[Cut, Cut]]) -> tuple[tuple[Cut, Cut], ...]:
    """The pieces in order, with touching ones merged."""
    merged: list[tuple[Cut, Cut]] = []
    for start, end in sorted(pieces):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return tuple(merged)


def _complement(pieces: tuple[tuple[Cut, Cut], ...]) -> tuple[tuple[Cut, Cut], ...]:
    cuts = [_START, *(cut for piece in pieces for cut in piece), _END]
    return _tidy(list(zip(cuts[::2], cuts[1::2], strict=True)))


def _intersection(one: tuple[tuple[Cut, Cut], ...], other: tuple[tuple[Cut, Cut], ...]) -> tuple[tuple[Cut, Cut], ...]:
    return _tidy([(max(a, c), min(b, d)) for a, b in one for c, d in other])
