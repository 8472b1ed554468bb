"""The command line as a whole: what it costs, what it says to mistakes, how it ends."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentgym.cli import COMMANDS, command_line, main
from agentgym.core.usage_error import nearest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
AGENTGYM = [sys.executable, "-m", "agentgym.cli"]


def leaves(found=None, words=()):
    """Every command that runs something: its words and its parser."""
    found = found or command_line()
    below = [action for action in found._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        return [(words, found)]
    return [leaf for name, sub in below[0].choices.items() for leaf in leaves(sub, (*words, name))]


LEAVES = [pytest.param(*leaf, id="-".join(leaf[0])) for leaf in leaves()]


def options_of(found):
    return {
        name
        for action in found._actions
        if action.help != argparse.SUPPRESS
        for name in action.option_strings
        if name not in ("-h", "--help")
    }


# ---- what every command has


@pytest.mark.parametrize(("words", "found"), LEAVES)
def test_every_command_has_json_help_and_a_description(words, found):
    assert "--json" in options_of(found)
    assert callable(found.get_default("run"))
    for action in found._actions:
        assert action.help, f"{words}: {action.option_strings or action.dest} says nothing of itself"


def test_the_page_names_every_command_and_no_other():
    rows = re.findall(r"^\| (`.+?`) \|", PAGE.partition("| command |")[2].partition("\n\n")[0], re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert sorted(named) == sorted(" ".join(words) for words, _ in leaves())


def test_help_groups_the_commands_by_use(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for use, names in COMMANDS.items():
        block = re.search(rf"^{use}:\n((?:  .+\n)+)", text, re.MULTILINE)[1]
        assert [line.split()[0] for line in block.splitlines()] == list(names)
    assert re.findall(r"^  (\d+) ", text, re.MULTILINE) == ["0", "1", "2", "3", "130"]
    assert "uploaded" in text


def test_no_words_at_all_show_the_help_and_are_a_mistake(capsys):
    assert main([]) == 2
    assert "evaluate:" in capsys.readouterr().err


def test_help_is_also_a_word(capsys):
    for line in ("help data get", "data get --help"):
        with pytest.raises(SystemExit) as ended:
            main(line.split())
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith("usage: agentgym data get ")


# ---- what it costs

HEAVY = ("numpy", "gymnasium", "aiohttp", "rich", "torch", "ray", "transformers", "datasets", "yaml", "docker")


def imported_by(code):
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_help_and_completion_import_nothing_heavy():
    assert not imported_by("from agentgym.cli import command_line; command_line()") & set(HEAVY)
    line = {"_ARGCOMPLETE": "1", "COMP_LINE": "agentgym eval froz", "COMP_POINT": "18"}
    code = f"""
import contextlib, io, os
from agentgym.cli import command_line
from agentgym.cli.completion import answer_shell
os.environ.update({line})
answer = io.StringIO()
with contextlib.suppress(SystemExit):
    answer_shell(command_line(), output_stream=answer, exit_method=exit)
