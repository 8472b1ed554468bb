"""The arguments of `bwrap` for a sandbox: namespaces, a read-only root, folders in memory."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from agentgym.processes.cgroups import Group
from agentgym.sandbox.api import GROUP_ID, SandboxSpec
from agentgym.sandbox.backends import seccomp
from agentgym.sandbox.backends.host_root import cover, folder_option, host_root, same
from agentgym.sandbox.guest.project_files import project_files

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MEMORY_PLACE = "/sys/fs/cgroup/memory"  # of the programs' group, inside
IN_MEMORY = {"/workspace": "1777", "/tmp": "1777", "/dev/shm": "1777", "/private": "0755"}  # folders and their modes
_NETWORK_ETC = ("resolv.conf", "hosts", "nsswitch.conf", "services", "protocols", "ssl", "ca-certificates", "pki")
_OWN = ("proc", "dev", "sys", "tmp", "workspace", "private")
_HIDDEN = ("kcore", "keys", "kallsyms", "timer_list", "sched_debug", "cmdline", "config.gz", "modules", "partitions")
_PASSWD = b"root:x:0:0:root:/:/bin/false\nnobody:x:65534:65534:nobody:/workspace:/bin/bash\n"
_GROUP = b"root:x:0:\nnogroup:x:65534:\n"

# Options before the descriptor of some bytes, the path after it, and the bytes.
Data = tuple[tuple[str, ...], str, bytes]


def arguments(
    spec: SandboxSpec, rootfs: Path | None, group: Group | None, terminals: bool
) -> tuple[list[str], list[Data]]:
    """The arguments, and those that need a descriptor of some bytes.

    Args:
        rootfs: an image's root folder; None: this machine's programs and Python.
        group: the control group whose memory counters the guest reads, and where it puts the programs.
        terminals: whether bwrap is started where `/dev/pts` is the sandbox's own.
    """
    options = _namespaces(spec.network)
    if group is None or group.version == 1:
        # In version 2 the programs' group lies beside the guest's, and so outside of such a namespace.
        options += ["--unshare-cgroup-try"]
    options += host_root() if rootfs is None else _image_root(rootfs, spec.network)
    data: list[Data] = []
    if rootfs is None:
        for name, content in (("passwd", _PASSWD), ("group", _GROUP)):
            data.append((("--perms", "0644", "--ro-bind-data"), f"/etc/{name}", content))
    if spec.network:
        for name in _NETWORK_ETC:
            options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    options += ["--proc", "/proc", "--dev", "/dev"]
    if terminals:
        options += ["--dev-bind", "/dev/pts", "/dev/pts"]
    for name in _HIDDEN:
        if Path("/proc", name).exists():
            options += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    for folder, mode in IN_MEMORY.items():
        options += ["--perms", mode, "--size", str(spec.disk), "--tmpfs", folder]
    options += ["--remount-ro", "/dev"]  # without root it is the programs' own
    if group is not None:  # /sys is the guest's alone
        members = (
            f"{MEMORY_PLACE}/cgroup.procs"  # alone can be written: where the guest is no other user, programs reach it
        )
        options += ["--perms", "0700", "--dir", "/sys", "--ro-bind", str(group.programs), MEMORY_PLACE]
        options += ["--bind", f"{group.programs}/cgroup.procs", members]
    if (filter := seccomp.program()) is not None:
        data.append((("--seccomp",), "", filter))
    return options, data


def _namespaces(network: bool) -> list[str]:
    options = ["--unshare-ipc", "--unshare-pid", "--unshare-uts", "--as-pid-1", "--new-session"]
    options += ["--hostname", "sandbox", "--clearenv", "--setenv", "PATH", SYSTEM_PATH, "--cap-drop", "ALL"]
    if not network:
        options += ["--unshare-net"]
    if os.getuid() == 0:
        return [*options, "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return [*options, "--unshare-user", "--uid", str(GROUP_ID), "--gid", str(GROUP_ID)]


def _image_root(rootfs: Path, network: bool) -> list[str]:
    """Mounts of an image's folders, one by one, so that mount points can be made beside them."""
    options = []
    for entry in sorted(rootfs.iterdir()):
        if network and entry.name == "etc":  # there this machine's own files are to be put beside them
            options += folder_option("/etc")
            for below in sorted(entry.iterdir()):
                options += [] if below.name in _NETWORK_ETC else same(below, "/etc")
        elif entry.name not in _OWN:
            options += same(entry, "/")
    return options + _project(rootfs)


@cache
def _project(rootfs: Path) -> list[str]:
    """Arguments that cover this project's files, where an image holds them."""
    return [
        option
        for path in project_files(str(rootfs))
        for option in cover(f"/{Path(path).relative_to(rootfs)}", os.path.isdir(path))
    ]
