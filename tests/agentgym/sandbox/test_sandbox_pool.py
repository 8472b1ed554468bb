"""The pool against sandboxes that are slow, die, or cannot be made whenever a test says so.

The sandboxes are the fault doubles of pool_doubles.py, which run nothing. Pools that share places are in
test_sandbox_places.py, real sandboxes in pools in test_sandbox_backends.py.
"""

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_doubles import Maker, box_of
from waiting import until

from agentgym.sandbox.api import SandboxError
from agentgym.sandbox.pool import Places, SandboxPool


def test_what_is_given_back_is_reset_and_lent_again(pool_of, maker):
    pool = pool_of()
    first = pool.acquire()
    box = box_of(first)
    first.close()
    second = pool.acquire()
    assert box_of(second) is box
    assert box.resets == 1
    assert len(maker.made) == 1


def test_giving_back_does_not_wait_for_the_reset(pool_of, maker):
    pool = pool_of()
    lease = pool.acquire()
    maker.reset_seconds = 10.0
    started = time.monotonic()
    lease.close()
    assert time.monotonic() - started < 5.0


def test_a_lease_that_was_given_back_is_of_no_use(pool_of):
    pool = pool_of()
    lease = pool.acquire()
    lease.close()
    lease.close()
    assert not lease.alive
    for use in (
        lambda: lease.exec("true"),
        lease.session,
        lambda: lease.read("a"),
        lambda: lease.write("a", ""),
        lambda: lease.upload("a"),
        lease.reset,
    ):
        with pytest.raises(SandboxError, match="returned to its pool"):
            use()


def test_closing_twice_gives_back_once(pool_of, maker):
    pool = pool_of()
    first = pool.acquire()
    first.close()
    second = pool.acquire()
    first.close()
    assert second.alive
    time.sleep(0.05)
    assert box_of(second).resets == 1


def test_nobody_is_lent_what_another_still_holds(pool_of):
    pool = pool_of(limit=3)
    leases = [pool.acquire() for _ in range(3)]
    assert len({lease.id for lease in leases}) == 3


def test_only_a_few_are_made_at_a_time(pool_of, maker):
    maker.seconds = 0.05
    pool = pool_of(limit=20, at_once=3)
    with ThreadPoolExecutor(20) as threads:
        leases = list(threads.map(lambda _: pool.acquire(), range(20)))
    assert len({lease.id for lease in leases}) == 20
    assert maker.most_making == 3


def test_there_are_never_more_than_the_limit(pool_of, maker):
    pool = pool_of(limit=2)

    def use(_):
        lease = pool.acquire()
        assert len(maker.living) <= 2
        lease.close()

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(use, range(100)))
    assert len(maker.made) <= 2


def test_who_asked_first_is_served_first(pool_of):
    pool = pool_of(limit=1)
    held = pool.acquire()
    order, threads = [], []

    def wait(number):
        lease = pool.acquire()
        order.append(number)
        lease.close()

    for number in range(8):
        threads.append(threading.Thread(target=wait, args=(number,)))
        threads[-1].start()
        until(lambda n=number: len(pool.waiters) == n + 1)
    held.close()
    for thread in threads:
        thread.join(30)
    assert order == list(range(8))


def test_the_error_of_who_waits_in_vain_names_the_limit(pool_of):
    pool = pool_of(limit=2)
    held = [pool.acquire(), pool.acquire()]
    with pytest.raises(SandboxError, match=r"test: no sandbox within 0.05 s: all 2 .*AGENTGYM_SANDBOXES"):
        pool.acquire(timeout=0.05)
    held[0].close()
    assert pool.acquire(timeout=30).alive


def test_who_gave_up_is_not_served(pool_of):
    pool = pool_of(limit=1)
    held = pool.acquire()
    with pytest.raises(SandboxError):
        pool.acquire(timeout=0.01)
    held.close()
    assert pool.acquire(timeout=30).alive


def test_a_failure_is_retried_and_its_reason_told(pool_of, maker, caplog):
    maker.error = SandboxError("no engine answers at unix:///nowhere")
    pool = pool_of()
    started = time.monotonic()
    with caplog.at_level(logging.WARNING), pytest.raises(SandboxError, match="no engine answers at unix:///nowhere"):
        pool.acquire(timeout=2)
    assert time.monotonic() - started < 30
    assert 2 <= maker.attempts <= 5, "attempts pause 0.1, 0.2, 0.4, 0.8 s"
    assert len(caplog.records) == 1, "told once, not at every attempt"


def test_while_making_fails_one_at_a_time_is_tried(pool_of, maker):
    maker.error, maker.seconds = SandboxError("gone"), 0.05
    pool = pool_of(limit=8)
    with ThreadPoolExecutor(8) as threads:
        waits = [threads.submit(pool.acquire, 1.5) for _ in range(8)]
        until(lambda: maker.attempts >= 4)  # the first ones go out together
        until(lambda: maker.making == 0)
        maker.most_making = 0
        for wait in waits:
            with pytest.raises(SandboxError, match="gone"):
                wait.result()
    assert maker.most_making == 1


