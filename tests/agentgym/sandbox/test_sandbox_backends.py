"""Choosing a back end, and the process's pools over real sandboxes of each."""

import logging
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest
from engine_proxy import EngineProxy
from other_processes import FORK, acquire_and, run_python
from waiting import until

from agentgym.sandbox import SandboxError, SandboxSpec, acquire, choose, describe, prepare
from agentgym.sandbox.backends import docker, engine
from agentgym.sandbox.backends import select as backends
from agentgym.sandbox.backends.select import remove_sandbox, sandboxes
from agentgym.sandbox.pool import Places, Room

NO_ENGINE = "unix:///no/such/docker.sock"
SPEC = SandboxSpec(memory=128 << 20, disk=8 << 20)


@pytest.fixture(autouse=True)
def own_process(monkeypatch):
    """Each test begins as a new process would, and leaves no sandbox."""
    monkeypatch.delenv("AGENTGYM_SANDBOX", raising=False)
    monkeypatch.delenv("AGENTGYM_SANDBOXES", raising=False)
    monkeypatch.setenv("AGENTGYM_RUN", f"backends-test-{os.getpid()}-{time.monotonic_ns()}")
    backends.process_state.begin_anew()
    yield
    backends.close_pools(20)
    backends.process_state.begin_anew()


@pytest.fixture(
    params=[pytest.param("docker", marks=pytest.mark.docker), pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)]
)
def backend(request):
    return request.param


def of_this_run():
    return [found for found in sandboxes()[0] if found.run == os.environ["AGENTGYM_RUN"]]


