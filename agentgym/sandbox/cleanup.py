"""Lists the sandboxes of all back ends on this machine, and removes orphaned ones.

A sandbox ends with the process that made it, because its guest loses its standard input. Cleanup removes those that remain,
for example after the Docker Engine was killed too.
"""

from dataclasses import dataclass, field

from agentgym.sandbox.api import SandboxError
from agentgym.sandbox.backends import bubblewrap, docker
from agentgym.sandbox.discovery import Found


@dataclass(frozen=True)
class Survey:
    """The sandboxes found, and the reason for each back end that could not be asked."""

    found: list[Found] = field(default_factory=list)
    unasked: dict[str, str] = field(default_factory=dict)


def sandboxes() -> Survey:
    """All sandboxes, oldest first. A missing back end is no error: it is in `unasked`."""
    survey = Survey()
    for backend, ask in (("docker", docker.docker_sandboxes), ("bubblewrap", bubblewrap.bubblewrap_sandboxes)):
        try:
            survey.found.extend(ask())
        except SandboxError as error:
            survey.unasked[backend] = str(error)
    survey.found.sort(key=lambda f: f.started)
    return survey


def remove_sandbox(found: Found) -> None:
    (docker if found.backend == "docker" else bubblewrap).remove(found.id)


def cleanup(*, everything: bool = False, run: str | None = None, survey: Survey | None = None) -> list[Found]:
    """Remove the sandboxes whose process has ended on this host; returns them. SandboxError if one stays.

    Args:
        everything: also those whose process lives, or is on another host.
        run: only those of this run, including those whose process lives.
    """
    survey = survey or sandboxes()
    removed, errors = [], []
    for found in survey.found:
        if (found.run == run) if run is not None else (everything or not found.alive):
            try:
                remove_sandbox(found)
                removed.append(found)
            except SandboxError as error:
                errors.append(str(error))
    if "docker" not in survey.unasked:
        try:
            docker.remove_volumes()
        except SandboxError as error:
            errors.append(str(error))
    if errors:
        raise SandboxError(f"{len(errors)} sandboxes could not be removed: {errors[0]}")
    return removed
