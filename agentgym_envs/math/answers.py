r"""Finds the answer in a model's text, and compares numbers.

The answer is the number right after the last mark (`####`, `\boxed{}`, "answer is", "answer:"), else the last number.
Text before the last correction ("wait,", "actually,", "I mean") is ignored if a number follows it. A number that is
denied, only bounded, or continues as an alternative, a list, a range, a time or an unfinished calculation is no answer.

Numbers are exact fractions: 0.5, 1/2, .50 and \frac{1}{2} are equal, 0.33 and 1/3 are not. Units, currency and percent
signs are ignored, so "$1,200 a month" is 1200 and "50%" is 50; "2 million" is 2000000.
"""

import re
import unicodedata
from fractions import Fraction
from typing import Literal

from agentgym.tools.text_forms import spoken

LONGEST_NUMBER = 300  # characters, and the largest power of ten; longer ones are slow to compare
LONGEST_ANSWER = 500  # characters read of a stated answer

# ---- numbers: 18  1,200  0.5  .5  -3  -$3  3/4  1 3/4  1.5e3  1.5 x 10^3
# More groups than a number may have; without a bound, a long list is read again to its end from each of its numbers.
_WHOLE = r"(?:\d{1,3}(?:,\d{2,3}){0,99},\d{3}(?!\d)|\d+)"
_DECIMAL = rf"(?:{_WHOLE}(?:\.\d+)?|\.\d+)"
_POWER = r"(?:[eE](?P<e>[-+]?\d+)|\s?(?:\*|[xX])\s?10(?:\^|\*\*)[{(]?(?P<ten>[-+]?\d+)[})]?)"
_UNSIGNED = (
    rf"(?:(?:(?P<whole>{_WHOLE})\s{{1,3}}(?:and\s)?)?(?P<top>{_DECIMAL})\s?/\s?(?P<bottom>{_DECIMAL})(?![\d/]|\.\d)"
    rf"|(?P<plain>{_DECIMAL}){_POWER}?)"
)
# In running text the minus of "10 - 3" or of the list item "- 3 apples" is not a sign; before a stated answer it is.
_ANYWHERE = re.compile(rf"(?<![A-Za-z\d])(?:(?<![\d)%])(?<![\d)%]\s)(?P<sign>[-+])[$€£¥]?)?(?<![A-Za-z]){_UNSIGNED}")
_LEADING = re.compile(rf"[^A-Za-z\d.\n]*?(?:(?P<sign>[-+])\s*(?:[$€£¥]\s*)?)?{_UNSIGNED}")
_UNIT = (
    r"(?:hours?|hrs?|h|minutes?|mins?|min|feet|foot|ft|inch(?:es)?|in|pounds?|lbs?|ounces?|oz|dollars?|cents?|weeks?|days?|years?"
    r"|months?|kg|grams?|g|km|meters?|m|cm|yards?|')"
)
# A number continues as something else: "3 * 4", "12-15", "3:30", "10,5", "5 6", "5 or 6", "5x", "5 feet 6".
_GOES_ON = re.compile(
    r"\s*%?\s*[-+*/^:xX=]\s*[$(]?\.?\d|,\s*\d| \d|\.{1,3}\d|_\d|\)?\(\d|[xX]\b|\s*[+²³⁰¹⁴-⁹π√±;|]|\s*(?:pi|sqrt|if|\+-|pm)\b"
    r"|[^\n.!]{0,20}?(?:\bor\b|,\s*(?:maybe|perhaps|possibly)\b)|\s*(?:to|and|through)\s+[$]?\d"
    rf"|\s*{_UNIT}(?:\s*(?:,|and)?\s+|\s*)\d",
    re.IGNORECASE,
)
_MULTIPLE = re.compile(r"\s*(?:(hundred|thousand|million|billion|trillion)\b|(k)\b)", re.IGNORECASE)
_MULTIPLES = {"hundred": 10**2, "thousand": 10**3, "k": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_UP_TO_EQUALS = re.compile(r"(?:[^A-Za-z\n=]*|[^A-Za-z\d\n=]*[A-Za-z]\s*)=")  # "9 * 2 =", "x ="
_NOT_EXACT = re.compile(r"\s*(?:!=|[^A-Za-z\d\n]*[<>≤≥≠√±])")

# ---- where a text states its answer
_HEADING = re.compile(r"\d{1,2}[.)]\s+[A-Z*]")  # of a step: "#### 2. Money"
_HASHES = re.compile(r"####\s*((?:(?!####)[^\n])*)")
_MARK = re.compile(
    r"####|boxed\s*\{|\banswers?\b\**\s*(?:(?:is|are|equals|(?:should|would|must|will) be)\b(?!n't)|[:=])\s*:?",
    re.IGNORECASE,
)
_CORRECTION = re.compile(
    r"\b(?:(?:wait|actually|sorry|oops)(?=\s*[,.!:—-])|no,|correction\b|i mean\b|scratch that\b|my mistake\b)",
    re.IGNORECASE,
)
_UNSAID = re.compile(r"(?:n't|\bnot|\bnever|\bif|\bunless|\bwhether|\bsuppose)\b[^.!?\n]{0,40}$", re.IGNORECASE)
_OR = re.compile(r"\b(?:or|either)\W{1,3}(?:(?:maybe|perhaps|the|final|\\)\W*){0,3}$", re.IGNORECASE)
_DENIED = re.compile(r"(?:n't|\bnot|cannot(?: be)?|rather than|instead of|anything but|except)\s+[$]?$", re.IGNORECASE)
_BOUNDED = re.compile(
    r"(?:at least|at most|(?:more|less|fewer|greater) than|up to|\bover|\bunder|\bbetween|\bfrom|\bone of)\s+[$]?$|[<>≤≥]=?\s*[$]?$",
    re.IGNORECASE,
)
_LABEL = re.compile(r"[A-Za-z ]+[:=]\s*")  # "Total: 5"
# The last number of a text is one of several: "5 or 6", "5 to 6", "between 5 and 6", "4, 5, 6", "4 5 6", "3:30".
_AFTER_OTHERS = re.compile(
    r"\d[^\n.\d]{0,25}\bor\b[^\n.\d]{0,25}$|\d\s+to\s+[$]?$|\b(?:between|from)\s[^\n]{1,20}(?:and|to)\s+[$]?$|\d[:/._]$"
    r"|\d(?:,\s*|\s+)\d[\d.,]*(?:,\s*|\s+)(?:and\s+|or\s+)?[$]?$",
    re.IGNORECASE,
)
_EITHER = re.compile(r"\beither\b[^\n.]*$")
_BEFORE = 60  # characters of context before a number

# ---- other ways of writing the same characters
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_CHARACTERS = str.maketrans(dict(zip("−–﹣－，．／⁄＄×·⋅∙÷", "----,.//$****/", strict=True)))
_THIN_SPACE = re.compile(r"(?<=\d)(?:\\[,!; ]|\{,\}|[\u00a0\u2009\u202f_])(?=\d{3})")
_WORDS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_FRAC = re.compile(r"\\[dtc]?frac\s*(?:\{\s*+([^{}]{1,40}?)\s*\}|(\d))\s*(?:\{\s*+([^{}]{1,40}?)\s*\}|(\d))")
_LATEX_SPACE = re.compile(r"\\(?:[()\[\],;:! ]|left\b|right\b|quad\b)")
_NEGATIVE = re.compile(r"(?<![\d)%])(?<![\d)%]\s)\b(?:minus|negative)\s+(?=[$]?\.?\d)", re.IGNORECASE)
_ARROW = re.compile(r"(?<![-=])[-=]+>")
# Not bounds: "<answer>18</answer>", and a line of a quotation.
_TAG = re.compile(r"</?[A-Za-z][^<>\n]{0,40}>|^[ \t]*>(?=[ \t])", re.MULTILINE)
_TIMES = re.compile(r"(?<=\d)\s*[xX]\s*(?=[$]?\d)")
_CURRENCY_CODE = re.compile(r"\b(?:US\$|USD|EUR|GBP|Rs\b\.?)(?=\s?\d)")


def number_of(answer: str) -> Fraction | None:
    """The number that an answer states, or None.

    The answer must begin with its number, apart from signs and currency: "18 dollars in 5 days" is 18, "about 18" is
    None. In "9 * 2 = 18" and "x = 18" the number follows the last equals sign.
    """
    return _number_of(_plain(answer))


def stated_answer(text: str) -> Fraction | None:
    """The number that a text marks as its answer, or None; see the module. Thoughts are ignored (`spoken`)."""
    stated = _stated(_last_said(_plain(spoken(text))))
    return stated if isinstance(stated, Fraction) else None


def final_answer(text: str) -> Fraction | None:
    """The number that a text marks as its answer (`stated_answer`), else its last number, else None."""
    text = _last_said(_plain(spoken(text)))
    stated = _stated(text)
    if stated is not None:
        return stated if isinstance(stated, Fraction) else None
    numbers = [m for m in _ANYWHERE.finditer(text) if not _DENIED.search(_before(text, m.start()))]
    if not numbers:
        return None
    before = _before(text, numbers[-1].start())
    return None if any(form.search(before) for form in (_BOUNDED, _AFTER_OTHERS, _EITHER)) else _value(numbers[-1])


def hashes_answer(text: str) -> bool:
    """True if a text gives its answer in the requested form, `#### x` with x a number."""
    found = _HASHES.findall(_plain(spoken(text)))
    return bool(found) and _number_of(found[-1]) is not None


def _last_said(text: str) -> str:
    """The text after the last correction that is followed by a number, else the whole text."""
    last_digit = next((place for place in range(len(text) - 1, -1, -1) if text[place].isdigit()), -1)
    corrections = [found.end() for found in _CORRECTION.finditer(text) if found.end() <= last_digit]
    return text[corrections[-1] :] if corrections else text


def _stated(text: str) -> Fraction | Literal[False] | None:
    """The number after the last mark of a plain text; False if it is not an answer, None if no mark has a number."""
    end, denied, last_line = len(text), False, text.rstrip().rfind("\n")
    for mark in reversed(list(_MARK.finditer(text))):
        start, end_of_mark = mark.start(), mark.end()
        line, _, below = text[end_of_mark:end].lstrip().partition("\n")
        content = _boxed(text[end_of_mark:end]) if mark[0].endswith("{") else line[:LONGEST_ANSWER]
        before = _before(text, start)
        end = start
        if mark[0] == "####" and _HEADING.match(line) and re.search(r"\d", below):
            continue
        if _UNSAID.search(before) and mark[0][0] in "aA":
            denied = denied or bool(re.search(r"\d", content))
            continue
        found = _said(content) if mark[0][0] in "aA" else _marked(content)
        if found is None and end_of_mark > last_line and content.strip() and mark[0][0] not in "aA":
            return False
        if found is not None:
            return False if _OR.search(before.rstrip("\\")) else found
    return False if denied else None


def _marked(content: str) -> Fraction | Literal[False] | None:
    """The number that follows a mark, perhaps after a label; None if something else follows."""
    label = _LABEL.match(content)
    content = content[label.end() :] if label else content
    if _leading(content) is None:
        return None
    value = None if _NOT_EXACT.match(content) else _number_of(content)
    return False if value is None else value


def _said(content: str) -> Fraction | Literal[False] | None:
    """The first number of a sentence that is not denied; None without a number."""
    if _leading(content):
        return _marked(content)
    for number in _ANYWHERE.finditer(content):
        before = _before(content, number.start())
        if _DENIED.search(before):
            continue
        if _BOUNDED.search(before) or re.search(r"\beither\b", before):
            return False
        value = _number_of(content[number.start() :])
        return False if value is None else value
    return False if re.search(r"\d", content) else None


def _before(text: str, place: int) -> str:
    return text[max(0, place - _BEFORE) : place]


def _boxed(text: str) -> str:
    r"""The content of `\boxed{` up to its closing brace, with inner braces balanced; "" if it is not closed."""
    depth = 1
    for end in range(min(len(text), LONGEST_ANSWER)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[:end]
    return ""


def _leading(answer: str) -> re.Match[str] | None:
    """The number at the beginning of a plain answer, or after its last equals sign."""
    answer = answer[:LONGEST_ANSWER]
    while match := _UP_TO_EQUALS.match(answer):
        answer = answer[match.end() :]
    return _LEADING.match(answer)


def _number_of(answer: str) -> Fraction | None:
    match = _leading(answer)
    if match is None:
        return None
    multiple = _MULTIPLE.match(match.string, match.end())
    if _GOES_ON.match(match.string, (multiple or match).end()) or (value := _value(match)) is None:
        return None
    return value * _MULTIPLES[(multiple[1] or multiple[2]).lower()] if multiple else value


def _value(match: re.Match[str]) -> Fraction | None:
    """The exact value of a match; None if it is out of bounds or divides by zero."""
    if len(match[0]) > LONGEST_NUMBER:
        return None
    if match["plain"] is not None:
        power = int(match["e"] or match["ten"] or 0)
        if abs(power) > LONGEST_NUMBER:
            return None
        value = _fraction(match["plain"]) * Fraction(10) ** power
    else:
        bottom = _fraction(match["bottom"])
        if bottom == 0:
            return None
        value = _fraction(match["whole"] or "0") + _fraction(match["top"]) / bottom
    return -value if match["sign"] == "-" else value


def _fraction(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))


def _plain(text: str) -> str:
    """The text with LaTeX, digits of other scripts and vulgar fractions converted to ASCII."""
    if not text.isascii():
        text = _NOT_ASCII.sub(_plain_character, text).translate(_CHARACTERS)
    if ">" in text:
        text = _TAG.sub(" ", _ARROW.sub(" → ", text))
    text = _NEGATIVE.sub("-", _CURRENCY_CODE.sub("$", _THIN_SPACE.sub("", text)))
    text = _TIMES.sub(" * ", text)
    if "\\" not in text:
        return text
    text = re.sub(r"\\(?:times|cdot)\b", "*", _WORDS.sub(r" \1 ", text))
    text = _FRAC.sub(lambda m: f"{_gap(m)}{m[1] or m[2]}/{m[3] or m[4]}", text)
    return _LATEX_SPACE.sub(" ", text).replace("\\", "")


def _plain_character(found: re.Match[str]) -> str:
    character = found[0]
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    if unicodedata.category(character) == "Cf":  # zero-width signs
        return ""
    parts = unicodedata.decomposition(character).split()
    if parts[:1] == ["<fraction>"]:
        return _gap(found) + "".join(chr(int(code, 16)) for code in parts[1:])
    return character


def _gap(fraction: re.Match[str]) -> str:
    """A space if a fraction follows a digit, so 1½ is one and a half, not eleven halves."""
    start = fraction.start()
    return " " if start and fraction.string[start - 1].isdecimal() else ""
