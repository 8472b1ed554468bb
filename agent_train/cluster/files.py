"""The run folder on nodes that do not share it: what ranks and servers read and write there goes through Ray's object store.

Such a node has a folder of its own at the same path, with copies alone, and the logs of its servers.
"""

import asyncio
import hashlib
import os
import secrets
import shutil
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from agent_train.cluster.lost import LostError
from agent_train.cluster.placement import PlacementError
from agent_train.config.schema import first_line

CALL_SECONDS = 60.0  # for one call on a node, of at most PIECE_BYTES
PIECE_BYTES = 32 << 20
LOOK_SECONDS = 10.0
_COPIES, _LOGS = ".copies", "logs"


class Hand(NamedTuple):
    """Calls functions on a node, by an actor there, or on this one."""

    name: str = "this node"
    actor: Any = None

    @classmethod
    def on(cls, node: str) -> "Hand":
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        return cls(f"node {alive().get(node, node)}", _Actor.options(scheduling_strategy=there).remote())  # type: ignore[attr-defined]

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a function, which may raise OSError. LostError if the node is gone or hangs."""
        if self.actor is None:
            return await asyncio.to_thread(function, *arguments)
        try:
            asked = self.actor.call.remote(function, *arguments)
            return await asyncio.wait_for(asyncio.wrap_future(asked.future()), CALL_SECONDS)
        except TimeoutError:
            raise LostError(f"{self.name} did not answer within {CALL_SECONDS:g} s") from None
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, OSError):
                raise OSError(f"{self.name}: {error.cause}") from error
            raise PlacementError(f"{self.name} cannot run agent_train: {first_line(error.cause)}") from error
        except ray.exceptions.RayError as error:  # it is gone, and Ray did not know it yet
            raise LostError(f"{self.name}: {first_line(error)}") from error


@ray.remote(num_cpus=0, max_restarts=0)
class _Actor:
    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


HERE = Hand()


@dataclass
class RunFiles:
    """Moves folders between nodes for a run. Nodes that see the run folder, and those that are gone, need nothing.

    `look` comes first. Where the folder is not seen it makes one, with copies of `given`, which lie in it.
    """

    run: Path = Path()
    model: Path = Path()
    given: Sequence[Path] = ()
    note: Callable[[str], None] = print  # takes a line for people
    _known: set[str] = field(default_factory=set)  # nodes that were looked at
    _apart: dict[str, Hand] = field(default_factory=dict)  # those that do not see the run folder

    async def look(self) -> None:
        """Look at nodes that are new. PlacementError if one lacks the model; OSError if it cannot have the folder."""
        self._known.add(ray.get_runtime_context().get_node_id())
        if not (new := alive().keys() - self._known):
            return
        mark = self.run / f".seen-{secrets.token_hex(8)}"
        mark.touch()
        try:
            await asyncio.gather(*(self._look(node, mark) for node in new))
        finally:
            mark.unlink(missing_ok=True)

    async def _look(self, node: str, mark: Path) -> None:
        hand, config = Hand.on(node), str(self.model / "config.json")
        sees, digest = await hand.call(_facts, str(mark), config)
        if self.run not in self.model.parents and digest != _facts("", config)[1]:
            why = f"{config} {'differs' if digest else 'is not there'}"
            raise PlacementError(f"{hand.name}: {why}: model.path must name a folder that every node has")
        if not sees:
            await hand.call(_make_empty, str(self.run))
            for folder in self.given:
                await _copy(str(folder), HERE, hand)
            self._apart[node] = hand
            self.note(f"{hand.name} does not see {self.run}: what it reads and writes there goes through Ray")
        self._known.add(node)

    async def watch(self) -> None:
        """Look at nodes that join later, where there are others that do not see the folder; until cancelled."""
        noted = set[str]()
        while self._apart:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.look()
            except (PlacementError, LostError, OSError) as error:
                if (why := str(error)) not in noted:
                    self.note(why)
                noted.add(why)

    async def give(self, folder: str) -> None:
        """Copy a folder to all nodes."""
        await self._each(lambda _, hand: _copy(folder, HERE, hand))

    async def forget(self, folder: str) -> None:
        """Remove the copies of a folder."""
        await self._each(lambda _, hand: hand.call(_remove, folder))

    async def bring(self, folder: str, nodes: Collection[str]) -> None:
        """Move here what some nodes wrote into a folder. LostError if one of them is gone."""
        for node in self._apart.keys() & nodes:
            await _copy(folder, self._apart[node], HERE)
            await self._apart[node].call(_remove, folder)

    async def share(self, folder: str, writers: Collection[str]) -> None:
        """Copy a folder that nodes wrote to all; of those beside it with a number as their name they keep as many as are here."""
        for node in self._apart.keys() & writers:
            await _copy(folder, self._apart[node], HERE)

        async def one(node: str, hand: Hand) -> None:
            if node not in writers:
                await _copy(folder, HERE, hand)
            beside = os.path.dirname(folder)
            await hand.call(_keep, beside, os.listdir(beside))

        await self._each(one)

    async def _each(self, call: Callable[[str, Hand], Awaitable[None]]) -> None:
        async def one(node: str, hand: Hand) -> None:
            try:
                await call(node, hand)
            except LostError:
                if node in alive():
                    raise

        if self._apart:
            there = alive()
            await asyncio.gather(*(one(node, hand) for node, hand in self._apart.items() if node in there))


def alive() -> dict[str, str]:
    """The addresses of the nodes, by their ids."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


async def _copy(folder: str, source: Hand, target: Hand) -> None:
    """Copy the files of a folder between nodes, in pieces."""
    for path, size in await source.call(_files, folder):
        for start in range(0, max(size, 1), PIECE_BYTES):
            await target.call(_write, path, start, await source.call(_read, path, start))


def _facts(mark: str, config: str) -> tuple[bool, str | None]:
    """True if a file exists, and the SHA-256 of another one; None if that does not exist."""
    digest = hashlib.sha256(Path(config).read_bytes()).hexdigest() if os.path.isfile(config) else None
    return os.path.exists(mark), digest


def _make_empty(path: str) -> None:
    """Make a folder of copies, or remove those that are in it, but no logs."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    there = [each for each in folder.iterdir() if each.name != _LOGS]
    if there and not (folder / _COPIES).exists():
        raise FileExistsError(f"{path} holds other things there: choose another trainer.name or trainer.runs_dir")
    (folder / _COPIES).touch()
    for each in there:
        if each.is_dir():
            shutil.rmtree(each)


def _files(path: str) -> list[tuple[str, int]]:
    return [(str(file), file.stat().st_size) for file in sorted(Path(path).rglob("*")) if file.is_file()]


def _read(path: str, start: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(PIECE_BYTES)


def _write(path: str, start: int, piece: bytes) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "r+b" if start else "wb") as file:
        file.seek(start)
        file.write(piece)


def _remove(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)


def _keep(path: str, names: Collection[str]) -> None:
    for each in Path(path).iterdir():
        if each.name.isdigit() and each.name not in names:
            shutil.rmtree(each)
