"""Sandboxes of a server: leases, cut connections, limits that hold there, and that nothing stays. What a sandbox does is in
`test_sandbox_contract.py`, `test_sandbox_sessions.py` and `test_sandbox_limits.py`, which run on the remote back end too."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from hostile_programs import PROGRAMS
from other_processes import FORK, acquire_and
from remote_sandboxes import SECONDS, CuttingProxy, SandboxServer
from waiting import until

from agentgym.core.agent_failure import cause_of
from agentgym.sandbox import SandboxError, SandboxSpec, acquire, choose, describe
from agentgym.sandbox.api import SandboxesInUse
from agentgym.sandbox.backends import select as backends
from agentgym.sandbox.backends.remote import open_remote
from agentgym.sandbox.backends.select import Health, sandboxes
from agentgym.service.client.blocking_websocket import BlockingWebSocket

SPEC = SandboxSpec(memory=128 << 20, disk=8 << 20)
TOKEN = "a-token-of-sandboxes"

pytestmark = pytest.mark.bubblewrap


def started(backend):
    return SandboxServer("--sandbox-backend", backend, "--step-timeout", "50", "--sandbox-most", "pids=200")


@pytest.fixture(scope="module")
def server():
    with started("bubblewrap") as server:
        yield server


@pytest.fixture(scope="module", params=["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)])
def either(request, server):
    """A server of each back end."""
    if request.param == "bubblewrap":
        yield server
        return
    with started(request.param) as other:
        yield other


@pytest.fixture(scope="module")
def quick():
    """A server whose limits are short."""
    with SandboxServer("--sandbox-backend", "bubblewrap", "--resume-timeout", "0.5", "--max-sessions", "2") as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def elsewhere():
    """Servers that other modules' tests share, with sessions of theirs."""
    return list(SandboxServer.running)


@pytest.fixture(autouse=True)
def own_process(monkeypatch, elsewhere):
    """Each test begins as a new process would, and leaves no sandbox and no session."""
    for name in ("AGENTGYM_SANDBOX", "AGENTGYM_SANDBOXES", "AGENTGYM_SANDBOX_URL", "AGENTGYM_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AGENTGYM_RUN", f"remote-test-{os.getpid()}-{time.monotonic_ns()}")
    backends.process_state.begin_anew()
    yield
    backends.close_pools(20)
    backends.process_state.begin_anew()
    until(lambda: not of_this_run(), "the end of this test's sandboxes")
    ours = [server for server in SandboxServer.running if server not in elsewhere]
    until(lambda: not any(server.sessions() for server in ours), "the end of their sessions")


@pytest.fixture
def proxy(server):
    proxy = CuttingProxy(server.url)
    yield proxy
    proxy.close()


def of_this_run():
    return [found for found in sandboxes()[0] if found.run == os.environ["AGENTGYM_RUN"]]


def test_what_no_server_gives_is_refused_at_once(server, quick):
    why = r"'python': sandbox at \S+: pids=300: this server gives a sandbox 200 \(--sandbox-most\)"
    with pytest.raises(SandboxError, match=why):
        acquire(replace(SPEC, pids=300), server.url, timeout=20)
    acquire(replace(SPEC, pids=300), f"{server.url},{quick.url}").close()


class TestChoosing:
    def test_a_url_is_a_back_end(self, server):
        assert describe(server.url + "/") == f"{server.url}, because it was asked for"

    def test_the_environment_says_it_too(self, server, monkeypatch):
        monkeypatch.setenv("AGENTGYM_SANDBOX", server.url)
        assert choose().name == server.url
        monkeypatch.setenv("AGENTGYM_SANDBOX_URL", server.url)
        assert choose("remote").name == server.url

    @pytest.mark.parametrize(
        ("name", "why"),
        [
            ("remote", "AGENTGYM_SANDBOX_URL says where"),
            ("http://", "write http://HOST:PORT"),
            ("http://host:8000/code_mbpp", "nothing after it"),
            ("http://me:secret@host:8000", "must not hold a secret"),
            ("romote", "did you mean remote"),
        ],
    )
    def test_a_wrong_one_is_the_callers_mistake(self, name, why):
        with pytest.raises(ValueError, match=why):
            choose(name)

    def test_an_image_that_is_not_there_names_those_that_are(self, server):
        with pytest.raises(SandboxError, match=r"no image 'pyhton'.*Built here: .*python"):
            choose(server.url, "pyhton")

    def test_no_server(self, server):
        with pytest.raises(SandboxError, match=r"no server of sandboxes answers at http://127.0.0.1:1: .*--sandbox"):
            choose("http://127.0.0.1:1")
        assert choose(f"http://127.0.0.1:1,{server.url}").name.endswith(server.url), "another one has it"


