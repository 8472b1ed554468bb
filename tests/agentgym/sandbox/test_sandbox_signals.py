"""Programs begin with default signal dispositions and an empty mask, whatever the host was started with."""

import signal
from contextlib import contextmanager

import pytest


@contextmanager
def ignored_and_blocked():
    """As under `nohup` and many service managers: SIGINT and SIGHUP ignored, and a mask."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, action in before.items():
            signal.signal(number, action)


@pytest.fixture(scope="module")
def inheriting(where):
    from opened import open_on

    from agentgym.sandbox import SandboxSpec

    with ignored_and_blocked():
        box = open_on(where, SandboxSpec())
    yield box
    box.close()


def dispositions(status):
    """The mask, what is ignored, and what is caught, as numbers.

    Signals 32 and 33 are the C library's own: `make` leaves them ignored, and no program can handle them.
    """
    fields = dict(line.split(":\t") for line in status.splitlines() if line.startswith("Sig") and ":\t" in line)
    return [int(fields[name], 16) & ~(0b11 << 31) for name in ("SigBlk", "SigIgn", "SigCgt")]


def test_a_command_has_the_defaults(inheriting):
    assert dispositions(inheriting.exec(["cat", "/proc/self/status"]).stdout) == [0, 0, 0]


@pytest.mark.parametrize(
    ("kind", "step"),
    [("shell", "cat /proc/self/status"), ("python", "import subprocess; subprocess.run(['cat', '/proc/self/status'])")],
)
def test_what_a_session_starts_has_them_too(inheriting, kind, step):
    session = inheriting.session(kind)
    assert dispositions(session.run(step).stdout) == [0, 0, 0]
    session.close()


@pytest.mark.parametrize(
    "command", ["sleep 60", "bash -c 'sleep 60; echo on'", "python3 -c 'import time; time.sleep(60)'"]
)
def test_a_shell_is_interrupted_and_its_command_with_it(inheriting, command):
    shell = inheriting.session("shell")
    shell.run("kept=1")
    result = shell.run(command, timeout=0.5)
    assert (result.timed_out, result.exit_code) == (True, 130), result
    assert shell.alive
    assert shell.run("echo $kept; cat /proc/[0-9]*/comm | grep -c sleep").stdout == "1\n0\n"
    shell.close()


def test_a_command_ends_by_a_signal_that_the_host_ignores_or_blocks(inheriting):
    for name in "INT", "TERM", "HUP", "USR1":
        assert inheriting.exec(f"kill -{name} $$; sleep 5").exit_code == 128 + getattr(signal, f"SIG{name}")
