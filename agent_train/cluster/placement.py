"""Placement: the GPUs and CPUs of each process."""

import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from agent_train.config.schema import PAST, Config
from agent_train.learner.roles import learner_count, own_players


class PlacementError(RuntimeError):
    """Ray does not start, or the cluster has no room for the workers of the environments, or they do not start."""


COLOCATED_SHARE = 0.1  # of a device, as Ray counts: what a colocated server takes of the bundle of the ranks beside it


def gpu_share(gpus: int, engine: str, placement: str = "own") -> float:
    """GPUs of one learner rank and, times its tensor parallelism, of one vLLM server: 1, or a half each of an only GPU.

    On several GPUs two ranks with halves could meet on the same one, which NCCL refuses. With `engine.placement=colocated`
    each has the whole GPU while the other has given its memory back.
    """
    if not gpus:
        return 0.0
    return 0.5 if gpus == 1 and engine == "vllm" and placement == "own" else 1.0


@dataclass(frozen=True)
class Room:
    """The resources of one rank of a role."""

    gpus: float
    cpus: float
    # The Ray resources that rank i of all roles takes together, on one device; None where each rank is placed by itself.
    bundle: dict[str, float] | None = None


def rank_room(config: Config, gpus: int) -> Room:
    """The resources of a rank: a whole device, or with `learner.placement=shared` its part of one that all roles share.

    A colocated server takes a part of each device too. Without a GPU the roles share a CPU for each rank: they work one
    after another.
    """
    device, parts = gpu_share(gpus, config.engine.name, config.engine.placement), learner_count(config)
    beside = COLOCATED_SHARE if gpus and config.engine.placement == "colocated" else 0.0
    if not beside and (config.learner.placement == "own" or parts == 1):
        return Room(device, 1.0)
    # Ray counts in ten thousandths, and the parts may not add up to more than the whole.
    bundle = {"GPU": device, "CPU": 1.0} if gpus else None
    return Room(_floored((device - beside) / parts), _floored(1 / parts), bundle)


def _floored(share: float) -> float:
    return math.floor(round(share * 10_000, 6)) / 10_000


def rank_devices(config: Config, gpus: int) -> list[dict[str, float]]:
    """The Ray resources of each device of the ranks, for all roles that share it."""
    share = gpu_share(gpus, config.engine.name, config.engine.placement)
    return [{"CPU": 1.0, **({"GPU": share} if share else {})}] * learner_devices(config)


def learner_devices(config: Config) -> int:
    """The number of devices, or CPUs without a GPU, that the ranks of all roles take."""
    own = config.learner.placement == "own"
    return config.learner.workers * (learner_count(config) if own else 1)


def gpus_needed(config: Config) -> int:
    """GPUs that learner ranks and vLLM servers take. The embedded engine shares with rank 0, colocated servers with ranks."""
    return learner_devices(config) + _has_own_gpus(config) * servers_of(config) * config.engine.tensor_parallel


def servers_of(config: Config) -> int:
    """vLLM servers of all engines: each policy that learns has `engine.replicas`."""
    return config.engine.replicas * (1 + len(own_players(config))) + past_servers(config)


def past_servers(config: Config) -> int:
    """Servers beside the others that hold weights of earlier steps, 0 or 1."""
    return int(PAST in config.env.players.values())


def _has_own_gpus(config: Config) -> bool:
    return config.engine.name == "vllm" and config.mode == "rl" and config.engine.placement == "own"


class Parts(NamedTuple):
    """How many ranks of each role, vLLM servers of each policy and environment workers (0: as many as fit) a run has."""

    ranks: int
    servers: int
    env_workers: int

    def of(self, asked: "Parts") -> str:
        """As settings, those that are fewer than asked for."""
        names = ("learner.workers", "engine.replicas", "env.workers")
        counts = zip(names, self, asked, strict=True)
        return ", ".join(f"{name}={count} of {most}" for name, count, most in counts if count < most)


def parts_asked(config: Config) -> Parts:
    return Parts(config.learner.workers, config.engine.replicas, config.env.workers)


def parts_that_fit(config: Config, nodes: Sequence[Mapping[str, float]]) -> Parts | None:
    """The parts that nodes of these resources have room for, at most those asked for; None if there is no room for one of each.

    Where not all fit, each gets about the same share of what was asked; ranks come in whole replicas.
    """
    asked, learner = parts_asked(config), config.learner
    replica = learner.sequence_parallel * learner.tensor_parallel
    counts = (_beside(config, nodes, ranks) for ranks in range(replica, asked.ranks + 1, replica))

    def share(parts: Parts) -> tuple[float, int]:
        workers = parts.env_workers / asked.env_workers if asked.env_workers else 1.0
        return min(parts.ranks / asked.ranks, parts.servers / asked.servers, workers), parts.ranks

    return max(filter(None, counts), key=share, default=None)


