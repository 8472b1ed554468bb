"""The repository of an instance in a sandbox: opened at its base commit, changed by patches, read as a patch."""

import json
import shlex
from dataclasses import dataclass

from agentgym import sandbox as sandboxes
from agentgym.sandbox import ExecResult, Sandbox, SandboxError, SandboxSpec
from agentgym.sandbox.api import MEGABYTE
from agentgym_envs.settings import check_number
from agentgym_envs.swe_bench.images import image_of
from agentgym_envs.swe_bench.instance import Instance
from agentgym_envs.swe_bench.patches import PatchError

FOLDER = "/testbed"
ENVIRONMENT = "/etc/testbed-environment"  # of images of other languages than Python: their own variables
# Images that SWE-bench publishes have the repository's Python in an environment of conda, R2E-Gym's in one of venv.
ACTIVATE = (
    f"[ ! -f {ENVIRONMENT} ] || . {ENVIRONMENT}; "
    "[ ! -f /opt/miniconda3/bin/activate ] || . /opt/miniconda3/bin/activate testbed; "
    f"[ ! -f {FOLDER}/.venv/bin/activate ] || . {FOLDER}/.venv/bin/activate"
)
LONGEST_PATCH = 8 * MEGABYTE
OUTPUT = 8 * MEGABYTE  # of a test log
_GIT_SECONDS = 120.0
_NO_GIT_CONFIG = {"GIT_CONFIG_GLOBAL": "/dev/null", "HOME": "/nonexistent", "GIT_OPTIONAL_LOCKS": "0"}
# An index of its own: the agent's may be locked, or hide files. A repository inside of the repository would be left out.
_DIFF = f"""
set -e
cd {FOLDER}
find . -mindepth 2 -name .git -prune -exec rm -rf {{}} + 2>/dev/null || true
export GIT_INDEX_FILE=$1.index
settings="-c core.fsmonitor=false -c core.hooksPath=/dev/null -c core.autocrlf=false -c core.attributesFile=/dev/null"
settings="$settings -c core.quotePath=true -c core.untrackedCache=false -c core.splitIndex=false -c core.sparseCheckout=false"
git $settings read-tree "$2"
git $settings add --all .
git $settings -c diff.noprefix=false -c diff.mnemonicPrefix=false diff --cached --binary --full-index --no-renames \\
  --no-color --no-ext-diff --no-textconv --unified=3 --inter-hunk-context=0 --src-prefix=a/ --dst-prefix=b/ \\
  --diff-algorithm=myers --output="$1" "$2"
"""
_APPLY = f"""
cd {FOLDER}
git -c core.hooksPath=/dev/null apply --whitespace=nowarn "$1" 2>"$1.errors" && exit 0
patch --batch --fuzz=5 -p1 -s -i "$1" >/dev/null 2>&1 && exit 0
tail -c 2000 "$1.errors"
exit 1
"""
# Python 3.5, which old images have, gives plain tuples for modules.
_IMPORTABLE = """
import json, os, pkgutil, sys
roots = [os.path.join(sys.argv[1], name) for name in ("", "src", "lib")]
known = {name.partition(".")[0] for root in roots if os.path.isdir(root) for name in os.listdir(root)}
print(json.dumps([sorted({module[1] for module in pkgutil.iter_modules()}), sorted(known)]))
"""


@dataclass(frozen=True)
class Size:
    """The limits of a sandbox with a repository; as in `SandboxSpec`."""

    memory: int = 4096 * MEGABYTE
    cpus: float = 2.0
    pids: int = 512
    disk: int = 1024 * MEGABYTE

    def __post_init__(self) -> None:
        for name, least in (("memory", 64 * MEGABYTE), ("pids", 8), ("disk", 16 * MEGABYTE)):
            check_number(name, getattr(self, name), least, 1 << 50, whole=True)
        check_number("cpus", self.cpus, 0.1, 4096)


DEFAULT_SIZE = Size()


def open_repository(
    instance: Instance,
    backend: str | None = None,
    size: Size = DEFAULT_SIZE,
    timeout: float = 110.0,
    tests: bool = True,
    patience: float = 0.0,
) -> Sandbox:
    """A sandbox with the instance's repository at its base commit, in `FOLDER`.

    Args:
        tests: it is to grade: it has the tests that its image may hold, and comes before those in which agents begin.
        patience: seconds besides `timeout` to wait while others have all the room.

    Raises SandboxError, and ValueError if the instance has no image.
    """
    spec = spec_of(instance, size, tests)
    return sandboxes.acquire(spec, backend=backend, timeout=timeout, patience=patience, first=tests)


