"""The workbench: a shell and an editor over a sandbox, on every back end."""

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.sandbox import SandboxSpec, acquire
from agentgym.tools.toolset import ToolError, ToolSet
from agentgym_envs.text_edits import inserted, numbered, replaced
from agentgym_envs.workbench import Workbench

NEW_SHELL = "Note: the shell had ended since the last command; this one ran in a new shell."


@pytest.fixture(
    scope="module",
    params=[pytest.param("bubblewrap", marks=pytest.mark.bubblewrap), pytest.param("docker", marks=pytest.mark.docker)],
)
def sandbox(request):
    box = acquire(SandboxSpec(image="python"), backend=request.param)
    yield box
    box.close()


@pytest.fixture
def bench(sandbox):
    sandbox.reset()
    made = Workbench(command_timeout=5.0, max_output=1000)
    made.begin(sandbox, "/workspace", prelude="export GREETING=hello")
    return made


@pytest.fixture
def tools(bench):
    return ToolSet([bench.bash, bench.edit])


@pytest.fixture
def edit(tools):
    return lambda command, path, **arguments: tools.call("edit", {"command": command, "path": path, **arguments})


class TestShell:
    def test_it_keeps_folder_variables_and_functions(self, bench):
        assert bench.bash("mkdir a; cd a; X=3; f() { echo $X; }") == "(no output)"
        assert bench.bash("pwd; f; echo $GREETING") == "/workspace/a\n3\nhello"

    def test_output_and_errors_are_in_their_order(self, bench):
        assert bench.bash("echo one; echo two >&2; echo three; false") == "one\ntwo\nthree\n(exit code 1)"

    def test_a_mistake_in_the_syntax_is_an_answer(self, bench):
        assert "syntax error" in bench.bash("echo )")
        assert bench.bash("echo on") == "on"

    def test_a_command_past_its_time_is_stopped_and_told(self, bench):
        bench.command_timeout = 0.5
        told = bench.bash("X=1; echo begun; sleep 60")
        assert told == "begun\nError: the command did not end within 0.5 seconds and was stopped; the shell goes on."
        assert bench.bash("echo $X") == "1"

    def test_a_shell_that_ended_is_started_again_and_told(self, bench):
        bench.bash("cd /tmp; X=1")
        assert "The command ended the shell (exit code 3)" in bench.bash("exit 3")
        assert bench.bash("echo $X; pwd") == f"{NEW_SHELL}\n/workspace"

    def test_one_that_is_killed_between_two_commands_too(self, bench, sandbox):
        bench.bash("true")
        sandbox.exec("kill -9 -1")
        bench.bash("echo lost")
        assert bench.bash("echo on").endswith("on")

    def test_long_output_loses_its_middle(self, bench):
        told = bench.bash("seq 10000")
        assert re.fullmatch(r"1\n2\n.*characters left out.*\n10000", told, re.DOTALL)
        assert len(told) < 1100

    def test_memory_that_is_used_up_is_told(self, bench):
        told = bench.bash("python3 -c 'bytearray(2 << 30)'")
        assert "MemoryError" in told or "memory was used up" in told

    @pytest.mark.parametrize("command", ["echo \0", "x" * (1 << 21)])
    def test_what_no_shell_can_take_is_refused(self, tools, command):
        assert tools.call("bash", {"command": command}).startswith("Error: a command must have no zero byte")

    def test_a_command_with_half_a_surrogate_pair_is_run_and_the_shell_goes_on(self, bench):
        bench.bash("kept=7")
        assert bench.bash("printf '\ud83d' | od -An -tx1 | tr -d ' '") == "eda0bd"
        assert bench.bash("echo $kept") == "7"

    def test_the_end_kills_what_the_shell_started(self, bench, sandbox):
        bench.bash("sleep 1000 &")
        bench.end()
        assert "sleep" not in sandbox.exec("ps ax").stdout


