"""What every sandbox does for its host: run a program, hand over files, start again empty, end. On both back ends."""

import errno
import hashlib
import os
import threading
import time

import pytest

from agentgym.sandbox import SandboxError

# Leaves its process group and session, as a daemon does.
DAEMON = """python3 -c 'import os; os.setsid(); os.execvp("sleep", ["sleep", "300"])'"""


class TestExec:
    def test_a_list_is_a_program_and_its_arguments(self, sandbox):
        result = sandbox.exec(["printf", "%s|", "a b", "$HOME", "*"])
        assert (result.exit_code, result.stdout, result.stderr, result.ok) == (0, "a b|$HOME|*|", "", True)

    def test_a_text_is_for_bash(self, sandbox):
        assert (
            sandbox.exec("for i in {1..3}; do echo $i; done | tail -1 && [[ x == x ]] && echo yes").stdout == "3\nyes\n"
        )

    @pytest.mark.parametrize("code", [0, 1, 3, 255])
    def test_exit_code(self, sandbox, code):
        result = sandbox.exec(f"exit {code}")
        assert (result.exit_code, result.ok) == (code, code == 0)

    @pytest.mark.parametrize(("name", "number"), [("TERM", 15), ("KILL", 9), ("SEGV", 11)])
    def test_a_signal_is_128_and_its_number(self, sandbox, name, number):
        assert sandbox.exec(f"kill -{name} $$").exit_code == 128 + number

    def test_stdout_and_stderr_are_apart(self, sandbox):
        result = sandbox.exec("echo out; echo err >&2; echo more")
        assert (result.stdout, result.stderr) == ("out\nmore\n", "err\n")

    @pytest.mark.parametrize(
        ("command", "code", "why"),
        [
            (["no-such-program"], 127, "no-such-program"),
            (["/workspace/none"], 127, "No such file"),
            (["/etc"], 126, "Permission denied"),
            (["/etc/passwd"], 126, "Permission denied"),
            ([""], 126, "empty"),
            (["echo", "x" * (1 << 18)], 126, "Argument list too long"),
            (["echo", "a\0b"], 126, "null"),
            (["echo", "\ud800"], 126, "surrogates not allowed"),
        ],
        ids=["absent", "absent path", "folder", "no program", "empty", "too long", "zero byte", "half a pair"],
    )
    def test_a_program_that_cannot_be_started(self, sandbox, command, code, why):
        result = sandbox.exec(command)
        assert result.exit_code == code
        assert why in result.stderr

    def test_a_file_without_a_first_line_that_says_how_to_run_it(self, sandbox):
        sandbox.write("odd", "hello", mode=0o755)
        result = sandbox.exec(["./odd"])
        assert (result.exit_code, "Exec format" in result.stderr) == (126, True)

    def test_no_command_at_all(self, sandbox):
        assert sandbox.exec([]).exit_code == 126

    @pytest.mark.parametrize("data", [b"", b"\0\xff bytes", "text \N{SNOWMAN}", b"x" * 3_000_000])
    def test_stdin(self, sandbox, data):
        result = sandbox.exec("sha1sum; wc -c < /dev/null", stdin=data)
        assert result.stdout.startswith(hashlib.sha1(data.encode() if isinstance(data, str) else data).hexdigest())

    def test_stdin_that_nobody_reads(self, sandbox):
        assert sandbox.exec("exec <&-; echo done", stdin=b"x" * 1_000_000).stdout == "done\n"

    def test_starts_in_the_workspace(self, sandbox):
        assert sandbox.exec("pwd").stdout == "/workspace\n"

    def test_cwd(self, sandbox):
        sandbox.write("a/b/file", "")
        assert sandbox.exec("pwd", cwd="/tmp").stdout == "/tmp\n"
        assert sandbox.exec("pwd", cwd="a/b").stdout == "/workspace/a/b\n"

    def test_cwd_that_is_not_there(self, sandbox):
        result = sandbox.exec("pwd", cwd="/nowhere")
        assert (result.exit_code, result.stdout) == (126, "")
        assert "/nowhere" in result.stderr

    def test_env_is_added_for_one_command(self, sandbox):
        assert sandbox.exec('echo "$A $HOME"', env={"A": "b c"}).stdout == "b c /workspace\n"
        assert sandbox.exec('echo "[$A]"').stdout == "[]\n"

    def test_env_of_the_settings(self, open_sandbox):
        sandbox = open_sandbox(env={"TOKEN": "t", "LANG": "C"})
        assert sandbox.exec('echo "$TOKEN $LANG $TMPDIR"').stdout == "t C /tmp\n"
        assert sandbox.exec('echo "$TOKEN"', env={"TOKEN": "u"}).stdout == "u\n"

    def test_nothing_but_the_promised_variables(self, sandbox):
        names = {line.split("=")[0] for line in sandbox.exec(["env"]).stdout.splitlines()}
        assert names == {"PATH", "HOME", "LANG", "TMPDIR", "USER", "LOGNAME"}

    def test_bytes_that_are_no_text(self, sandbox):
        assert sandbox.exec(r"printf 'a\377b'").stdout == "a\N{REPLACEMENT CHARACTER}b"

    def test_seconds_are_the_wall_time(self, sandbox):
        assert 0.3 <= sandbox.exec("sleep 0.3").seconds < 30

    def test_no_descriptor_but_the_three(self, sandbox):
        code = "import os; print([fd for fd in range(200) if os.path.exists(f'/proc/self/fd/{fd}')])"
        assert sandbox.exec(["python3", "-c", code]).stdout == "[0, 1, 2]\n"

    def test_a_program_is_not_told_of_broken_pipes_by_an_error(self, sandbox):
        assert sandbox.exec("yes | head -1; echo ${PIPESTATUS[0]}").stdout == "y\n141\n"


