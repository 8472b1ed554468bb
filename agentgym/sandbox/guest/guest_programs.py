"""Programs in the guest: start one as the unprivileged user, hold its pipes, tell whose child it is.

Sent into the sandbox together with `guest.py`; the standard library only.
"""

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
from collections.abc import Callable, Iterator

GROUP_ID = 65534
TWO_USERS = os.getuid() == 0  # else the guest and the programs are one user, and files are told apart by nothing
FIRST_TAG = 1_000_000
CHUNK = 1 << 18
PIPE_CHUNKS = 4  # what a pipe can hold at most: a program may enlarge it to this
REPLY_LIMIT = 16 << 20
IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)  # by the guest, which is told by an error
START_PATIENCE = 10.0  # seconds in which a program must have started
THREADS = (
    17  # in /proc/PID/stat, counted from the state on: how many threads it has, with one that is not yet collected
)
# The numbers of its calls are the same on all machines.
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
LANDLOCK_WRITE_FILE, LANDLOCK_REFER = 1 << 1, 1 << 13
CAP_SYS_RESOURCE = 24


class Spoiled(Exception):
    """Programs have brought the sandbox into a state in which a call cannot be done; `reset` ends that state."""


class AsProgram:
    """For a while, the rights of the programs; `wanted` is False where it is not to be so after all.

    Attributes:
        user: the programs' user id, of this sandbox alone where the host said one.
    """

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
    """Pipes that count for the programs' user, whose real user id the kernel looks at: programs may enlarge them."""
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


class Loop:
    """An event loop: functions that are called when their descriptor is ready."""

    def __init__(self) -> None:
        self.poll = select.poll()
        self.ready: dict[int, Callable[[], object]] = {}

    def add(self, fd: int, events: int, call: Callable[[], object]) -> None:
        """Call when one of `events` is there."""
        self.poll.register(fd, events)
        self.ready[fd] = call

    def drop(self, fd: int) -> None:
        """Forget a descriptor, if it is known."""
        if self.ready.pop(fd, None) is not None:
            self.poll.unregister(fd)

    def turn(self, until: float) -> None:
        """Wait for something to happen, at most to `until`, and handle it."""
        wait = min(max(0.0, until - time.monotonic()), 3600.0)
        for fd, _ in self.poll.poll(int(wait * 1000) + 1):
            call = self.ready.get(fd)
            if call is not None:
                call()


class Pipe:
    """The guest's end of a program's pipe."""

    def __init__(self, loop: Loop, fd: int) -> None:
        self.loop = loop
        self.fd = fd
        os.set_blocking(fd, False)

    def close(self) -> None:
        """Close it, once."""
        if self.fd >= 0:
            self.loop.drop(self.fd)
            os.close(self.fd)
            self.fd = -1


