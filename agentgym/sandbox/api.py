"""The contract of a sandbox: settings, methods, results of commands, errors. All back ends pass the same tests.

Programs run as an unprivileged user, by default without network, and can write only to `/workspace` and `/tmp`.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

WORKSPACE = "/workspace"  # the programs' own folder, where they start; empty after `reset`
PRIVATE = "/private"  # programs can read it and not write to it; empty after `reset`
SOCKET = "/gateway.sock"  # where programs find `SandboxSpec.socket`
GROUP_ID = 65534  # of the programs; their user id is each sandbox's own
MEGABYTE = 1 << 20

Command = Sequence[str] | str


class SandboxError(RuntimeError):
    """The sandbox itself failed: no daemon, no image, no answer. See `agentgym.core.agent_failure` for how an episode ends."""


class BackendDown(SandboxError):
    """The back end is down, or was since the sandbox was made. Never the agent's failure."""


class SandboxesInUse(SandboxError):
    """All sandboxes that the back end gives are in use: it is up."""


class SandboxSpoiled(SandboxError):
    """The programs of a sandbox made it unusable; reset or close it. Environments score this as the agent's failure."""


def whole_number(variable: str, default: int) -> int:
    """A variable of the environment. ValueError: it is no whole number of at least 1."""
    text = os.environ.get(variable) or str(default)
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{variable}={text}: must be a whole number of at least 1")
    return int(text)


@dataclass(frozen=True)
class SandboxSpec:
    """The settings of a sandbox: its image, and the limits of its programs.

    Attributes:
        image: name of a folder of `sandboxes/`; the path of such a folder, which begins with `/`, `./` or `../`; or a Docker
            reference (docker back end only).
        cpus: processor time per second, in cores.
        memory: bytes of all its programs and files together.
        pids: processes and threads.
        disk: bytes of `/workspace`, of `/tmp`, and of a writable root. All are in memory and count towards `memory`, except
            that docker keeps a writable root on the engine's disk.
        output: bytes kept of each of a command's stdout and stderr: the first half and the last.
        env: environment variables, over PATH, HOME, LANG, TMPDIR, USER and LOGNAME.
        idle_timeout: seconds without a call from the host after which the sandbox ends.
        start_timeout: seconds that starting one may take.
        writable_root: the image's files too can be changed, and others made beside them, where their owners and modes allow it;
            `write` and `put_archive` also make new folders in `/`, to which programs can write. `reset` and `close` drop all
            changes: the image stays as it is, and is not copied. Needs bubblewrap as root, or an engine that limits layers.
        socket: a Unix socket of this machine that programs may connect to, at `SOCKET`; "": none. Needs a back end on this machine.
    """

    image: str = "python"
    cpus: float = 1.0
    memory: int = 512 * MEGABYTE
    pids: int = 64
    disk: int = 64 * MEGABYTE
    output: int = 64 * 1024
    network: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    idle_timeout: float = 3600.0
    start_timeout: float = 60.0
    writable_root: bool = False
    socket: str = ""


@dataclass(frozen=True)
class ExecResult:
    """The result of a command.

    Attributes:
        exit_code: 0 to 255; 128 + the signal's number if a signal ended it; None if it still runs (a session's step).
        stdout, stderr: UTF-8 with undecodable bytes replaced. Beyond the limit a line replaces the middle (`truncated`).
        timed_out: the timeout passed; the command and all its children were killed.
        oom_killed: the command or a child was killed because memory ran out.
        seconds: wall time.
        reply: the reply of a session's process; see `Session`.
    """

    exit_code: int | None
    stdout: str
    stderr: str
    timed_out: bool = False
    oom_killed: bool = False
    seconds: float = 0.0
    truncated: bool = False
    reply: str = ""

    @property
    def ok(self) -> bool:
        """True if the command ended by itself with 0, or if a session's step completed."""
        return self.exit_code in (0, None) and not self.timed_out


class Session(Protocol):
    """A process that lives over many steps: Python, a shell, or a custom program.

    A custom program reads requests from its standard input and answers each on file descriptor 3. Both are frames: the length
    as 4 bytes, big endian, then UTF-8.
    """

    @property
    def alive(self) -> bool:
        """False once the process has ended: its state is lost, and `run` raises ValueError."""

    def run(self, text: str, timeout: float = 10.0) -> ExecResult:
        """One step: code for "python", a command for "shell", a request for a custom program.

        `exit_code` is the command's for "shell"; 0 for "python", or 1 after an exception; None for a custom program. If the
        process ends instead, it is that of the process, and `alive` is False. At the timeout the step is interrupted by
        SIGINT, which keeps the state if the process answers within a second. Else all that the step started is killed, and, if
        there still is no answer, the process too. A command that ignores SIGINT so costs a shell only itself, unless a
        loop keeps starting others.

        Raises:
            SandboxError: the sandbox failed.
            ValueError: the session has ended.
        """

    def close(self) -> None:
        """Kill the process and all its children. May be called twice."""


