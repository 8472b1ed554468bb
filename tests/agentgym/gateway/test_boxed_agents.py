"""Commands in a sandbox: they play as others do, reach their episode's endpoint and nothing else, and end at its limits."""

import json
import os
import socket
from dataclasses import replace

import pytest
from agent_cases import Talking, played
from test_gateway_agents import exact, said
from toy_model import ToyModel

from agentgym.agents.programs import agent_of
from agentgym.rollout.episode import Limits
from agentgym.sandbox import SandboxError, SandboxSpec, acquire
from agentgym.sandbox.backends.remote import open_remote
from agentgym.sandbox.backends.select import Choice, close_pools, process_state
from agentgym.sandbox.served import Most, ServedSandbox

# What an agent needs of an SDK, in the standard library.
ASK = """
import json, os, sys, time, urllib.error, urllib.request

def post(url, body, key=os.environ['OPENAI_API_KEY']):
    head = {'Authorization': 'Bearer ' + key, 'Content-Type': 'application/json'}
    request = urllib.request.Request(url, json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)

def ask(text, **more):
    body = {'model': os.environ['AGENTGYM_MODEL'], 'messages': [{'role': 'user', 'content': text}]}
    return post(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body, **more)['choices'][0]['message']['content']

def tool(name, **arguments):
    call = {'jsonrpc': '2.0', 'id': 1, 'method': 'tools/call', 'params': {'name': name, 'arguments': arguments}}
    return post(os.environ['AGENTGYM_MCP_URL'], call)['result']['content'][0]['text']
"""


@pytest.fixture(
    scope="module",
    params=[pytest.param("bubblewrap", marks=pytest.mark.bubblewrap), pytest.param("docker", marks=pytest.mark.docker)],
)
def backend(request):
    return request.param


@pytest.fixture
def boxed(backend):
    """Plays a program of Python in a sandbox; `words` follow it."""

    def play(program, folder, words=(), **options):
        agent = agent_of("command:python3 -c PROGRAM", "python", backend)
        agent.words[2:] = [ASK + program, *words]
        return played(agent, folder, local=True, **options)

    return play


def test_an_agent_asks_the_model_and_its_calls_are_the_turns(boxed, tmp_path):
    model = ToyModel()
    program = (
        "assert sys.stdin.read() == os.environ['AGENTGYM_TASK'] == sys.argv[1] == 'count to three'\n"
        "assert sys.argv[2] == os.environ['OPENAI_BASE_URL'] == os.environ['ANTHROPIC_BASE_URL'] + '/v1'\n"
        "assert sys.argv[3] == os.getcwd() and not os.listdir() and os.environ['HOME'] != os.getcwd()\n"
        "open('note', 'w').write('mine')\n"
        "ask(sys.argv[1]); ask('again'); print('done')\n"
    )
    trajectory = boxed(program, tmp_path, ["{task}", "{base_url}", "{folder}"], model=model)
    exact(trajectory, model)
    about = trajectory.metadata["agent"]
    assert (trajectory.end, trajectory.reward, len(trajectory.turns)) == ("terminated", 0.5, 2), about
    assert about["exit_code"] == 0
    assert about["share"]["trainable"] == about["share"]["sampled"] == trajectory.sampled_tokens > 0


def test_it_acts_by_mcp(boxed, tmp_path):
    program = (
        "assert sys.argv[1] == os.environ['AGENTGYM_MCP_URL']\n"
        "print(ask('hello'), tool('act', text='hello'), tool('act', text='stop'))\n"
    )
    trajectory = boxed(program, tmp_path, ["{mcp_url}"], env=Talking)
    assert (trajectory.end, trajectory.reward, len(trajectory.turns)) == ("terminated", 1.0, 1), trajectory.metadata
    assert said(trajectory) == ["hello", "stop"]


