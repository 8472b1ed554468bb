r"""Tokenizes an answer in LaTeX, Unicode or plain text: 1{,}000 and 1\,000, × and \cdot, ² and ^2 are the same.

Spacing, sizes and dollar signs are dropped.
"""

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

LONGEST_NUMBER = 400  # characters; and the largest power of ten in one


class NotMathematics(ValueError):
    """The text is not mathematics that can be compared."""


@dataclass(frozen=True)
class LatexToken:
    """One token; `text` is a command without its backslash, a number as it is written."""

    kind: str  # "number", "letter" (a variable with its subscript), "command", "sign", "words" or "end"
    text: str
    value: Fraction = Fraction(0)  # of a number


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_RAISED = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_LOWERED = re.compile(f"[{''.join(_SUBSCRIPTS)}]+")
_SIGNS = {
    "−": "-", "–": "-", "‐": "-", "×": r"\cdot ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/", "⁄": "/", "∕": "/",
    "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "∪": r"\cup ",
    "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "√": r"\sqrt ", "°": r"^\circ ", "±": r"\pm ", "∓": r"\mp ",
    "≈": r"\approx ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}",
    "⟨": r"\langle ", "⟩": r"\rangle ", "∖": r"\setminus ",
}  # fmt: skip
_GREEK = {chr(code) for code in range(0x3B1, 0x3CA)}

_SPACING = names(
    "left right middle displaystyle textstyle limits mathstrut quad qquad thinspace medspace enspace big Big bigg Bigg bigl bigr "
    "Bigl Bigr biggl biggr Biggl Biggr angle triangle overline vec hat bar overrightarrow ! , ; : > ( ) $"
) | {" "}
_GROUPED = re.compile(
    r"(?<![\d.])([1-9]\d{0,2})((?:(?:,\\!\s*|\{,\}|\\,|\\!|,|[ \u00a0\u2009\u202f](?=\d))\d{3})+)(?!\d|,\d)"
)
_ENVIRONMENT = re.compile(r"\\(begin|end)\s*\{(\w+)\*?\}(?:\{[lcr|]*\})?")
WORDS = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|normal)?|mbox|hbox|mathrm|(?P<bold>mathbf|mathit|boldsymbol|bm)|operatorname\*?)\s*\{(?P<said>[^{}]*)\}"
)
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\s*\{(\d+)\}")
_NUMBER = re.compile(r"(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+(?![A-Za-z]))?")
_TRAILING_DOT = re.compile(r"(?<=\d)\.(?!\d|\\overline)")
_COMMAND = re.compile(r"\\([A-Za-z]+|.)", re.DOTALL)
_RUN = re.compile(r"[A-Za-z]+")
_SUBSCRIPT = re.compile(r"\s*_\s*(?:\{([^{}]*)\}|([A-Za-z0-9]))")
_LETTER_SET = re.compile(r"\s*\{?\s*([A-Z])\s*\}?")
_COMPARISONS = {"<=": "le", ">=": "ge", "!=": "ne", "=<": "le"}
_SAME = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "leq": "le", "leqslant": "le", "geq": "ge", "geqslant": "ge",
    "neq": "ne", "times": "cdot", "ast": "cdot", "varnothing": "emptyset", "dbinom": "binom", "tbinom": "binom", "lt": "<",
    "gt": ">", "lvert": "|", "rvert": "|", "vert": "|", "land": "and", "lor": "or", "wedge": "and", "vee": "or",
    "div": "/", "colon": ":", "lbrace": "{", "rbrace": "}", "lbrack": "[", "rbrack": "]", "operatorname": "",
    "arcsin": "asin", "arccos": "acos", "arctan": "atan", "backslash": "setminus",
}  # fmt: skip
FUNCTIONS = names("sin cos tan cot sec csc sinh cosh tanh asin acos atan log ln lg exp sqrt gcd lcm max min cis")
_NAMES = FUNCTIONS | {"pi", "infty", "arcsin", "arccos", "arctan", "cup", "cap"}
SHORT_WORDS = names(
    "yes no one two six ten odd all any none not the nan inf and or is if of to in at an as by we cm mm km kg mg ml ft yd mi "
    "hr min sec lb oz mph per day out may"
)
_GREEK_NAMES = names(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau upsilon phi "
    "varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell"
)
_SIGN_COMMANDS = ("<", ">", "|", "/", ":", "[", "]", "%")


def characters(text: str) -> str:
    """The text with Unicode signs replaced by their LaTeX form, where they have one."""
    if text.isascii():
        return text
    text = _RAISED.sub(lambda m: "^{" + "".join(_SUPERSCRIPTS[c] for c in m[0]) + "}", text)
    text = _LOWERED.sub(lambda m: "_{" + "".join(_SUBSCRIPTS[c] for c in m[0]) + "}", text)
    return "".join(c if c.isascii() else _SIGNS.get(c) or _character(c) for c in text)


