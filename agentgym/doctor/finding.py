"""Findings, and probes that end in time."""

import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "missing", "broken"]


@dataclass(frozen=True)
class Finding:
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
    look: Callable[[], list[Finding]]
    seconds: float


def examine(probes: Sequence[Probe]) -> dict[str, list[Finding]]:
    """Run all probes at once; returns their findings in the order of the probes.

    A part that fails or takes too long is a warning. Its thread is left behind, and does not keep the process alive.
    """
    found: dict[str, list[Finding]] = {}

    def run(probe: Probe) -> None:
        try:
            found[probe.name] = probe.look()
        except Exception as error:  # one failing probe must not hide the others
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            found[probe.name] = [Finding(probe.name, "warning", f"the check failed: {line}")]

    start = time.monotonic()
    threads = [threading.Thread(target=run, args=(p,), name=f"doctor {p.name}", daemon=True) for p in probes]
    for thread in threads:
        thread.start()
    for probe, thread in zip(probes, threads, strict=True):
        thread.join(max(0.0, start + probe.seconds - time.monotonic()))
    late = {p.name: Finding(p.name, "warning", f"no answer within {p.seconds:g} s", "check it by hand") for p in probes}
    return {p.name: found.get(p.name, [late[p.name]]) for p in probes}


def output_of(command: Sequence[str], seconds: float) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, errors="replace", timeout=seconds, stdin=subprocess.DEVNULL, check=False
        )
    except OSError as error:
        raise RuntimeError(f"{command[0]} cannot be started: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{command[0]} did not end within {seconds:g} s") from error
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {lines[-1] if lines else 'no output'}")
    return done.stdout
