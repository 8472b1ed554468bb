r"""Parses an answer into a tree. "x = 1 or x = 2" is a list of two relations.

list      relations separated by commas, "and", "or"
relation  unions separated by = < \le \ne \in \approx :
union     sums separated by \cup \cap \setminus
sum       products separated by + - \pm
"""

from dataclasses import dataclass
from fractions import Fraction

from agentgym_envs.math.latex_tokens import FUNCTIONS, LatexToken, NotMathematics, names, tokens

DEEPEST = 40  # brackets within brackets


@dataclass(frozen=True)
class Node:
    """A node: `op` is "number", "symbol", "constant", "add", "multiply", "divide", "power", "call", "list", "relation", ...

    `name` is that of a symbol or function; a relation's signs, separated by spaces; a row's brackets; a number's text.
    """

    op: str
    args: "tuple[Node, ...]" = ()
    name: str = ""
    value: Fraction = Fraction(0)


_RELATIONS = ("=", "<", ">", "le", "ge", "ne", "in", "approx", ":")
_BASES = dict(zip(["two", "three", "four", "five", "six", "seven", "eight", "nine"], "23456789", strict=True))
_SETS = {"cup": "union", "cap": "intersection", "setminus": "without"}
_MATRICES = ("pmatrix", "bmatrix", "Bmatrix", "matrix", "smallmatrix", "array")
_STARTS = ("frac", "sqrt", "binom", "pi", "lfloor", "lceil", "imath", "exp", "{", "infty")
NO_UNIT = names(
    "not or and is if than more less least most about except never no none isn't wrong false either maybe perhaps to over under "
    "above below between fewer greater plus minus times half other but true answer"
)


def tree(text: str) -> Node:
    reader = _Reader(tokens(text))
    found = reader.listed()
    if reader.now.kind != "end":
        raise NotMathematics(f"{reader.now.text!r} in the middle")
    return found


