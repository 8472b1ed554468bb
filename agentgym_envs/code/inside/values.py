"""Values as JSON and back, and frames for them: the protocol of grader and submission.

Only plain data is sent, and rebuilt from its content: the grader never compares objects whose methods the submission
wrote. Any other object stays in its process and is sent as a reference.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict, deque

TYPE_CHECKING = False  # typing takes longer to import than all the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LIMIT = 32 << 20  # bytes of one frame
NOT_STARTED = 97  # the grader's exit code in an unsuitable sandbox, before any submission runs
NAME = "submission"  # the module that a submission's code makes

_LARGE = 1 << 62


def _clock(value: Any) -> list[Any]:
    """A time of day in parts; [None] for one with a time zone, which is sent as a reference."""
    if value.tzinfo is not None:
        return [None]
    return [value.hour, value.minute, value.second, value.microsecond]


_SERIES: dict[str, Any] = {kind.__name__: kind for kind in (list, tuple, set, frozenset, deque)}
_PAIRS: dict[str, Any] = {kind.__name__: kind for kind in (dict, Counter, OrderedDict)}
_BASES: tuple[Any, ...] = (int, float, str, tuple, list, Counter, OrderedDict, dict, set, frozenset)
_TYPES = (int, float, bool, str, bytes, complex, list, tuple, dict, set, frozenset, type(None))
_BY_MODULE = {  # less common types: how each is taken apart; its constructor builds it again
    "decimal.Decimal": lambda value: [str(value)],
    "fractions.Fraction": lambda value: [value.numerator, value.denominator],
    "datetime.date": lambda value: [value.year, value.month, value.day],
    "datetime.timedelta": lambda value: [value.days, value.seconds, value.microseconds],
    "array.array": lambda value: [value.typecode, list(value)],
    "builtins.complex": lambda value: [value.real, value.imag],
    "builtins.range": lambda value: [value.start, value.stop, value.step],
    "datetime.time": _clock,
    "datetime.datetime": lambda value: [value.year, value.month, value.day, *_clock(value)],
}


class Foreign(Exception):
    """A frame is not a value: its writer broke the protocol."""


def encode(value: Any, refer: Callable[[Any], Any]) -> Any:
    """A value as JSON; `refer` makes the reference of an object that is not plain data."""
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if kind is int:
        return value if -_LARGE < value < _LARGE else ["int", hex(value)]
    if _SERIES.get(kind.__name__) is kind:
        return [kind.__name__, [encode(item, refer) for item in value]]
    if _PAIRS.get(kind.__name__) is kind:
        return [kind.__name__, [[encode(key, refer), encode(item, refer)] for key, item in value.items()]]
    if kind in (bytes, bytearray):
        return [kind.__name__, value.hex()]
    if kind is type and value in _TYPES:
        return ["type", value.__name__]
    by_module = _BY_MODULE.get(f"{kind.__module__}.{kind.__qualname__}")
    if by_module is not None:
        parts = by_module(value)
        return refer(value) if None in parts else [f"{kind.__module__}.{kind.__qualname__}", parts]
    # Named tuples as tuples, IntEnums as ints, StrEnums as their text, defaultdicts as dicts; anything else as a reference.
    base = next((base for base in _BASES if isinstance(value, base)), None)
    plain = value if base is None else str.__str__(value) if base is str else base(value)
    return encode(plain, refer) if type(plain) is base else refer(value)


def decode(data: Any, resolve: Callable[[list[Any]], Any]) -> Any:
    """The reverse of `encode`; `resolve` gives the object of a reference."""
    try:
        return _decode(data, resolve)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise Foreign(f"not a value: {error}") from None
    except ArithmeticError as error:  # decimal.InvalidOperation, a fraction over 0
        raise Foreign(f"not a value: {type(error).__name__}") from None


def _decode(data: Any, resolve: Callable[[list[Any]], Any]) -> Any:
    if type(data) is not list:
        if type(data) is dict:
            raise ValueError("a bare object")
        return data
    tag, content = data
    if tag in _SERIES:
        return _SERIES[tag](_decode(item, resolve) for item in content)
    if tag in _PAIRS:
        return _PAIRS[tag]({_decode(key, resolve): _decode(item, resolve) for key, item in content})
    if tag == "int":
        return int(content, 16)
    if tag in ("bytes", "bytearray"):
        return bytes.fromhex(content) if tag == "bytes" else bytearray.fromhex(content)
    if tag == "type":
        return {kind.__name__: kind for kind in _TYPES}[content]
    if tag in _BY_MODULE:
        module, _, name = tag.partition(".")
        return getattr(__import__(module), name)(*content)
    return resolve(data)


def give_back(old: Any, new: Any) -> None:
    """Update a container in place, with the containers inside it, to what a call left in its copy."""
    if type(old) is not type(new):
        return
    if isinstance(old, list):
        old[:] = [*map(_same_or, old, new), *new[len(old) :]]
    elif isinstance(old, dict):
        kept = {key: _same_or(old[key], value) if key in old else value for key, value in new.items()}
        old.clear()
        old.update(kept)
    elif isinstance(old, set):
        old.clear()
        old.update(new)
    elif isinstance(old, bytearray):
        old[:] = new
    elif isinstance(old, deque):
        old.clear()
        old.extend(new)
    elif isinstance(old, tuple):
        for a, b in zip(old, new, strict=False):
            give_back(a, b)


def _same_or(old: Any, new: Any) -> Any:
    if type(old) is type(new) and isinstance(old, list | dict | set | bytearray | deque | tuple):
        give_back(old, new)
        if old == new:
            return old
    return new


def can_change(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(can_change(item) for item in value)
    return isinstance(value, list | dict | set | bytearray | deque | defaultdict)


def frame_of(message: Any) -> bytes:
    """A message as JSON, preceded by its length (4 bytes, big endian)."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > LIMIT:
        raise ValueError(f"a value of {len(body)} bytes is more than can be passed on ({LIMIT})")
    return len(body).to_bytes(4, "big") + body
