"""Agents that play whole episodes by themselves: what they do to the environment, the turns of their calls, and how they end."""

import asyncio
import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import aiohttp
import pytest
from agent_cases import RELEASED, TASK, Broken, Counting, Talking, call_of, gateway_of, played
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from toy_model import ToyModel

from agentgym.agents import play
from agentgym.agents.play import AgentPolicy, play_agent
from agentgym.agents.programs import Left, agent_of, plays_episodes
from agentgym.core.messages import text_of, user
from agentgym.core.trajectory import Trajectory
from agentgym.gateway import Refused, Settings
from agentgym.rollout.episode import Limits


def said(trajectory):
    return [step["action"].get("content") or step["action"]["tool_calls"] for step in trajectory.metadata["steps"]]


def exact(trajectory, model):
    """Asserts that the turns' tokens are those that the model's own log has."""
    turns = [(turn.tokens.prompt_ids, turn.tokens.completion_ids) for turn in trajectory.turns]
    assert sorted(turns) == sorted((prompt, ids) for _, prompt, ids in model.log)


def test_an_agent_s_calls_are_the_turns_and_rewards_are_at_the_last_call_before_them(tmp_path):
    model = ToyModel()
    trajectory = played("agent_cases:counts", tmp_path, model=model)
    exact(trajectory, model)
    assert [turn.reward for turn in trajectory.turns] == [0, 0, 1, 0.5]
    assert (trajectory.end, trajectory.reward, trajectory.metrics["success"]) == ("terminated", 1.5, 1.0)
    assert said(trajectory) == [call_of()["tool_calls"]] * 3 + ["done"]
    assert [step["turn"] for step in trajectory.metadata["steps"]] == [0, 1, 2, 3]
    assert trajectory.turns[0].observation == [user("count to three")]
    assert trajectory.turns[1].observation == [user("count 1")]
    assert trajectory.turns[-1].info["said"] == "done"
    share = trajectory.metadata["agent"]["share"]
    assert share["trainable"] == share["sampled"] == trajectory.sampled_tokens > 0


def test_a_plain_function_plays_in_a_thread(tmp_path):
    trajectory = played("agent_cases:counts_in_a_thread", tmp_path)
    assert (trajectory.end, trajectory.turns[-1].info["said"]) == ("terminated", "done")


def test_an_agent_may_ask_on_once_the_episode_is_over(tmp_path):
    trajectory = played("agent_cases:counts_on", tmp_path)
    assert (trajectory.end, trajectory.reward, len(trajectory.turns)) == ("terminated", 1.0, 6)
    assert trajectory.turns[-1].observation == [user("what was that?")]
    assert "raised" not in trajectory.metadata["agent"]


def test_a_trajectory_with_branches_is_stored_and_read_again(tmp_path):
    model = ToyModel()
    settings = Settings("mask", temperature=1.0)
    trajectory = played("agent_cases:branches", tmp_path, model=model, settings=settings)
    exact(trajectory, model)
    assert [turn.unusable for turn in trajectory.turns] == [None, None, "top_p", None, None, None]
    share = trajectory.metadata["agent"]["share"]
    assert (
        sum(turn.trained for turn in trajectory.turns)
        == share["trainable"]
        == share["sampled"] - share["lost"]["top_p"]
    )
    stored = json.loads(json.dumps(trajectory.to_json()))
    assert Trajectory.from_json(stored) == trajectory
    assert [turn["tokens"].get("of") for turn in stored["turns"]] == [None, None, None, None, None, 0]
    assert stored["turns"][5]["tokens"]["shared"] == len(
        [*trajectory.turns[0].tokens.prompt_ids, *trajectory.turns[0].tokens.completion_ids]
    )


def test_an_agent_that_leaves_early_is_judged_as_it_is(tmp_path):
    trajectory = played("agent_cases:leaves", tmp_path)
    assert (trajectory.end, trajectory.reward, trajectory.error) == ("agent", 0.5, None)
    assert trajectory.turns[-1].info == {"success": True, "judged": "agent"}, "without calls its actions are the turns"


def test_an_agent_that_raises_has_failed_the_episode(tmp_path):
    trajectory = played("agent_cases:raises", tmp_path)
    assert (trajectory.end, trajectory.reward, trajectory.agent_failure) == ("terminated", -1.0, "agent_failed")
    assert trajectory.metadata["agent"]["raised"] == "LookupError: I am lost"
    assert "agent_cases.py" in trajectory.metadata["agent"]["traceback"]


