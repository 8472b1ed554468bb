"""SWE-ReX's server in a docker container: seconds of starts, commands of a session, and ends.

Its own deployment installs the server from the package index in the container, and needs a network. Here the container has this
virtual environment and its Python from the host, and the host's loopback.
"""

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import time
import uuid
from collections import defaultdict

from swerex.runtime.abstract import BashAction, CreateBashSessionRequest
from swerex.runtime.remote import RemoteRuntime


async def measure(image: str, rounds: int) -> dict[str, list[float]]:
    seconds = defaultdict(list)
    for _ in range(rounds):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        name, token = f"swe-rex-{uuid.uuid4().hex[:8]}", uuid.uuid4().hex
        mounts = [word for path in (sys.prefix, sys.base_prefix) for word in ("-v", f"{path}:{path}:ro")]
        command = ["docker", "run", "-d", "--rm", "--name", name, "--network", "host", *mounts, "-w", "/testbed", image]
        server = [f"{sys.prefix}/bin/swerex-remote", "--port", str(port), "--auth-token", token]
        began = time.perf_counter()
        subprocess.run([*command, *server], check=True, capture_output=True)  # noqa: ASYNC221
        runtime = RemoteRuntime(auth_token=token, host="http://127.0.0.1", port=port, timeout=60)
        while not (await runtime.is_alive()).is_alive:
            if time.perf_counter() - began > 60:
                raise SystemExit("the server does not answer")
            await asyncio.sleep(0.01)
        await runtime.create_session(CreateBashSessionRequest())
        seconds["start again at once"].append(time.perf_counter() - began)
        for _ in range(10):
            began = time.perf_counter()
            done = await runtime.run_in_session(BashAction(command="true"))
            assert done.exit_code == 0, done
            seconds["command"].append(time.perf_counter() - began)
        began = time.perf_counter()
        await runtime.close()
        subprocess.run(["docker", "rm", "-f", name], check=False, capture_output=True)  # noqa: ASYNC221
        seconds["close"].append(time.perf_counter() - began)
    return seconds


parser = argparse.ArgumentParser()
parser.add_argument("--image", required=True)
parser.add_argument("--rounds", type=int, default=3)
args = parser.parse_args()
print(json.dumps(asyncio.run(measure(args.image, args.rounds))))