class TestLeases:
    def test_the_next_one_finds_nothing_of_the_last(self, either):
        first = acquire(SPEC, either.url)
        first.write("/private/tests.py", "secret")
        first.exec("echo left > a; echo left > /tmp/b; sleep 600 & setsid sleep 600 &")
        first.session("shell").run("sleep 600 & cd /tmp")
        first.close()
        second = acquire(SPEC, either.url)
        assert second.id == first.id, "the same one, reset"
        assert "left" not in second.exec("cat a /tmp/b /private/*").stdout
        assert [found.run for found in of_this_run()] == [os.environ["AGENTGYM_RUN"]], "it has our label there"

    def test_files_of_any_content_and_size(self, either):
        box = acquire(SandboxSpec(), either.url)
        data = os.urandom(1 << 20) * 9
        box.write("folder/large", data)
        assert box.read("folder/large") == data
        with pytest.raises(ValueError, match="over the limit"):
            box.read("folder/large", limit=1 << 20)
        assert box.exec("wc -c", stdin=data).stdout.strip() == str(len(data)), (
            "larger than the server takes in a message"
        )

    def test_many_at_once(self, either):
        said = {}

        def work(number):
            box = acquire(SPEC, either.url)
            said[number] = box.exec(f"echo {number}").stdout
            box.close()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert said == {number: f"{number}\n" for number in range(6)}

    @pytest.mark.parametrize("name", ["fork_bomb_of_sessions", "memory", "endless_output", "daemon_by_setsid"])
    def test_a_hostile_program_is_contained(self, either, name):
        program = next(program for program in PROGRAMS if program.name == name)
        box = acquire(SPEC, either.url)
        result = box.exec(program.command, stdin=program.stdin, timeout=program.timeout)
        assert "BREACH" not in result.stdout + result.stderr
        box.reset()
        assert box.exec("echo well").stdout == "well\n"


class TestLimits:
    @pytest.mark.parametrize(
        "more", [{"memory": 1 << 40}, {"pids": 201}, {"network": True}, {"env": {"A": 1}}, {"cpus": -1}]
    )
    def test_what_the_server_does_not_give(self, server, more):
        with pytest.raises(SandboxError, match=next(iter(more))):
            open_remote(server.url, SandboxSpec(**more), "tests")

    def test_a_program_has_no_more_time_than_the_server_gives(self, server):
        box = acquire(SPEC, server.url)
        with pytest.raises(SandboxError, match=r"timeout=90.*45 s \(of --step-timeout 50\)") as raised:
            box.exec("true", timeout=90)
        assert cause_of(raised.value) is None, "the server refuses; no program of the agent's failed"
        assert box.exec("sleep 60", timeout=0.2).timed_out
        assert box.alive

    def test_a_server_whose_total_is_used_is_passed_over_and_waited_for(self, server):
        run = os.environ["AGENTGYM_RUN"]
        with SandboxServer("--sandbox-backend", "bubblewrap", "--sandbox-total", "count=1") as small:
            held = open_remote(small.url, SPEC, run)
            with pytest.raises(SandboxesInUse, match="--sandbox-total"):
                open_remote(small.url, SPEC, run)
            for _ in range(2):  # whichever comes first
                other = open_remote(f"{small.url},{server.url}", SPEC, run)
                assert other.exec("echo well").stdout == "well\n"
                other.close()
            threading.Timer(0.5, held.close).start()
            assert acquire(SPEC, small.url, timeout=SECONDS).exec("echo well").stdout == "well\n"

    def test_a_server_that_is_full_is_waited_for(self, quick):
        held = [acquire(SPEC, quick.url) for _ in range(2)]
        with pytest.raises(SandboxesInUse, match="all 2 sessions are in use"):
            open_remote(quick.url, SPEC, "tests")
        assert Health(lambda: open_remote(quick.url, SPEC, "tests"), lambda then: True).up_since(0.0), "it answers"
        threading.Timer(0.5, held[0].close).start()
        assert acquire(SPEC, quick.url, timeout=SECONDS).exec("echo well").stdout == "well\n"


