"""Several servers of one environment: the one with the most room is next, a dead one is left out and taken back."""

import asyncio
import contextlib
import time
from typing import Any

import pytest
from faulty_server import FaultyServer, running
from served import served

import agentgym
from agentgym.core.registration import spec
from agentgym.policies.base import ExpertPolicy
from agentgym.rollout.episode import Episode, close_env, run_episode, run_many
from agentgym.service.client import balance, lookup
from agentgym.service.client.address import SessionLost, Unavailable
from agentgym.service.client.balance import Pool


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "known_records", {})
    monkeypatch.setattr(balance, "_pools", {})
    monkeypatch.delenv("AGENTGYM_TOKEN", raising=False)


def two() -> tuple[FaultyServer, FaultyServer]:
    return FaultyServer(spec("frozen_lake")), FaultyServer(spec("frozen_lake"))


def both(*servers: FaultyServer, **settings: Any) -> Any:
    return agentgym.make(",".join(server.url for server in servers), **settings)


def test_a_server_that_moved_stays_where_it_is() -> None:
    """As an environment worker does that was started again, at another port."""
    first, second, new = (f"http://127.0.0.1:{port}" for port in (1001, 1002, 1003))
    pool = Pool([first, second])
    pool.move(first, new)
    asyncio.run(balance.find_servers(pool))
    assert {server.url for server in pool.servers} == {new, second}


def opened(env: Any, n: int) -> None:
    """Open sessions of n environments at the same time, and close them."""

    async def play() -> None:
        envs = [env.spec.make() for _ in range(n)]
        await asyncio.gather(*(one.reset(seed=1) for one in envs))
        await asyncio.gather(*(close_env(one) for one in envs))

    asyncio.run(play())


# The pool: numbers alone.


def test_places_go_to_the_server_with_the_most_room() -> None:
    pool = Pool(["a", "b", "c"])
    for server, sessions, room in zip(pool.servers, (10, 0, 90), (100, 10, 1000), strict=True):
        pool.told(server, sessions, room)
    taken = [pool.take() for _ in range(20)]
    filled = {server.url: server.sessions / (server.room or 1) for server in pool.servers}
    assert len(taken) == 20
    assert max(filled.values()) - min(filled.values()) < 0.11


def test_own_sessions_count_from_the_moment_they_are_taken() -> None:
    pool = Pool(["a", "b"])
    for _ in range(9):
        pool.take()
    assert sorted(server.own for server in pool.servers) == [4, 5]
    for server in pool.servers:
        pool.told(server, 20, 100)
        pool.leave(server)
        assert server.sessions == 19


def test_a_failed_server_rests_longer_each_time_and_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(balance.time, "monotonic", lambda: now)
    pool = Pool(["a"])
    rests = []
    for _ in range(9):
        pool.failed(pool.servers[0], "refused")
        assert pool.take() is None
        rests.append(pool.wait())
        now += rests[-1]
        taken = pool.take()
        assert taken is not None
        pool.leave(taken)
    assert rests[0] <= balance.FIRST_REST
    assert rests[0] * 10 < rests[-1] <= balance.LONGEST_REST
    pool.well(pool.servers[0])
    pool.failed(pool.servers[0], "refused")
    assert pool.wait() <= balance.FIRST_REST


def test_many_who_meet_one_failure_at_the_same_time_have_met_one() -> None:
    pool = Pool(["a"])
    for _ in range(64):
        pool.failed(pool.servers[0], "500", broken=True)
    assert (pool.servers[0].failures, pool.servers[0].broken) == (1, 1)
    assert pool.wait() <= balance.FIRST_REST
    pool.well(pool.servers[0])
    assert pool.servers[0].broken == 0


def test_a_server_that_failed_is_no_ones_choice_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(balance.time, "monotonic", lambda: now)
    pool = Pool(["a", "b"])
    a, b = pool.servers
    b.own = 10
    pool.failed(a, "it hangs")
    now += balance.LONGEST_REST
    assert pool.take() is b
    assert not pool.better_than(b)
    pool.told(a, 0, 100)
    pool.told(b, 11, 100)
    assert pool.take() is a
    assert pool.better_than(b)
    pool.failed(a, "it hangs")
    pool.failed(b, "it is gone")
    now += balance.LONGEST_REST
    assert pool.take() in (a, b)  # better than none


