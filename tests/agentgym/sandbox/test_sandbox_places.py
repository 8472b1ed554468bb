"""Places that several pools share. The sandboxes are the fault doubles of pool_doubles.py, which run nothing."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from pool_doubles import Maker, until

from agentgym.sandbox.api import SandboxError
from agentgym.sandbox.pool import Places


def test_pools_share_places_and_take_those_of_idle_ones(pool_of, maker):
    places, other = Places(2), Maker()
    one, two = pool_of(places), pool_of(places, open=other)
    for lease in [one.acquire(), one.acquire()]:
        lease.close()
    until(lambda: len(one.idle) == 2)
    held = [two.acquire(timeout=30), two.acquire(timeout=30)]
    assert not maker.living
    with pytest.raises(SandboxError, match="all 2"):
        one.acquire(timeout=0.05)
    held[0].close()
    assert one.acquire(timeout=30).alive
    assert places.taken.sandboxes == 2


def test_a_busy_pool_does_not_keep_the_places_from_another(pool_of):
    places = Places(1)
    busy, other = pool_of(places), pool_of(places, open=Maker())
    stop = threading.Event()

    def use():
        while not stop.is_set():
            lease = busy.acquire()
            time.sleep(0.005)
            lease.close()

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        assert other.acquire(timeout=30).alive
    finally:
        stop.set()
        other.close()
        for thread in threads:
            thread.join(30)


def test_places_go_to_those_who_have_waited_longest_over_all_pools(pool_of):
    places = Places(1)
    one, two = pool_of(places), pool_of(places, open=Maker())
    served, held = [], one.acquire()

    def use(pool, name):
        lease = pool.acquire(timeout=60)
        served.append(name)
        lease.close()

    order = [(one, "a"), (two, "b"), (one, "c"), (one, "d"), (two, "e")]
    with ThreadPoolExecutor(len(order)) as threads:
        for pool, name in order:
            before = len(pool.waiters)
            threads.submit(use, pool, name)
            until(lambda pool=pool, before=before: len(pool.waiters) > before)
        held.close()
    assert "".join(served) == "abcde"


def test_one_who_gives_up_leaves_the_place_to_another_pool(pool_of):
    places, broken = Places(1), Maker()
    broken.error = SandboxError("no image")
    one, two = pool_of(places), pool_of(places, open=broken)
    held = one.acquire()
    with ThreadPoolExecutor(2) as threads:
        gives_up = threads.submit(two.acquire, 0.5)
        until(lambda: two.waiters)
        waits = threads.submit(one.acquire, 60)
        until(lambda: one.waiters)
        held.close()
        with pytest.raises(SandboxError):
            gives_up.result(60)
        assert waits.result(60).alive


def test_there_is_at_least_one_place():
    with pytest.raises(ValueError, match="at least 1"):
        Places(0)