class TestEditor:
    def test_it_creates_views_replaces_and_inserts(self, edit):
        assert edit("create", "pack/m.py", file_text="import os\n\n\ndef f():\n    return 1\n") == (
            "Created pack/m.py: 5 lines."
        )
        assert edit("view", "pack/m.py", view_range=[4, -1]) == "     4\tdef f():\n     5\t    return 1"
        assert "     5\t    return 2" in edit("str_replace", "pack/m.py", old_str="return 1", new_str="return 2")
        assert "     1\t# top" in edit("insert", "pack/m.py", insert_line=0, new_str="# top")
        assert edit("view", "/workspace/pack/m.py") == (
            "     1\t# top\n     2\timport os\n     3\t\n     4\t\n     5\tdef f():\n     6\t    return 2"
        )
        assert "pack/\npack/m.py" in edit("view", ".")

    def test_python_that_no_longer_parses_is_told_and_the_edit_stands(self, edit, bench):
        edit("create", "m.py", file_text="x = (1)\n")
        told = edit("str_replace", "m.py", old_str="(1)", new_str="(1")
        assert "Warning: it is no valid Python now: line 1" in told
        assert bench.bash("cat m.py") == "x = (1"
        assert "Warning" not in edit("insert", "m.py", insert_line=1, new_str=", 3")  # was invalid before
        assert "Warning" not in edit("create", "notes.txt", file_text="x = (")

    def test_modes_and_links_stay(self, edit, bench):
        bench.bash("mkdir real; printf 'a\\n' > real/run.sh; chmod 755 real/run.sh; ln -s real/run.sh link")
        edit("str_replace", "link", old_str="a", new_str="b")
        assert bench.bash("stat -c '%a %F' real/run.sh; test -L link; cat link") == "755 regular file\nb"

    def test_names_with_line_breaks_are_those_of_files_of_their_own(self, edit, bench):
        bench.bash("echo old > a.py")
        edit("create", "a.py\n", file_text="new\n")
        edit("create", "a.py\nb", file_text="x\n")
        assert "1\ty" in edit("str_replace", "a.py\nb", old_str="x", new_str="y")
        assert bench.bash("cat a.py a.py$'\\n' a.py$'\\nb'") == "old\nnew\ny"

    def test_a_hidden_folder_is_listed_when_it_is_named(self, edit, bench):
        bench.bash("mkdir -p .github/workflows .github/.cache; touch .github/workflows/ci.yml .github/.cache/x")
        assert edit("view", ".github").endswith("hidden files:\nworkflows/\nworkflows/ci.yml")

    def test_bytes_that_are_no_utf8_stay(self, edit, bench):
        bench.bash("printf '\\351 old\\r\\n' > latin")
        assert "?" in edit("view", "latin") or "\ufffd" in edit("view", "latin")
        edit("str_replace", "latin", old_str="old", new_str="new")
        assert bench.bash("od -An -c latin").split() == ["351", "n", "e", "w", "\\r", "\\n"]

    @pytest.mark.parametrize(
        ("command", "path", "arguments", "said"),
        [
            ("view", "nothing", {}, "there is no such file or folder"),
            ("view", "f", {"view_range": [3, 4]}, "is not in the file, which has 2 lines"),
            ("view", "bin", {}, "is no text file"),
            ("view", "pipe", {}, "cannot be read"),
            ("view", "", {}, "path must name"),
            ("create", "f", {}, "the argument file_text is missing"),
            ("create", "f/below", {"file_text": ""}, "cannot create directory"),
            ("create", ".", {"file_text": ""}, "is a folder"),
            ("create", "/etc/x", {"file_text": ""}, "cannot be written"),
            ("str_replace", "f", {"old_str": "a", "new_str": "c"}, "old_str is 2 times in the file, at lines 1, 2"),
            ("str_replace", "f", {"old_str": "z"}, "old_str is not in the file"),
            ("str_replace", "f", {"old_str": "ab", "new_str": "ab"}, "are the same"),
            ("str_replace", "nothing", {"old_str": "z"}, "there is no such file"),
            ("insert", "f", {"insert_line": 9, "new_str": "x"}, "insert_line must be from 0 to 2"),
            ("insert", "f", {"new_str": "x"}, "the argument insert_line is missing"),
            ("insert", "f", {"insert_line": 0, "new_str": "\ud800"}, "half of a surrogate pair"),
            ("create", "\ud83d", {"file_text": ""}, "half of a surrogate pair"),
        ],
    )
    def test_a_mistaken_request_says_what_is_wrong(self, edit, bench, command, path, arguments, said):
        bench.bash("printf 'ab\\nac\\n' > f; printf '\\0' > bin; mkfifo pipe")
        told = edit(command, path, **arguments)
        assert told.startswith("Error: ")
        assert said in told
        assert bench.bash("cat f") == "ab\nac"


def windows(text):
    return text.replace("\n", "\r\n")


class TestTexts:
    text = st.text("ab\n")

    def test_lines_are_numbered_as_they_stand(self):
        assert numbered("a\r\nb\n") == "     1\ta\n     2\tb"
        assert numbered("") == ""

    @pytest.mark.parametrize(
        ("text", "line", "new", "made"),
        [
            ("a\nb\n", 1, "x", "a\nx\nb\n"),
            ("a\nb\n", 2, "x\ny\n", "a\nb\nx\ny\n"),
            ("a", 1, "x", "a\nx"),
            ("a\nb", 0, "x", "x\na\nb"),
            ("", 0, "x", "x\n"),
            ("a\r\nb\r\n", 1, "x\ny", "a\r\nx\r\ny\r\nb\r\n"),
            ("a\r\nb", 2, "x", "a\r\nb\r\nx"),
            ("a\r\nb\n", 1, "x", "a\r\nx\nb\n"),
        ],
    )
    def test_lines_are_inserted_whole(self, text, line, new, made):
        assert inserted(text, line, new) == made

    def test_a_replacement_tells_its_line(self):
        assert replaced("a\nb\nc\n", "b\n", "x\ny\n") == ("a\nx\ny\nc\n", 2)

    def test_of_a_text_that_is_all_over_a_large_file_the_first_lines_are_told(self):
        first = ", ".join(map(str, range(1, 21)))
        with pytest.raises(ToolError, match=f"is 1000000 times in the file, at lines {first}: add"):
            replaced("a\n" * 1_000_000, "a", "b")

    @pytest.mark.parametrize("end", ["\n", "\r\n"])
    def test_windows_line_ends_stay_whichever_the_agent_writes(self, end):
        made = replaced("a\r\nb\r\nc\r\n", f"a{end}b", f"x{end}y{end}z")
        assert made == ("x\r\ny\r\nz\r\nc\r\n", 1)

    @given(text, text, text)
    def test_an_edit_of_a_file_with_windows_line_ends_is_that_of_one_without(self, before, old, new):
        with contextlib.suppress(ToolError):
            made, line = replaced(f"{before}\n", old, new)
            assert replaced(windows(f"{before}\n"), old, new) == (windows(made), line)
        assert inserted(windows(f"{before}\n"), 1, new) == windows(inserted(f"{before}\n", 1, new))

    def test_mixed_line_ends_are_explained(self):
        with pytest.raises(ToolError, match=r"lines end with \\r\\n"):
            replaced("a\r\nb\r\nc\n", "a\nb", "c")


@pytest.mark.parametrize("wrong", [{"command_timeout": 0}, {"max_output": 10}, {"max_output": 1.5}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Workbench(**wrong)
