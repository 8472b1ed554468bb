r"""Compares answers by the form of the gold one: a number, an expression, an equation, a point, an interval, a set, ...

Runs in a worker process, and imports `mpmath`.
"""

import logging
import re
from collections import Counter
from fractions import Fraction
from itertools import product
from typing import Any

from mpmath import mp

from agentgym_envs.math.expressions import (
    DIGITS,
    ROUNDED_PLACES,
    Undefined,
    close,
    equal,
    exact_value,
    has_i,
    is_expression,
    ratio_at_points,
    symbols,
    value,
)
from agentgym_envs.math.latex_tokens import WORDS, NotMathematics, characters
from agentgym_envs.math.latex_tree import Node, tree
from agentgym_envs.math.regions import TURNED, is_region, same_region

_log = logging.getLogger(__name__)
MOST_ITEMS = 40  # of a list or set, signs of \pm counted

_NO_LETTER = re.compile(r"[^\w]+|_")
_NO_SOLUTION = re.compile(
    r"(?:there (?:is|are) )?no (?:real |integer |valid |such )*(?:solutions?|values?|roots?)(?: exists?)?|none|empty set"
)
_ALL_REALS = re.compile(r"(?:all|any|every) (?:real numbers?|reals?)")
_MULTIPLES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_UNITS = {
    "centimeter": "cm", "centimetre": "cm", "meter": "m", "metre": "m", "kilometer": "km", "kilometre": "km", "millimeter": "mm",
    "millimetre": "mm", "inch": "in", "inche": "in", "foot": "ft", "feet": "ft", "yard": "yd", "mile": "mi", "second": "s", "sec": "s",
    "minute": "min", "hour": "h", "hr": "h", "kilogram": "kg", "gram": "g", "milligram": "mg", "pound": "lb", "ounce": "oz",
    "liter": "l", "litre": "l", "milliliter": "ml", "dollar": "usd", "degree": "deg", "sq": "square", "per": "/",
}  # fmt: skip


def same(gold: str, answer: str) -> bool:
    """True if an answer matches the gold one. Texts that cannot be parsed match only if their words do."""
    try:
        wanted = _read(gold)
    except (NotMathematics, RecursionError):
        return bool(_wording(gold)) and _wording(gold) == _wording(answer)
    if wanted.op == "symbol" and _wording(gold) == _wording(answer) and len(wanted.name) == 1:
        return True
    try:
        return _same(wanted, _read(answer))
    except Exception as error:  # a model's text must never fail the episode
        _log.debug("%r, %r: %s", gold, answer, error)
        return False


def _read(text: str) -> Node:
    words = _wording(text)
    if _NO_SOLUTION.fullmatch(words):
        return Node("set")
    return Node("domain", name="R") if _ALL_REALS.fullmatch(words) else tree(text)


def _wording(text: str) -> str:
    """The words of an answer, in lower case; "" if it has other commands or signs."""
    plain = WORDS.sub(r" \g<said> ", characters(text)).replace("\\ ", " ").replace("$", " ")
    if "\\" in plain or re.search(r"[=<>^+*/{}|]", plain):
        return ""
    return " ".join(_NO_LETTER.sub(" ", plain).lower().split())


def _same(gold: Node, answer: Node) -> bool:
    alike = gold.op == answer.op and gold.op in ("set", "row")
    if is_region(gold) and is_region(answer) and not alike:
        return same_region(gold, answer)
    golds, answers = _items(gold), _items(answer)
    if len(golds) != len(answers):
        golds, answers = _once_each(golds), _once_each(answers)
    pair = _point(gold, answers) if len(golds) == 1 else _point(answer, golds)
    if pair is not None:
        point, row = pair
        return _same_item(row, point) if len(golds) == 1 else _same_item(point, row)
    if len(golds) != len(answers):
        return False
    if len(golds) == 1:
        return _same_item(golds[0], answers[0])
    # "a = 2, b = 3" tells more than "2, 3" and may tell it wrongly; x_1 and x_2 are one variable.
    if len(_variables(answers)) > 1 and not _variables(golds):
        return False
    return _matched(golds, answers)


def _items(node: Node) -> list[Node]:
    r"""The answers in a list, a set or a \pm; order does not count."""
    if node.op == "list":
        if node.name != "," and any(part.op == "relation" and part.name != "=" for part in node.args):
            return [node]
        return _bounded([item for part in node.args for item in _items(part)])
    if node.op == "set":
        nested = not node.args or any(part.op == "set" for part in node.args)  # the set of the empty set is not empty
        return [node] if nested else _bounded([item for part in node.args for item in _signs(part)])
    if node.op == "relation" and node.name == "in" and node.args[1].op == "set" and _is_name(node.args[0]):
        return _items(node.args[1])
    return _signs(node)


def _once_each(items: list[Node]) -> list[Node]:
    kept: list[Node] = []
    for item in items:
        if not any(_same_item(other, item) for other in kept):
            kept.append(item)
    return kept


