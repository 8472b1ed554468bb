"""The embedded back end: a sandbox of Linux namespaces made by bubblewrap, with limits by control groups. No daemon.

As root the guest is root inside, with the few capabilities that it needs to control programs. Without root there is one user,
and limits are resource limits of each process, which are weaker; a log message says so.
"""

import itertools
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from agentgym.processes import cgroups
from agentgym.processes.cgroups import ControlGroup, GroupLimits
from agentgym.sandbox.api import GROUP_ID, SOCKET, SandboxError, SandboxSpec
from agentgym.sandbox.backends import limits, seccomp
from agentgym.sandbox.discovery import Found, found, marks
from agentgym.sandbox.guest.guest_sandbox import SYSTEM_PATH, GuestSandbox, SocketStream, greet, guest_command
from agentgym.sandbox.guest.project_files import PACKAGES, project_files
from agentgym.sandbox.images import build as images
from agentgym.sandbox.images import shelf

LOG = logging.getLogger(__name__)
END_PATIENCE = 10.0
HOST_PYTHON = Path(sys.base_prefix, "bin", "python3")
MEMORY_PLACE = "/sys/fs/cgroup/memory"  # of the programs' group, inside
IN_MEMORY = {"/workspace": "1777", "/tmp": "1777", "/dev/shm": "1777", "/private": "0755"}  # folders and their modes
_HOST_SERVES = ("python", "sql")  # images that this machine's own programs can replace
_ENTER = 'for group in $0; do echo $$ > "$group/cgroup.procs" || exit 70; done; exec "$@"'
# Mounts before bwrap's, in a mount namespace that ends with the sandbox.
_OWN_MOUNTS = ["unshare", "--mount", "--propagation", "private", "--", "sh", "-c"]
# Private pseudo-terminals of the sandbox, limited in number.
_TERMINALS = f"mount -t devpts -o {limits.PTY_OPTIONS} devpts /dev/pts || exit 71; "
# An image's files below a layer in memory that takes all changes, at $0/root. $1: the layer's limits; $2: a folder; $3: the root
# folders of the image and of those below it, from there.
_LAYER = (
    'mount -t tmpfs -o "$1,mode=0755,nosuid,nodev" tmpfs "$0" && mkdir "$0/upper" "$0/work" "$0/root" && cd "$2" && '
    'mount -t overlay -o "lowerdir=$3,upperdir=$0/upper,workdir=$0/work,redirect_dir=off,metacopy=off,nosuid,nodev" '
    'overlay "$0/root" || exit 72; cd /; shift 3; '
)
_RUN = 'exec "$@"'
_NETWORK_ETC = ("resolv.conf", "hosts", "nsswitch.conf", "services", "protocols", "ssl", "ca-certificates", "pki")
_OWN = ("proc", "dev", "sys", "tmp", "workspace", "private")
_HIDDEN = ("kcore", "keys", "kallsyms", "timer_list", "sched_debug", "cmdline", "config.gz", "modules", "partitions")
# Of this machine's /usr and /etc; also lib, lib64 and the like. /usr/local and /usr/src stay hidden.
_USR = ("bin", "sbin", "libexec", "share")
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types")
_PASSWD = b"root:x:0:0:root:/:/bin/false\nnobody:x:65534:65534:nobody:/workspace:/bin/bash\n"
_GROUP = b"root:x:0:\nnogroup:x:65534:\n"


def open_bubblewrap(spec: SandboxSpec, run: str, rootfs: Path | None = None) -> GuestSandbox:
    """Start a sandbox from `rootfs`, else the image's root folder, else this machine's programs. SandboxError says why not."""
    if shutil.which("bwrap") is None:
        todo = "install bubblewrap (apt install bubblewrap), or use the docker back end"
        raise SandboxError(f"no bwrap on the PATH: {todo}")
    found = rootfs if rootfs is not None else image_root(spec.image)
    if spec.writable_root and (why_not := no_writable_root(spec.image, found)):
        raise SandboxError(why_not)
    if found is not None and os.getuid() and len(images.layers_of(found)) > 1:
        raise SandboxError(f"bubblewrap mounts images of several layers, such as {spec.image!r}, for root only")
    return Embedded(run, spec, found).open()


