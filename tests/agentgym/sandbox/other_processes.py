"""Other processes that acquire sandboxes."""

import subprocess
import sys

ACQUIRE = """
import os, signal, sys
from agentgym.sandbox import SandboxSpec, acquire
backend = {backend!r}
boxes = [acquire(SandboxSpec(memory=128 << 20, disk=8 << 20), backend) for _ in range(2)]
assert all(box.exec("echo well").stdout == "well\\n" for box in boxes)
"""
FORK = """
child = os.fork()
if child == 0:
    box = acquire(boxes[0].spec, backend)
    well = box.exec("echo well").stdout == "well\\n" and box.id not in [b.id for b in boxes]
    sys.exit(0 if well and not boxes[0].alive else 1)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
sys.exit(code or any(box.exec("echo well").stdout != "well\\n" for box in boxes))
"""


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)


def acquire_and(backend, rest):
    """Acquire two sandboxes in a process, and go on there with `rest`."""
    return run_python(ACQUIRE.format(backend=backend) + rest)