class TestConnections:
    def test_one_that_is_cut_between_calls_is_not_noticed(self, proxy):
        box = open_remote(proxy.url, SPEC, os.environ["AGENTGYM_RUN"])
        session = box.session("python")
        session.run("x = 41")
        for _ in range(3):
            proxy.cut()
            session.run("x += 1")
        assert session.run("x").stdout == "44\n"
        assert box.channel.reconnects >= 3
        box.close()

    def test_a_command_whose_answer_is_lost_is_not_run_again(self, proxy):
        box = open_remote(proxy.url, SPEC, os.environ["AGENTGYM_RUN"])
        for number in range(1, 4):
            proxy.lose = 1
            assert box.exec("echo run >> runs; wc -l < runs").stdout == f"{number}\n"
        assert box.channel.reconnects == 3
        box.close()

    def test_one_that_is_cut_while_a_command_runs(self, proxy):
        box = open_remote(proxy.url, SPEC, os.environ["AGENTGYM_RUN"])
        threading.Timer(0.3, proxy.cut).start()
        assert box.exec("echo run >> runs; sleep 1; cat runs").stdout == "run\n"
        box.close()

    def test_one_that_is_cut_amid_a_file(self, proxy):
        box = open_remote(proxy.url, SandboxSpec(), os.environ["AGENTGYM_RUN"])
        data = os.urandom(5 << 20)
        threading.Timer(0.02, proxy.cut).start()
        box.write("file", data)
        threading.Timer(0.02, proxy.cut).start()
        assert box.read("file") == data
        box.close()

    def test_a_client_that_does_not_come_back_loses_it(self, quick):
        proxy = CuttingProxy(quick.url)
        box = open_remote(proxy.url, SPEC, os.environ["AGENTGYM_RUN"])
        proxy.refuse = True
        proxy.cut()
        until(lambda: not of_this_run(), "the removal of a sandbox whose client is gone")
        proxy.refuse = False
        with pytest.raises(SandboxError, match="the server no longer has the session"):
            box.exec("true")
        assert not box.alive
        proxy.close()

    def test_closing_wakes_a_thread_that_waits_and_ends_the_program(self, server):
        box = open_remote(server.url, SPEC, os.environ["AGENTGYM_RUN"])
        failed = []

        def wait():
            try:
                box.exec("sleep 45", timeout=45)
            except SandboxError as error:
                failed.append(str(error))

        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: box.channel.sent, "the call")
        box.close()
        thread.join(SECONDS)
        assert failed
        assert box.id in failed[0]
        began = time.monotonic()
        until(lambda: not of_this_run(), "the end of the sandbox")
        assert time.monotonic() - began < 30


