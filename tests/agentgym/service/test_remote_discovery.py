"""One name before several servers, as of a Kubernetes headless service: each is found, and a session stays where it is."""

import asyncio
import socket

import pytest
from served import certificate, served

import agentgym
from agentgym.rollout.episode import close_env
from agentgym.service.client import balance, lookup

NAME = "envs.test"


@pytest.fixture
def names(monkeypatch):
    """A double of the resolver: the addresses of NAME, which a test may change."""
    addresses = ["127.0.0.2", "127.0.0.3"]
    real = socket.getaddrinfo

    def looked_up(host, port, *args, **kwargs):
        if host != NAME:
            return real(host, port, *args, **kwargs)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (at, port)) for at in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    monkeypatch.setattr(lookup, "known_records", {})
    monkeypatch.setattr(balance, "_pools", {})
    monkeypatch.delenv("AGENTGYM_TOKEN", raising=False)
    return addresses


def on_both(**settings):
    """Settings of two servers at the same port of two addresses; the port is free for both a moment before."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        port = probe.getsockname()[1]
    return port, {"tokens": {"ann": "a" * 20}, "port": port, "workers": 0, **settings}


def sessions_of(*servers):
    return [len(server.sessions.open) for server in servers]


def test_each_server_is_found_and_a_session_comes_back_to_its_own(names, monkeypatch):
    monkeypatch.setenv("AGENTGYM_TOKEN", "a" * 20)
    port, settings = on_both()

    async def play(servers):
        envs = [agentgym.make(f"http://{NAME}:{port}/frozen_lake") for _ in range(6)]
        await asyncio.gather(*(env.reset(seed=1) for env in envs))
        assert sessions_of(*servers) == [3, 3]
        homes = [env.unwrapped.session.server for env in envs]
        assert set(homes) == {f"http://127.0.0.2:{port}", f"http://127.0.0.3:{port}"}
        for env in envs:
            env.unwrapped.session.ws.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        actions = [await env.expert_action() for env in envs]
        await asyncio.gather(*(env.step(action) for env, action in zip(envs, actions, strict=True)))
        assert [env.unwrapped.session.reconnects for env in envs] == [1] * 6
        assert [env.unwrapped.session.server for env in envs] == homes
        await asyncio.gather(*(close_env(env) for env in envs))

    with (
        served("frozen_lake", host="127.0.0.2", **settings) as one,
        served("frozen_lake", host="127.0.0.3", **settings) as other,
    ):
        asyncio.run(play((one, other)))
        assert all(server.unauthorized.count == 0 for server in (one, other))


def test_servers_come_and_go(names, monkeypatch):
    monkeypatch.setattr(balance, "FIND_SECONDS", 0.0)
    pool = balance.Pool([f"http://{NAME}:8000"])

    def found(*addresses):
        names[:] = addresses
        asyncio.run(balance.find_servers(pool))
        return {server.url for server in pool.servers}

    assert found("127.0.0.2", "127.0.0.3") == {"http://127.0.0.2:8000", "http://127.0.0.3:8000"}
    kept = next(server for server in pool.servers if "0.3" in server.url)
    kept.own = 7
    assert found("127.0.0.3", "127.0.0.4") == {"http://127.0.0.3:8000", "http://127.0.0.4:8000"}
    assert kept in pool.servers
    assert found("127.0.0.4") == {f"http://{NAME}:8000"}, "one address is a balancer's, or the only server's"
    assert found("127.0.0.2", "127.0.0.3") == {"http://127.0.0.2:8000", "http://127.0.0.3:8000"}


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://localhost:8000", "http://[::1]:8000"])
def test_what_means_one_server_stays_as_it_was_given(url):
    pool = balance.Pool([url])
    asyncio.run(balance.find_servers(pool))
    assert [server.url for server in pool.servers] == [url]


def test_over_tls_the_certificate_is_that_of_the_name(names, monkeypatch, tmp_path):
    tls = certificate(tmp_path, NAME, f"DNS:{NAME}")
    monkeypatch.setenv("AGENTGYM_TOKEN", "a" * 20)
    port, settings = on_both(**tls)

    async def play():
        env = agentgym.make(f"https://{NAME}:{port}/frozen_lake", ca_file=tls["cert"])
        await env.reset(seed=1)
        env.unwrapped.session.ws.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        await env.step(await env.expert_action())
        assert env.unwrapped.session.server.startswith("https://127.0.0.")
        await close_env(env)

    with served("frozen_lake", host="127.0.0.2", **settings), served("frozen_lake", host="127.0.0.3", **settings):
        asyncio.run(play())