class TestChoosing:
    @pytest.mark.parametrize(
        ("word", "nearest"), [("dokcer", "docker"), ("bwrap", "bubblewrap"), ("automatic", "auto")]
    )
    def test_an_unknown_back_end_is_the_callers_mistake(self, word, nearest):
        with pytest.raises(ValueError, match=f"did you mean {nearest}"):
            choose(word)

    def test_an_unknown_image_is_the_callers_mistake(self):
        with pytest.raises(ValueError, match="pyhton"):
            choose("auto", image="pyhton")

    @pytest.mark.docker
    def test_an_engine_that_answers_and_has_the_image_is_taken(self):
        choice = choose()
        assert choice.name == "docker"
        assert engine.address() in choice.reason

    @pytest.mark.bubblewrap
    def test_without_an_engine_it_is_bubblewrap_and_the_reason_says_so(self, monkeypatch):
        monkeypatch.setenv("DOCKER_HOST", NO_ENGINE)
        choice = choose("auto")
        assert choice.name == "bubblewrap"
        assert NO_ENGINE in choice.reason

    @pytest.mark.docker
    @pytest.mark.bubblewrap
    def test_an_engine_without_the_image_is_not_taken(self, monkeypatch):
        monkeypatch.setattr("agentgym.sandbox.images.build.docker_tag", lambda name: f"agentgym/{name}:never-built")
        choice = choose()
        assert choice.name == "bubblewrap"
        assert "has no image agentgym/python:never-built" in choice.reason
        assert "agentgym sandbox build python" in choice.reason

    @pytest.mark.docker
    @pytest.mark.bubblewrap
    def test_an_engine_that_limits_no_layers_is_not_taken_for_a_writable_root(self, monkeypatch):
        """The engine of the tests is on ext4."""
        monkeypatch.delenv(docker.UNLIMITED, raising=False)
        choice = choose("auto", writable_root=True)
        assert (choice.name, choose("auto").name) == ("bubblewrap", "docker")
        assert "cannot limit a container's layer" in choice.reason
        assert f"{docker.UNLIMITED}=1" in choice.reason
        with pytest.raises(SandboxError, match="cannot limit a container's layer"):
            choose("docker", writable_root=True)
        assert not engine.client().containers(all=True, filters={"label": "agentgym.copy"})

    @pytest.mark.docker
    def test_unless_layers_without_a_limit_are_accepted(self, monkeypatch):
        monkeypatch.setenv(docker.UNLIMITED, "1")
        assert choose("auto", writable_root=True).name == "docker"

    def test_with_neither_the_error_says_what_to_install(self, monkeypatch, tmp_path):
        monkeypatch.setenv("DOCKER_HOST", NO_ENGINE)
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(SandboxError, match=r"apt install bubblewrap.*Docker Engine") as caught:
            choose()
        assert NO_ENGINE in str(caught.value)
        assert "bwrap" in str(caught.value)

    @pytest.mark.parametrize("name", ["docker", "bubblewrap"])
    def test_what_was_asked_for_and_is_not_there_is_no_reason_to_take_the_other(self, name, monkeypatch, tmp_path):
        monkeypatch.setenv("DOCKER_HOST", NO_ENGINE)
        monkeypatch.setenv("PATH", str(tmp_path))
        started = time.monotonic()
        with pytest.raises(SandboxError, match=f"by {name}, and it was asked for"):
            acquire(SPEC, backend=name)
        assert time.monotonic() - started < 20, "told at once, not after the time to wait for one"

    def test_what_only_docker_has_is_not_to_be_had_by_installing_bubblewrap(self, monkeypatch):
        monkeypatch.setenv("DOCKER_HOST", NO_ENGINE)
        with pytest.raises(SandboxError, match=r"start a Docker Engine and run `docker pull debian:12`") as caught:
            choose(image="debian:12")
        assert "install" not in str(caught.value)

    @pytest.mark.bubblewrap
    def test_an_image_that_was_not_built_is_told_at_once_and_not_after_the_time_to_wait(self, monkeypatch, tmp_path):
        monkeypatch.setenv("DOCKER_HOST", NO_ENGINE)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        started = time.monotonic()
        with pytest.raises(SandboxError, match="the image 'search' is not built: run `agentgym sandbox build search`"):
            acquire(SandboxSpec(image="search"))
        assert time.monotonic() - started < 20

    def test_only_docker_has_images_of_dockers(self, monkeypatch):
        monkeypatch.setenv("DOCKER_HOST", NO_ENGINE)
        with pytest.raises(SandboxError, match="it has no Docker images such as debian:bookworm"):
            choose("bubblewrap", image="debian:bookworm")

    def test_the_environment_says_which_where_the_caller_does_not(self, backend, monkeypatch):
        monkeypatch.setenv("AGENTGYM_SANDBOX", backend)
        assert describe() == f"{backend}, because AGENTGYM_SANDBOX says so"

    def test_the_environments_mistake_names_it(self, monkeypatch):
        monkeypatch.setenv("AGENTGYM_SANDBOX", "podman")
        with pytest.raises(ValueError, match="AGENTGYM_SANDBOX=podman"):
            choose()

    @pytest.mark.bubblewrap
    def test_the_choice_is_made_and_told_once(self, caplog, monkeypatch):
        monkeypatch.setenv("DOCKER_HOST", NO_ENGINE)
        with caplog.at_level(logging.INFO, "agentgym.sandbox"):
            for _ in range(3):
                choose()
            monkeypatch.delenv("DOCKER_HOST")
            assert choose().name == "bubblewrap"
        assert [r.message for r in caplog.records if "because" in r.message] == [
            f"sandboxes of image 'python': bubblewrap, because {choose().reason}"
        ]

    @pytest.mark.sandbox
    def test_a_failure_is_not_kept(self, monkeypatch):
        with monkeypatch.context() as nothing:
            nothing.setenv("DOCKER_HOST", NO_ENGINE)
            nothing.setenv("PATH", "/nowhere")
            with pytest.raises(SandboxError):
                choose()
        assert choose().name in backends.BACKENDS.shipped


