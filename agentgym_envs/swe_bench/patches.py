"""Reads patches in git's format: which files they touch, and whether they may be applied to a repository.

Agents and data sets write patches, so the reader is strict: it takes what `git diff` writes and nothing else, since
`git apply` would also apply what a lenient reader overlooks.
"""

import posixpath
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)", re.DOTALL)
_MODES = re.compile(r"(?:old|new|deleted file|new file) mode (\d{6})|index [0-9a-f]+\.\.[0-9a-f]+ (\d{6})")
_SIMILARITY = re.compile(r"(?:dis)?similarity index \d+%|index [0-9a-f]+\.\.[0-9a-f]+")
_BINARY = re.compile(r"(?:literal|delta) \d+|[A-Za-z][0-9A-Za-z!#$%&()*+;<=>?@^_`{|}~-]+|")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(rb'\\([0-7]{3}|[abfnrtv"\\])')
_LETTERS = {"a": 7, "b": 8, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11, '"': 34, "\\": 92}
_OF_GIT = {".git", "git~1", ".gitmodules"}
_SYMLINK, _SUBMODULE = "120000", "160000"
_LONGEST = 1 << 20  # characters of a list of a patch's files and all folders of each


class PatchError(ValueError):
    """A patch that cannot be read, or that must not be applied; says where and why."""


@dataclass(frozen=True)
class FileChange:
    """A patch's change of one file.

    `old` and `new` are paths from the repository's root; `old` is None for a new file, `new` for a deleted one. `kind`
    is "modified", "new", "deleted", "renamed" or "copied". `modes` are those that the patch names. `link` is the target
    of a symbolic link that the patch makes. `text` is this file's part of the patch.
    """

    old: str | None
    new: str | None
    kind: str
    binary: bool
    modes: tuple[str, ...]
    link: str | None
    text: str

    @property
    def path(self) -> str:
        return self.new or self.old or ""

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(path for path in (self.old, self.new) if path is not None))


def parse_patch(patch: str) -> tuple[FileChange, ...]:
    """The changes of a patch in its order. Raises PatchError with the line that is not of `git diff`'s format."""
    lines = _lines(patch)
    changes, place = [], 0
    while place < len(lines):
        if lines[place].startswith("diff --git "):
            change, place = _file(lines, place)
            changes.append(change)
        elif lines[place].strip():
            raise PatchError(
                f'line {place + 1}: {lines[place]:.80} is outside of a file: give the output of "git diff"'
            )
        else:
            place += 1
    return tuple(changes)


def check_patch(patch: str) -> tuple[FileChange, ...]:
    """The changes of a patch that stays inside its repository; PatchError if it does not.

    Refused are absolute paths, "..", anything in .git, .gitmodules, submodules, and links that leave the repository, and files
    that lie so deep that the repository could not be listed.
    """
    changes, links = check_files(patch)
    if links:
        where = "outside of the repository or in .git: a patch may not make one"
        raise PatchError(f"{links[0].path!r} is a link to {links[0].link!r}, {where}")
    return changes


def check_files(patch: str) -> tuple[tuple[FileChange, ...], tuple[FileChange, ...]]:
    """As `check_patch`, but with the links that leave the repository apart: a virtual environment in it has some."""
    changes = parse_patch(patch)
    if sum(len(path) * (path.count("/") + 1) for change in changes for path in change.paths) > _LONGEST:
        raise PatchError("it has too many files, or they lie too deep")
    for change in changes:
        for path in change.paths:
            parts = path.split("/")
            if not all(parts) or {".", ".."} & set(parts) or "\0" in path:
                raise PatchError(f"{path!r} leaves the repository: a patch may only touch files inside of it")
            if any(part.rstrip(" .").casefold() in _OF_GIT for part in parts):
                raise PatchError(f"{path!r} belongs to git: a patch may not touch .git or .gitmodules")
        if _SUBMODULE in change.modes:
            raise PatchError(f"{change.path!r} is a submodule: a patch may only touch files")
        if change.link is None and _SYMLINK in change.modes and change.new is not None:
            raise PatchError(f"{change.path!r} is a link whose target the patch does not show: it may not be applied")
    kept: list[FileChange] = []
    links: list[FileChange] = []
    for change in changes:
        (links if change.link is not None and _leaves(change.path, change.link) else kept).append(change)
    return tuple(kept), tuple(links)


