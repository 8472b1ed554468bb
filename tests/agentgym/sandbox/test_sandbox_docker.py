"""The docker back end: what it does beyond the contract that all back ends keep."""

import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
import time
from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from agentgym.sandbox import SandboxError, SandboxSpec
from agentgym.sandbox.backends import engine, seccomp
from agentgym.sandbox.backends.docker import KEPT, AttachedStream, docker_sandboxes, open_docker, remove
from agentgym.sandbox.backends.select import cleanup
from agentgym.sandbox.images import build as images

RUN = f"test-docker-{os.getpid()}"


def of_run(run):
    return [f for f in docker_sandboxes() if f.run == run]


@pytest.fixture
def open_box():
    """Opens sandboxes that are closed after the test."""
    boxes = []

    def make(run=RUN, **settings):
        boxes.append(open_docker(SandboxSpec(**settings), run))
        return boxes[-1]

    yield make
    for box in boxes:
        box.close()
    assert of_run(RUN) == []


class TestAttachedStream:
    pieces = st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=200)), max_size=20)

    @given(pieces, st.randoms(use_true_random=False))
    def test_takes_streams_apart_wherever_the_data_is_cut(self, pieces, random):
        data = b"".join(bytes([stream, 0, 0, 0]) + len(piece).to_bytes(4, "big") + piece for stream, piece in pieces)
        attached, out = AttachedStream(None), b""
        while data:
            size = random.randint(1, len(data))
            out += attached.stdout_of(data[:size])
            data = data[size:]
        assert out == b"".join(piece for stream, piece in pieces if stream == 1)
        assert attached.stderr == b"".join(piece for stream, piece in pieces if stream == 2)[-KEPT:]

    def test_keeps_only_the_end_of_stderr(self):
        attached = AttachedStream(None)
        for _ in range(3):
            attached.stdout_of(bytes([2, 0, 0, 0]) + KEPT.to_bytes(4, "big") + b"a" * (KEPT - 1) + b"z")
        assert len(attached.stderr) == KEPT
        assert attached.stderr.endswith(b"az")


class TestNoEngine:
    @pytest.mark.parametrize("address", ["unix:///no/such/docker.sock", "tcp://127.0.0.1:1"])
    def test_names_the_address(self, monkeypatch, address):
        monkeypatch.setenv("DOCKER_HOST", address)
        with pytest.raises(SandboxError, match=address):
            open_docker(SandboxSpec(), RUN)
        with pytest.raises(SandboxError, match=address):
            docker_sandboxes()
        assert address in engine.unavailable()

    def test_one_over_ssh_names_the_package_that_it_takes(self, monkeypatch):
        if find_spec("paramiko") is not None:
            pytest.skip("paramiko is installed")
        monkeypatch.setenv("DOCKER_HOST", "ssh://nobody@no-such-host.invalid")
        assert engine.unavailable().endswith("needs paramiko: pip install paramiko")

    def test_a_socket_that_never_answers_is_given_up(self, monkeypatch, tmp_path):
        import socket

        with socket.socket(socket.AF_UNIX) as silent:
            silent.bind(str(tmp_path / "s"))
            silent.listen()
            monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/s")
            monkeypatch.setattr(engine, "PROBE_TIMEOUT", 0.5)
            assert "imed out" in engine.unavailable() or "in time" in engine.unavailable()

    def test_the_context_in_use_names_it_where_docker_host_does_not(self, monkeypatch, tmp_path):
        import hashlib
        import json

        monkeypatch.delenv("DOCKER_HOST", raising=False)
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("DOCKER_CONTEXT", raising=False)
        (tmp_path / "config.json").write_text('{"currentContext": "far"}')
        folder = tmp_path / "contexts" / "meta" / hashlib.sha256(b"far").hexdigest()
        folder.mkdir(parents=True)
        endpoints = {"docker": {"Host": "tcp://far.example:2375", "SkipTLSVerify": False}}
        (folder / "meta.json").write_text(json.dumps({"Name": "far", "Metadata": {}, "Endpoints": endpoints}))
        assert engine.address() == "tcp://far.example:2375"

    def test_an_unknown_image_is_a_mistake_and_lists_those_that_there_are(self):
        with pytest.raises(ValueError, match="no image 'pyhton'; there are python"):
            images.docker_tag("pyhton")


