"""What becomes of requests and weights when servers hang, die, come back late or fail; the servers are doubles, and time is simulated.

Real servers that die and hang are in `test_engines.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_clock import with_fake_clock
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vllm_double import Sender, engine_of_doubles

from agent_train.engine import servers
from agent_train.engine.base import EngineError, EngineLostError, Sampling
from agent_train.engine.servers import DEAD, HEALTHY, NEXT, RESTARTING, STALE, SUSPECT
from agent_train.rollout.ahead import Rollouts
from agent_train.trainer.policies import LearningPolicy

LIMIT = 120.0
GENERATE = "/inference/v1/generate"
NAMES = itertools.count()


@pytest.fixture
def with_engine(monkeypatch, caplog):
    """Runs `call(engine)` with an engine of doubles that has weights of version 1."""
    caplog.set_level(logging.WARNING, logger=servers.__name__)

    def run(call, **settings):
        async def main():
            async with engine_of_doubles(monkeypatch, **{"request_timeout": LIMIT, **settings}) as engine:
                return await call(engine)

        return with_fake_clock(main())[0]

    return run


def ask(engine, count=8, tokens=10):
    """Begin requests of new episodes."""
    names = (f"e{next(NAMES)}" for _ in range(count))
    return [asyncio.create_task(engine.generate([1], Sampling(tokens), name)) for name in names]


async def refit(engine, version=1, after=0.0):
    """Give a server that came back its weights, when the learner has them."""
    await engine.stale()
    await asyncio.sleep(after)
    await Sender().send(engine, version)


def ways_of(caplog, number):
    """The health of a server, from one change to the next, as the log tells it."""
    lines = [record.getMessage() for record in caplog.records]
    return [line.split(": ")[1] for line in lines if line.startswith(f"vLLM server {number}, ")]


def ways(*states):
    return [f"{one} -> {other}" for one, other in itertools.pairwise(states)]


def true(answers):
    """The versions of the answers' tokens, once they are found to be those of the weights."""
    assert all(answer.ids == answer.versions for answer in answers)
    return {version for answer in answers for version in answer.versions}


@pytest.mark.parametrize(
    ("fault", "why"), [("stop", "did not answer /health"), ("stop_core", "computed nothing for 60 s")]
)
def test_a_server_that_hangs_is_found_by_its_requests_which_go_on_elsewhere(with_engine, caplog, fault, why):
    """In all, or in its engine core alone, a process of its own: then it answers /health."""

    async def call(engine):
        asked = ask(engine)
        await asyncio.sleep(1)
        getattr(engine.servers.at(0), fault)()
        await refit(engine)
        return await asyncio.gather(*asked), await engine.losses()

    answers, losses = with_engine(call)
    assert true(answers) == {1}
    assert losses == 1
    assert why in caplog.text
    assert ways_of(caplog, 0) == ways(HEALTHY, SUSPECT, DEAD, RESTARTING, STALE, HEALTHY)
    assert ways_of(caplog, 1) == []


def test_one_that_has_no_place_for_a_token_while_it_computes_others_is_not(with_engine, caplog):
    async def call(engine):
        engine.servers.at(0).places = asyncio.Semaphore(1)
        asked = ask(engine, 2, tokens=100)
        await asyncio.sleep(90)
        asked += ask(engine, 1, tokens=85)  # it has the place for 85 s from when the second is late
        return await asyncio.gather(*asked, return_exceptions=True), await engine.losses()

    (first, late, last), losses = with_engine(call, replicas=1)
    assert true([first, last]) == {1}
    assert isinstance(late, EngineError)
    assert losses == 0
    assert ways_of(caplog, 0) == ways(HEALTHY, SUSPECT, HEALTHY)


def test_servers_without_the_present_weights_sleep_too(with_engine):
    """They would keep the memory that the learner is to have."""

    async def call(engine):
        engine.servers.spoil([engine.servers.all[1]], "it came back")
        await engine.sleep()
        return [engine.servers.at(number).asked.count("/sleep") for number in (0, 1)]

    assert with_engine(call) == [1, 1]