class TestTimeout:
    def test_it_ends_what_runs_too_long(self, sandbox):
        began = time.monotonic()
        result = sandbox.exec("echo begun; sleep 60; echo never", timeout=0.5)
        assert (result.stdout, result.timed_out, result.exit_code, result.ok) == ("begun\n", True, 137, False)
        assert 0.5 <= result.seconds < 40
        assert time.monotonic() - began < 40

    @pytest.mark.parametrize(
        "command",
        [
            "trap '' TERM INT HUP; while :; do :; done",
            "sleep 60 & sleep 60 & wait",
            f"{DAEMON} & sleep 60",
            "while :; do echo endless; done",
            "python3 -c 'import os\nwhile True: os.fork()' 2>/dev/null; sleep 60",
            "kill -STOP $$",
        ],
        ids=["ignores signals", "children", "own session", "endless output", "fork bomb", "stopped"],
    )
    def test_and_all_that_it_started(self, sandbox, command):
        assert sandbox.exec(command, timeout=1.0).timed_out
        assert processes(sandbox) == 0

    def test_one_that_is_not_reached_changes_nothing(self, sandbox):
        assert not sandbox.exec("true", timeout=100_000_000).timed_out

    @pytest.mark.parametrize("timeout", [0, -1.0])
    def test_no_time_at_all(self, sandbox, timeout):
        assert sandbox.exec("sleep 60", timeout=timeout).timed_out


class TestLeftovers:
    @pytest.mark.parametrize(
        "command",
        [
            "sleep 300 &",
            f"{DAEMON} & disown; sleep 0.5",
            f"({DAEMON} >/dev/null 2>&1 </dev/null &); sleep 0.5",
            "nohup bash -c 'trap \"\" TERM; while :; do sleep 1; done' >/dev/null 2>&1 &",
            "for i in $(seq 40); do sleep 300 & done",
        ],
        ids=["background", "disowned", "daemon", "stubborn", "many"],
    )
    def test_what_outlives_the_command_is_killed(self, sandbox, command):
        result = sandbox.exec(command, timeout=60)
        assert (result.exit_code, result.timed_out) == (0, False)
        assert result.seconds < 50
        assert processes(sandbox) == 0

    def test_also_beside_a_session(self, sandbox):
        session = sandbox.session("shell")
        session.run("sleep 200 & echo $! > kept")
        sandbox.exec(f"{DAEMON} & ({DAEMON} &); sleep 0.5")
        sleeping = sandbox.exec("for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline | grep ^sleep; done").stdout
        assert sleeping.split("\n") == ["sleep 200 ", ""]
        assert session.run("kill -0 $(cat kept) && echo lives").stdout == "lives\n"


