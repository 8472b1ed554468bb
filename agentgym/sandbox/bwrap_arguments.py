"""What a bubblewrap sandbox is made of, as bwrap's arguments: namespaces, a read-only root, folders that lie in memory."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

from agentgym.cgroups import Group
from agentgym.sandbox import seccomp
from agentgym.sandbox.core import USER_ID, SandboxSpec

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MEMORY_PLACE = "/sys/fs/cgroup/memory"  # of the programs' group, inside
_HOST_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types")
_NETWORK_ETC = ("resolv.conf", "hosts", "nsswitch.conf", "services", "protocols", "ssl", "ca-certificates", "pki")
_OWN = ("proc", "dev", "sys", "tmp", "workspace", "private")
_HIDDEN = ("kcore", "keys", "kallsyms", "timer_list", "sched_debug", "cmdline", "config.gz", "modules", "partitions")
_PASSWD = b"root:x:0:0:root:/:/bin/false\nnobody:x:65534:65534:nobody:/workspace:/bin/bash\n"
_GROUP = b"root:x:0:\nnogroup:x:65534:\n"

# Options before the descriptor of some bytes, the path after it, and the bytes.
Data = tuple[tuple[str, ...], str, bytes]


def arguments(spec: SandboxSpec, rootfs: Path | None, group: Group | None) -> tuple[list[str], list[Data]]:
    """The arguments, and those that need a descriptor of some bytes.

    Args:
        rootfs: an image's root folder; None: this machine's programs and Python.
        group: the control group whose memory counters the guest reads, and where it puts the programs.
    """
    options = _namespaces(spec.network)
    if group is None or group.version == 1:
        # In version 2 the programs' group lies beside the guest's, and so outside of such a namespace.
        options += ["--unshare-cgroup-try"]
    options += _host_root() if rootfs is None else _image_root(rootfs, spec.network)
    data: list[Data] = []
    if rootfs is None:
        for name, content in (("passwd", _PASSWD), ("group", _GROUP)):
            data.append((("--perms", "0644", "--ro-bind-data"), f"/etc/{name}", content))
    if spec.network:
        for name in _NETWORK_ETC:
            options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    options += ["--proc", "/proc", "--dev", "/dev"]
    for name in _HIDDEN:
        if Path("/proc", name).exists():
            options += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    for folder in ("/workspace", "/tmp", "/dev/shm"):
        options += ["--perms", "1777", "--size", str(spec.disk), "--tmpfs", folder]
    options += ["--perms", "0755", "--size", str(spec.disk), "--tmpfs", "/private"]
    if group is not None:  # /sys is the guest's alone
        members = (
            f"{MEMORY_PLACE}/cgroup.procs"  # alone can be written: where the guest is no other user, programs reach it
        )
        options += ["--perms", "0700", "--dir", "/sys", "--ro-bind", str(group.programs), MEMORY_PLACE]
        options += ["--bind", f"{group.programs}/cgroup.procs", members]
    if (filter := seccomp.program()) is not None:
        data.append((("--seccomp",), "", filter))
    return options, data


def host_python() -> Path:
    """The Python that runs this, outside of its virtual environment."""
    return Path(sys.base_prefix, "bin", "python3")


def _namespaces(network: bool) -> list[str]:
    options = ["--unshare-ipc", "--unshare-pid", "--unshare-uts", "--as-pid-1", "--new-session"]
    options += ["--hostname", "sandbox", "--clearenv", "--setenv", "PATH", SYSTEM_PATH, "--cap-drop", "ALL"]
    if not network:
        options += ["--unshare-net"]
    if os.getuid() == 0:
        return [*options, "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return [*options, "--unshare-user", "--uid", str(USER_ID), "--gid", str(USER_ID)]


def _image_root(rootfs: Path, network: bool) -> list[str]:
    """Mounts of an image's folders, one by one, so that mount points can be made beside them."""
    options = []
    for entry in sorted(rootfs.iterdir()):
        if network and entry.name == "etc":  # there this machine's own files are to be put beside them
            options += _folder("/etc")
            for below in sorted(entry.iterdir()):
                options += [] if below.name in _NETWORK_ETC else _same(below, "/etc")
        elif entry.name not in _OWN:
            options += _same(entry)
    return options


@cache
def _host_root() -> list[str]:
    """Mounts of this machine's programs and libraries, and of the Python that runs this if it lies elsewhere."""
    options = [*_folder("/etc"), "--ro-bind", "/usr", "/usr"]
    for entry in sorted(Path("/").iterdir()):
        if entry.is_dir() and (entry.name in ("bin", "sbin") or entry.name.startswith("lib")):
            options += _same(entry)
    for name in _HOST_ETC:
        options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    if not host_python().is_relative_to("/usr"):
        for parent in reversed(Path(sys.base_prefix).parents[:-1]):
            options += _folder(str(parent))
        options += ["--ro-bind", sys.base_prefix, sys.base_prefix]
    return options


def _same(entry: Path, folder: str = "") -> list[str]:
    """A folder, file or link of another root, at the top of this one or in `folder`."""
    if entry.is_symlink():
        return ["--symlink", os.readlink(entry), f"{folder}/{entry.name}"]
    return ["--ro-bind", str(entry), f"{folder}/{entry.name}"]


def _folder(path: str) -> list[str]:
    """A folder that programs can go through; those that bubblewrap makes by itself are its user's alone."""
    return ["--perms", "0755", "--dir", path]
