"""Back ends of sandboxes: a Docker Engine, bubblewrap, control groups."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from agentgym.doctor.finding import Finding, State, output_of

START = "start one, or name it in DOCKER_HOST; bubblewrap does without"


def docker() -> list[Finding]:
    """The Docker Engine, and which of our images it has."""
    if importlib.util.find_spec("docker") is None:
        return [Finding("Docker", _lacking("docker"), "no package docker", "pip install 'agentgym-toolkit[docker]'")]
    from agentgym.sandbox import SandboxError
    from agentgym.sandbox.backends import engine
    from agentgym.sandbox.images import build as images
    from agentgym.sandbox.images import engine_images

    try:
        api = engine.client(engine.PROBE_TIMEOUT)
        with engine.failures("asking its version"):
            version = api.version()
        names = images.image_names()
        built = [name for name in names if engine_images.way_of(api, images.image_tag(name)) is not None]
    except SandboxError as error:
        return [Finding("Docker", _lacking("docker"), str(error), START)]
    about = f"engine {version.get('Version', '?')} (API {version.get('ApiVersion', '?')}) at {engine.address()}"
    found = [Finding("Docker", "ok", about), _images("Docker images", names, built)]
    return [*found, *_limits("Docker limits", "docker", built[0])] if built else found


def _lacking(backend: str) -> State:
    """The state of a missing back end: "broken" only where the user asked for it."""
    asked = os.environ.get("AGENTGYM_SANDBOX") == backend or (backend == "docker" and "DOCKER_HOST" in os.environ)
    return "broken" if asked else "missing"


def _images(title: str, names: list[str], built: list[str]) -> Finding:
    lacking = [name for name in names if name not in built]
    text = f"{', '.join(built) or 'none'} built" + (f"; not {', '.join(lacking)}" if built and lacking else "")
    return Finding(title, "ok" if built else "missing", text, "agentgym sandbox build" if lacking else None)


def bubblewrap() -> list[Finding]:
    """The program, whether the kernel lets it make namespaces, and which of our images it can start from."""
    program = shutil.which("bwrap")
    if program is None:
        return [Finding("bubblewrap", _lacking("bubblewrap"), "no bwrap on the PATH", "apt install bubblewrap")]
    from agentgym.sandbox.backends.bubblewrap import usable
    from agentgym.sandbox.images import build as images

    version = output_of([program, "--version"], 5.0).strip()
    if why := usable():
        state = _lacking("bubblewrap")
        return [Finding("bubblewrap", "warning" if state == "missing" else state, f"{version}: {why}", _namespaces())]
    built = [name for name in images.image_names() if images.rootfs(name) is not None]
    return [
        Finding("bubblewrap", "ok", f"{version} at {program}: a sandbox was started"),
        _images("bubblewrap images", images.image_names(), built),
        *_limits("bubblewrap limits", "bubblewrap", built[0] if built else "python"),
    ]


def _limits(title: str, backend: str, image: str) -> list[Finding]:
    """Limits that sandboxes cannot keep on this machine."""
    from agentgym.sandbox import SandboxError, SandboxSpec
    from agentgym.sandbox.backends import select as backends

    try:
        box = backends.opener(backend)(SandboxSpec(image=image, start_timeout=20.0), "doctor")
    except SandboxError as error:
        return [Finding(title, "warning", str(error))]
    box.close()
    weak = []
    if not box.facts["firm_scores"]:
        weak.append(
            "programs can lower their oom_score_adj, so that the sandbox's first process is killed for their memory"
        )
    if why_not := box.facts.get("files_unlimited"):
        weak.append(f"the number of files is not limited ({why_not})")
    todo = "Linux 5.19 or newer with Landlock (lsm=landlock,... at boot)" if not box.facts["firm_scores"] else None
    return [Finding(title, "warning", "; ".join(weak), todo)] if weak else []


def _namespaces() -> str:
    """The settings to change so that the kernel allows namespaces."""
    switches = {
        "kernel.unprivileged_userns_clone": ("0", "1"),
        "user.max_user_namespaces": ("0", "10000"),
        "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
    }
    for name, (bad, good) in switches.items():
        path = Path("/proc/sys", name.replace(".", "/"))
        if path.is_file() and path.read_text().strip() == bad:
            return f"as root: sysctl -w {name}={good}"
    return (
        "let it make namespaces (in a container: --privileged, or a seccomp profile that allows unshare), or use Docker"
    )


def cgroups() -> list[Finding]:
    """Whether a control group with limits can be made, which bubblewrap's limits are better for."""
    from agentgym.processes import cgroups as groups

    version = 2 if (groups.ROOT / "cgroup.controllers").exists() else 1
    try:
        made = groups.create(f"agentgym-doctor-{os.getpid()}", groups.GroupLimits(memory=2**28, pids=16, cpus=1.0))
    except OSError as error:
        todo = "bubblewrap then limits each process, not all together: run as root, or delegate a control group"
        return [Finding("control groups", "warning", f"version {version}, none can be made: {error}", todo)]
    groups.remove(made, patience=2.0)
    return [Finding("control groups", "ok", f"version {version}: one with limits was made and removed")]
