"""MCP servers as tool sources, over stdio and over HTTP: real servers that work, fail, hang, flood and die."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from agentgym.core.env import Env
from agentgym.core.messages import assistant
from agentgym.core.tasks import Task
from agentgym.policies.base import ScriptedPolicy
from agentgym.rollout.episode import run_episode
from agentgym.tools.mcp import LONGEST_LINE, McpServerError, McpTools, _event_loop, _McpConnection
from agentgym.tools.toolset import ToolSet, tool

pytest.importorskip("mcp")

SERVER = [sys.executable, str(Path(__file__).with_name("mcp_servers.py"))]
KINDS = ("stdio", "http")


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid, seconds=10):
    until = time.monotonic() + seconds
    while running(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not running(pid)


class HttpServer:
    """A server process on a free port of the loopback."""

    def __init__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/mcp"
        self.start()

    def start(self):
        self.process = subprocess.Popen([*SERVER, str(self.port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                urllib.request.urlopen(self.url, timeout=5)
            except urllib.error.HTTPError:
                return  # it answers; it only does not like the question
            except OSError:
                time.sleep(0.05)
        raise RuntimeError("the HTTP server did not start")

    def stop(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def http():
    server = HttpServer()
    yield server
    server.stop()


def connect(kind, http, **settings):
    return McpTools(url=http.url, **settings) if kind == "http" else McpTools(SERVER, **settings)


@pytest.fixture(scope="module", params=KINDS)
def server(request, http):
    with connect(request.param, http, timeout=20.0, max_output=1000) as tools:
        yield tools


@pytest.fixture(scope="module")
def tools(server):
    return ToolSet(server)


class TestTools:
    def test_schemas_are_the_servers(self, tools):
        schema = tools["mix"].schema
        assert schema["type"] == "function"
        assert schema["function"]["description"].startswith("Give back what came.")
        parameters = schema["function"]["parameters"]
        assert parameters["required"] == ["text", "whole"]
        assert {k: v.get("type") for k, v in parameters["properties"].items()} == {
            "text": "string",
            "whole": "integer",
            "number": "number",
            "flag": "boolean",
            "kind": "string",
            "items": None,
            "table": None,
        }

    def test_every_kind_of_argument_arrives(self, tools):
        arguments = {
            "text": "é漢🙂\n\x00",
            "whole": -3,
            "number": 1e-9,
            "flag": True,
            "kind": "b",
            "items": [1, 2],
            "table": {"a": {"b": [None]}},
        }
        assert json.loads(tools.call("mix", arguments)) == arguments

    @pytest.mark.parametrize("written", ['"\\ud83d"', "[" * 300 + "]" * 300], ids=["half a pair", "deep"])
    def test_arguments_that_no_message_can_hold_are_told_and_the_server_goes_on(self, tools, written):
        call = f'<tool_call>{{"name": "mix", "arguments": {{"text": {written}, "whole": 1}}}}</tool_call>'
        assert "Error: mix: the arguments cannot be sent" in tools.answer(assistant(call))[0]["content"]
        assert '"text": "a"' in tools.call("mix", {"text": "a", "whole": 1})

    def test_calls_in_a_message_are_answered_like_those_of_other_tools(self, tools):
        call = "<tool_call><function=mix><parameter=text>5</parameter><parameter=whole>5</parameter></function></tool_call>"
        assert '"text": "5"' in tools.answer(assistant(call))[0]["content"]

    @pytest.mark.parametrize(
        ("name", "arguments", "says"),
        [
            ("mix", {"text": "a"}, 'Error: mix: the argument "whole" is missing; the arguments are: text, whole'),
            ("mix", {"text": "a", "whole": 1, "x": 1}, 'Error: mix: there is no argument "x"; the arguments are: text'),
            ("mix", {"text": "a", "whole": "many"}, "valid integer"),
            ("mix", {"text": "a", "whole": 1, "kind": "c"}, "'a' or 'b'"),
            ("nowhere", {}, "Error: there is no tool 'nowhere'; the tools are: mix, note"),
            ("fail", {"why": "the moon is full, é"}, "the moon is full, é"),
        ],
    )
    def test_what_is_wrong_with_a_call_is_an_answer(self, tools, name, arguments, says):
        answer = tools.call(name, arguments)
        assert answer.startswith("Error: ")
        assert says in answer

    def test_results_that_are_no_text_are_described(self, tools):
        assert tools.call("picture", {}) == "here:\n[image, image/png, 6 bytes]"
        assert tools.call("nothing", {}) == '{"result": null}'

    def test_a_long_result_is_cut_in_the_middle(self, tools):
        answer = tools.call("long", {"characters": 100_000})
        assert answer == "x" * 500 + "\n[... 99000 characters left out ...]\n" + "x" * 499 + "y"

    def test_state_is_kept_from_call_to_call(self, server, tools):
        first = tools.call("note", {"text": "one"})
        assert tools.call("note", {"text": "two"}) == f"{first},two"

    def test_many_threads_may_call_at_once(self, tools):
        answers = {}

        def ask(n):
            answers[n] = tools.call("mix", {"text": f"<{n}>", "whole": n})

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert all(f'"<{n}>"' in answers[n] for n in range(20))

    def test_they_mix_with_tools_of_ones_own(self, server):
        @tool
        def mine(x: int) -> int:
            """Mine."""
            return x

        assert {"mine", "mix"} <= {item.name for item in ToolSet([mine, *server])}


@pytest.mark.parametrize("kind", KINDS)
class TestTrouble:
    def test_a_slow_tool_is_an_answer_and_the_server_goes_on(self, kind, http):
        with connect(kind, http, timeout=0.5) as server:
            tools = ToolSet(server)
            assert tools.call("slow", {"seconds": 3.0}) == "Error: slow: no result within 0.5 s; the call was given up"
            assert tools.call("slow", {"seconds": 0.0}) == "awake"

    def test_a_server_that_blocks_is_a_failure(self, kind, http, monkeypatch):
        monkeypatch.setattr("agentgym.tools.mcp.PROBE_SECONDS", 1.0)
        own = HttpServer() if kind == "http" else None
        try:
            with connect(kind, own, timeout=0.5) as server:
                tools = ToolSet(server)
                with pytest.raises(McpServerError, match=r"block \(no result within 0.5 s.*did not answer"):
                    tools.call("block", {"seconds": 30.0})
        finally:
            if own:
                own.stop()

    def test_a_server_that_dies_is_a_failure_until_it_is_closed(self, kind, http):
        own = HttpServer() if kind == "http" else None
        try:
            server = connect(kind, own, timeout=20.0)
            tools = ToolSet(server)
            tools.call("note", {"text": "one"})
            with pytest.raises(McpServerError, match="exit code 7.*my last words" if kind == "stdio" else "failed"):
                tools.call("die", {"code": 7})
            if own:
                own.stop()
                own.start()
            with pytest.raises(McpServerError, match="is gone, and its state with it"):
                tools.call("note", {"text": "two"})
            server.close()
            assert tools.call("note", {"text": "three"}) == "three"
            server.close()
        finally:
            if own:
                own.stop()

    def test_a_stateless_one_is_started_again_for_the_next_call(self, kind, http):
        own = HttpServer() if kind == "http" else None
        try:
            with connect(kind, own, timeout=20.0, stateless=True) as server:
                tools = ToolSet(server)
                with pytest.raises(McpServerError):
                    tools.call("die", {"code": 7})
                if own:
                    own.stop()
                    own.start()
                assert tools.call("note", {"text": "two"}) == "two"
        finally:
            if own:
                own.stop()

    def test_closing_twice_and_closing_what_was_never_opened_do_no_harm(self, kind, http):
        server = connect(kind, http)
        server.close()
        assert len(server.tools) > 5
        server.close()
        server.close()


class TestProcess:
    def test_close_kills_the_server_and_what_it_started(self):
        server = McpTools(SERVER)
        child, pid = map(int, server.call("start_child", {}).split())
        assert running(child)
        assert running(pid)
        server.close()
        assert gone(child)
        assert gone(pid)

    def test_a_server_killed_between_two_calls_is_found_dead_by_the_next(self):
        server = McpTools(SERVER, timeout=20.0)
        pid = int(server.call("start_child", {}).split()[1])
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(McpServerError, match="SIGKILL"):
            server.call("note", {"text": "x"})
        server.close()

    def test_one_that_nobody_closes_ends_with_its_last_reference_or_the_process(self):
        server = McpTools(SERVER)
        pid = int(server.call("start_child", {}).split()[1])
        del server
        assert gone(pid)
        code = f"from agentgym.tools.mcp import McpTools; print(McpTools({SERVER!r}).call('start_child', {{}}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        assert all(gone(int(pid)) for pid in done.stdout.split())

    def test_many_lives_of_one_server_leave_one_connection(self):
        server = McpTools(SERVER)
        for _ in range(4):
            assert len(server.tools) > 5
            server.close()
        gc.collect()
        mine = [o for o in gc.get_objects() if isinstance(o, _McpConnection) and o.name == server.name]
        assert len(mine) == 1

    def test_the_collector_may_end_one_in_the_thread_of_the_protocol(self):
        held = [McpTools(SERVER)]
        pid = int(held[0].call("start_child", {}).split()[1])
        loop, _ = _event_loop(os.getpid())
        loop.call_soon_threadsafe(held.clear)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(8)  # it is not held up for CLOSE_SECONDS
        assert gone(pid)

    def test_the_server_sees_little_of_this_environment(self, monkeypatch):
        monkeypatch.setenv("MY_API_KEY", "secret")
        with McpTools(SERVER, env={"MINE": "yes"}) as server:
            assert server.call("environment", {"name": "MY_API_KEY"}) == "(none)"
            assert server.call("environment", {"name": "MINE"}) == "yes"

    @pytest.mark.parametrize(
        ("command", "says"),
        [
            (["/nowhere/server"], "No such file"),
            ([sys.executable, "-c", "import sys; sys.exit('no config é')"], "exit code 1.*no config é"),
            ([sys.executable, "-c", "while True: print('hello')"], "lines to stdout that are no messages: .*hello"),
            (
                [sys.executable, "-c", "import sys\nwhile True: sys.stdout.write('x' * 100000)"],
                f"a line of more than {LONGEST_LINE} bytes",
            ),
            (["true"], "ended with exit code 0"),
        ],
    )
    def test_a_server_that_is_none_is_told_why(self, command, says):
        server = McpTools(command, start_timeout=60.0)
        with pytest.raises(McpServerError, match=f"(?s)cannot use the MCP server .*{says}"):
            _ = server.tools

    def test_a_server_that_says_nothing_is_given_up_and_killed(self, tmp_path):
        file = tmp_path / "pid"
        code = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
        with pytest.raises(McpServerError, match="was not ready within 3 s"):
            _ = McpTools([sys.executable, "-c", code], start_timeout=3.0).tools
        assert gone(int(file.read_text()))

    def test_a_result_that_is_far_too_long_is_a_failure(self):
        with (
            McpTools(SERVER, timeout=60.0) as server,
            pytest.raises(McpServerError, match=f"a line of more than {LONGEST_LINE} bytes"),
        ):
            server.call("long", {"characters": LONGEST_LINE + 1})

    def test_stderr_without_end_does_not_stop_the_server(self):
        code = (
            "import runpy, sys, threading\n"
            "def flood():\n"
            "    while True: sys.stderr.write('e' * 10000)\n"
            "threading.Thread(target=flood, daemon=True).start()\n"
            f"runpy.run_path({SERVER[1]!r}, run_name='__main__')\n"
        )
        with McpTools([sys.executable, "-c", code], timeout=60.0) as server:
            assert server.call("note", {"text": "through"}) == "through"

    def test_a_forked_process_gets_a_server_of_its_own(self):
        with McpTools(SERVER) as server:
            server.call("note", {"text": "parent"})
            read, write = os.pipe()
            if os.fork() == 0:
                try:
                    os.write(write, server.call("note", {"text": "child"}).encode())
                    server.close()
                finally:
                    os._exit(0)
            os.close(write)
            with os.fdopen(read) as pipe:
                assert pipe.read() == "child"
            os.wait()
            assert server.call("note", {"text": "again"}) == "parent,again"


def test_no_server_at_an_address_is_told():
    with pytest.raises(McpServerError, match=r"cannot use the MCP server http://127.0.0.1:9/mcp"):
        _ = McpTools(url="http://127.0.0.1:9/mcp").tools


def test_a_page_that_is_no_mcp_server_is_told():
    code = "import http.server as h; s = h.HTTPServer(('127.0.0.1', 0), h.SimpleHTTPRequestHandler); print(s.server_port, flush=True); s.serve_forever()"
    page = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        with pytest.raises(McpServerError, match="cannot use the MCP server"):
            _ = McpTools(url=f"http://127.0.0.1:{int(page.stdout.readline())}/", start_timeout=20.0).tools
    finally:
        page.kill()
        page.wait()


@pytest.mark.parametrize("settings", [{}, {"command": ["a"], "url": "http://b"}, {"command": "python server.py"}])
def test_wrong_settings_are_refused(settings):
    with pytest.raises(ValueError, match="command"):
        McpTools(**settings)


class Notebook(Env):
    """Asks for two notes; the tools are an MCP server's."""

    max_turns = 4

    def init(self, task):
        super().init(task)
        self.server = McpTools(SERVER, timeout=20.0)
        self.kept = ToolSet(self.server)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return [{"role": "user", "content": "Write two notes."}], {}

    def step(self, action):
        self.read(action)
        answers = self.kept.answer(assistant(action))
        said = answers[0]["content"] if answers else ""
        return self.outcome(said, reward=float("a,b" in said), terminated="a,b" in said)

    def close(self):
        super().close()
        self.server.close()


def note(text):
    return f'<tool_call>{{"name": "note", "arguments": {{"text": "{text}"}}}}</tool_call>'


class TestInAnEnvironment:
    def test_the_agent_loop_plays_it(self):
        env = Notebook()
        policy = ScriptedPolicy([note("a"), note("b")])
        trajectory = asyncio.run(run_episode(env, policy, Task("t")))
        env.close()
        assert (trajectory.end, trajectory.reward, len(trajectory.turns)) == ("terminated", 1.0, 2)

    def test_a_dead_server_fails_the_episode_and_is_no_reward_of_0(self):
        env = Notebook()
        die = '<tool_call>{"name": "die", "arguments": {"code": 3}}</tool_call>'
        trajectory = asyncio.run(run_episode(env, ScriptedPolicy([note("a"), die]), Task("t")))
        env.close()
        assert trajectory.failed
        assert "McpServerError" in trajectory.error
        assert "exit code 3" in trajectory.error