def test_a_stream_that_has_begun_fails_with_its_server_and_is_not_sampled_anew(with_engine):
    async def call(engine):
        told, more = [], []
        asked = asyncio.create_task(engine.stream([1], Sampling(10), "e", told.extend))
        await asyncio.sleep(1)
        engine.servers.at(0).kill()
        with pytest.raises(EngineError, match="closed the connection"):
            await asked
        answer = await engine.stream([1], Sampling(2), "f", more.extend)
        return told, more, answer

    told, more, answer = with_engine(call)
    assert told == [1]
    assert more == answer.ids == answer.versions == [1, 1]


def test_so_is_one_whose_request_was_given_up(with_engine):
    async def call(engine):
        engine.servers.at(0).stop()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.generate([1], Sampling(2), "e"), 5)
        await engine.servers.settled()
        losses = await engine.losses()
        return await asyncio.gather(*ask(engine)), losses

    answers, losses = with_engine(call)
    assert true(answers) == {1}
    assert losses == 1


def test_a_server_that_failed_gets_no_requests_until_it_answers(with_engine, caplog):
    async def call(engine):
        engine.servers.at(0).faults = {GENERATE: "refuse", "/health": 20.0}
        failing = asyncio.create_task(engine.generate([1], Sampling(2), "e"))
        await asyncio.sleep(1)
        engine.servers.at(0).faults.pop(GENERATE)
        await asyncio.gather(*ask(engine))
        asked = engine.servers.at(0).asked.count(GENERATE)
        with pytest.raises(EngineError, match="it cannot"):
            await failing
        await asyncio.gather(*ask(engine))
        return asked, engine.servers.at(0).asked.count(GENERATE), await engine.losses()

    assert with_engine(call) == (1, 1 + 1 + 4, 0), "the second is a token to see whether it computes"
    assert ways_of(caplog, 0) == ways(HEALTHY, SUSPECT, HEALTHY)


def test_one_that_answers_again_after_others_got_new_weights_waits_for_them(with_engine, caplog):
    async def call(engine):
        engine.servers.at(0).faults = {"/health": 20.0}
        looking = asyncio.create_task(engine.servers.examine(engine.servers.all[0], EngineError("somebody says so")))
        await asyncio.sleep(1)
        engine._group = []
        group = [engine.servers.all[1]]
        await engine.connect_weights(SimpleNamespace(host="", port=1, world_size=2, rank_offset=1))
        assert engine._group == group
        await engine.receive_weights(Sender(2).manifest(), 2)
        with pytest.raises(EngineError, match="somebody"):
            await looking
        assert (await engine.generate([1], Sampling(2))).versions == [2, 2]
        await refit(engine, 2)
        return await asyncio.gather(*ask(engine))

    assert true(with_engine(call)) == {2}
    assert ways_of(caplog, 0) == ways(HEALTHY, SUSPECT, STALE, HEALTHY)


def test_requests_wait_for_a_restart_and_for_weights_however_long_an_answer_may_take(with_engine):
    """Weights come late to a server that is back while the learner learns."""

    async def call(engine):
        asked = ask(engine)
        await asyncio.sleep(1)
        engine.servers.at(0).kill()
        await refit(engine, 2, after=5 * LIMIT)
        return await asyncio.gather(*asked)

    assert true(with_engine(call, replicas=1)) == {2}


def test_a_request_that_a_load_of_weights_interrupts_has_as_long_as_before_when_it_goes_on(with_engine):
    async def call(engine, tokens):
        asked = asyncio.create_task(engine.generate([1], Sampling(tokens)))
        await asyncio.sleep(10)
        engine.servers.at(0).faults = {"receive_weights": 2 * LIMIT}
        await Sender().send(engine, 2)
        return [await asked]

    assert true(with_engine(lambda engine: call(engine, int(LIMIT) - 2), replicas=1)) == {1, 2}
    with pytest.raises(EngineError, match=f"did not answer within {LIMIT:g} s"):
        with_engine(lambda engine: call(engine, int(LIMIT) + 2), replicas=1)


