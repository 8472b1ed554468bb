"""The embedded back end: a sandbox of Linux namespaces made by bubblewrap, with limits by control groups. No daemon.

As root the guest is root inside, with the few capabilities that it needs to rule the programs. Otherwise there is
one user, and limits are resource limits of each process: weaker, and logged.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from agentgym.processes import cgroups
from agentgym.sandbox.api import MEGABYTE, SandboxError, SandboxSpec
from agentgym.sandbox.backends import users
from agentgym.sandbox.backends.bwrap_arguments import IN_MEMORY, MEMORY_PLACE, SYSTEM_PATH, arguments
from agentgym.sandbox.backends.file_limits import files_of, limit_files
from agentgym.sandbox.backends.host_root import host_python
from agentgym.sandbox.discovery import Found, found, marks
from agentgym.sandbox.guest.channel import SocketStream
from agentgym.sandbox.guest.guest_sandbox import GuestSandbox, guest_command

LOG = logging.getLogger(__name__)
OWN_MEMORY = 24 * MEGABYTE  # what the guest and bubblewrap may take besides the programs
OWN_PIDS = 2
PROGRAM_NICENESS = 10  # so that the guest comes first when programs keep the processor busy
END_PATIENCE = 10.0
_HOST_SERVES = ("python", "sql")  # the images in whose place this machine's own programs do
_dead_removed = False  # what other processes have left, by this one
_ENTER = 'for group in $0; do echo $$ > "$group/cgroup.procs" || exit 70; done; exec "$@"'
# Pseudo-terminals of the sandbox's own, where nobody else sees them, and not more of them than it may have.
_TERMINALS = f'mount -t devpts -o {users.PTY_OPTIONS} devpts /dev/pts || exit 71; exec "$@"'
_OWN_MOUNTS = ["unshare", "--mount", "--propagation", "private", "--", "sh", "-c", _TERMINALS, "sh"]


def open_bubblewrap(spec: SandboxSpec, run: str, rootfs: Path | None = None) -> GuestSandbox:
    """Start a sandbox.

    Args:
        run: whose it is; `bubblewrap_sandboxes` tells it.
        rootfs: the folder to take as its root. None: the image's, if it was built, else this machine's `/usr` and Python.

    Raises:
        SandboxError: it could not be started; says why.
    """
    if shutil.which("bwrap") is None:
        raise SandboxError(
            "no bwrap on the PATH: install bubblewrap (apt install bubblewrap), or use the docker back end"
        )
    _remove_dead()
    id = f"agentgym-{uuid.uuid4().hex[:12]}"
    embedded = Embedded(id, run, spec, rootfs if rootfs is not None else image_root(spec.image))
    return embedded.open()


def usable() -> str:
    """The reason why this machine cannot start a bubblewrap sandbox; empty if it can. Starts one to know."""
    try:
        open_bubblewrap(SandboxSpec(start_timeout=20.0), run="probe").close()
    except SandboxError as error:
        return str(error)
    return ""


def image_root(name: str) -> Path | None:
    """The folder that a sandbox of an image starts from; None: this machine's own programs do. SandboxError: not built."""
    from agentgym.sandbox.images import build as images

    try:
        rootfs = images.rootfs(name)
    except ValueError as error:
        raise SandboxError(f"the bubblewrap back end has no image {name!r}: {error}") from error
    if rootfs is None and name not in _HOST_SERVES:
        raise SandboxError(f"the image {name!r} is not built: run `agentgym sandbox build {name}`")
    return rootfs


