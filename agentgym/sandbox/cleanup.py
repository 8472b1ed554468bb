"""Every sandbox of this machine on every back end, and the removal of those that nobody holds any more.

A sandbox ends by itself when the process that made it does: its guest loses its standard input. This is for what is left
all the same, when the Docker Engine was killed as well, say.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agentgym.sandbox.api import SandboxError
from agentgym.sandbox.discovery import Found


@dataclass(frozen=True)
class Survey:
    """The sandboxes found, and the reason for each back end that could not be asked."""

    found: list[Found] = field(default_factory=list)
    unasked: dict[str, str] = field(default_factory=dict)


def sandboxes() -> Survey:
    """All sandboxes, oldest first. A back end that is not here is no error: it is in `unasked`."""
    from agentgym.sandbox.backends.bubblewrap import bubblewrap_sandboxes
    from agentgym.sandbox.backends.docker import docker_sandboxes

    survey = Survey()
    for backend, ask in (("docker", docker_sandboxes), ("bubblewrap", bubblewrap_sandboxes)):
        try:
            survey.found.extend(ask())
        except SandboxError as error:
            survey.unasked[backend] = str(error)
    survey.found.sort(key=lambda f: f.started)
    return survey


def remove_sandbox(found: Found) -> None:
    """End a sandbox and all in it, whoever made it; one that is gone already is no error. Raises SandboxError if it stays."""
    if found.backend == "docker":
        from agentgym.sandbox.backends.docker import remove
    else:
        from agentgym.sandbox.backends.bubblewrap import remove
    remove(found)


def cleanup(*, everything: bool = False, run: str | None = None, survey: Survey | None = None) -> list[Found]:
    """Remove the sandboxes whose process has ended on this host since it started.

    Args:
        everything: also those whose process lives, or is on another host.
        run: only those of this run, and these also where their process lives.
        survey: what there is; None: it is looked for now.

    Returns:
        What was removed. One that somebody else removes at the same time counts too.

    Raises:
        SandboxError: one stays; the others are removed.
    """
    from agentgym.sandbox.backends.docker import remove_volumes

    removed, errors = [], []
    survey = survey or sandboxes()
    for found in survey.found:
        if (found.run == run) if run is not None else (everything or not found.alive):
            try:
                remove_sandbox(found)
                removed.append(found)
            except SandboxError as error:
                errors.append(str(error))
    if "docker" not in survey.unasked:
        try:
            remove_volumes()
        except SandboxError as error:
            errors.append(str(error))
    if errors:
        raise SandboxError(f"{len(errors)} sandboxes could not be removed: {errors[0]}")
    return removed