class TestOutput:
    def test_all_of_what_fits(self, open_sandbox):
        sandbox = open_sandbox(output=1000)
        result = sandbox.exec("head -c 1000 /dev/zero | tr '\\0' a")
        assert (result.stdout, result.truncated) == ("a" * 1000, False)

    def test_the_first_and_the_last_half_of_what_does_not(self, open_sandbox):
        sandbox = open_sandbox(output=1000)
        result = sandbox.exec("printf BEGIN; head -c 5000 /dev/zero | tr '\\0' a; printf END; echo fine >&2")
        assert result.truncated
        assert result.stdout == "BEGIN" + "a" * 495 + "\n[4008 bytes left out]\n" + "a" * 497 + "END"
        assert result.stderr == "fine\n"

    def test_characters_are_not_cut(self, open_sandbox):
        sandbox = open_sandbox(output=1001)
        for character in "é", "\N{SNOWMAN}", "\N{GRINNING FACE}":
            text = sandbox.exec(["python3", "-c", f"print('{character}' * 2000)"], env={"PYTHONUTF8": "1"}).stdout
            first, middle, last = text.strip().split("\n")
            assert set(first) == set(last) == {character}
            size = len(character.encode())
            assert f"[{2000 * size + 1 - len((first + last).encode()) - 1} bytes left out]" == middle

    def test_an_endless_stream_takes_no_memory_and_no_time(self, sandbox):
        result = sandbox.exec("yes", timeout=2.0)
        assert result.truncated
        assert len(result.stdout) < sandbox.spec.output + 100
        assert sandbox.exec("true").ok