def test_an_agent_that_ends_by_a_cancelled_task_of_its_own_has_failed_too(tmp_path):
    trajectory = played("agent_cases:cancels_its_own_task", tmp_path)
    assert (trajectory.end, trajectory.agent_failure, trajectory.error) == ("terminated", "agent_failed", None)
    assert trajectory.metadata["agent"]["raised"] == "CancelledError: the agent cancelled itself"


def test_an_object_with_an_async_call_plays_in_the_event_loop(tmp_path):
    trajectory = played("agent_cases:steps", tmp_path)
    assert (trajectory.end, trajectory.turns[-1].info["said"]) == ("terminated", "done")


def test_a_plain_function_that_returns_a_coroutine_is_told_to_be_async(tmp_path):
    trajectory = played("agent_cases:returns_a_coroutine", tmp_path)
    assert trajectory.agent_failure == "agent_failed"
    raised = trajectory.metadata["agent"]["raised"]
    assert raised.endswith("'agent_cases:returns_a_coroutine' is a def that returns a coroutine: make it an async def")


def test_an_engine_or_an_environment_that_fails_is_an_error_and_not_the_agent_s(tmp_path):
    class Dying(ToyModel):
        async def answer(self, call, episode, told):
            if len(self.log) == 1:
                raise Refused(502, "the engine is gone", "engine")
            return await super().answer(call, episode, told)

    trajectory = played("agent_cases:counts", tmp_path / "engine", model=Dying())
    assert trajectory.failed
    assert "the engine is gone" in trajectory.error
    assert len(trajectory.turns) == 1, "what was sampled before is there"
    trajectory = played("agent_cases:counts", tmp_path / "env", env=Broken)
    assert trajectory.failed
    assert "the disk is gone" in trajectory.error


@pytest.mark.parametrize(
    ("limits", "end"), [(Limits(max_turns=3), "max_turns"), (Limits(tokens=200), "tokens")], ids=["turns", "tokens"]
)
def test_limits_are_those_of_the_agent_s_calls_and_what_they_cut_off_is_incomplete(tmp_path, limits, end):
    trajectory = played("agent_cases:asks_forever", tmp_path, limits=limits)
    assert (trajectory.end, trajectory.reward, trajectory.agent_failure) == (end, 0.5, None)
    assert {turn.unusable for turn in trajectory.turns} == {"incomplete episode"}
    assert trajectory.metadata["agent"]["share"]["trainable"] == 0
    if limits.max_turns:
        assert len(trajectory.turns) == 3
        kept = played("agent_cases:asks_forever", tmp_path / "kept", limits=limits, incomplete=True)
        assert [turn.unusable for turn in kept.turns] == [None] * 3


def test_an_agent_that_fills_the_model_s_context_is_judged_and_complete(tmp_path):
    trajectory = played("agent_cases:grows", tmp_path, model=ToyModel(context=400))
    assert (trajectory.end, trajectory.reward, trajectory.agent_failure) == ("context", 0.5, None)
    assert {turn.unusable for turn in trajectory.turns} == {None}


def test_an_agent_that_takes_too_long_is_stopped(tmp_path):
    trajectory = played("agent_cases:hangs", tmp_path, limits=Limits(episode_timeout=1.0))
    assert (trajectory.end, trajectory.reward) == ("time", 0.5)
    assert trajectory.metadata["agent"]["killed"]
    assert trajectory.turns[0].unusable == "incomplete episode"


def test_without_a_limit_of_its_own_an_episode_has_an_hour(tmp_path, monkeypatch):
    assert play.EPISODE_SECONDS == 3600
    monkeypatch.setattr(play, "EPISODE_SECONDS", 1.0)
    assert played("agent_cases:hangs", tmp_path).end == "time"


class Stuck(ToyModel):
    """It never answers."""

    cancelled = False

    async def answer(self, *_):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


def test_the_call_of_an_agent_that_was_killed_is_cancelled(tmp_path):
    model, began = Stuck(), time.monotonic()
    trajectory = played("agent_cases:counts", tmp_path, model=model, limits=Limits(episode_timeout=1.0))
    assert (trajectory.end, model.cancelled) == ("time", True)
    assert time.monotonic() - began < 30


