"""Shells complete: what `agentgym completion` prints is run by the real shells, with the keys that a user presses."""

import contextlib
import io
import json
import os
import pty
import select
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentgym.cli import command_line, main
from agentgym.cli.completion import SHELLS, answer_shell

BIN = Path(sys.executable).parent
BREAKS = " \t\n\"'@><=;|&(:"


def needs(shell):
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed here")


class Answered(Exception):
    """In place of the exit."""


@pytest.fixture
def words(monkeypatch):
    """The candidates that a shell gets for an unfinished line."""
    # It opens descriptor 9, which is pytest's here; argcomplete documents this method for such cases.
    monkeypatch.setattr("argcomplete.CompletionFinder._init_debug_stream", lambda self: None)

    def ask(line):
        shell = {
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_IFS": "\n",
            "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n",
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
        }
        for name, value in shell.items():
            monkeypatch.setenv(name, value)

        def leave(code):
            raise Answered

        answer = io.StringIO()
        with contextlib.suppress(Answered):
            answer_shell(command_line(), exit_method=leave, output_stream=answer, append_space=False)
        return [word for word in answer.getvalue().split("\n") if word]

    return ask


# ---- what comes next


@pytest.mark.parametrize(
    ("line", "some", "never"),
    [
        ("agentgym ", {"eval", "list", "doctor", "sandbox"}, {"--json"}),
        ("agentgym do", {"doctor"}, {"data"}),
        ("agentgym --ver", {"--version"}, set()),
        ("agentgym eval ", {"frozen_lake", "gsm8k", "gymnasium:"}, {"eval"}),
        ("agentgym eval frozen_lake s", {"sokoban", "sql"}, {"frozen_lake"}),
        ("agentgym eval sokoban --po", {"--policy"}, {"--json"}),
        ("agentgym eval sokoban --policy ", {"expert", "random"}, {"frozen_lake"}),
        ("agentgym eval sokoban --policy=ex", {"--policy=expert"}, {"--policy=random"}),
        ("agentgym eval sokoban --split test --s", {"--seed"}, {"--split"}),
        ("agentgym eval sokoban --policy expert --pol", {"--policy"}, set()),  # may be given again
        ("agentgym eval --model x --base-url ", set(), {"frozen_lake"}),
        ("agentgym compare ", set(), {"frozen_lake"}),
        ("agentgym play froz", {"frozen_lake"}, set()),
        ("agentgym eval sokoban --split t", {"test", "train"}, {"tic_tac_toe"}),
        ("agentgym eval --json tic", {"tic_tac_toe"}, set()),
        ("agentgym eval -n 5 tic", {"tic_tac_toe"}, set()),
        ("agentgym eval -n5 tic", {"tic_tac_toe"}, set()),
        ("agentgym sandbox ", {"build", "list", "cleanup"}, {"--json"}),
        ("agentgym sandbox build sq", {"sql"}, set()),
        ("agentgym data get gsm8k mb", {"mbpp"}, {"gsm8k"}),
        ("agentgym completion ", {"bash", "zsh", "fish"}, set()),
        ("agentgym completion --", {"--json", "--help"}, {"--words", "--line"}),
        ("agentgym list --tag x --t", {"--tag"}, set()),
        ("ls | agentgym do", {"doctor"}, set()),
        ("agentgym eval 'froz", {"frozen_lake"}, set()),
    ],
)
def test_what_a_word_may_become(line, some, never, words):
    found = set(words(line))
    assert some <= found
    assert not never & found
    last = line.rpartition(" ")[2].lstrip("'")
    assert all(word.startswith(last) for word in found)


def test_files_and_folders(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "other file.txt").touch()
    (tmp_path / ".hidden").mkdir()
    assert words("agentgym eval frozen_lake --out o") == ["out/"]
    assert words("agentgym eval frozen_lake --out out/") == []
    assert words("agentgym eval frozen_lake --out ") == ["out/"]
    assert words("agentgym eval frozen_lake --out .h") == [".hidden/"]
    assert words("agentgym eval frozen_lake --out nowhere/") == []


def test_runs_are_offered_where_a_run_is_meant_and_folders_where_folders_are(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "run.json").touch()
    assert words("agentgym eval --resume ")[0] == words("agentgym compare ")[0] == "runs/mine"
    assert words("agentgym view ") == ["runs/"]


