"""Every block of Python and every command of README and docs runs, with a double in place of the reader's chat endpoint."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from itertools import takewhile

import pytest
from docs_endpoint import IN_DOCS, chat_endpoint
from docs_pages import ROOT, blocks, code_blocks, commands

from agent_train.cli import main as agent_train
from agent_train.config.compose import compose
from agentgym.cli import main as agentgym
from agentgym.core.registration import spec
from agentgym.datasets import data_sets, locate, missing_files
from agentgym.sandbox.images.build import WAYS, image_names, rootfs

OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")


@pytest.fixture(scope="module")
def endpoint():
    with chat_endpoint() as url:
        yield url


# ---- code


@pytest.mark.parametrize("code", code_blocks())
def test_every_python_block_runs(code, tmp_path, endpoint):
    """A double stands in for the reader's chat endpoints."""
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", IN_DOCS.sub(endpoint, code)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_there_is_code_to_run():
    assert len(blocks("python")) >= 8


# ---- commands


def help_of(*words, capsys):
    with pytest.raises(SystemExit) as ended:
        agentgym([*words, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def without_marks(parameters):
    """The same cases for a test that runs nothing, and so needs nothing."""
    return [pytest.param(*case.values, id=case.id) for case in parameters]


@pytest.mark.parametrize("words", without_marks(commands("agentgym")))
def test_agentgym_commands_and_their_options_exist(words, capsys):
    assert words[0] in help_of(capsys=capsys)
    verbs = words[:2] if words[0] in ("sandbox", "data", "export") else words[:1]
    if len(verbs) == 2:
        assert verbs[1] in help_of(verbs[0], capsys=capsys)
    options = set(OPTION.findall(help_of(*verbs, capsys=capsys)))
    assert {word for word in words if word.startswith("-")} <= options
    named = list(takewhile(lambda word: not word.startswith("-"), words[len(verbs) :]))
    if verbs == ["sandbox", "build"]:
        assert set(named) <= set(image_names())
    elif verbs == ["data", "get"]:
        assert set(named) <= set(data_sets())
        assert named, "the command names no data set"
    elif words[0] in ("check", "eval", "serve"):
        assert named or "--sandbox" in words, "the command names no environment"
        for name in named:
            spec(name).load()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of the runs that the docs take for the reader's own."""
    folder = tmp_path_factory.mktemp("reader") / "runs"
    for name in ("before", "after", "later", "gsm8k-small", "gsm8k-large", "my-training", "NAME"):
        words = ["eval", "tic_tac_toe", "--policy", "random", "--n", "3", "--out", str(folder / name)]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert agentgym(words) == 0
    episodes = folder / "my-training" / "trajectories"
    episodes.mkdir()
    (found,) = (folder / "before").rglob("*.jsonl")
    shutil.copy(found, episodes / "eval-000000.jsonl")
    return folder


@pytest.fixture
def reader(tmp_path, monkeypatch, runs):
    """The reader's own folder, in which the commands of the docs are typed."""
    shutil.copytree(runs, tmp_path / "runs")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    if (instances := locate("swe_bench/lite_from_sdist.jsonl")) is not None:
        (tmp_path / "swe_bench").symlink_to(instances.parent)
    (tmp_path / "tokens.txt").write_text("reader a-token-of-the-readers\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", commands("agentgym"))
def test_agentgym_commands_run(words, reader, endpoint, monkeypatch):
    if reason := why_not_run(words):
        pytest.skip(reason)
    words = [IN_DOCS.sub(endpoint, word) for word in words]
    if words[0] in ("serve", "gateway") or (words[0] == "view" and "--export" not in words):
        serves_until_it_is_told_to_end(words)
        return
    if words[0] == "eval" and "--model" in words:
        words += ["--n", "2", "--k", "1"]
    if words[0] == "play":
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"/quit\n")))
    if words[:2] == ["sandbox", "cleanup"]:  # the sandboxes of others on this machine are not the reader's
        monkeypatch.setenv("TMPDIR", str(reader))
        monkeypatch.setenv("DOCKER_HOST", f"unix://{reader}/no.sock")
        monkeypatch.setattr("tempfile.tempdir", None)
    if any(word.startswith(("harbor:", "swe_bench")) for word in words):
        # A writable root on docker needs an engine that limits layers, which few machines have.
        monkeypatch.setenv("AGENTGYM_SANDBOX", "bubblewrap")
    assert agentgym(words) == 0


