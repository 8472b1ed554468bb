"""Processes that the project starts ignore and block no signal, whatever the project's own process inherited."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import agentgym
from agentgym.core.env import Blocking
from agentgym.processes.child_process import supervised, with_default_signals

INHERITED = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1)
BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}

# What a process has at its start: the lines of /proc that a program cannot dress up.
REPORT = """
import json
lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({key: int(lines[key].strip(), 16) for key in ("SigIgn", "SigBlk")}), flush=True)
"""


def signals_of(mask):
    return {number for number in signal.valid_signals() if mask >> (number - 1) & 1}


def masks_of(pid):
    """What a process ignores besides what Python does, and what it blocks."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return signals_of(int(lines["SigIgn"], 16)) - BY_PYTHON, signals_of(int(lines["SigBlk"], 16))


@contextlib.contextmanager
def ignored_and_blocked():
    """As under nohup, in a shell's background, or in a worker of Ray."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in INHERITED}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, INHERITED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)


def inherited(command, **options):
    with ignored_and_blocked():
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, **options)
    report = json.loads(done.stdout.splitlines()[-1])
    return signals_of(report["SigIgn"]), signals_of(report["SigBlk"])


def test_a_plain_child_inherits_them():
    ignored, blocked = inherited([sys.executable, "-c", REPORT])
    assert ignored >= set(INHERITED)
    assert blocked == set(INHERITED)


@pytest.mark.parametrize("command_line", [with_default_signals, supervised])
def test_a_command_that_is_started_through_child_process_does_not(command_line):
    ignored, blocked = inherited(command_line([sys.executable, "-c", REPORT]))
    assert (ignored - BY_PYTHON, blocked) == (set(), set())


def own_signals():
    return [number for number in INHERITED if signal.getsignal(number) == signal.SIG_IGN] + list(
        signal.pthread_sigmask(signal.SIG_BLOCK, ())
    )


def test_an_isolated_call_does_not():
    code = "from agentgym.processes.isolate import call_isolated, reference; import test_signals as t; "
    code += "print(call_isolated(t.own_signals, timeout=30))"
    with ignored_and_blocked():
        done = subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=Path(__file__).parent,
        )
    assert done.stdout == "[]\n"


def test_a_served_session_does_not():
    psutil = pytest.importorskip("psutil")
    command = [sys.executable, "-m", "agentgym.cli", "serve", "tic_tac_toe", "--json", "--port", "0"]
    with ignored_and_blocked():
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        told = ""
        while not told.rstrip().endswith("}"):
            told += server.stdout.readline()
        env = Blocking(agentgym.make(f"{json.loads(told)['url']}/tic_tac_toe"))
        env.reset(seed=0)
        workers = [p for p in psutil.Process(server.pid).children(recursive=True) if not p.children()]
        # One that was forked just now still has the zygote's own.
        for worker in workers:
            deadline = time.monotonic() + 10
            while masks_of(worker.pid) != (set(), set()) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert masks_of(worker.pid) == (set(), set())
        assert workers
        env.close()
    finally:
        server.kill()
        server.wait(60)
        server.stdout.close()
