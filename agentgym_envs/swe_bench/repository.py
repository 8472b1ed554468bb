"""An instance's repository at /testbed, in two layers: a source release, and what turns it into the instance.

Of the release, both patches are taken out. One commit holds the result, with a pack of its own, since the release's objects
would show the solution. Nothing is installed: the interpreter imports from /testbed.
"""

import configparser
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from agentgym.sandbox.api import SandboxError
from agentgym.sandbox.images import interpreters
from agentgym.sandbox.images.build import locked
from agentgym_envs.swe_bench.instance import Instance
from agentgym_envs.swe_bench.patches import touched_files
from agentgym_envs.swe_bench.recipes import Recipe

PLACE = "testbed"  # of the repository, below /
SECONDS = 600.0  # for one command
TIME = 946_684_800  # of all files, in seconds since 1970: git compares it, and so reads no file of a fresh sandbox
_PERSON = {"NAME": "SWE-bench", "EMAIL": "swe@bench", "DATE": f"{TIME} +0000"}
_WHO = {f"GIT_{who}_{what}": text for who in ("AUTHOR", "COMMITTER") for what, text in _PERSON.items()}
# Times and sizes tell git what has changed: all else differs from sandbox to sandbox.
_CONFIG = {"core.checkStat": "minimal", "core.trustctime": "false", "core.logAllRefUpdates": "false", "gc.auto": "0"}
# Made by tests and by packaging; releases seldom bring the repository's own list.
_IGNORED = "__pycache__/\n*.pyc\n.pytest_cache/\n.tox/\n*.egg-info/\n/PKG-INFO\n"
_MESSAGE = "The repository before the issue was resolved"


def make_release(name: str, recipe: Recipe, cache: Path, root: Path) -> None:
    """The layer of a release ("Django==3.0a1"): its files at /testbed, where the recipe's interpreter finds them.

    `cache` keeps the archive. SandboxError: it cannot be downloaded or unpacked.
    """
    place = root / PLACE
    place.mkdir()
    archive = _archive(name, recipe.python, cache)
    _run(["tar", "-x", "-f", str(archive), "-C", str(place), "--strip-components=1", "--no-same-owner"], "unpacking")
    for path, text in recipe.programs.items():
        if not (place / path).exists():
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_text(text)
            (place / path).chmod(0o755)
    for path, (text, other) in recipe.edits.items():
        (place / path).write_text((place / path).read_text().replace(text, other))
    _tidy(place)
    python = f"python{recipe.python}"
    packages = root / "opt" / python / "lib" / python / "site-packages"
    packages.mkdir(parents=True)
    source = f"/{PLACE}/{recipe.source}".rstrip("/")
    (packages / f"{PLACE}.pth").write_text(f"{source}\n")
    _add_scripts(place / recipe.source, root / "usr/local/bin", f"/opt/{python}/bin/{python}")