def _bounded(items: list[Node]) -> list[Node]:
    if len(items) > MOST_ITEMS:
        raise NotMathematics("a list that is too long")
    return items


def _signs(node: Node) -> list[Node]:
    r"""The node with each \pm once as plus and once as minus."""
    if node.op == "either":
        return _bounded([signed for inner in _signs(node.args[0]) for signed in (inner, Node("negative", (inner,)))])
    if not node.args:
        return [node]
    parts = [_signs(part) for part in node.args]
    if all(len(part) == 1 for part in parts):
        return [node]
    return _bounded([Node(node.op, args, node.name, node.value) for args in product(*parts)])


def _point(row: Node, items: list[Node]) -> tuple[Node, Node] | None:
    """ "x = 1, y = 2" as a point, and the row to compare it with; None for other forms."""
    bare = _resolved(row)[:1] if row.op == "relation" else [row]
    if not bare or bare[0].op != "row" or bare[0].name != "()" or len(items) != len(bare[0].args):
        return None
    values = {}
    for item in items:
        found = _named(item)
        if found is None or found[0].op != "symbol":
            return None
        values[found[0].name] = found[1]
    if len(values) < len(items):
        return None
    return Node("row", tuple(values[name] for name in sorted(values)), "()"), bare[0]


def _variables(items: list[Node]) -> set[str]:
    """The variables, without subscripts, whose values the items state."""
    return {found[0].name.partition("_")[0] for found in map(_named, items) if found}