def test_if_no_server_comes_back_in_time_every_request_is_told_at_once(with_engine):
    async def call(engine):
        asked = ask(engine)
        await asyncio.sleep(1)
        engine.servers.full = True
        engine.servers.at(0).kill()
        ends = await asyncio.gather(*asked, return_exceptions=True)
        now = asyncio.get_running_loop().time
        before = now()
        with pytest.raises(EngineLostError):
            await engine.generate([1], Sampling(1))
        with pytest.raises(EngineLostError):
            await engine.live()
        assert now() == before, "who asks later waits no second time"
        return ends

    for end in with_engine(call, replicas=1):
        assert isinstance(end, EngineLostError)
        assert re.search(r"came back within 300 s \(engine\.start_timeout\): .*there is no room", str(end))


def test_a_request_that_every_server_dies_of_fails_and_ends_nothing_else(with_engine):
    async def call(engine):
        engine.servers.faults = {GENERATE: "die"}
        for number in (0, 1):
            engine.servers.at(number).faults = engine.servers.faults
        _, watch = watching(engine, lambda version: Sender().send(engine, version))
        with pytest.raises(EngineError, match="5 servers died of this request"):
            await engine.generate([1], Sampling(1))
        watch.cancel()

    with_engine(call)


@pytest.mark.parametrize("fault", ["hang", "refuse", "stop", "die"])
@pytest.mark.parametrize("method", ["/pause", "connect_weights", "receive_weights", "/reset_prefix_cache", "/resume"])
def test_weights_that_one_server_does_not_take_cost_that_server_and_the_others_serve_with_them(
    with_engine, method, fault
):
    """One that hangs answers /health all the while, as a vLLM whose engine core is stuck."""

    async def call(engine):
        engine._group = []
        asked = ask(engine)
        await asyncio.sleep(1)
        engine.servers.at(0).faults = {method: fault}
        await Sender().send(engine, 2)
        answers = await asyncio.gather(*asked)
        assert engine.servers.all[1].state == HEALTHY
        assert true(answers) <= {1, 2}
        return await engine.losses(), true([await ask(engine, 1)[0]])

    assert with_engine(call) == (1, {2})


def test_a_transfer_for_which_no_server_is_to_blame_is_tried_again_by_a_new_group(with_engine):
    async def call(engine):
        sender = Sender(fails=1)
        await sender.send(engine, 2)
        return sender.groups, await engine.losses(), true(await asyncio.gather(*ask(engine)))

    assert with_engine(call) == ([2], 0, {2})


@pytest.mark.parametrize("cause", ["link", "servers"])
def test_one_that_fails_twice_makes_the_run_go_back(with_engine, cause):
    async def call(engine):
        for number in (0, 1):
            engine.servers.at(number).faults = {"receive_weights": "refuse"} if cause == "servers" else {}
        with pytest.raises(EngineLostError, match=r"weight sync to version 2 failed twice: .*(it cannot|link is down)"):
            await Sender(fails=2 if cause == "link" else 0).send(engine, 2)
        assert await engine.losses() == 0
        asked = ask(engine, 1)[0]
        await asyncio.sleep(3 * LIMIT)
        assert asked.done() == (cause == "link"), "mixed weights answer nobody"
        asked.cancel()

    with_engine(call)


def test_a_server_that_never_takes_weights_makes_the_run_go_back_and_does_not_hang_it(with_engine):
    async def call(engine):
        engine.servers.at(0).faults = engine.servers.faults = {"receive_weights": "hang"}
        with pytest.raises(EngineLostError, match="at each of 5 attempts"):
            await Sender().send(engine, 2)

    with_engine(call, replicas=1)


def watching(engine, send):
    """The task that gives new servers their weights, as a run has it."""
    policy = SimpleNamespace(engine=engine, changing=asyncio.Lock(), send=send)
    return policy, asyncio.create_task(LearningPolicy.watch(policy))


def test_weights_that_cannot_be_sent_to_a_server_that_came_back_make_the_run_go_back(with_engine):
    async def call(engine):
        _, watch = watching(engine, lambda version: Sender(fails=9).send(engine, version))
        engine.servers.at(0).kill()
        await engine.losses()
        await watch

    with pytest.raises(EngineLostError, match="failed twice"):
        with_engine(call)


