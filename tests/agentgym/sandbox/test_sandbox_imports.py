"""Threads import the sandbox's modules at once, in whatever order: each import loads, and none finds a half-loaded package."""

import subprocess
import sys

import pytest

IMPORTS = """
import importlib, random, sys, threading
sys.setswitchinterval(1e-5)
names = ["agentgym.sandbox", "agentgym.sandbox.api", "agentgym.sandbox.backends.select", "agentgym.sandbox.images.build"]
random.Random(int(sys.argv[1])).shuffle(names)
start = threading.Barrier(len(names))

def load(name):
    start.wait()
    importlib.import_module(name)

threads = [threading.Thread(target=load, args=(name,)) for name in names]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.parametrize("seed", range(4))
def test_threads_import_its_modules_at_once(seed):
    done = subprocess.run([sys.executable, "-c", IMPORTS, str(seed)], capture_output=True, timeout=60, check=True)
    assert done.stderr == b""


def test_the_package_itself_imports_none():
    code = (
        "import sys, agentgym.sandbox; print(*[name for name in sys.modules if name.startswith('agentgym.sandbox.')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True).stdout == b"\n"


def test_it_has_the_names_of_its_modules():
    from agentgym import sandbox

    assert sandbox.acquire.__module__ == "agentgym.sandbox.backends.select"
    assert issubclass(sandbox.SandboxSpoiled, sandbox.SandboxError)
    with pytest.raises(AttributeError, match="has no attribute 'acquired'"):
        _ = sandbox.acquired