def serves_until_it_is_told_to_end(words):
    if "--tls-cert" in words:
        names = [words[words.index(option) + 1] for option in ("--tls-key", "--tls-cert")]
        make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
        subprocess.run(
            [*make.split(), "-keyout", names[0], "-out", names[1]], check=True, capture_output=True, timeout=60
        )
    command = [sys.executable, "-m", "agentgym.cli", *words, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert " at http" in server.stdout.readline()
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait(60)
        server.stdout.close()


def why_not_run(words):
    """Why a command is only looked at; "" where it is run. Commands of sandboxes work with an engine and without one."""
    if "--instances" in words:
        if not os.path.isfile(words[words.index("--instances") + 1]):
            return "the file of instances is not in AGENTGYM_DATA"
        return "" if rootfs("swe") else "the image swe is not built here"
    if words[:2] == ["sandbox", "build"]:
        names = [word for word in words[2:] if word in image_names()] or image_names()
        way = words[words.index("--how") + 1] if "--how" in words else None
        missing = [name for name in names if way_of(name) not in ((way,) if way else WAYS)]
        return f"not built here, which takes minutes and package mirrors: {', '.join(missing)}" if missing else ""
    if words[:2] == ["data", "get"]:
        absent = [name for name in words[2:] if name in data_sets() and missing_files(data_sets()[name])]
        return f"not here, and fetching it takes a network: {', '.join(absent)}" if absent else ""
    if words[:2] == ["eval", "swe_bench"] and (locate("swe_bench/lite_from_sdist.jsonl") is None or not rootfs("swe")):
        return "the file of instances or the image swe is not here"
    if "--tls-cert" in words and shutil.which("openssl") is None:
        return "the certificate is made by openssl"
    return ""


def way_of(image):
    """How an image was made; None where it was not."""
    root = rootfs(image)
    return json.loads((root.parent / "image.json").read_text())["way"] if root else None


@pytest.mark.parametrize("words", commands("agent-train"))
def test_training_commands_would_run(words, tmp_path, monkeypatch, capsys):
    """Planned with the embedded engine, so that vLLM need not be there, unless the command is about another. A model folder and files
    that only validation looks at stand in for the reader's own.
    """
    if "engine.placement=colocated" in words:
        pytest.importorskip("vllm")
    if any(word.startswith("env.url=") for word in words):
        assert compose(words).env.url, "it names no server"  # which is asked before anything else, and is not there
        return
    monkeypatch.chdir(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 1}')
    words = [f"model.path={tmp_path}" if word.startswith("model.path=") else word for word in words]
    for word in [word for word in words if word.startswith(("data.train=", "data.test="))]:
        path = tmp_path / word.partition("=")[2]
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "prompt": "hi",
            **({"completion": "yes"} if "mode=sft" in words else {"chosen": "yes", "rejected": "no"}),
        }
        path.write_text(json.dumps(record))
    of_another = any(word.startswith(("engine.urls=", "engine.placement=")) for word in words)
    engine = [] if of_another else ["engine=embedded"]
    extra = [] if "--list" in words else [*engine, "--dry-run"]
    code = agent_train([*dict.fromkeys([*words, *extra])])
    assert code == 0, capsys.readouterr().err


@pytest.mark.parametrize("words", commands("make"))
def test_make_targets_exist(words):
    assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("words", commands("python"))
def test_scripts_exist(words):
    if words[0] == "-c":
        compile(words[1], "-c", "exec")
        return
    paths = [words[0]]
    if words[0] == "-m":
        module = words[1].replace(".", "/")
        paths = [f"{module}.py", f"{module}/__main__.py"]
    assert any((ROOT / path).is_file() for path in paths)


def test_there_are_commands_of_every_kind():
    assert all(len(commands(program)) >= 2 for program in ("agentgym", "agent-train", "make", "python"))


# ---- the environment that the docs write


def test_the_environment_of_the_docs_passes_check_and_validate(tmp_path):
    """As a stranger would: copied into a file, and named by it."""
    (code,) = [block.values[0] for block in blocks("python") if "class Echo(Env)" in block.values[0]]
    (tmp_path / "echo_env.py").write_text(code.partition("agentgym.register(")[0])
    for verb in ("check", "validate"):
        command = [sys.executable, "-m", "agentgym.cli", verb, "echo_env:Echo"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stdout


def test_the_step_of_the_docs_is_right(capsys):
    (code,) = [block.values[0] for block in blocks("python") if "class Echo(Env)" in block.values[0]]
    names = {}
    exec(compile(code, "environments.md", "exec"), names)
    assert (names["reward"], names["terminated"]) == (1.0, True)
