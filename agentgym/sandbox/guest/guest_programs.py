"""Programs in the guest: start them as the unprivileged user, hold their pipes, find the session of a child."""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
import struct
import sys
import time
import warnings  # noqa: F401 - os.execvpe would import it in every child
from collections.abc import Iterator
from contextlib import suppress
from selectors import EVENT_READ, EVENT_WRITE, PollSelector

GROUP_ID = 65534
TWO_USERS = os.getuid() == 0  # else guest and programs are one user, and files have the same owner
CHUNK = 1 << 18
PIPE_CHUNKS = 4  # what a pipe can hold at most: a program may enlarge it to this
REPLY_LIMIT = 16 << 20
IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)  # by the guest, which gets an error instead
START_PATIENCE = 10.0  # seconds in which a program must have started
THREADS = 17  # in /proc/PID/stat, counted from the state on: the number of threads, with one that is not yet collected
# Landlock's calls have the same numbers on all machines.
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
LANDLOCK_WRITE_FILE, LANDLOCK_REFER = 1 << 1, 1 << 13
CAP_SYS_RESOURCE = 24


def _tags() -> range:
    """Numbers for sessions: as group ids, they must be in this user namespace, and some have but 65,536."""
    with open("/proc/self/gid_map") as file:
        held = [range(int(begin), int(begin) + int(count)) for begin, _, count in map(str.split, file)]
    many = range(1_000_000, 2_000_000)
    return many if any(many[0] in ids and many[-1] in ids for ids in held) else range(60_000, 65_534)


TAGS = _tags()


class Spoiled(Exception):
    """Programs brought the sandbox into a state in which a call cannot be done; `reset` ends that state."""


class AsProgram:
    """For a while, the rights of the programs, if `wanted`. `user` is their user id, this sandbox's own if the host chose one."""

    user = GROUP_ID if TWO_USERS else os.getuid()

    def __init__(self, wanted: bool = True) -> None:
        self.wanted = wanted and TWO_USERS

    def __enter__(self) -> None:
        if self.wanted:
            os.setegid(GROUP_ID)
            os.seteuid(self.user)

    def __exit__(self, *_: object) -> None:
        if self.wanted:
            os.seteuid(0)
            os.setegid(0)


def pipes(number: int) -> list[tuple[int, int]]:
    """Pipes that are charged to the programs' user, by the real user id: programs may enlarge them."""
    made: list[tuple[int, int]] = []
    try:
        if TWO_USERS:
            os.setresuid(AsProgram.user, -1, -1)
        made.extend(os.pipe() for _ in range(number))
    except BaseException:
        for fd in [fd for pair in made for fd in pair]:
            os.close(fd)
        raise
    finally:
        if TWO_USERS:
            os.setresuid(0, -1, -1)
    return made


def turn(loop: PollSelector, until: float) -> None:
    """Wait for a descriptor to be ready, at most to `until`, and call the functions of all that are."""
    for key, _ in loop.select(min(max(0.001, until - time.monotonic()), 3600.0)):
        if loop.get_map().get(key.fd) is key:  # else one before it has closed it
            key.data()


class Pipe:
    def __init__(self, loop: PollSelector, fd: int) -> None:
        self.loop = loop
        self.fd = fd
        os.set_blocking(fd, False)

    def ignore(self) -> None:
        with suppress(KeyError):
            self.loop.unregister(self.fd)

    def close(self) -> None:
        if self.fd >= 0:
            self.ignore()
            os.close(self.fd)
            self.fd = -1


