"""Statements that fail, of many forms: code that reads the tests before they run cannot look for a single one."""

import random

_FORMS = (
    *("assert sorted({a}) == {a}", "assert sum({a}) < max({a})", "assert {a}.index({least}) == 0", "assert not {a}"),
    *("raise ValueError({a})", "raise AssertionError({least})", "int('{a}')", "dict({a})", "len({least})"),
    *("{a}[{least}]", "{a}.remove({more})", "{{}}[{least}]", "{least} // (0 * {more})", "next(iter([]), *{a})"),
)


def failing(rng: random.Random) -> str:
    """A statement of one line that raises in any Python 3."""
    numbers = sorted(rng.sample(range(10, 100), 4), reverse=True)
    return rng.choice(_FORMS).format(a=numbers, least=numbers[-1], more=numbers[0] + 1)
