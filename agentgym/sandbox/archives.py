"""Tar archives as the guest's streams of entries, and back; `guest/guest_archives.py` describes an entry."""

import bz2
import gzip
import io
import json
import lzma
import os
import posixpath
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from agentgym.core.agent_failure import blame

PIECE = 1 << 18  # bytes of a file at a time
NEWEST = 1 << 33  # the largest time, in seconds since 1970
# By an archive's first bytes, what opens it.
_COMPRESSED: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}


@dataclass(frozen=True)
class _Entry:
    """`source` has a file's content: its own member of the archive, or the one that it is a hard link to."""

    name: str
    head: bytes
    source: tarfile.TarInfo | None


@contextmanager
def host_files() -> Iterator[None]:
    """For reading files of this machine: no program of an agent can have caused what fails."""
    try:
        yield
    except OSError as error:
        blame(error, lambda: None)
        raise


def entries_of(data: bytes | str | os.PathLike[str], limit: int) -> Iterator[bytes]:
    """A tar archive's entries. ValueError, before the first, for what `Sandbox.put_archive` refuses."""
    what = "the archive" if isinstance(data, bytes) else os.fspath(data)
    with host_files(), ExitStack() as stack:
        file: IO[bytes] = io.BytesIO(data) if isinstance(data, bytes) else Path(data).open("rb")  # noqa: SIM115 - below
        stack.enter_context(file)
        try:
            plain = stack.enter_context(_plain(file, limit))
            archive = stack.enter_context(tarfile.open(fileobj=plain, mode="r:"))
            entries = _checked(archive, limit)
        except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # of a disk; gzip's and bzip2's have no number
                raise
            raise ValueError(f"{what} cannot be unpacked: {error}") from error
        for entry in entries:
            yield entry.head
            content = archive.extractfile(entry.source) if entry.source is not None else None
            while content is not None and (piece := content.read(PIECE)):
                yield piece


def _plain(file: IO[bytes], limit: int) -> IO[bytes]:
    """The archive without compression: a few compressed bytes can hold far more than the limit."""
    begin = file.read(6)
    file.seek(0)
    opener = next((opener for mark, opener in _COMPRESSED.items() if begin.startswith(mark)), None)
    if opener is None:
        return file
    plain: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    with opener(file) as unpacked:
        while piece := unpacked.read(PIECE):
            plain.write(piece)
            if plain.tell() > limit:
                raise ValueError(f"over the limit of {limit} bytes without compression")
    plain.seek(0)
    return plain


def _checked(archive: tarfile.TarFile, limit: int) -> list[_Entry]:
    """All entries, with their names inside the folder, none of which can be written outside it."""
    entries: list[_Entry] = []
    sources: dict[str, tarfile.TarInfo | None] = {}  # of files and, None, of links, by name
    size = 0
    for member in archive:
        name = posixpath.normpath(member.name)
        if name == "." and member.isdir():
            continue
        if name.startswith("/") or name == "." or ".." in member.name.split("/") or "\0" in name + member.linkname:
            raise ValueError(f"{member.name!r:.200} is outside the folder that it is unpacked into")
        sources.pop(name, None)
        if not member.isdir():
            sources[name] = _source(member, name, sources)
        entries.append(_entry_of(member, name, sources.get(name)))
        size += len(entries[-1].head) + (source.size if (source := entries[-1].source) is not None else 0)
        if size > limit:
            raise ValueError(f"over the limit of {limit} bytes at {member.name!r:.200}")
    for entry in entries:
        name = entry.name
        while name := posixpath.dirname(name):
            if name in sources:
                raise ValueError(f"{entry.name!r:.200} is below {name!r:.200}, which is no folder")
    return entries


def _source(
    member: tarfile.TarInfo, name: str, sources: Mapping[str, tarfile.TarInfo | None]
) -> tarfile.TarInfo | None:
    """The member with a file's content; None for a link."""
    if member.issym():
        if posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname)).startswith(("/", "..")):
            raise ValueError(f"the link {member.name!r:.200} leads out of the folder, to {member.linkname!r:.200}")
        return None
    if not (member.isreg() or member.islnk()):
        raise ValueError(f"{member.name!r:.200} is neither a file, a folder nor a link")
    source = member if member.isreg() else sources.get(posixpath.normpath(member.linkname))
    if source is None:
        raise ValueError(f"{member.name!r:.200} is a hard link to no file before it")
    return source


def _entry_of(member: tarfile.TarInfo, name: str, source: tarfile.TarInfo | None) -> _Entry:
    seconds = int(min(max(member.mtime, 0), NEWEST))
    head = {"name": name, "kind": "folder", "mode": (source or member).mode, "time": seconds}
    if source is not None:
        head |= {"kind": "file", "size": source.size}
    elif not member.isdir():
        head |= {"kind": "link", "to": member.linkname}
    text = json.dumps(head).encode()
    return _Entry(name, len(text).to_bytes(4, "big") + text, source)


def tar_of(stream: bytes) -> bytes:
    """The tar archive of a stream of entries, sorted by name. ValueError: the stream is cut off."""
    found: list[tuple[list[str], dict[str, Any], memoryview]] = []
    rest = memoryview(stream)
    while rest:
        end = 4 + int.from_bytes(rest[:4], "big")
        head: dict[str, Any] = json.loads(bytes(rest[4:end]))
        rest = rest[end:]
        size = head.get("size", 0)
        if len(rest) < size:
            raise ValueError(f"the entry {head['name']!r:.200} is cut off")
        found.append((head["name"].split("/"), head, rest[:size]))
        rest = rest[size:]
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as archive:
        for _, head, content in sorted(found, key=lambda entry: entry[0]):
            member = tarfile.TarInfo(head["name"])
            member.type = {"folder": tarfile.DIRTYPE, "link": tarfile.SYMTYPE}.get(head["kind"], tarfile.REGTYPE)
            member.mode, member.mtime, member.size = head["mode"] & 0o777, max(head["time"], 0), len(content)
            member.linkname = head.get("to", "")
            archive.addfile(member, io.BytesIO(content))
    return made.getvalue()