def usable() -> str:
    """The reason why this machine cannot start a bubblewrap sandbox; empty if it can. Starts one to know."""
    try:
        open_bubblewrap(SandboxSpec(start_timeout=20.0), run="probe").close()
    except SandboxError as error:
        return str(error)
    return ""


def no_writable_root(image: str, rootfs: Path | None) -> str | None:
    """The reason why there is none for an image; None if there is."""
    if os.getuid():
        return "bubblewrap gives a writable root to root only: run as root, or use the docker back end"
    if rootfs is None:
        todo = f"run `agentgym sandbox build {image}`"
        return f"a writable root needs an image, and this machine's programs stand in for it: {todo}"
    return None


def image_root(name: str) -> Path | None:
    """The root folder of an image; None: this machine's own programs serve. SandboxError: not built."""
    try:
        rootfs = images.rootfs(name)
    except ValueError as error:
        raise SandboxError(f"the bubblewrap back end has no image {name!r}: {error}") from error
    if rootfs is None and name not in _HOST_SERVES:
        raise SandboxError(f"the image {name!r} is not built: run `{images.docker_command(name)}`")
    return rootfs


class Embedded:
    def __init__(self, run: str, spec: SandboxSpec, rootfs: Path | None) -> None:
        self.id = f"agentgym-{uuid.uuid4().hex[:12]}"
        self.run = run
        self.spec = spec
        self.rootfs = rootfs
        self.layers = images.layers_of(rootfs) if rootfs is not None else ()
        self.overlaid = spec.writable_root or len(self.layers) > 1
        self.group: ControlGroup | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the sandbox
        self.record = records() / f"{self.id}.json"
        self.held = shelf.hold(layer.parent for layer in self.layers if shelf.read(layer.parent))

    def open(self) -> GuestSandbox:
        spec = self.spec
        pids, spare = spec.pids + limits.GUEST_PROCESSES, limits.GUEST_MEMORY
        try:
            self.group = cgroups.create(self.id, GroupLimits(spec.memory, pids, spec.cpus, spare), self._keep)
            own: dict[str, Any] = {"nice": limits.PROGRAM_NICENESS, "group": f"{MEMORY_PLACE}/cgroup.procs"}
        except OSError as error:
            own = {"more": {"AS": spec.memory, "NPROC": spec.pids}}
            each = f"each process may take {spec.memory} bytes of memory instead of all together"
            warn_once(f"no control groups ({error}): {each}, the processor time is not limited")
        if os.getuid() == 0:
            own["user"] = limits.own_user()
        else:
            warn_once("not root: programs are one user with the guest and can write to /private")
        ours, theirs = socket.socketpair()
        try:
            process = self._start(theirs)
            self._keep(self.group)
        except BaseException:
            ours.close()
            self.end()
            raise
        finally:
            theirs.close()
        again = partial(open_bubblewrap, spec, self.run, self.rootfs)
        path = SYSTEM_PATH if self.rootfs is not None else f"{HOST_PYTHON.parent}:{SYSTEM_PATH}"
        stream = SocketStream(ours)
        box = greet(stream, spec, self.id, path=path, limits=own, reason=self.reason, on_close=self.end, again=again)
        guests = children_of(process.pid)
        why_not = limits.limit_files(guests[0], tuple(IN_MEMORY), limits.files_of(spec.disk)) if guests else ""
        if why_not:
            warn_once(f"the number of files in a sandbox is not limited: {why_not}")
        box.facts["files_unlimited"] = why_not
        return box

    def _start(self, end: socket.socket) -> subprocess.Popen[bytes]:
        command = guest_command("python3" if self.rootfs is not None else str(HOST_PYTHON))
        terminals = _own_terminals()
        options, files = [], []
        try:
            for word in arguments(self.spec, self.layers, self.group, terminals):
                if isinstance(word, bytes):
                    files.append(os.memfd_create("agentgym"))
                    os.write(files[-1], word)
                    os.lseek(files[-1], 0, os.SEEK_SET)
                options.append(str(files[-1]) if isinstance(word, bytes) else word)
            options += [] if self.spec.writable_root else ["--remount-ro", "/"]
            command = [*self._own_mounts(terminals), "bwrap", *options, "--", *command]
            if self.group is not None:
                command = ["sh", "-c", _ENTER, " ".join(map(str, self.group.folders)), *command]
            self.process = subprocess.Popen(
                command, stdin=end.fileno(), stdout=end.fileno(), stderr=self.errors, pass_fds=files, cwd="/"
            )
            return self.process
        except OSError as error:
            raise SandboxError(f"bubblewrap could not be started: {error}") from error
        finally:
            for fd in files:
                os.close(fd)

    def _own_mounts(self, terminals: bool) -> list[str]:
        steps = _TERMINALS if terminals else ""
        if not self.overlaid:
            return [*_OWN_MOUNTS, steps + _RUN, "sh"] if steps else []
        size = f"size={self.spec.disk},nr_inodes={limits.files_of(self.spec.disk)}"
        top, *below = self.layers
        folder, names = (images.cache_folder(), self.layers) if below else (top, (top,))
        # Relative names, which hold none of the letters that mean something to mount.
        places = ":".join(str(name.relative_to(folder)) for name in names)
        return [*_OWN_MOUNTS, steps + _LAYER + _RUN, str(layer_place()), size, str(folder), places]

    def _keep(self, group: ControlGroup | None) -> None:
        """Write down what `remove` needs, in case this process cannot clean up."""
        folders = [str(folder) for folder in group.every] if group is not None else []
        version = group.version if group is not None else 0
        bwrap = self.process.pid if self.process is not None else 0
        fresh = self.record.with_suffix(".part")
        fresh.write_text(json.dumps({**marks(self.run), "bwrap": bwrap, "folders": folders, "version": version}))
        fresh.replace(self.record)

    def reason(self) -> str:
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
        for file in self.held:
            file.close()