def make_instance(instance: Instance, cache: Path, release: Path, root: Path) -> None:
    """The layer of an instance, over the root folder of its release: the patched files, and git's.

    SandboxError: a patch does not come out of the release, or git fails.
    """
    place, whole = root / PLACE, release / PLACE
    before = _objects(f"{instance.sdist}", cache, whole)
    place.mkdir()
    _init(place)
    touched = sorted({*touched_files(instance.patch), *touched_files(instance.test_patch)})
    for name in touched:
        if (whole / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(whole / name, place / name)
    for what, patch in (("test patch", instance.test_patch), ("gold patch", instance.patch)):
        why = f"the {what} does not come out of {instance.sdist}"
        _git(place, "apply", "--reverse", "--whitespace=nowarn", "-", stdin=patch, why=why)
    _tidy(place)
    shutil.copy(before / "index", place / ".git/index")
    (place / ".git/objects/info").mkdir(exist_ok=True)
    borrowed = place / ".git/objects/info/alternates"
    borrowed.write_text(f"{before / 'objects'}\n")
    # Known files of the same size and time would not be read again, and the commit would have the solution.
    for how in ["--force-remove"], ["--add", "--remove"]:
        _git(place, "update-index", *how, "-z", "--stdin", stdin="".join(f"{name}\0" for name in touched))
    _commit(place)
    _git(place, "repack", "-a", "-d", "--quiet")
    borrowed.unlink()
    for name in touched:
        if (whole / name).is_file() and not (place / name).exists():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            os.mknod(place / name, stat.S_IFCHR, os.makedev(0, 0))  # an overlay then shows no such file
    _open_all(place)


def _archive(name: str, python: str, cache: Path) -> Path:
    """The archive of a release, downloaded by pip once for all instances."""
    kept = cache / name / "archive"
    with locked(kept.parent):
        if not kept.is_dir():
            program = interpreters.find(python).told["program"]
            options = ["--no-deps", "--no-binary", name.partition("==")[0], "--disable-pip-version-check", "--quiet"]
            with tempfile.TemporaryDirectory(dir=kept.parent) as work:
                new = Path(work, "new")
                command = [program, "-I", "-m", "pip", "download", *options, "--dest", str(new), name]
                _run(command, f"downloading the source of {name}")
                new.rename(kept)
    return next(kept.glob("*.tar.gz"))


def _objects(name: str, cache: Path, place: Path) -> Path:
    """A folder with git's index and objects of a release, made once, which those of its instances are copied from."""
    kept = cache / name / f"git-{place.parents[1].name}"  # by the digest of the release's image
    with locked(kept.parent):
        if not kept.is_dir():
            with tempfile.TemporaryDirectory(dir=kept.parent) as work:
                new = Path(work, "repository")
                new.mkdir()
                _init(new)
                _git(new, f"--work-tree={place}", "add", "--all")
                _commit(new)
                _git(new, "repack", "-a", "-d", "--quiet")
                (new / ".git").rename(kept)
    return kept


def _init(place: Path) -> None:
    _git(place, "init", "--quiet", "--template=", "--initial-branch=main")
    for name, value in _CONFIG.items():
        _git(place, "config", name, value)
    (place / ".git/info").mkdir(exist_ok=True)
    (place / ".git/info/exclude").write_text(_IGNORED)


def _commit(place: Path) -> None:
    """One commit of what is in the index, without looking at files."""
    commit = _git(place, "commit-tree", _git(place, "write-tree"), "-m", _MESSAGE)
    _git(place, "update-ref", "refs/heads/main", commit)


def _git(place: Path, *words: str, stdin: str = "", why: str = "") -> str:
    """The output of a git command, without the settings of this machine."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "LC_ALL": "C", "TZ": "UTC", **_WHO}
    command = ["git", f"--git-dir={place / '.git'}", "-c", "core.fsync=none", *words]
    return _run(command, why or f"git {words[0]}", stdin, env, place)


def _run(
    command: list[str], what: str, stdin: str = "", env: dict[str, str] | None = None, cwd: Path | None = None
) -> str:
    data = stdin.encode("utf-8", "surrogateescape")
    try:
        done = subprocess.run(
            command, input=data, capture_output=True, timeout=SECONDS, env=env, cwd=cwd or "/", check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"{what}: {error}") from error
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").strip().splitlines()[-3:])
        raise SandboxError(f"{what}: {command[0]} failed with {done.returncode}: {said:.400}")
    return done.stdout.decode().strip()


def _tidy(place: Path) -> None:
    """Give all files one time, and let the programs of a sandbox, which have a user id of its own, change them."""
    for folder, folders, files in os.walk(place):
        folders[:] = [name for name in folders if name != ".git"]
        for path in (Path(folder), *(Path(folder, name) for name in files)):
            os.utime(path, (TIME, TIME), follow_symlinks=False)
    _open_all(place)


def _open_all(place: Path) -> None:
    for path in (place, *place.rglob("*")):
        if not path.is_symlink() and not path.is_char_device():
            path.chmod(0o777 if path.stat().st_mode & 0o100 else 0o666)


def _add_scripts(source: Path, programs: Path, python: str) -> None:
    """The repository's console scripts, as pip would make them."""
    for file in source.glob("*.egg-info/entry_points.txt"):
        points = configparser.ConfigParser(delimiters=("=",), interpolation=None)
        points.optionxform = str  # type: ignore[assignment,method-assign]
        points.read_string(file.read_text())
        for name, target in points["console_scripts"].items() if "console_scripts" in points else ():
            module, _, function = target.partition("[")[0].strip().partition(":")
            programs.mkdir(parents=True, exist_ok=True)
            first = function.partition(".")[0]
            lines = f"#!{python}", "import sys", f"from {module} import {first}", f"sys.exit({function}())"
            (programs / name).write_text("\n".join(lines) + "\n")
            (programs / name).chmod(0o755)