def test_any_exception_of_a_back_end_is_told(pool_of, maker):
    maker.error = ZeroDivisionError("a bug")
    with pytest.raises(SandboxError, match="a bug"):
        pool_of().acquire(timeout=0.5)


def test_what_can_never_be_made_is_refused_at_once_and_asked_for_again_by_the_next(pool_of, maker):
    pool, maker.error = pool_of(1), ValueError("too large")
    with pytest.raises(SandboxError, match="too large"):
        pool.acquire(timeout=20)
    assert maker.attempts == 1
    maker.error = None
    pool.acquire(timeout=20)


def test_when_the_daemon_returns_those_who_wait_are_served(pool_of, maker):
    maker.error = SandboxError("gone")
    pool = pool_of(limit=8)
    with ThreadPoolExecutor(8) as threads:
        waits = [threads.submit(pool.acquire, 20) for _ in range(8)]
        until(lambda: maker.attempts >= 5)
        maker.error = None
        assert len({wait.result().id for wait in waits}) == 8


def test_nobody_waiting_nothing_is_tried(pool_of, maker):
    maker.error = SandboxError("gone")
    with pytest.raises(SandboxError):
        pool_of().acquire(timeout=0.01)
    until(lambda: maker.making == 0)
    attempts = maker.attempts
    time.sleep(0.5)
    assert maker.attempts == attempts


def test_the_dead_are_never_lent(pool_of, maker):
    pool = pool_of()
    leases = [pool.acquire() for _ in range(4)]
    for lease in leases:
        lease.close()
    until(lambda: len(pool.idle) == 4)
    dead = maker.made[:]
    for box in dead:
        box.alive = False
    fresh = [pool.acquire(timeout=30) for _ in range(4)]
    assert not {box_of(lease) for lease in fresh} & set(dead)
    until(lambda: set(dead) <= set(maker.closed))


def test_who_meets_a_dead_one_does_not_lose_the_first_place(pool_of, maker):
    pool = pool_of(limit=1)
    pool.acquire().close()
    until(lambda: len(pool.idle) == 1)
    maker.made[0].alive, maker.seconds = False, 0.2  # the next is long in the making
    order = []

    def wait(name):
        lease = pool.acquire()
        order.append(name)
        lease.close()

    first = threading.Thread(target=wait, args=("first",))
    second = threading.Thread(target=wait, args=("second",))
    maker.made[0].ping_seconds = 0.1  # while the first finds out, the second lines up
    first.start()
    until(lambda: pool.lent)
    second.start()
    first.join(30)
    second.join(30)
    assert order == ["first", "second"]


def test_replacements_that_cannot_be_made_are_not_tried_for_ever(pool_of, maker):
    pool = pool_of()
    leases = [pool.acquire() for _ in range(4)]
    maker.error = SandboxError("gone")
    for lease in leases:
        box_of(lease).alive = False
        lease.close()
    until(lambda: len(maker.closed) == 4 and maker.making == 0)
    time.sleep(0.3)
    attempts = maker.attempts
    time.sleep(0.6)
    assert maker.attempts == attempts


def test_what_died_in_use_is_replaced(pool_of, maker):
    pool = pool_of(limit=1)
    lease = pool.acquire()
    box_of(lease).alive = False
    lease.close()
    until(lambda: len(maker.made) == 2 and len(pool.idle) == 1)
    assert pool.acquire().alive


def test_what_cannot_be_reset_is_replaced(pool_of, maker, caplog):
    pool = pool_of(limit=1)
    lease = pool.acquire()
    maker.reset_fails = True
    with caplog.at_level(logging.WARNING):
        lease.close()
        until(lambda: len(maker.made) == 2)
    assert maker.closed == maker.made[:1]
    assert "a process cannot be removed" in caplog.text
    assert box_of(pool.acquire()) is maker.made[1]


def test_surplus_is_closed_after_a_while_and_no_thread_is_left(pool_of, maker):
    pool = pool_of(idle_seconds=0.2)
    leases = [pool.acquire() for _ in range(4)]
    for lease in leases:
        lease.close()
    until(lambda: len(maker.closed) == 4)
    until(lambda: pool.workers == 0)
    assert pool.places.taken.sandboxes == 0
    assert pool.acquire().alive


def test_a_pool_that_nobody_uses_has_no_thread(pool_of):
    before = threading.active_count()
    pool_of()
    assert threading.active_count() == before