assert answer.getvalue().strip() == "frozen_lake", answer.getvalue()
"""
    assert not imported_by(code) & set(HEAVY)


def test_the_list_imports_no_environment_and_nothing_heavy():
    code = "import agentgym.cli, contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()): agentgym.cli.main(['list'])"
    found = imported_by(code)
    assert not found & ({*HEAVY} - {"rich"})
    assert "agentgym_envs.games.frozen_lake" not in found


# ---- mistakes


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("lst", "agentgym: no command 'lst': did you mean list? There are eval, "),
        ("evaluate", "agentgym: no command 'evaluate': did you mean eval?"),
        ("--jsn list", "agentgym: no option --jsn"),
        ("list --jso", "agentgym list: no option --jso: did you mean --json?"),
        ("doctor frozen_lake", "agentgym doctor: one argument too many: 'frozen_lake'"),
        ("list frozen_lake", "agentgym list: bad URL 'frozen_lake': write http://HOST:PORT"),
        ("list --tag", "agentgym list: argument --tag: expected one argument"),
        ("eval", "agentgym eval: "),
        ("eval --concurency 3", "agentgym eval: no option --concurency: did you mean --concurrency?"),
        ("gateway --max-tokens 9", "agentgym gateway: no option --max-tokens: did you mean --max-episode-tokens?"),
        (
            "eval frozen_lake --policy exprt",
            "agentgym eval: argument --policy: no 'exprt': did you mean expert? There are ",
        ),
        ("eval frozen_lake -k many", "agentgym eval: argument -k/--k: a whole number, not 'many'"),
        ("view --port x", "agentgym view: argument --port: a whole number, not 'x'"),
        ("compare", "agentgym compare: the following arguments are required: RUN"),
        ("play frozen", "agentgym play: no environment 'frozen': did you mean 'frozen_lake'?"),
        ("data lst", "agentgym data: no command 'lst': did you mean list?"),
        ("data", "agentgym data: the following arguments are required: COMMAND"),
        ("data get gsm8", "agentgym data: no data set 'gsm8': did you mean gsm8k?"),
        ("data get gsm8k --timeout -1", "agentgym data: --timeout must be positive, not -1"),
        ("sandbox build pyton", "agentgym sandbox: no image 'pyton': did you mean python?"),
        ("sandbox cleanup --al", "agentgym sandbox cleanup: no option --al: did you mean --all?"),
        ("completion powershell", "agentgym completion: argument SHELL: no 'powershell'; there are bash, zsh, fish"),
        ("doctor --netwrk", "agentgym doctor: no option --netwrk: did you mean --network?"),
        ("check froezn_lake", "agentgym check: no environment 'froezn_lake': did you mean 'frozen_lake'?"),
        ("eval frozen_lak --policy expert", "agentgym eval: no environment 'frozen_lak': did you mean 'frozen_lake'?"),
        ("check http://127.0.0.1:1/gsm8k", "agentgym check: http://127.0.0.1:1/gsm8k: gsm8k: no server answers: http:"),
        ("validate http://127.0.0.1:1/gsm8k", "agentgym validate: gsm8k: no server answers: http://127.0.0.1:1: "),
        ("play http://127.0.0.1:1/gsm8k", "agentgym play: gsm8k: no server answers: http://127.0.0.1:1: "),
    ],
)
def test_a_mistake_is_one_line_that_names_the_nearest(line, says, capsys):
    try:
        code = main(line.split())
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    assert code == 2
    assert said.out == ""
    assert said.err.startswith(says), said.err
    assert said.err.count("\n") == 1


def test_nothing_near_names_nothing():
    assert nearest("xyz", ["eval", "list"]) == ""
    assert nearest("evl", []) == ""
    assert nearest("evl", ["eval", "list"]) == ": did you mean eval?"


# ---- how it ends


def test_a_reader_that_leaves_ends_it_quietly():
    """`head` closes the pipe: no traceback, no complaint of the interpreter's as it ends."""
    for words in (["list"], ["list", "--json"], ["completion", "bash"], ["--help"]):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            [*AGENTGYM, *words], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
        os.close(writer)
        assert (done.returncode, done.stderr) == (0, ""), words


def test_interrupted_is_130_and_one_line(tmp_path):
    """Ctrl-C interrupts a command that waits: its suite is a named pipe that nobody writes to."""
    suite = tmp_path / "suite.yaml"
    os.mkfifo(suite)
    process = subprocess.Popen([*AGENTGYM, "eval", str(suite)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until, asleep = time.monotonic() + 60, 0
    while asleep < 10:  # looks in a row: it has started, and waits
        assert time.monotonic() < until
        state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        asleep = asleep + 1 if state == "S" else 0
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said == b"agentgym: interrupted\n"


def test_version():
    done = subprocess.run([*AGENTGYM, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert re.fullmatch(r"agentgym \d+\.\d+\.\S+\n", done.stdout)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("play {}", 2),
        ("validate {} -n 1", 2),
        ("eval {} --policy null -n 1", 2),
        ("export openenv {} --out x", 2),
        ("check {}", 1),
    ],
)
def test_an_environment_that_raises_as_it_is_made_is_told_with_its_place(words, code, tmp_path, monkeypatch, capsys):
    file = tmp_path / f"unlicensed_{words.split()[0]}.py"  # each a module of its own
    file.write_text(
        "import agentgym\n"
        "class Unlicensed(agentgym.Env):\n"
        "    @classmethod\n"
        "    def default_tasks(cls, split='train'):\n"
        "        return agentgym.TaskSet([agentgym.Task('1')], name=split)\n"
        "    def __init__(self):\n"
        "        raise RuntimeError('no licence')\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(words.format(f"{file.name}:Unlicensed").split()) == code
    said = capsys.readouterr()
    assert f"cannot be made: RuntimeError: no licence ({file.name}:7 in __init__)" in said.out + said.err