class Output(Pipe):
    """The output of a program: its first and last bytes, `limit` in all, so that an endless stream takes no memory."""

    def __init__(self, loop: PollSelector, fd: int, limit: int) -> None:
        super().__init__(loop, fd)
        self.limit = limit
        self.clear()
        loop.register(fd, EVENT_READ, self.receive)

    def clear(self) -> None:
        self.head = bytearray()
        self.tail = bytearray()
        self.left_out = 0

    def receive(self) -> bool:
        if self.fd < 0:
            return False
        try:
            data = os.read(self.fd, CHUNK)
        except BlockingIOError:
            return False
        if data:
            self.add(data)
        else:
            self.close()
        return bool(data)

    def add(self, data: bytes) -> None:
        room = max(0, self.limit // 2 - len(self.head))
        self.head += data[:room]
        self.tail += data[room:]
        over = len(self.tail) - (self.limit - self.limit // 2)
        if over > 0:
            del self.tail[:over]
            self.left_out += over

    def drain(self) -> None:
        """Read what is available, up to a limit, since programs may keep writing."""
        for _ in range(PIPE_CHUNKS):
            if not self.receive():
                break


class Replies(Output):
    """The answers of a session on descriptor 3: a length and as many bytes ("frame"), or bytes and a zero byte ("zero")."""

    def __init__(self, loop: PollSelector, fd: int, form: str) -> None:
        self.form = form
        super().__init__(loop, fd, 0)

    def clear(self) -> None:
        self.data = bytearray()

    def add(self, data: bytes) -> None:
        # The limit is above any reply: unsolicited output cannot fill the guest's memory.
        self.data += data[: max(REPLY_LIMIT + 8 - len(self.data), 0)]

    def take(self) -> bytes | None:
        if self.form == "zero":
            size, begin, most = self.data.find(0), 0, len(self.data)
        elif len(self.data) >= 4:
            size, begin = int.from_bytes(self.data[:4], "big"), 4
            most = size
        else:
            return None
        if most > REPLY_LIMIT:
            raise ValueError(f"a reply of {most} bytes: at most {REPLY_LIMIT}")
        return bytes(self.data[begin : begin + size]) if 0 <= size <= len(self.data) - begin else None


class Input(Pipe):
    """A program's standard input, written as fast as the program takes it, and closed then unless it is held."""

    def __init__(self, loop: PollSelector, fd: int, held: bool) -> None:
        super().__init__(loop, fd)
        self.held = held
        self.unsent = memoryview(b"")

    def feed(self, data: bytes) -> None:
        if self.fd < 0:
            return
        if self.fd not in self.loop.get_map():
            self.loop.register(self.fd, EVENT_WRITE, self.send)
        self.unsent = memoryview(data)
        self.send()

    def send(self) -> None:
        try:
            self.unsent = self.unsent[os.write(self.fd, self.unsent[:CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:  # the program has closed it
            self.unsent = memoryview(b"")
        if not self.unsent:
            self.ignore()
            if not self.held:
                self.close()


class Process:
    def __init__(self, loop: PollSelector, pid: int, fds: list[int], limit: int, form: str) -> None:
        self.pid = pid
        self.input = Input(loop, fds[0], held=bool(form))
        self.out = Output(loop, fds[1], limit)
        self.err = Output(loop, fds[2], limit)
        self.replies = Replies(loop, fds[3], form) if form else None
        self.code: int | None = None

    def drain(self) -> None:
        self.out.drain()
        self.err.drain()

    def close(self) -> None:
        for pipe in (self.input, self.out, self.err, self.replies):
            if pipe is not None:
                pipe.close()


def start(argv: list[str], env: dict[str, str], cwd: str, fds: list[int], tag: int, limits: dict) -> int:
    """Start a program with `fds` as its descriptors 0, 1, 2 ... Its process id; OSError if it could not be started."""
    ready, status = os.pipe()
    try:
        try:
            pid = os.fork()
        except BlockingIOError as error:
            raise OSError(error.errno, "not started: the limit of running programs is reached") from error
        if not pid:
            report = "0"
            try:
                become(argv, env, cwd, fds, tag, limits)
            except OSError as error:
                report = f"{error.errno or errno.EIO} {error.strerror or error}"
            except BaseException as error:
                report = f"{errno.EINVAL} {error}"
            finally:
                os.write(status, report.encode("utf-8", "replace"))
                os._exit(127)
        os.close(status)
        status = -1
        failure = await_start(pid, ready)
    finally:
        os.close(ready)
        if status >= 0:
            os.close(status)
    if failure:
        os.waitpid(pid, 0)
        number, _, text = failure.partition(" ")
        raise OSError(int(number), text)
    return pid


def await_start(pid: int, ready: int) -> str:
    """Wait until the program has begun; returns why it has not, or "". It goes on if another program stops it before that."""
    waiting = select.poll()
    waiting.register(ready, select.POLLIN)
    until = time.monotonic() + START_PATIENCE
    while not waiting.poll(100):
        send_signal(pid, signal.SIGCONT)
        if time.monotonic() > until:
            send_signal(pid, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)
            return f"{errno.EAGAIN} not started within {START_PATIENCE:.0f} s"
    return os.read(ready, 1000).decode("utf-8", "replace")


def become(argv: list[str], env: dict[str, str], cwd: str, fds: list[int], tag: int, limits: dict) -> None:
    os.setsid()
    for target, fd in enumerate(fds):
        os.dup2(fd, target, inheritable=True)
    try:  # when memory runs out, this process goes before the guest
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
    except PermissionError:  # with one user the guest's files in /proc belong to "nobody"
        if TWO_USERS:
            raise
    if "group" in limits:
        with open(limits["group"], "w") as group:
            group.write("0")  # this process
    if limits["rules"] >= 0:
        import ctypes

        if ctypes.CDLL(None, use_errno=True).syscall(LANDLOCK_RESTRICT, limits["rules"], 0):
            raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.nice(limits["nice"])
    wanted = {"CORE": 0, "NOFILE": 1024, "MSGQUEUE": 0, "FSIZE": limits["file"], **limits.get("more", {})}
    for name, value in wanted.items():
        kind = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(kind)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (limit, limit))
    if TWO_USERS:
        os.setgroups([tag] if tag else [])
        os.setresgid(GROUP_ID, GROUP_ID, GROUP_ID)
        os.setresuid(AsProgram.user, AsProgram.user, AsProgram.user)
    elif tag:
        resource.setrlimit(resource.RLIMIT_RTTIME, (tag, tag))
    signal.set_wakeup_fd(-1)
    for number in (*IGNORED, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    enter(cwd)
    os.execvpe(argv[0], argv, env)


def enter(folder: str) -> None:
    """Go to a folder, from /workspace on. OSError, never ENOENT, which means a missing program."""
    try:
        try:
            os.chdir("/workspace")
        except PermissionError:  # in a container it is the programs' own, and one has closed it
            os.chmod("/workspace", 0o755)
            os.chdir("/workspace")
        os.chdir(folder)
    except OSError as error:
        raise OSError(errno.ENOTDIR, f"{folder}: {error.strerror}") from error


def proc_rules() -> int:
    """Rules of Landlock, as a descriptor, by which programs cannot write to an `oom_score_adj`; -1 where the kernel has none."""
    import ctypes

    libc = ctypes.CDLL(None)
    handled = LANDLOCK_WRITE_FILE | LANDLOCK_REFER  # without the second, files could not be moved between folders
    if libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1) < 2:  # version 1 has no such right
        return -1
    rules = libc.syscall(LANDLOCK_CREATE, handled.to_bytes(8, sys.byteorder), ctypes.c_size_t(8), 0)
    with os.scandir("/") as entries:
        folders = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False) and entry.name != "proc"]
    for folder in folders:
        fd = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", handled, fd)
        refused = libc.syscall(LANDLOCK_ADD, rules, 1, rule, 0)
        os.close(fd)
        if refused:
            os.close(rules)
            return -1
    return rules


def scores_are_final() -> bool:
    """True if a child cannot lower the `oom_score_adj` that it inherits."""
    with open("/proc/self/status") as file:
        effective = next(line for line in file if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) >> CAP_SYS_RESOURCE & 1)


def tag_of(pid: str) -> int | None:
    """The tag that a process has inherited; 0 if it has none, None if the process has ended."""
    name, mark = ("status", b"\nGroups:\t") if TWO_USERS else ("limits", b"\nMax realtime timeout ")
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            text = file.read()
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
    except OSError:
        return None
    # A process whose first thread has ended lives while it has other threads. The kernel's count is exact; a list of threads
    # that each start the next and end is old when it is read.
    if fields[0] in (b"Z", b"X") and int(fields[THREADS]) <= 1:
        return None
    values = text.partition(mark)[2].partition(b"\n")[0].split()
    value = values[0] if values else b""
    return int(value) if value.isdigit() and int(value) in TAGS else 0


def programs() -> Iterator[tuple[int, int]]:
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            tag = tag_of(name)
            if tag is not None:
                yield int(name), tag


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a program, if it has not ended; one that is not a program yet takes none."""
    with suppress(ProcessLookupError, PermissionError), AsProgram():
        os.kill(pid, number)


def remove_shared_memory() -> None:
    for kind, number in shared_memory():
        import ctypes

        arguments = (number, 0, 0) if kind == "sem" else (number, 0)  # IPC_RMID is 0
        getattr(ctypes.CDLL(None), kind + "ctl")(*arguments, None)


def shared_memory() -> list[tuple[str, int]]:
    left = []
    for kind in ("shm", "sem", "msg"):
        with suppress(OSError), open(f"/proc/sysvipc/{kind}") as table:
            left += [(kind, int(row.split()[1])) for row in table.readlines()[1:]]
    return left
