"""`agentgym export openenv`: the folder, and what the real package makes of it."""

import asyncio
import json
import subprocess
import sys
import tomllib
from dataclasses import replace

import pytest
import yaml
from openenv_envs import Counter, Sum
from openenv_package import FOREIGN, ROOT, clean_environment, openenv_python, our_packages, running

import agentgym
from agentgym.cli import main
from agentgym.core.registration import spec
from agentgym.policies.base import ScriptedPolicy
from agentgym.rollout.episode import run_episode
from agentgym.service.openenv import export as openenv_export
from agentgym.service.openenv.export import export_openenv, requirements_of

FILES = {
    "README.md",
    "__init__.py",
    "client.py",
    "models.py",
    "openenv.yaml",
    "pyproject.toml",
    "server/Dockerfile",
    "server/__init__.py",
    "server/app.py",
    "server/environment.py",
    "validation/runtime.json",
}


def files_of(folder):
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def test_an_environment_of_ours_is_a_folder_that_requires_agentgym(tmp_path, capsys):
    assert main(["export", "openenv", "gsm8k", "--out", str(tmp_path / "out"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["files"]) == files_of(tmp_path / "out") == FILES
    project = tomllib.loads((tmp_path / "out/pyproject.toml").read_text())["project"]
    assert project["name"] == "openenv-gsm8k"
    assert project["dependencies"][:2] == ["openenv>=0.10", f"agentgym-toolkit[envs]=={agentgym.__version__}"]
    manifest = yaml.safe_load((tmp_path / "out/openenv.yaml").read_text())
    assert (manifest["name"], manifest["app"], manifest["port"]) == ("gsm8k", "server.app:app", 8000)
    for file in (tmp_path / "out").rglob("*.py"):
        compile(file.read_text(), str(file), "exec")
        assert "${" not in file.read_text()


def test_an_environment_that_no_package_has_is_copied(tmp_path):
    requirements, source = requirements_of(spec("openenv_envs:Sum"))
    assert requirements == ["openenv>=0.10", f"agentgym-toolkit=={agentgym.__version__}"]
    export_openenv(spec("openenv_envs:Sum"), tmp_path / "out")
    assert (tmp_path / "out/openenv_envs.py").read_text() == source.read_text()


def test_a_copied_environment_needs_no_registration(tmp_path):
    """Its package registers it by an entry point, which the copy does not have."""
    export_openenv(replace(spec("openenv_envs:Sum"), id="mine/sum", kwargs={"max_turns": 7}), tmp_path / "out")
    server = (tmp_path / "out/server/environment.py").read_text()
    lines = [line for line in server.splitlines() if line.startswith(("SPEC =", "from agentgym import", "import"))]
    told = {}
    exec("\n".join(lines), told)
    assert (told["SPEC"].id, told["SPEC"].make().max_turns) == ("mine/sum", 7)


def test_a_description_may_have_any_characters(tmp_path):
    told = 'A lake 🧊, "quoted".'
    export_openenv(replace(spec("openenv_envs:Sum"), description=told), tmp_path / "out")
    assert tomllib.loads((tmp_path / "out/pyproject.toml").read_text())["project"]["description"] == told


def test_what_it_needs_besides_is_required_and_said(tmp_path):
    requirements, _ = requirements_of(spec("gymnasium:FrozenLake-v1"))
    assert "gymnasium" in requirements
    needy = replace(spec("openenv_envs:Sum"), needs=("yaml:pyyaml>=6", "sandbox:python"))
    assert "pyyaml>=6" in requirements_of(needy)[0]
    export_openenv(needy, tmp_path / "out")
    assert "the sandbox image `python`" in (tmp_path / "out/README.md").read_text()


def test_wheels_go_along(tmp_path):
    wheel = tmp_path / "mine-1-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    export_openenv(spec("gsm8k"), tmp_path / "out", wheels=[wheel])
    assert (tmp_path / "out/wheels" / wheel.name).read_bytes() == b"wheel"


def test_a_build_that_would_ask_an_index_for_an_agentgym_that_is_not_there_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(openenv_export, "_from_index", lambda package: False)
    wheel = tmp_path / "agentgym_toolkit-1-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    for name, more in (("without", []), ("with", ["--wheel", str(wheel)])):
        assert main(["export", "openenv", "gsm8k", "--out", str(tmp_path / name), *more]) == 0
        assert ("--wheel FILE" in capsys.readouterr().err) == (name == "without")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["gsm9k", "--out", "OUT"], "no environment 'gsm9k'"),
        (["gsm8k", "--out", "HERE"], "is not empty: choose another folder with --out"),
        (["gsm8k", "--out", "OUT", "--kwargs", '{"nothing": 1}'], "takes no argument 'nothing'"),
        (["gsm8k", "--out", "OUT", "--kwargs", "3"], "--kwargs: must be a JSON object"),
        (["gsm8k", "--out", "OUT", "--wheel", "no.whl"], "no.whl is no wheel"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path, capsys, words, told):
    (tmp_path / "file").touch()
    places = {"OUT": str(tmp_path / "out"), "HERE": str(tmp_path)}
    try:
        code = main(["export", "openenv", *(places.get(word, word) for word in words)])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert told in line
    assert not (tmp_path / "out").exists()


def test_a_package_is_not_copied_into_itself(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "one_of_mine").mkdir()
    (tmp_path / "one_of_mine/__init__.py").write_text("from openenv_envs import Sum\n\n\nclass Mine(Sum): ...\n")
    out = tmp_path / "one_of_mine/out"
    assert main(["export", "openenv", "one_of_mine:Mine", "--out", str(out)]) == 2
    assert "copied into itself: choose another folder with --out" in capsys.readouterr().err
    assert not out.exists()
    assert main(["export", "openenv", "one_of_mine:Mine", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/one_of_mine/__init__.py").is_file()


# ---- with the real package


@pytest.fixture(scope="module")
def python(pytestconfig):
    return openenv_python(pytestconfig.cache)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_openenv_validates_the_folder(python, tmp_path):
    export_openenv(spec("gsm8k"), tmp_path / "out")
    command = [python.with_name("openenv"), "validate", tmp_path / "out", "--skip-build", "--level", "static", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=clean_environment(), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["verdict"] == "pass"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [Sum, Counter])
def test_the_real_server_plays_the_folder_as_the_environment_plays_itself(python, tmp_path, kind):
    export_openenv(spec(f"openenv_envs:{kind.__name__}"), tmp_path / "out")
    tool = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"number": 3}'}}
    replies = ["x", {"role": "assistant", "content": "0", "tool_calls": [tool]} if kind is Counter else "0"]

    async def play(url):
        env = agentgym.make(f"openenv:{url}")
        tasks = await asyncio.to_thread(env.spec.tasks, "train")
        trajectory = await run_episode(env, ScriptedPolicy(replies), tasks[0])
        tools = env.tools
        await env.close()
        return len(tasks), trajectory, tools

    script = FOREIGN / "serve_folder.py"
    with running(python, script, tmp_path / "out", ROOT, our_packages(), PYTHONDONTWRITEBYTECODE="1") as port:
        count, there, tools = asyncio.run(play(f"http://127.0.0.1:{port}"))
        if kind is Counter:
            driven = [python, FOREIGN / "drive_clients.py", "tools", f"http://127.0.0.1:{port}"]
            done = subprocess.run(
                driven, capture_output=True, text=True, timeout=120, env=clean_environment(), check=False
            )
            assert done.returncode == 0, done.stderr[-3000:]
            assert json.loads(done.stdout.splitlines()[-1])["first"] == "2"
    here = asyncio.run(run_episode(kind(), ScriptedPolicy(replies), kind.default_tasks()[0]))
    assert count == len(kind.default_tasks())
    assert (there.error, there.end, tools) == (None, here.end, kind().tools)
    assert [turn.reward for turn in there.turns] == [turn.reward for turn in here.turns]
    assert there.final_observation == here.final_observation


def test_the_command_is_quick_to_help():
    done = subprocess.run(
        [sys.executable, "-m", "agentgym.cli", "export", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert "openenv" in done.stdout