class Sandbox(Protocol):
    """Runs programs that a model wrote, for one thread at a time. Every method may raise `SandboxError`."""

    id: str
    spec: SandboxSpec

    @property
    def alive(self) -> bool:
        """False once the sandbox is closed or has failed; every call then raises SandboxError."""

    def exec(
        self,
        command: Command,
        *,
        stdin: bytes | str = b"",
        timeout: float = 10.0,
        cwd: str = WORKSPACE,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Run a command to its end: a list is a program and its arguments, a string is run by `bash -c`.

        When it ends or times out, all its children are killed too. The exit code is 127 for a missing program, and 126 for one
        that cannot be run, or if programs of sessions use all processes (`pids`); stderr gives the reason.
        """

    def session(self, command: Command = "python") -> Session:
        """Start a session: "python", "shell", or a custom program with its arguments.

        Raises:
            FileNotFoundError, PermissionError: the program does not exist or cannot be run.
            SandboxSpoiled: other sessions use all processes (`pids`) or all memory. Closing them, or `reset`, frees both.
            ValueError: unknown kind.
        """

    def read(self, path: str, limit: int = 16 * MEGABYTE) -> bytes:
        """A file's content; relative paths begin at `/workspace`. Read with the programs' own rights.

        Raises:
            FileNotFoundError, IsADirectoryError, PermissionError, another OSError: as for a local file.
            ValueError: the file is longer than `limit`, is not a regular file, or a program holds a lease on it.
        """

    def write(self, path: str, data: bytes | str, mode: int = 0o644) -> None:
        """Write a file and create its parent folders; under `/private` programs can only read it.

        Once programs have run since the last reset, obstacles are replaced: a folder at `path`, a file or a link in place of
        a parent folder, and modes that forbid writing. A link to a folder that programs can write to is followed.

        Raises:
            ValueError: not under `/workspace`, `/tmp` or `/private`; with a writable root, at `/` or in `/proc`, `/sys`, `/dev`.
            OSError: it cannot be written, and no program has run (ENOSPC: the disk is full; EISDIR ...).
            SandboxSpoiled: programs that have run filled the disk, or keep changing the folder.
        """

    def upload(self, source: Path, path: str = WORKSPACE) -> None:
        """Copy a local file or folder into `path`. Links are refused."""

    def put_archive(
        self, data: bytes | str | os.PathLike[str], to: str = WORKSPACE, limit: int = 256 * MEGABYTE
    ) -> None:
        """Unpack a tar archive, its bytes or its path, into a folder, which is made; gzip, bzip2 and xz are recognised.

        Files belong to the programs' user, or under `/private`, where programs only read, to the guest. Modes lose the bits
        besides 0o755, times are kept, hard links become copies. Obstacles are treated as by `write`, except that no link on
        the way is followed. What is unpacked before an error stays.

        Args:
            limit: bytes of its files, with some 100 more for each entry, and of the uncompressed archive.

        Raises:
            ValueError: no tar archive, over the limit, or nothing was written because a path or a link leads out of the folder,
                lies below a link or file, or is a device or pipe; a link under `/private`; `to` is where `write` may not.
            OSError, SandboxSpoiled: as for `write`.
        """

    def get_archive(self, path: str = WORKSPACE, limit: int = 256 * MEGABYTE) -> bytes:
        """A folder's content as a tar archive, sorted by name, with names relative to it; a file gives an archive of it alone.

        Read with the programs' own rights. Links are packed as links, and may lead anywhere: unpack it with
        `tarfile.data_filter`. Pipes, sockets and devices are left out.

        Raises:
            FileNotFoundError, PermissionError, another OSError: as for a local folder.
            ValueError: over the `limit`, counted as by `put_archive`; over 200 folders deep; a file changed meanwhile.
        """

    def protect(self, paths: Sequence[str]) -> None:
        """Take the programs' right, and the host's, to change, replace, remove or rename files and folders with all in them.

        It holds until `reset`. Programs can still read and run them. Of the folders above, too, they can rename none; in these
        they can make files, and rename or remove only their own. What a session's program has open for writing stays open.

        Raises:
            ValueError: no writable root; `/`, or in `/proc`, `/sys`, `/dev`; over 200 folders deep.
            OSError: nothing is there, or a link is on the way (its target is not protected either).
        """

    def reset(self) -> None:
        """Kill every program and empty all writable folders. SandboxSpoiled if something stays; the sandbox is then closed.

        One with a writable root is started again, with a new `id`.
        """

    def close(self) -> None:
        """End the sandbox; a pooled one is returned to its pool. May be called twice; never raises."""