class _Reader:
    """A recursive descent parser; `place` is the index of the next token."""

    def __init__(self, found: list[LatexToken]):
        self.tokens, self.place, self.depth, self.bars = found, 0, 0, 0

    @property
    def now(self) -> LatexToken:
        return self.tokens[self.place]

    def at(self, *texts: str) -> bool:
        return self.now.kind in ("sign", "command") and self.now.text in texts

    def skip(self, *texts: str) -> bool:
        """Take the next token if it is one of these."""
        found = self.at(*texts)
        self.place += found
        return found

    def take(self) -> LatexToken:
        token = self.now
        if token.kind == "end":
            raise NotMathematics("it ends too early")
        self.place += 1
        return token

    def need(self, *texts: str) -> str:
        if not self.at(*texts):
            raise NotMathematics(f"{texts[0]!r} is missing")
        return self.take().text

    # ---- lists and relations

    def listed(self) -> Node:
        """One relation, or several as a "list" named by what separates them."""
        items, joint = [self.relation()], ","
        while self.joint():
            while word := self.joint():
                self.place += 1
                joint = word if word != "," else joint
            items.append(self.relation())
        return items[0] if len(items) == 1 else Node("list", tuple(items), joint)

    def joint(self) -> str:
        if self.at(",", ";"):
            return ","
        return self.now.text if self.now.kind == "words" and self.now.text in ("and", "or") else ""

    def relation(self) -> Node:
        parts, signs = [self.union()], []
        while self.at(*_RELATIONS):
            signs.append(self.take().text)
            parts.append(self.union())
        return parts[0] if not signs else Node("relation", tuple(parts), " ".join(signs))

    def union(self) -> Node:
        found = self.measured()
        while self.at(*_SETS):
            found = Node(_SETS[self.take().text], (found, self.measured()))
        return found

    # ---- sums and products

    def measured(self) -> Node:
        found = self.sum()
        words: list[str] = []
        while self.now.kind == "words" and not self.joint():
            words += self.take().text.split()
            if self.at("^"):
                words[-1] += f"^{self._raised().value}"
            if self.at("/") and self.tokens[self.place + 1].kind in ("words", "letter"):
                self.place += 1
                words += ["/", *self.take().text.split()]
        if not words:
            return found
        if len(words) > 4 or any(word.strip(".,") in NO_UNIT or any(c.isdigit() for c in word[:1]) for word in words):
            raise NotMathematics("words that are no unit")
        return Node("unit", (found,), " ".join(words))

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > DEEPEST:
            raise NotMathematics("too deep")
        found: Node | None = None
        while found is None or self.at("+", "-", "pm", "mp"):
            sign = self.take().text if self.at("+", "-", "pm", "mp") else ""
            term = self.product()
            if sign == "-":
                term = Node("negative", (term,))
            elif sign in ("pm", "mp"):
                term = Node("either", (term,))
            found = term if found is None else Node("add", (found, term))
        self.depth -= 1
        return found

    def product(self) -> Node:
        """Factors with *, / or nothing between them; a fraction right after a whole number is added to it."""
        found, before = self.factor(), self.tokens[self.place - 1]
        while True:
            if self.skip("*", "cdot"):
                found = Node("multiply", (found, self.signed()))
            elif self.skip("/"):
                found = Node("divide", (found, self.signed()))
            elif self._is_factor():
                found = self._beside(found, before)
            else:
                return found
            before = self.tokens[self.place - 1]

    def _beside(self, found: Node, before: LatexToken) -> Node:
        """The product of adjacent factors, or a mixed number."""
        whole = found.op == "number" and found.value.denominator == 1 and before.kind == "number"
        fraction = self.at("frac")
        factor = self.factor()
        if whole and fraction and factor.op == "divide" and all(part.op == "number" for part in factor.args):
            return Node("add", (found, factor))
        if factor.op == "number" and whole and self.at("/"):
            self.place += 1
            below = self.factor()
            if below.op == "number":
                return Node("add", (found, Node("divide", (factor, below))))
            raise NotMathematics("two numbers side by side")
        if factor.op == "number" and self.tokens[self.place - 1].kind == "number":
            raise NotMathematics("a number right behind something else")
        return Node("multiply", (found, factor))

    def _is_factor(self) -> bool:
        token = self.now
        if token.kind in ("number", "letter"):
            return True
        if token.kind == "sign":
            return token.text in ("(", "[", "{") or (token.text == "|" and not self.bars)
        starts = token.text in FUNCTIONS or token.text in _STARTS or token.text.startswith("begin")
        return token.kind == "command" and starts

    def signed(self) -> Node:
        return Node("negative", (self.factor(),)) if self.skip("-") else self.factor()

    def factor(self) -> Node:
        found = self.atom()
        while True:
            if self.at("^"):
                found = self._power(found)
            elif self.skip("!"):
                found = Node("factorial", (found,))
            elif self.skip("%"):
                found = Node("percent", (found,))
            elif self.at("degree") or (self.now.kind == "words" and self.now.text in ("degrees", "degree", "deg")):
                self.place += 1
                found = Node("degrees", (found,))
            elif self.at("_") and found.op == "number":
                found = self._based(found.name)
            else:
                return found

    def _power(self, base: Node) -> Node:
        for form in (("^", "circ"), ("^", "{", "circ", "}")):
            if form == tuple(token.text for token in self.tokens[self.place : self.place + len(form)]):
                self.place += len(form)
                return Node("degrees", (base,))
        return Node("power", (base, self._raised()))

    def _raised(self) -> Node:
        self.need("^")
        minus = self.skip("-")
        found = self.atom()
        found = self._power(found) if self.at("^") else found
        return Node("negative", (found,)) if minus else found

    # ---- atoms

    def atom(self) -> Node:
        token = self.now
        if token.kind == "number":
            self.place += 1
            return Node("number", name=token.text, value=token.value)
        if token.kind == "letter":
            self.place += 1
            constant = token.text in ("e", "i")
            return Node("constant" if constant else "symbol", name=token.text)
        if token.kind == "words":
            raise NotMathematics("words")
        if self.at("(", "[", "]"):
            return self._bracketed()
        if self.skip("|"):
            self.bars += 1
            inside = self.sum()
            self.need("|")
            self.bars -= 1
            return Node("call", (inside,), "abs")
        if token.kind == "sign" and token.text == "{":
            self.place += 1
            inside, bars = self._inside()
            if self.skip("choose"):
                inside = Node("binomial", (inside, self.sum()))
            self.bars = bars
            self.need("}")
            return inside
        return self._command()

    def _inside(self) -> tuple[Node, int]:
        """The content of brackets, in which a new | opens a value, and the open ones outside."""
        bars, self.bars = self.bars, 0
        return self.listed(), bars

    def _command(self) -> Node:
        name = self.take().text
        if name in FUNCTIONS and name != "sqrt":
            return self._function(name)
        if name == "sqrt":
            degree = Node("number", name="2", value=Fraction(2))
            if self.skip("["):
                degree = self.sum()
                self.need("]")
            return Node("root", (self._argument(split=False), degree))
        if name in ("frac", "binom"):
            top, bottom = self._argument(), self._argument()
            return Node("divide" if name == "frac" else "binomial", (top, bottom))
        if name in ("pi", "infty"):
            return Node("constant", name=name)
        if name in ("lfloor", "lceil"):
            inside = self.sum()
            self.need("rfloor" if name == "lfloor" else "rceil")
            return Node("call", (inside,), "floor" if name == "lfloor" else "ceil")
        if name == "langle":
            items = self.listed()
            self.need("rangle")
            return Node("row", items.args if items.op == "list" else (items,), "()")
        if name == "emptyset" or (name == "{" and self.skip("}")):
            return Node("set")
        if name == "{":
            items = self.listed()
            if self.take() != LatexToken("command", "}"):
                raise NotMathematics("a set that is not closed")
            return Node("set", items.args if items.op == "list" else (items,))
        if name.startswith("set "):
            return Node("domain", name=name[4:])
        if name.startswith("begin "):
            return self._matrix(name[6:])
        raise NotMathematics(f"{name!r} cannot be compared")

    def _based(self, digits: str) -> Node:
        """A number in a base, 101_2; it equals only the same digits in the same base."""
        self.need("_")
        braced = self.skip("{")
        base = self.take().text
        if braced:
            self.need("}")
        return Node("based", name=f"{digits.lstrip('0')}_{_BASES.get(base, base)}")

    def _bracketed(self) -> Node:
        """(x), a point, or an interval. The French ]1, 2[ is (1, 2)."""
        opened = self.take().text
        inside, self.bars = self._inside()
        closed = self.need(")", "]", "[")
        kind = {"(": "(", "[": "[", "]": "("}[opened] + {")": ")", "]": "]", "[": ")"}[closed]
        if inside.op == "list" and inside.name == ",":
            return Node("row", inside.args, kind)
        if kind not in ("()", "[]") or inside.op == "list":
            raise NotMathematics("brackets that do not fit")
        return inside

    def _function(self, name: str) -> Node:
        r"""A function with power and base before its argument: \sin^2 x, \log_2 8."""
        base: tuple[Node, ...] = ()
        power: Node | None = None
        while self.at("^", "_"):
            if self.at("^"):
                power = self._raised()
            else:
                self.place += 1
                base = (self._argument(),)
        if self.at("(", "{"):
            argument = self.atom()
        else:  # adjacent factors up to the next function or bracket
            argument = self.factor()
            while self._is_factor() and not self.at(*FUNCTIONS - {"sqrt"}, "(", "[", "begin"):
                argument = Node("multiply", (argument, self.factor()))
        if name in ("sin", "cos", "tan") and power and power.op == "negative" and power.args[0].value == 1:
            return Node("call", (argument,), f"a{name}")
        arguments = argument.args if argument.op in ("row", "list") else (argument,)
        call = Node("call", (*arguments, *base), name)
        return call if power is None else Node("power", (call, power))

    def _argument(self, split: bool = True) -> Node:
        r"""A command's argument, in braces or a single sign: \frac12 is a half."""
        token = self.now
        if token.kind == "number" and split and len(token.text) > 1 and token.text.isdigit():
            self.tokens[self.place] = LatexToken("number", token.text[1:], Fraction(token.text[1:]))
            return Node("number", name=token.text[0], value=Fraction(token.text[0]))
        return self.atom()

    def _matrix(self, kind: str) -> Node:
        if kind not in _MATRICES:
            raise NotMathematics(f"{kind} cannot be compared")
        rows: list[Node] = []
        while not self.at(f"end {kind}"):
            cells = [self.sum()]
            while self.skip("&"):
                cells.append(self.sum())
            rows.append(Node("row", tuple(cells), "()"))
            self.skip("\\")
        self.need(f"end {kind}")
        return Node("matrix", tuple(rows))