class TestFiles:
    @pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1, 5_000_000])
    def test_what_was_written_is_read(self, sandbox, size):
        data = os.urandom(size)
        sandbox.write("data.bin", data)
        assert sandbox.read("data.bin") == data
        assert sandbox.exec("stat -c '%s %a' data.bin; test -O data.bin && echo own").stdout == f"{size} 644\nown\n"

    def test_text_is_utf_8(self, sandbox):
        sandbox.write("/tmp/text", "snow \N{SNOWMAN}")
        assert sandbox.read("/tmp/text") == "snow \N{SNOWMAN}".encode()

    @pytest.mark.parametrize(("text", "data"), [("a\ud800b", b"a\xed\xa0\x80b"), ("a\udcffb", b"a\xffb")])
    def test_half_of_a_surrogate_pair_and_bytes_that_are_no_text_are_written(self, sandbox, text, data):
        sandbox.write("odd", text)
        assert sandbox.read("odd") == data

    @pytest.mark.parametrize("path", ["a/b/c.txt", "/workspace/a/b/c.txt", "/tmp/../workspace/a/b/c.txt"])
    def test_folders_are_made(self, sandbox, path):
        sandbox.write(path, "x", mode=0o600)
        assert sandbox.exec("cat a/b/c.txt; stat -c %a a/b/c.txt").stdout == "x600\n"

    @pytest.mark.parametrize(
        "path", ["", "/etc/x", "../x", "/", "/workspace", "/workspacex/y", "/tmp/../etc/x", "/proc/x", "../private"]
    )
    def test_only_where_it_may(self, sandbox, path):
        with pytest.raises(ValueError, match="not under /workspace, /tmp, /private"):
            sandbox.write(path, "x")

    def test_a_folder_in_the_way(self, sandbox):
        sandbox.write("a/b", "x")
        with pytest.raises(IsADirectoryError):
            sandbox.write("a", "x")
        with pytest.raises(OSError, match="a/b"):
            sandbox.write("a/b/c", "x")

    def test_a_name_that_is_too_long(self, sandbox):
        with pytest.raises(OSError) as raised:
            sandbox.write("x" * 300, "x")
        assert raised.value.errno == errno.ENAMETOOLONG

    def test_a_full_disk(self, open_sandbox):
        sandbox = open_sandbox(disk=1 << 20)
        sandbox.write("old", "kept")
        with pytest.raises(OSError) as raised:
            sandbox.write("old", b"x" * (2 << 20))
        assert raised.value.errno == errno.ENOSPC
        assert sandbox.read("old") == b"kept"
        assert sandbox.exec("ls -A").stdout == "old\n"

    def test_a_link_is_replaced_and_not_followed(self, sandbox):
        sandbox.exec("echo precious > /tmp/precious; ln -s /tmp/precious link; ln /tmp/precious hard; mkfifo fifo")
        for name in "link", "hard", "fifo":
            sandbox.write(name, "new")
            assert sandbox.read(name) == b"new"
        assert sandbox.read("/tmp/precious") == b"precious\n"

    def test_a_program_that_still_has_the_old_file_open_does_not_see_the_new(self, sandbox):
        sandbox.write("tests.py", "old")
        session = sandbox.session()
        session.run("f = open('tests.py', 'r+')")
        sandbox.write("tests.py", "new")
        session.run("f.write('bad'); f.flush()")
        assert sandbox.read("tests.py") == b"new"

    def test_private_files_can_be_read_and_not_changed(self, sandbox):
        sandbox.write("/private/tests/hidden.py", "secret = 1\n", mode=0o644)
        assert sandbox.exec("cat /private/tests/hidden.py").stdout == "secret = 1\n"
        for command in (
            "echo x > /private/tests/hidden.py",
            "rm -f /private/tests/hidden.py",
            "mv /private/tests /private/other",
            "touch /private/new",
            "chmod 777 /private/tests",
            "ln -s / /private/tests/link",
            "mount -t tmpfs none /private",
        ):
            assert sandbox.exec(command).exit_code != 0, command
        assert sandbox.read("/private/tests/hidden.py") == b"secret = 1\n"

    def test_private_is_not_reached_through_a_link(self, sandbox):
        sandbox.write("/private/a", "x")
        sandbox.exec("ln -s /private way")
        sandbox.write("way/a", "y")
        assert (sandbox.read("/private/a"), sandbox.read("way/a")) == (b"x", b"y")

    @pytest.mark.parametrize(
        ("path", "error"),
        [
            ("none", FileNotFoundError),
            ("/workspace", IsADirectoryError),
            ("secret", PermissionError),
            ("file/below", NotADirectoryError),
            ("loop", OSError),
            ("fifo", ValueError),
            ("/dev/zero", ValueError),
            ("/dev/tty", (OSError, ValueError)),
            ("/proc/self/mem", OSError),
        ],
    )
    def test_what_cannot_be_read(self, sandbox, path, error):
        sandbox.exec("touch file secret; chmod 000 secret; ln -s loop loop; mkfifo fifo")
        began = time.monotonic()
        with pytest.raises(error):
            sandbox.read(path)
        assert time.monotonic() - began < 30
        assert sandbox.exec("true").ok

    def test_the_error_names_the_file(self, sandbox):
        with pytest.raises(FileNotFoundError, match="some/file"):
            sandbox.read("some/file")

    def test_over_the_limit(self, sandbox):
        sandbox.write("big", b"x" * 1001)
        assert len(sandbox.read("big", limit=1001)) == 1001
        with pytest.raises(ValueError, match="big: 1001 bytes: over the limit of 1000"):
            sandbox.read("big", limit=1000)

    def test_a_file_without_a_size_is_limited_too(self, sandbox):
        assert b"Name" in sandbox.read("/proc/self/status")
        with pytest.raises(ValueError, match="over the limit"):
            sandbox.read("/proc/self/status", limit=10)
        assert sandbox.exec("true").ok

    def test_upload_a_folder(self, sandbox, tmp_path):
        (tmp_path / "tree/deep").mkdir(parents=True)
        (tmp_path / "tree/run.sh").write_text("echo ran\n")
        (tmp_path / "tree/run.sh").chmod(0o755)
        (tmp_path / "tree/deep/data").write_bytes(b"\0\1")
        (tmp_path / "tree/empty").mkdir()
        sandbox.upload(tmp_path / "tree")
        assert (
            sandbox.exec("tree/run.sh; cd tree; find . | sort").stdout
            == "ran\n.\n./deep\n./deep/data\n./empty\n./run.sh\n"
        )
        assert sandbox.read("tree/deep/data") == b"\0\1"

    def test_upload_a_file_as_private(self, sandbox, tmp_path):
        (tmp_path / "x.txt").write_text("x")
        sandbox.upload(tmp_path / "x.txt", "/private/in")
        assert sandbox.read("/private/in/x.txt") == b"x"

    def test_upload_refuses_links(self, sandbox, tmp_path):
        (tmp_path / "tree").mkdir()
        (tmp_path / "tree/link").symlink_to("/etc/passwd")
        with pytest.raises(ValueError, match="link"):
            sandbox.upload(tmp_path / "tree")
        with pytest.raises(ValueError, match="link"):
            sandbox.upload(tmp_path / "tree/link")
        with pytest.raises(FileNotFoundError):
            sandbox.upload(tmp_path / "absent")


