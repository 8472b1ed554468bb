"""The first process of every sandbox: it starts programs, feeds and watches them, and ends them when their time is up.

The host sends it as source, so it uses the standard library only and imports little. It must be process 1 of its process
namespace: `kill(-1)` ends everything else, and its own end is the sandbox's. A frame is two lengths (4 bytes each, big endian),
a JSON header, and raw bytes. Programs and all file accesses, except writes to `/private`, have a user id that the host chose;
with one user id only, everything has that.

A session has a tag that all its descendants inherit and cannot shed: a supplementary group, or, with one user id, a hard limit
on real-time processor time, which no program here can use. It tells what to kill when a session or a command ends.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import stat
import struct
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from selectors import EVENT_READ, PollSelector

from agentgym.sandbox.guest.guest_archives import Unpacking, packed
from agentgym.sandbox.guest.guest_files import GuestPath, Upload, content, empty, restore
from agentgym.sandbox.guest.guest_programs import (
    CHUNK,
    IGNORED,
    TAGS,
    TWO_USERS,
    AsProgram,
    Process,
    Replies,
    Spoiled,
    pipes,
    proc_rules,
    programs,
    remove_shared_memory,
    scores_are_final,
    send_signal,
    shared_memory,
    start,
    turn,
)
from agentgym.sandbox.guest.guest_protect import protect

GRACE = 1.0  # seconds that a session has to answer an interrupt
KILLS = 3  # times that what a step has started is killed before its session is
KILL_PATIENCE = 20.0  # seconds in which killed processes must have gone
FORK_PATIENCE = 0.5  # seconds in which a process must be free for a new program
NO_PROCESS = (errno.EAGAIN, errno.ENOMEM)
EMPTIED = ("/workspace", "/tmp", "/dev/shm", "/dev/mqueue", "/private")
# Of memory: of version 1, of the programs' own group in version 2, of a container in version 2.
COUNTERS = ("memory/memory.oom_control", "memory/memory.events", "memory.events")
# Programs may not look into the guest, nor gain rights by what they execute.
PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 4, 38


class Unkillable(Exception):
    """Something runs on after it was killed: the sandbox is useless."""


class Guest:
    """Answers the host's calls, one after another. A call `x` is the method `do_x`."""

    def __init__(self) -> None:
        self.loop = PollSelector()
        self.received = bytearray()
        self.mains: dict[int, Process] = {}  # by process id, those that a caller waits for
        self.sessions: dict[int, Process] = {}  # by tag
        self.tags = itertools.cycle(TAGS)
        self.limit = 1 << 16
        self.idle_timeout = 3600.0
        self.env: dict[str, str] = {}
        self.limits: dict = {"nice": 0, "file": 1 << 30, "rules": -1}
        counters = [f"/sys/fs/cgroup/{name}" for name in COUNTERS]
        self.counter = next((name for name in counters if os.path.exists(name)), "")
        self.killed = self.oom_kills()
        self.ran = False  # whether a program has run since the last reset
        self.upload: Upload | Unpacking | None = None  # a file, or an archive, of which parts are missing
        self.folders = {folder: stat.S_IMODE(os.stat(folder).st_mode) for folder in EMPTIED if os.path.isdir(folder)}
        self.loop.register(0, EVENT_READ, self.receive)
        wake, waker = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(waker, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        self.loop.register(wake, EVENT_READ, lambda: (os.read(wake, 512), self.reap()))

    def receive(self) -> None:
        data = os.read(0, CHUNK)
        if not data:
            os._exit(0)
        self.received += data

    def call(self) -> tuple[dict, bytes]:
        until = time.monotonic() + self.idle_timeout
        while True:
            if len(self.received) >= 8:
                head, body = struct.unpack_from(">II", self.received)
                if len(self.received) >= 8 + head + body:
                    header = json.loads(self.received[8 : 8 + head])
                    payload = bytes(self.received[8 + head : 8 + head + body])
                    del self.received[: 8 + head + body]
                    return header, payload
            if time.monotonic() > until:
                os._exit(0)
            turn(self.loop, until)

    def answer(self, header: dict, *payload: bytes) -> None:
        text = json.dumps(header).encode()
        data = memoryview(b"".join((struct.pack(">II", len(text), sum(map(len, payload))), text, *payload)))
        while data:
            data = data[os.write(1, data) :]

    def serve(self) -> None:
        while True:
            header, payload = self.call()
            try:
                getattr(self, "do_" + header.pop("do"))(payload, **header)
            except OSError as error:
                self.answer({"errno": error.errno or errno.EIO, "message": error.strerror or str(error)})
            except ValueError as error:
                self.answer({"value": str(error)})
            except (Spoiled, Unkillable) as error:
                self.answer({"spoiled" if isinstance(error, Spoiled) else "broken": str(error)})

    def reap(self) -> bool:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if not pid:
                return True
            process = self.mains.pop(pid, None)
            if process is not None:
                code = os.waitstatus_to_exitcode(status)
                process.code = code if code >= 0 else 128 - code

    def start(self, argv: list[str], env: dict[str, str], cwd: str, stdin: bytes, form: str, tag: int) -> Process:
        """Start a program; if there is no process for it, first kill everything that no session has started."""
        self.ran = True
        until = time.monotonic() + FORK_PATIENCE
        while True:
            try:
                return self.launch(argv, env, cwd, stdin, form, tag)
            except OSError as error:
                if error.errno not in NO_PROCESS:
                    raise
                self.kill_leftovers()
                if time.monotonic() > until:
                    if self.sessions:
                        raise
                    raise Spoiled(error.strerror) from error
            turn(self.loop, time.monotonic() + 0.02)

    def launch(self, argv: list[str], env: dict[str, str], cwd: str, stdin: bytes, form: str, tag: int) -> Process:
        made = pipes(4 if form else 3)
        ours = [write if not number else read for number, (read, write) in enumerate(made)]
        theirs = [read if not number else write for number, (read, write) in enumerate(made)]
        try:
            pid = start(argv, {**self.env, **env}, cwd, theirs, tag, self.limits)
        except BaseException:
            for fd in ours:
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        process = Process(self.loop, pid, ours, self.limit, form)
        self.mains[pid] = process
        process.input.feed(stdin)
        return process

    def kill(self, doomed: Callable[[int], bool], spared: Collection[int] = ()) -> None:
        """Kill the programs whose tag is doomed, but for some process ids. They are stopped first, so that none can outrun it by forking."""
        until = time.monotonic() + KILL_PATIENCE
        stopped: set[int] = set()
        while time.monotonic() < until:
            found = [pid for pid, tag in programs() if doomed(tag) and pid not in spared]
            fresh = [pid for pid in found if pid not in stopped]
            for pid in fresh:
                send_signal(pid, signal.SIGSTOP)
            stopped.update(fresh)
            if not fresh:
                for pid in found:
                    send_signal(pid, signal.SIGKILL)
            self.reap()
            if not found:
                return
        self.kill_all()

    def kill_all(self) -> None:
        """Kill every program. The kernel sends `kill(-1)` to all at once, so a fork bomb cannot outrun it."""
        until = time.monotonic() + KILL_PATIENCE
        for session in self.sessions.values():
            session.close()
        self.sessions.clear()
        while True:
            send_signal(-1, signal.SIGKILL)
            if not self.reap():
                return
            if time.monotonic() > until:
                raise Unkillable("some programs cannot be killed")
            turn(self.loop, time.monotonic() + 0.02)

    def kill_leftovers(self) -> None:
        if self.sessions:
            self.kill(lambda tag: tag not in self.sessions)
        elif self.reap():
            self.kill_all()

    def oom_kills(self) -> int:
        if not self.counter:
            return 0
        with open(self.counter, "rb") as file:
            return int(file.read().partition(b"oom_kill ")[2].split()[0])

    def report(self, process: Process, began: float, timed_out: bool, reply: bytes | None = None) -> None:
        kills = self.oom_kills()
        parts = [bytes(part) for output in (process.out, process.err) for part in (output.head, output.tail)]
        header = {
            "code": process.code,
            "timed_out": timed_out,
            "oom": kills > self.killed,
            "seconds": time.monotonic() - began,
            "sizes": [len(part) for part in parts],
            "left_out": [process.out.left_out, process.err.left_out],
            "ended": reply is None,
        }
        self.killed = kills
        self.answer(header, *parts, reply or b"")

    def do_hello(self, _: bytes, env: dict[str, str], output: int, idle_timeout: float, limits: dict) -> None:
        rules = proc_rules()
        self.env, self.limit, self.idle_timeout, self.limits = env, output, idle_timeout, {**limits, "rules": rules}
        if TWO_USERS:
            AsProgram.user = limits.get("user", AsProgram.user)
        GuestPath.anywhere = limits.get("writable", False)
        facts = {"python": sys.version.split()[0], "two_users": TWO_USERS, "counter": self.counter}
        self.answer({**facts, "firm_scores": rules >= 0 or scores_are_final()})

    def do_ping(self, _: bytes) -> None:
        self.answer({})

    def do_exec(self, stdin: bytes, argv: list[str], env: dict[str, str], cwd: str, timeout: float) -> None:
        began = time.monotonic()
        process = self.start(argv, env, cwd, stdin, "", 0)
        while process.code is None and time.monotonic() < began + timeout:
            turn(self.loop, began + timeout)
        timed_out = process.code is None
        self.kill_leftovers()
        process.drain()
        process.close()
        self.report(process, began, timed_out)

    def do_open(self, _: bytes, argv: list[str], env: dict[str, str], form: str) -> None:
        tag = next(tag for tag in self.tags if tag not in self.sessions)
        try:
            self.sessions[tag] = self.start(argv, env, ".", b"", form, tag)
        except OSError as error:
            if error.errno not in NO_PROCESS:
                raise
            raise Spoiled(error.strerror) from error
        self.answer({"session": tag})

    def do_step(self, request: bytes, session: int, timeout: float) -> None:
        began = time.monotonic()
        process = self.sessions.get(session)
        if process is None or process.replies is None:
            raise ValueError("the session has ended")
        before = {pid for pid, tag in programs() if tag == session}
        process.replies.drain()
        process.replies.clear()  # replies without a request
        process.input.feed(request)
        reply = self.await_reply(process, process.replies, began + timeout)
        timed_out = reply is None and process.code is None and time.monotonic() >= began + timeout
        if timed_out:
            reply = self.interrupt(process, process.replies, session, before)
        if reply is None:
            self.sessions.pop(session, None)
            self.kill(lambda tag: tag == session)
        process.drain()
        self.report(process, began, timed_out, reply)
        process.out.clear()
        process.err.clear()
        if reply is None:
            process.close()

    def interrupt(self, process: Process, replies: Replies, session: int, before: set[int]) -> bytes | None:
        """Interrupt a step; then kill what it started, of which a command may ignore interrupts, and spare what was there before."""
        with suppress(ProcessLookupError), AsProgram():
            os.killpg(process.pid, signal.SIGINT)  # as Control-C does in a terminal
        reply = self.await_reply(process, replies, time.monotonic() + GRACE)
        for _ in range(KILLS):
            begun = any(tag == session and pid not in before for pid, tag in programs())
            if reply is not None or process.code is not None or session not in self.sessions or not begun:
                break
            self.kill(lambda tag: tag == session, before)
            reply = self.await_reply(process, replies, time.monotonic() + GRACE / 4)
            if reply is None and process.code is None:  # a shell goes on with the command after the one that was killed
                send_signal(process.pid, signal.SIGINT)
                reply = self.await_reply(process, replies, time.monotonic() + GRACE)
        return reply

    def await_reply(self, process: Process, replies: Replies, until: float) -> bytes | None:
        """The session's answer; None if it ended instead, or the time is up."""
        try:
            while True:
                ended = process.code is not None
                if ended:
                    replies.drain()
                reply = replies.take()
                if reply is not None or ended or time.monotonic() >= until:
                    return reply
                turn(self.loop, until)
        except ValueError as error:
            process.err.add(f"{error}\n".encode())
            return None

    def do_drop(self, _: bytes, session: int) -> None:
        process = self.sessions.pop(session, None)
        if process is not None:
            self.kill(lambda tag: tag == session)
            process.close()
        self.answer({})

    def do_read(self, _: bytes, path: str, limit: int) -> None:
        for data in content(path, limit):
            self.answer({"more": True}, data)
        self.answer({})

    def do_write(self, data: bytes, path: str, mode: int, part: int, last: bool) -> None:
        if not part:
            self.drop_upload()
            self.upload = Upload(self.place(path), mode)
        self.take_part(Upload, data, last)

    def do_unpack(self, data: bytes, path: str, part: int, last: bool) -> None:
        if not part:
            self.drop_upload()
            self.upload = Unpacking(self.place(path, whole=True))
        self.take_part(Unpacking, data, last)

    def take_part(self, kind: type[Upload | Unpacking], data: bytes, last: bool) -> None:
        if not isinstance(self.upload, kind):
            what = "a file" if kind is Upload else "an archive"
            raise ValueError(f"a part of {what} whose first part was rejected")
        try:
            self.upload.add(data)
            if last:
                self.upload.finish()
        except BaseException:
            self.drop_upload()
            raise
        if last:
            self.drop_upload()
        self.answer({})

    def do_pack(self, _: bytes, path: str, limit: int) -> None:
        for data in packed(path, limit):
            self.answer({"more": True}, data)
        self.answer({})

    def drop_upload(self) -> None:
        if self.upload is not None:
            self.upload.close()
            self.upload = None

    def place(self, path: str, whole: bool = False) -> GuestPath:
        """A path that the host asks for; `whole`: of a folder."""
        place = GuestPath(path, self.ran, whole)
        if place.open_top(whole) and self.limits["rules"] >= 0:  # they name the folders of the root
            os.close(self.limits["rules"])
            self.limits["rules"] = proc_rules()
        return place

    def do_folder(self, _: bytes, path: str) -> None:
        self.place(path, whole=True).make()
        self.answer({})

    def do_protect(self, _: bytes, path: str) -> None:
        if not GuestPath.anywhere:
            raise ValueError("only a sandbox with a writable root can protect files")
        protect(path)
        self.answer({})

    def do_reset(self, _: bytes) -> None:
        self.kill_all()
        self.drop_upload()
        with AsProgram():
            remove_shared_memory()
        for folder, mode in self.folders.items():
            with AsProgram(folder != "/private"):
                if folder != "/private":
                    restore(folder, mode)
                empty(folder)
        self.killed = self.oom_kills()
        left = [f"{folder}/{name}" for folder in self.folders for name in os.listdir(folder)]
        left += [f"{kind} {number}" for kind, number in shared_memory()]
        self.ran = bool(left)
        self.answer({"left": left[:10]})


def main() -> None:
    if os.getpid() != 1:
        sys.exit("the guest must be process 1 of a process namespace of its own")
    os.umask(0o022)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:  # programs inherit what is ignored
        signal.signal(number, signal.SIG_IGN if number in IGNORED else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((PR_SET_DUMPABLE, 0), (PR_SET_NO_NEW_PRIVS, 1)):
        if libc.prctl(option, value, 0, 0, 0):
            raise OSError(ctypes.get_errno(), f"prctl({option})")
    # System V segments go with the last program that uses them; without this right, `reset` removes them.
    with suppress(OSError), open("/proc/sys/kernel/shm_rmid_forced", "w") as file:
        file.write("1")
    reserved = os.open("/dev/null", os.O_RDONLY)  # descriptor 3 is a session's: no pipe of ours may take it
    if reserved != 3:
        os.dup2(reserved, 3, inheritable=False)
    Guest().serve()


if __name__ == "__main__":
    main()