def test_one_that_does_not_let_itself_be_stopped_is_left_alone(tmp_path):
    async def scene():
        async with gateway_of(tmp_path) as gateway:
            policy = AgentPolicy(agent_of("agent_cases:obeys_nobody"), gateway, seed=0)
            playing = asyncio.create_task(play_agent(Counting(), policy, TASK, limits=Limits(episode_timeout=0.2)))
            done, _ = await asyncio.wait({playing}, timeout=30)
            RELEASED.set()
            return done and playing.result().end

    assert asyncio.run(scene()) == "time"


def test_one_that_stays_when_the_episode_is_over_is_stopped_too(tmp_path, monkeypatch):
    monkeypatch.setattr("agentgym.agents.play.LEAVE_SECONDS", 0.2)
    trajectory = played("agent_cases:stays", tmp_path)
    assert (trajectory.end, trajectory.reward, trajectory.metadata["agent"]["killed"]) == ("terminated", 1.0, True)


# ---- commands


def script(folder, text):
    folder.mkdir(exist_ok=True)
    file = folder / "agent.py"
    file.write_text(text)
    return f"command:{sys.executable} {file}"


def test_a_command_gets_its_task_in_four_ways_and_answers_on_its_standard_output(tmp_path):
    line = script(
        tmp_path,
        "import os, sys\n"
        "assert sys.stdin.read() == os.environ['AGENTGYM_TASK'] == sys.argv[1] == 'count to three'\n"
        "assert not os.listdir() and os.getcwd() == sys.argv[3] and os.environ['HOME'] != os.getcwd()\n"
        "assert sys.argv[2] == os.environ['OPENAI_BASE_URL'] and sys.argv[4] == '{\"a\": {b}}'\n"
        "print('done')\n",
    )
    trajectory = played(f"{line} {{task}} {{base_url}} {{folder}} '{{\"a\": {{b}}}}'", tmp_path)
    assert trajectory.metadata["agent"].get("stderr", "") == ""
    assert (trajectory.reward, trajectory.end, trajectory.metadata["agent"]["exit_code"]) == (0.5, "terminated", 0)


