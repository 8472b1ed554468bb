"""Addresses by which the processes of a run reach each other, on one machine or on many."""

import os
import socket

import psutil

from agentgym.hosts import LOOPBACK

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