def test_an_episode_moves_only_where_there_is_clearly_more_room() -> None:
    pool = Pool(["a", "b"])
    a, b = pool.servers
    a.own, b.own = 5, 4
    assert not pool.better_than(a)
    a.own, b.own = 6, 4
    assert pool.better_than(a)
    assert not pool.better_than(b)
    pool.told(b, 50, 100)  # of others
    pool.told(a, 10, 100)
    assert not pool.better_than(a)
    pool.told(b, 5, 100)
    assert pool.better_than(a)
    pool.failed(b, "dead")
    assert not pool.better_than(a)


# Servers that are doubles for faults.


def test_sessions_are_spread_evenly() -> None:
    one, other = two()
    with running(one, other):
        opened(both(one, other), 10)
    assert (one.opened, other.opened) == (5, 5)


def test_sessions_of_others_count() -> None:
    one, other = two()
    one.load |= {"sessions": 80}
    with running(one, other):
        opened(both(one, other), 10)
    assert (one.opened, other.opened) == (0, 10)


def test_a_draining_server_is_left_out() -> None:
    one, other = two()
    one.load |= {"ready": False, "draining": True}
    with running(one, other):
        opened(both(one, other), 6)
    assert (one.opened, other.opened) == (0, 6)


@pytest.mark.parametrize("refusal", ["503", "429", "401", "404", "500", "reset", "nonsense", "CAPACITY", "DRAINING"])
def test_a_server_that_refuses_is_passed_over(refusal: str) -> None:
    one, other = two()
    one.openings.extend([refusal] * 100)
    with running(one, other):
        opened(both(one, other), 4)
    assert (one.opened, other.opened) == (0, 4)


@pytest.mark.parametrize("refusal", ["503", "429", "500", "reset", "CAPACITY"])
def test_servers_that_are_full_or_away_are_waited_for(refusal: str) -> None:
    one, other = two()
    for server in (one, other):
        server.openings.append(refusal)
    with running(one, other):
        opened(both(one, other), 1)
    assert one.opened + other.opened == 1


def test_patience_has_an_end_and_says_why() -> None:
    one, other = two()
    one.openings.extend(["503"] * 100)
    other.openings.extend(["500"] * 100)
    words = r"frozen_lake: no server had a session within 0.5 s: .*it is full or draining \(503\); .*it answered 500"
    with running(one, other), pytest.raises(Unavailable, match=words):
        asyncio.run(both(one, other, patience=0.5).reset(seed=1))