def _matched(golds: list[Node], answers: list[Node]) -> bool:
    """True if answers and gold answers can be paired. Equality is transitive, so greedy pairing suffices."""
    left = list(answers)
    for gold in golds:
        found = next((answer for answer in left if _same_item(gold, answer)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _same_item(gold: Node, answer: Node) -> bool:
    if gold.op == "relation" or answer.op == "relation":
        return _same_relation(gold, answer)
    (gold, gold_unit), (answer, unit) = _measured(gold), _measured(answer)
    if gold_unit and unit and gold_unit != unit:
        return False
    if {gold.op, answer.op} == {"matrix", "row"} and "()" in (gold.name, answer.name):
        gold, answer = _column_as_row(gold), _column_as_row(answer)
    if gold.op != answer.op and not (is_expression(gold) and is_expression(answer)):
        return False
    if gold.op in ("row", "matrix"):
        alike = gold.name == answer.name and len(gold.args) == len(answer.args)
        return alike and all(map(_same_item, gold.args, answer.args))
    if gold.op == "set":
        return len(gold.args) == len(answer.args) and _matched(list(gold.args), list(answer.args))
    if is_expression(gold) and is_expression(answer):
        return _same_quantity(gold, answer)
    return gold == answer or (is_region(gold) and is_region(answer) and same_region(gold, answer))


def _column_as_row(node: Node) -> Node:
    """A matrix of one column as a point; anything else unchanged."""
    is_column = node.op == "matrix" and all(len(row.args) == 1 for row in node.args)
    return Node("row", tuple(row.args[0] for row in node.args), "()") if is_column else node


def _measured(node: Node) -> tuple[Node, Counter[str]]:
    """A quantity without its unit, and the unit's words; "million" is not a unit."""
    if node.op != "unit":
        return node, Counter()
    inner, words = node.args[0], node.name.replace("/", " per ").split()
    while words and words[0] in _MULTIPLES:
        factor = Fraction(_MULTIPLES[words.pop(0)])
        inner = Node("multiply", (inner, Node("number", name=str(factor), value=factor)))
    unit: Counter[str] = Counter()
    for word in words:
        name, _, power = word.strip(".,").partition("^")
        name = name.removesuffix("s") if len(name) > 2 else name
        unit.update([_UNITS.get(name, name), *(["square"] * (power == "2")), *(["cubic"] * (power == "3"))])
    return inner, unit


def _same_quantity(gold: Node, answer: Node) -> bool:
    """True if two expressions are equal, also if one of them omits a percent or degree sign."""
    if equal(gold, answer) or _rounds(gold, answer) or _rounds(answer, gold):
        return True
    for mark in ("percent", "degrees"):
        bare_gold, bare_answer = _without(gold, mark), _without(answer, mark)
        if bare_gold and not bare_answer:
            return equal(bare_gold, answer)
        if bare_answer and not bare_gold:
            wanted = exact_value(gold)
            # 0.5 may be a share, so 0.5% is wrong.
            share = mark == "percent" and wanted is not None and abs(wanted) <= 1
            return not share and equal(gold, bare_answer)
    return False


def _without(node: Node, mark: str) -> Node | None:
    if node.op == mark:
        return node.args[0]
    inner = _without(node.args[0], mark) if node.op == "negative" else None
    return Node("negative", (inner,)) if inner else None


def _rounds(exact: Node, decimal: Node) -> bool:
    """True if a decimal of six or more places is an infinite decimal, rounded or cut there."""
    bare = decimal.args[0] if decimal.op == "negative" else decimal
    if not bare.name.replace(".", "").isdigit() or len(bare.name.partition(".")[2]) < ROUNDED_PLACES:
        return False
    known = exact_value(exact)
    if known is not None and 10 ** known.denominator.bit_length() % known.denominator == 0:
        return False  # its decimal ends
    return _near(exact, decimal)


def _near(exact: Node, decimal: Node) -> bool:
    """True if a decimal is a value rounded or cut at its last digit."""
    bare = decimal.args[0] if decimal.op == "negative" else decimal
    if bare.op != "number" or not is_expression(exact) or symbols(exact):
        return False
    with mp.workdps(DIGITS):
        try:
            difference = value(exact, {}, has_i(exact)) - value(decimal, {})
        except Undefined:
            return False
        return bool(abs(difference) < mp.mpf(10) ** -len(bare.name.partition(".")[2]))


# ---- equations and inequalities


def _same_relation(gold: Node, answer: Node) -> bool:
    """At least one of the two is a relation.

    An equation that names a value ("x = 5", "AB = 5") matches that value, in both directions. Any other gold equation
    needs an equation with the same solutions: the sides differ by a constant factor.
    """
    if gold.op != "relation":
        return any(_same_item(gold, found) for found in _resolved(answer))
    stated = _named(gold)
    if answer.op != "relation":
        return stated is not None and _same_item(stated[1], answer)
    if gold.name == answer.name and all(sign == ":" for sign in gold.name.split()):
        return len(gold.args) == len(answer.args) and all(map(_same_item, gold.args, answer.args))
    given = _named(answer)
    if stated and given and stated[0] == given[0] and (not symbols(stated[1]) or _same_item(stated[1], given[1])):
        return _same_item(stated[1], given[1])
    if stated and not symbols(stated[1]) and stated[0].op == "symbol":
        return False  # gold x = 5 matches neither 2x = 10 nor y = 5
    return _equivalent(gold, answer)


def _is_name(node: Node) -> bool:
    """True if a node only names something: x, AB, f(x), f(2), (x, y), sin A."""
    if node.op == "symbol":
        return True
    if node.op in ("row", "list"):
        return all(part.op == "symbol" for part in node.args)
    if node.op == "call":
        return node.name not in ("abs", "floor", "ceil") and all(map(_is_name, node.args))
    if node.op != "multiply":
        return False
    function, argument = node.args
    return _is_name(function) and (_is_name(argument) or argument.op in ("number", "row"))


def _named(relation: Node) -> tuple[Node, Node] | None:
    """Name and value of "name = value" or "value = name"; None for another relation."""
    if relation.op != "relation" or relation.name != "=":
        return None
    left, right = relation.args
    if _is_name(left):
        return left, right
    return (right, left) if _is_name(right) else None


def _resolved(relation: Node) -> list[Node]:
    """The value that a chain of equations gives a name, or the common value of its sides; [] if they differ.

    Approximate decimals of the chain follow, if they are rounded correctly.
    """
    signs = relation.name.split()
    if signs == ["in"] and _is_name(relation.args[0]):
        return [relation.args[1]]
    if any(sign not in ("=", "approx") for sign in signs):
        return []
    parts = list(relation.args)
    end = signs.index("approx") + 1 if "approx" in signs else len(parts)
    exact, about = parts[:end], parts[end:]
    if len(exact) > 1 and _is_name(exact[0]):
        exact = exact[1:]
    elif len(exact) > 1 and _is_name(exact[-1]):
        exact = exact[:-1]
    first = exact[0]
    if any(
        first != side and not (is_expression(first) and is_expression(side) and equal(first, side))
        for side in exact[1:]
    ):
        return []
    bare = [part.args[0] if part.op == "unit" else part for part in about]
    return [exact[-1], *about] if all(_near(first, decimal) for decimal in bare) else []


def _equivalent(gold: Node, answer: Node) -> bool:
    """True if two relations have sides that differ by a constant factor, positive for inequalities."""
    if len(gold.args) != 2 or len(answer.args) != 2 or not all(map(is_expression, (*gold.args, *answer.args))):
        return False
    if symbols(gold) != symbols(answer):
        return False
    sign = gold.name
    if TURNED.get(answer.name) == sign:
        answer = Node("relation", (answer.args[1], answer.args[0]), sign)
    if answer.name != sign or sign not in ("=", "ne", *TURNED):
        return False
    one, other = (Node("add", (r.args[0], Node("negative", (r.args[1],)))) for r in (gold, answer))
    positive = sign in TURNED
    factor: list[Any] = []

    def agree(a: Any, b: Any) -> bool:
        if close(a, 0) or close(b, 0):
            return close(a, 0) and close(b, 0)
        factor.append(a / b)
        return close(factor[0], factor[-1]) and (not positive or factor[-1] > 0)

    return ratio_at_points(one, other, agree) and bool(factor)
