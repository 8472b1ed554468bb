"""Processes that are held over many steps: a Python, a shell, a program of one's own. On both back ends."""

import textwrap
import time

import pytest
from waiting import until

# Reads frames, answers each on descriptor 3 with its text in capitals.
ECHO = textwrap.dedent("""
    import os, sys
    requests = os.fdopen(0, "rb")
    while head := requests.read(4):
        text = requests.read(int.from_bytes(head, "big")).decode()
        print("seen", len(text), flush=True)
        if text.startswith("exec:"):
            exec(text[5:])
        reply = text.upper().encode()
        os.write(3, len(reply).to_bytes(4, "big") + reply)
""")

# Stops every process that is new, as soon as it can.
STOPPER = """
import os, signal, threading
old = set(os.listdir("/proc"))
def stop():
    while True:
        for name in set(os.listdir("/proc")) - old:
            if name.isdigit():
                try:
                    os.kill(int(name), signal.SIGSTOP)
                except OSError:
                    pass
threading.Thread(target=stop, daemon=True).start()
"""


def daemon(seconds):
    """A command that sleeps in a session of the kernel's own."""
    return f"""python3 -c 'import os; os.setsid(); os.execvp("sleep", ["sleep", "{seconds}"])'"""


def sleeping(sandbox):
    """For how long those sleep that do, sorted."""
    shown = sandbox.exec("for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline | grep ^sleep; done").stdout
    return sorted(line.split()[1] for line in shown.splitlines())


# A program that ignores Ctrl-C and SIGTERM.
STUBBORN = "python3 -c 'import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; time.sleep(300)'"


@pytest.fixture
def python(sandbox):
    return sandbox.session()


@pytest.fixture
def shell(sandbox):
    return sandbox.session("shell")


@pytest.fixture
def own(sandbox):
    return sandbox.session(["python3", "-c", ECHO])