def test_servers_that_all_refuse_for_good_are_not_waited_for() -> None:
    one, other = two()
    one.openings.extend(["401"] * 100)
    other.openings.extend(["404"] * 100)
    begun = time.monotonic()
    with running(one, other), pytest.raises(Unavailable, match=r"no server gives a session: .*\(401\).*\(404\)"):
        asyncio.run(both(one, other, patience=60.0).reset(seed=1))
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize(("times", "opens"), [(balance.BROKEN_TRIES - 1, True), (100, False)])
def test_a_server_that_says_that_it_failed_is_asked_a_few_times(
    times: int, opens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(balance, "FIRST_REST", 0.05)
    server = FaultyServer(spec("frozen_lake"))
    server.openings.extend(["500"] * times)
    begun = time.monotonic()
    with running(server):
        if opens:
            opened(both(server), 4)
        else:
            words = r"no server gives a session: http://\S+: it answered 500 .*: its log says why"
            with pytest.raises(Unavailable, match=words):
                opened(both(server, patience=600.0), 4)
    assert time.monotonic() - begun < 60
    assert server.opened == (4 if opens else 0)


def test_a_session_whose_server_drains_begins_its_next_episode_elsewhere() -> None:
    one, other = two()

    async def play() -> None:
        env = await asyncio.to_thread(both, one, other)
        await env.reset(seed=1)
        first = one if env.session.server.endswith(str(one.port)) else other
        first.messages.append('{"id": 2, "error": {"code": "DRAINING", "message": "ending", "fatal": true}}')
        first.openings.extend(["503"] * 50)
        await env.reset(seed=2)
        await env.step("up")
        assert not env.session.server.endswith(str(first.port))
        await env.close()

    with running(one, other):
        asyncio.run(play())


def test_lookups_pass_over_a_server_that_is_dead() -> None:
    one, other = two()
    with running(one), running(other):
        pass  # their ports are free again
    with running(other):
        env = both(one, other)
        assert len(env.tasks) == 100_000
        assert env.tasks[0].id == "frozen_lake-train-0"
        opened(env, 3)
    assert other.opened == 3


# Real servers.


def test_a_dead_server_costs_its_episodes_and_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentgym.service.client.session_client.RECONNECT_SECONDS", 0.3)
    monkeypatch.setattr(balance, "FIRST_REST", 0.05)
    monkeypatch.setattr(balance, "LONGEST_REST", 0.2)
    monkeypatch.setattr(balance, "FRESH_SECONDS", 0.0)

    def servers(env: Any, envs: list[Any]) -> list[str]:
        return sorted(one.session.server for one in envs)

    async def play(stay: str, leave: str, stack: contextlib.ExitStack, port: int) -> None:
        env = await asyncio.to_thread(agentgym.make, f"{stay}/frozen_lake,{leave}/frozen_lake")
        envs = [env.spec.make() for _ in range(4)]
        for one in envs:
            await one.reset(seed=1)
        assert servers(env, envs) == sorted([stay, stay, leave, leave])
        await asyncio.to_thread(stack.close)
        lost = 0
        for one in envs:
            on_dead = one.session.server == leave
            try:
                await one.step("up")
            except SessionLost:
                lost += on_dead
        assert lost == 2
        for one in envs:
            await one.reset(seed=2)
        assert servers(env, envs) == [stay] * 4
        await asyncio.to_thread(stack.enter_context, served("frozen_lake", port=port))
        until = time.monotonic() + 30
        while len(set(servers(env, envs))) == 1 and time.monotonic() < until:
            for one in envs:
                await one.reset(seed=3)
                await one.step("up")
        assert servers(env, envs) == sorted([stay, stay, leave, leave])
        await asyncio.gather(*(close_env(one) for one in envs))

    with served("frozen_lake") as stay, contextlib.ExitStack() as stack:
        leave = stack.enter_context(served("frozen_lake"))
        asyncio.run(play(stay.url, leave.url, stack, leave.port))


def test_a_run_goes_on_when_a_server_dies_in_its_middle(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agentgym.service.client.session_client.RECONNECT_SECONDS", 0.3)
    with served("sokoban") as stay, contextlib.ExitStack() as stack:
        leave = stack.enter_context(served("sokoban"))
        made = spec(f"{stay.url}/sokoban,{leave.url}/sokoban")
        todo = [Episode(task, 0, i) for i, task in enumerate(made.tasks("train").take(24))]
        ended: list[Any] = []

        def on_end(trajectory: Any) -> None:
            ended.append(trajectory)
            if len(ended) == 6:
                stack.close()

        played = asyncio.run(
            run_many(made.make, lambda episode: ExpertPolicy(), todo, concurrency=4, retries=3, on_end=on_end)
        )
        local = spec("sokoban").make()
        for trajectory, episode in zip(played, todo, strict=True):
            ours = asyncio.run(run_episode(local, ExpertPolicy(), episode.task, seed=episode.seed))
            assert trajectory.error is None
            assert [turn.reward for turn in trajectory.turns] == [turn.reward for turn in ours.turns]
    said = [record.getMessage() for record in caplog.records if "lost the server" in record.getMessage()]
    assert said, "nobody was told"
    assert all(f"lost the server {leave.url} (" in one and "1 others" in one for one in said)
    assert any(trajectory.metadata.get("errors") for trajectory in played)


def test_a_full_server_sends_its_clients_to_the_other() -> None:
    with served("frozen_lake", max_sessions=2) as small, served("frozen_lake", max_sessions=8) as large:
        env = agentgym.make(f"{small.url}/frozen_lake,{large.url}/frozen_lake")

        async def play() -> None:
            envs = [env.spec.make() for _ in range(10)]  # type: ignore[union-attr]
            for one in envs:
                await one.reset(seed=1)  # type: ignore[misc]
            assert (len(small.sessions.open), len(large.sessions.open)) == (2, 8)
            await asyncio.gather(*(close_env(one) for one in envs))

        asyncio.run(play())
