"""The machine: GPU, processors, memory, disk, ports."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import sys
from pathlib import Path

from agentgym.doctor.finding import Finding, output_of

LITTLE_MEMORY = 2e9  # bytes under which an evaluation with sandboxes gets tight
LITTLE_DISK = 1e9
_CGROUP = Path("/sys/fs/cgroup")
_QUERY = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used,driver_version", "--format=csv,noheader,nounits"]
_TORCH = """
import json, torch
there = torch.cuda.is_available()
print(json.dumps([torch.__version__, torch.version.cuda, torch.cuda.device_count() if there else 0]))
"""


def gpu() -> list[Finding]:
    """NVIDIA's driver and cards, and whether torch can use them."""
    found, cards = _cards()
    if importlib.util.find_spec("torch") is None:
        return found
    try:
        version, cuda, usable = json.loads(output_of([sys.executable, "-c", _TORCH], 80.0).splitlines()[-1])
    except (RuntimeError, ValueError) as error:
        return [*found, Finding("torch", "warning", f"cannot be used: {error}", "pip install --force-reinstall torch")]
    if usable:
        return [*found, Finding("torch", "ok", f"{version}, CUDA {cuda}, uses {usable} of {cards} cards")]
    if cards:
        todo = (
            "install the build of torch for your CUDA"
            if cuda is None
            else "look at CUDA_VISIBLE_DEVICES and the driver"
        )
        return [*found, Finding("torch", "warning", f"{version} does not see the GPU", todo)]
    return [*found, Finding("torch", "ok", f"{version}, on the CPU")]


def _cards() -> tuple[list[Finding], int]:
    if shutil.which("nvidia-smi") is None:
        return [Finding("GPU", "missing", "no nvidia-smi: models are served and trained on the CPU, or elsewhere")], 0
    try:
        rows = [line.split(", ") for line in output_of(_QUERY, 15.0).splitlines() if line.strip()]
        told = [f"{name}, {_gib(total)} GiB, {_gib(used)} used, driver {driver}" for name, total, used, driver in rows]
    except (RuntimeError, ValueError) as error:
        return [Finding("GPU", "warning", str(error), "repair NVIDIA's driver")], 0
    if not told:
        return [Finding("GPU", "missing", "the driver is here, and no card")], 0
    return [Finding(f"GPU {i}", "ok", text) for i, text in enumerate(told)], len(told)


def _gib(mebibytes: str) -> str:
    """The driver's number in GiB; some cards, those that share the machine's memory say, have none."""
    return f"{int(mebibytes) / 1024:.0f}" if mebibytes.strip().isdecimal() else "?"


def compute() -> list[Finding]:
    """Processors and memory that this process may use."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = _cpu_share()
    told = f"{cpus}" if share is None or share >= cpus else f"{cpus}, of which this container may use {share:g}"
    found = [Finding("CPUs", "ok", told)]
    total, free = _memory()
    if total is None or free is None:
        return [*found, Finding("memory", "warning", "/proc/meminfo does not say how much there is")]
    text = f"{free / 1e9:.1f} GB free of {total / 1e9:.1f}"
    if free < LITTLE_MEMORY:
        return [*found, Finding("memory", "warning", text, "end other programs, or lower --concurrency")]
    return [*found, Finding("memory", "ok", text)]


def _cpu_share() -> float | None:
    """Processors that the control group allows, None without a limit."""
    quota = _words(_CGROUP / "cpu.max")
    if not quota:
        quota = _words(_CGROUP / "cpu" / "cpu.cfs_quota_us") + _words(_CGROUP / "cpu" / "cpu.cfs_period_us")
    if len(quota) != 2 or not all(word.isdecimal() for word in quota):
        return None
    return int(quota[0]) / int(quota[1])


def _memory() -> tuple[float | None, float | None]:
    """Bytes in all and free, within what the control group allows."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, free = (float(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return None, None
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        most, used = _words(_CGROUP / limit), _words(_CGROUP / usage)
        if most and used and most[0].isdecimal() and float(most[0]) < total:
            total = float(most[0])
            free = min(free, total - float(used[0]))
    return total, free


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def disk() -> list[Finding]:
    """Room and rights where data, images and runs go."""
    from agentgym.datasets import folder
    from agentgym.sandbox.images.build import cache_folder

    places = {"data folder": folder(), "image folder": cache_folder(), "runs folder": Path("runs")}
    return [_room(name, place) for name, place in places.items() if place is not None]


def _room(name: str, place: Path) -> Finding:
    # What is not there yet is made in the nearest folder that is.
    there = place.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    free = shutil.disk_usage(there).free
    text = f"{place.absolute()}: {free / 1e9:.1f} GB free"
    if name != "data folder" and not os.access(there, os.W_OK):  # data may lie where one only reads
        return Finding(name, "warning", f"{text}, not writable", "work in another folder, or set its rights")
    if free < LITTLE_DISK:
        return Finding(name, "warning", text, "make room")
    return Finding(name, "ok", text)


def ports() -> list[Finding]:
    """Whether this process may listen on this machine, as the viewer and a served model do."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=3.0):
                return [Finding("127.0.0.1", "ok", "a port can be opened and reached")]
    except OSError as error:
        todo = "the viewer and --serve need one: look at the firewall and the sandbox that this runs in"
        return [Finding("127.0.0.1", "warning", f"no port can be opened and reached: {error}", todo)]