class TestEnds:
    def test_an_end_with_sandboxes_in_hand_leaves_none(self, quick):
        done = acquire_and(quick.url, "")
        assert (done.returncode, done.stderr) == (0, "")
        until(lambda: not of_this_run(), "their removal")

    def test_a_killed_client_leaves_none(self, quick):
        done = acquire_and(quick.url, "boxes[0].session('shell')\nos.kill(os.getpid(), signal.SIGKILL)")
        assert done.returncode == -signal.SIGKILL
        until(lambda: not of_this_run(), "their removal")

    def test_a_fork_makes_its_own_and_leaves_its_parents_alone(self, server):
        done = acquire_and(server.url, FORK)
        assert (done.returncode, done.stderr) == (0, "")

    @pytest.mark.parametrize("backend", ["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)])
    def test_a_killed_server_leaves_none_and_the_client_is_told(self, backend):
        with SandboxServer("--sandbox-backend", backend) as server:
            box = acquire(SPEC, server.url)
            box.session("shell").run("sleep 600 &")
            server.kill()
            with pytest.raises(SandboxError, match=r"no server listens there any more|no longer has the session"):
                all(box.exec("true") for _ in range(1000))  # its worker may live a moment longer
            assert not box.alive
            until(lambda: not [found for found in of_this_run() if running(found)], "the end of its sandboxes")
        backends.process_state.begin_anew()
        with SandboxServer("--sandbox-backend", backend) as server:
            acquire(SPEC, server.url).close()
            until(lambda: len(of_this_run()) <= 1, "the removal of what was left")

    def test_a_server_that_ends_waits_for_loans_and_for_nothing_else(self):
        with SandboxServer("--sandbox-backend", "bubblewrap", "--drain-timeout", "60") as server:
            idle, lent = acquire(SPEC, server.url), acquire(SPEC, server.url)
            lent.exec("echo begun > state")
            idle.close()
            server.process.send_signal(signal.SIGTERM)
            until(lambda: "waiting for" in server.said(), "draining")
            assert lent.exec("cat state").stdout == "begun\n"
            with pytest.raises(SandboxError, match="ending"):
                open_remote(server.url, SPEC, "tests")
            lent.close()
            assert server.process.wait(SECONDS) == 0
        until(lambda: not of_this_run(), "the end of its sandboxes")


def running(found):
    """Whether a sandbox is more than a record of one that has ended."""
    if found.backend == "docker":
        return True
    from agentgym.sandbox.backends.bubblewrap import _kept

    return any(id == found.id and Path(f"/proc/{kept['bwrap']}").exists() for id, kept in _kept())


class TestServer:
    def test_tokens_are_asked_for_and_sandboxes_are_counted(self, tmp_path, monkeypatch):
        (tmp_path / "tokens").write_text(f"me {TOKEN}\n")
        with SandboxServer("--sandbox-backend", "bubblewrap", "--token-file", str(tmp_path / "tokens")) as server:
            with pytest.raises(SandboxError, match=r"rejects the bearer token \(401\): set AGENTGYM_TOKEN"):
                choose(server.url)
            with pytest.raises(SandboxError, match=r"rejects the bearer token \(401\): set AGENTGYM_TOKEN"):
                open_remote(server.url, SPEC, "tests")
            monkeypatch.setenv("AGENTGYM_TOKEN", TOKEN)
            box = acquire(SPEC, server.url)
            assert box.exec("echo well").stdout == "well\n"
            asked = urllib.request.Request(f"{server.url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
            with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
                assert "\nagentgym_sessions 1\n" in answer.read().decode()

    @pytest.mark.skipif(shutil.which("openssl") is None, reason="the certificate is made by openssl")
    def test_over_tls(self, tmp_path, monkeypatch):
        cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
        words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
        more = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert]
        subprocess.run([*words.split(), *more], check=True, capture_output=True, timeout=SECONDS)
        options = ("--sandbox-backend", "bubblewrap", "--tls-cert", str(cert), "--tls-key", str(key))
        with SandboxServer(*options) as server:
            with pytest.raises(SandboxError, match="certificate"):
                choose(server.url)
            monkeypatch.setenv("SSL_CERT_FILE", str(cert))
            box = acquire(SandboxSpec(), server.url)
            data = os.urandom(3 << 20)
            box.write("file", data)
            assert box.read("file") == data
            session = box.session("python")
            session.run("x = 41")
            assert session.run("x + 1").stdout == "42\n"
            box.close()

    def test_beside_environments(self):
        with SandboxServer("tic_tac_toe", "--sandbox-backend", "bubblewrap") as server:
            with urllib.request.urlopen(f"{server.url}/envs", timeout=SECONDS) as answer:
                assert [env["id"] for env in json.load(answer)["envs"]] == ["tic_tac_toe"]
            assert acquire(SPEC, server.url).exec("echo well").stdout == "well\n"

    @pytest.mark.parametrize(
        ("frame", "code"),
        [
            ({"id": 1, "call": "exec", "argv": ["true"], "env": {}, "cwd": ".", "timeout": 1}, "BAD_REQUEST"),
            ({"id": 1, "call": "hello", "env": {}}, "UNKNOWN_CALL"),
            ({"id": 2, "call": "ping"}, "BAD_REQUEST"),
            ({"id": 1, "call": "part", "data": "no base64!"}, "BAD_REQUEST"),
            ({"id": 1, "call": "start", "spec": {"rootfs": "/"}, "run": ""}, "BAD_REQUEST"),
            ({"id": 1, "call": "start", "spec": [], "run": ""}, "BAD_REQUEST"),
            ({"id": True, "call": "ping"}, "BAD_REQUEST"),
            ([], "BAD_REQUEST"),
            ("{", "BAD_FRAME"),
        ],
    )
    def test_what_is_no_request_is_refused_and_the_session_goes_on(self, quick, frame, code):
        deadline = time.monotonic() + SECONDS
        ws = BlockingWebSocket(f"{quick.url}/sandboxes/session", {}, None, deadline)
        hello = json.loads(ws.receive(deadline))
        assert (hello["protocol"], hello["last"]) == (1, 0)
        ws.send(frame if isinstance(frame, str) else json.dumps(frame), deadline)
        assert json.loads(ws.receive(deadline))["error"]["code"] == code
        last = frame["id"] if isinstance(frame, dict) and frame["id"] == 1 and frame["id"] is not True else 0
        ws.send(json.dumps({"id": last + 1, "call": "close"}), deadline)
        assert json.loads(ws.receive(deadline)) == {"id": last + 1, "result": {}}
        ws.close()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--sandbox-most", "memory=1"], "add --sandbox"),
        (["--sandbox", "--sandbox-most", "gpus=1"], "there are cpus, memory"),
        (["--sandbox", "--sandbox-most", "memory=lots"], "memory is a number over 0"),
        ([], "name environments to serve, or give --sandbox"),
    ],
)
def test_a_wrong_option_is_told_in_a_line(options, why):
    command = [sys.executable, "-m", "agentgym.cli", "serve", *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2
    assert why in done.stderr
    assert len(done.stderr.splitlines()) == 1
