"""Places that several pools share. The sandboxes are the fault doubles of pool_doubles.py, which run nothing."""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from pool_doubles import Maker
from waiting import until

from agentgym.sandbox.api import SandboxError
from agentgym.sandbox.pool import Places, Room


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


class TestMemoryAndDisk:
    """Rooms of 10 bytes of memory and 10 of disk."""

    @pytest.fixture
    def places(self):
        return Places(Room(64, 10, 10))

    def test_the_sum_of_all_is_limited_and_the_error_names_the_variable(self, places, pool_of):
        large, files = pool_of(places, size=Room(1, 6, 0)), pool_of(places, open=Maker(), size=Room(1, 1, 6))
        held = [large.acquire(), files.acquire()]
        for pool, what in (large, "MEMORY"), (files, "DISK"):
            with ThreadPoolExecutor(1) as thread, pytest.raises(SandboxError, match=f"AGENTGYM_SANDBOX_{what}"):
                thread.submit(pool.acquire, 0.05).result()
        held[0].close()
        assert large.acquire(timeout=30).alive

    def test_one_for_which_there_is_never_room_is_refused_at_once(self, places, pool_of, maker):
        with pytest.raises(SandboxError, match=r"never room for one: .*AGENTGYM_SANDBOX_MEMORY"):
            pool_of(places, size=Room(1, 11, 0)).acquire(timeout=1e9)
        assert not maker.attempts

    def test_as_many_idle_ones_of_others_are_ended_as_it_takes(self, places, pool_of, maker):
        small, large = pool_of(places, size=Room(1, 3, 0)), pool_of(places, open=Maker(), size=Room(1, 9, 0))
        for lease in [small.acquire() for _ in range(3)]:
            lease.close()
        until(lambda: len(small.idle) == 3)
        assert large.acquire(timeout=30).alive
        assert not maker.living

    def test_small_ones_do_not_starve_a_large_one_that_waits_longer(self, places, pool_of):
        small, large = pool_of(places, size=Room(1, 3, 0)), pool_of(places, open=Maker(), size=Room(1, 10, 0))
        stop = threading.Event()

        def use():
            while not stop.is_set():
                lease = small.acquire()
                time.sleep(0.005)
                lease.close()

        with ThreadPoolExecutor(4) as threads:
            for _ in range(4):
                threads.submit(use)
            try:
                until(lambda: small.lent)
                large.acquire(timeout=30).close()
            finally:
                stop.set()
                large.close()

    def test_two_who_hold_one_each_and_want_a_second_do_not_wait_for_each_other(self, places, pool_of):
        pool, both = pool_of(places, size=Room(1, 5, 0)), threading.Barrier(2)

        def take_two():
            first = pool.acquire(30)
            both.wait(30)
            second = pool.acquire(30)
            second.close()
            first.close()

        with ThreadPoolExecutor(2) as threads:
            for done in [threads.submit(take_two) for _ in range(2)]:
                done.result(60)
        until(lambda: places.taken.memory <= 10)


class TestTheOrder:
    def test_one_who_grades_comes_before_those_who_begin(self, pool_of):
        places = Places(1)
        begins, grades = pool_of(places), pool_of(places, open=Maker())
        held, order = begins.acquire(), []

        def use(pool, name, first):
            lease = pool.acquire(timeout=60, first=first)
            order.append(name)
            lease.close()

        with ThreadPoolExecutor(3) as threads:
            for pool, name in (begins, "a"), (begins, "b"), (grades, "grade"):
                threads.submit(use, pool, name, name == "grade")
                until(lambda pool=pool, name=name: len(pool.waiters) == 1 + (name == "b"))
            held.close()
        assert order == ["grade", "a", "b"]

    def test_patience_is_for_want_of_room_and_not_for_a_broken_back_end(self, pool_of, maker):
        pool = pool_of(limit=1)
        held = pool.acquire()
        with ThreadPoolExecutor(1) as thread:
            waits = thread.submit(pool.acquire, 0.05, 60)
            until(lambda: pool.waiters)
            with pytest.raises(SandboxError, match=r"no sandbox within 0\.05 s"):
                pool.acquire(0.05)
            held.close()
            waits.result(60).close()
        broken = pool_of(open=Maker())
        broken._open.error = SandboxError("no image")
        with pytest.raises(SandboxError, match="failed: no image"):
            broken.acquire(0.3, 1e9)


class TestAhead:
    def test_one_is_made_before_its_caller_comes_and_only_one(self, pool_of, maker):
        pool = pool_of()
        pool.prepare()
        until(lambda: pool.idle)
        held = [pool.acquire(), pool.acquire()]
        assert all(lease.alive for lease in held)
        assert len(maker.made) == 2

    def test_a_caller_who_comes_while_it_is_made_takes_it(self, pool_of, maker):
        pool, maker.seconds = pool_of(), 0.1
        pool.prepare()
        assert pool.acquire(30).alive
        assert maker.attempts == 1

    def test_it_takes_no_room_from_callers_nor_from_what_others_prepared(self, pool_of):
        places = Places(2)
        busy, ahead, other = (pool_of(places, open=Maker()) for _ in range(3))
        held = busy.acquire()
        ahead.prepare()
        until(lambda: ahead.idle)
        other.prepare()
        assert (len(ahead.idle), other.creating) == (1, 0)
        assert busy.acquire(30).alive
        assert not ahead.idle
        held.close()

    def test_but_the_room_of_one_that_is_only_left_over(self, pool_of):
        places = Places(1)
        before, ahead = pool_of(places), pool_of(places, open=Maker())
        before.acquire().close()
        until(lambda: before.idle)
        ahead.prepare()
        until(lambda: ahead.idle)

    def test_one_that_nobody_takes_is_ended_and_not_made_again(self, pool_of, maker):
        pool = pool_of(idle_seconds=0.05)
        pool.prepare()
        until(lambda: maker.closed)
        until(lambda: not pool.places.taken.sandboxes)
        assert len(maker.made) == 1

    def test_one_that_cannot_be_made_is_not_tried_again_for_nobody(self, pool_of, maker):
        pool, maker.error = pool_of(), SandboxError("no image")
        pool.prepare()
        until(lambda: maker.attempts == 1 and not pool.workers)
        assert maker.attempts == 1
        maker.error = None
        assert pool.acquire(30).alive


@pytest.mark.parametrize("pools", [1, 2], ids=["of the same pool", "of another pool"])
def test_a_lease_that_is_forgotten_gives_its_place_to_who_waits(pool_of, pools):
    places = Places(1)
    made = [pool_of(places, open=Maker()) for _ in range(pools)]
    lease = made[0].acquire()
    with ThreadPoolExecutor(1) as threads:
        wait = threads.submit(made[-1].acquire, 10)
        until(lambda: len(made[-1].waiters) == 1)
        del lease
        gc.collect()
        assert wait.result(10).alive
