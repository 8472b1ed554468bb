"""`agentgym doctor`: what this machine has for agentgym, what it lacks, and how to mend it.

Every part is looked at by a function of its own that gives findings. All look at once, each in a thread with a time limit, and
what may crash or hang an interpreter (torch, a driver's program) runs in a process of its own. Nothing is contacted but the
Docker Engine that would be used anyway; the Hugging Face hub only when asked for.
"""

from __future__ import annotations

from agentgym.doctor.finding import Finding, Probe, examine
from agentgym.doctor.machine import compute, disk, gpu, ports
from agentgym.doctor.packages import environments, optional, python, vllm
from agentgym.doctor.sandboxes import bubblewrap, cgroups, docker
from agentgym.doctor.task_data import data, network

__all__ = ["PROBES", "Finding", "Probe", "examine", "network_probe"]

PROBES = (
    Probe("agentgym", python, 30.0),
    Probe("environments", environments, 30.0),
    Probe("optional packages", optional, 20.0),
    Probe("vLLM", vllm, 20.0),
    Probe("GPU", gpu, 90.0),
    Probe("CPU and memory", compute, 5.0),
    Probe("disk", disk, 10.0),
    Probe("Docker", docker, 20.0),
    Probe("bubblewrap", bubblewrap, 40.0),
    Probe("control groups", cgroups, 10.0),
    Probe("data", data, 15.0),
    Probe("ports", ports, 5.0),
)


def network_probe() -> Probe:
    """The one that asks the Hugging Face hub."""
    return Probe("network", network, 15.0)
