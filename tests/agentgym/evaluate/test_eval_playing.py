"""`agentgym eval` of agents that play by themselves, in front of a model: their calls, tokens and cost are in the record, limits bind them."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
from endpoint_double import said, serving
from parity import Parity

from agentgym.cli import main
from agentgym.core import registration
from agentgym.core.messages import text_of
from agentgym.core.registration import register
from agentgym.evaluate.rescore import rescore
from agentgym.evaluate.store import read_cell, read_run

EXAMPLES = Path(__file__).parents[3] / "examples/agents"


class ForTwo(Parity):
    players = ("one", "other")


@pytest.fixture(autouse=True)
def registered(tmp_path, monkeypatch):
    monkeypatch.setattr(registration, "registry", dict(registration.registry))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    register("parity", f"{Parity.__module__}:Parity")
    register("for_two", f"{__name__}:ForTwo")


def answer(body):
    """Right for the even numbers, which are half of the tasks."""
    return said("even" if body["model"] == "double" else "odd")


def evaluated(capsys, *words):
    code = main(["eval", "parity", "-n", "4", "--quiet", "--json", "--out", "run", *words])
    out = capsys.readouterr()
    return code, (json.loads(out.out) if code == 0 else out.err)


def episodes():
    ((_, file),) = [(cell, Path("run") / cell["file"]) for cell in read_run(Path("run"))["cells"]]
    return read_cell(file)


def test_an_agent_plays_in_front_of_a_model_and_its_calls_are_counted(capsys):
    Path("prices.yaml").write_text("double: {input: 1000, output: 10000}\n")
    with serving(answer) as url:
        given = ["--model", "double", "--base-url", url, "--prices", "prices.yaml", "--temperature", "0.5"]
        code, results = evaluated(capsys, "--agent", "openai_sdk:play", *given)
        assert code == 0
        (cell,) = results["cells"]
        assert cell["agent"] == "openai_sdk:play on double"
        assert (cell["episodes"], cell["errors"], cell["turns"], cell["success"]) == (4, 0, 1.5, 0.5), (
            "a wrong answer has a second turn"
        )
        assert cell["tokens"] == {"prompt_tokens": 60, "completion_tokens": 12}
        assert (cell["requests"], cell["cost"]) == (6, pytest.approx(6 * 0.03))
        records = [json.loads(line) for line in next(Path("run/gateway").rglob("calls.jsonl")).open()]
        asked = [call["asked"] for record in records for call in record.get("calls", ())]
        assert len(asked) == 6
        for trajectory in episodes().values():
            for turn, step in zip(trajectory.turns, trajectory.metadata["steps"], strict=True):
                assert (text_of(turn.reply), turn.usage["completion_tokens"]) == ("even", 2)
                assert (turn.observation, turn.reply) == (step["observation"], step["action"])
        code, again = evaluated(capsys, "--agent", "openai_sdk:play", *given)
    assert (code, again["cells"][0]["requests"]) == (0, 6), "a second start plays nothing again"
    regraded = rescored()
    assert (regraded.graded, regraded.changed, regraded.unfaithful) == (4, 0, 0)


def rescored():
    (found,), _ = asyncio.run(rescore(Path("run"), Path("again")))
    return found


def test_a_command_is_an_agent_too_and_one_that_fails_has_failed_its_episodes(capsys):
    Path("agent.py").write_text("import sys\nsys.exit('no')\n")
    with serving(answer) as url:
        code, results = evaluated(
            *(capsys, "--agent", f"command:{sys.executable} agent.py", "--model", "double", "--base-url", url),
            *("--token-limit", "1000"),
        )
    assert code == 0
    (cell,) = results["cells"]
    assert (cell["errors"], cell["success"], cell["agent_failures"]) == (0, 0.0, {"agent_failed": 4})
    regraded = rescored()
    assert (regraded.graded, regraded.changed) == (4, 0)


@pytest.mark.bubblewrap
def test_a_command_plays_in_a_sandbox_of_an_image(capsys, monkeypatch):
    monkeypatch.setenv("AGENTGYM_SANDBOX", "bubblewrap")
    program = (
        "import json, os, urllib.request; assert not os.listdir(); open('mine', 'w');"
        "head = {'Content-Type': 'application/json', 'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']};"
        "body = {'model': 'double', 'messages': [{'role': 'user', 'content': os.environ['AGENTGYM_TASK']}]};"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions';"
        "asked = urllib.request.Request(url, json.dumps(body).encode(), head);"
        "print(json.load(urllib.request.urlopen(asked))['choices'][0]['message']['content'])"
    )
    given = ["--agent", f'command:python3 -c "{program}"', "--agent-image", "python", "--concurrency", "2"]
    with serving(answer) as url:
        code, results = evaluated(capsys, *given, "--model", "double", "--base-url", url)
    assert code == 0, results
    (cell,) = results["cells"]
    assert (cell["errors"], cell["requests"], cell["success"]) == (0, 4, 0.5), episodes()
    assert all(trajectory.metadata["agent"]["exit_code"] == 0 for trajectory in episodes().values())
    assert main(["eval", "parity", "--agent", "openai_sdk:play", *given[2:], "--model", "m", "--base-url", url]) == 2
    assert "only a command" in capsys.readouterr().err


def test_a_key_that_the_endpoint_refuses_ends_the_run_of_an_agent_too(capsys):
    def refuses(body):
        return 401, '{"error": {"message": "wrong key"}}'

    with serving(refuses) as url:
        given = [
            "--agent",
            "openai_sdk:play",
            "--model",
            "double",
            "--base-url",
            url,
            "--no-probe",
            "--concurrency",
            "1",
        ]
        code, told = evaluated(capsys, *given)
    assert code == 2
    assert "the key is refused again and again" in told
    assert len(episodes()) == 3


def test_limits_bind_an_agent(capsys):
    Path("greedy.py").write_text(
        "import openai\n"
        "async def play(episode):\n"
        "    async with openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.key) as client:\n"
        "        while True:\n"
        "            await client.chat.completions.create(model='double', messages=episode.messages)\n"
    )
    with serving(answer) as url:
        given = ["--agent", "greedy:play", "--model", "double", "--base-url", url]
        code, results = evaluated(capsys, *given, "--max-turns", "3")
        assert code == 0
        assert (results["cells"][0]["ends"], results["cells"][0]["requests"]) == ({"max_turns": 4}, 12)
        code = main(
            [
                "eval",
                "parity",
                "-n",
                "4",
                "--quiet",
                "--out",
                "few",
                *given,
                "--token-limit",
                "20",
                "--max-turns",
                "1",
                "--concurrency",
                "1",
            ]
        )
    assert (code, json.loads(Path("few/results.json").read_text())["stopped"]) == (3, "tokens")


def test_an_endpoint_that_fails_is_an_error_and_not_the_agent_s(capsys):
    with serving(lambda body: (500, "on fire")) as url:
        given = ["--agent", "openai_sdk:play", "--model", "double", "--base-url", url, "--request-retries", "0"]
        code, _ = evaluated(capsys, *given, "--retries", "0", "--no-probe")
    assert code == 1
    assert all(t.failed and "on fire" in t.error for t in episodes().values())


def test_what_cannot_play_is_refused(capsys):
    code, told = evaluated(capsys, "--agent", "openai_sdk:play")
    assert (code, "plays by itself: it needs --model and --base-url, or --serve" in told) == (2, True)
    with serving(answer) as url:
        code, told = evaluated(capsys, "--agent", "command:nothing-here", "--model", "double", "--base-url", url)
        assert (code, "there is no program 'nothing-here'" in told) == (2, True)
        code, told = evaluated(
            capsys, "--agent", "openai_sdk:play", "--model", "double", "--base-url", url, "--system", "be good"
        )
        assert (code, "has no 'system'" in told) == (2, True)
    given = ["--agent", "openai_sdk:play", "--model", "double", "--base-url", "http://127.0.0.1:9/v1", "--no-probe"]
    assert main(["eval", "for_two", *given]) == 2
    assert "plays as one agent, but ForTwo has several players" in capsys.readouterr().err
    given[1] = "mini-swe-agent"
    assert main(["eval", "parity", *given]) == 2
    assert "works by a tool 'bash' alone, and Parity has no tools: take an environment" in capsys.readouterr().err
    Path("suite.yaml").write_text("agents: [{agent: 'openai_sdk:play'}]\nenvs: [parity]\n")
    assert main(["eval", "suite.yaml"]) == 2
    assert "it needs the model that it asks" in capsys.readouterr().err