def _beside(config: Config, nodes: Sequence[Mapping[str, float]], ranks: int) -> Parts | None:
    """The ranks, with as many servers of each policy and environment workers as fit beside them."""
    asked, engine, own = parts_asked(config), config.engine, _has_own_gpus(config)
    gpus, cpus = ([node.get(kind, 0.0) for node in nodes] for kind in ("GPU", "CPU"))
    devices = ranks * learner_devices(config) // asked.ranks
    servers, room = asked.servers, _env_room(config, cpus, devices) if config.env.placement == "ray" else 1
    if total := int(sum(gpus)):
        # The devices of a server are on one node. Ranks first take those that no server can.
        size, share = (engine.tensor_parallel, gpu_share(total, engine.name)) if own else (1, 1.0)
        slots = [int(count / share) for count in gpus]
        left = devices - sum(count % size for count in slots)
        free = sum(count // size for count in slots) - math.ceil(max(left, 0) / size) - own * past_servers(config)
        policies = 1 + len(own_players(config))
        beside = free // policies if own else ranks if engine.placement == "colocated" else servers
        servers = min(servers, beside) if free >= 0 else 0
    fits = servers >= 1 and room >= 1 and sum(map(int, cpus)) >= devices
    return Parts(ranks, servers, min(asked.env_workers, room)) if fits else None


def own_ray_cpus(config: Config) -> int:
    """CPUs that the run's own Ray is told to have: enough for all parts, also where this machine has fewer."""
    parts = learner_devices(config) + 1
    cpus = max(os.cpu_count() or 1, parts)
    if config.env.placement != "ray":
        return cpus
    count = config.env.workers or _fitting([float(os.cpu_count() or 1)], config.env.cpus)
    return max(cpus, parts + math.ceil(max(count, 1) * config.env.cpus))


def env_workers_wanted(config: Config, nodes: Sequence[float]) -> int:
    """The number of environment workers: `env.workers`, or for 0 as many as fit beside the learner on the nodes' CPUs."""
    env, ranks = config.env, learner_devices(config)
    there = f"the cluster has {sum(nodes):g} ({', '.join(f'{cpus:g}' for cpus in nodes)} on its nodes)"
    fitting = _env_room(config, nodes, ranks)
    if fitting < 1:
        problem = f"env.cpus={env.cpus:g}: no worker fits beside the learner's {ranks} CPUs: {there}"
        raise PlacementError(f"{problem}: lower env.cpus or learner.workers, or add nodes")
    if env.workers > fitting:
        problem = (
            f"env.workers={env.workers} of env.cpus={env.cpus:g} do not fit beside the learner's {ranks} CPUs: {there}"
        )
        raise PlacementError(f"{problem}, which is room for {fitting}: lower env.workers or env.cpus, or add nodes")
    if env.workers:
        return env.workers
    # A Ray of one's own was told to have more CPUs than there are.
    return fitting if os.environ.get("RAY_ADDRESS") else min(fitting, max(1, int((os.cpu_count() or 1) / env.cpus)))


def _env_room(config: Config, nodes: Sequence[float], devices: int) -> int:
    """As many environment workers as fit on the CPUs of nodes beside the ranks on so many devices, each of which has a CPU of one node."""
    left, cpus = list(nodes), config.env.cpus
    for _ in range(devices):  # each where it takes the place of the fewest workers
        whole = [number for number, free in enumerate(left) if free >= 1]
        if not whole:
            return 0
        left[min(whole, key=lambda number: int(left[number] / cpus) - int((left[number] - 1) / cpus))] -= 1
    return _fitting(left, cpus)


def _fitting(nodes: Sequence[float], cpus: float) -> int:
    return sum(int(node / cpus) for node in nodes)


def visible_gpus() -> int:
    """The number of NVIDIA GPUs that torch would see, without importing it; 0 with a CPU build of torch."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return 0
    version = Path(torch.origin).with_name("version.py")
    if not version.is_file() or not re.search(r"^cuda\b.*=\s*['\"]", version.read_text(encoding="utf-8"), re.MULTILINE):
        return 0
    here = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return here
    return min(here, len([part for part in chosen.split(",") if part.strip() not in ("", "-1")]))
