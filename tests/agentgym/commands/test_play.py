"""`agentgym play`: with lines for a person, with a person's terminal, and with agents to look at."""

import fcntl
import io
import json
import os
import pty
import select
import subprocess
import sys
import termios
import time

import pytest

from agentgym.cli import main


@pytest.fixture
def play(monkeypatch, capsys):
    def run(*words, lines=""):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
        try:
            code = main(["play", *words])
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return run


def test_lines_of_standard_input_are_the_answers(play):
    code, out, err = play("frozen_lake", "--seed", "3", lines="right\n/hepl\n//x\n")
    assert (code, err) == (0, "")
    assert out.startswith("frozen_lake, task frozen_lake-test-243, seed 3\n")
    assert "> right\n" in out
    assert "did you mean /help?" in out
    assert "invalid: answer up, down, left or right" in out
    assert out.rstrip().endswith("quit after 2 turns: reward 0, no success")


def test_json_is_the_episode_and_all_that_standard_output_has(play):
    code, out, err = play("frozen_lake", "--task", "5", "--seed", "3", "--json", lines="right")
    record = json.loads(out)
    assert (code, record["end"], record["task_id"], record["seed"]) == (0, "quit", "frozen_lake-test-5", 3)
    assert record["turns"][0]["reply"]["content"] == "right"
    assert "Reach G" in err


def test_a_task_whose_id_is_a_number_is_found_by_it(play, tmp_path):
    (tmp_path / "numbered.py").write_text(
        "import agentgym\n"
        "class Numbered(agentgym.Env):\n"
        "    @classmethod\n"
        "    def default_tasks(cls, split='train'):\n"
        "        return agentgym.TaskSet([agentgym.Task(id) for id in ('1', '2', '7')], name=split)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return [{'role': 'user', 'content': self.task.id}], {}\n"
    )
    for given, played in (("1", "1"), ("2", "2"), ("0", "1")):
        out = play(f"{tmp_path}/numbered.py", "--task", given, "--json", lines="")[1]
        assert json.loads(out)["task_id"] == played


def test_the_same_seed_is_the_same_game_and_none_is_a_new_one(play):
    def openings(*words):
        return {
            json.loads(play("frozen_lake", "--json", *words)[1])["final_observation"][0]["content"] for _ in range(3)
        }

    assert len(openings("--seed", "5")) == 1
    assert len(openings()) > 1


def test_a_tool_is_called_and_answers(play):
    _, out, _ = play("gsm8k_tool", "--task", "0", lines="/call calculator 6 * 7\n")
    assert "/call calculator" in out
    assert "tool" in out
    assert "42" in out


@pytest.mark.parametrize("policy", ["expert", "random", "null"])
def test_agents_are_shown_turn_by_turn(play, policy):
    code, out, _ = play("frozen_lake", "--seed", "3", "--policy", policy, "--watch")
    assert code == 0
    assert out.count("assistant") >= 2
    assert (": reward 1, success" in out) == (policy == "expert")


def test_the_users_own_agent_plays_and_its_failure_names_the_place(play, tmp_path, monkeypatch):
    (tmp_path / "agents_of_play.py").write_text(
        "def down(messages, word='down'):\n    return word\n\ndef broken(messages):\n    return {}['no']\n"
    )
    monkeypatch.chdir(tmp_path)
    own = ("frozen_lake", "--task", "frozen_lake-test-0", "--seed", "3", "--max-turns", "2")
    code, out, _ = play(*own, "--agent", "agents_of_play:down", "--agent-kwargs", '{"word": "left"}')
    assert code == 0
    assert out.count("left\n") >= 2
    assert "max_turns after 2 turns" in out
    code, out, _ = play(*own, "--agent", "agents_of_play:broken")
    assert code == 1
    assert "KeyError: 'no' (agents_of_play.py:5 in broken)" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nope"], "no environment 'nope'"),
        (["frozen_lake", "--task", "zzz"], "no task 'zzz'; it has 1000, the first is 'frozen_lake-test-0'"),
        (["frozen_lake", "--split", "tset"], "tset"),
        (["frozen_lake", "--kwargs", "3"], "--kwargs: must be a JSON object"),
        (["frozen_lake", "--kwargs", '{"sise": 3}'], "takes no argument 'sise'"),
        (["frozen_lake", "--model", "m"], "--base-url"),
        (["frozen_lake", "--model", "m", "--base-url", "localhost:1"], "did you mean http://localhost:1?"),
        (["frozen_lake", "--agent", "no_such_module:run"], "there is no module 'no_such_module'"),
        (["frozen_lake", "--agent", "a:b", "--model", "m"], "only one player"),
        (["frozen_lake", "--agent", "command:true"], "plays whole episodes by itself: agentgym eval plays it"),
    ],
)
def test_mistakes_are_one_line(play, words, told, monkeypatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    code, out, err = play(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err


class Terminal:
    """A real pseudo-terminal with the command in it."""

    def __init__(self, *words):
        self.ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "agentgym.cli", "play", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - Ctrl-C needs it
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(theirs)
        self.text = ""

    def until(self, words):
        deadline = time.monotonic() + 60
        while words not in self.text:
            assert time.monotonic() < deadline, self.text
            if select.select([self.ours], [], [], 1)[0]:
                self.text += os.read(self.ours, 65536).decode(errors="replace")

    def type(self, keys):
        self.text = ""
        os.write(self.ours, keys)

    def end(self, keys):
        """Type keys and wait for the end. They are typed again where nothing happens, as a person would.

        Python misses a Ctrl-C that comes after the prompt is drawn and before it begins to wait for a key.
        """
        self.type(keys)
        try:
            for _ in range(20):
                while select.select([self.ours], [], [], 3)[0] and (data := os.read(self.ours, 65536)):
                    self.text += data.decode(errors="replace")
                if self.process.poll() is None and " after " not in self.text:
                    os.write(self.ours, keys)
        except OSError:  # the other side is closed
            pass
        return self.process.wait(20)


@pytest.mark.parametrize(
    ("keys", "code", "reason"), [(b"\x04", 0, "quit"), (b"\x03", 130, "interrupted"), (b"/quit\r", 0, "quit")]
)
def test_a_person_plays_at_a_terminal_and_leaves_politely(keys, code, reason):
    terminal = Terminal("frozen_lake", "--seed", "3")
    terminal.until("> ")
    terminal.type(b"right\r")
    terminal.until("wall")
    terminal.until("> ")
    assert terminal.end(keys) == code
    assert f"{reason} after 1 turn" in terminal.text
    assert "Traceback" not in terminal.text


def test_an_agent_that_is_watched_waits_for_enter_after_each_turn():
    terminal = Terminal("frozen_lake", "--seed", "3", "--policy", "expert", "--watch")
    for _ in range(2):
        terminal.until("[Enter]")
        terminal.type(b"\r")
    terminal.until("[Enter]")
    assert terminal.end(b"\x03") == 130
    assert "interrupted after 2 turns" in terminal.text