def _character(c: str) -> str:
    if c in _GREEK:
        return f"\\{unicodedata.name(c).rpartition(' ')[2].lower()} "
    if c.isdecimal():
        return str(unicodedata.decimal(c))
    kind = unicodedata.category(c)
    if kind in ("Cf", "Zs"):  # zero-width signs, spaces
        return "" if kind == "Cf" else " "
    plain = unicodedata.normalize("NFKC", c)
    if "⁄" in plain:
        return f" {plain.replace('⁄', '/')}"
    return "".join(_SIGNS.get(p, p) for p in plain)


def tokens(text: str) -> list[LatexToken]:
    """The tokens of an answer, and an "end" token."""
    text = _joined(characters(text))
    found: list[LatexToken] = []
    place = 0
    while place < len(text):
        if text[place].isspace() or text[place] in "~$":
            place += 1
        else:
            new, place = _read(text, place)
            found += new
    return [*found, LatexToken("end", "")]


def _joined(text: str) -> str:
    """The text without trailing dots of numbers, and with the digit groups of numbers joined."""

    def ungrouped(found: re.Match[str]) -> str:
        # The commas of "12,102" separate numbers of a point, interval or set, as in (12,102).
        before = text[: found.start()]
        inside = any(before.count(a) > before.count(b) for a, b in (("(", ")"), ("[", "]"), ("\\{", "\\}")))
        if inside and re.fullmatch(r"(?:,\d{3})+", found[2]):
            return found[0]
        return found[1] + re.sub(r"\D", "", found[2])

    return _TRAILING_DOT.sub(" ", _GROUPED.sub(ungrouped, text)).replace("**", "^")


Read = tuple[list[LatexToken], int]  # tokens, and the place after them


def _read(text: str, place: int) -> Read:
    c, two = text[place], text[place : place + 2]
    if match := _REPEATING.match(text, place) or _NUMBER.match(text, place):
        return [LatexToken("number", match[0], _value(match))], match.end()
    if c == "\\":
        return _read_command(text, place)
    if match := _RUN.match(text, place):
        return _read_letters(text, match)
    if two in _COMPARISONS:
        return [LatexToken("command", _COMPARISONS[two])], place + 2
    if c in "+-*/^_(){}[]<>=|!,;:%&'":
        return [LatexToken("sign", c)], place + 1
    raise NotMathematics(f"{c!r} is no sign of mathematics")


def _read_command(text: str, place: int) -> Read:
    if match := _ENVIRONMENT.match(text, place):
        return [LatexToken("command", f"{match[1]} {match[2]}")], match.end()
    if match := WORDS.match(text, place):
        return _words(match["said"], match["bold"] is not None), match.end()
    match = _COMMAND.match(text, place)
    if match is None:
        raise NotMathematics("a backslash at the end")
    name, end = _SAME.get(match[1], match[1]), match.end()
    if match[1] in _SPACING:
        return [], end
    if name in ("mathbb", "mathcal"):
        letter = _LETTER_SET.match(text, end)
        if letter is None:
            raise NotMathematics("a blackboard letter is missing")
        return [LatexToken("command", f"set {letter[1]}")], letter.end()
    if name in _GREEK_NAMES:
        return _read_variable(text, end, name)
    kind = "sign" if name in _SIGN_COMMANDS else "words" if name in ("and", "or") else "command"
    return [LatexToken(kind, name)], end


def _words(content: str, bold: bool) -> list[LatexToken]:
    """The tokens of a text box: mathematics if it holds a name or a number, else words."""
    content = " ".join(_joined(content).split())
    is_letter = re.fullmatch("[A-Za-z]", content) and (bold or not content.islower())
    if is_letter or re.fullmatch(r"[-\d.,/ ]+", content) or content in FUNCTIONS | {"e", "i", "infinity"}:
        return tokens(content)[:-1]
    return [LatexToken("words", content.lower())] if content else []


def _read_letters(text: str, match: re.Match[str]) -> Read:
    run = match[0]
    if run.lower() in ("infinity", "inf") and len(run) > 3:
        return [LatexToken("command", "infty")], match.end()
    if run in _NAMES:
        return [LatexToken("command", _SAME.get(run, run))], match.end()
    if len(run) <= 3 and run.lower() not in SHORT_WORDS:
        return _read_variable(text, match.start() + 1, run[0])
    # The argument of a function may follow without a space: sinx.
    function = run[:-1]
    if function not in _NAMES:
        return [LatexToken("words", run.lower())], match.end()
    return [LatexToken("command", _SAME.get(function, function))], match.end() - 1


def _read_variable(text: str, place: int, name: str) -> Read:
    if subscript := _SUBSCRIPT.match(text, place):
        name += "_" + re.sub(r"\s", "", subscript[1] or subscript[2] or "")
        place = subscript.end()
    return [LatexToken("letter", name)], place


def _value(number: re.Match[str]) -> Fraction:
    if len(number[0]) > LONGEST_NUMBER:
        raise NotMathematics("a number is too long")
    if number.re is _REPEATING:
        fixed, period = number[2], number[3]
        start = Fraction(int((number[1] or "0") + fixed), 10 ** len(fixed))
        return start + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
    mantissa, _, power = number[0].lower().partition("e")
    if abs(int(power or 0)) > LONGEST_NUMBER:
        raise NotMathematics("a number is too long")
    return Fraction(mantissa) * Fraction(10) ** int(power or 0)