class TestPools:
    def test_the_next_one_finds_nothing_of_the_last(self, backend):
        first = acquire(SPEC, backend)
        first.write("/private/tests.py", "secret")
        first.exec("echo left > a; echo left > /tmp/b; sleep 600 & setsid sleep 600 &")
        first.session("shell").run("sleep 600 & cd /tmp")
        first.close()
        second = acquire(SPEC, backend)
        assert second.id == first.id, "the same one, reset"
        assert second.exec("ls -A . /tmp /private; ls -d /proc/[0-9]* | wc -l").stdout.split()[-1] in ("3", "4")
        assert "left" not in second.exec("cat a /tmp/b /private/*").stdout

    def test_sandboxes_of_equal_specs_share_a_pool(self, backend):
        spec = SandboxSpec(memory=128 << 20, env={"A": "1", "B": "2"})
        same = SandboxSpec(memory=128 << 20, env={"B": "2", "A": "1"})
        first = acquire(spec, backend)
        first.close()
        assert acquire(same, backend).id == first.id
        other = acquire(SandboxSpec(memory=128 << 20, env={"A": "2"}), backend)
        assert other.id != first.id
        assert other.exec("echo $A").stdout == "2\n"

    def test_what_was_killed_while_nobody_used_it_is_not_lent(self, backend):
        first = acquire(SPEC, backend)
        first.close()
        until(lambda: next(iter(backends.process_state.pools.values())).idle)
        for found in of_this_run():
            remove_sandbox(found)
        second = acquire(SPEC, backend)
        assert second.id != first.id
        assert second.exec("echo well").stdout == "well\n"

    def test_what_is_killed_in_use_fails_with_its_name_and_is_replaced(self, backend):
        box = acquire(SPEC, backend)
        remove_sandbox(of_this_run()[0])
        with pytest.raises(SandboxError, match=box.id):
            box.exec("true")
        assert not box.alive
        box.close()
        assert acquire(SPEC, backend).exec("echo well").stdout == "well\n"

    def test_many_at_once(self, backend, monkeypatch):
        monkeypatch.setenv("AGENTGYM_SANDBOXES", "6")

        def play(number):
            box = acquire(SPEC, backend, timeout=100)
            try:
                said = box.session("python").run(f"print({number} * 2)", timeout=60).stdout
                return said == f"{number * 2}\n"
            finally:
                box.close()

        with ThreadPoolExecutor(16) as threads:
            assert all(threads.map(play, range(48)))
        assert len(of_this_run()) <= 6

    @pytest.mark.bubblewrap
    def test_the_limit_comes_from_the_environment(self, monkeypatch):
        monkeypatch.setenv("AGENTGYM_SANDBOXES", "1")
        held = acquire(SPEC, "bubblewrap")
        with pytest.raises(SandboxError, match=r"all 1 .*AGENTGYM_SANDBOXES"):
            acquire(SPEC, "bubblewrap", timeout=0.1)
        held.close()

    @pytest.mark.bubblewrap
    @pytest.mark.parametrize("wrong", ["0", "-3", "many", "1.5"])
    def test_a_wrong_limit_is_the_users_mistake(self, wrong, monkeypatch):
        monkeypatch.setenv("AGENTGYM_SANDBOXES", wrong)
        with pytest.raises(ValueError, match=f"AGENTGYM_SANDBOXES={wrong}"):
            acquire(SPEC, "bubblewrap")

    def test_memory_and_disk_are_limited_together_and_each_back_end_counts_what_it_uses(self, monkeypatch):
        """Under bubblewrap files count towards memory; docker keeps a writable root on disk."""
        monkeypatch.setenv("AGENTGYM_SANDBOX_MEMORY", str(SPEC.memory))
        monkeypatch.setenv("AGENTGYM_SANDBOX_DISK", "1000")
        writable = replace(SPEC, writable_root=True)
        needed = {
            name: backends._pool(name, spec).size
            for name, spec in (("bubblewrap", writable), ("docker", writable), ("http://h:1", writable))
        }
        assert needed["bubblewrap"] == Room(1, SPEC.memory, 0)
        assert needed["docker"] == Room(1, SPEC.memory, SPEC.disk)
        assert needed["http://h:1"] == Room(1, 0, 0)
        with pytest.raises(SandboxError, match="AGENTGYM_SANDBOX_DISK"):
            backends._pool("docker", writable).acquire()
        with pytest.raises(SandboxError, match="AGENTGYM_SANDBOX_MEMORY"):
            backends._pool("bubblewrap", replace(SPEC, memory=SPEC.memory + 1)).acquire()

    def test_one_is_prepared_and_its_caller_waits_for_no_start(self, backend):
        prepare(SPEC, backend)
        [pool] = backends.process_state.pools.values()
        until(lambda: pool.idle)
        ready = pool.idle[0][0].id
        with closing(acquire(SPEC, backend)) as box:
            assert box.id == ready
            assert box.exec("echo well").stdout == "well\n"
        assert len(of_this_run()) == 1

    def test_sandboxes_carry_the_runs_label(self, backend):
        box = acquire(SPEC, backend)
        assert [(found.id, found.pid) for found in of_this_run()] == [(box.id, os.getpid())]