def test_calls_come_at_the_same_time_and_are_streamed(boxed, tmp_path):
    model = ToyModel()
    program = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(8) as threads:\n"
        "    list(threads.map(ask, ['hello ' * (1 + 200 * n) for n in range(8)]))\n"
        "body = {'model': 'toy', 'stream': True, 'messages': [{'role': 'user', 'content': 'hello'}]}\n"
        "head = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "request = urllib.request.Request(url, json.dumps(body).encode(), head)\n"
        "print('done' if b'[DONE]' in urllib.request.urlopen(request).read() else 'no')\n"
    )
    trajectory = boxed(program, tmp_path, model=model)
    exact(trajectory, model)
    assert (trajectory.reward, len(trajectory.turns)) == (0.5, 9), trajectory.metadata


def test_nothing_but_its_own_episode_is_within_its_reach(boxed, tmp_path, monkeypatch):
    """What it finds of: services of this machine, by its loopback and its address, and an outside address; files; keys."""
    monkeypatch.setenv("A_SECRET_OF_THIS_MACHINE", "1")
    (tmp_path / "secret").write_text("secret")
    with socket.create_server(("0.0.0.0", 0)) as service, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        here, port = probe.getsockname()[0], service.getsockname()[1]
        program = (
            "import re, socket\n"
            "found = []\n"
            "for host, port in json.loads(sys.argv[1]):\n"
            "    try:\n"
            "        socket.create_connection((host, port), timeout=3)\n"
            "        found.append(host)\n"
            "    except OSError:\n"
            "        pass\n"
            "found += [path for path in json.loads(sys.argv[2]) if os.path.exists(path)]\n"
            "found += [name for name in os.environ if 'SECRET' in name]\n"
            "for place in os.listdir('/proc'):\n"
            "    if place.isdigit() and place != '1':\n"
            "        told = open(f'/proc/{place}/environ').read() + open(f'/proc/{place}/cmdline').read()\n"
            "        found += set(re.findall('ag-[0-9A-Za-z_-]{20,}', told)) - {os.environ['OPENAI_API_KEY']}\n"
            "for key in sys.argv[3:]:\n"
            "    try:\n"
            "        found.append(ask('hello', key=key))\n"
            "    except urllib.error.HTTPError as error:\n"
            "        assert error.code == 401\n"
            "print('nothing' if not found and ask('hello') else found)\n"
        )
        places = [("127.0.0.1", port), (here, port), ("1.1.1.1", 443), ("192.0.2.1", 443)]
        files = [str(tmp_path), f"{tmp_path}/secret", os.path.expanduser("~/.ssh"), "/root/.cache", __file__]
        trajectory = boxed(program, tmp_path, [json.dumps(places), json.dumps(files), "ag-another", ""])
        service.settimeout(0)
        with pytest.raises(BlockingIOError):
            service.accept()
    assert said(trajectory) == ["nothing"], trajectory.metadata


def test_a_command_that_fails_has_failed_the_episode(boxed, tmp_path):
    trajectory = boxed("print('half')\nsys.exit('no idea')\n", tmp_path)
    assert (trajectory.agent_failure, trajectory.reward) == ("agent_failed", -1.0)
    about = trajectory.metadata["agent"]
    assert (about["exit_code"], about["stderr"].strip(), about["output"]) == (1, "no idea", "half")


def test_one_that_hangs_ends_at_the_time_limit_with_all_that_it_started(boxed, tmp_path):
    program = (
        "import subprocess\nsubprocess.Popen([sys.executable, '-c', ASKS], start_new_session=True)\ntime.sleep(100)\n"
    )
    asks = ASK + "while True: ask('on and on'); time.sleep(0.05)\n"
    model = ToyModel()
    trajectory = boxed(f"ASKS = {asks!r}\n{program}", tmp_path, model=model, limits=Limits(episode_timeout=5.0))
    assert (trajectory.end, trajectory.reward, trajectory.metadata["agent"]["killed"]) == ("time", 0.0, True)
    lost = {turn.unusable for turn in trajectory.turns} - {"undelivered"}  # the last, if it was under way
    assert lost == {"incomplete episode"}, "its child has asked"