def _kill_tree(pid: int) -> None:
    """Kill bwrap's child, which is process 1 of the sandbox, so that all in it ends; then bwrap."""
    for each in (*children_of(pid), pid):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@cache
def _own_terminals() -> bool:
    if os.getuid() != 0:
        return False
    try:
        tried = subprocess.run(
            [*_OWN_MOUNTS, _TERMINALS + _RUN, "sh", "true"], capture_output=True, text=True, timeout=30, check=False
        )
        error = tried.stderr.strip() if tried.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as failure:
        error = str(failure)
    if error:
        warn_once(f"the number of pseudo-terminals of a sandbox is not limited: {error}")
    return not error


@cache
def warn_once(text: str) -> None:
    LOG.warning(text)


def records() -> Path:
    folder = Path(tempfile.gettempdir(), f"agentgym-bubblewrap-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if folder.is_symlink() or status.st_uid != os.getuid():
        raise SandboxError(f"{folder} belongs to user {status.st_uid}: remove it, or set TMPDIR")
    return folder


def layer_place() -> Path:
    """Where a sandbox mounts its writable layer, in a mount namespace of its own: the folder itself stays empty."""
    place = records() / "layer"
    place.mkdir(mode=0o700, exist_ok=True)
    if any(letter in str(place) for letter in ',:\\"'):
        raise SandboxError(f"a writable root cannot be mounted at {place}: set TMPDIR to a folder without such letters")
    return place


def bubblewrap_sandboxes() -> list[Found]:
    return [found(id, "bubblewrap", {key: str(value) for key, value in kept.items()}) for id, kept in _kept()]


def remove_unfinished() -> None:
    """Remove the records of processes that were killed as they wrote."""
    for file in records().glob("*.part"):
        with suppress(FileNotFoundError):
            if time.time() - file.stat().st_mtime > END_PATIENCE:
                file.unlink()


def remove(id: str) -> None:
    """End a sandbox of any process. SandboxError if something stays."""
    kept = dict(_kept()).get(id)
    if kept is None:
        return
    group = ControlGroup(tuple(Path(folder) for folder in kept["folders"]), kept["version"])
    if group.folders:
        if not cgroups.remove(group, END_PATIENCE):
            raise SandboxError(f"sandbox {id} could not be removed: processes {group.processes()} do not end")
    else:
        with suppress(OSError):
            if Path(f"/proc/{kept['bwrap']}/comm").read_text() == "bwrap\n":
                _kill_tree(kept["bwrap"])
    (records() / f"{id}.json").unlink(missing_ok=True)


def _kept() -> Iterator[tuple[str, dict[str, Any]]]:
    for file in sorted(records().glob("*.json")):
        with suppress(FileNotFoundError, json.JSONDecodeError):  # removed, or being written, meanwhile
            yield file.stem, json.loads(file.read_text())


def arguments(
    spec: SandboxSpec, layers: Sequence[Path], group: ControlGroup | None, terminals: bool
) -> list[str | bytes]:
    """The arguments of bwrap. Bytes stand for a descriptor from which it reads them.

    `layers` are the image's root folders, if there is an image. `group` is the guest's and the programs'. `terminals`: bwrap is started where `/dev/pts` is the sandbox's own.
    """
    options: list[str | bytes] = ["--unshare-ipc", "--unshare-pid", "--unshare-uts", "--as-pid-1", "--new-session"]
    options += ["--hostname", "sandbox", "--clearenv", "--setenv", "PATH", SYSTEM_PATH, "--cap-drop", "ALL"]
    options += [] if spec.network else ["--unshare-net"]
    one_user = ["--unshare-user", "--uid", str(GROUP_ID), "--gid", str(GROUP_ID)]
    rights = ("CAP_SETUID", "CAP_SETGID", *(["CAP_CHOWN"] if spec.writable_root else []))  # CHOWN: for `protect`
    options += one_user if os.getuid() else [word for right in rights for word in ("--cap-add", right)]
    if group is None or group.version == 1:
        # In version 2 the programs' group is a sibling of the guest's, outside such a namespace.
        options += ["--unshare-cgroup-try"]
    overlaid = spec.writable_root or len(layers) > 1
    if not layers:
        options += _host_root()
        for name, content in (("passwd", _PASSWD), ("group", _GROUP)):
            options += ["--perms", "0644", "--ro-bind-data", content, f"/etc/{name}"]
    elif overlaid:
        options += ["--bind", str(layer_place() / "root"), "/", *itertools.chain(*map(_project, layers))]
    else:
        options += _image_root(layers[0], spec.network)
    for name in _NETWORK_ETC if spec.network else ():
        options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    options += ["--ro-bind", spec.socket, SOCKET] if spec.socket else []
    options += ["--proc", "/proc", "--dev", "/dev"]
    options += ["--dev-bind", "/dev/pts", "/dev/pts"] if terminals else []
    for path in (Path("/proc", name) for name in _HIDDEN):
        options += ["--ro-bind", "/dev/null", str(path)] if path.exists() else []
    for folder, mode in IN_MEMORY.items():
        options += ["--perms", mode, "--size", str(spec.disk), "--tmpfs", folder]
    options += ["--remount-ro", "/dev"]  # without root it is the programs' own
    if group is not None:  # /sys is the guest's alone
        options += ["--perms", "0700", *(["--tmpfs"] if overlaid else ["--dir"]), "/sys"]
        options += ["--ro-bind", str(group.programs), MEMORY_PLACE]
        # The one file there that can be written: where the guest is no other user, programs reach it.
        options += ["--bind", f"{group.programs}/cgroup.procs", f"{MEMORY_PLACE}/cgroup.procs"]
    if (filter := seccomp.program()) is not None:
        options += ["--seccomp", filter]
    return options


def _image_root(rootfs: Path, network: bool) -> list[str]:
    """Mounts of an image's folders, one by one, so that mount points can be made beside them."""
    options = []
    for entry in sorted(rootfs.iterdir()):
        if network and entry.name == "etc":  # this machine's own files are put beside them
            options += _folder_option("/etc")
            for below in sorted(entry.iterdir()):
                options += [] if below.name in _NETWORK_ETC else _same(below, "/etc")
        elif entry.name not in _OWN:
            options += _same(entry, "/")
    return options + _project(rootfs)


@cache
def _project(rootfs: Path) -> list[str]:
    options = []
    for path in project_files(str(rootfs)):
        options += _cover(f"/{Path(path).relative_to(rootfs)}", os.path.isdir(path))
    return options


def _host_root() -> list[str]:
    """Mounts of this machine's programs and Python, without installed packages: above all this project's hold answers."""
    shown = [*_system(), *_python()]
    options = _folder_option("/etc")
    for name in _ETC:
        options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    made: set[Path] = set()
    for entry in shown:
        for parent in reversed(entry.parents[:-1]):
            if parent not in made:
                made.add(parent)
                options += _folder_option(str(parent))
        is_system_s = entry.parent in (Path("/"), Path("/usr"))
        options += _same(entry, str(entry.parent)) if is_system_s else ["--ro-bind", str(entry), str(entry)]
    secrets = _secrets()
    for folder in (path for path in shown if path.is_dir() and not path.is_symlink()):
        covered: Path | None = None
        for path in sorted({*_installed(folder), *(path for path in secrets if path.is_relative_to(folder))}):
            if covered is None or not path.is_relative_to(covered):
                options += _cover(str(path), path.is_dir())
                covered = path
    return options


def _cover(path: str, is_folder: bool) -> list[str]:
    if is_folder:
        return ["--perms", "0555", "--size", "4096", "--tmpfs", path, "--remount-ro", path]
    return ["--ro-bind", "/dev/null", path]


def _same(entry: Path, folder: str) -> list[str]:
    place = str(Path(folder, entry.name))
    return ["--symlink", os.readlink(entry), place] if entry.is_symlink() else ["--ro-bind", str(entry), place]


def _folder_option(path: str) -> list[str]:
    """A folder that programs can go through; those that bubblewrap makes by itself are its user's alone."""
    return ["--perms", "0755", "--dir", path]


def _system() -> Iterator[Path]:
    for parent, names in (("/", ("bin", "sbin")), ("/usr", _USR)):
        for entry in sorted(Path(parent).iterdir()):
            if entry.is_dir() and (entry.name in names or entry.name.startswith("lib")):
                yield entry


def _python() -> Iterator[Path]:
    prefix = Path(sys.base_prefix)
    if prefix == Path("/usr"):
        return
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    yield from (path for name in ("python", "python3", version) if (path := prefix / "bin" / name).exists())
    folders = {Path(os.__file__).parent, Path(sys.base_exec_prefix, sys.platlibdir, version)}
    yield from (path for path in sorted(folders) if path.is_dir())
    yield from (path for path in sorted((prefix / "lib").glob("*.so*")) if path.exists())


@cache
def _installed(folder: Path) -> list[Path]:
    """Asked once a process, as it takes a second: later packages go into folders that were found."""
    return [Path(path) for path in project_files(str(folder), installed=True)]


def _secrets() -> list[Path]:
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    names = ("AGENTGYM_DATA", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE")
    places = [cache_home / "agentgym", cache_home / "huggingface"]
    places += [Path(os.environ[name]) for name in names if os.environ.get(name)]
    places += [Path(__file__).resolve().parents[3] / name for name in PACKAGES]
    return [path for place in places if (path := place.expanduser().resolve()).exists()]
