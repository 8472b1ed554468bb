"""A training run of which processes are killed again and again, and what that cost, told by its folder afterwards.

A driver that was killed is started again by the same command; every other loss the run has to mend itself.

    python tests/acceptance/soak.py --seconds 3600 --engine vllm --machines --out soak.md
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from training_process import ENDED_SECONDS, POLL_SECONDS, SMALL, Training, start

sys.path.append(str(Path(__file__).parents[1] / "agent_train"))
from machines import Machines, machines, missing
from soak_checks import Losses, Turns, back_after, losses_of, turns_on_disk

NAME = "soak"
TITLES = {
    "engine": ("vllm.entrypoints.openai.api_server", "ray::_Server"),
    "rank": ("ray::_Actor",),
    "env worker": ("ray::EnvWorker",),
}
LONG = 1_000_000  # steps of a run that ends when its time is over
BACK_SECONDS = 600.0  # on a busy machine
RUN_SECONDS = 6 * 3600.0
NODES = 3
GOALS = {"engine": 30.0, "rank": 120.0}  # seconds until it is back, without vLLM's own start
GAME = ("+env=frozen_lake", *SMALL, "sft.episodes=32", "trainer.save_every=1", "trainer.eval_every=1000000")
PARTS = ("learner.workers=2", "env.placement=ray", "env.workers=2", "env.cpus=0.5", "learner.schedule=constant")
LASTING = ("trainer.staleness=2", "trainer.keep_checkpoints=8", "trainer.eval_episodes=100")


@dataclass(frozen=True)
class Kill:
    victim: str
    at: float  # Unix seconds
    stepped: float  # seconds until the run had trained another step
    turns: Turns  # finished ones that were on disk then


@dataclass
class Soak:
    """A run of `settings` in the folder `runs`, on these machines or on this one."""

    runs: Path
    settings: tuple[str, ...]
    nodes: Machines | None
    run: Training
    kills: list[Kill] = field(default_factory=list)
    before: list[Training] = field(default_factory=list)

    @classmethod
    def begin(cls, runs: Path, *settings: str, nodes: Machines | None = None) -> Soak:
        return cls(runs, settings, nodes, _start(runs, settings, nodes, NAME))

    def kill(self, victim: str, moment: Callable[[Training], object], rng: random.Random) -> bool:
        """SIGKILL a victim at the moment, and wait until the run has trained another step; False if it ended before."""
        run = self.run
        while not (found := moment(run) and self._processes(victim, rng)):
            if run.process.poll() is not None:
                return False
            time.sleep(POLL_SECONDS)
        lines, losses = _train_lines(run), _losses(run)
        for process in found if victim == "node" else [rng.choice(found)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        at, turns = time.time(), turns_on_disk(run.folder)
        if victim == "rank":  # a step that was all but done may still end
            run.wait_for("going back", lambda: _losses(run) > losses, BACK_SECONDS)
            lines |= _train_lines(run)
        if victim == "driver":
            assert run.wait() == -signal.SIGKILL
            left = run.left_behind(ENDED_SECONDS) if self.nodes is None else self._left_on_nodes(ENDED_SECONDS)
            assert not left, left
            self.again()
        # What the loss of a node does to a run shows in the second step at the latest.
        steps = 2 if victim == "node" else 1
        self.run.wait_for(
            f"a step after the {victim}'s end", lambda: len(_train_lines(self.run) - lines) >= steps, BACK_SECONDS
        )
        self.kills.append(Kill(victim, at, time.time() - at, turns))
        self._start_nodes()
        return True

    def finish(self, steps: int) -> None:
        """Stop the run, and have the same command take so many further steps, to its regular end."""
        self.run.send(signal.SIGTERM)
        assert self.run.wait() == 128 + signal.SIGTERM, self.run.told()
        last = int(self.run.checkpoint.name.removeprefix("step-")) + steps
        self.settings = (*self.settings, f"trainer.steps={last}")
        self.again()
        assert self.run.wait(BACK_SECONDS) == 0, self.run.told()

    def __enter__(self) -> Soak:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing of it."""
        for run in (*self.before, self.run):
            run.destroy()

    def again(self) -> None:
        self.before.append(self.run)
        self.run = _start(self.runs, self.settings, self.nodes, NAME)

    def _processes(self, victim: str, rng: random.Random) -> list[psutil.Process]:
        if victim == "driver":
            return [psutil.Process(self.run.process.pid)]
        if victim == "node" and self.nodes is not None:  # not the first, where the driver and Ray's head are
            return self.nodes.processes(rng.randrange(1, NODES))
        return [each for each in self._all() if any(title in _title(each) for title in TITLES[victim])]

    def _all(self) -> list[psutil.Process]:
        on_nodes = [each for number in range(NODES) for each in self.nodes.processes(number)] if self.nodes else []
        return [*self.run.family(), *on_nodes]

    def _left_on_nodes(self, seconds: float) -> list[str]:
        """What of a run that was killed is still there after at most so many seconds, beside Ray."""
        deadline, titles = time.monotonic() + seconds, [title for own in TITLES.values() for title in own]
        while left := [line for line in map(_title, self._all()) if any(title in line for title in titles)]:
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        return left

    def _start_nodes(self) -> None:
        """Start Ray again on machines that were killed."""
        for number in range(1, NODES) if self.nodes else ():
            if not self.nodes.processes(number):
                self.nodes.start_ray(number, 1, self.runs / "own")


