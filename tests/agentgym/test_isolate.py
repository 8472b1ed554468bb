"""Functions in worker processes: results, errors, timeouts that hold, and workers that come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.processes import isolate
from agentgym.processes.isolate import IsolatedCallError, NoWorker, Worker, WorkerDied, call_isolated, reference

CHECKOUT = Path(__file__).parent.parent.parent


def twice(x):
    return x * 2


def noisy():
    print("to stdout")
    os.write(1, b"raw to stdout\n")
    return os.read(0, 10).decode()


def tell_pid():
    return os.getpid()


def block_in_c():
    return 10**7**10**7  # one instruction that holds the interpreter's lock


def ignore_and_sleep():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    time.sleep(60)


def leave_child():
    child = subprocess.Popen(["sleep", "600"])
    Path(os.environ["CHILD_FILE"]).write_text(str(child.pid))
    time.sleep(60)


class Unwritable(Exception):
    def __str__(self):
        raise RuntimeError("no")


def raise_unwritable():
    raise Unwritable


def grow():
    return len(bytearray(isolate.MEMORY + 1))


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_function_runs_elsewhere_and_its_result_comes_back():
    assert call_isolated(twice, "é漢\x00", timeout=30) == "é漢\x00é漢\x00"
    assert call_isolated("math:factorial", 5, timeout=30) == 120
    assert call_isolated("os.path:join", "a", "b", timeout=30) == "a/b"
    assert call_isolated(tell_pid, timeout=30) != os.getpid()


def test_a_worker_is_used_again():
    assert len({call_isolated(tell_pid, timeout=30) for _ in range(5)}) == 1


@settings(max_examples=50, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3)))
def test_what_json_carries_comes_back_equal(value):
    assert call_isolated("copy:deepcopy", value, timeout=30) == value


def test_large_arguments_and_results_pass():
    assert len(call_isolated(twice, "x" * 3_000_000, timeout=60)) == 6_000_000


@pytest.mark.parametrize("function", [block_in_c, ignore_and_sleep])
def test_the_time_is_up_whatever_the_function_does_and_the_next_call_works(function):
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=rf"{function.__name__}: no result within 0.3 s"):
        call_isolated(function, timeout=0.3)
    assert time.monotonic() - began < 30
    assert call_isolated(twice, 4, timeout=30) == 8


def test_what_the_function_started_is_killed_with_it(tmp_path, monkeypatch):
    file = tmp_path / "pid"
    code = (
        "import os, sys\n"
        "from tests_isolate import leave_child\n"
        "from agentgym.processes.isolate import call_isolated\n"
        "try:\n    call_isolated(leave_child, timeout=3.0)\n"
        "except TimeoutError:\n    print('late')\n"
    )
    (tmp_path / "tests_isolate.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{CHECKOUT}", "CHILD_FILE": str(file)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "late\n"
    deadline = time.monotonic() + 10  # a killed process is gone only when it next has the processor
    while running(int(file.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(int(file.read_text()))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (("operator:index", "one"), "operator:index: TypeError: 'str' object cannot be interpreted as an integer"),
        (("nowhere:f",), "ModuleNotFoundError: No module named 'nowhere'"),
        (("math:nothing",), "AttributeError"),
        (("math:pi",), "TypeError: math:pi is float, no function"),
        (("builtins:set", [1]), "not JSON serializable"),
        ((raise_unwritable,), "Unwritable, which raised RuntimeError"),
        ((grow,), "MemoryError"),
    ],
)
def test_an_error_is_told_and_the_worker_lives_on(call, says):
    before = call_isolated(tell_pid, timeout=30)
    with pytest.raises(IsolatedCallError, match=says):
        call_isolated(*call, timeout=30)
    assert call_isolated(tell_pid, timeout=30) == before


@pytest.mark.parametrize(
    ("call", "says"),
    [(("os:abort",), "SIGABRT"), (("os:_exit", 3), "exited with 3"), (("sys:exit", 4), "exited with 4")],
)
def test_a_function_that_ends_its_process_is_told_and_the_next_call_works(call, says):
    with pytest.raises(WorkerDied, match=says):
        call_isolated(*call, timeout=30)
    assert call_isolated(twice, 4, timeout=30) == 8


def test_a_worker_killed_while_idle_is_replaced():
    pid = call_isolated(tell_pid, timeout=30)
    os.kill(pid, signal.SIGKILL)
    assert call_isolated(tell_pid, timeout=30) != pid


def test_what_the_function_prints_is_no_answer_and_it_reads_nothing():
    assert call_isolated(noisy, timeout=30) == ""


def test_many_threads_share_a_few_workers():
    with ThreadPoolExecutor(16) as threads:
        results = list(
            threads.map(
                lambda n: (call_isolated(twice, n, timeout=60), call_isolated(tell_pid, timeout=60)), range(100)
            )
        )
    assert [value for value, _ in results] == [2 * n for n in range(100)]
    assert len({pid for _, pid in results}) <= isolate.MOST_WORKERS


def test_a_call_that_hangs_does_not_hold_up_others():
    if (os.cpu_count() or 1) < 2:
        pytest.skip("one core has one worker")

    def hang():
        with pytest.raises(TimeoutError):
            call_isolated(ignore_and_sleep, timeout=3)

    late = threading.Thread(target=hang)
    late.start()
    assert call_isolated(twice, 1, timeout=30) == 2
    assert late.is_alive()
    late.join()


def test_a_caller_that_waits_too_long_for_a_worker_is_told_so(monkeypatch):
    monkeypatch.setattr(isolate, "WAIT_SECONDS", 0.1)
    with ThreadPoolExecutor(isolate.MOST_WORKERS) as threads:
        for _ in range(isolate.MOST_WORKERS):
            threads.submit(call_isolated, "time:sleep", 5, timeout=30)
        time.sleep(1)
        with pytest.raises(NoWorker, match=r"no worker process was free within 0.1 s"):
            call_isolated(twice, 1, timeout=1)


def test_a_worker_that_cannot_start_is_no_fault_of_the_function(monkeypatch):
    isolate.close_workers()
    monkeypatch.setattr(isolate.sys, "executable", "/bin/false")
    with pytest.raises(NoWorker, match="exited with 1 before the call"):
        call_isolated(twice, 1, timeout=1)


def test_a_worker_of_ones_own_has_its_own_environment_and_ends_with_its_block():
    with Worker({**os.environ, "MINE": "yes"}) as worker:
        assert worker.call("os:getenv", "MINE", timeout=30) == "yes"
        pid = worker.call(reference(tell_pid), timeout=30)
    assert not running(pid)


def test_a_fork_has_workers_of_its_own():
    parent = call_isolated(tell_pid, timeout=30)
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            os.write(write, str(call_isolated(tell_pid, timeout=30)).encode())
        finally:
            isolate.close_workers()
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        child = int(pipe.read())
    os.wait()
    assert child != parent
    assert call_isolated(tell_pid, timeout=30) == parent


def test_workers_end_with_the_process_even_if_it_is_killed():
    code = (
        "import os, signal, sys\nfrom agentgym.processes.isolate import call_isolated\n"
        "print(call_isolated('os:getpid', timeout=30), flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=CHECKOUT, check=False
    )
    assert done.returncode == -signal.SIGKILL
    until = time.monotonic() + 20
    while running(int(done.stdout)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not running(int(done.stdout))


def test_a_worker_that_hangs_ends_soon_after_a_caller_that_was_killed(tmp_path):
    code = (
        "import os, signal, threading, time\nfrom agentgym.processes.isolate import call_isolated\n"
        "call_isolated('signal:signal', 14, 1, timeout=30)\n"  # SIGALRM is ignored: what one call does, the next must not suffer
        "print(call_isolated('os:getpid', timeout=30), flush=True)\n"
        "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
        "call_isolated('time:sleep', 600, timeout=2.0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=CHECKOUT, check=False
    )
    assert done.returncode == -signal.SIGKILL
    until = time.monotonic() + 30
    while running(int(done.stdout)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not running(int(done.stdout))


def test_functions_of_a_script_can_run_too(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from agentgym.processes.isolate import call_isolated\n"
        "def half(x):\n    return x / 2\n"
        "if __name__ == '__main__':\n    print(call_isolated(half, 3, timeout=30), call_isolated(half, 5, timeout=30))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, env=env, check=False
    )
    assert (done.stdout, done.stderr) == ("1.5 2.5\n", "")


class Holder:
    def method(self):
        return 1


def test_what_has_no_name_is_refused():
    def local():
        return 1

    for function in (lambda: 1, local, Holder().method):
        with pytest.raises(ValueError, match="cannot run in another process"):
            reference(function)
    with pytest.raises(ValueError, match="positive"):
        call_isolated(twice, 1, timeout=0)


def test_a_worker_that_is_stopped_while_it_reads_a_long_request_is_killed(monkeypatch):
    monkeypatch.setattr(isolate, "START_SECONDS", 10.0)
    with isolate.Worker() as worker:
        pid = worker.call("os:getpid", timeout=10.0)
        monkeypatch.setattr(isolate, "START_SECONDS", 1.0)
        time.sleep(0.5)  # it has said that it is ready for the next call
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(isolate.NoWorker, match="SIGKILL before the call"):
            worker.call("builtins:len", "x" * (8 << 20), timeout=10.0)
