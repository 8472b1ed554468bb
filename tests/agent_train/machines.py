"""Machines for tests: network namespaces joined by a bridge, each with its own address and its own loopback, and a Ray node on each."""

import contextlib
import itertools
import os
import secrets
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from agent_train.cluster.network import INTERFACE_VARIABLES

PORT = 6379
START_SECONDS = 60.0
RAY = Path(sys.executable).with_name("ray")
_numbers = itertools.count()


def missing() -> str | None:
    """Why there can be none here, or None."""
    if os.geteuid() or shutil.which("ip") is None:
        return "machines are network namespaces: they need root and iproute2's ip"
    mark = f"agt{os.getpid() % 10000}p"
    try:
        with _bridge(mark):
            made = Machines(mark, Path(f"/tmp/{mark}"), {})
            try:
                made.join(0)
            finally:
                subprocess.run(["ip", "netns", "del", made.name(0)], check=False, capture_output=True)
    except subprocess.CalledProcessError as error:
        return f"this machine makes no network namespaces: {error.stderr.strip()}"
    return None


@contextlib.contextmanager
def _bridge(mark: str):
    ip("link", "add", mark, "type", "bridge")
    try:
        ip("link", "set", mark, "up")
        yield
    finally:
        ip("link", "del", mark)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)


@dataclass
class Machines:
    """`machines` makes them."""

    mark: str
    folder: Path  # of all Ray nodes
    environment: dict[str, str]  # of every process on a machine: where Ray is, and its token
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def name(self, number: int) -> str:
        return f"{self.mark}-{number}"

    def address(self, number: int) -> str:
        return f"10.77.0.{number + 1}"

    def join(self, number: int) -> None:
        """Make a machine and connect it to the others."""
        name, outside = self.name(number), f"{self.mark}v{number}"
        ip("netns", "add", name)
        ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", outside, "master", self.mark, "up")
        ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", name, "link", "set", device, "up")

    def command(self, number: int, *words: str) -> list[str]:
        """The words of a command that runs on a machine."""
        return ["ip", "netns", "exec", self.name(number), *words]

    def start_ray(self, number: int, cpus: int, own_disk: Path) -> None:
        """Start a node of Ray: the head on machine 0, which goes first. In the folder `own_disk` each node sees its own files."""
        head = f"{self.address(0)}:{PORT}"
        words = ["--head", f"--port={PORT}", "--include-dashboard=false"] if number == 0 else [f"--address={head}"]
        words += [f"--node-ip-address={self.address(number)}", f"--num-cpus={cpus}", "--disable-usage-stats", "--block"]
        if number == 0:
            words += [f"--temp-dir={self.folder}"]
        path = self.folder.parent / f"{self.name(number)}.log"
        with path.open("wb") as log:
            # `ip netns exec` gives a process its own mounts, too.
            start = ["sh", "-c", 'mount -t tmpfs none "$1" && shift && exec "$@"', "sh", str(own_disk)]
            command = self.command(number, *(start if number else ()), str(RAY), "start", *words)
            self.nodes.append(
                subprocess.Popen(command, stdout=log, stderr=log, env=self.environment, start_new_session=True)
            )
        end = time.monotonic() + START_SECONDS
        while b"Ray runtime started." not in path.read_bytes():
            if time.monotonic() > end:
                raise TimeoutError(
                    f"Ray on machine {number} has not started after {START_SECONDS:g} s: {path.read_text()}"
                )
            time.sleep(0.1)

    def wait_for_nodes(self, count: int) -> None:
        ask = "import ray; ray.init(log_to_driver=False); print(sum(n['Alive'] for n in ray.nodes()))"
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            words = self.command(0, sys.executable, "-c", ask)
            how = {"capture_output": True, "text": True, "timeout": START_SECONDS, "env": self.environment}
            done = subprocess.run(words, check=False, **how)
            if done.returncode == 0 and int(done.stdout.split()[-1]) >= count:
                return
        raise TimeoutError(f"there are no {count} Ray nodes after {START_SECONDS:g} s: {done.stderr[-2000:]}")

    def processes(self, number: int) -> list[psutil.Process]:
        listed = subprocess.run(["ip", "netns", "pids", self.name(number)], check=False, capture_output=True, text=True)
        return [psutil.Process(int(pid)) for pid in listed.stdout.split() if psutil.pid_exists(int(pid))]

    def kill(self, number: int) -> None:
        """SIGKILL every process of a machine."""
        for process in self.processes(number):
            with contextlib.suppress(psutil.Error):
                process.kill()

    def close(self) -> None:
        for number in range(len(self.nodes)):
            self.kill(number)
        for node in self.nodes:
            node.wait(10)


@contextlib.contextmanager
def machines(*cpus: int, own_disk: Path):
    """So many machines, each with a Ray node that has these CPUs. They share all files but those in `own_disk`."""
    mark = f"agt{os.getpid() % 10000}{next(_numbers)}"
    ray = {"RAY_ADDRESS": f"10.77.0.1:{PORT}", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # A rank that ran in this process has chosen an interface for it.
    environment = {name: value for name, value in os.environ.items() if name not in INTERFACE_VARIABLES}
    made = Machines(mark, Path(f"/tmp/{mark}"), environment | ray)
    with _bridge(mark):
        try:
            for number, count in enumerate(cpus):
                made.join(number)
                made.start_ray(number, count, own_disk)
            made.wait_for_nodes(len(cpus))
            yield made
        finally:
            made.close()
            for number in range(len(cpus)):
                subprocess.run(["ip", "netns", "del", made.name(number)], check=False, capture_output=True)
            shutil.rmtree(made.folder, ignore_errors=True)
