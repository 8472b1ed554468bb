"""Control groups, version 1 or 2, with limits of memory, processes and processor time.

They are children of this process's own group, or in version 2 of the nearest one above that can have children with limits.
"""

import errno
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
CONTROLLERS = ("memory", "pids", "cpu")
SESSION = "agentgym-session-"  # prefix of the groups of `agentgym serve`; sandboxes are in other groups
SOCKET_MEMORY = 32 << 20  # bytes in TCP and UDP sockets, which version 1 counts apart from memory
PERIOD = 100_000  # microseconds over which processor time is counted


@dataclass(frozen=True)
class GroupLimits:
    """`memory` in bytes, swap included; `pids` processes and threads; `cpus` in cores; `spare` bytes more for the guest."""

    memory: int
    pids: int
    cpus: float
    spare: int = 0


@dataclass(frozen=True)
class ControlGroup:
    """A sandbox's folders: those of the guest, one for each controller in version 1, memory first; one in version 2.

    `programs` limits the programs' memory without the guest: the kernel then does not kill the guest. It is inside the memory
    folder in version 1, and beside the guest's in version 2, where `whole` is the parent of both.
    """

    folders: tuple[Path, ...]
    version: int
    programs: Path | None = None
    whole: Path | None = None

    @property
    def every(self) -> tuple[Path, ...]:
        return tuple(f for f in (self.programs, *self.folders, self.whole) if f is not None)

    def processes(self) -> list[int]:
        found: set[int] = set()
        for folder in self.every:
            with suppress(OSError):  # it is gone
                found.update(map(int, (folder / "cgroup.procs").read_text().split()))
        return sorted(found)


def version() -> int:
    return 2 if (ROOT / "cgroup.controllers").exists() else 1


def create(name: str, limits: GroupLimits, keep: Callable[[ControlGroup], None] = lambda group: None) -> ControlGroup:
    """Make a group, after a call of `keep`. OSError: groups cannot be made here, for lack of rights or of controllers."""
    parents = _parents(CONTROLLERS)
    limited = {parent / name: controllers for parent, controllers in parents.items()}
    if version() == 2:
        whole = next(iter(limited))
        group = ControlGroup((whole / "guest",), 2, whole / "programs", whole)
        limited[whole / "guest"] = ()
    else:
        group = ControlGroup(tuple(limited), 1, next(iter(limited)) / "programs")
    keep(group)
    folders = [(folder, limits, controllers) for folder, controllers in limited.items()]
    _make([*folders, (group.every[0], replace(limits, spare=0), ("memory",))])
    return group


def create_plain(name: str, memory: int, pids: int) -> ControlGroup:
    """Make a group without parts, limited to `memory` bytes, swap included, and `pids` threads; 0: no limit. May raise OSError."""
    wanted = tuple(controller for controller, most in (("memory", memory), ("pids", pids)) if most)
    limits = GroupLimits(memory, pids, cpus=1.0)
    folders = [(parent / name, limits, controllers) for parent, controllers in _parents(wanted).items()]
    _make(folders)
    return ControlGroup(tuple(folder for folder, *_ in folders), version())


def _make(folders: Iterable[tuple[Path, GroupLimits, Sequence[str]]]) -> None:
    """Make folders and set their limits by some controllers. On failure, those that were made are removed."""
    made: list[Path] = []
    try:
        for folder, limits, controllers in folders:
            if version() == 2 and folder.parent in made:
                _delegate(folder.parent, controllers)
            folder.mkdir()
            made.insert(0, folder)
            for name, value in settings(limits, version()).items():
                optional = any(part in name for part in ("swap", "memsw", "kmem"))  # not every kernel counts these
                if name.split(".")[0] in controllers and (not optional or (folder / name).exists()):
                    (folder / name).write_text(value)
    except OSError:
        remove(ControlGroup(tuple(made), version()), patience=0.0)
        raise


def settings(limits: GroupLimits, version: int) -> dict[str, str]:
    quota = max(1000, int(limits.cpus * PERIOD))
    memory = str(limits.memory + limits.spare)
    if version == 2:
        pids = str(limits.pids)
        return {"memory.max": memory, "memory.swap.max": "0", "pids.max": pids, "cpu.max": f"{quota} {PERIOD}"}
    return {
        "memory.limit_in_bytes": memory,
        "memory.memsw.limit_in_bytes": memory,
        "memory.kmem.tcp.limit_in_bytes": str(SOCKET_MEMORY),
        "pids.max": str(limits.pids),
        "cpu.cfs_period_us": str(PERIOD),
        "cpu.cfs_quota_us": str(quota),
    }


def remove(group: ControlGroup, patience: float = 10.0) -> bool:
    """Kill a group's processes and remove it. False if a process remains after `patience` seconds."""
    until = time.monotonic() + patience
    while True:
        for pid in group.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        left = []
        for folder in group.every:
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                left.append(folder)
        if not left:
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.005)


def oom_kills(group: ControlGroup) -> int:
    name = "memory.events" if group.version == 2 else "memory.oom_control"
    kills = 0
    for folder in filter(None, (group.programs, *group.folders)):
        with suppress(OSError, ValueError):  # gone, or a kernel without the count
            fields = (folder / name).read_text().split()
            kills += int(fields[fields.index("oom_kill") + 1])
    return kills


def _parents(controllers: Sequence[str]) -> dict[Path, Sequence[str]]:
    """The folders in which this process can make groups, each with its controllers, memory first."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = {name: path.lstrip("/") for _, names, path in lines for name in names.split(",")}
    if version() == 2:
        return {delegating_folder(_below(ROOT, own.get("", "")), controllers): controllers}
    if missing := [name for name in controllers if not (ROOT / name / "cgroup.procs").exists()]:
        raise OSError(f"no control groups for {', '.join(missing)} under {ROOT}")
    parents: dict[Path, Sequence[str]] = {}
    for name in controllers:
        folder = _below((ROOT / name).resolve(), own.get(name, ""))
        parents[folder] = (*parents.get(folder, ()), name)
    return parents


def _below(root: Path, path: str) -> Path:
    """This process's folder, or the root if a container shows another part of the tree than it names."""
    folder = root / path if (root / path / "cgroup.procs").exists() else root
    return folder.parent if folder.name.startswith(SESSION) else folder


def delegating_folder(folder: Path, controllers: Sequence[str] = CONTROLLERS) -> Path:
    """In version 2, the nearest group, from `folder` upwards, whose children can have the controllers."""
    while True:
        try:
            _delegate(folder, controllers)
            return folder
        except OSError as error:  # EBUSY: it holds processes; ENOENT: it has not got them itself; or no rights
            if folder == ROOT and error.errno == errno.EBUSY:  # that of a container
                why = f"move the processes that are in {ROOT} itself into a group below it"
                raise OSError(errno.EBUSY, why) from error
            if folder == ROOT:
                raise
            folder = folder.parent


def _delegate(folder: Path, controllers: Sequence[str]) -> None:
    file = folder / "cgroup.subtree_control"
    if not set(controllers) <= set(file.read_text().split()):
        file.write_text(" ".join(f"+{name}" for name in controllers))
