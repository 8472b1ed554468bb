"""Builds a root folder from Debian packages in a few seconds, without registry, Docker or root.

`apt-get` resolves the packages against an empty list of installed ones, and checks their signatures; `dpkg-deb` unpacks them.
Installation scripts are not run; this module makes the results that programs need (`sh`, `awk`, `cc`, users, certificates).
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from agentgym.sandbox.api import SandboxError

DOWNLOAD_TIMEOUT = 900.0  # seconds for all packages of an image
UNPACK_TIMEOUT = 300.0  # seconds for one package, and for compiling
MERGED = ("bin", "sbin", "lib", "lib64")  # folders that are links into /usr, as on every Debian of today
MOUNT_POINTS = ("proc", "sys", "dev", "tmp", "run", "workspace", "private", "usr/local/lib")
LEFT_OUT = ("doc", "man", "locale", "info", "lintian", "bug")  # of /usr/share
LINKS = {"sh": ("dash", "bash"), "awk": ("gawk", "mawk"), "cc": ("gcc",), "c++": ("g++",)}
FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/workspace:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "etc/resolv.conf": "",
}


def missing_tools() -> list[str]:
    return [tool for tool in ("apt-get", "dpkg-deb", "tar") if shutil.which(tool) is None]


def unpack(packages: Sequence[str], requirements: Path | None, work: Path, say: Callable[[str], None]) -> Path:
    """Make a root folder in `work` of packages and their dependencies, of the release that this machine runs, and Python wheels."""
    if missing := missing_tools():
        raise SandboxError(f"{', '.join(missing)}: not found. Packages can be unpacked on Debian and Ubuntu only")
    archives = _download(packages, work, say)
    say(f"unpacking {len(archives)} packages")
    root = work / "rootfs"
    for name in MERGED:
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    for archive in archives:
        _extract(archive, root)
    _finish(root)
    version = python_of(root)
    if requirements is not None:
        say(f"adding the Python packages of {requirements.name}")
        install(requirements, root, version)
    _compile(root, version, say)
    shutil.rmtree(work / "archives")
    return root


def _download(packages: Sequence[str], work: Path, say: Callable[[str], None]) -> list[Path]:
    archives = work / "archives"
    (archives / "partial").mkdir(parents=True)
    status = work / "status"
    status.touch()
    options: dict[str, object] = {
        "Dir::State::status": status,
        "Dir::Cache::archives": archives,
        "APT::Sandbox::User": "root" if os.geteuid() == 0 else "",
        "Acquire::http::Timeout": 30,
        "Acquire::Retries": 2,
    }
    install = ["-d", "--no-install-recommends", "install", *packages]
    say(f"downloading {' '.join(packages)} and what they need")
    try:
        _apt(install, options)
    except SandboxError as first:
        # The machine's lists of packages are missing or out of date; we may not write there, so we fetch our own.
        say("the machine's package lists do not do: fetching new ones")
        lists = work / "lists"
        (lists / "partial").mkdir(parents=True)
        options |= {"Dir::State::lists": lists, "Dir::Cache::pkgcache": "", "Dir::Cache::srcpkgcache": ""}
        try:
            _apt(["update"], options)
            _apt(install, options)
        except SandboxError as error:
            raise SandboxError(f"{error}; with the machine's own package lists: {first}") from error
    return sorted(archives.glob("*.deb"))


def _apt(arguments: Sequence[str], options: Mapping[str, object]) -> None:
    settings = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
    _run(
        ["apt-get", "-qq", "-y", *settings, *arguments], DOWNLOAD_TIMEOUT, DEBIAN_FRONTEND="noninteractive", LC_ALL="C"
    )


def _run(
    command: Sequence[str], timeout: float, stdin: IO[bytes] | int | None = subprocess.DEVNULL, **env: str
) -> None:
    settings = os.environ | env
    try:
        done = subprocess.run(command, stdin=stdin, capture_output=True, timeout=timeout, env=settings, check=False)
    except subprocess.TimeoutExpired as error:
        raise SandboxError(f"{command[0]} did not end within {timeout:g} s") from error
    except OSError as error:
        raise SandboxError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        raise SandboxError(f"{command[0]} failed with {done.returncode}: {' '.join(said[-3:]) or 'no output'}")


def _extract(archive: Path, root: Path) -> None:
    excluded = [f"--exclude=./usr/share/{name}" for name in LEFT_OUT] + ["--exclude=*/gconv"]
    command = ["tar", "-x", "-C", str(root), "--no-same-owner", "--keep-directory-symlink", *excluded]
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE) as source:
        try:
            _run(command, UNPACK_TIMEOUT, source.stdout)
        except SandboxError as error:
            source.kill()
            raise SandboxError(f"{archive.name} cannot be unpacked: {error}") from error
    if source.returncode:
        raise SandboxError(f"{archive.name} cannot be unpacked: dpkg-deb failed with {source.returncode}")


def _finish(root: Path) -> None:
    for name in MOUNT_POINTS:
        (root / name).mkdir(parents=True, exist_ok=True)
    for path, text in FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    programs = root / "usr/bin"
    for link, targets in LINKS.items():
        found = [target for target in targets if (programs / target).exists()]
        if found and not (programs / link).exists():
            (programs / link).symlink_to(found[0])
    certificates = sorted((root / "usr/share/ca-certificates").rglob("*.crt"))
    if certificates:
        bundle = root / "etc/ssl/certs/ca-certificates.crt"
        bundle.parent.mkdir(parents=True, exist_ok=True)
        bundle.write_text("".join(f.read_text().rstrip("\n") + "\n" for f in certificates))
    # Set-user-id programs are of no use under no-new-privileges, and a copy of them on the host must not be one.
    for folder, _, names in os.walk(root):
        for name in names:
            file = Path(folder, name)
            mode = file.lstat().st_mode
            if mode & 0o6000 and not file.is_symlink():
                file.chmod(mode & 0o1777)


def python_of(root: Path) -> str:
    """The version of the Python that Debian's packages have put into a root folder."""
    versions = sorted(p.name.removeprefix("python") for p in (root / "usr/lib").glob("python3.*"))
    if not versions:
        raise SandboxError("the packages contain no Python: packages.txt must name python3")
    return versions[-1]


