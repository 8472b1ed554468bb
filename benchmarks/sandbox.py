"""What it costs to run a program in a sandbox: docker against bubblewrap against a bare subprocess.

With --remote each is measured a second time on a server on this machine (`agentgym serve --sandbox`), over its loopback.

Every round measures each side in turn, so that what else the machine does falls on all of them. The bare subprocess is the
limit: no isolation, no limits, nothing cleaned up. Medians over all rounds.

python benchmarks/sandbox.py [--out FILE.json] [--rounds N] [--quick] [--remote]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from found import write

from agentgym.sandbox import SandboxError, SandboxSpec, choose
from agentgym.sandbox.backends.bubblewrap import open_bubblewrap
from agentgym.sandbox.backends.docker import open_docker
from agentgym.sandbox.backends.remote import open_remote
from agentgym.sandbox.pool import Places, SandboxPool

SPEC = SandboxSpec()
PYTHON = ["python3", "-c", "print(1)"]
GOALS = {"acquire": 10.0, "session step": 2.0}  # milliseconds, at the median
CONCURRENT = (1, 8, 32)


def own(command: list[str]) -> list[str]:
    """The same with this Python, so that no wrapper of another `python3` on the PATH is measured."""
    return [sys.executable if word == "python3" else word for word in command]


class Bare:
    """The bare subprocess, with a sandbox's verbs as far as they are measured here."""

    def exec(self, command: list[str]) -> None:
        subprocess.run(own(command), stdin=subprocess.DEVNULL, capture_output=True, check=True)

    def session(self) -> BareSession:
        return BareSession()

    def close(self) -> None:
        pass