def without_files(changes: Iterable[FileChange], paths: Collection[str]) -> str:
    """The patch of these changes without those of these files. A rename from or to one of them is dropped as a whole."""
    return "".join(change.text for change in changes if not set(change.paths) & set(paths))


def touched_files(patch: str) -> tuple[str, ...]:
    """Every path that a patch reads or writes, old names of renamed files too; of a test patch: the test files."""
    return tuple(dict.fromkeys(path for change in parse_patch(patch) for path in change.paths))


def reversed_patch(patch: str) -> str:
    """The patch that undoes a patch. Raises PatchError for binary, renamed and copied files."""
    return "".join(_reversed(change) for change in parse_patch(patch))


def _lines(patch: str) -> list[str]:
    """Lines end with a line feed alone; carriage returns are content."""
    return patch.removesuffix("\n").split("\n") if patch else []


def _file(lines: list[str], start: int) -> tuple[FileChange, int]:
    """The change that starts at a line, and the line after it."""
    header: dict[str, str] = {}
    modes: list[str] = []
    place, binary = start + 1, False
    while place < len(lines) and not lines[place].startswith(("@@ ", "diff --git ")):
        line = lines[place]
        word = next((word for word in _NAMED if line.startswith(word)), None)
        mode = _MODES.fullmatch(line)
        if line.startswith(("GIT binary patch", "Binary files ")):
            binary, place = True, _after_binary(lines, place)
            break
        if word is not None:
            if word in header:
                raise PatchError(f'line {place + 1}: a second "{word.strip()}" for one file')
            header[word] = line.removeprefix(word)
        elif mode is not None:
            modes.append(mode[1] or mode[2])
            header.setdefault(line.partition(" mode ")[0], "")
        elif not line.strip():
            break
        elif _SIMILARITY.fullmatch(line) is None:
            raise PatchError(f"line {place + 1}: {line:.80} is no header of a file: is the patch cut off or edited?")
        place += 1
    added: list[str] = []
    while place < len(lines) and lines[place].startswith("@@ "):
        if "--- " not in header or "+++ " not in header:
            raise PatchError(f'line {place + 1}: a hunk without "---" and "+++" lines before it')
        place = _after_hunk(lines, place, added)
    while place < len(lines) and not lines[place].strip():
        place += 1
    old, new, kind = _names(lines[start].removeprefix("diff --git "), header, start + 1)
    link = "\n".join(added) if added and modes[-1:] == [_SYMLINK] else None
    text = "".join(f"{line}\n" for line in lines[start:place])
    return FileChange(old, new, kind, binary, tuple(modes), link, text), place


_NAMED = ("--- ", "+++ ", "rename from ", "rename to ", "copy from ", "copy to ")


def _after_hunk(lines: list[str], place: int, added: list[str]) -> int:
    """The line after a hunk; `added` gets its new lines."""
    heading = _HUNK.fullmatch(lines[place])
    if heading is None:
        raise PatchError(f"line {place + 1}: {lines[place]:.80} is no heading of a hunk")
    old, new = (int(heading[group] or 1) for group in (2, 4))
    start, place = place + 1, place + 1
    while old > 0 or new > 0:
        line = lines[place] if place < len(lines) else "end"
        if line[:1] not in {" ", "+", "-", "\\", ""}:
            raise PatchError(f"line {place + 1}: the hunk of line {start} ends too early: is the patch cut off?")
        old -= line[:1] in {" ", "-", ""}
        new -= line[:1] in {" ", "+", ""}
        if line[:1] == "+":
            added.append(line[1:])
        place += 1
    if old < 0 or new < 0:
        raise PatchError(f"line {place}: the hunk of line {start} has other lines than its heading counts")
    return place + (place < len(lines) and lines[place].startswith("\\"))


def _after_binary(lines: list[str], place: int) -> int:
    place += 1
    while place < len(lines) and not lines[place].startswith("diff --git "):
        if _BINARY.fullmatch(lines[place]) is None:
            raise PatchError(f"line {place + 1}: {lines[place]:.80} is no line of a binary patch")
        place += 1
    return place