class TestPython:
    def test_names_are_kept(self, python):
        assert python.run("import math\ndef f(x):\n    return math.sqrt(x)\ny = 9").stdout == ""
        assert python.run("print(f(y))").stdout == "3.0\n"

    @pytest.mark.parametrize(
        ("code", "shown"),
        [
            ("1 + 1", "2\n"),
            ("x = 1\nx", "1\n"),
            ("'a\\n'", "'a\\n'\n"),
            ("None", ""),
            ("x = 5", ""),
            ("", ""),
            ("# nothing", ""),
            ("for i in range(2): i", ""),
            ("print('p'); 7", "p\n7\n"),
            ("'\N{SNOWMAN}'", "'\N{SNOWMAN}'\n"),
        ],
    )
    def test_the_value_of_a_last_expression_is_shown(self, python, code, shown):
        result = python.run(code)
        assert (result.exit_code, result.stdout, result.stderr, result.ok) == (0, shown, "", True)

    def test_an_exception_is_a_traceback_of_the_code_alone(self, python):
        python.run("def f():\n    return 1 / 0")
        result = python.run("x = 1\nf()")
        assert (result.exit_code, result.ok, python.alive) == (1, False, True)
        assert [line for line in result.stderr.splitlines() if "^" not in line] == [
            "Traceback (most recent call last):",
            '  File "<cell 2>", line 2, in <module>',
            "    f()",
            '  File "<cell 1>", line 2, in f',
            "    return 1 / 0",
            "ZeroDivisionError: division by zero",
        ]
        assert python.run("x").stdout == "1\n"

    @pytest.mark.parametrize(
        ("code", "shown"),
        [
            ("x = 1\ny = $", ["    y = $", "        ^", "SyntaxError: invalid syntax"]),
            ("x = (\n", ["    x = (", "        ^", "SyntaxError: '(' was never closed"]),
            ("return 5", ["    return 5", "    ^^^^^^^^", "SyntaxError: 'return' outside function"]),
        ],
    )
    def test_a_syntax_error_points_at_the_code_and_shows_nothing_of_ours(self, python, code, shown):
        first, *rest = python.run(code).stderr.splitlines()
        assert (first, rest) == (f'  File "<cell 1>", line {len(code.splitlines())}', shown)

    def test_a_cell_is_compiled_as_a_file_is(self, python):
        """What this project's own files say `from __future__` does not hold in it."""
        assert python.run("def f(x: int): pass\nf.__annotations__").stdout == "{'x': <class 'int'>}\n"

    @pytest.mark.parametrize("code", ["x = (", "  x = 1", "return", "\0", "x = '\ud800'; x.encode()"])
    def test_code_that_is_none(self, python, code):
        result = python.run(code)
        assert (result.exit_code, python.alive) == (1, True)
        assert "Error" in result.stderr

    @pytest.mark.parametrize(
        ("code", "exit_code"),
        [
            ("import sys; sys.exit(3)", 3),
            ("exit()", 0),
            ("import os; os._exit(7)", 7),
            ("import os; os.kill(os.getpid(), 9)", 137),
        ],
    )
    def test_an_end(self, python, code, exit_code):
        result = python.run(f"print('last', flush=True)\n{code}")
        assert (result.exit_code, result.stdout, result.timed_out, python.alive) == (exit_code, "last\n", False, False)
        with pytest.raises(ValueError, match="ended"):
            python.run("1")

    def test_an_endless_loop_is_interrupted_and_the_state_kept(self, python):
        python.run("x = 1")
        result = python.run("print('begun')\nwhile True: x = 2", timeout=0.5)
        assert (result.timed_out, result.ok, result.stdout, python.alive) == (True, False, "begun\n", True)
        assert "KeyboardInterrupt" in result.stderr
        assert python.run("x").stdout == "2\n"

    def test_one_that_takes_no_interrupt_is_killed(self, sandbox, python):
        python.run("import subprocess\nsubprocess.Popen(['sleep', '300'], start_new_session=True)")
        code = "import time\nwhile True:\n  try: time.sleep(60)\n  except BaseException: pass"
        began = time.monotonic()
        result = python.run(code, timeout=0.5)
        assert (result.timed_out, result.exit_code, python.alive) == (True, 137, False)
        assert time.monotonic() - began < 10
        assert "sleep" not in sandbox.exec("cat /proc/[0-9]*/comm").stdout

    def test_standard_input_is_empty(self, python):
        result = python.run("import sys; sys.stdin.read()")
        assert result.stdout == "''\n"
        assert python.run("input()").stderr.endswith("EOFError: EOF when reading a line\n")

    def test_a_cell_does_not_reach_the_next_request(self, python):
        python.run("import os; pid = os.fork()\nif not pid: os.setsid()")
        assert [python.run(str(n)).stdout for n in range(3)] == ["0\n", "1\n", "2\n"]

    def test_it_is_main_and_starts_processes(self, python):
        python.run("import multiprocessing as mp, pickle\ndef f(x): return x * x\nclass A: pass")
        assert python.run("__name__, type(pickle.loads(pickle.dumps(A()))) is A").stdout == "('__main__', True)\n"
        assert (
            python.run("with mp.get_context('fork').Pool(2) as pool: print(pool.map(f, range(4)))").stdout
            == "[0, 1, 4, 9]\n"
        )

    def test_modules_of_the_workspace(self, sandbox, python):
        sandbox.write("mine.py", "value = 42")
        assert python.run("import mine; mine.value").stdout == "42\n"