def _start(runs: Path, settings: Sequence[str], nodes: Machines | None, name: str) -> Training:
    if nodes is None:
        return start(runs, *settings, name=name)
    return start(runs, *settings, name=name, env=nodes.environment, within=nodes.command(0))


@contextlib.contextmanager
def nodes_for(runs: Path) -> Iterator[Machines]:
    """Three machines with a Ray node of one CPU each."""
    (runs / "own").mkdir()
    with machines(*[1] * NODES, own_disk=runs / "own") as made:
        yield made


def soak_for(seconds: float, every: float, victims: Collection[str], soak: Soak, rng: random.Random) -> None:
    """Kill a victim `every` so many seconds more or less, in rounds of all in random order, for so long; then let the run end."""
    end, order = time.monotonic() + seconds, list[str]()
    while (now := time.monotonic()) < end:
        order = order or rng.sample(sorted(victims), len(victims))
        due = now + rng.uniform(0.5, 1.5) * every
        assert soak.kill(order.pop(), lambda run, due=due: time.monotonic() > due, rng), soak.run.told()
    soak.finish(2)


def undisturbed(runs: Path, settings: Sequence[str], nodes: Machines | None, steps: int, seed: int) -> dict[str, Any]:
    """The last evaluation of a run of so many steps of which nothing is killed."""
    own = (*settings, f"trainer.steps={steps}", f"trainer.seed={seed}")
    run = _start(runs, own, nodes, f"undisturbed-{seed}")
    try:
        assert run.wait(RUN_SECONDS) == 0, run.told()
        return run.of_kind("eval")[-1]
    finally:
        run.destroy()


def assert_nothing_was_lost(soak: Soak) -> Losses:
    """Every step is there once, on its own tasks, no finished turn is lost, and every token was sampled by the weights of its version."""
    found = what_was_lost(soak)
    assert found.lost == 0, (
        f"{found.lost} finished turns were sampled again, of {found.turns} that were on disk at a kill"
    )
    assert found.wrong == 0, f"{found.wrong} of {found.tokens} tokens are not of the version that is told with them"
    return found


def what_was_lost(soak: Soak) -> Losses:
    if soak.nodes is None:
        assert soak.run.left_behind(1) == []
    return losses_of(soak.run, [kill.turns for kill in soak.kills], len(soak.before))


