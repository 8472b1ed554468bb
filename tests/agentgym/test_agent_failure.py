"""What an agent's own programs break is scored as the environment's floor, by its cause; what fails without them is an error."""

import asyncio
import json
import os
import signal
import time

import pytest

import agentgym
from agentgym import Env, ScriptedPolicy, Task
from agentgym.core.agent_failure import SANDBOX_LOST, SANDBOX_SPOILED, STEP_TIMEOUT, AgentFailure
from agentgym.rewards import Rewarded, Rubric
from agentgym.rollout.episode import Episode, Limits, run_episode, run_many
from agentgym.sandbox import BackendDown, SandboxError, SandboxSpec, SandboxSpoiled, acquire
from agentgym.sandbox.backends import bubblewrap, engine
from agentgym.sandbox.leases import Lease
from agentgym.sandbox.pool import Places, SandboxPool

BOTH = pytest.mark.parametrize(
    "backend",
    [pytest.param("bubblewrap", marks=pytest.mark.bubblewrap), pytest.param("docker", marks=pytest.mark.docker)],
)
TASK = Task("t", [{"role": "user", "content": "go"}])


def kill_guest(box, backend):
    """Kill the first process of a sandbox from outside, as the kernel does for want of memory."""
    if backend == "docker":
        engine.client().kill(box.id)
        return
    record = json.loads((bubblewrap.records() / f"{box.id}.json").read_text())
    for pid in bubblewrap.children_of(record["bwrap"]):
        os.kill(pid, signal.SIGKILL)


class Shell(Env):
    """Runs each reply in a sandbox, as a command or in a session. "LOSE" loses the sandbox first; "WIN" earns 0.5 and goes on."""

    max_turns = 9
    sandbox_image = "python"
    floor = -1.0

    def __init__(self, sandbox=None, held=False, seconds=5.0, **kwargs):
        super().__init__(**kwargs)
        self.backend, self.held, self.seconds = sandbox, held, seconds
        self.box = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.close()
        self.running = True
        self.box = acquire(SandboxSpec(), self.backend)
        self.session = self.box.session("shell") if self.held else None
        return TASK.messages, {}

    def step(self, action):
        text = self.read(action)
        if text == "HANG":
            time.sleep(3)
        if text == "LOSE":
            kill_guest(self.box, self.backend)
            text = "true"
        if text == "WIN":
            return self.outcome("won", 0.5)
        done = self.session.run(text, self.seconds) if self.held else self.box.exec(text, timeout=self.seconds)
        return self.outcome(done.stdout or "nothing", float(done.stdout == "right\n"), terminated="right" in text)

    def close(self):
        super().close()
        if self.box is not None:
            self.box.close()


def play(env, *replies, step_timeout=60.0):
    limits = Limits(step_timeout=step_timeout)
    try:
        return asyncio.run(run_episode(env, ScriptedPolicy([*replies, "echo right"]), TASK, limits=limits))
    finally:
        env.close()


@BOTH
@pytest.mark.parametrize("held", [False, True])
class TestSandboxes:
    def test_one_that_is_lost_after_a_program_ran_is_the_agents_failure(self, backend, held):
        done = play(Shell(backend, held), "WIN", "echo hello", "LOSE")
        assert (done.end, done.agent_failure, done.error) == ("terminated", SANDBOX_LOST, None)
        assert done.reward == -1.0, "the floor, whatever was earned before"
        assert done.success == 0.0
        assert len(done.turns) == 3

    def test_a_program_that_goes_on_without_end_costs_nothing_but_its_time(self, backend, held):
        done = play(Shell(backend, held, seconds=0.5), "while :; do :; done")
        assert (done.agent_failure, done.reward) == (None, 1.0)


@BOTH
class TestSteps:
    def test_one_that_is_lost_before_any_program_ran_is_an_error(self, backend):
        box = acquire(SandboxSpec(), backend)
        kill_guest(box, backend)
        with pytest.raises(SandboxError) as raised:
            box.write("a", "b")
        assert agentgym.core.agent_failure.cause_of(raised.value) is None
        box.close()

    def test_a_file_that_a_program_left_unreadable_is_the_agents_failure(self, backend):
        class Reader(Shell):
            def step(self, action):
                result = super().step(action)
                self.box.read("answer.txt")
                return result

        done = play(Reader(backend), "mkdir answer.txt")
        assert (done.agent_failure, done.reward) == (SANDBOX_SPOILED, -1.0)

    @pytest.mark.parametrize("give", ["upload", "put_archive"])
    def test_a_file_of_this_machine_that_cannot_be_read_is_an_error(self, backend, give, tmp_path):
        box = acquire(SandboxSpec(), backend)
        assert box.exec("echo a program has run").ok
        with pytest.raises(FileNotFoundError) as raised:
            getattr(box, give)(tmp_path / "missing")
        assert agentgym.core.agent_failure.cause_of(raised.value) is None
        box.close()

    def test_a_step_that_its_program_holds_up_is_the_agents_failure_and_in_no_ones_way(self, backend):
        replies = [["sleep 60"], ["echo right"]]
        held, after = asyncio.run(
            run_many(
                lambda: Shell(backend, seconds=4.0),
                lambda episode: ScriptedPolicy(replies[episode.sample]),
                [Episode(TASK, n) for n in range(2)],
                concurrency=1,
                limits=Limits(step_timeout=1.0),
            )
        )
        assert (held.end, held.agent_failure, held.reward) == ("terminated", STEP_TIMEOUT, -1.0)
        assert after.reward == 1.0

    def test_a_step_that_hangs_before_any_program_ran_is_an_error(self, backend):
        done = play(Shell(backend), "HANG", step_timeout=0.5)
        assert (done.end, done.agent_failure) == ("error", None)
        assert "step took longer than its limit" in done.error