class Output(Pipe):
    """The output of a program: its first and last bytes, `limit` in all, so that an endless stream takes no memory."""

    def __init__(self, loop: Loop, fd: int, limit: int) -> None:
        super().__init__(loop, fd)
        self.limit = limit
        self.clear()
        loop.add(fd, select.POLLIN, self.receive)

    def clear(self) -> None:
        """Begin anew."""
        self.head = bytearray()
        self.tail = bytearray()
        self.left_out = 0

    def receive(self) -> bool:
        """Take what is there, at most a chunk. False if there was nothing."""
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
        """Keep of `data` what there is room for."""
        room = max(0, self.limit // 2 - len(self.head))
        self.head += data[:room]
        self.tail += data[room:]
        over = len(self.tail) - (self.limit - self.limit // 2)
        if over > 0:
            del self.tail[:over]
            self.left_out += over

    def drain(self) -> None:
        """Take what is there, but not for ever: somebody may go on writing."""
        for _ in range(PIPE_CHUNKS):
            if not self.receive():
                break


class Replies(Output):
    """The answers of a session on descriptor 3: a length and as many bytes ("frame"), or bytes and a zero byte ("zero")."""

    def __init__(self, loop: Loop, fd: int, form: str) -> None:
        self.form = form
        super().__init__(loop, fd, 0)

    def clear(self) -> None:
        """Begin anew."""
        self.data = bytearray()

    def add(self, data: bytes) -> None:
        """Keep it, up to more than any reply may be: what nobody asked for must not fill the guest's memory."""
        self.data += data[: max(REPLY_LIMIT + 8 - len(self.data), 0)]

    def take(self) -> bytes | None:
        """The answer, None while it is not all there. ValueError if it is over the limit."""
        if self.form == "zero":
            size, begin = self.data.find(0), 0
            self.check(len(self.data))
        elif len(self.data) >= 4:
            size, begin = int.from_bytes(self.data[:4], "big"), 4
            self.check(size)
        else:
            return None
        return bytes(self.data[begin : begin + size]) if 0 <= size <= len(self.data) - begin else None

    def check(self, size: int) -> None:
        """ValueError if a reply is longer than any may be."""
        if size > REPLY_LIMIT:
            raise ValueError(f"a reply of {size} bytes: at most {REPLY_LIMIT}")


class Input(Pipe):
    """A program's standard input, written as fast as the program takes it, and closed then unless it is held."""

    def __init__(self, loop: Loop, fd: int, held: bool) -> None:
        super().__init__(loop, fd)
        self.held = held
        self.unsent = memoryview(b"")

    def feed(self, data: bytes) -> None:
        """Write `data`, now and as the program takes it."""
        if self.fd < 0:
            return
        if self.fd not in self.loop.ready:
            self.loop.add(self.fd, select.POLLOUT, self.send)
        self.unsent = memoryview(data)
        self.send()

    def send(self) -> None:
        """Write what fits."""
        try:
            self.unsent = self.unsent[os.write(self.fd, self.unsent[:CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:  # the program has closed it
            self.unsent = memoryview(b"")
        if not self.unsent:
            self.loop.drop(self.fd)
            if not self.held:
                self.close()


class Process:
    """A started program, its pipes, and how it ended: None while it has not."""

    def __init__(self, pid: int, tag: int, stdin: Input, out: Output, err: Output, replies: Replies | None) -> None:
        self.pid = pid
        self.tag = tag
        self.input = stdin
        self.out = out
        self.err = err
        self.replies = replies
        self.code: int | None = None

    def drain(self) -> None:
        """Take what is left in both outputs."""
        self.out.drain()
        self.err.drain()

    def close(self) -> None:
        """Close the pipes."""
        for pipe in (self.input, self.out, self.err, self.replies):
            if pipe is not None:
                pipe.close()


def start(argv: list[str], env: dict[str, str], cwd: str, fds: list[int], tag: int, limits: dict) -> int:
    """Start a program with `fds` as its descriptors 0, 1, 2 ... Its process id; OSError if it could not be started."""
    ready, status = os.pipe()
    pid = 0
    try:
        pid = fork()
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


def fork() -> int:
    """As `os.fork`; where there are as many processes as there may be, the error says so."""
    try:
        return os.fork()
    except BlockingIOError as error:
        raise OSError(error.errno, "not started: the programs that run here are as many as there may be") from error


def await_start(pid: int, ready: int) -> str:
    """Wait until the program has begun; why it has not, or nothing. Another program may stop it before that: it goes on."""
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
    """Turn this process, a child of the guest, into the program. Returns only by raising."""
    os.setsid()
    for target, fd in enumerate(fds):
        os.dup2(fd, target, inheritable=True)
    die_first()
    if "group" in limits:
        with open(limits["group"], "w") as group:
            group.write("0")  # this process
    keep_out_of_proc(limits.get("rules", -1))
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
    """Go to a folder, from /workspace on. OSError, never ENOENT, which is for the program that is not there."""
    try:
        try:
            os.chdir("/workspace")
        except PermissionError:  # in a container it is the programs' own, and one has closed it
            os.chmod("/workspace", 0o755)
            os.chdir("/workspace")
        os.chdir(folder)
    except OSError as error:
        raise OSError(errno.ENOTDIR, f"{folder}: {error.strerror}") from error


def default_signals() -> None:
    """Begin with default dispositions and an empty mask, which all programs inherit, whatever the host was started with.

    Under `nohup` SIGINT would be ignored here too, and no shell could be interrupted. Process 1 gets no signal of a default
    disposition from a program.
    """
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def die_first() -> None:
    """When memory runs out, this process goes before the guest."""
    try:
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
    except PermissionError:  # with one user the guest's files in /proc belong to nobody
        if TWO_USERS:
            raise


def proc_rules() -> int:
    """Rules of Landlock by which nothing under /proc can be written, as a descriptor; -1 where the kernel has none.

    So a program cannot take back its `oom_score_adj`, which only `CAP_SYS_RESOURCE` could make final, nor set another's.
    """
    import ctypes

    libc = ctypes.CDLL(None)
    handled = (
        LANDLOCK_WRITE_FILE | LANDLOCK_REFER
    )  # without the second, files could not be moved between folders at all
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


def keep_out_of_proc(rules: int) -> None:
    """Bind this process and all that it starts by `proc_rules`."""
    if rules >= 0:
        import ctypes

        if ctypes.CDLL(None, use_errno=True).syscall(LANDLOCK_RESTRICT, rules, 0):
            raise OSError(ctypes.get_errno(), "landlock_restrict_self")


def scores_are_final() -> bool:
    """True if a child cannot lower the `oom_score_adj` that it inherits."""
    with open("/proc/self/status") as file:
        effective = next(line for line in file if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) >> CAP_SYS_RESOURCE & 1)


def tag_of(pid: str) -> int | None:
    """The tag that a process has inherited; 0 if it has none, None if the process has ended.

    A process whose first thread has ended looks like one that has ended, and lives while it has other threads.
    """
    name, mark = ("status", b"\nGroups:\t") if TWO_USERS else ("limits", b"\nMax realtime timeout ")
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            text = file.read()
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
    except OSError:
        return None
    # The kernel's own count: a list of threads that each start the next and end is old when it is read.
    if fields[0] in (b"Z", b"X") and int(fields[THREADS]) <= 1:
        return None
    values = text.partition(mark)[2].partition(b"\n")[0].split()
    value = values[0] if values else b""
    return int(value) if value.isdigit() and int(value) >= FIRST_TAG else 0


def programs() -> Iterator[tuple[int, int]]:
    """Process id and tag of every program."""
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            tag = tag_of(name)
            if tag is not None:
                yield int(name), tag


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a program; one that has ended needs none, and one that is not a program yet takes none."""
    try:
        with AsProgram():
            os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def remove_shared_memory() -> None:
    """Remove System V segments, semaphores and queues, which outlive the programs that made them."""
    for kind in ("shm", "sem", "msg"):
        try:
            with open(f"/proc/sysvipc/{kind}") as table:
                numbers = [int(row.split()[1]) for row in table.readlines()[1:]]
        except OSError:
            continue
        for number in numbers:
            import ctypes

            arguments = (number, 0, 0) if kind == "sem" else (number, 0)  # IPC_RMID is 0
            getattr(ctypes.CDLL(None), kind + "ctl")(*arguments, None)


def shared_memory() -> list[str]:
    """The System V shared memory, semaphores and queues of this namespace."""
    left = []
    for kind in ("shm", "sem", "msg"):
        try:
            with open(f"/proc/sysvipc/{kind}") as table:
                left += [f"{kind} {row.split()[1]}" for row in table.readlines()[1:]]
        except OSError:
            continue
    return left