def spec_of(instance: Instance, size: Size = DEFAULT_SIZE, tests: bool = False) -> SandboxSpec:
    """The settings of the instance's sandboxes. ValueError: it has no image."""
    return SandboxSpec(image=image_of(instance, tests), writable_root=True, output=OUTPUT, **vars(size))


def run(box: Sandbox, command: str, timeout: float) -> ExecResult:
    """Run a command of the repository, in its root and with its Python; `stdout` has stderr too."""
    return box.exec(["bash", "-c", f"{ACTIVATE}\ncd {FOLDER}\n{{\n{command}\n}} 2>&1"], timeout=timeout, cwd="/")


def base_of(box: Sandbox) -> str:
    """The commit that the repository is at; ask before the agent's programs run. Raises SandboxError."""
    result = box.exec(["git", "-C", FOLDER, "rev-parse", "HEAD"], timeout=_GIT_SECONDS, env=_NO_GIT_CONFIG)
    if not result.ok or len(base := result.stdout.strip()) != 40:
        raise SandboxError(f"there is no git repository in {FOLDER} of the image: {result.stderr.strip()[-300:]}")
    return base


def patch_of(box: Sandbox, base: str, share: float = 1.0) -> str:
    """The changes since a commit in tracked and new files, as a patch. Raises PatchError if git fails.

    Args:
        share: of the time that git may take.
    """
    place = f"/tmp/patch-{base[:8]}"
    box.exec(["rm", "-rf", place, f"{place}.index"], timeout=_GIT_SECONDS)
    command = ["bash", "-c", _DIFF, "diff", place, base]
    result = box.exec(command, timeout=share * _GIT_SECONDS, cwd="/", env=_NO_GIT_CONFIG)
    if not result.ok:
        why = "it took too long" if result.timed_out else result.stderr.strip()[-500:]
        raise PatchError(f"git cannot tell what has changed: {why}")
    try:
        return box.read(place, LONGEST_PATCH).decode("utf-8", "surrogateescape")
    except (OSError, ValueError) as error:
        raise PatchError(f"the patch cannot be read: {error}") from None


def apply(box: Sandbox, patch: str) -> str:
    """Apply a patch, as SWE-bench does; "" or why it does not apply. Then some of it may be applied. SandboxError: no time."""
    place = "/tmp/changes.patch"
    box.write(place, patch.encode("utf-8", "surrogateescape"))
    result = box.exec(["bash", "-c", _APPLY, "apply", place], timeout=_GIT_SECONDS, cwd="/", env=_NO_GIT_CONFIG)
    if result.timed_out:
        raise SandboxError(f"applying a patch took over {_GIT_SECONDS:g} seconds")
    return "" if result.ok else result.stdout.strip() or "git and patch say nothing"


def module_names(box: Sandbox) -> tuple[list[str], list[str]]:
    """Names of the modules that Python can import, and those in the repository's root, `src` and `lib`."""
    command = f"python -I -c {shlex.quote(_IMPORTABLE)} {FOLDER}"
    result = run(box, command, _GIT_SECONDS)
    if not result.ok:
        raise SandboxError(f"the image's Python does not run: {result.stdout.strip()[-300:]}")
    try:  # behind what Python may have warned of
        importable, known = json.loads(result.stdout.rstrip("\n").rpartition("\n")[2])
    except ValueError:
        raise SandboxError(f"the image's Python does not tell its modules: {result.stdout.strip()[-300:]}") from None
    return importable, known


def tracked_files(box: Sandbox) -> list[str]:
    """The files that git tracks; ask before the patch's programs run."""
    result = box.exec(["git", "-C", FOLDER, "ls-files", "-z"], timeout=_GIT_SECONDS, env=_NO_GIT_CONFIG)
    if not result.ok or result.truncated:
        raise SandboxError(f"git cannot list the files of {FOLDER}: {result.stderr.strip()[-300:]}")
    return [path for path in result.stdout.split("\0") if path]


def files_of(box: Sandbox) -> list[str]:
    """Every file and folder of the repository, without links and git's own; folders end with "/"."""
    found = ["find", FOLDER, "-path", f"{FOLDER}/.git", "-prune", "-o", "-type", "f", "-printf", r"%P\0"]
    result = box.exec([*found, "-o", "-type", "d", "-printf", r"%P/\0"], timeout=_GIT_SECONDS)
    if not result.ok:
        raise SandboxError(f"the files of {FOLDER} cannot be listed: {result.stderr.strip()[-300:]}")
    if result.truncated:
        raise SandboxError(f"the names of the files of {FOLDER} are longer than {OUTPUT >> 20} MB")
    return sorted(path for path in result.stdout.split("\0") if path not in ("", "/"))
