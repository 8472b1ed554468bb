"""`agentgym eval` in processes of its own: interrupted, two at a time, and started again elsewhere."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from parity import Parity

from agentgym.evaluate.store import read_cell


class Slow(Parity):
    async def init(self, task):
        super().init(task)

    async def step(self, action):
        await asyncio.sleep(60 if self.task.id == "7" else 0.05)
        return super().step(action)


class Stuck(Parity):
    """Holds its thread for long."""

    def step(self, action):
        time.sleep(60 if self.task.id == "7" else 0.01)
        return super().step(action)


def command(env, out):
    return [
        sys.executable,
        "-m",
        "agentgym.cli",
        "eval",
        f"{Path(__file__).stem}:{env}",
        "--policy",
        "expert",
        "--out",
        str(out),
    ]


def file_of(env, out):
    return out / "episodes" / f"{Path(__file__).stem}-{env}@expert.jsonl"


def importable():
    """An environment in which another process finds this file's environments."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_stores_what_has_ended_and_says_how_to_go_on(tmp_path, sent):
    run = started("Slow", tmp_path / "r")
    run.send_signal(sent)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 130, err
    assert "to go on: agentgym eval --resume" in err
    assert "1 of 20 episodes were not played" in out
    assert len(read_cell(file_of("Slow", tmp_path / "r"))) == 19
    assert json.loads((tmp_path / "r" / "results.json").read_text())["stopped"] == "interrupted"


async def deaf(messages):
    """An agent that retries whatever happens."""
    while True:
        with contextlib.suppress(BaseException):
            await asyncio.sleep(3600)


def test_an_agent_that_does_not_let_itself_be_stopped_does_not_keep_the_command_from_its_end(tmp_path):
    words = command("Parity", tmp_path / "r")
    agent = ["--agent", f"{Path(__file__).stem}:deaf", "--answer-timeout", "0.3", "-n", "2", "--retries", "0"]
    words[words.index("--policy") : words.index("expert") + 1] = agent
    run = subprocess.run(words, env=importable(), capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1, run.stderr
    assert "2 x act took longer than its limit" in run.stdout


def test_interrupted_twice_it_ends_at_once(tmp_path):
    run = started("Stuck", tmp_path / "r")
    run.send_signal(signal.SIGINT)
    assert "once more ends it at once" in next(line for line in run.stderr if line.startswith("stopping"))
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=30)
    assert run.returncode == 130
    assert len(read_cell(file_of("Stuck", tmp_path / "r"))) == 19
    assert not (tmp_path / "r" / "results.json").exists(), "it waited for the environment to close"


def started(env, out):
    """A run of which all but one long episode are stored."""
    run = subprocess.Popen(
        command(env, out), env=importable(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=out.parent
    )
    deadline = time.monotonic() + 60
    while not (file_of(env, out).exists() and file_of(env, out).read_bytes().count(b"\n") == 19):
        assert run.poll() is None, run.communicate()[1]
        assert time.monotonic() < deadline, "the run does not begin"
        time.sleep(0.02)
    return run


def test_a_second_process_on_the_folder_is_refused_while_the_first_plays(tmp_path):
    run = started("Slow", tmp_path / "r")
    try:
        again = command("Slow", tmp_path / "r")
        second = subprocess.run(again, env=importable(), capture_output=True, text=True, timeout=60, check=False)
        assert second.returncode == 2
        assert f"is being written by another process (process {run.pid})" in second.stderr
    finally:
        run.kill()
        run.communicate()


def test_an_environment_in_a_file_elsewhere_is_found_again(tmp_path, monkeypatch):
    """Each start is a process of its own, as at a terminal."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "far" / "mine").mkdir(parents=True)
    (tmp_path / "far" / "mine" / "__init__.py").touch()
    text = """
        from agentgym import Env
        from agentgym.core.tasks import Task, TaskSet

        class Mine(Env):
            @classmethod
            def default_tasks(cls, split="train"):
                return TaskSet([Task("1")])
            def reset(self, *, seed=None, options=None):
                super().reset(seed=seed, options=options)
                return [{"role": "user", "content": "Say something."}], {}
            def step(self, action):
                return self.outcome("Well.", 1.0, terminated=True, success=True)
    """
    (tmp_path / "far" / "mine" / "world.py").write_text(textwrap.dedent(text))
    agentgym = [sys.executable, "-m", "agentgym.cli"]
    for words in (
        ["eval", "far/mine/world.py", "--policy", "null", "--out", "r"],
        ["eval", "--resume", "r"],
        ["rescore", "r"],
    ):
        done = subprocess.run([*agentgym, *words], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
