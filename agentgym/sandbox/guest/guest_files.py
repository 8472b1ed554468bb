"""Files in the guest: reads, writes and empties folders for the host, despite anything programs left there."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from agentgym.sandbox.guest.guest_programs import CHUNK, TWO_USERS, AsProgram, Spoiled

ROOTS = ("/workspace", "/tmp", "/private")
KERNELS = ("/proc", "/sys", "/dev")  # the kernel's own, also where the root is writable
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
DEEPEST = 200  # folders inside each other that are packed or protected: each is a descriptor meanwhile
EMPTYING = 30.0  # seconds in which a folder must be empty; programs that run meanwhile could fill it for ever
HOSTS_OWN = (errno.ENAMETOOLONG, errno.EINVAL)  # the host chose a name that cannot be: no program's doing


class GuestPath:
    """A path that the host asks for. `forced`: programs may have changed what is there; then obstacles are replaced.

    `whole`: it may be one of `ROOTS` itself. `anywhere`: the root is writable, and so it may be outside `ROOTS`.
    """

    anywhere = False

    def __init__(self, path: str, ran: bool, whole: bool = False) -> None:
        self.path = os.path.normpath(os.path.join("/workspace", path))
        if not (self.path + "/" * whole).startswith(tuple(root + "/" for root in ROOTS)):
            if not self.anywhere:
                raise ValueError(f"not under {', '.join(ROOTS)}")
            if self.path in ("/", *ROOTS) or f"{self.path}/".startswith(tuple(root + "/" for root in KERNELS)):
                raise ValueError(f"not below /, or in {', '.join(KERNELS)}")
        _, root, *self.names = self.path.split("/")
        self.root = f"/{root}"
        if self.root not in ROOTS:
            self.root, self.names = "/", [root, *self.names]
        self.rights = AsProgram(self.root != "/private")
        self.forced = ran and (self.root != "/private" or not TWO_USERS)

    def open_top(self, whole: bool) -> bool:
        """Make the folder of a writable root in which the path is, if there is none: all may write to it. True if it was made.

        Programs cannot make one, since the root is the guest's.
        """
        if self.root != "/" or len(self.names) < 2 - whole or os.path.lexists(top := f"/{self.names[0]}"):
            return False
        os.mkdir(top)
        os.chmod(top, 0o777)
        return True

    @contextmanager
    def writing(self) -> Iterator[None]:
        try:
            with self.rights:
                yield
        except OSError as error:
            system_s = self.root == "/" and error.errno in (errno.EACCES, errno.EPERM)  # not the programs' to give
            if not self.forced or error.errno in HOSTS_OWN or system_s:
                raise
            why = error.strerror or error
            raise Spoiled(f"{self.path} cannot be written where programs have run: {why}") from error

    def folder(self, names: list[str]) -> int:
        """A descriptor of a folder below `root`, which is made with those above it."""
        path = os.path.join(self.root, *names)
        try:
            os.makedirs(path, exist_ok=True)
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            file, name = fresh_file(fd)  # one of `ROOTS`, and writable
            os.close(file)
            if name:
                os.unlink(name, dir_fd=fd)
            return fd
        except OSError:
            if not self.forced:
                raise
        found = os.stat(self.root)
        # The programs own it, and may have closed it.
        if found.st_uid == AsProgram.user and found.st_mode & 0o700 != 0o700:
            os.chmod(self.root, stat.S_IMODE(found.st_mode) | 0o700)
        fd = os.open(self.root, FOLDER)
        for name in names:
            try:
                step = enter_folder(name, fd)
            finally:
                os.close(fd)
            fd = step
        return fd

    def make(self) -> None:
        with self.writing():
            os.close(self.folder(self.names))


class Fresh:
    """A file or link that is made in a folder under a name of its own, `fresh`, and then takes its place."""

    def __init__(self, place: GuestPath) -> None:
        self.place = place
        self.folder = self.file = -1
        self.fresh = ""

    def take_place(self, name: str) -> None:
        if self.place.forced and is_folder(name, self.folder):
            os.chmod(name, 0o700, dir_fd=self.folder)
            empty(name, self.folder)
            os.rmdir(name, dir_fd=self.folder)
        os.replace(self.fresh, name, src_dir_fd=self.folder, dst_dir_fd=self.folder)
        self.fresh = ""

    def close(self) -> None:
        if self.fresh:
            with suppress(OSError), self.place.rights:
                os.unlink(self.fresh, dir_fd=self.folder)
        self.fresh = ""
        for fd in (self.file, self.folder):
            if fd >= 0:
                os.close(fd)
        self.file = self.folder = -1


class Upload(Fresh):
    """A file that arrives in parts. It has no name, so no program can find it, until it is whole."""

    def __init__(self, place: GuestPath, mode: int) -> None:
        super().__init__(place)
        self.mode = mode
        try:
            with place.writing():
                self.folder = place.folder(place.names[:-1])
                if not place.forced and is_folder(place.names[-1], self.folder):
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
                self.file, self.fresh = fresh_file(self.folder)
        except BaseException:
            self.close()
            raise

    def add(self, data: bytes) -> None:
        view = memoryview(data)
        with self.place.writing():
            while view:
                view = view[os.write(self.file, view) :]

    def finish(self) -> None:
        with self.place.writing():
            os.fchmod(self.file, self.mode)
            if not self.fresh:
                fresh = fresh_name()
                os.link(f"/proc/self/fd/{self.file}", fresh, dst_dir_fd=self.folder)
                self.fresh = fresh
            self.take_place(self.place.names[-1])


def fresh_name() -> str:
    return f".{os.urandom(8).hex()}.part"


def fresh_file(folder: int) -> tuple[int, str]:
    """A new file in a folder, and its name: it has none, but in a writable root where older kernels cannot do without."""
    try:
        return os.open(".", os.O_TMPFILE | os.O_WRONLY, 0o600, dir_fd=folder), ""
    except OSError as error:
        named = GuestPath.anywhere and os.fstat(folder).st_dev == os.stat("/").st_dev
        if not named or error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    name = fresh_name()
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder), name


def content(path: str, limit: int) -> Iterator[bytes]:
    with AsProgram():
        try:
            fd = os.open(os.path.join("/workspace", path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except BlockingIOError:
            raise ValueError("cannot be read: a program holds a lease on the file") from None
    try:
        kind = os.fstat(fd)
        if stat.S_ISDIR(kind.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(kind.st_mode):
            raise ValueError("not a regular file")
        if kind.st_size > limit:
            raise ValueError(f"{kind.st_size} bytes: over the limit of {limit}")
        size = 0
        while data := os.read(fd, CHUNK):
            size += len(data)
            if size > limit:
                raise ValueError(f"over the limit of {limit} bytes")
            yield data
    finally:
        os.close(fd)


def enter_folder(name: str, fd: int) -> int:
    """A descriptor of the folder `name` in another; anything else of that name is replaced by a folder."""
    if not is_folder(name, fd):
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=fd)
        os.mkdir(name, 0o755, dir_fd=fd)
    elif (mode := os.lstat(name, dir_fd=fd).st_mode) & 0o700 != 0o700:
        os.chmod(name, stat.S_IMODE(mode) | 0o700, dir_fd=fd)
    return os.open(name, FOLDER, dir_fd=fd)


def is_folder(name: str, fd: int) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(name, dir_fd=fd).st_mode)
    except FileNotFoundError:
        return False


def restore(folder: str, mode: int) -> None:
    """Give a folder its mode back and take its attributes away, where the programs own it and so may have changed them."""
    if os.stat(folder).st_uid == AsProgram.user:
        os.chmod(folder, mode)
        for name in os.listxattr(folder):
            os.removexattr(folder, name)


def empty(folder: str, dir_fd: int | None = None) -> None:
    """Empty a folder of any depth and any modes. Raises TimeoutError if programs keep filling it."""
    until = time.monotonic() + EMPTYING
    fd = os.open(folder, FOLDER, dir_fd=dir_fd)
    try:
        # Of each folder down to the one that `fd` is, those in it that were not empty.
        levels = [remove_entries(fd, until)]
        while True:
            if levels[-1]:
                os.chmod(levels[-1][-1], 0o700, dir_fd=fd)
                step = os.open(levels[-1][-1], FOLDER, dir_fd=fd)
            elif len(levels) > 1:
                step = os.open("..", FOLDER, dir_fd=fd)
            else:
                return
            os.close(fd)
            fd = step
            if levels[-1]:
                levels.append(remove_entries(fd, until))
            else:
                levels.pop()
                os.rmdir(levels[-1].pop(), dir_fd=fd)
    finally:
        os.close(fd)


def remove_entries(fd: int, until: float) -> list[str]:
    """Remove a folder's files and empty folders; returns the names of its other folders."""
    left = []
    with os.scandir(fd) as entries:
        for entry in entries:
            if time.monotonic() > until:
                raise TimeoutError(errno.ETIMEDOUT, f"not emptied within {EMPTYING:.0f} s")
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=fd)
                continue
            try:
                os.rmdir(entry.name, dir_fd=fd)
            except OSError:  # not empty
                left.append(entry.name)
    return left