def test_a_server_that_is_started_again_while_others_load_weights_is_started_once(with_engine, caplog):
    async def call(engine):
        asked = ask(engine)
        await asyncio.sleep(1)
        engine.servers.at(1).faults["receive_weights"] = 5.0
        sending = asyncio.create_task(Sender().send(engine, 2))
        await asyncio.sleep(1.5)
        engine.servers.at(0).kill()  # it has the new weights, and comes again before the other has them
        await sending
        await asyncio.gather(*asked)
        await refit(engine, 2)
        return len(engine.servers.processes), engine.servers.losses

    assert with_engine(call) == (3, 1)
    assert ways_of(caplog, 0) == ways(HEALTHY, SUSPECT, DEAD, RESTARTING, STALE, HEALTHY)


def test_a_server_that_a_step_has_given_its_weights_gets_them_once(with_engine):
    async def call(engine):
        sent = []

        async def send(version):
            sent.append(version)
            await Sender().send(engine, version)

        policy, watch = watching(engine, send)
        async with policy.changing:  # the learner learns
            engine.servers.at(0).kill()
            await engine.losses()
            await engine.stale()
            await asyncio.sleep(100)
            await Sender().send(engine, 2)
        await asyncio.sleep(100)
        watch.cancel()
        return sent

    assert with_engine(call) == []


def test_the_health_of_a_server_is_documented_as_it_is():
    text = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", text[text.index("| health |") :].split("\n\n")[0], re.MULTILINE)
    assert {state: set(re.findall(r"`(\w+)`", after)) for state, after in rows} == {
        state: set(after) for state, after in NEXT.items()
    }


PER_STEP = 3


class Run:
    """A training loop over an engine of doubles: its rollouts, and its learner, which takes its time."""

    def __init__(self, engine, staleness, steps, learning, rng):
        self.engine, self.steps, self.learning, self.rng = engine, steps, learning, rng
        self.rollouts = Rollouts(self.play, staleness, steps)
        self.sender, self.staleness = Sender(), staleness
        self.policy, self.watch = watching(engine, lambda version: self.sender.send(engine, version))

    async def episode(self, name):
        turns = self.rng.randrange(1, 4)
        return [await self.engine.generate([1], Sampling(self.rng.randrange(1, 20)), name) for _ in range(turns)]

    async def play(self, step):
        return await asyncio.gather(*(self.episode(f"{step} {n}") for n in range(PER_STEP)))

    async def train(self, version):
        taken = {}
        async with self.policy.changing:
            await self.sender.send(self.engine, version)
        while version < self.steps:
            taken[version] = await self.rollouts.take(version)
            async with self.policy.changing:
                await asyncio.sleep(self.learning)
                version += 1
                await self.sender.send(self.engine, version)
                if self.staleness:
                    self.rollouts.begin(version)
            if self.watch.done():
                self.watch.result()
        self.watch.cancel()
        return taken


seconds = st.floats(0.0, 600.0)
events = st.lists(st.tuples(seconds, st.integers(0, 1), st.sampled_from(["kill", "stop", "stop_core"])), max_size=4)


@settings(deadline=None, max_examples=50)
@example(0, 1, 0.0, 0, [(0.0, 0, "stop"), (0.0, 1, "kill"), (32.0, 1, "kill")], 0)
@given(st.integers(0, 3), st.integers(1, 6), st.floats(0.0, 200.0), st.integers(0, 6), events, st.integers(0, 99))
def test_no_token_is_staler_than_the_bound_or_of_other_weights_than_it_says_whenever_servers_die_and_return(
    staleness, steps, learning, resumed, events, seed
):
    begin = min(resumed, steps)

    async def main():
        with pytest.MonkeyPatch.context() as patch:
            async with engine_of_doubles(patch, version=begin) as engine:
                run = Run(engine, staleness, steps, learning, random.Random(seed))
                begun = asyncio.get_running_loop().time()

                async def happen():
                    for when, number, what in sorted(events):
                        await asyncio.sleep(begun + when - asyncio.get_running_loop().time())
                        getattr(engine.servers.at(number), what)()

                happening = asyncio.create_task(happen())
                try:
                    return await run.train(begin)
                finally:
                    happening.cancel()
                    await run.rollouts.close()

    taken, _ = with_fake_clock(main())
    assert list(taken) == list(range(begin, steps))
    for step, episodes in taken.items():
        found = true([answer for turns in episodes for answer in turns])
        assert len(episodes) == PER_STEP
        assert found <= set(range(step - staleness, step + 1)), step