@pytest.mark.docker
class TestEngineThatDies:
    @pytest.fixture
    def proxy(self, tmp_path, monkeypatch):
        proxy = EngineProxy(tmp_path / "docker.sock", engine.address().removeprefix("unix://"))
        monkeypatch.setenv("DOCKER_HOST", proxy.url)
        yield proxy
        backends.close_pools(5)
        proxy.stop()

    def test_a_call_fails_and_names_the_engine_and_all_goes_on_when_it_returns(self, proxy):
        box = acquire(SPEC, "docker")
        proxy.stop()
        with pytest.raises(SandboxError, match=box.id):
            box.exec("true")
        box.close()
        with pytest.raises(SandboxError, match=proxy.url):
            acquire(SPEC, "docker", timeout=1.0)
        threading.Timer(1.0, proxy.start).start()
        assert acquire(SPEC, "docker", timeout=30).exec("echo well").stdout == "well\n"

    def test_warm_ones_of_a_dead_engine_are_not_lent(self, proxy):
        warm = [acquire(SPEC, "docker") for _ in range(3)]
        for box in warm:
            box.close()
        pool = next(iter(backends.process_state.pools.values()))
        until(lambda: len(pool.idle) == 3)
        proxy.stop()
        with pytest.raises(SandboxError, match=proxy.url):
            acquire(SPEC, "docker", timeout=1.0)
        proxy.start()
        box = acquire(SPEC, "docker", timeout=30)
        assert box.id not in {old.id for old in warm}
        assert box.exec("echo well").stdout == "well\n"

    def test_the_pool_closes_quickly_though_the_engine_is_gone(self, proxy):
        held = [acquire(SPEC, "docker") for _ in range(3)]
        proxy.stop()
        started = time.monotonic()
        backends.close_pools()
        assert time.monotonic() - started < 10
        assert not any(box.alive for box in held)


class TestEndOfTheProcess:
    def test_an_end_with_sandboxes_in_hand_leaves_none_be_it_by_an_error(self, backend):
        endings = {0: "", 3: "raise SystemExit(3)"}
        with ThreadPoolExecutor() as threads:
            ends = dict(zip(endings, threads.map(lambda end: acquire_and(backend, end), endings.values()), strict=True))
        assert {code: done.returncode for code, done in ends.items()} == {code: code for code in endings}
        assert ends[0].stderr == ""
        until(lambda: not of_this_run())

    def test_a_killed_process_leaves_none_after_the_next_start(self, backend):
        done = acquire_and(backend, "boxes[0].session('shell')\nos.kill(os.getpid(), signal.SIGKILL)")
        assert done.returncode == -signal.SIGKILL
        acquire(SPEC, backend)
        until(lambda: {found.pid for found in of_this_run()} == {os.getpid()})

    def test_a_fork_makes_its_own_and_leaves_its_parents_alone(self, backend):
        done = acquire_and(backend, FORK)
        assert (done.returncode, done.stderr) == (0, "")
        until(lambda: not of_this_run())

    def test_importing_starts_nothing(self):
        done = run_python(
            "import sys, threading, agentgym.sandbox\n"
            "print(threading.active_count(), sorted({'docker', 'requests', 'asyncio', 'numpy'} & set(sys.modules)))"
        )
        assert done.stdout == "1 []\n"


@pytest.mark.bubblewrap
def test_the_places_of_a_process_are_its_own():
    assert backends.process_state.places is None
    acquire(SPEC, "bubblewrap")
    assert isinstance(backends.process_state.places, Places)


@pytest.mark.sandbox
def test_a_session_ends_when_its_sandbox_is_given_back():
    """It would speak in between the calls of whoever has the sandbox next."""
    box = acquire(SandboxSpec(), timeout=60)
    session = box.session("python")
    assert session.run("print(6 * 7)").stdout == "42\n"
    box.close()
    assert not session.alive
    with pytest.raises(SandboxError, match="returned to its pool"):
        session.run("1")
    session.close()
