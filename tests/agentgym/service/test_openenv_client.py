"""`openenv:URL` as an environment: against servers of the real package, against our own, and against ones that fail."""

import asyncio
import contextlib
import dataclasses
import gc
import json
import math
import subprocess

import pytest
from aiohttp import web
from openenv_envs import Counter, Sum
from openenv_package import FOREIGN, clean_environment, openenv_python, our_server, running, their_servers
from served import certificate, served

import agentgym
from agentgym.checks.check_env import CHECKS, examine
from agentgym.checks.subject import NOTE, PROBLEM
from agentgym.cli import main
from agentgym.core.messages import text_of
from agentgym.core.registration import spec
from agentgym.policies.base import ScriptedPolicy
from agentgym.rollout.episode import run_episode
from agentgym.service.client.address import Full, RemoteEnvError, SessionLost, Unavailable

slow = [pytest.mark.slow, pytest.mark.timeout(900)]


def call(*named):
    """A reply that calls tools, each (name, arguments)."""
    calls = [
        {"id": f"id{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(named)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def played(url, replies, task=None, split="train", **kwargs):
    """The trajectory of an episode; of the first task unless another is named."""

    async def play():
        env = agentgym.make(f"openenv:{url}", **kwargs)
        try:
            chosen = env.spec.tasks(split)[0] if task is None else task
            return await run_episode(env, ScriptedPolicy(replies), chosen)
        finally:
            await env.close()

    return asyncio.run(play())


def rewards(trajectory):
    return [turn.reward for turn in trajectory.turns]


def shown_in(trajectory):
    """What the environment said: the openings and answers, in order, as texts."""
    return [
        "\n".join(map(text_of, messages))
        for messages in [*(turn.observation for turn in trajectory.turns), trajectory.final_observation]
    ]


# ---- servers of the real package


@pytest.fixture(scope="module")
def servers(pytestconfig):
    with their_servers(openenv_python(pytestconfig.cache), "guess", "dial", "tools") as urls:
        yield urls


class TestTheRealPackage:
    pytestmark = slow

    def test_an_action_of_one_text_is_the_reply_or_json(self, servers):
        replies = ["<think>plum?</think> plum", '{"word": "grape"}', '```json\n{"word": "lemon"}\n```', "apple"]
        trajectory = played(servers["guess"], replies)
        assert (trajectory.end, trajectory.error) == ("terminated", None)
        assert rewards(trajectory) == [0.0, 0.0, 0.0, 1.0]
        assert trajectory.turns[-1].info == {"success": True}
        opening, *said = shown_in(trajectory)
        assert opening.startswith("Guess the fruit.")
        assert "- word (string): the word that you guess" in opening
        assert opening.endswith("It begins with a.")
        assert said == ["wrong", "wrong", "wrong", "right"]

    def test_its_task_api_gives_tasks_and_says_which_to_reset(self, servers):
        tasks = spec(f"openenv:{servers['guess']}").tasks("train")
        assert [task.id for task in tasks] == [f"guess-train-{i}" for i in range(4)]
        assert len(spec(f"openenv:{servers['guess']}").tasks("test")) == 2
        with pytest.raises(ValueError, match="has no split 'valid'; it has train, test"):
            spec(f"openenv:{servers['guess']}").tasks("valid")
        assert rewards(played(servers["guess"], ["mango"], tasks[3])) == [1.0]

    def test_a_server_without_tasks_has_seeds_that_say_all(self, servers):
        tasks = spec(f"openenv:{servers['dial']}").tasks("train")
        assert (len(tasks), tasks[7].seed) == (100_000, 7)
        openings = {shown_in(played(servers["dial"], [], tasks[seed]))[-1] for seed in (7, 7, 7)}
        assert len(openings) == 1

    def test_an_action_of_several_fields_is_json_and_what_is_none_is_told_and_takes_a_turn(self, servers):
        replies = [
            "left",
            '{"direction": "up", "clicks": 1}',
            'I go <action>{"direction": "right", "clicks": 2}</action>',
        ]
        trajectory = played(servers["dial"], replies)
        assert rewards(trajectory) == [0.0, 0.0, -0.1]
        assert [turn.info.get("invalid") for turn in trajectory.turns] == [True, True, None]
        opening, no_json, refused, moved = shown_in(trajectory)
        assert '- direction (one of "left", "right")\n- clicks (integer, at least 1, at most 9)' in opening
        assert no_json.startswith("Error: 'left' is no action. Answer with a JSON object")
        assert refused == "Error: direction: Input should be 'left' or 'right'"
        assert moved.startswith("position: 2\ngoal: ")

    def test_an_action_may_be_a_call_of_the_one_tool_that_takes_it(self, servers):
        trajectory = played(servers["dial"], [call(("act", {"direction": "left", "clicks": 1}))], actions="tool")
        assert rewards(trajectory) == [-0.1]
        [message] = trajectory.final_observation
        assert (message["role"], message["tool_call_id"]) == ("tool", "id0")

    def test_tools_of_mcp_are_tools_here(self, servers):
        replies = [
            call(("add", {"number": 4}), ("fail", {})),
            call(("nope", {})),
            call(("add", {"number": "x"})),
            call(("add", {"number": 8}), ("add", {"number": 1})),
        ]
        trajectory = played(servers["tools"], replies)
        assert (trajectory.end, trajectory.error) == ("terminated", None)
        assert rewards(trajectory) == [0.0, 0.0, 0.0, 1.0]
        answers = [[text_of(m) for m in turn.observation] for turn in trajectory.turns[1:]]
        assert answers[0] == ["4", "Error: Error calling tool 'fail': it fails"]
        assert answers[1] == ["Error: there is no tool 'nope'; the tools are: add, fail; no tool was called"]
        assert answers[2][0].startswith("Error: 1 validation error")
        assert [text_of(m) for m in trajectory.final_observation] == [
            "12",
            "Error: the episode was over, and this tool was not called",
        ]

    def test_a_reply_that_calls_no_tool_ends_the_episode(self, servers):
        trajectory = played(servers["tools"], [call(("add", {"number": 1})), "I am done."])
        assert (trajectory.end, rewards(trajectory)) == ("terminated", [0.0, 0.0])

    def test_an_environment_that_raises_fails_its_episode_and_the_next_goes_on(self, servers):
        assert "the environment failed: the fruit is rotten" in played(servers["guess"], ["fail"]).error

        async def next_one():
            env = agentgym.make(f"openenv:{servers['guess']}")
            await env.reset(seed=1)
            with pytest.raises(RemoteEnvError, match="the fruit is rotten"):
                await env.step("fail")
            await env.reset(options={"task": env.spec.tasks("train")[2]})
            result = await env.step("lemon")
            await env.close()
            return result[1]

        assert asyncio.run(next_one()) == 1.0

    def test_no_answer_in_time_loses_the_episode_and_says_so(self, servers):
        async def slow_step():
            env = agentgym.make(f"openenv:{servers['guess']}", timeout=0.3)
            await env.reset(seed=1)
            with pytest.raises(SessionLost, match=r"no answer to step within 0\.3 s; the episode is lost"):
                await env.step("sleep")
            with pytest.raises(RuntimeError, match="no episode is running"):
                await env.step("apple")
            await env.close()

        asyncio.run(slow_step())

    def test_a_full_server_is_waited_for(self, servers):
        async def three():
            envs = [agentgym.make(f"openenv:{servers['dial']}", patience=30.0) for _ in range(3)]
            await envs[0].reset(seed=1)
            await envs[1].reset(seed=1)
            impatient = agentgym.make(f"openenv:{servers['dial']}", patience=0.0)
            with pytest.raises(
                Unavailable, match=r"CAPACITY_REACHED.*no session became free within 0 s: run fewer episodes"
            ):
                await impatient.reset(seed=1)
            waiting = asyncio.create_task(envs[2].reset(seed=1))
            await envs[0].close()
            observation, _ = await waiting
            for env in [*envs, impatient]:
                await env.close()
            return observation

        assert asyncio.run(three())

    def test_half_a_surrogate_pair_is_a_question_mark_there_and_no_error(self, servers):
        assert shown_in(played(servers["guess"], ["\ud83d"]))[-1] == "wrong"

    def test_an_action_that_is_too_large_for_the_server_loses_the_episode_and_says_so(self, servers):
        async def play():
            env = agentgym.make(f"openenv:{servers['guess']}")
            await env.reset(seed=1)
            with pytest.raises(SessionLost, match=r"the connection ended during step .* reset begins another"):
                await env.step("x" * (20 << 20))
            await env.reset(seed=1)
            result = await env.step("plum")
            await env.close()
            return result[1]

        assert asyncio.run(play()) == 0.0


@pytest.fixture(scope="module")
def sample(pytestconfig, tmp_path_factory):
    """The environment that `openenv init` begins with, which echoes; its URL. One session is its default, and seldom enough."""
    python, folder = openenv_python(pytestconfig.cache), tmp_path_factory.mktemp("sample")
    command = [python.with_name("openenv"), "init", "my_echo", "--output-dir", folder]
    subprocess.run(command, check=True, capture_output=True, timeout=120, env=clean_environment())
    app = folder / "my_echo/server/app.py"
    app.write_text(app.read_text().replace("max_concurrent_envs=1,", "max_concurrent_envs=8,"))
    with running(python, FOREIGN / "serve_folder.py", folder / "my_echo") as port:
        yield f"openenv:http://127.0.0.1:{port}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_environment_of_openenv_init_passes_our_check(sample, capsys):
    assert main(["check", sample, "--json"]) == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_environment_of_openenv_init_is_evaluated_by_its_url_alone(sample, capsys, tmp_path):
    answers = tmp_path / "answers.txt"
    answers.write_text("hello\nhello you there\n")
    words = ["--script", str(answers), "-n", "5", "--max-turns", "2", "--out", str(tmp_path / "run"), "--json"]
    assert main(["eval", sample, *words]) == 0
    (cell,) = json.loads(capsys.readouterr().out)["cells"]
    assert (cell["episodes"], cell["errors"]) == (5, 0)
    assert cell["reward"] == pytest.approx(1.5)  # a tenth for each letter, at most 1 for an echo
    assert main(["check", "openenv:http://127.0.0.1:1"]) == 1
    assert "openenv:http://127.0.0.1:1: cannot be reached" in capsys.readouterr().out


# ---- our own server


@pytest.fixture(scope="module")
def ours():
    with our_server("openenv_envs:Sum", "openenv_envs:Counter") as url:
        yield url


def local(env, task, replies):
    return asyncio.run(run_episode(env, ScriptedPolicy(replies), task, seed=3))


@pytest.mark.parametrize(
    ("kind", "replies"),
    [
        (Sum, ["1", " 0 ", "0"]),
        (Sum, ["x", "y", "z", "w"]),
        (Counter, [call(("add", {"number": 1}), ("total_of", {})), "well", call(("add", {"number": 2}))]),
    ],
)
def test_messages_rewards_and_ends_are_those_of_the_environment_itself(ours, kind, replies):
    url = f"{ours}/openenv_envs:{kind.__name__}"

    async def play():
        env = agentgym.make(f"openenv:{url}")
        trajectory = await run_episode(env, ScriptedPolicy(replies), env.spec.tasks("train")[0], seed=3)
        tools = env.tools
        await env.close()
        return trajectory, tools

    there, tools = asyncio.run(play())
    here = local(kind(), kind.default_tasks()[0], replies)
    assert tools == kind().tools
    assert (there.end, there.error) == (here.end, None)
    assert shown_in(there) == shown_in(here)
    assert [(turn.reward, turn.info) for turn in there.turns] == [(turn.reward, turn.info) for turn in here.turns]


def test_an_episode_belongs_to_its_event_loop_and_the_next_may_begin_in_another(ours, caplog):
    env = agentgym.make(f"openenv:{ours}/openenv_envs:Sum")
    task = env.spec.tasks("train")[1]
    asyncio.run(env.reset(options={"task": task}))

    async def another():
        with pytest.raises(SessionLost, match="the episode began in another event loop: begin another in this one"):
            await env.step("2")
        await env.reset(options={"task": task})
        result = await env.step("2")
        await env.close()
        return result[1]

    assert asyncio.run(another()) == 1.0
    gc.collect()
    assert not caplog.records, "nothing was left open"


def test_a_token_and_a_certificate_of_ones_own(tmp_path):
    tls, token = certificate(tmp_path), tmp_path / "token"
    cert = tls["cert"]
    token.write_text("a-token-of-16-letters\n")

    async def reward(**kwargs):
        env = agentgym.make(f"openenv:{server.url}", **kwargs)
        try:
            tasks = await asyncio.to_thread(env.spec.tasks, "train")
            await env.reset(options={"task": tasks[2]})
            return (await env.step("4"))[1]
        finally:
            await env.close()

    with served("openenv_envs:Sum", tokens={"t": token.read_text().strip()}, **tls) as server:
        assert asyncio.run(reward(token_file=str(token), ca_file=cert)) == 1.0
        with pytest.raises(Unavailable, match=r"CERTIFICATE_VERIFY_FAILED.*: a certificate of your own needs ca_file="):
            asyncio.run(reward(token_file=str(token)))
        with pytest.raises(Unavailable, match="it wants a token, or another than this: token_file="):
            asyncio.run(reward(ca_file=cert))
        bare, task = agentgym.make(f"openenv:{server.url}", ca_file=cert), agentgym.Task("any", seed=1)
        with pytest.raises(Unavailable, match="status 401; it wants a token, or another than this: token_file="):
            asyncio.run(bare.reset(options={"task": task}))


def test_a_server_of_one_session_is_checked_as_far_as_that_goes():
    with served("openenv_envs:Sum", max_sessions=1) as server:
        given = spec(f"openenv:{server.url}")
        found = examine(dataclasses.replace(given, kwargs={**given.kwargs, "patience": 0.3}))
        with pytest.raises(Full, match="all 1 sessions are in use"):
            asyncio.run(hold_two(given))
    assert [str(finding) for finding in found if finding.state == PROBLEM] == []
    notes = {finding.check: finding.text for finding in found if finding.state == NOTE}
    assert "the server allows no second session beside this one: openenv:http://" in notes["concurrency"]
    assert "the server allows no second session" in notes["other process"]
    assert {finding.check for finding in found} == set(CHECKS)


async def hold_two(given):
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(2):
            env = given.make(patience=0.1)
            stack.push_async_callback(env.close)
            await env.reset(seed=1)


# ---- servers that fail: doubles, each with one fault


@contextlib.asynccontextmanager
async def faulty(on_frame, schemas=(), listing=404):
    """A server that answers each frame with what `on_frame(socket, frame)` sends, its first schemas with `schemas`, and those
    who ask for its environments with the status `listing`."""
    first = list(schemas)

    async def socket(request):
        made = web.WebSocketResponse()
        await made.prepare(request)
        async for message in made:
            await on_frame(made, json.loads(message.data))
        return made

    async def schema(_):
        if first:
            return first.pop(0)
        return web.json_response({"action": {"properties": {"word": {"type": "string"}}, "required": ["word"]}})

    app = web.Application()
    app.router.add_get("/ws", socket)

    async def environments(_):
        return web.Response(status=listing)

    app.router.add_get("/schema", schema)
    app.router.add_get("/list_environments", environments)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def well(socket, frame):
    seen = {"observation": {"text": "seen"}, "reward": None, "done": False}
    mcp = {"jsonrpc": "2.0", "id": 0, "error": {"code": -32603, "message": "Environment does not support MCP"}}
    kind = {"mcp": "mcp"}.get(frame["type"], "observation")
    if frame["type"] != "close":
        await socket.send_json({"type": kind, "data": mcp if kind == "mcp" else seen})


def test_a_dropped_connection_loses_the_episode_and_the_next_reset_connects_again():
    async def drop(socket, frame):
        if frame.get("data") == {"word": "drop"}:
            await socket.close()
        else:
            await well(socket, frame)

    async def play():
        async with faulty(drop) as url:
            env = agentgym.make(f"openenv:{url}")
            await env.reset(seed=1)
            with pytest.raises(SessionLost, match=r"the connection ended during step .* reset begins another"):
                await env.step("drop")
            await env.reset(seed=1)
            observation, *_ = await env.step("stay")
            await env.close()
            return observation

    assert text_of(asyncio.run(play())[0]) == "seen"


def test_what_an_environment_tells_may_have_any_keys():
    told = {"reward": 9.0, "terminated": False, "observation": "x", "step": 1}

    async def end(socket, frame):
        if frame["type"] == "step":
            data = {"observation": {"text": "seen", "metadata": told}, "reward": 1.0, "done": True}
            await socket.send_json({"type": "observation", "data": data})
        else:
            await well(socket, frame)

    async def play():
        async with faulty(end) as url:
            env = agentgym.make(f"openenv:{url}")
            await env.reset(seed=1)
            _, *outcome = await env.step("stay")
            await env.close()
            return outcome

    assert asyncio.run(play()) == [1.0, True, False, told]


def test_a_schema_that_did_not_come_is_asked_for_again():
    schemas = [web.Response(status=500)]

    async def play():
        async with faulty(well, schemas) as url:
            env = agentgym.make(f"openenv:{url}")
            with pytest.raises(Unavailable, match=r"no OpenEnv server: GET http://.*/schema tells no schemas"):
                await env.reset(seed=1)
            await env.reset(seed=1)
            observation, *_ = await env.step("x")
            await env.close()
            return observation

    assert text_of(asyncio.run(play())[0]) == "seen"


@pytest.mark.parametrize(("status", "given"), [(404, True), (501, True), (500, False), (503, False)])
def test_a_server_that_fails_to_list_its_tasks_is_not_given_others(status, given):
    async def play():
        async with faulty(well, listing=status) as url:
            if given:
                return len(await asyncio.to_thread(spec(f"openenv:{url}").tasks, "train"))
            with pytest.raises(Unavailable, match=f"/list_environments answers with status {status}"):
                await asyncio.to_thread(spec(f"openenv:{url}").tasks, "train")
            return None

    assert asyncio.run(play()) == (100_000 if given else None)


def test_an_answer_that_is_no_frame_is_told():
    async def babble(socket, frame):
        if frame["type"] == "step":
            await socket.send_str("babble")
        else:
            await well(socket, frame)

    async def play():
        async with faulty(babble) as url:
            env = agentgym.make(f"openenv:{url}")
            await env.reset(seed=1)
            with pytest.raises(SessionLost, match="no OpenEnv frame: 'babble'"):
                await env.step("x")
            await env.close()

    asyncio.run(play())


def test_nobody_there_is_told():
    with pytest.raises(Unavailable, match=r"openenv:http://127\.0\.0\.1:1: cannot be reached"):
        asyncio.run(agentgym.make("openenv:http://127.0.0.1:1").reset(options={"task": agentgym.Task("t")}))
    with pytest.raises(Unavailable, match="cannot be reached"):
        spec("openenv:http://127.0.0.1:1").tasks("train")


@pytest.mark.parametrize("setting", [{"patience": math.nan}, {"patience": -1}, {"timeout": math.nan}, {"timeout": 0}])
def test_a_time_that_is_none_is_refused(setting):
    with pytest.raises(ValueError, match="timeout must be positive and patience at least 0"):
        agentgym.make("openenv:http://127.0.0.1:1", **setting)


@pytest.mark.parametrize("name", ["127.0.0.1:8000", "ftp://host", "http://", "http://u:p@host", "http://host?x=1"])
def test_a_wrong_address_is_refused(name):
    with pytest.raises(ValueError, match=r"bad address|must not hold a secret"):
        agentgym.make(f"openenv:{name}")
