"""The contract of a sandbox: settings, methods, results of commands, errors.

Two back ends keep this contract, under the same tests: `docker` and `bubblewrap`. Inside each, the first process is the
guest (`guest.py`), which starts the programs, ends them when their time is up, and speaks with the host over its standard
input and output. Programs run as an unprivileged user, with no network unless asked for, and can write to `/workspace` and
`/tmp` only. A back end that fails raises `SandboxError`, programs that make their sandbox unusable `SandboxSpoiled`; a
program that fails is an `ExecResult`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

WORKSPACE = "/workspace"  # the programs' own folder, where they start; empty after `reset`
PRIVATE = "/private"  # programs can read it and not write to it; empty after `reset`
GROUP_ID = 65534  # of the programs; their user id is each sandbox's own
MEGABYTE = 1 << 20

Command = Sequence[str] | str


class SandboxError(RuntimeError):
    """The sandbox itself failed: no daemon, no image, no answer.

    The step that meets it has no result: it is repeated on a fresh sandbox where that is safe. Else its episode ends: as the
    agent's failure where its programs had run and the back end is up, as an error otherwise; see `agentgym.core.agent_failure`.
    """


class BackendDown(SandboxError):
    """The back end is known to be down, or to have been since the sandbox was made. Never the agent's failure."""


class SandboxSpoiled(SandboxError):
    """The programs of a sandbox made it unusable: they cannot be killed, a file cannot be written, no process can start.

    The back end works. An environment scores this as the agent's failure; the sandbox is to be reset or given up.
    """


@dataclass(frozen=True)
class SandboxSpec:
    """The settings of a sandbox: its image, and the limits of its programs.

    Attributes:
        image: name of a folder of `sandboxes/`, or a Docker reference, which only the docker back end has.
        cpus: processor time for each second, in cores.
        memory: bytes of all its programs and files together.
        pids: processes and threads.
        disk: bytes that `/workspace` may hold; `/tmp` as much again. They lie in memory and count towards it.
        output: bytes kept of each of a command's stdout and stderr: the first half and the last.
        network: whether programs reach the network.
        env: environment variables of its programs, over PATH, HOME, LANG, TMPDIR, USER and LOGNAME.
        idle_timeout: seconds without a call from the host after which it ends itself.
        start_timeout: seconds that starting one may take.
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


@dataclass(frozen=True)
class ExecResult:
    """The result of a command.

    Attributes:
        exit_code: 0 to 255; 128 + the signal's number where a signal ended it; None where it goes on (a session's step).
        stdout: what it wrote, as UTF-8 with undecodable bytes replaced. Over the limit, the middle is left out and a line
            says how many bytes.
        stderr: likewise.
        timed_out: its time was up, and it and all that it had started were killed.
        oom_killed: it, or something that it started, was killed for want of memory.
        seconds: wall time.
        truncated: something was left out of stdout or stderr.
        reply: what a session's process wrote as its reply; see `Session`.
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
    """A process that is held over many steps: a Python, a shell, or a program of an environment's own.

    A program of one's own reads requests from its standard input and answers each on file descriptor 3. Both are
    frames: the length in bytes as 4 bytes, big endian, then that many bytes of UTF-8. What it writes to stdout and stderr
    meanwhile is captured like that of a command.
    """

    @property
    def alive(self) -> bool:
        """False once its process has ended, or was killed; its state is lost then, and `run` raises ValueError."""
        ...

    def run(self, text: str, timeout: float = 10.0) -> ExecResult:
        """One step: code for "python", a command for "shell", a request for a program of one's own.

        `exit_code` is the command's for "shell"; for "python" 0, or 1 after an exception, whose traceback is in stderr; for
        a program of one's own None. If the process ends instead, it is its exit code, and `alive` is False. When the time is
        up the step is interrupted (SIGINT; state is kept if the process then answers within a second), else killed.

        Raises:
            SandboxError: the sandbox failed.
            ValueError: the session has ended.
        """
        ...

    def close(self) -> None:
        """Kill the process and all that it started. May be called twice."""
        ...


class Sandbox(Protocol):
    """A place to run what a model wrote. One thread uses it at a time. Every method may raise `SandboxError`."""

    id: str
    spec: SandboxSpec

    @property
    def alive(self) -> bool:
        """False once it was closed or has failed; every call then raises SandboxError."""
        ...

    def exec(
        self,
        command: Command,
        *,
        stdin: bytes | str = b"",
        timeout: float = 10.0,
        cwd: str = WORKSPACE,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Run a command to its end: a list is a program and its arguments, a text is for `bash -c`.

        When it ends, or its time is up, all that it started is killed too, also what left its process group.
        A program that does not exist gives exit code 127, one that cannot be run 126, and stderr says why. 126 also where
        the programs of sessions leave it no process (`pids`): that is their doing, not the sandbox's.
        """
        ...

    def session(self, command: Sequence[str] | str = "python") -> Session:
        """Start a process to hold: "python", "shell", or a program of one's own and its arguments; see `Session`.

        Raises:
            FileNotFoundError, PermissionError: there is no such program, or it cannot be run, as for a local one.
            SandboxSpoiled: it cannot start, since other sessions' programs are as many as there may be (`pids`) or have
                all memory. They go when these are closed, or with `reset`.
            ValueError: there is no such kind.
        """
        ...

    def read(self, path: str, limit: int = 16 * MEGABYTE) -> bytes:
        """A file's content; relative paths begin at `/workspace`. Read with the programs' own rights.

        Raises:
            FileNotFoundError, IsADirectoryError, PermissionError, another OSError: as for a local file.
            ValueError: it is longer than `limit`, or no regular file, or a program holds a lease of it.
        """
        ...

    def write(self, path: str, data: bytes | str, mode: int = 0o644) -> None:
        """Write a file, making the folders above it; under `/private` programs can only read it.

        Once programs have run since the last reset, what lies in the way is replaced: a folder at `path` with all in it, a
        file or a link where a folder must be, modes that forbid it. A link above `path` is followed where it leads to a folder
        that programs can write to.

        Raises:
            ValueError: not under `/workspace`, `/tmp` or `/private`.
            OSError: it cannot be written, and no program has run (ENOSPC: the disk is full; EISDIR ...).
            SandboxSpoiled: it cannot be written where programs have run: they have filled the disk, or change what is there.
        """
        ...

    def upload(self, source: Path, path: str = WORKSPACE) -> None:
        """Copy a local file or folder to `path` (as it is named there). Links are refused."""
        ...

    def reset(self) -> None:
        """Kill every program and empty what can be written, so that nothing of the last episode is left.

        Raises:
            SandboxSpoiled: something is left that cannot be removed; the sandbox is closed then.
        """
        ...

    def close(self) -> None:
        """End it and all in it; a pooled one is given back instead. May be called twice; never raises."""
        ...