def install(requirements: Path, root: Path, version: str) -> None:
    machine = platform.machine()
    platforms = [f"--platform=manylinux{tag}_{machine}" for tag in ("_2_28", "_2_27", "_2_17", "2014")]
    tag = "cp" + version.replace(".", "")
    choice = ["--python-version", version, "--implementation=cp", f"--abi={tag}", "--abi=abi3", "--abi=none"]
    target = root / f"usr/local/lib/python{version}/dist-packages"
    options = ["--no-deps", "--only-binary=:all:", "--no-compile", "--disable-pip-version-check", "--quiet"]
    arguments = ["install", *options, *platforms, *choice, "--target", str(target), "-r", str(requirements)]
    _run([sys.executable, "-m", "pip", *arguments], DOWNLOAD_TIMEOUT)


def _compile(root: Path, version: str, say: Callable[[str], None]) -> None:
    """Bytecode for its Python, by its Python: a sandbox cannot write it, and would compile at every start."""
    loaders = [*root.glob("usr/lib64/ld-linux-*.so.*"), *root.glob("usr/lib/ld-linux-*.so.*")]
    libraries = ":".join(str(p) for p in root.glob("usr/lib/*-linux-gnu*"))
    python = root / f"usr/bin/python{version}"
    names = (f"lib/python{version}", f"local/lib/python{version}", "lib/python3/dist-packages")
    folders = [str(root / "usr" / name) for name in names if (root / "usr" / name).is_dir()]
    options = ["-q", "--invalidation-mode", "unchecked-hash", "-s", str(root), "-p", "/"]
    if not loaders:
        raise SandboxError("the packages contain no dynamic loader (libc6)")
    command = [str(loaders[0]), "--library-path", libraries, str(python), "-S", "-m", "compileall", *options]
    try:
        _run([*command, *folders], UNPACK_TIMEOUT, PYTHONHOME=str(root / "usr"))
    except SandboxError as error:
        # A package may carry a file for another Python; the rest is compiled.
        say(f"some Python files were not compiled: {error}")
