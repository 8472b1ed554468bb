"""`agentgym init`: the package that it makes can be installed, and passes its own tests and every check as it is."""

import json
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from agentgym.cli import main
from agentgym.scaffold import KINDS, LONGEST, scaffold

LONG = "an_environment_whose_name_is_very_long_"[: LONGEST - 1] + "x"
FILES = [".dockerignore", ".gitignore", "Dockerfile", "README.md", "pyproject.toml"]


def ran(*words, cwd, path=None, seconds=120):
    environment = {**os.environ, **({"PYTHONPATH": str(path)} if path else {})}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


NAMES = {"plain": "brook_env", "tools": "creek_env", "sandbox": "delta_env"}


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A package of each kind, all installed into one folder."""
    folder = tmp_path_factory.mktemp("authors")
    roots = [scaffold(name, folder, kind)[0] for kind, name in NAMES.items()]
    # Offline: what they need is here already, and setuptools builds them.
    words = ("-q", "--no-deps", "--no-build-isolation", "--no-index", "--no-compile", "--disable-pip-version-check")
    ran("-m", "pip", "install", *words, "--target", folder / "site", *roots, cwd=folder)
    return folder


def test_the_package_is_installed_checked_validated_and_evaluated(packages):
    def agentgym(*words):
        printed = ran("-m", "agentgym.cli", *words, "--json", cwd=packages, path=packages / "site")
        return json.loads(printed)

    checked = agentgym("check", "brook_env", "creek_env")
    assert {(env["id"], c["state"]) for env in checked for c in env["checks"]} == {
        ("brook_env", "ok"),
        ("creek_env", "ok"),
    }
    validated = agentgym("validate", "brook_env", "creek_env", "-n", 10)
    assert {f["state"] for env in validated for f in env["findings"]} == {"ok"}, validated
    results = agentgym("eval", "brook_env", "creek_env", "--policy", "expert", "-n", 5, "--no-store")
    assert [cell["success"] for cell in results["cells"]] == [1.0, 1.0]
    tests = [packages / name / "tests" for name in ("brook_env", "creek_env")]
    printed = ran("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, cwd=packages, path=packages / "site")
    assert "8 passed" in printed


@pytest.mark.sandbox
@pytest.mark.slow
def test_one_that_runs_commands_passes_its_own_tests_and_is_proved(packages):
    words = ("validate", "delta_env", "-n", 4, "--json")
    (validated,) = json.loads(ran("-m", "agentgym.cli", *words, cwd=packages, path=packages / "site"))
    assert {f["state"] for f in validated["findings"]} == {"ok"}, validated
    root = packages / "delta_env"  # the first of its tests is the check
    assert "4 passed" in ran("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=root, path=packages / "site")


@pytest.mark.parametrize("name", ["ab", LONG])
def test_its_code_is_clean_whatever_it_is_called(name, tmp_path):
    for kind in KINDS:
        root, files = scaffold(name, tmp_path / kind, kind)
        assert [str(f.relative_to(root)) for f in files if f.parent == root] == FILES
        assert {f"{name}/__init__.py", f"{name}/env.py", f"tests/test_{name}.py"} <= {
            str(f.relative_to(root)) for f in files
        }
        assert not any("my_env" in file.read_text() or "MyEnv" in file.read_text() for file in files)
    ran("-m", "ruff", "check", "--no-cache", ".", cwd=tmp_path)
    ran("-m", "ruff", "format", "--no-cache", "--check", ".", cwd=tmp_path)


@pytest.mark.slow
def test_its_types_are_right(packages):
    config = packages / "brook_env" / "pyproject.toml"
    words = [word for name in NAMES.values() for word in ("-p", name)]
    # The site folder has them beside one another; what their tests say of types is not asked.
    ran("-m", "mypy", "--cache-dir", packages / "cache", "--config-file", config, *words, cwd=packages / "site")


def test_the_next_commands_are_printed(tmp_path, capsys):
    assert main(["init", "brook_env", "--dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for line in (
        "pip install -e '.[dev]'",
        "agentgym check brook_env",
        "agentgym validate brook_env",
        "python -m pytest",
    ):
        assert f"  {line}" in out
    assert main(["init", "creek_env", "--dir", str(tmp_path), "--tools", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert all((Path(made["folder"]) / file).is_file() for file in made["files"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("My-Env", "write at most 32 small letters, digits and _, such as my_env"),
        ("1env", "small letters"),
        ("a" * 33, "at most 32"),
        ("../up", "small letters"),
        ("class", "a word of Python's"),
        ("match", "a word of Python's"),
        ("json", "would hide the module of that name: choose another, such as json_env"),
        ("agentgym", "would hide the module"),
        ("task", "its class would hide Task, which the environment imports: choose another, such as task_env"),
        ("tool_set", "its class would hide ToolSet"),
        ("sokoban", "there is an environment 'sokoban' already"),
    ],
)
def test_a_name_that_will_not_do_is_refused_and_nothing_is_made(name, words, tmp_path, capsys):
    assert main(["init", name, "--dir", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_never_written_over(tmp_path, capsys):
    (tmp_path / "brook_env").mkdir()
    assert main(["init", "brook_env", "--dir", str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert list((tmp_path / "brook_env").iterdir()) == []


def test_where_nothing_can_be_made_it_says_where(capsys):
    assert main(["init", "brook_env", "--dir", "/proc"]) == 2
    assert "/proc/brook_env: cannot be made (No such file or directory)" in capsys.readouterr().err


def test_tools_and_sandbox_are_one_choice(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["init", "brook_env", "--dir", str(tmp_path), "--tools", "--sandbox"])
    assert stopped.value.code == 2


def test_the_templates_are_data_of_the_package():
    folder = resources.files("agentgym.scaffold") / "templates"
    assert {item.name for item in folder.iterdir()} == {"common", *KINDS}
