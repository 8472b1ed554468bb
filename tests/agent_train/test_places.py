"""Places of episodes: who gets one, and how many there are by what the engine reports."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_train.engine.base import Engine, Load
from agent_train.report.timeline import Timeline
from agent_train.rollout import places as module
from agent_train.rollout.places import Places, fitting, follow_load


@pytest.mark.parametrize(
    ("size", "taken", "loads", "found"),
    [
        (16, 16, [(0, 0.59)], 18),  # an eighth more
        (16, 16, [(0, 0.6)], 16),
        (16, 15, [(0, 0.1)], 16),  # more places would be of no use
        (16, 16, [(1, 0.1)], 16),  # a request waits: for another reason than the cache
        (3, 3, [(0, 0.0)], 4),
        (62, 64, [(0, 0.1)], 64),
        (64, 64, [(0, 0.9)], 64),
        (64, 64, [(0, 0.91)], 56),
        (56, 60, [(9, 0.99)], 56),  # four are still to leave
        (56, 56, [(9, 0.99)], 49),
        (1, 1, [(9, 0.99)], 1),
        (32, 32, [(0, 0.1), (0, 0.95)], 28),  # the fullest counts
        (32, 32, [(0, 0.1), (2, 0.2)], 32),
        (32, 32, [], 32),  # nothing is known
    ],
)
def test_an_eighth_more_below_60_percent_and_fewer_above_90(size, taken, loads, found):
    assert fitting(size, taken, 64, [Load(*load) for load in loads]) == found


reports = st.lists(st.builds(Load, st.integers(0, 5), st.floats(0, 1)), max_size=3)


@given(st.integers(1, 500), st.integers(0, 600), reports)
def test_the_number_stays_within_its_bounds_and_moves_only_as_the_fullest_cache_asks(size, taken, loads):
    found = fitting(size, taken, 500, loads)
    assert 1 <= found <= 500
    assert abs(found - size) <= max(1, size // 8)
    if found > size:
        assert loads
        assert all(load.cache < 0.6 and load.waiting == 0 for load in loads)
    if found < size:
        assert max(load.cache for load in loads) > 0.9


@settings(deadline=None, max_examples=40)
@given(st.randoms(use_true_random=False), st.integers(1, 6))
def test_no_more_begin_than_there_are_places_whatever_ends_changes_or_is_cancelled(rng: random.Random, size: int):
    async def run() -> None:
        places, running, sizes = Places(size), set(), [size]

        async def episodes(order: int) -> None:
            await places.take(order)
            try:
                for number in range(rng.randrange(1, 4)):
                    if places.short(order):
                        await places.exchange(order)
                    assert len(running) < max(sizes[-3:]), "one that begins had room when it got its place"
                    running.add((order, number, id(asyncio.current_task())))
                    try:
                        await asyncio.sleep(0)
                    finally:
                        running.discard((order, number, id(asyncio.current_task())))
            finally:
                places.leave()

        slots = [asyncio.create_task(episodes(rng.randrange(3))) for _ in range(rng.randrange(1, 20))]
        for _ in range(40):
            await asyncio.sleep(0)
            if rng.random() < 0.2:
                rng.choice(slots).cancel()
            if rng.random() < 0.3:
                places.size = rng.randrange(1, 8)
            sizes.append(places.size)
        await asyncio.wait_for(asyncio.gather(*slots, return_exceptions=True), 10)
        assert [slot.exception() for slot in slots if not slot.cancelled() and slot.exception()] == []
        assert places.taken == 0
        await asyncio.wait_for(places.take(0), 1)

    asyncio.run(run())


def test_a_lower_order_goes_first_and_gets_a_place_as_soon_as_an_episode_ends():
    async def run() -> list[str]:
        places, begun = Places(1), []

        async def slot(order: int, names: str) -> None:
            await places.take(order)
            for name in names:
                if places.short(order):
                    await places.exchange(order)
                begun.append(name)
                await asyncio.sleep(0)
            places.leave()

        later = [asyncio.create_task(slot(2, "abc")), asyncio.create_task(slot(2, "de"))]
        await asyncio.sleep(0)
        await asyncio.gather(*later, slot(3, "z"), slot(1, "XY"))
        return begun

    assert asyncio.run(run()) == [*"abXYdecz"]


def test_fewer_places_hold_back_what_has_not_begun_and_cut_nothing_off():
    async def run() -> None:
        places, running, ended = Places(4), 0, 0
        release = asyncio.Event()

        async def slot() -> None:
            nonlocal running, ended
            await places.take(0)
            for _ in range(2):
                if places.short(0):
                    await places.exchange(0)
                running += 1
                await release.wait()
                running -= 1
                ended += 1
            places.leave()

        slots = [asyncio.create_task(slot()) for _ in range(4)]
        await asyncio.sleep(0.01)
        places.size = 1
        assert (running, ended) == (4, 0)
        release.set()
        await asyncio.sleep(0.001)
        release.clear()
        await asyncio.sleep(0.01)
        assert running <= 1
        release.set()
        await asyncio.gather(*slots)
        assert ended == 8

    asyncio.run(run())


def test_long_tailed_episodes_settle_where_the_cache_is_used_and_seldom_overflows():
    """A replica whose cache holds about 24 episodes of log-normal lengths, with a look at its load for each token that they grow."""

    def used(most: int, adaptive: bool) -> list[float]:
        rng, size, running, seen = random.Random(0), most // 4 if adaptive else most, [], []
        for _ in range(1000):
            running = [(done + 1, length) for done, length in running if done < length]
            running += [(0, rng.lognormvariate(3.0, 1.0)) for _ in range(size - len(running))]
            seen.append(sum(done for done, _ in running) / 900)
            load = Load(int(seen[-1] > 1), min(seen[-1], 1.0))
            size = fitting(size, len(running), most, [load]) if adaptive else most
        return seen[200:]

    for most in (32, 64, 400):
        fixed, adapted = used(most, False), used(most, True)
        assert sum(share > 1 for share in fixed) / len(fixed) > 0.8
        assert sum(share > 1 for share in adapted) / len(adapted) < 0.2
        assert 0.7 < sum(adapted) / len(adapted) < 0.9
        assert max(adapted) < 1.3


def test_a_run_follows_the_load_of_its_engine_whatever_it_fails_with(monkeypatch, caplog):
    monkeypatch.setattr(module, "SECONDS", 0.001)
    loads = [[], ValueError("no number"), [Load(0, 0.1)], [Load(0, 0.95)]]

    class Replica(Engine):
        """A double that reports what it is told to, or cannot be read."""

        async def loads(self) -> list[Load]:
            if isinstance(loads[0], Exception):
                raise loads[0]
            return loads[0]

    async def run() -> None:
        places = Places(64)
        following = asyncio.create_task(follow_load(places, 64, Replica(), Timeline()))
        await asyncio.sleep(0.01)
        assert places.size == 16, "a quarter, while nothing is known"
        loads.pop(0)
        await asyncio.sleep(0.01)
        assert places.size == 16
        assert "ValueError('no number')" in caplog.text
        slots = [asyncio.create_task(places.take(0)) for _ in range(100)]
        loads.pop(0)
        while places.size < 64:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        assert places.taken == places.size == 64
        loads.pop(0)
        while places.size > 56:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        assert places.size == 56, "no further cut before this one has taken effect"
        for task in (following, *slots):
            task.cancel()

    asyncio.run(asyncio.wait_for(run(), 20))
