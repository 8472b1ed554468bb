"""Task folders of Harbor (https://harborframework.com/docs/tasks), and the fields of `task.toml` that are used here."""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentgym.core.messages import user
from agentgym.core.tasks import Task
from agentgym.sandbox.api import MEGABYTE

CONFIG = "task.toml"
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMG])", re.IGNORECASE)
_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_OLD = "is a task of Terminal-Bench's older form: `harbor task migrate` (PyPI: harbor) makes Harbor's of it"


class Unsupported(ValueError):
    """A task that Harbor can run and this adapter cannot; says why."""


@dataclass(frozen=True)
class HarborTask:
    """A task folder.

    Attributes:
        folder: absolute path.
        instruction: of `instruction.md`, without the lines at its beginning that mark it for searches of training data.
        image: `environment.docker_image`, or None.
        workdir: `environment.workdir`, or None: the image's.
        variables: environment variables of all programs; `verifier_variables`: those of the tests, over them.
        memory, disk: bytes, None where the task does not say; `cpus` likewise.
        agent_seconds: what the agent may take in all, None for no limit; `verifier_seconds`: what the tests may take.
        network: whether the task lets its programs use the network.
    """

    folder: Path
    instruction: str
    image: str | None = None
    workdir: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    verifier_variables: Mapping[str, str] = field(default_factory=dict)
    cpus: float | None = None
    memory: int | None = None
    disk: int | None = None
    agent_seconds: float | None = None
    verifier_seconds: float = 600.0
    network: bool = True
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def environment(self) -> Path:
        return self.folder / "environment"

    def to_task(self, id: str) -> Task:
        kept = {name: self.metadata[name] for name in ("difficulty", "category", "tags") if name in self.metadata}
        return Task(id, (user(self.instruction),), metadata=kept)


def task_folders(path: str | Path) -> dict[str, Path]:
    """The task folders at or below a path, by id: the path relative to `path`, or the name of the one at `path`.

    Raises ValueError if there is none.
    """
    root = Path(path).expanduser().resolve()
    if (root / CONFIG).is_file():
        return {root.name: root}
    found = {file.parent.relative_to(root).as_posix(): file.parent for file in _configs(root)}
    if not found:
        old = next((file.parent for file in root.glob("**/task.yaml")), None)
        why = f"{old} {_OLD}" if old else f"there is no {CONFIG} at or below it"
        raise ValueError(f"harbor:{path}: {why}")
    return dict(sorted(found.items()))


def _configs(root: Path) -> Iterator[Path]:
    for file in root.rglob(CONFIG):
        if not any((parent / CONFIG).is_file() for parent in file.parent.parents if parent.is_relative_to(root)):
            yield file


def read_task(folder: Path) -> HarborTask:
    """Raises Unsupported, or ValueError for a malformed task; both name the folder."""
    try:
        config = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
        _check(folder, config)
        return _task(folder, config)
    except Unsupported as error:
        raise Unsupported(f"{folder}: {error}") from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder}: no valid task of Harbor: {error}") from error


def _check(folder: Path, config: Mapping[str, Any]) -> None:
    environment, verifier = config.get("environment", {}), config.get("verifier", {})
    compose = any(folder.glob("environment/docker-compose.y*ml"))
    reasons = {
        "it has several steps": config.get("steps"),
        "it is for Windows": str(environment.get("os", "linux")).lower() != "linux",
        "it has several containers (docker-compose.yaml)": compose,
        "its tests want a container of their own": verifier.get("environment")
        or verifier.get("environment_mode") == "separate"
        or verifier.get("collect"),
        "it wants accelerators": environment.get("gpus") or environment.get("tpu"),
        "it offers the agent MCP servers": environment.get("mcp_servers"),
    }
    for reason, holds in reasons.items():
        if holds:
            raise Unsupported(reason)
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise ValueError(f"there is no {name}")


def _task(folder: Path, config: Mapping[str, Any]) -> HarborTask:
    environment, verifier = config.get("environment", {}), config.get("verifier", {})
    agent_seconds = config.get("agent", {}).get("timeout_sec")
    return HarborTask(
        folder,
        _without_canary((folder / "instruction.md").read_text(encoding="utf-8")),
        environment.get("docker_image"),
        environment.get("workdir"),
        _resolved(environment.get("env", {})),
        _resolved(verifier.get("env", {})),
        None if environment.get("cpus") is None else float(environment["cpus"]),
        _bytes(environment, "memory"),
        _bytes(environment, "storage"),
        None if agent_seconds is None else float(agent_seconds),
        float(verifier.get("timeout_sec", 600.0)),
        environment.get("network_mode", "public") == "public" and environment.get("allow_internet") is not False,
        config.get("metadata", {}),
    )


def _bytes(environment: Mapping[str, Any], name: str) -> int | None:
    """`memory_mb = 2048`, or of older tasks `memory = "2G"`."""
    if (megabytes := environment.get(f"{name}_mb")) is not None:
        return int(megabytes) * MEGABYTE
    if (text := environment.get(name)) is None:
        return None
    size = _SIZE.fullmatch(str(text).strip())
    if size is None:
        raise ValueError(f'{name} = {text!r}: write {name}_mb = 2048, or {name} = "2G"')
    return int(float(size[1]) * 1024 ** " KMG".index(size[2].upper()))


def _resolved(variables: Mapping[str, Any]) -> dict[str, str]:
    """Values with `${NAME:-default}` replaced by the default: no variable of this machine is shown to an agent's programs."""

    def value(match: re.Match[str]) -> str:
        if match[2] is None:
            raise Unsupported(f"it wants {match[1]} from this machine's environment, which sandboxes do not get")
        return match[2]

    return {name: _VARIABLE.sub(value, str(text)) for name, text in variables.items()}


def _without_canary(text: str) -> str:
    lines = text.split("\n")
    while lines and _CANARY.fullmatch(lines[0].strip()):
        lines.pop(0)
    return "\n".join(lines).strip()


def readable(folders: Mapping[str, Path], warn: Callable[[str], None]) -> dict[str, HarborTask]:
    """The tasks that can be played here, by id; each other one is told to `warn`. ValueError if none is left."""
    found, refused = {}, []
    for id, folder in folders.items():
        try:
            found[id] = read_task(folder)
        except Unsupported as error:
            refused.append(str(error))
    if not found:
        raise ValueError(f"no task can be played here: {'; '.join(refused[:3])}")
    for text in refused:
        warn(f"left out: {text}")
    return found