def table(soak: Soak, losses: Losses, others: Sequence[dict[str, Any]]) -> str:
    """What the kills cost, in Markdown, and what missed its goal in capitals."""
    rows = [
        "| killed | times | trains again after, median | at most | back after, less vLLM's start, median | at most | goal |",
        "|---|---|---|---|---|---|---|",
    ]
    for victim in dict.fromkeys(kill.victim for kill in soak.kills):
        own = [kill for kill in soak.kills if kill.victim == victim]
        stepped = [kill.stepped for kill in own]
        backs = [back.net for kill in own if (back := back_after(soak.run.folder, victim, kill.at)) is not None]
        told = f"{statistics.median(backs):.0f} s | {max(backs):.0f} s" if backs else "|"
        goal = GOALS.get(victim)
        met = "" if goal is None else f"{goal:.0f} s: {'met' if backs and max(backs) < goal else 'MISSED'}"
        times = f"{len(own)} | {statistics.median(stepped):.0f} s | {max(stepped):.0f} s"
        rows.append(f"| {victim} | {times} | {told} | {met} |")
    end = soak.run.of_kind("eval")[-1]
    success = f"held-out success {end['success']:.0%}"
    if others:
        low, high = min(each["low"] for each in others), max(each["high"] for each in others)
        inside = "inside" if low <= end["success"] <= high else "MISSED: outside of"
        succeeded = ", ".join(f"{each['success']:.0%}" for each in others)
        success += f", {inside} {low:.0%} to {high:.0%} of {len(others)} undisturbed runs ({succeeded}; 95% intervals)"
    facts = [
        f"steps: {losses.steps}, each trained once, on its own tasks: {losses.episodes} episodes",
        f"finished turns on disk at a kill: {losses.turns}, sampled again: {losses.lost}{' MISSED' * (losses.lost > 0)}",
        f"tokens checked against the checkpoint of their version: {losses.tokens} in {losses.checked} turns, "
        f"{losses.mixed} of them of several versions; wrong: {losses.wrong}{' MISSED' * (losses.wrong > 0)}; by a neighbouring version "
        f"{losses.told_apart:.0%} would be",
        success,
    ]
    return "\n".join([*rows, "", *(f"- {fact}" for fact in facts)]) + "\n"


def _train_lines(run: Training) -> set[tuple[int, float]]:
    """The training steps so far, by when they ended: one that is taken again counts again."""
    return {(record["step"], record["elapsed"]) for record in run.of_kind("train")}


def _losses(run: Training) -> int:
    """Times that the run went back by itself."""
    return run.out.count("; going on with ")


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def victims_of(engine: str, many: bool) -> list[str]:
    return ["rank", "driver", "env worker", *(["engine"] if engine == "vllm" else []), *(["node"] if many else [])]


def long_soak(
    runs: Path,
    engine: str,
    nodes: Machines | None,
    seconds: float,
    every: float,
    others: int,
    victims: Collection[str] = (),
) -> str:
    """The table of a soak, after which so many runs of as many steps were left undisturbed. Victims are all that there can be."""
    victims = victims or victims_of(engine, nodes is not None)
    settings = (*GAME, f"engine={engine}", *PARTS, *LASTING)
    replicas = ("engine.replicas=2",) if nodes and engine == "vllm" else ()
    with Soak.begin(runs, *settings, *replicas, f"trainer.steps={LONG}", nodes=nodes) as soak:
        soak_for(seconds, every, victims, soak, random.Random(0))
        losses = what_was_lost(soak)
        ends = [undisturbed(runs, (*settings, *replicas), nodes, losses.steps, seed) for seed in range(others)]
        return table(soak, losses, ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument(
        "--every", type=float, default=60, help="seconds from a step after a kill to the next kill, on average"
    )
    parser.add_argument("--engine", choices=["embedded", "vllm"], default="embedded")
    parser.add_argument(
        "--machines", action="store_true", help="on three network namespaces, of which two are killed too"
    )
    parser.add_argument(
        "--victims", help="of engine, rank, env worker, driver and node; separated by commas (default: all)"
    )
    parser.add_argument("--undisturbed", type=int, default=3, help="runs to compare the success with")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.machines and (reason := missing()):
        parser.error(reason)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        runs = Path(folder)
        nodes = stack.enter_context(nodes_for(runs)) if args.machines else None
        victims = args.victims.split(",") if args.victims else ()
        told = long_soak(runs, args.engine, nodes, args.seconds, args.every, args.undisturbed, victims)
    sys.stdout.write(told)
    if args.out:
        args.out.write_text(told, encoding="utf-8")
    sys.exit("MISSED" in told)


if __name__ == "__main__":
    main()