def test_one_that_stays_when_the_episode_is_over_is_stopped_too(boxed, tmp_path, monkeypatch):
    monkeypatch.setattr("agentgym.agents.play.LEAVE_SECONDS", 0.2)
    trajectory = boxed("while True: tool('count')\n", tmp_path)
    assert (trajectory.end, trajectory.reward, trajectory.metadata["agent"]["killed"]) == ("terminated", 1.0, True)


def test_one_that_kills_all_that_it_sees_has_failed_the_episode(boxed, tmp_path):
    trajectory = boxed("import signal\nos.kill(-1, signal.SIGKILL)\n", tmp_path)
    assert (trajectory.agent_failure, trajectory.reward) == ("agent_failed", -1.0)


def test_what_the_image_lacks_and_a_sandbox_that_cannot_start_are_errors_and_not_the_agent_s(backend, tmp_path):
    agent = agent_of("command:no-such-program now", "python", backend)
    trajectory = played(agent, tmp_path / "lacking", local=True)
    assert trajectory.failed
    assert "there is no program 'no-such-program' in the image 'python'" in trajectory.error
    trajectory = played(agent, tmp_path / "closed")
    assert trajectory.failed
    assert "make it with local=True" in trajectory.error
    agent.spec = replace(agent.spec, memory=1 << 50)
    trajectory = played(agent, tmp_path / "large", local=True)
    assert trajectory.failed
    assert "there is never room for one" in trajectory.error


@pytest.mark.parametrize(
    ("agent", "image", "why"),
    [
        ("command:python3", "no-such-image", "no-such-image"),
        ("agent_cases:counts", "python", "only a command"),
        ("command:", "python", "there is no program"),
    ],
)
def test_what_cannot_play_in_a_sandbox_is_refused_before_anything_starts(agent, image, why):
    with pytest.raises(ValueError, match=why):
        agent_of(agent, image)


def test_sandboxes_on_another_machine_do_not_reach_the_gateway_nor_its_server_s_sockets(monkeypatch):
    monkeypatch.setattr("agentgym.agents.programs.choose", lambda backend, image: Choice(backend, "it answers"))
    with pytest.raises(ValueError, match="do not reach the gateway"):
        agent_of("command:python3", "python", "http://there:8000")
    with pytest.raises(SandboxError, match="cannot reach the socket"):
        open_remote("http://there:8000", SandboxSpec(socket="/tmp/gateway"), "run")
    for socket_ in ("/var/run/docker.sock", ["/"], 0):
        with pytest.raises(ValueError, match="none of its machine's sockets"):
            ServedSandbox(None, Most()).spec_of({"socket": socket_}, 60.0)


class Boxed(Talking):
    """Holds a sandbox of its own."""

    def reset(self, *, seed=None, options=None):
        self.box = acquire(SandboxSpec(memory=512 << 20, disk=8 << 20), self.backend)
        return super().reset(seed=seed, options=options)

    def close(self):
        if hasattr(self, "box"):
            self.box.close()
        super().close()


def test_where_environments_have_all_the_memory_an_agent_gets_its_sandbox_all_the_same(
    boxed, backend, tmp_path, monkeypatch
):
    """Else both would wait for each other."""
    monkeypatch.setenv("AGENTGYM_SANDBOX_MEMORY", str(1200 << 20))  # of 512 and 1024 MiB one alone has room
    process_state.begin_anew()
    try:
        trajectory = boxed("print(ask('hello'))", tmp_path, env=type("Env", (Boxed,), {"backend": backend}))
        assert (trajectory.end, len(trajectory.turns)) == ("agent", 1), trajectory.metadata
    finally:
        close_pools(20)
        process_state.begin_anew()