class TestReset:
    def test_it_empties_what_can_be_written(self, sandbox):
        sandbox.write("/private/x", "x")
        sandbox.exec("mkdir -p a/b/c; touch a/b/.hidden /tmp/-rf '/tmp/a b' /dev/shm/s; ln -s / root; mkfifo f")
        sandbox.exec(["python3", "-c", "import socket; socket.socket(socket.AF_UNIX).bind('/tmp/socket')"])
        sandbox.reset()
        assert sandbox.exec("ls -A /workspace /tmp /private /dev/shm").stdout == (
            "/dev/shm:\n\n/private:\n\n/tmp:\n\n/workspace:\n"
        )

    def test_whatever_the_modes(self, sandbox):
        sandbox.exec(
            "mkdir -p a/b/c; touch a/b/c/d; chmod 000 a/b/c a/b a; mkdir /tmp/x; touch /tmp/x/y; chmod 555 /tmp/x"
        )
        sandbox.exec("chmod 000 /workspace /tmp")
        sandbox.reset()
        assert sandbox.exec("ls -A /tmp /workspace; touch a").stdout == "/tmp:\n\n/workspace:\n"

    def test_deep_and_wide_trees(self, sandbox):
        made = sandbox.exec(
            ["python3", "-c", "import os\nfor i in range(3000): os.mkdir('d'); os.chdir('d')\nopen('leaf', 'w')"],
            timeout=60,
        )
        assert made.ok, made
        sandbox.exec(["python3", "-c", "for i in range(5000): open(f'/tmp/{i}', 'w')"], timeout=60)
        sandbox.reset()
        assert sandbox.exec("ls -A /workspace /tmp | wc -l").stdout.strip() == "3"

    def test_it_kills_sessions_and_their_children(self, sandbox):
        session = sandbox.session("shell")
        session.run(f"sleep 300 & {DAEMON} & sleep 0.5")
        sandbox.reset()
        assert processes(sandbox) == 0
        with pytest.raises(ValueError, match="ended"):
            session.run("true")
        assert not session.alive

    def test_shared_memory_is_removed(self, sandbox):
        code = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print(libc.shmget(77, 4096, 0o1600) >= 0)
"""
        first = sandbox.exec(["python3", "-c", code]).stdout
        sandbox.reset()
        assert sandbox.exec("cat /proc/sysvipc/{shm,sem,msg} | wc -l").stdout == "3\n"
        assert sandbox.exec(["python3", "-c", code]).stdout == first == "True\n"

    def test_it_can_be_used_at_once_and_many_times(self, sandbox):
        for number in range(5):
            sandbox.write("n", str(number))
            assert sandbox.exec("cat n").stdout == str(number)
            sandbox.reset()


class TestEnd:
    def test_a_closed_one_says_so(self, open_sandbox):
        sandbox = open_sandbox()
        assert sandbox.alive
        session = sandbox.session()
        sandbox.close()
        sandbox.close()
        assert not sandbox.alive
        assert not session.alive
        session.close()
        for call in (
            lambda: sandbox.exec("true"),
            lambda: sandbox.read("x"),
            lambda: sandbox.write("x", ""),
            sandbox.reset,
            sandbox.session,
            lambda: session.run("1"),
        ):
            with pytest.raises(SandboxError, match=sandbox.id):
                call()

    def test_closing_it_ends_a_call_that_waits_in_another_thread(self, open_sandbox):
        sandbox = open_sandbox()
        caught = []

        def wait():
            try:
                sandbox.exec("sleep 60", timeout=60)
            except SandboxError as error:
                caught.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.5)
        sandbox.close()
        thread.join(10)
        assert not thread.is_alive()
        assert caught

    def test_it_ends_itself_when_nobody_calls(self, open_sandbox):
        sandbox = open_sandbox(idle_timeout=1.0)
        assert sandbox.exec("sleep 1.5; echo busy is not idle", timeout=10).ok
        time.sleep(2.5)
        with pytest.raises(SandboxError, match=sandbox.id):
            sandbox.exec("true")
        assert not sandbox.alive


def processes(sandbox):
    """How many programs run in it besides the one that counts."""
    count = (
        "import os; print(len([p for p in os.listdir('/proc') if p.isdigit() and p not in ('1', str(os.getpid()))]))"
    )
    result = sandbox.exec(["python3", "-c", count])
    assert result.ok, result
    return int(result.stdout)