def test_every_command_and_option_is_offered(words):
    """Whatever is added to the parser is completed with no more work."""
    commands = next(action for action in command_line()._actions if action.choices)
    for name, command in commands.choices.items():
        assert name in words("agentgym ")
        told = {n for a in command._actions if a.help != "==SUPPRESS==" for n in a.option_strings if n.startswith("--")}
        assert told <= set(words(f"agentgym {name} --"))


# ---- the command


def test_scripts_are_printed(capsys):
    for shell in SHELLS:
        assert main(["completion", shell]) == 0
        script = capsys.readouterr().out.removesuffix("\n")
        assert "agentgym" in script
        assert main(["completion", shell, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"shell": shell, "script": script}


def test_other_shells_are_the_users_mistake(capsys):
    assert main(["completion"]) == 2
    assert capsys.readouterr().err == "agentgym completion: name a shell: bash, zsh, fish\n"
    with pytest.raises(SystemExit) as ended:
        main(["completion", "bsh"])
    assert ended.value.code == 2
    assert "did you mean bash" in capsys.readouterr().err


# ---- bash, as it is


def environment(**more):
    return {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "TERM": "dumb", **more}


def compreply(line, cwd=None, breaks=BREAKS):
    """What bash would take: the function that `complete` knows, called with the variables that bash sets."""
    script = f"""
    set -eu
    eval "$(agentgym completion bash)"
    [[ $(complete -p agentgym) =~ -F\\ ([^ ]+) ]]
    COMP_WORDBREAKS={shlex.quote(breaks)} COMP_LINE={shlex.quote(line)} COMP_POINT={len(line)} COMP_TYPE=63
    "${{BASH_REMATCH[1]}}" agentgym
    [[ ${{#COMPREPLY[@]}} -eq 0 ]] || printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "--norc", "--noprofile", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
        cwd=cwd,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [word.rstrip() for word in done.stdout.splitlines()]


@needs("bash")
def test_bash_gets_whole_words_and_their_ends_after_a_break(tmp_path):
    (tmp_path / "a b").mkdir()
    assert compreply("agentgym eval froz") == ["frozen_lake"]
    assert compreply("agentgym eval froz --nonsense") == []
    assert compreply("agentgym eval x --policy=ex") == ["expert"], "bash keeps what stands before ="
    assert compreply("agentgym eval x --policy=ex", breaks=" \t\n") == ["--policy=expert"]
    assert compreply("agentgym eval x --out a", cwd=tmp_path) == ["a\\ b/"]


# ---- the keys that a user presses


class Terminal:
    """A shell on a terminal of its own. Every wait has an end."""

    def __init__(self, command, cwd, **more):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(cwd)
            os.execvpe(command[0], command, environment(**more))
        self.seen = ""

    def press(self, keys):
        self.seen = ""
        os.write(self.fd, keys.encode())

    def wait_for(self, text, seconds=40.0):
        until = time.monotonic() + seconds
        while text not in self.seen:
            left = until - time.monotonic()
            assert left > 0, f"no {text!r} in {self.seen!r}"
            if select.select([self.fd], [], [], min(left, 0.5))[0]:
                self.seen += os.read(self.fd, 65536).decode(errors="replace")
        return self.seen

    def close(self):
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)
        os.close(self.fd)


@pytest.mark.parametrize(
    ("command", "load"),
    [
        pytest.param(
            ["bash", "--norc", "--noprofile", "-i"], 'eval "$(agentgym completion bash)"', marks=needs("bash")
        ),
        pytest.param(
            ["zsh", "-f", "-i"],
            'autoload -U compinit && compinit -u -D && eval "$(agentgym completion zsh)"',
            marks=needs("zsh"),
        ),
        pytest.param(["fish", "--no-config", "-i"], "agentgym completion fish | source", marks=needs("fish")),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_tab_completes_at_a_terminal(command, load, tmp_path):
    terminal = Terminal(
        command, tmp_path, HOME=str(tmp_path), XDG_CONFIG_HOME=str(tmp_path), XDG_DATA_HOME=str(tmp_path)
    )
    try:
        terminal.press(f"{load} && echo lo''aded\r")
        terminal.wait_for("loaded")
        terminal.press("agentgym eval froz\t")
        terminal.wait_for("en_lake")
        terminal.press("--poli\t")
        terminal.wait_for("cy")
        terminal.press("exp\t")
        terminal.wait_for("ert")
        terminal.press("-n 2 --json\r")
        assert '"success": 1.0' in terminal.wait_for('"success": 1.0', 60.0)
    finally:
        terminal.close()