class TestShell:
    def test_folder_variables_and_functions_are_kept(self, shell):
        shell.run("cd /tmp; a=1; export B=2; f() { echo f$1; }; shopt -s nullglob")
        assert shell.run("pwd; echo $a; bash -c 'echo $B'; f 3; echo *.none").stdout == "/tmp\n1\n2\nf3\n\n"

    @pytest.mark.parametrize(
        ("command", "code", "stdout"),
        [
            ("true", 0, ""),
            ("false", 1, ""),
            ("(exit 42)", 42, ""),
            ("no-such-program", 127, ""),
            ("echo a | grep b", 1, ""),
            ("cat <<X\nhere $((1+1))\nX", 0, "here 2\n"),
            ("echo \"it's 'quoted'\" \\\\ '$x'", 0, "it's 'quoted' \\ $x\n"),
            ("for i in 1 2; do\necho $i\ndone", 0, "1\n2\n"),
            ("echo '!x' \"!$\"", 0, "!x !$\n"),
            ("read x; echo [$x]", 0, "[]\n"),
            ("", 0, ""),
            ("# comment", 0, ""),
            ("echo \N{SNOWMAN}", 0, "\N{SNOWMAN}\n"),
            ("break; echo b", 0, "b\n"),
            ("exec </dev/null; echo c", 0, "c\n"),
        ],
    )
    def test_exit_code_and_output(self, shell, command, code, stdout):
        result = shell.run(command)
        assert (result.exit_code, result.stdout, shell.alive) == (code, stdout, True)
        assert shell.run("echo next").stdout == "next\n"

    def test_the_last_exit_code_is_known_to_the_next_step(self, shell):
        shell.run("(exit 5)")
        assert shell.run("echo $?").stdout == "5\n"

    @pytest.mark.parametrize("command", ["if true", "echo 'open", "echo $(", "}"])
    def test_half_a_command_is_an_error_and_not_the_begin_of_the_next(self, shell, command):
        result = shell.run(command)
        assert (result.exit_code in {1, 2}, "unexpected" in result.stderr) == (True, True)
        assert shell.run("echo next").stdout == "next\n"

    def test_exit_ends_it(self, shell):
        result = shell.run("echo bye; exit 3")
        assert (result.exit_code, result.stdout, result.stderr, shell.alive) == (3, "bye\n", "", False)
        with pytest.raises(ValueError, match="ended"):
            shell.run("true")

    def test_a_command_that_takes_too_long_is_interrupted(self, shell):
        shell.run("x=1; cd /tmp")
        for command in "sleep 60; echo never", "while :; do x=2; done; echo never":
            result = shell.run(f"echo begun; {command}", timeout=0.5)
            assert (result.timed_out, result.stdout, shell.alive) == (True, "begun\n", True)
        assert shell.run("echo $x; pwd").stdout == "2\n/tmp\n"

    @pytest.mark.parametrize(
        "command",
        [
            STUBBORN,
            f"{STUBBORN} | cat",
            f"({STUBBORN})",
            STUBBORN.replace("import signal", "import os, signal").replace("time;", "time; os.setsid();"),
            f"x=$({STUBBORN})",
            f"{STUBBORN}; {STUBBORN}",
            "python3 -c 'import os, signal; signal.signal(2, signal.SIG_IGN); os.kill(os.getpid(), signal.SIGSTOP)'",
        ],
        ids=["alone", "pipe", "subshell", "own session", "substitution", "two", "stopped"],
    )
    def test_a_command_that_ignores_interrupts_costs_only_itself(self, sandbox, shell, command):
        shell.run("cd /tmp; x=1; f() { echo kept $x; }; sleep 300 & echo $! > /workspace/before")
        result = shell.run(f"echo begun; {command}; echo never", timeout=0.5)
        assert (result.timed_out, result.ok, shell.alive) == (True, False, True)
        assert result.stdout.startswith("begun\n")
        assert shell.run("f; pwd; kill -0 $(cat /workspace/before) && echo lives").stdout == "kept 1\n/tmp\nlives\n"
        assert sandbox.exec("cat /proc/[0-9]*/comm").stdout.split().count("python3") == 1  # the guest

    def test_a_python_session_keeps_its_state_too(self, sandbox):
        session = sandbox.session("python")
        session.run("import subprocess, sys; x = 1")
        ignore = "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(300)"
        result = session.run(
            f"try: subprocess.Popen([sys.executable, '-c', {ignore!r}]).communicate()\nfinally: x = 2", timeout=1
        )
        assert (result.timed_out, session.run("x").stdout) == (True, "2\n")

    def test_a_loop_of_such_commands_costs_the_shell(self, sandbox, shell):
        """A shell goes on with its loop when a command of it is killed."""
        result = shell.run(f"while :; do {STUBBORN}; done", timeout=0.5)
        assert (result.timed_out, shell.alive) == (True, False)
        assert sandbox.exec("cat /proc/[0-9]*/comm").stdout.split().count("python3") == 1

    def test_background_jobs_go_on(self, sandbox, shell):
        result = shell.run(
            "(while [ ! -e /tmp/go ]; do sleep 0.1; done; echo late > /tmp/late) & echo started", timeout=30
        )
        assert (result.exit_code, result.stdout, result.timed_out) == (0, "started\n", False)
        sandbox.write("/tmp/go", "")
        assert shell.run("wait; cat /tmp/late").stdout == "late\n"

    def test_a_command_cannot_hold_a_zero_byte(self, shell):
        with pytest.raises(ValueError, match="zero byte"):
            shell.run("echo \0")

    def test_no_descriptor_of_ours(self, shell):
        code = "import os; print([fd for fd in range(200) if os.path.exists(f'/proc/self/fd/{fd}')])"
        assert shell.run(f'python3 -c "{code}"').stdout == "[0, 1, 2]\n"


