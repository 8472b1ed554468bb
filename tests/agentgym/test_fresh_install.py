"""`pip install agentgym`, and nothing else: a new virtual environment with the wheel of this tree and its light dependencies.

What people use first and every day must work there: list, evaluate, check, make an environment, look at the run. The environment
is made once for all tests here. Where no package index answers there is nothing to test, which CI calls an error.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IN_CI = bool(os.environ.get("CI") or os.environ.get("AGENTGYM_NEED_SANDBOXES"))
LEFT_OUT = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "AGENTGYM_DATA", "AGENTGYM_SANDBOX", "OPENAI_API_KEY")
HEAVY = ("torch", "ray", "transformers", "vllm", "datasets", "pyarrow", "docker", "openai", "pandas", "scipy")


class Fresh:
    """A virtual environment and the commands in it."""

    def __init__(self, folder):
        self.folder = folder
        self.bin = folder / "venv" / "bin"
        self.environment = {k: v for k, v in os.environ.items() if k not in LEFT_OUT} | {
            "PIP_DISABLE_PIP_VERSION_CHECK": "1"
        }

    def run(self, *words, cwd=None, code=0, seconds=120, **more):
        """What a program of this environment prints; it must end with `code`."""
        done = subprocess.run(
            [str(self.bin / words[0]), *words[1:]],
            capture_output=True,
            text=True,
            timeout=seconds,
            cwd=cwd or self.folder,
            env=self.environment | more,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done.stdout

    def pip(self, *words):
        """This process's pip, working on that environment: one of its own would take longer to install than all the rest."""
        there = ["--python", str(self.bin / "python")] if words[0] != "wheel" else []
        return self.run(sys.executable, "-m", "pip", *there, *words, seconds=200)

    def json(self, *words, **more):
        """What `agentgym ... --json` prints."""
        return json.loads(self.run("agentgym", *words, "--json", **more))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")],
        check=True,
        timeout=120,
        capture_output=True,
    )
    made = Fresh(folder)
    try:
        made.pip("wheel", "--quiet", "--no-deps", "--wheel-dir", "dist", str(ROOT))
        (wheel,) = (folder / "dist").glob("agentgym-*.whl")
        made.pip("install", "--quiet", "--no-compile", str(wheel))
    except (AssertionError, subprocess.TimeoutExpired) as error:
        if IN_CI or "No matching distribution" not in str(error):
            raise
        pytest.skip(f"no package index that has the build's requirements answers here: {str(error)[-300:]}")
    return made


def test_it_is_small_and_holds_nothing_heavy(fresh):
    code = (
        "import importlib.util, json, sys; print(json.dumps([n for n in sys.argv[1:] if importlib.util.find_spec(n)]))"
    )
    assert json.loads(fresh.run("python", "-c", code, *HEAVY)) == []
    fresh.pip("check")
    place = fresh.run("python", "-c", "import agentgym; print(agentgym.__file__)").strip()
    assert place.startswith(str(fresh.folder)), "the tree itself must not be what is tested"
    installed = {row["name"] for row in json.loads(fresh.pip("list", "--format", "json"))}
    assert len(installed) < 30, installed


def test_the_environments_are_listed_with_what_they_lack(fresh):
    rows = {row["id"]: row for row in fresh.json("list")}
    assert {"frozen_lake", "gsm8k", "math_python", "gymnasium:NAME"} <= set(rows)
    (need,) = [need for need in rows["math_python"]["needs"] if need["what"] == "agentgym[math]"]
    assert (need["here"], need["remedy"]) == (False, "pip install 'agentgym[math]'")
    assert "frozen_lake" in fresh.run("agentgym", "list")


def test_the_doctor_finds_what_is_needed_and_names_the_rest(fresh):
    environment = fresh.environment.pop("DOCKER_HOST", None)
    report = fresh.json("doctor")
    if environment:
        fresh.environment["DOCKER_HOST"] = environment
    seen = {f["name"]: f for f in report["findings"]}
    assert report["ok"] is True
    assert seen["torch"]["state"] == "missing"
    assert seen["torch"]["todo"] == "pip install 'agentgym[train]'"
    assert seen["Docker"]["todo"] == "pip install 'agentgym[docker]'"


def test_completion_works_there(fresh):
    script = fresh.run("agentgym", "completion", "bash")
    assert script.startswith("# agentgym's completion for bash")
    ask = f'{script}\nCOMP_WORDBREAKS=":=" COMP_LINE="agentgym eval froz" COMP_POINT=18 COMP_WORDS=(agentgym); _agentgym; echo "$COMPREPLY"'
    path = f"{fresh.bin}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", ask], capture_output=True, text=True, timeout=60, env={"PATH": path}, check=True
    )
    assert done.stdout == "frozen_lake\n"
