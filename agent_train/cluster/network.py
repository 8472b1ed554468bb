"""Addresses by which the processes of a run reach each other, on one machine or on many."""

import asyncio
import hashlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from agent_train.cluster.lost import LostError
from agent_train.cluster.placement import PlacementError
from agent_train.config.schema import first_line
from agentgym.hosts import LOOPBACK

CHECK_SECONDS = 60.0
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def node_address() -> str:
    """The address at which the run's processes on all nodes reach this one: loopback if the cluster is one node."""
    import ray

    if sum(node["Alive"] for node in ray.nodes()) == 1:
        return LOOPBACK
    return str(ray.util.get_node_ip_address())


def serving_address(home: str) -> str:
    """The address to serve processes of the node `home` (its id): loopback on that node itself, else this node's address."""
    import ray

    return LOOPBACK if ray.get_runtime_context().get_node_id() == home else str(ray.util.get_node_ip_address())


def address_towards(host: str, port: int) -> str:
    """This machine's own address on the way to `host`; sends nothing. OSError if there is no way."""
    family, kind, protocol, _, remote = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(remote)
        return str(probe.getsockname()[0])


def take_interface(host: str, port: int) -> None:
    """Have gloo and NCCL in this process use the interface that reaches `host`, unless the environment names one.

    By itself gloo takes the address of the host name, which often is loopback or another network's.
    """
    own = address_towards(host, port)
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == own for address in addresses):
            for variable in INTERFACE_VARIABLES:
                os.environ.setdefault(variable, name)
            return


async def check_files(files: Mapping[str, Path]) -> None:
    """Raise PlacementError if another node does not read the same file here; `files` by the settings that name their folders."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    home = ray.get_runtime_context().get_node_id()
    others = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != home]
    paths = [str(path.absolute()) for path in files.values()]

    async def check(node: dict[str, Any]) -> None:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        asked = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(_digests).remote(paths)
        name = f"node {node['NodeManagerAddress']}"
        try:
            found = await asyncio.wait_for(asyncio.wrap_future(asked.future()), CHECK_SECONDS)
        except TimeoutError:
            raise LostError(f"{name} did not read the run's files within {CHECK_SECONDS:g} s") from None
        except ray.exceptions.RayTaskError as error:
            raise PlacementError(f"{name} cannot run agent_train: {first_line(error)}") from error
        except ray.exceptions.RayError as error:  # it is gone, and Ray did not know it yet
            raise LostError(f"{name}: {first_line(error)}") from error
        for (setting, path), own, theirs in zip(files.items(), _digests(paths), found, strict=True):
            if own != theirs:
                why = "is not there" if theirs is None else "differs"
                raise PlacementError(f"{name}: {path} {why}: {setting} must name a folder that all nodes share")

    await asyncio.gather(*map(check, others))


def _digests(paths: list[str]) -> list[str | None]:
    """The SHA-256 of each file; None for one that is not there."""
    return [hashlib.sha256(Path(path).read_bytes()).hexdigest() if os.path.isfile(path) else None for path in paths]
