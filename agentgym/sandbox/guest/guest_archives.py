"""Whole folders in the guest: unpacks and packs them as a stream of entries, and never follows a link on the way.

An entry is the length of its head (4 bytes, big endian), the head, a JSON object, and the `size` bytes of a file. The host makes
tar files of them (`agentgym/sandbox/archives.py`), so no parser of tar runs here. A head has `name`, relative to the folder;
`kind`: "folder", "file" or "link"; `mode`; `time` in seconds; `size` of a file; `to` of a link.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import suppress

from agentgym.sandbox.guest.guest_files import DEEPEST, FOLDER, Fresh, GuestPath, enter_folder, fresh_name
from agentgym.sandbox.guest.guest_programs import CHUNK, AsProgram

LARGEST_HEAD = 1 << 16
OPENED = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW


class Unpacking(Fresh):
    """A stream of entries that arrives in parts, written below a folder. After an error, what is written stays."""

    def __init__(self, place: GuestPath) -> None:
        super().__init__(place)
        self.received = bytearray()
        self.head: dict = {}
        self.missing = 0  # bytes of the file that is being written
        self.top = -1
        try:
            with place.writing():
                self.top = place.folder(place.names)
        except BaseException:
            self.close()
            raise

    def add(self, data: bytes) -> None:
        self.received += data
        try:
            while self.step():
                pass
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"an entry with a head that cannot be: {error!r:.200}") from error

    def finish(self) -> None:
        if self.received or self.file >= 0:
            raise ValueError("the stream of entries ends within an entry")

    def step(self) -> bool:
        """Take what has arrived of one entry; False if more must arrive first."""
        if self.file >= 0:
            data = memoryview(self.received)[: self.missing]
            with self.place.writing():
                written = os.write(self.file, data) if data else 0
            data.release()
            del self.received[:written]
            self.missing -= written
            if not self.missing:
                self.publish()
                return True
            return written > 0
        size = int.from_bytes(self.received[:4], "big")
        if size > LARGEST_HEAD:
            raise ValueError(f"an entry with a head of {size} bytes")
        if len(self.received) < 4 + size or not size:
            return False
        self.head = json.loads(self.received[4 : 4 + size])
        del self.received[: 4 + size]
        self.begin()
        return True

    def begin(self) -> None:
        kind, names = self.head["kind"], self.head["name"].split("/")
        if any(name in ("", ".", "..") for name in names) or kind not in ("folder", "file", "link"):
            raise ValueError(f"{self.head['name']!r:.200} is not an entry below a folder")
        with self.place.writing():
            if kind == "folder":
                made = self.enter(names)
                os.fchmod(made, self.head["mode"] & 0o755 | 0o700)
                os.close(made)
                return
            self.folder = self.enter(names[:-1])
            self.fresh = fresh_name()
            if kind == "file":
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
                self.file = os.open(self.fresh, flags, 0o600, dir_fd=self.folder)
                self.missing = self.head["size"]
                return
            if self.place.root == "/private":
                raise ValueError(f"{self.head['name']!r:.200}: /private takes no links")
            os.symlink(self.head["to"], self.fresh, dir_fd=self.folder)
        self.publish()

    def enter(self, names: list[str]) -> int:
        """A descriptor of a folder below the top one, made with those above it. No link is followed."""
        fd = os.dup(self.top)
        for name in names:
            try:
                if self.place.forced:
                    step = enter_folder(name, fd)
                else:
                    with suppress(FileExistsError):
                        os.mkdir(name, 0o755, dir_fd=fd)
                    step = os.open(name, FOLDER, dir_fd=fd)
            except OSError as error:
                raise OSError(error.errno, f"{error.strerror} ({name!r:.200} in the archive)") from error
            finally:
                os.close(fd)
            fd = step
        return fd

    def publish(self) -> None:
        name = self.head["name"].rpartition("/")[2]
        with self.place.writing():
            if self.file >= 0:
                os.fchmod(self.file, self.head["mode"] & 0o755 | 0o600)
                os.utime(self.file, (self.head["time"], self.head["time"]))
            self.take_place(name)
        super().close()

    def close(self) -> None:
        super().close()
        if self.top >= 0:
            os.close(self.top)
            self.top = -1


def packed(path: str, limit: int) -> Iterator[bytes]:
    """The entries of a folder, or of one file, at most `limit` bytes; sockets, pipes and devices are left out."""
    size, waiting = 0, bytearray()
    for data in entries(os.path.join("/workspace", path)):
        size += len(data)
        if size > limit:
            raise ValueError(f"over the limit of {limit} bytes")
        waiting += data
        if len(waiting) >= CHUNK:
            yield bytes(waiting)
            waiting.clear()
    yield bytes(waiting)


def entries(path: str) -> Iterator[bytes]:
    # Folders from the top one to the one that is being packed: a descriptor, what names in it begin with, the entries left.
    # Entries are not listed first: a program can make more of them than fit into the guest's memory.
    stack: list = []
    with AsProgram():
        top = os.open(path, OPENED & ~os.O_NOFOLLOW)
        try:
            if stat.S_ISDIR(os.fstat(top).st_mode):
                stack.append((top, "", os.scandir(top)))
        except BaseException:
            os.close(top)
            raise
    if not stack:
        try:
            yield from file_entry(top, os.path.basename(os.path.normpath(path)))
        finally:
            os.close(top)
    try:
        while stack:
            fd, prefix, names = stack[-1]
            found = next(names, None)
            if found is None:
                names.close()
                os.close(fd)
                stack.pop()
            else:
                yield from entry(fd, found.name, prefix + found.name, stack)
    finally:
        for fd, _, names in stack:
            names.close()
            os.close(fd)


def entry(folder: int, name: str, whole: str, stack: list) -> Iterator[bytes]:
    """The entry `name` of a folder; one that is a folder is put on the stack."""
    try:
        with AsProgram():
            found = os.lstat(name, dir_fd=folder)
            if stat.S_ISLNK(found.st_mode):
                to = os.readlink(name, dir_fd=folder)
            elif not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
                return
            else:
                to, fd = None, os.open(name, OPENED, dir_fd=folder)
    except BlockingIOError:
        raise ValueError(f"{whole!r:.200} cannot be read: a program holds a lease on the file") from None
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} ({whole!r:.200})") from error
    if to is not None:
        yield head(whole, "link", found, to=to)
        return
    try:
        found = os.fstat(fd)
        if not stat.S_ISDIR(found.st_mode):
            yield from file_entry(fd, whole)
            return
        if len(stack) >= DEEPEST:
            raise ValueError(f"{whole!r:.200}: more than {DEEPEST} folders deep")
        yield head(whole, "folder", found)
        stack.append((os.dup(fd), whole + "/", os.scandir(fd)))
    finally:
        os.close(fd)


def file_entry(fd: int, whole: str) -> Iterator[bytes]:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{whole!r:.200} is neither a folder nor a regular file")
    yield head(whole, "file", found, size=found.st_size)
    left = found.st_size
    while left:
        data = os.read(fd, min(CHUNK, left))
        if not data:
            raise ValueError(f"{whole!r:.200} became shorter while it was read")
        left -= len(data)
        yield data


def head(name: str, kind: str, found: os.stat_result, **more: object) -> bytes:
    fields = {"name": name, "kind": kind, "mode": stat.S_IMODE(found.st_mode), "time": int(found.st_mtime), **more}
    text = json.dumps(fields).encode()
    if len(text) > LARGEST_HEAD:
        raise OSError(errno.ENAMETOOLONG, f"{name!r:.200}: the name is too long")
    return len(text).to_bytes(4, "big") + text