def _names(line: str, header: dict[str, str], number: int) -> tuple[str | None, str | None, str]:
    """Old name, new name and kind of a change; all of its headers must agree on them."""
    old, new = _pair(line, header, number)
    kind = "modified"
    for word in ("rename", "copy"):
        if f"{word} from " in header or f"{word} to " in header:
            kind = {"rename": "renamed", "copy": "copied"}[word]
            if (_unquoted(header.get(f"{word} from ", "")), _unquoted(header.get(f"{word} to ", ""))) != (old, new):
                raise PatchError(f"line {number}: the {word} lines name other files than the diff line")
    if kind == "modified" and old != new:
        raise PatchError(
            f"line {number}: a file with two names, {old!r} and {new!r}, that is neither renamed nor copied"
        )
    # Without these headers git takes "/dev/null" for a file of that name.
    if "new file" in header:
        kind, before, after = "new", None, new
    elif "deleted file" in header:
        kind, before, after = "deleted", old, None
    else:
        before, after = old, new
    for word, name, prefix in (("--- ", before, "a/"), ("+++ ", after, "b/")):
        if word in header:
            stated = header[word].removesuffix("\t")
            if (None if stated == "/dev/null" else _unquoted(stated)) != (None if name is None else prefix + name):
                raise PatchError(f'line {number}: "{word}{header[word]}" does not fit "diff --git {line}"')
    return before, after, kind


def _pair(line: str, header: dict[str, str], number: int) -> tuple[str, str]:
    """The two names of a "diff --git" line, where spaces both belong to names and separate them."""
    quoted = [match[0] for match in _QUOTED.finditer(line)]
    old, new = line[: len(line) // 2], line[len(line) // 2 + 1 :]
    if line.startswith('"') and quoted:
        old, new = _unquoted(quoted[0]), _unquoted(line[len(quoted[0]) + 1 :])
    for word in ("rename", "copy"):
        if f"{word} from " in header and f"{word} to " in header:
            old, new = (side + _unquoted(header[word + way]) for side, way in (("a/", " from "), ("b/", " to ")))
    first = [name for name in (old, *quoted[:1]) if _unquoted(name) == old]
    second = [name for name in (new, *quoted[-1:]) if _unquoted(name) == new]
    fits = line in {f"{one} {other}" for one in first for other in second}
    if not fits or not old.startswith("a/") or not new.startswith("b/"):
        raise PatchError(f'line {number}: cannot read names in "diff --git {line}": they must begin with a/ and b/')
    return old[2:], new[2:]


def _unquoted(name: str) -> str:
    """A name without git's quotes and escapes, which stand for bytes."""
    if _QUOTED.fullmatch(name) is None:
        return name
    plain = _ESCAPE.sub(lambda m: bytes([_byte(m[1].decode())]), name[1:-1].encode("utf-8", "surrogateescape"))
    return plain.decode("utf-8", "surrogateescape")


def _byte(escape: str) -> int:
    return _LETTERS[escape] if escape in _LETTERS else int(escape, 8) & 255


def _leaves(path: str, target: str) -> bool:
    """True if a link leads out of the repository, or into what belongs to git."""
    parts = target.split("/")
    climbs = next((place for place, part in enumerate(parts) if part != ".."), len(parts))
    inside = posixpath.normpath(posixpath.join(posixpath.dirname(path), target)).split("/")
    # A ".." behind a name may follow another link, which leads elsewhere than the names say.
    out = target.startswith("/") or climbs > path.count("/") or ".." in parts[climbs:] or "\0" in target
    return out or ".git" in (part.casefold() for part in inside)


def _reversed(change: FileChange) -> str:
    if change.binary or change.kind in ("renamed", "copied"):
        kind = "binary" if change.binary else change.kind
        raise PatchError(f"{change.path!r} is {kind}: only changed, new and deleted text files are reversed")
    out, names = [], []
    in_hunks = False
    for line in _lines(change.text):
        heading = _HUNK.fullmatch(line)
        if heading is not None:
            in_hunks = True
            old, new = line.split(" ")[1:3]
            out.append(f"@@ -{new[1:]} +{old[1:]} @@{heading[5]}")
        elif in_hunks:
            out.append({"+": "-", "-": "+"}.get(line[:1], line[:1]) + line[1:])
        elif line.startswith(("--- ", "+++ ")):
            names.append(line[4:])
            if len(names) == 2:
                out += [f"--- {re.sub(_SIDE, 'a/', names[1])}", f"+++ {re.sub(_SIDE, 'b/', names[0])}"]
        elif not line.startswith("index "):
            word = next((word for word in _INVERSE if line.startswith(word)), "")
            out.append(_INVERSE.get(word, "") + line.removeprefix(word))
    return "".join(f"{line}\n" for line in out)


_SIDE = re.compile(r'(?<=^")[ab]/|^[ab]/')
_INVERSE = {"new file": "deleted file", "deleted file": "new file", "new mode": "old mode", "old mode": "new mode"}