def test_a_lease_that_was_forgotten_comes_back(pool_of, maker):
    pool = pool_of(limit=1)
    lease = pool.acquire()
    del lease
    gc.collect()
    assert pool.acquire(timeout=30).alive
    assert maker.made[0].resets == 1


def test_an_interrupted_wait_takes_nothing(pool_of):
    pool = pool_of(limit=1)
    held = pool.acquire()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        pool.acquire(timeout=10)
    held.close()
    assert pool.acquire(timeout=30).alive


def test_closing_ends_the_lent_ones_too(pool_of, maker):
    pool = pool_of()
    lease = pool.acquire()
    pool.acquire().close()
    pool.close()
    until(lambda: not maker.living)
    assert not lease.alive
    lease.close()
    with pytest.raises(SandboxError, match="closed"):
        pool.acquire()
    assert pool.places.taken.sandboxes == 0


def test_a_reset_that_the_close_interrupts_is_no_fault(pool_of, maker, caplog):
    pool = pool_of()
    lease = pool.acquire()
    maker.reset_seconds, maker.reset_fails = 0.2, True
    with caplog.at_level(logging.WARNING):
        lease.close()
        until(lambda: maker.made[0].resets == 1)
        pool.close()
        until(lambda: pool.places.taken.sandboxes == 0 and maker.closed)
    assert caplog.text == ""


def test_closing_tells_those_who_wait(pool_of):
    pool = pool_of(limit=1)
    held = pool.acquire()
    with ThreadPoolExecutor(1) as threads:
        wait = threads.submit(pool.acquire, 60)
        until(lambda: len(pool.waiters) == 1)
        pool.close()
        with pytest.raises(SandboxError, match="the pool was closed"):
            wait.result(30)
    assert not held.alive


def test_closing_does_not_wait_for_a_dead_daemon(pool_of, maker):
    pool = pool_of(limit=8)
    leases = [pool.acquire() for _ in range(8)]
    maker.close_seconds = 30.0
    started = time.monotonic()
    pool.close(timeout=0.2)
    assert time.monotonic() - started < 20
    assert len(leases) == 8


def test_what_is_made_after_the_close_is_closed_at_once(pool_of, maker):
    maker.seconds = 0.3
    pool = pool_of()
    with ThreadPoolExecutor(1) as threads:
        wait = threads.submit(pool.acquire, 10)
        until(lambda: maker.making == 1)
        pool.close()
        with pytest.raises(SandboxError):
            wait.result()
    until(lambda: maker.closed)
    until(lambda: pool.places.taken.sandboxes == 0)
    assert not maker.living


@settings(max_examples=20, deadline=None)
@given(
    limit=st.integers(1, 5),
    users=st.integers(1, 12),
    faults=st.lists(st.sampled_from(["fine", "dies", "unclean", "forgotten"]), min_size=12, max_size=40),
)
def test_whatever_happens_no_place_is_lost_and_nothing_dirty_is_lent(limit, users, faults):
    maker = Maker()
    pool = SandboxPool(maker, Places(limit), idle_seconds=60)

    def use(fault):
        lease = pool.acquire(timeout=20)
        box = box_of(lease)
        box.users += 1
        assert box.users == 1, "two hold it"
        assert not box.dirty, "lent unclean"
        box.dirty = True
        if fault == "dies":
            box.alive = False
        box.users -= 1
        maker.reset_fails = fault == "unclean"
        if fault != "forgotten":
            lease.close()

    with ThreadPoolExecutor(users) as threads:
        list(threads.map(use, faults))
    maker.reset_fails = False
    pool.acquire(timeout=20).close()  # also collects what was forgotten
    until(
        lambda: pool.places.taken.sandboxes == len(pool.idle) and not pool.creating + pool.resetting + len(pool.dirty)
    )
    assert pool.places.taken.sandboxes <= limit
    assert pool.places.ending.sandboxes == 0
    pool.close()
    assert not maker.living


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_cannot_use_what_its_parent_holds(pool_of, maker):
    pool = pool_of()
    lease = pool.acquire()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        told = []
        for use in (lambda: lease.exec("true"), pool.acquire):
            try:
                use()
            except SandboxError as error:
                told.append(str(error))
        lease.close()
        pool.close()
        os.write(writer, "\n".join(told).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        told = said.read().splitlines()
    os.waitpid(child, 0)
    assert len(told) == 2
    assert all("fork" in line and str(os.getpid()) in line for line in told)
    assert lease.alive
    assert not maker.closed


def test_a_program_ends_though_a_pool_is_in_use(tmp_path):
    code = """
import time
from agentgym.sandbox.api import SandboxError
from agentgym.sandbox.pool import Places, SandboxPool
def hang():
    time.sleep(600)
pool = SandboxPool(hang, Places(4))
try:
    pool.acquire(timeout=0.1)
except SandboxError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=30)
    assert "1 are being made" in done.stdout
    assert done.returncode == 0
