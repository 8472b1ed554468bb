"""What goes wrong in the environment's process costs its own episode; the next one has a new session."""

import asyncio
from typing import Any

import pytest
from served import served

import agentgym
from agentgym.core.registration import EnvSpec
from agentgym.policies.base import ExpertPolicy, ScriptedPolicy
from agentgym.rollout.episode import Limits, close_env, run_episode
from agentgym.service.client import lookup
from agentgym.service.client.address import RemoteEnvError, SessionLost, Unavailable
from agentgym.service.protocol.frames import ServiceLimits

QUICK = ServiceLimits(step_seconds=0.5, init_seconds=20.0)


def faulty(name: str = "Faulty") -> EnvSpec:
    return EnvSpec(id="faulty", entry_point=f"service_faults:{name}")


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "known_records", {})
    monkeypatch.delenv("AGENTGYM_TOKEN", raising=False)


def test_a_step_that_hangs_or_crashes_costs_its_episode_only() -> None:
    async def play(url: str) -> None:
        env: Any = await asyncio.to_thread(agentgym.make, url)
        for action, code in (
            ("hang", "DEADLINE"),
            ("spin", "DEADLINE"),
            ("abort", "WORKER_DIED"),
            ("exit 3", "WORKER_DIED"),
        ):
            await env.reset(seed=1)
            with pytest.raises(SessionLost, match=code) as caught:
                await env.step(action)
            assert caught.value.code == code
        await env.reset(seed=1)
        with pytest.raises(RemoteEnvError, match="KeyError: 'why'"):
            await env.step("raise why")
        observation, *_ = await env.step("echo still here")
        assert observation[0]["content"] == "2: still here"  # the same process went on
        await env.close()

    with served(specs={"faulty": faulty()}, limits=QUICK) as server:
        asyncio.run(play(f"{server.url}/faulty"))


def test_the_episode_says_what_happened_and_where() -> None:
    async def play(url: str) -> None:
        env = await asyncio.to_thread(agentgym.make, url)
        task = (await asyncio.to_thread(lambda: env.tasks))[0]
        lost = await run_episode(env, ScriptedPolicy(["echo 1", "abort"]), task)
        assert lost.failed
        assert "turn 2: step failed after" in str(lost.error)
        assert f"SessionLost: faulty at {url.rsplit('/', 1)[0]}: the session is lost: WORKER_DIED" in str(lost.error)
        assert [turn.reward for turn in lost.turns] == [0.25, 0.0]
        again = await run_episode(env, ScriptedPolicy(["echo 1", "end"]), task)
        assert (again.end, len(again.turns)) == ("terminated", 2)
        await close_env(env)

    with served(specs={"faulty": faulty()}, limits=QUICK) as server:
        asyncio.run(play(f"{server.url}/faulty"))


def test_an_environment_that_cannot_be_made_says_so_after_a_few_tries() -> None:
    async def play(url: str) -> None:
        env: Any = await asyncio.to_thread(agentgym.make, url, patience=600.0)
        words = r"ENV_ERROR: making the environment failed: OSError: there is no such database$"
        with pytest.raises(Unavailable, match=words):
            await asyncio.wait_for(env.reset(seed=1), 60)

    with served(specs={"faulty": faulty("NotMade")}, limits=QUICK) as server:
        asyncio.run(play(f"{server.url}/faulty"))


def test_an_environment_with_async_methods_is_served_as_well() -> None:
    async def play(url: str) -> None:
        env: Any = await asyncio.to_thread(agentgym.make, url)
        task = (await asyncio.to_thread(lambda: env.tasks))[0]
        played = await run_episode(env, ExpertPolicy(), task, limits=Limits(max_turns=3))
        assert (played.error, played.end, len(played.turns)) == (None, "max_turns", 3)
        await close_env(env)

    with served(specs={"faulty": faulty("Later")}, limits=QUICK) as server:
        asyncio.run(play(f"{server.url}/faulty"))
