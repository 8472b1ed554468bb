"""One sandbox uses up what the kernel counts for each user of the machine: another has its own share. On both back ends."""

import pytest

PRELUDE = """
import ctypes, fcntl, os, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
held = []
def checked(result):
    if result < 0: raise OSError(ctypes.get_errno(), "refused")
    return result
def pipe_pages():
    read, write = os.pipe()
    try: return (read, write), fcntl.fcntl(write, 1031, 1 << 20)
    except OSError: os.close(read); os.close(write); raise
def send_descriptor():
    pair = socket.socketpair()
    socket.send_fds(pair[0], [b"x"], [0] * 50)
    pair[0].close()
    return pair
signal.pthread_sigmask(signal.SIG_BLOCK, [40])
class Value(ctypes.Structure): _fields_ = [("value", ctypes.c_void_p)]
queue = lambda: checked(libc.sigqueue(os.getpid(), 40, Value(0)))
def epoll_watch():
    import select
    poll = select.epoll()
    for fd in many: poll.register(fd)
    return poll
def use_up(act):
    count = 0
    try:
        while count < 300_000: held.append(act()); count += 1
    except (OSError, OverflowError) as error: print("refused after", count, error)
    else: print("never refused")
"""

RESOURCES = {
    "pseudo-terminals": "os.openpty",
    "inotify instances": "lambda: checked(libc.inotify_init1(0))",
    "pages of pipes": "pipe_pages",
    "queued signals": "queue",
    "descriptors under way": "send_descriptor",
}


@pytest.fixture(scope="module")
def greedy(where):
    """A sandbox of another agent, which takes what there is."""
    from opened import open_on

    from agentgym.sandbox import SandboxSpec

    box = open_on(where, SandboxSpec())
    yield box
    box.close()


@pytest.fixture
def greed(greedy):
    yield greedy.session()
    greedy.reset()


@pytest.mark.parametrize("act", RESOURCES.values(), ids=RESOURCES)
def test_what_one_sandbox_has_used_up_another_has_still(greed, sandbox, act):
    greed.run(PRELUDE)
    # In several processes, where descriptors are the limit of one.
    taken = greed.run(
        f"import time\nfor _ in range(8):\n  if os.fork() == 0: use_up({act}); print(end='', flush=True); time.sleep(600)\n"
        f"use_up({act}); time.sleep(1.5)",
        timeout=30,
    )
    assert "refused after" in taken.stdout, taken
    found = sandbox.exec(["python3", "-c", f"{PRELUDE}\nmade = ({act})()\nprint('there is one')"])
    assert found.stdout == "there is one\n", found.stderr


@pytest.mark.parametrize("name", ["python", "shell"])
def test_its_sessions_and_pipes_are_as_large_as_ever(greed, sandbox, name):
    greed.run(PRELUDE)
    greed.run("use_up(pipe_pages)", timeout=30)
    size = "import fcntl, os\nprint([fcntl.fcntl(fd, 1032) for fd in (*os.pipe(), 1, 2)])"
    assert sandbox.exec(["python3", "-c", size]).stdout == "[65536, 65536, 65536, 65536]\n"
    session = sandbox.session(name)
    session.close()


def test_two_sandboxes_are_two_users_without_a_name(greedy, sandbox):
    users = [box.exec("id -u; id -g; id -G; echo $USER $LOGNAME").stdout.split() for box in (greedy, sandbox)]
    assert users[0][0] != users[1][0]
    assert users[0][1:] == users[1][1:] == ["65534", "65534", "sandbox", "sandbox"]


def test_a_sandbox_has_a_few_pseudo_terminals(sandbox):
    code = "import os\nmade = []\ntry:\n  while True: made.append(os.openpty())\nexcept OSError: print(len(made), os.ttyname(made[0][1]))"
    assert sandbox.exec(["python3", "-c", code]).stdout == "16 /dev/pts/0\n"
    assert sandbox.exec("script -qec 'tty; echo done' /dev/null </dev/null || tty").stdout.split()[0] in {
        "/dev/pts/0",
        "not",
    }
