"""Child processes that end with their parent, and with them all that they started."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from agentgym.processes.child_process import supervised, with_default_signals

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel feature is Linux's")

# A command that starts two more processes, one of them in a session of its own, prints their ids and goes on.
COMMAND = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(90)"]
started = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
print(os.getpid(), *(process.pid for process in started), flush=True)
"""


def gone(pid, seconds=60):
    deadline = time.monotonic() + seconds
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"{pid} lives"
        time.sleep(0.05)


@contextlib.contextmanager
def parent_of(code):
    """A parent that starts the code supervised; gives the parent, the supervisor's id and those that the code printed."""
    start = (
        "import subprocess, sys, time; from agentgym.processes.child_process import supervised; "
        f"p = subprocess.Popen(supervised([sys.executable, '-c', {code!r}]), start_new_session=True); "
        "print(p.pid, flush=True); time.sleep(90)"
    )
    parent = subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True)
    pids = []
    try:
        pids = [int(parent.stdout.readline()), *map(int, parent.stdout.readline().split())]
        yield parent, pids[0], pids[1:]
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@LINUX
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_supervised_command_and_its_descendants_end_with_the_parent(number):
    with parent_of(COMMAND + "time.sleep(90)") as (parent, supervisor, pids):
        parent.send_signal(number)
        for pid in (supervisor, *pids):
            gone(pid)


@LINUX
def test_descendants_that_ignore_sigterm_end_too():
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + COMMAND + "time.sleep(90)"
    with parent_of(code) as (_, supervisor, pids):
        os.kill(supervisor, signal.SIGTERM)
        for pid in pids:
            gone(pid)


@LINUX
def test_descendants_end_with_the_command():
    with parent_of(COMMAND) as (_, _, pids):
        for pid in pids:
            gone(pid)


@LINUX
def test_descendants_may_clean_up_after_the_command_has_ended(tmp_path):
    clean = "trap 'sleep 0.3; echo cleaned > done; exit' TERM; touch ready; while :; do sleep 0.02; done"
    command = 'sh -c "$0" & while [ ! -e ready ]; do sleep 0.02; done'
    done = subprocess.run(supervised(["sh", "-c", command, clean]), check=False, timeout=60, cwd=tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "done").read_text() == "cleaned\n"


@LINUX
def test_a_command_dies_with_a_supervisor_that_is_killed():
    with parent_of(COMMAND + "time.sleep(90)") as (_, supervisor, pids):
        os.kill(supervisor, signal.SIGKILL)
        gone(pids[0])


@pytest.mark.parametrize(
    ("code", "ends"),
    [("raise SystemExit(7)", 7), ("", 0), ("import os; os.kill(os.getpid(), 9)", -9), ("import os; os.abort()", -6)],
)
def test_a_supervisor_ends_as_its_command_did(code, ends):
    assert subprocess.run(supervised([sys.executable, "-c", code]), check=False, timeout=60).returncode == ends


@pytest.mark.parametrize("command_line", [with_default_signals, supervised])
def test_a_program_that_does_not_exist_is_named(command_line):
    command = command_line(["no-such-program", "x"])
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "no-such-program cannot be started: No such file or directory\n"