class Broken(Env):
    """Raises in each step what it was given; turns cost 0.1 until then."""

    max_turns = 9
    floor = -2.0

    def __init__(self, error, at=1):
        super().__init__()
        self.error, self.at = error, at

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return TASK.messages, {}

    def step(self, action):
        self.read(action)
        if self.turn >= self.at:
            raise self.error
        return self.outcome("go on", -0.1)


class Below(Broken):
    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward + 0.3, terminated, truncated, info


class Async(Broken):
    async def step(self, action):
        await asyncio.sleep(0)
        return super().step(action)


class TestEnv:
    @pytest.mark.parametrize("kind", [Broken, Below, Async])
    def test_an_agent_failure_ends_the_episode_at_the_floor(self, kind):
        env = kind(AgentFailure("told"), at=3)
        done = asyncio.run(run_episode(env, ScriptedPolicy(["a", "b", "c"]), TASK))
        assert (done.end, done.agent_failure) == ("terminated", "told")
        assert done.reward == pytest.approx(-2.0)
        assert [turn.reward for turn in done.turns[:2]] == [pytest.approx(0.2 if kind is Below else -0.1)] * 2
        assert not env.running

    def test_any_other_exception_passes(self):
        env = Broken(ZeroDivisionError())
        env.reset(options={"task": TASK})
        with pytest.raises(ZeroDivisionError):
            env.step("a")

    def test_a_rubric_is_not_asked_and_its_own_floor_holds(self):
        def never(completion: str) -> float:
            raise AssertionError

        env = Rewarded(Broken(AgentFailure("told"), at=2), Rubric([never]), floor=-0.5)
        done = asyncio.run(run_episode(env, ScriptedPolicy(["a", "b"]), TASK))
        assert (done.agent_failure, done.reward) == ("told", -0.5)

    def test_a_reward_function_that_the_agents_program_breaks_gives_the_floor(self):
        def breaks(completion: str) -> float:
            raise OSError("the file is a folder") from AgentFailure("told")

        env = Rewarded(Broken(ZeroDivisionError()), Rubric([breaks]), floor=-0.5)
        env.env.max_turns = 1
        env.env.at = 9
        done = asyncio.run(run_episode(env, ScriptedPolicy(["a"]), TASK))
        assert (done.agent_failure, done.reward) == ("told", -0.5)


class TestWhoseFault:
    """A double of a sandbox: which of its errors are whose, where the back end is up and where it is not."""

    class Box:
        id, spec, alive = "double", SandboxSpec(), True

        def __init__(self, error):
            self.error = error

        def exec(self, command, **_):
            if command == "fail":
                raise self.error

        def write(self, path, data, mode):
            raise self.error

        session = read = write

    def cause(self, error, up=True, used=True):
        box = Lease(self.Box(error), SandboxPool(lambda: None, Places(1), up_since=lambda then: up))
        if used:
            box.exec("true")
        with pytest.raises(type(error)) as raised:
            box.write("a", "b")
        return agentgym.core.agent_failure.cause_of(raised.value)

    def test_a_loss_is_the_agents_where_the_back_end_is_up(self):
        assert self.cause(SandboxError("gone")) == SANDBOX_LOST
        assert self.cause(SandboxError("gone"), up=False) is None
        assert self.cause(SandboxError("gone"), used=False) is None
        assert self.cause(BackendDown("gone")) is None

    def test_a_spoiled_one_is_the_agents_without_asking(self):
        assert self.cause(SandboxSpoiled("full"), up=False) == SANDBOX_SPOILED
        assert self.cause(OSError(28, "no space left"), up=False) == SANDBOX_SPOILED
        assert self.cause(OSError(28, "no space left"), used=False) is None

    def test_what_the_host_asks_wrongly_is_not(self):
        assert self.cause(ValueError("not under /workspace")) is None

    def test_one_that_the_host_closed_is_not(self):
        box = self.Box(SandboxError("closed"))
        lease = Lease(box, SandboxPool(lambda: None, Places(1), up_since=lambda then: True))
        lease.exec("true")
        box.alive = False
        with pytest.raises(SandboxError) as raised:
            lease.exec("fail")
        assert agentgym.core.agent_failure.cause_of(raised.value) is None

    @pytest.mark.parametrize("error", [PermissionError(13, "denied"), OSError(36, "name too long")])
    def test_a_path_that_the_host_may_not_write_is_not(self, error):
        """Where programs can be the cause, the guest tells `SandboxSpoiled`."""
        assert self.cause(error) is None

    def test_one_that_ended_because_the_host_did_not_call_is_not(self):
        box = self.Box(SandboxError("broken pipe"))
        box.spec = SandboxSpec(idle_timeout=0.05)
        lease = Lease(box, SandboxPool(lambda: None, Places(1), up_since=lambda then: True))
        lease.exec("true")
        time.sleep(0.1)
        with pytest.raises(SandboxError, match=r"no call came for 0 s \(idle_timeout=0.05\)") as raised:
            lease.exec("fail")
        assert agentgym.core.agent_failure.cause_of(raised.value) is None

    def test_an_environment_that_raises_another_error_from_it_is_understood(self):
        lost = SandboxError("gone")
        agentgym.core.agent_failure.blame(lost, lambda: SANDBOX_LOST)
        other = RuntimeError("no grade")
        other.__cause__ = lost
        assert agentgym.core.agent_failure.cause_of(other) == SANDBOX_LOST
        assert agentgym.core.agent_failure.cause_of(RuntimeError("no grade")) is None


def test_a_pool_without_knowledge_of_its_back_end_blames_nobody():
    pool = SandboxPool(lambda: None, Places(1))
    assert not pool.up_since(time.monotonic())
    pool.close()