class Embedded:
    """The processes, control group and record of one sandbox."""

    def __init__(self, id: str, run: str, spec: SandboxSpec, rootfs: Path | None) -> None:
        self.id = id
        self.run = run
        self.spec = spec
        self.rootfs = rootfs
        self.group: cgroups.Group | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.owner = os.getpid()
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the sandbox
        self.record = records() / f"{id}.json"

    def open(self) -> GuestSandbox:
        """Start it. SandboxError if it does not come up; what was made until then is removed."""
        limits: dict[str, Any] = {}
        try:
            self.group = cgroups.create(self.id, self._limits(), self._keep)
            limits = {"nice": PROGRAM_NICENESS, "group": f"{MEMORY_PLACE}/cgroup.procs"}
        except OSError as error:
            limits["more"] = {"AS": self.spec.memory}
            limits["more"]["NPROC"] = self.spec.pids
            _warn_once(
                f"no control groups ({error}): each process may take {self.spec.memory} bytes of memory instead of all together, "
                "the processor time is not limited"
            )
        if os.getuid() != 0:
            _warn_once("not root: programs are one user with the guest and can write to /private")
        else:
            limits["user"] = users.own_user(users.few_users())
        ours, theirs = socket.socketpair()
        try:
            self._start(theirs)
            self._keep(self.group)
        except BaseException:
            ours.close()
            self.end()
            raise
        finally:
            theirs.close()
        path = SYSTEM_PATH if self.rootfs is not None else f"{host_python().parent}:{SYSTEM_PATH}"
        box = GuestSandbox(
            SocketStream(ours), self.spec, self.id, path=path, limits=limits, reason=self.reason, on_close=self.end
        )
        box.facts["files_unlimited"] = self._limit_files()
        return box

    def _limit_files(self) -> str:
        """Limit the number of files. Why that cannot be; empty if it is done."""
        guests = _children(self.process.pid) if self.process is not None else []
        why_not = limit_files(guests[0], tuple(IN_MEMORY), files_of(self.spec.disk)) if guests else ""
        if why_not:
            _warn_once(f"the number of files in a sandbox is not limited: {why_not}")
        return why_not

    def _limits(self) -> cgroups.GroupLimits:
        return cgroups.GroupLimits(self.spec.memory, self.spec.pids + OWN_PIDS, self.spec.cpus, spare=OWN_MEMORY)

    def _start(self, end: socket.socket) -> None:
        terminals = _own_terminals()
        options, data = arguments(self.spec, self.rootfs, self.group, terminals)
        files = []
        try:
            for before, place, content in data:
                fd = os.memfd_create("agentgym")
                files.append(fd)
                os.write(fd, content)
                os.lseek(fd, 0, os.SEEK_SET)
                options += [*before, str(fd), *([place] if place else [])]
            guest = guest_command("python3" if self.rootfs is not None else str(host_python()))
            command = [*(_OWN_MOUNTS if terminals else []), "bwrap", *options, "--remount-ro", "/", "--", *guest]
            if self.group is not None:
                command = ["sh", "-c", _ENTER, " ".join(map(str, self.group.folders)), *command]
            self.process = subprocess.Popen(
                command, stdin=end.fileno(), stdout=end.fileno(), stderr=self.errors, pass_fds=files, cwd="/"
            )
        except OSError as error:
            raise SandboxError(f"bubblewrap could not be started: {error}") from error
        finally:
            for fd in files:
                os.close(fd)

    def _keep(self, group: cgroups.Group | None) -> None:
        """Write down what `remove` needs, for the case that this process cannot."""
        folders = [str(folder) for folder in group.every] if group is not None else []
        version = group.version if group is not None else 0
        bwrap = self.process.pid if self.process is not None else 0
        fresh = self.record.with_suffix(".part")
        fresh.write_text(json.dumps({**marks(self.run), "bwrap": bwrap, "folders": folders, "version": version}))
        fresh.replace(self.record)

    def reason(self) -> str:
        """The reason why a sandbox has ended, as far as it is known."""
        known = []
        if self.process is not None:
            try:
                known.append(f"bwrap ended with {self.process.wait(1.0)}")
            except subprocess.TimeoutExpired:
                known.append("bwrap is running")
        if self.group is not None and (kills := cgroups.oom_kills(self.group)):
            known.append(f"{kills} processes were killed for want of memory")
        self.errors.seek(0)
        if text := self.errors.read()[-2000:].decode("utf-8", "replace").strip():
            known.append(text)
        return ", ".join(known)

    def end(self) -> None:
        """Kill all of it and remove what it was made of. Does nothing in a forked child: the sandbox is the parent's."""
        if os.getpid() != self.owner:
            return
        if self.process is not None:
            _kill_tree(self.process.pid)
            try:
                self.process.wait(END_PATIENCE)
            except subprocess.TimeoutExpired:
                LOG.warning("bwrap of sandbox %s has not ended within %.0f s of being killed", self.id, END_PATIENCE)
        if self.group is not None and not cgroups.remove(self.group):
            LOG.warning("the control group of sandbox %s could not be removed: %s", self.id, self.group.folders)
        else:
            self.record.unlink(missing_ok=True)
        self.errors.close()