class BareSession:
    """A Python that runs one line after another."""

    def __init__(self) -> None:
        loop = "import sys\nfor line in sys.stdin: exec(line); print(flush=True)"
        self.process = subprocess.Popen(own(["python3", "-c", loop]), stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(self, text: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(text.encode() + b"\n")
        self.process.stdin.flush()
        while self.process.stdout.readline() != b"\n":
            pass

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Side:
    """One way to run programs: how a sandbox is opened, and a pool of them where there is one."""

    def __init__(self, name: str, open_one: Callable[[], Any], places: int) -> None:
        self.name = name
        self.open = open_one
        self.pool = None if name == "subprocess" else SandboxPool(open_one, Places(places), name=name)
        self.milliseconds: dict[str, list[float]] = {}
        self.per_second: dict[int, list[float]] = {}

    def acquire(self) -> Any:
        return self.pool.acquire() if self.pool else self.open()

    def close(self) -> None:
        if self.pool:
            self.pool.close(30)

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.milliseconds.setdefault(what, []).append((time.perf_counter() - began) * 1000)


@contextlib.contextmanager
def served(backend: str) -> Iterator[str]:
    """The URL of a server of sandboxes."""
    command = [sys.executable, "-m", "agentgym.cli", "serve", "--sandbox", "--sandbox-backend", backend]
    with subprocess.Popen([*command, "--port", "0", "--json"], stdout=subprocess.PIPE, text=True) as server:
        try:
            text = ""
            while not text.rstrip().endswith("}"):
                line = server.stdout.readline() if server.stdout is not None else ""
                if not line:
                    raise SystemExit(f"no server of {backend} sandboxes")
                text += line
            yield json.loads(text)["url"]
        finally:
            server.kill()


def remote_sides(places: int, local: list[Side], servers: contextlib.ExitStack) -> list[Side]:
    """Every back end once more, on a server."""
    found = []
    for side in local:
        if side.pool:
            url = servers.enter_context(served(side.name))
            found.append(Side(f"remote {side.name}", partial(open_remote, url, SPEC, "benchmark"), places))
    return found


def sides(places: int) -> list[Side]:
    openers: dict[str, Callable[[], Any]] = {
        "docker": lambda: open_docker(SPEC, "benchmark"),
        "bubblewrap": lambda: open_bubblewrap(SPEC, "benchmark"),
    }
    found = [Side("subprocess", Bare, places)]
    for name, opened in openers.items():
        try:
            choose(name)
        except SandboxError as error:
            print(f"without {name}: {error}", file=sys.stderr)
        else:
            found.append(Side(name, opened, places))
    return found


def measure_one(side: Side, repeats: int) -> None:
    """One round of what one caller waits for."""
    if side.pool:
        with side.timed("cold start"):
            box = side.open()
            box.exec(["true"])
        box.close()
        side.acquire().close()
        for _ in range(repeats):
            time.sleep(0.02)  # the reset is in the background: what is measured is a pool that is warm
            with side.timed("acquire"):
                box = side.acquire()
            box.close()
    box = side.acquire()
    with contextlib.closing(box), contextlib.closing(box.session()) as session:
        session.run("x = 0")
        for _ in range(5 * repeats):
            with side.timed("session step"):
                session.run("x += 1")
        for _ in range(repeats):
            with side.timed("exec true"):
                box.exec(["true"])
            with side.timed("exec python"):
                box.exec(PYTHON)


def measure_many(side: Side, concurrent: int, execs: int) -> None:
    """One round of `true`, run from as many threads, each with a sandbox of its own."""
    boxes = [side.acquire() for _ in range(concurrent)]
    each = max(execs // concurrent, 1)

    def work(box: Any) -> None:
        for _ in range(each):
            box.exec(["true"])

    with ThreadPoolExecutor(concurrent) as threads:
        began = time.perf_counter()
        list(threads.map(work, boxes))
        took = time.perf_counter() - began
    side.per_second.setdefault(concurrent, []).append(each * concurrent / took)
    for box in boxes:
        box.close()


def row(side: Side) -> dict[str, Any]:
    named = {what.replace(" ", "_") + "_ms": statistics.median(times) for what, times in side.milliseconds.items()}
    rates = {f"execs_per_second_at_{n}": statistics.median(values) for n, values in side.per_second.items()}
    return {"side": side.name, **{key: round(value, 3) for key, value in {**named, **rates}.items()}}


def show(found: list[Side]) -> None:
    what = ("cold start", "acquire", "session step", "exec true", "exec python")
    print(f"\nMilliseconds, medians\n\n| side | {' | '.join(what)} |\n|---|{'---|' * len(what)}")
    for side in found:
        cells = [f"{statistics.median(side.milliseconds[w]):.2f}" if w in side.milliseconds else "" for w in what]
        print(f"| {side.name} | {' | '.join(cells)} |")
    print(
        f"\n`true` a second\n\n| side | {' | '.join(f'{n} at a time' for n in CONCURRENT)} |\n|---|{'---|' * len(CONCURRENT)}"
    )
    for side in found:
        print(f"| {side.name} | {' | '.join(f'{statistics.median(side.per_second[n]):.0f}' for n in CONCURRENT)} |")
    for what_, goal in GOALS.items():
        for side in found[1:]:
            median = statistics.median(side.milliseconds[what_])
            print(
                f"\n{side.name}, {what_}: {median:.2f} ms, goal {goal:g} ms: {'met' if median < goal else 'MISSED'}",
                end="",
            )
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("--quick", action="store_true", help="one short round, to see that it runs")
    parser.add_argument("--rounds", type=int, default=5, help="of each side in turn (default: 5)")
    parser.add_argument("--remote", action="store_true", help="also on a server on this machine")
    args = parser.parse_args()
    rounds, repeats, execs = (1, 2, 32) if args.quick else (args.rounds, 10, 96)
    found = sides(max(CONCURRENT) + 1)
    servers = contextlib.ExitStack()
    try:
        if args.remote:
            found += remote_sides(max(CONCURRENT) + 1, found, servers)
        for _ in range(rounds):
            for side in found:
                measure_one(side, repeats)
            for concurrent in CONCURRENT:
                for side in found:
                    measure_many(side, concurrent, execs)
    finally:
        for side in found:
            side.close()
        servers.close()
    show(found)
    write(args.out, rounds=rounds, goals_ms=GOALS, sides=[row(side) for side in found])


if __name__ == "__main__":
    main()
