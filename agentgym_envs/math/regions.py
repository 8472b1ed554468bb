r"""Subsets of the real line: (1, 2], 1 < x \le 2 and \mathbb{R} \setminus \{0\} as sets that can be compared.

A region is a list of pieces between two cuts. A cut lies just before or just after a number: (1, 2] goes from after 1
to after 2.
"""

from typing import Any

from mpmath import mp

from agentgym_envs.math.expressions import DIGITS, Undefined, is_expression, symbols, undefined, value
from agentgym_envs.math.latex_tree import Node

Cut = tuple[Any, int]  # a number, and 0 for before it or 1 for after it
Pieces = tuple[tuple[Cut, Cut], ...]
Region = tuple[Pieces, str]  # a subset of the real line, and the variable that lies in it, or ""
_START: Cut = (mp.mpf("-inf"), 1)
_END: Cut = (mp.mpf("inf"), 0)
_LINE: Pieces = ((_START, _END),)
TURNED = {"<": ">", ">": "<", "le": "ge", "ge": "le"}  # inequalities, read from right to left
_INEQUALITIES = frozenset(("<", ">", "le", "ge", "ne"))


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
            (pieces, name), (others, other_name) = _region(one), _region(other)
        except Undefined:
            return False
    return pieces == others and (name == other_name or not name or not other_name)


def _region(node: Node) -> Region:
    if node.op == "domain" and node.name == "R":
        return _LINE, ""
    if node.op == "row":
        return _interval(node), ""
    if node.op == "set":
        return _tidy([((x, 0), (x, 1)) for x in map(_number, node.args)]), ""
    if node.op in ("union", "intersection", "without") or (node.op == "list" and node.name in ("and", "or")):
        return _joined(node)
    if node.op == "relation":
        return _related(node)
    raise Undefined


def _joined(node: Node) -> Region:
    regions, named = zip(*map(_region, node.args), strict=True)
    names = set(named) - {""}
    if len(names) > 1:
        raise Undefined
    pieces = regions[0]
    for region in regions[1:]:
        if node.op == "union" or node.name == "or":
            pieces = _tidy([*pieces, *region])
        elif node.op == "without":
            cuts = [_START, *(cut for piece in region for cut in piece), _END]
            pieces = _intersection(pieces, _tidy(list(zip(cuts[::2], cuts[1::2], strict=True))))
        else:
            pieces = _intersection(pieces, region)
    return pieces, "".join(names)


def _interval(node: Node) -> Pieces:
    if len(node.args) != 2:
        raise Undefined
    low, high = map(_number, node.args)
    opened, closed = node.name[0], node.name[1]
    if not low < high or (mp.isinf(low) and opened == "[") or (mp.isinf(high) and closed == "]"):
        raise Undefined
    start = _START if mp.isinf(low) else (low, int(opened == "("))
    return ((start, _END if mp.isinf(high) else (high, int(closed == "]"))),)


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
        pieces, _ = _region(node.args[1])
        return (pieces, node.args[0].name) if node.args[0].op == "symbol" else undefined()
    if len(names) != 1 or not all(is_expression(part) or _is_infinite(part) for part in node.args):
        raise Undefined
    (name,), pieces = names, _LINE
    for left, sign, right in zip(node.args, signs, node.args[1:], strict=False):
        pieces = _intersection(pieces, _solved(left, sign, right, name))
    return pieces, name


def _is_infinite(node: Node) -> bool:
    bare = node.args[0] if node.op == "negative" else node
    return (bare.op, bare.name) == ("constant", "infty")


def _solved(left: Node, sign: str, right: Node, name: str) -> Pieces:
    """The solutions of an inequality that is linear, or an absolute value of something linear."""
    if _is_infinite(left) or _is_infinite(right):
        return _LINE if sign in ("<", ">") else undefined()
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


def _tidy(pieces: list[tuple[Cut, Cut]]) -> Pieces:
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


def _intersection(one: Pieces, other: Pieces) -> Pieces:
    return _tidy([(max(a, c), min(b, d)) for a, b in one for c, d in other])
