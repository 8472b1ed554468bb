"""Commands in a sandbox: they play as others do, reach their episode's endpoint and nothing else, and end at its limits."""

import json
import os
import socket
import threading
import time

import pytest
from agent_cases import TASK, Counting, Talking, gateway_of, played
from test_gateway_agents import exact, said
from toy_model import ToyModel

from agentgym.agents.programs import agent_of
from agentgym.rollout.episode import Limits

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
    params=[
        pytest.param("bubblewrap", marks=pytest.mark.bubblewrap),
        pytest.param("docker", marks=pytest.mark.docker),
    ],
)
def boxed(request):
    """Plays a program of Python in a sandbox; `words` follow it."""

    def play(program, folder, words=(), **options):
        agent = agent_of("command:python3 -c PROGRAM", "python", request.param)
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
            "import socket\n"
            "found = []\n"
            "for host, port in json.loads(sys.argv[1]):\n"
            "    try:\n"
            "        socket.create_connection((host, port), timeout=3)\n"
            "        found.append(host)\n"
            "    except OSError:\n"
            "        pass\n"
            "found += [path for path in json.loads(sys.argv[2]) if os.path.exists(path)]\n"
            "found += [name for name in os.environ if 'SECRET' in name]\n"
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
        "import subprocess\n"
        "subprocess.Popen([sys.executable, '-c', ASKS], start_new_session=True)\n"
        "time.sleep(100)\n"
    )
    asks = ASK + "while True: ask('on and on'); time.sleep(0.05)\n"
    model = ToyModel()
    trajectory = boxed(f"ASKS = {asks!r}\n{program}", tmp_path, model=model, limits=Limits(episode_timeout=8.0))
    assert (trajectory.end, trajectory.reward, trajectory.metadata["agent"]["killed"]) == ("time", 0.0, True)
    assert {turn.unusable for turn in trajectory.turns} == {"incomplete episode"}, "its child has asked"


def test_one_that_stays_when_the_episode_is_over_is_stopped_too(boxed, tmp_path, monkeypatch):
    monkeypatch.setattr("agentgym.agents.play.LEAVE_SECONDS", 0.2)
    trajectory = boxed("while True: tool('count')\n", tmp_path, env=Counting)
    assert (trajectory.end, trajectory.reward, trajectory.metadata["agent"]["killed"]) == ("terminated", 1.0, True)


def test_a_program_that_the_image_lacks_is_an_error_and_not_the_agent_s(boxed, tmp_path):
    def lacking(program, folder):
        agent = agent_of("command:no-such-program now", "python")
        return played(agent, folder, local=True)

    trajectory = lacking("", tmp_path)
    assert trajectory.failed
    assert "there is no program 'no-such-program' in the image 'python'" in trajectory.error
