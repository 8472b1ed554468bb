"""A process whose first thread has ended looks like one that has ended. Its other threads are killed with all the rest."""

import time

import pytest

from agentgym.sandbox import SandboxSpoiled

MB = 1 << 20

# Ends the first thread of this process; what follows the call never runs.
BEGIN = """
import ctypes, os, platform, threading, time
libc = ctypes.CDLL(None)
def end_this_thread(): libc.syscall(60 if platform.machine() == "x86_64" else 93, 0)
def rewrite():
    while True:
        with open("/workspace/rewritten", "a") as file: file.write("x")
        time.sleep(0.005)
"""

HEADLESS = {
    "one thread": "threading.Thread(target=rewrite).start(); end_this_thread()",
    "threads that take all processes": """
threading.Thread(target=rewrite).start()
try:
    while True: threading.Thread(target=time.sleep, args=(600,)).start()
except RuntimeError: end_this_thread()
""",
    "threads that each start the next": """
def relay():
    with open("/workspace/rewritten", "a") as file: file.write("x")
    while True:
        try: threading.Thread(target=relay).start()
        except RuntimeError: continue
        return end_this_thread()
threading.Thread(target=relay).start(); end_this_thread()
""",
    "processes of such threads": """
for _ in range(2):  # with their threads fewer than there may be
    if os.fork() == 0:
        os.setsid()
        for _ in range(4): threading.Thread(target=rewrite).start()
        end_this_thread()
threading.Thread(target=rewrite).start(); end_this_thread()
""",
    "many such processes": """
while True:
    try:
        if os.fork(): continue
        os.setsid()
        threading.Thread(target=rewrite).start()
    except (OSError, RuntimeError): pass
    end_this_thread()
""",
}


@pytest.fixture(params=HEADLESS.values(), ids=HEADLESS)
def attack(request):
    return BEGIN + request.param


def nothing_of_it_is_left(sandbox):
    """No thread but the guest's and those of sessions that wait; the file stays as the host writes it; all can start again."""
    sandbox.write("rewritten", "by the host")
    time.sleep(0.1)
    assert sandbox.read("rewritten") == b"by the host"
    fresh = sandbox.session()
    assert fresh.run("import os; print(6 * 7)").stdout == "42\n"
    bomb = "pids = []\ntry:\n  while True: pids.append(os.fork() or os.execlp('sleep', 'sleep', '600'))\nexcept OSError: print(len(pids))"
    assert int(fresh.run(bomb, timeout=20).stdout) >= 16  # of 20
    fresh.close()


@pytest.fixture
def small(shared_small):
    yield shared_small
    shared_small.reset()


@pytest.fixture(scope="module")
def shared_small(where):
    from opened import open_on

    from agentgym.sandbox import SandboxSpec

    box = open_on(where, SandboxSpec(pids=20))
    yield box
    box.close()


class TestThreadsWithoutAFirst:
    def test_they_do_not_outlive_a_command(self, small, attack):
        small.exec(["python3", "-c", attack], timeout=1)
        nothing_of_it_is_left(small)

    def test_nor_one_beside_a_session(self, small, attack):
        beside = small.session("shell")
        small.exec(["python3", "-c", f"import os\nif os.fork(): os._exit(0)\n{attack}"], timeout=1)
        small.exec(["python3", "-c", attack], timeout=1)
        assert beside.run("echo on").stdout == "on\n"
        nothing_of_it_is_left(small)

    def test_nor_their_session(self, small, attack):
        session = small.session()
        session.run(
            f"import os\nif os.fork() == 0:\n  exec({attack!r})\n  os._exit(0)\nimport time; time.sleep(0.5)", 5
        )
        other = None
        try:
            other = small.session("shell")
        except SandboxSpoiled as error:
            assert "the limit of running programs is reached" in str(error)  # noqa: PT017 - either is right
        session.close()
        nothing_of_it_is_left(small)
        if other is not None:
            assert other.run("echo on").stdout == "on\n"

    def test_nor_a_session_that_ends_so_itself(self, small, attack):
        session = small.session()
        other = small.session("shell")
        result = session.run(attack, timeout=1)
        assert not session.alive, result
        assert other.run("echo on").stdout == "on\n"
        nothing_of_it_is_left(small)