class TestOwnPrograms:
    def test_a_request_and_its_reply(self, own):
        result = own.run("hello \N{SNOWMAN}")
        assert (result.reply, result.stdout, result.exit_code, result.ok) == (
            "HELLO \N{SNOWMAN}",
            "seen 7\n",
            None,
            True,
        )
        assert own.run("").reply == ""

    def test_large_ones(self, own):
        text = "abc" * 500_000
        assert own.run(text, timeout=30).reply == text.upper()

    def test_its_end(self, own):
        result = own.run("exec:import sys; print('bye', file=sys.stderr); sys.exit(9)")
        assert (result.exit_code, result.reply, result.stderr, own.alive) == (9, "", "bye\n", False)

    def test_its_time_is_up(self, own):
        result = own.run("exec:import time; time.sleep(60)", timeout=0.5)
        assert (result.timed_out, own.alive) == (True, False)

    def test_a_reply_that_is_too_long(self, sandbox, own):
        result = own.run("exec:os.write(3, b'\\xff' * 5000)")
        assert (result.ok, own.alive) == (False, False)
        assert "reply of 4294967295 bytes" in result.stderr
        assert sandbox.exec("true").ok

    def test_what_nobody_asked_for_fills_nothing(self, open_sandbox):
        sandbox = open_sandbox(memory=64 << 20, disk=1 << 20)
        flood = "import os\nos.read(0, 9)\nos.write(3, b'\\0\\0\\0\\1x')\nwhile True: os.write(3, bytes(1 << 16))"
        session = sandbox.session(["python3", "-c", flood])
        assert session.run("begin").reply == "x"
        result = sandbox.exec("sleep 1; echo well")
        assert (result.stdout, result.oom_killed) == ("well\n", False)
        session.close()

    def test_a_program_that_is_not_there(self, sandbox):
        with pytest.raises(FileNotFoundError, match="no-such-program"):
            sandbox.session(["no-such-program"])
        with pytest.raises(ValueError, match="unknown session kind 'perl'"):
            sandbox.session("perl")
        assert sandbox.exec("true").ok

    def test_one_that_ends_at_once(self, sandbox):
        result = sandbox.session(["false"]).run("x")
        assert result.exit_code == 1


class TestSeveral:
    def test_they_are_apart(self, sandbox):
        first, second, shell = sandbox.session(), sandbox.session(), sandbox.session("shell")
        first.run("x = 1")
        second.run("x = 2")
        shell.run("x=3")
        assert [first.run("x").stdout, second.run("x").stdout, shell.run("echo $x").stdout] == ["1\n", "2\n", "3\n"]

    def test_closing_one_kills_what_it_started_and_nothing_else(self, sandbox):
        first, second = sandbox.session("shell"), sandbox.session("shell")
        first.run(f"({daemon(301)} &); sleep 302 & disown")
        second.run(f"({daemon(303)} &); sleep 304 & disown")
        until(lambda: sleeping(sandbox) == ["301", "302", "303", "304"])
        first.close()
        first.close()
        assert sleeping(sandbox) == ["303", "304"]
        assert not first.alive
        assert second.run("echo here").stdout == "here\n"

    def test_a_killed_one_leaves_the_others(self, sandbox):
        first, second = sandbox.session(), sandbox.session()
        second.run("x = 1")
        first.run("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass", timeout=0.3)
        assert (first.alive, second.alive, second.run("x").stdout) == (False, True, "1\n")

    def test_commands_beside_a_session(self, sandbox, python):
        python.run("x = open('/workspace/shared', 'w').write('from python')")
        assert sandbox.exec("cat shared; echo from shell > shared", timeout=5).stdout == "from python"
        assert python.run("open('shared').read()").stdout == "'from shell\\n'\n"

    def test_a_session_that_stops_whatever_is_started_does_not_stop_the_sandbox(self, sandbox, python):
        python.run(STOPPER)
        for _ in range(3):
            assert sandbox.exec("sleep 60", timeout=0.5).exit_code in {137, 126}
        python.close()
        assert sandbox.exec("echo through").stdout == "through\n"

    def test_output_between_steps_belongs_to_the_next(self, sandbox, shell):
        shell.run("(sleep 0.2; echo late; touch /tmp/said) &")
        until(lambda: sandbox.exec("test -e /tmp/said").ok)
        assert shell.run("echo now").stdout == "late\nnow\n"

    def test_output_is_limited_as_a_command_s(self, open_sandbox):
        sandbox = open_sandbox(output=100)
        session = sandbox.session()
        result = session.run("print('a' * 1000)")
        assert (result.stdout, result.truncated) == ("a" * 50 + "\n[901 bytes left out]\n" + "a" * 49 + "\n", True)
        assert (session.run("1").stdout, session.run("1").truncated) == ("1\n", False)