@pytest.mark.docker
class TestContainer:
    def test_runs_programs_and_is_gone_after_close(self, open_box):
        box = open_box()
        assert box.exec("echo hello; id -g").stdout == "hello\n65534\n"
        assert [f.id for f in of_run(RUN)] == [box.id]
        box.close()
        assert of_run(RUN) == []
        with pytest.raises(SandboxError):
            box.exec("true")
        box.close()

    def test_carries_the_run_and_the_process_that_made_it(self, open_box):
        box = open_box()
        (found,) = of_run(RUN)
        assert (found.id, found.backend, found.pid, found.alive) == (box.id, "docker", os.getpid(), True)
        assert abs(found.started - time.time()) < 60

    def test_has_the_least_that_the_guest_needs(self, open_box):
        box = open_box(memory=100 << 20, pids=20, cpus=0.5)
        host = engine.client().inspect_container(box.id)["HostConfig"]
        assert host["ReadonlyRootfs"]
        assert host["AutoRemove"]
        assert host["CapDrop"] == ["ALL"]
        assert (
            {"SETUID", "SETGID"}
            <= {name.removeprefix("CAP_") for name in host["CapAdd"]}
            <= {"SETUID", "SETGID", "SYS_RESOURCE"}
        )
        assert host["Sysctls"] == {"kernel.shm_rmid_forced": "1"}
        assert host["SecurityOpt"] == ["no-new-privileges", f"seccomp={seccomp.docker_profile()}"]
        assert host["NetworkMode"] == "none"
        assert host["Memory"] == host["MemorySwap"]
        assert host["NanoCpus"] == 5 * 10**8
        assert not host["Privileged"]
        assert not host["Binds"]

    def test_more_processors_than_the_machine_has_are_all_that_it_has(self, open_box):
        assert open_box(cpus=10_000).exec("true").ok

    def test_a_removed_container_is_an_error_that_says_so(self, open_box):
        box = open_box()
        remove(of_run(RUN)[0].id)
        with pytest.raises(SandboxError, match="container is gone"):
            box.exec("true")
        assert not box.alive

    def test_removing_what_is_gone_is_no_error(self, open_box):
        box = open_box()
        (found,) = of_run(RUN)
        box.close()
        remove(found.id)

    def test_a_missing_image_says_what_to_run(self):
        with pytest.raises(SandboxError, match="docker pull agentgym/nothing:1"):
            open_docker(SandboxSpec(image="agentgym/nothing:1"), RUN)

    def test_an_image_that_was_not_built_says_what_to_run(self, monkeypatch):
        monkeypatch.setattr(images, "FORMAT", -1)
        with pytest.raises(SandboxError, match="run `agentgym sandbox build python`"):
            open_docker(SandboxSpec(), RUN)

    def test_an_image_of_ones_own_is_named_by_its_reference(self, open_box):
        api = engine.client()
        api.tag(images.docker_tag("python"), "agentgym-test/own", "1")
        try:
            assert open_box(image="agentgym-test/own:1").exec("python3 -c 'print(1)'").stdout == "1\n"
        finally:
            api.remove_image("agentgym-test/own:1")

    def test_an_image_without_python_is_an_error_that_says_so(self, tmp_path):
        (tmp_path / "root").mkdir()
        (tmp_path / "root" / "only").write_text("a file")
        engine.load_image(engine.client(), tmp_path / "root", "agentgym-test/bare:1", "packages")
        try:
            with pytest.raises(SandboxError, match="has no python3, which sandboxes require"):
                open_docker(SandboxSpec(image="agentgym-test/bare:1"), RUN)
            assert of_run(RUN) == []
        finally:
            engine.client().remove_image("agentgym-test/bare:1")

    def test_a_network_needs_a_bridge(self, open_box):
        if engine.client().networks(names=["bridge"]):
            assert open_box(network=True).exec("ls /sys/class/net").stdout.split() != ["lo"]
        else:
            with pytest.raises(SandboxError, match="no bridge network"):
                open_box(network=True)

    def test_settings_that_the_engine_refuses_are_an_error(self):
        with pytest.raises(SandboxError, match="refuses"):
            open_docker(SandboxSpec(pids=-5, memory=-(1 << 40)), RUN)
        assert of_run(RUN) == []