def _kill_tree(pid: int) -> None:
    """Kill bwrap's child, which is process 1 of the sandbox, so that all in it ends; then bwrap."""
    for each in (*_children(pid), pid):
        try:
            os.kill(each, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@cache
def _own_terminals() -> bool:
    """True if each sandbox can have its own limited set of pseudo-terminals here."""
    if os.getuid() != 0:
        return False
    try:
        tried = subprocess.run([*_OWN_MOUNTS, "true"], capture_output=True, text=True, timeout=30, check=False)
        error = tried.stderr.strip() if tried.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as failure:
        error = str(failure)
    if error:
        _warn_once(f"the number of pseudo-terminals of a sandbox is not limited: {error}")
    return not error


@cache
def _warn_once(text: str) -> None:
    LOG.warning(text)


def records() -> Path:
    """The folder of records of this user's running sandboxes."""
    folder = Path(tempfile.gettempdir(), f"agentgym-bubblewrap-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if folder.is_symlink() or status.st_uid != os.getuid():
        raise SandboxError(f"{folder} belongs to user {status.st_uid}: remove it, or set TMPDIR")
    return folder


def bubblewrap_sandboxes() -> list[Found]:
    """The sandboxes of this user on this machine, of whatever run."""
    return [found(id, "bubblewrap", {key: str(value) for key, value in kept.items()}) for id, kept in _kept()]


def _remove_dead() -> None:
    """Remove what dead processes have left, once a process: control groups and records outlive a killed owner.

    Their guests may be ending still. What does not go in time is left to the next start.
    """
    global _dead_removed  # noqa: PLW0603 - module state: what this process has done
    if _dead_removed:
        return
    until = time.monotonic() + END_PATIENCE
    for each in bubblewrap_sandboxes():
        if not each.alive:
            try:
                remove(each, max(0.1, until - time.monotonic()))
            except SandboxError as error:
                LOG.warning("%s", error)
                return
    for file in records().glob("*.part"):  # of a process that was killed as it wrote
        with suppress(FileNotFoundError):
            if time.time() - file.stat().st_mtime > END_PATIENCE:
                file.unlink()
    _dead_removed = True


def remove(which: Found, patience: float = END_PATIENCE) -> None:
    """End a sandbox that another process made, and remove what is left of it. SandboxError if something stays."""
    for id, kept in _kept():
        if id != which.id:
            continue
        group = cgroups.Group(tuple(Path(folder) for folder in kept["folders"]), kept["version"])
        if group.folders:
            if not cgroups.remove(group, patience):
                raise SandboxError(f"sandbox {id} could not be removed: processes {group.processes()} do not end")
        elif _is_bwrap(kept["bwrap"]):
            _kill_tree(kept["bwrap"])
        (records() / f"{id}.json").unlink(missing_ok=True)


def _is_bwrap(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == "bwrap"
    except OSError:
        return False


def _kept() -> Iterator[tuple[str, dict[str, Any]]]:
    for file in sorted(records().glob("*.json")):
        try:
            yield file.stem, json.loads(file.read_text())
        except (FileNotFoundError, json.JSONDecodeError):  # removed, or being written, meanwhile
            continue
