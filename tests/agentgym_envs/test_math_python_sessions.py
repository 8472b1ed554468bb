"""The Python of math_python: a session that keeps its variables, code that misbehaves, sandboxes that fail and are given back."""

from __future__ import annotations

import asyncio
import json
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from math_episodes import Playing, code, make, problem

import agentgym
from agentgym.rollout.episode import Episode, Limits, run_many
from agentgym.sandbox import SandboxError, choose
from agentgym.sandbox import acquire as acquire_sandbox
from agentgym_envs import register_all
from agentgym_envs.math.math_python import own_problems
from agentgym_envs.math.python_env import ENVIRONMENT

pytest.importorskip("mpmath")
pytestmark = pytest.mark.sandbox
register_all()

__all__ = ["make"]  # a fixture: used by its name


def printed(env, text):
    observation, reward, terminated, truncated, info = env.step(code(text))
    assert (reward, terminated, truncated, info) == (0.0, False, False, {"success": False})
    said = observation[0]["content"]
    return said.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")


@pytest.mark.parametrize(
    "backend",
    [pytest.param("bubblewrap", marks=pytest.mark.bubblewrap), pytest.param("docker", marks=pytest.mark.docker)],
)
class TestPython:
    @pytest.fixture
    def env(self, make, backend):
        try:
            choose(backend)
        except SandboxError as error:
            pytest.skip(str(error))
        return make(sandbox=backend, timeout=2.0, max_output=500, max_turns=20)

    def test_state_is_kept_over_the_episode_and_not_into_the_next(self, env):
        assert printed(env, "x = 6\nx * 7") == "42"
        assert printed(env, "print(x)\nx + 1") == "6\n7"
        env.reset()
        assert "NameError: name 'x' is not defined" in printed(env, "x")
        env.step(r"\boxed{1}")
        env.reset()
        assert "NameError" in printed(env, "x")

    def test_a_traceback_names_the_line(self, env):
        said = printed(env, "def f(n):\n    return 1 / n\n\nf(0)")
        assert said.startswith("Traceback (most recent call last):")
        assert "line 2, in f" in said
        assert said.endswith("ZeroDivisionError: division by zero")

    def test_every_form_of_call_is_run(self, env):
        native = {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": f"c{n}",
                    "type": "function",
                    "function": {"name": "python", "arguments": json.dumps({"code": c})},
                }
                for n, c in enumerate(["a = 1", "print(a)", "b"])
            ],
        }
        observation = env.step(native)[0]
        assert [m["tool_call_id"] for m in observation] == ["c0", "c1", "c2"]
        assert [m["content"] for m in observation[:2]] == ["(nothing was printed)", "1"]
        assert "NameError" in observation[2]["content"]
        tagged = '<tool_call>{"name": "python", "arguments": {"code": "print(a + 1)"}}</tool_call>'
        assert "\n2\n" in env.step(tagged)[0][0]["content"]
        xml = "<tool_call><function=python><parameter=code>\nprint(a + 2)\n</parameter></function></tool_call>"
        assert "\n3\n" in env.step(xml)[0][0]["content"]
        assert (
            env.step("```py\na = 10\n```\nand\n```Python\nprint(a)\n```")[0][0]["content"].count("<tool_response>") == 2
        )

    def test_code_without_end_is_stopped_and_the_agent_told_that_its_variables_are_there(self, env):
        printed(env, "x = 1")
        said = printed(env, "while True: pass")
        assert said.endswith("Error: the code did not end within 2 seconds; its variables are kept.")
        assert printed(env, "x") == "1"

    def test_code_that_cannot_be_interrupted_costs_the_variables(self, env):
        printed(env, "x = 1")
        stubborn = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
        assert printed(env, stubborn).endswith("the session was restarted, its variables are lost.")
        assert "NameError" in printed(env, "x")

    def test_code_that_ends_the_process_is_told(self, env):
        said = printed(env, "import os\nprint('bye', flush=True)\nos._exit(3)")
        assert said == (
            "bye\nError: the code ended the Python process (exit code 3); the session was restarted, its variables are lost."
        )
        assert printed(env, "1") == "1"

    def test_a_process_that_ends_between_two_calls_is_told(self, env):
        printed(env, "x = 1")
        printed(
            env,
            "import os, time\nif os.fork() == 0:\n    time.sleep(0.3)\n    os.kill(os.getppid(), 9)\n    os._exit(0)",
        )
        time.sleep(2)
        said = printed(env, "x")
        assert "variables are lost" in said or said.endswith("without the old variables.")
        assert "NameError" in printed(env, "x")

    def test_memory_has_an_end(self, env, make, backend):
        env = make(sandbox=backend, timeout=60.0)
        said = printed(env, "x = b'x' * (1 << 30)")
        assert "more than 512 MB of memory" in said or "MemoryError" in said
        assert printed(env, "1") == "1"

    def test_output_is_cut_in_the_middle(self, env):
        said = printed(env, "print('a' * 100_000)")
        assert re.fullmatch(r"a{250}\n\[\.\.\. \d+ characters left out \.\.\.\]\na{250}", said)

    def test_there_is_no_input_and_no_network(self, env):
        assert "EOFError" in printed(env, "input()")
        assert "OSError" in printed(
            env, "import socket\ntry: socket.create_connection(('1.1.1.1', 53), 1)\nexcept OSError: print('OSError')"
        )

    def test_the_order_of_sets_does_not_differ_from_run_to_run(self, env):
        first = printed(env, "set('abcdefgh')")
        env.reset()
        assert printed(env, "set('abcdefgh')") == first

    def test_eight_turns_are_the_default(self, env, make, backend):
        env = make(sandbox=backend)
        assert [env.step(code("1"))[2:4] for _ in range(8)] == [(False, False)] * 7 + [(False, True)]


