"""`agentgym check`: what it prints, what it names, and that nothing can hang it."""

import json
import subprocess
import sys
import textwrap

import pytest

from agentgym.cli import main

ENVIRONMENTS = '''
import re

from agentgym import Env, Task, TaskSet


class Sound(Env):
    """Says no."""

    max_turns = 2

    @classmethod
    def default_tasks(cls, split="train"):
        if split not in ("train", "test"):
            raise ValueError(f"no split {split!r}")
        return TaskSet([Task(id=f"{split}-{i}") for i in range(5)])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        print("an environment that prints")
        return [{"role": "user", "content": self.task.id}], {}

    def step(self, action):
        return self.outcome("No." + self.read(action)[:0], success=False)


class Fails(Sound):
    def step(self, action):
        self.read(action)
        raise RuntimeError("out of order")


class Stuck(Sound):
    """Holds the interpreter: no other thread runs until the expression ends, which it does not."""

    def step(self, action):
        re.match(r"(a+)+$", "a" * 60 + "b")
'''


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with a module of environments in it, which is the current one."""
    name = f"authored_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(ENVIRONMENTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


def test_every_check_is_listed_below_the_outcome(here, capsys):
    assert main(["check", f"{here}:Sound"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(f"{here}:Sound: ok, 1 note (15 checks in ")
    assert [line.split()[0] for line in out[1:]] == ["note"] + ["ok"] * 14


def test_a_problem_names_the_line_and_is_exit_code_1(here, capsys):
    assert main(["check", f"{here}.py:Fails", f"{here}:Sound"]) == 1
    out = capsys.readouterr().out
    line = next(n for n, text in enumerate(ENVIRONMENTS.splitlines(), start=1) if "out of order" in text)
    assert f"RuntimeError: out of order ({here}.py:{line})" in out
    assert f"{here}:Sound: ok" in out


def test_json_is_the_only_thing_on_standard_output(here, capsys):
    assert main(["check", f"{here}:Sound", f"{here}:Fails", "--json"]) == 1
    sound, fails = json.loads(capsys.readouterr().out)
    assert (sound["id"], sound["ok"], fails["ok"]) == (f"{here}:Sound", True, False)
    assert {"check": "end", "state": "ok", "text": "", "place": ""} in sound["checks"]


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("frozen_lak", "did you mean 'frozen_lake'"),
        ("no.such:Env", "cannot import module 'no.such'"),
        ("{here}:Sond", "has no 'Sond'"),
        ("{here}.py", "defines Sound, Fails, Stuck: write {here}.py:Sound"),
        ("nowhere.py", "nowhere.py: there is no such file"),
        ("broken.py:Env", "SyntaxError: invalid syntax (broken.py:1)"),
        (
            "slip.py",
            "cannot import module 'slip' of 'slip.py': NameError: name 'Evn' is not defined (slip.py:3 in <module>)",
        ),
        ("slip:Slip", "cannot import module 'slip' of 'slip:Slip': NameError: name 'Evn' is not defined (slip.py:3 in"),
        ("leaves:Env", "cannot import module 'leaves' of 'leaves:Env': SystemExit: 1 (leaves.py:1 in <module>)"),
        ("uninstalled", "the folder uninstalled is not installed: pip install -e uninstalled"),
        ("gymnasium:FrozenLak-v1", "Did you mean: `FrozenLake`"),
        ("needy.py:Needy", "No module named 'nowhere_to_be_found'"),
    ],
)
def test_what_cannot_be_found_is_one_line_and_exit_code_2(here, named, words, tmp_path, capsys):
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "slip.py").write_text("from agentgym import Env\n\nclass Slip(Evn):\n    pass\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(1)\n")
    (tmp_path / "needy.py").write_text(
        textwrap.dedent("""
            from agentgym import Env

            class Needy(Env):
                def __init__(self, **kwargs):
                    import nowhere_to_be_found
        """)
    )
    (tmp_path / "uninstalled").mkdir()
    (tmp_path / "uninstalled" / "pyproject.toml").touch()
    assert main(["check", named.format(here=here)]) == 2
    err = capsys.readouterr().err
    assert words.format(here=here) in err
    assert err.count("\n") == 1


def test_from_within_a_project_it_is_the_project_that_is_to_be_installed(tmp_path, monkeypatch, capsys):
    (tmp_path / "uninstalled").mkdir()
    (tmp_path / "uninstalled" / "__init__.py").touch()
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["check", "uninstalled"]) == 2
    assert capsys.readouterr().err.endswith("pip install -e .\n")


def test_a_timeout_is_a_positive_number(here, capsys):
    assert main(["check", f"{here}:Sound", "--timeout", "0"]) == 2
    assert "--timeout must be a positive number" in capsys.readouterr().err


def test_not_even_what_holds_the_interpreter_hangs_it(here, monkeypatch):
    code = "import agentgym.cli.environments as c, agentgym.cli as m; c._GRACE = 1.0; m.main(['check', '%s:Stuck', '--timeout', '1'])"
    done = subprocess.run([sys.executable, "-c", code % here], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"{here}.py" in done.stderr
    assert " in step" in done.stderr