class Long(Talking):
    """Its opening has more bytes than a word or a variable of a program can have."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return [user("é" * 70_000)], {}


def test_a_task_that_is_too_long_for_a_variable_comes_on_standard_input_alone(tmp_path):
    text = (
        "import os, sys\nassert sys.stdin.read() == 'é' * 70_000 and 'AGENTGYM_TASK' not in os.environ\nprint('stop')\n"
    )
    line = script(tmp_path, text)
    trajectory = played(line, tmp_path / "read", env=Long)
    assert (trajectory.error, trajectory.metadata["agent"]["exit_code"]) == (None, 0)
    trajectory = played(f"{line} {{task}}", tmp_path / "word", env=Long)
    assert "would have 140,000 bytes, more than a program can be started with" in trajectory.error


def test_others_play_on_while_the_folder_of_a_command_is_removed(tmp_path, monkeypatch):
    """As long as that of one that has left very many files."""
    threads = []
    monkeypatch.setattr(shutil, "rmtree", lambda *_: threads.append(threading.current_thread()))
    played(script(tmp_path, "print('done')\n"), tmp_path)
    assert threads
    assert threading.main_thread() not in threads


def test_a_command_that_exits_with_an_error_has_failed(tmp_path):
    trajectory = played(script(tmp_path, "import sys\nprint('half')\nsys.exit('no idea')\n"), tmp_path)
    assert (trajectory.agent_failure, trajectory.reward) == ("agent_failed", -1.0)
    about = trajectory.metadata["agent"]
    assert (about["exit_code"], about["stderr"].strip(), about["output"]) == (1, "no idea", "half")


def test_a_command_that_is_stopped_ends_with_all_that_it_started(tmp_path):
    line = script(
        tmp_path,
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'], start_new_session=True)\n"
        "open(sys.argv[1], 'w').write(str(child.pid))\n"
        "time.sleep(100)\n",
    )
    trajectory = played(f"{line} {tmp_path}/pid", tmp_path, limits=Limits(episode_timeout=5.0))
    assert trajectory.end == "time"
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("command:no-such-program now", "there is no program 'no-such-program'"),
        ("command:", "there is no program"),
        ("command:'open", "No closing quotation"),
        ("agent_cases:nobody", "has no 'nobody'"),
        ("agent_cases:ask", "must take one argument"),
        ("agent_cases:COUNT", "a function of an episode is needed"),
    ],
)
def test_what_cannot_play_is_refused_before_anything_starts(text, why):
    with pytest.raises(ValueError, match=why):
        agent_of(text)


def test_a_function_of_an_episode_is_known_by_its_first_parameter():
    assert plays_episodes("agent_cases:counts")
    assert plays_episodes("agent_cases:deeper"), "the others have defaults"
    assert not plays_episodes("agent_cases:played"), "a function of something else"


def test_the_example_with_openai_s_sdk_plays_as_a_command_and_as_a_function(tmp_path):
    folder = Path(__file__).parents[3] / "examples/agents"
    sys.path.insert(0, str(folder))
    for number, agent in enumerate([f"command:{sys.executable} {folder}/openai_sdk.py", "openai_sdk:play"]):
        model = ToyModel()
        trajectory = played(agent, tmp_path / str(number), Talking, model, Limits(max_turns=4))
        exact(trajectory, model)
        replies = [turn.reply["content"] for turn in trajectory.turns]
        assert [step["action"]["content"] for step in trajectory.metadata["steps"]][:4] == replies
        assert trajectory.turns[1].observation[-1] == user(f"heard {replies[0]}")
        assert (trajectory.end, len(replies)) == ("max_turns", 4)


# ---- the environment's tools by MCP


class Plays:
    """An agent that is a function of this test."""

    def __init__(self, play):
        self.play = play

    async def run(self, episode):
        await self.play(episode)
        return Left()


def with_mcp(use):
    """An agent that uses the official client of the protocol."""

    async def plays(episode):
        async with (
            create_mcp_http_client(headers={"Authorization": f"Bearer {episode.key}"}) as http,
            Client(streamable_http_client(episode.mcp_url, http_client=http)) as client,
        ):
            await use(client)

    return Plays(plays)


def test_the_environment_s_tools_are_reached_by_mcp(tmp_path):
    seen = []

    async def use(client):
        seen.extend((await client.list_tools()).tools)
        for _ in range(6):
            result = await client.call_tool("count", {})
            seen.append(result.content[0].text)

    trajectory = played(with_mcp(use), tmp_path)
    assert seen[0].name == "count"
    assert seen[1:] == [
        "count 1",
        "count 2",
        "count 3",
        "count 4",
        "count 5\n\nThe episode is over.",
        "The episode is over.",
    ]
    assert (trajectory.end, trajectory.reward) == ("terminated", 1.0)


def test_an_environment_without_tools_is_spoken_to(tmp_path):
    heard = []

    async def use(client):
        assert [tool.name for tool in (await client.list_tools()).tools] == ["act"]
        for word in ("hello", "stop"):
            heard.append((await client.call_tool("act", {"text": word})).content[0].text)

    trajectory = played(with_mcp(use), tmp_path, env=Talking)
    assert heard == ["heard hello", "heard stop\n\nThe episode is over."]
    assert [text_of(turn.reply) for turn in trajectory.turns] == ["hello", "stop"]


def test_a_tool_that_is_not_there_and_an_unknown_method_are_errors_of_the_protocol(tmp_path):
    answers = []

    async def run(episode):
        async with aiohttp.ClientSession(headers={"x-api-key": episode.key}) as http:
            calls = (("tools/call", {"name": "fly"}), ("tools/call", [1]), ("resources/list", {}), ("ping", {}))
            for method, params in calls:
                async with http.post(
                    episode.mcp_url, json={"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
                ) as answer:
                    answers.append(await answer.json())
            async with http.get(episode.mcp_url) as answer:
                answers.append(answer.status)
            async with http.post(episode.mcp_url, headers={"x-api-key": "ag-another"}, json={}) as answer:
                answers.append(answer.status)

    played(Plays(run), tmp_path)
    assert [answer["error"]["code"] for answer in answers[:3]] == [-32602, -32602, -32601]
    assert (answers[3]["result"], *answers[4:]) == ({}, 405, 401)