@pytest.mark.parametrize("env_id", ["math_python", "gsm8k_python"])
def test_a_step_may_take_as_long_as_its_calls(env_id):
    """Two begin in time, and the second of them just so."""
    assert Limits().step_limit(agentgym.make(env_id, timeout=100.0)) > 300


class Flaky:
    """Counts the sandboxes that are out, and breaks some calls as a dead daemon would."""

    def __init__(self, monkeypatch):
        self.out, self.taken, self.broken, self.dead = 0, 0, set(), set()
        monkeypatch.setattr("agentgym.sandbox.acquire", self.acquire)

    def acquire(self, spec, backend=None, timeout=110.0):
        self.out, self.taken = self.out + 1, self.taken + 1
        box, number, close = acquire_sandbox(spec, backend=backend, timeout=timeout), self.taken, []

        class Counted:
            spec = box.spec
            alive = property(lambda _: box.alive)

            @staticmethod
            def session(command="python"):
                if number in self.broken:
                    raise SandboxError(f"sandbox {number} is gone")
                session = box.session(command)

                class Dying:
                    alive = property(lambda _: session.alive)

                    @staticmethod
                    def run(text, timeout):
                        if number in self.dead:
                            raise SandboxError(f"sandbox {number} has died")
                        return session.run(text, timeout=timeout)

                return Dying()

            @staticmethod
            def exec(*args, **kwargs):
                return box.exec(*args, **kwargs)

            @staticmethod
            def close():
                if not close:
                    close.append(True)
                    self.out -= 1
                    box.close()

        return Counted()


@pytest.fixture
def flaky(monkeypatch):
    return Flaky(monkeypatch)


class TestSandboxes:
    def test_they_are_given_back_when_the_episode_ends_however_it_ends(self, make, flaky):
        env = make(max_turns=2)
        assert flaky.out == 1
        env.step(code("1"))
        env.step(r"\boxed{1}")
        assert flaky.out == 0  # by an answer
        env.reset()
        assert flaky.out == 1
        env.step(code("1"))
        env.step(code("1"))
        assert flaky.out == 0  # by its turns
        env.reset()
        env.step(code("1"))
        env.close()
        env.close()
        assert flaky.out == 0  # by close

    def test_one_in_which_nothing_ran_serves_the_next_episode(self, make, flaky):
        env = make()
        env.reset()
        env.reset()
        assert flaky.taken == 1
        env.step(code("1"))
        env.reset()
        assert flaky.taken == 2

    def test_one_that_fails_before_any_code_is_replaced_once(self, make, flaky):
        flaky.broken = {1}
        env = make()
        assert printed(env, "40 + 2") == "42"
        assert (flaky.taken, flaky.out) == (2, 1)
        env.close()
        flaky.broken = {3, 4}
        env = make()
        with pytest.raises(SandboxError, match="sandbox 4 is gone"):
            env.step(code("1"))

    def test_one_that_fails_later_takes_the_episode_with_it(self, make, flaky):
        env = make()
        printed(env, "x = 1")
        flaky.dead = {1}
        with pytest.raises(SandboxError, match="sandbox 1 has died"):
            env.step(code("x"))
        env.reset()
        assert printed(env, "2") == "2"
        assert (flaky.taken, flaky.out) == (2, 1)

    def test_the_agent_loop_calls_that_a_failure_and_no_reward_of_0(self, flaky):
        flaky.broken = {1, 2}
        task = own_problems("train")[0]
        ends = asyncio.run(
            run_many(
                lambda: agentgym.make("math_python"),
                lambda episode: Playing(lambda env: env.expert_action()),
                [Episode(task)],
                retries=1,
            )
        )
        assert ends[0].reward == 1.0
        assert "SandboxError: sandbox 2 is gone" in ends[0].metadata["errors"][0]
        assert flaky.out == 0

    def test_a_set_of_strings_has_the_same_order_in_every_run(self):
        assert ENVIRONMENT == {"PYTHONHASHSEED": "0"}


@pytest.fixture(scope="module")
def shared():
    env = agentgym.make("math_python", timeout=1.0, max_turns=1000)
    yield env
    env.close()


PIECES = st.sampled_from(
    ["```python\n", "\n```", "\\boxed{", "}", "<tool_call>", "</tool_call>", "<think>", "</think>", "1", "\ud800"]
)


@settings(max_examples=40, deadline=None)
@given(st.lists(PIECES | st.text(max_size=4), max_size=10).map("".join))
def test_no_reply_raises(shared, reply):
    if not shared.unwrapped.running:
        shared.reset(options={"task": problem()})
    observation, reward, _, _, info = shared.step(reply)
    json.dumps([observation, info]).encode()
    assert reward in (0.0, 1.0)