@pytest.mark.docker
class TestOwner:
    def test_a_killed_process_leaves_no_container(self, tmp_path):
        run = f"{RUN}-killed"
        code = f"""
            import time
            from agentgym.sandbox import SandboxSpec
            from agentgym.sandbox.backends.docker import open_docker
            boxes = [open_docker(SandboxSpec(), {run!r}) for _ in range(2)]
            session = boxes[0].session("shell")
            session.run("sleep 1000 & disown; setsid sleep 1000 & echo")
            print("ready", flush=True)
            time.sleep(1000)
        """
        with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"ready\n"
            assert [f.alive for f in of_run(run)] == [True, True]
            process.kill()
        until(lambda: not of_run(run), "the work of the dead-man switch")

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
    def test_closing_it_in_a_forked_child_leaves_it_to_the_parent(self, open_box):
        box = open_box()
        child = multiprocessing.get_context("fork").Process(target=box.close)
        child.start()
        child.join(20)
        assert child.exitcode == 0
        assert box.exec("echo still here").stdout == "still here\n"

    def test_cleanup_leaves_alone_what_is_in_use_unless_its_run_is_named(self, open_box):
        box = open_box(run=f"{RUN}-used")
        assert box.id not in [f.id for f in cleanup()[0]]
        assert box.exec("true").ok
        assert [f.id for f in cleanup(run=f"{RUN}-used")[0]] == [box.id]
        assert of_run(f"{RUN}-used") == []

    def test_cleanup_removes_what_a_dead_process_left(self):
        from agentgym.sandbox.backends.docker import LABEL
        from agentgym.sandbox.discovery import marks

        # No dead-man switch here: nobody is attached, and nothing reads its input.
        ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
        labels = {**marks(f"{RUN}-left"), "pid": ended.stdout.decode().strip()}
        api = engine.client()
        container = api.create_container(
            images.docker_tag("python"), ["sleep", "1000"], labels={LABEL + key: value for key, value in labels.items()}
        )
        api.start(container["Id"])
        try:
            assert [f.alive for f in of_run(f"{RUN}-left")] == [False]
            assert f"{RUN}-left" in [f.run for f in cleanup()[0]]
            assert of_run(f"{RUN}-left") == []
        finally:
            for found in of_run(f"{RUN}-left"):
                remove(found.id)


@pytest.mark.docker
class TestEngineKilled:
    def test_calls_fail_at_once_and_a_new_engine_has_no_container_left(self, own_engine):
        boxes = [open_docker(SandboxSpec(), RUN) for _ in range(3)]
        session = boxes[1].session("python")
        assert session.run("1 + 1").stdout == "2\n"

        own_engine.kill()
        began = time.monotonic()
        for call in (lambda: boxes[0].exec("echo 1"), lambda: session.run("1"), lambda: boxes[2].read("x")):
            with pytest.raises(SandboxError):
                call()
        with pytest.raises(SandboxError, match=str(own_engine.folder)):
            open_docker(SandboxSpec(), RUN)
        for box in boxes:
            assert not box.alive
            box.close()
        assert time.monotonic() - began < 60, "a call hung"

        own_engine.start()
        with_new = open_docker(SandboxSpec(), RUN)
        assert with_new.exec("echo again").stdout == "again\n"
        with_new.close()
        lives = open_docker(SandboxSpec(), RUN)
        cleanup(run=f"{RUN}-none")
        assert len(engine.client().volumes()["Volumes"]) == 1, "of those with pseudo-terminals one is in use"
        assert lives.exec(["python3", "-c", "import os; print(os.ttyname(os.openpty()[1]))"]).stdout == "/dev/pts/0\n"
        cleanup(run=RUN)
        until(lambda: not of_run(RUN), "the removal of the rest")
        assert not engine.client().volumes()["Volumes"]

    def test_a_call_in_the_middle_does_not_hang(self, own_engine):
        own_engine.start()
        box = open_docker(SandboxSpec(), RUN)
        threading.Timer(1.0, own_engine.kill).start()
        began = time.monotonic()
        with pytest.raises(SandboxError):
            box.exec("sleep 100", timeout=100)
        assert time.monotonic() - began < 60
        box.close()
