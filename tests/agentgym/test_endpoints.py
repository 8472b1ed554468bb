"""The limiter that all requests to one endpoint pass. The endpoint is a double that refuses more than it can take."""

import asyncio
import gc
import math
import weakref

import pytest

from agentgym.policies.endpoints import ConcurrencyLimiter, backoff, limiter_of, retry_after, session
from agentgym.service.client.connection import shared


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 10))


def told(limiter, answers, refusals, running):
    """So many answers and then refusals, of requests that are sent now, while `running` run."""
    now = asyncio.get_running_loop().time()
    limiter.running = running
    for _ in range(answers):
        limiter.answered()
    for _ in range(refusals):
        limiter.refused(now, 0.2)
        limiter.running -= 1


def test_where_2_percent_are_refused_nobody_else_is_held_back():
    async def go():
        limiter = ConcurrencyLimiter()
        for _ in range(40):
            told(limiter, answers=49, refusals=1, running=64)
            limiter.running = 10  # as few may run by chance, and say nothing of what the endpoint can take
            limiter.refused(asyncio.get_running_loop().time(), 0.2)
            assert limiter.limit == math.inf
            assert await asyncio.wait_for(limiter.enter(), 0.05) == 0.0

    run(go())


def test_of_an_overload_the_share_that_was_refused_is_held_back():
    async def go():
        limiter = ConcurrencyLimiter()
        told(limiter, answers=60, refusals=0, running=64)
        told(limiter, answers=0, refusals=24, running=64)
        assert 40 <= limiter.limit <= 46
        told(limiter, answers=20, refusals=0, running=40)
        assert limiter.limit <= 50, "near its limit an endpoint is sent little more with each answer"
        limiter.limit = 4.0
        told(limiter, answers=10, refusals=0, running=4)
        assert limiter.limit == 14, "far below it, one more with each"

    run(go())


def test_where_most_are_refused_nobody_enters_before_the_wait_is_over_and_who_was_refused_goes_first():
    async def go():
        limiter, loop, order = ConcurrencyLimiter(), asyncio.get_running_loop(), []

        async def enter(name, again=False):
            waited = await limiter.enter(again)
            order.append(name)
            return waited

        await limiter.enter()
        limiter.refused(loop.time(), 0.2)
        limiter.leave()
        tasks = [asyncio.create_task(enter("new")), asyncio.create_task(enter("again", True))]
        await asyncio.sleep(0.1)
        assert order == []
        await asyncio.sleep(0.2)
        assert order == ["again"], "one at a time is the least"
        limiter.leave()
        waited = await asyncio.gather(*tasks)
        assert order == ["again", "new"]
        assert all(0.19 < seconds < 5 for seconds in waited)

    run(go())


@pytest.mark.parametrize("given_a_place", [False, True])
def test_who_gives_up_waiting_takes_no_place(given_a_place):
    async def go():
        limiter = ConcurrencyLimiter()
        limiter.limit = 1.0
        await limiter.enter()
        first, second = (asyncio.create_task(limiter.enter()) for _ in range(2))
        await asyncio.sleep(0)
        if given_a_place:
            limiter.leave()
            first.cancel()
        else:
            first.cancel()
            await asyncio.sleep(0)
            limiter.leave()
        await second
        assert limiter.running == 1

    run(go())


def test_policies_of_one_endpoint_share_it_and_an_overloaded_one_is_soon_asked_what_it_can_take():
    """The endpoint takes 8 at a time, 10 ms each, and refuses all beyond."""
    refused = 0

    async def go():
        nonlocal refused
        loop, busy = asyncio.get_running_loop(), 0

        async def ask():
            nonlocal busy, refused
            limiter, again = limiter_of("http://x"), False
            while True:
                await limiter.enter(again)
                sent, again = loop.time(), True
                busy += 1
                try:
                    await asyncio.sleep(0.01)
                    if busy <= 8:
                        limiter.answered()
                        return
                    refused += 1
                    limiter.refused(sent, 0.01)
                finally:
                    busy -= 1
                    limiter.leave()
                await asyncio.sleep(0.01)

        await asyncio.gather(*(ask() for _ in range(200)))
        assert limiter_of("http://x") is limiter_of("http://x")
        assert limiter_of("http://x") is not limiter_of("http://y")
        assert limiter_of("http://y").limit == math.inf

    run(go())
    assert refused < 800


def test_waits_grow_and_are_not_all_the_same():
    assert 0.25 <= backoff(1) <= 0.5
    assert 1.0 <= backoff(3) <= 2.0
    assert 15.0 <= backoff(50) <= 30.0
    assert len({backoff(2) for _ in range(20)}) > 1


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(None, None), ("3", 3.0), ("0.5", 0.5), ("-2", 0.0), ("soon", None), ("inf", None), ("nan", None)],
)
def test_retry_after_is_a_number(header, seconds):
    assert retry_after(header) == seconds


def test_retry_after_may_be_a_date():
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert retry_after("Wed, 21 Oct 2095 07:28:00 GMT") > 1e9


def test_event_loops_do_not_stay_behind():
    async def go():
        limiter_of("http://127.0.0.1:1/v1")
        await session()
        await shared("key", lambda: asyncio.sleep(0))
        return weakref.ref(asyncio.get_running_loop())

    loops = [asyncio.run(go()) for _ in range(3)]
    gc.collect()
    assert [loop() for loop in loops] == [None] * 3
