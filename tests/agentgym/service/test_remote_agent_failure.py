"""A served environment that runs the agent's programs: what ends its session in a step is the agent's failure."""

import asyncio

import pytest
from chaos_envs import Chaos
from faulty_server import FaultyServer, running
from served import served

import agentgym
from agentgym import ScriptedPolicy
from agentgym.core.registration import EnvSpec
from agentgym.rollout.episode import Limits, run_episode
from agentgym.service.protocol.frames import ServiceLimits
from agentgym.service.server.bounds import Bounds

STEP_SECONDS = 1.5


class Programs(Chaos):
    """Says that it runs the agent's programs. Here the agent's doing happens in its own process."""

    sandbox_image = "python"
    floor = -1.0


@pytest.fixture(scope="module")
def url():
    specs = {
        "Programs": EnvSpec("Programs", "test_remote_agent_failure:Programs"),
        "Chaos": EnvSpec("Chaos", "chaos_envs:Chaos"),
    }
    limits, bounds = ServiceLimits(step_seconds=STEP_SECONDS), Bounds(memory_bytes=64 << 20)
    with served(specs=specs, limits=limits, bounds=bounds) as server:
        yield server.url


def play(url, env, *replies, step_timeout=60.0):
    made = agentgym.make(f"{url}/{env}")
    task = next(iter(Chaos.default_tasks()))
    policy = ScriptedPolicy(replies)
    return asyncio.run(run_episode(made, policy, task, seed=1, limits=Limits(step_timeout=step_timeout)))


@pytest.mark.parametrize(
    ("fault", "cause"), [("hang", "step_timeout"), ("kill", "session_lost"), ("grow", "session_lost")]
)
def test_a_session_that_ends_in_a_step_is_the_agents_failure(url, fault, cause):
    replies = ["add 1", *[f"fault {fault}"] * 9]
    done = play(url, "Programs", *replies)
    assert (done.end, done.agent_failure, done.error) == ("terminated", cause, None)
    assert done.reward == pytest.approx(-1.0), "the served environment's floor, whatever was earned before"


def test_so_is_a_step_that_the_client_does_not_wait_for(url):
    done = play(url, "Programs", "fault hang", step_timeout=STEP_SECONDS / 3)
    assert (done.end, done.agent_failure, done.reward) == ("terminated", "step_timeout", -1.0)


def test_a_server_that_hangs_is_no_agents_failure_though_another_answers(url):
    hangs = FaultyServer(EnvSpec("Programs", "test_remote_agent_failure:Programs"))
    task = next(iter(Chaos.default_tasks()))

    async def played():
        busy, env = agentgym.make(f"{url}/Chaos"), agentgym.make(f"{hangs.url},{url}/Programs")
        await busy.reset(seed=1)  # so the session goes to the server that has none
        hangs.messages.extend(["ok", "ok", "mute"])
        limits = Limits(step_timeout=0.5)
        try:
            return await run_episode(env, ScriptedPolicy(["add 1"]), task, seed=1, limits=limits)
        finally:
            await busy.close()

    with running(hangs):
        done = asyncio.run(played())
    assert (hangs.opened, done.end, done.agent_failure) == (1, "error", None)
    assert "turn 1: step took longer" in done.error


@pytest.mark.parametrize("fault", ["hang", "kill"])
def test_where_no_programs_run_it_is_an_error(url, fault):
    done = play(url, "Chaos", f"fault {fault}")
    assert (done.end, done.agent_failure) == ("error", None)


def test_an_exception_of_the_environment_is_an_error(url):
    done = play(url, "Programs", "fault fail")
    assert (done.end, done.agent_failure) == ("error", None)
    assert "no such move" in done.error
