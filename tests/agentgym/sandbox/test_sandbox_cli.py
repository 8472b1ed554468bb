"""The command `agentgym sandbox`: what it prints and how it ends. And what is known about sandboxes' owners."""

import json
import os
import subprocess
import sys

import pytest

from agentgym.cli import main
from agentgym.sandbox import SandboxSpec
from agentgym.sandbox.discovery import Found, found, marks, this_host

RUN = f"test-cli-{os.getpid()}"


@pytest.fixture
def no_engine(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such/docker.sock")


def ended_pid():
    """The id of a process that was there and is not any more."""
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    return done.stdout.decode().strip()


class TestOwner:
    def test_this_process_is_there(self):
        kept = marks("r")
        it = found("i", "docker", kept)
        assert (it.id, it.backend, it.run, it.pid, it.alive) == ("i", "docker", "r", os.getpid(), True)

    def test_one_that_has_ended_is_not(self):
        assert not found("i", "docker", marks("r") | {"pid": ended_pid()}).alive

    def test_another_process_that_was_given_its_id_is_not_taken_for_it(self):
        assert not found("i", "docker", marks("r") | {"born": "1"}).alive

    def test_one_that_nobody_has_waited_for_has_ended(self):
        code = "import json; from agentgym.sandbox.discovery import marks; print(json.dumps(marks('r')), flush=True); input()"
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            kept = json.loads(child.stdout.readline())
            assert found("i", "docker", kept).alive
            child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            assert not found("i", "docker", kept).alive

    @pytest.mark.parametrize("host", ["elsewhere", ""])
    def test_nobody_can_tell_from_another_host(self, host):
        assert found("i", "docker", marks("r") | {"pid": ended_pid(), "host": host}).alive

    @pytest.mark.parametrize("kept", [{}, {"run": "r"}, {"pid": "x", "born": "1", "host": "h", "started": "2"}])
    def test_marks_that_cannot_be_read_are_nobodys_to_remove(self, kept):
        it = found("i", "docker", kept)
        assert it.alive
        assert it.host != this_host()


class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (["build", "rust"], "no image 'rust'; there are python, search, sql, swe"),
            (["build", "--how", "registry", "--no-docker", "python"], "from packages"),
        ],
    )
    def test_are_one_line_and_exit_code_2(self, capsys, arguments, text):
        assert main(["sandbox", *arguments]) == 2
        err = capsys.readouterr().err
        assert text in err
        assert err.count("\n") == 1

    @pytest.mark.parametrize(
        "arguments", [[], ["bulid"], ["cleanup", "--all", "--run", "r"], ["build", "--how", "magic"]]
    )
    def test_of_the_command_line_too(self, capsys, arguments):
        with pytest.raises(SystemExit) as end:
            main(["sandbox", *arguments])
        assert end.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1

    def test_what_cannot_be_built_is_exit_code_1(self, capsys, no_engine):
        assert main(["sandbox", "build", "--docker", "python"]) == 1
        err = capsys.readouterr().err
        assert "unix:///no/such/docker.sock" in err
        assert err.count("\n") == 1


class TestListing:
    def test_a_back_end_that_is_not_here_is_named_on_stderr(self, capsys, no_engine):
        assert main(["sandbox", "list", "--json"]) == 0
        out = capsys.readouterr()
        assert isinstance(json.loads(out.out), list)
        assert "docker was not asked" in out.err
        assert "unix:///no/such/docker.sock" in out.err

    def test_cleanup_too_says_who_was_not_asked(self, capsys, no_engine):
        assert main(["sandbox", "cleanup", "--run", "nobody's"]) == 0
        out = capsys.readouterr()
        assert out.out == "0 removed\n"
        assert "docker was not asked" in out.err

    @pytest.mark.docker
    def test_shows_a_sandbox_until_cleanup_is_told_its_run(self, capsys):
        from agentgym.sandbox.backends.docker import open_docker

        box = open_docker(SandboxSpec(), RUN)
        try:
            assert main(["sandbox", "list", "--json"]) == 0
            (row,) = [r for r in json.loads(capsys.readouterr().out) if r["id"] == box.id]
            assert Found(**row).run == RUN
            assert (row["pid"], row["backend"], row["alive"]) == (os.getpid(), "docker", True)

            assert main(["sandbox", "list"]) == 0
            assert box.id in capsys.readouterr().out

            assert main(["sandbox", "cleanup", "--run", RUN]) == 0
            assert capsys.readouterr().out == "1 removed\n"
            assert main(["sandbox", "cleanup", "--run", RUN]) == 0
            assert capsys.readouterr().out == "0 removed\n"
        finally:
            box.close()

    @pytest.mark.bubblewrap
    def test_shows_sandboxes_of_bubblewrap_too(self, capsys):
        from agentgym.sandbox.backends.bubblewrap import open_bubblewrap

        box = open_bubblewrap(SandboxSpec(), RUN)
        try:
            assert main(["sandbox", "list", "--json"]) == 0
            assert box.id in [r["id"] for r in json.loads(capsys.readouterr().out) if r["backend"] == "bubblewrap"]
            assert main(["sandbox", "cleanup", "--run", RUN]) == 0
            assert capsys.readouterr().out == "1 removed\n"
        finally:
            box.close()


@pytest.mark.docker
def test_building_what_is_there_is_quick_and_says_where_it_is(capsys):
    from agentgym.sandbox.images import build as images

    if images.rootfs("python") is None:
        pytest.skip("run `agentgym sandbox build python`")
    assert main(["sandbox", "build", "python"]) == 0
    out = capsys.readouterr().out
    assert "python: already there" in out
    assert images.docker_tag("python") in out
    assert str(images.rootfs("python")) in out
