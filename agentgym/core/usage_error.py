"""Usage errors of the command line, with suggestions for misspelt words."""

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator

from agentgym.core.tracebacks import place_of, text_of_error

_WORD = re.compile(r"[^\W_]+")


class UsageError(Exception):
    """A mistake in one line: the command prints it and ends with exit code 2."""


@contextlib.contextmanager
def usage_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Errors of these kinds become usage errors with the same message."""
    try:
        yield
    except kinds as error:
        raise UsageError(str(error)) from error


@contextlib.contextmanager
def making(id: str) -> Iterator[None]:
    """Turn an exception of an environment's own code, as it is made or lists its tasks, into a ValueError that says where.

    Errors of kinds that name a mistake stay, as do those of this package, such as a server's that does not answer.
    """
    try:
        yield
    except (ValueError, TypeError, ImportError, OSError, UsageError):
        raise
    except Exception as error:
        if not place_of(error):
            raise
        raise ValueError(f"{id}: {unmade(error)}") from error


def unmade(error: Exception) -> str:
    """Why an environment cannot be made, and the line of its code, if it is its own."""
    place = place_of(error)
    return f"cannot be made: {type(error).__name__}: {text_of_error(error)}{f' ({place})' if place else ''}"


def nearest(word: object, known: Iterable[object]) -> str:
    """ ": did you mean X?", or "" if no known word is near."""
    names = [str(name) for name in known]
    # A longer or shorter form of a word is nearer than one that looks alike: evaluate means eval, not validate.
    begun = [name for name in names if len(name) > 2 and str(word).startswith(name)]
    begun += [name for name in names if len(str(word)) > 2 and name.startswith(str(word))]
    near = begun or more_words(str(word), names)
    if names and not near:
        near = difflib.get_close_matches(str(word), [closest(str(word), names)], 1, 0.6)
    return f": did you mean {near[0]}?" if near else ""


def closest(word: str, known: Iterable[str]) -> str:
    """The known name that looks most like a word: the one with the same letters, if there is one."""

    small = word.lower()

    def likeness(name: str) -> tuple[bool, float]:
        return sorted(small) == sorted(name.lower()), difflib.SequenceMatcher(None, small, name.lower()).ratio()

    return max(sorted(known), key=likeness)


def more_words(word: str, known: Iterable[str]) -> list[str]:
    """The known names that have all the words of this one and more: --max-episode-tokens for --max-tokens."""
    parts = set(_WORD.findall(word))
    return [name for name in known if len(parts) > 1 and parts < set(_WORD.findall(name))]


def instead(word: object, known: Iterable[object]) -> str:
    """The alternatives to a word: ": did you mean X? There are X, Y", or "; there are X, Y"."""
    names = [str(name) for name in known]
    near = nearest(word, names)
    return f"{near or ';'} {'There' if near else 'there'} are {', '.join(names)}"
