"""What a sandbox with a repository of swe_bench costs: starts, commands, resets, grading, disk, and episodes an hour.

An episode is played by a script: it looks around, edits a file, reads its patch, and is graded. On a machine with a Docker Engine
(DOCKER_HOST), mini-swe-agent's docker environment and SWE-ReX's server start and run commands in the same image; they are
installed from the package index into a cache folder on the first run. Neither resets nor grades.

python benchmarks/swe.py FILE.jsonl --instance ID [--rounds N] [--concurrent 1,8,32] [--only-agentgym] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from found import write
from peers import peer_python

from agentgym.sandbox import SandboxError, choose
from agentgym.sandbox.images.build import rootfs
from agentgym_envs.swe_bench import worktree
from agentgym_envs.swe_bench.grading import grade
from agentgym_envs.swe_bench.images import build, image_of
from agentgym_envs.swe_bench.instances import Instance, read_instances

HERE = Path(__file__).parent / "swe_peers"
PEERS = {"mini-swe-agent": ("mini-swe-agent==2.4.6",), "swe-rex": ("swe-rex==1.4.0", "aiohttp==3.14.5")}
LOOKS = ("git status --short", "ls", "git log --oneline", "grep -rn 'def setup' --include=*.py . | head", "git diff")
EDIT = 'file=$(git ls-files "*.py" | head -1); printf "\\n# looked at\\n" >> "$file"'
SECONDS = 120.0
SIZE = worktree.Size(memory=1 << 30)  # so that 32 at a time are admitted on a machine of 16 GB


class Timer:
    """Seconds of each thing that was measured, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds.setdefault(what, []).append(time.perf_counter() - began)

    def medians(self) -> dict[str, float]:
        return {what: round(statistics.median(times), 4) for what, times in self.seconds.items()}


def measure_one(instance: Instance, backend: str, rounds: int) -> dict[str, Any]:
    """What one caller waits for."""
    timed = Timer()
    # Under a name of its own: others may be using the image that is there.
    instance = replace(instance, id=f"{instance.id}-{uuid.uuid4().hex[:8]}")
    with timed("image of the instance"):
        [made] = build([instance], docker=backend == "docker")
    if made.built is None:
        raise SystemExit(made.error)
    with timed("first step"):
        box = worktree.open_repository(instance, backend)
        worktree.run(box, "true", SECONDS)
    box.close()
    for _ in range(rounds):
        with timed("start again at once"):
            box = worktree.open_repository(instance, backend)
        box.write(f"{worktree.FOLDER}/new.txt", "x" * 1_000_000)
        for _ in range(10):
            with timed("command"):
                worktree.run(box, "true", SECONDS)
        with timed("close"):
            box.close()
        time.sleep(2)  # the reset is in the background
        with timed("warm start"):
            box = worktree.open_repository(instance, backend)
        box.close()
        with timed("grading, gold"):
            found = grade(instance, instance.patch, sandbox=backend)
        if not found.resolved:
            raise SystemExit(f"the gold patch does not resolve {instance.id}: {found.failure or found.verdict}")
    if made.built.rootfs is not None:
        shutil.rmtree(made.built.rootfs.parent.parent)
    return {"side": f"agentgym, {backend}", "seconds": timed.medians(), "disk_of_the_instance": made.built.bytes}


def episode(instance: Instance, backend: str) -> bool:
    """A scripted episode. Its patch resolves nothing."""
    with contextlib.closing(worktree.open_repository(instance, backend, SIZE, timeout=600)) as box:
        base = worktree.base_of(box)
        for command in (*LOOKS, EDIT):
            worktree.run(box, command, SECONDS)
        patch = worktree.patch_of(box, base)
    return grade(instance, patch, sandbox=backend, size=SIZE, wait=600).patch == "applied"


def measure_many(instance: Instance, backend: str, concurrent: int) -> dict[str, Any]:
    """Episodes an hour with so many at a time, and those that failed."""
    count = max(concurrent, 4)

    def play(_: int) -> str:
        try:
            return "" if episode(instance, backend) else "its patch did not apply"
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:300]

    began = time.perf_counter()
    with ThreadPoolExecutor(concurrent) as threads:
        problems = [problem for problem in threads.map(play, range(count)) if problem]
    took = time.perf_counter() - began
    return {
        "side": f"agentgym, {backend}",
        "concurrent": concurrent,
        "episodes": count,
        "failed": problems,
        "episodes_per_hour": round((count - len(problems)) / took * 3600),
    }


def measure_peer(name: str, python: Path, tag: str, rounds: int) -> dict[str, Any]:
    """Starts and commands of a peer in a docker image."""
    command = [python, HERE / f"{name.replace('-', '_')}.py", "--image", tag, "--rounds", str(rounds)]
    done = subprocess.run(list(map(str, command)), check=False, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(f"{name} failed: {done.stderr[-2000:]}")
    times = json.loads(done.stdout.strip().splitlines()[-1])
    return {"side": name, "seconds": {what: round(statistics.median(of), 4) for what, of in times.items()}}


def backends(instance: Instance) -> list[str]:
    found = []
    for name in ("bubblewrap", "docker"):
        try:
            choose(name, image_of(instance), writable_root=True)
        except SandboxError as error:
            print(f"without {name}: {error}", file=sys.stderr)
        else:
            found.append(name)
    return found


def show(rows: list[dict[str, Any]], many: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(what for row in rows for what in row["seconds"]))
    print(f"| seconds, medians | {' | '.join(row['side'] for row in rows)} |\n|---|{'---|' * len(rows)}")
    for name in names:
        cells = [f"{row['seconds'][name]:.3f}" if name in row["seconds"] else "" for row in rows]
        print(f"| {name} | {' | '.join(cells)} |")
    print("\n| side | at a time | episodes an hour | failed |\n|---|---|---|---|")
    for row in many:
        print(f"| {row['side']} | {row['concurrent']} | {row['episodes_per_hour']:,} | {len(row['failed'])} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="instances")
    parser.add_argument("--instance", required=True, help="the id of one that can be rebuilt")
    parser.add_argument("--rounds", type=int, default=3, help="of what one caller waits for (default: 3)")
    parser.add_argument("--concurrent", default="1,8,32", help="episodes at a time (default: 1,8,32)")
    parser.add_argument("--only-agentgym", action="store_true", help="without the peers")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    args = parser.parse_args()
    instance = next(one for one in read_instances(args.file) if one.id == args.instance)
    [made] = build([instance])  # the layers below the instance's, which others share
    if made.error:
        raise SystemExit(made.error)
    found = backends(instance)
    peers = PEERS if "docker" in found and not args.only_agentgym else {}
    pythons = {name: peer_python(name, pins) for name, pins in peers.items()}
    rows = [measure_one(instance, name, args.rounds) for name in found]
    many = [measure_many(instance, name, n) for n in map(int, args.concurrent.split(",")) for name in found]
    for name, python in pythons.items():
        built = build([instance], docker=True)[0].built
        assert built
        assert built.tag
        rows.append(measure_peer(name, python, built.tag, args.rounds))
    show(rows, many)
    has_rootfs = rootfs(image_of(instance)) is not None
    write(args.out, instance=instance.id, rootfs=has_rootfs, sides=rows, many=many)


if __name__ == "__main__":
    main()
