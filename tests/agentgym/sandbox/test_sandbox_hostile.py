"""Hostile programs on real sandboxes of both back ends: each is contained, and the next episode is none the worse.

A back end's programs share one sandbox. After each, the host looks for processes that outlived it, resets the sandbox, and
runs an ordinary program there.
"""

import contextlib
import os
import re
import socket
import time
import uuid
from pathlib import Path

import hostile_escapes
import hostile_kernel
import hostile_more
import hostile_programs
import pytest
from hostile_sessions import ATTACKS

from agentgym.processes.cgroups import ROOT
from agentgym.sandbox.api import MEGABYTE, SandboxError, SandboxSpec
from agentgym.sandbox.pool import close_all

PROGRAMS = hostile_programs.PROGRAMS + hostile_kernel.PROGRAMS + hostile_escapes.PROGRAMS + hostile_more.PROGRAMS
SPEC = SandboxSpec(memory=256 * MEGABYTE, pids=64, disk=16 * MEGABYTE, output=64 * 1024)
MARK = f"hostile-{uuid.uuid4().hex}"  # in the environment of every hostile program, and so of all that it starts
SECRET = f"secret-{uuid.uuid4().hex}"
KILLING_SECONDS = 20.0  # a generous bound for what the guest needs beyond a program's own time
TESTS = "the tests as they were\n"
PROBE = """
import os
left = [f for d in ("/workspace", "/tmp", "/dev/shm", "/private") if os.path.isdir(d) for f in os.listdir(d)]
others = [p for p in os.listdir("/proc") if p.isdigit() and int(p) not in (1, os.getpid())]
shared = [len(open(f"/proc/sysvipc/{kind}").readlines()) - 1 for kind in ("shm", "sem", "msg")]
open("/workspace/a", "w").write("x"); os.mkdir("/tmp/b"); open("/tmp/b/c", "w").write("x")
modes = [oct(os.stat(p).st_mode & 0o777) for p in ("/workspace/a", "/tmp/b", "/tmp/b/c")]
print(sum(range(10)), left, others, shared, modes)
"""
UNHARMED = "45 [] [] [0, 0, 0] ['0o644', '0o755', '0o644']\n"


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """What hostile programs must not reach: a file, a secret, and two listening sockets, which nobody may connect to."""
    file = tmp_path_factory.mktemp("host") / "file"
    file.write_text("the host's own")
    file.chmod(0o666)
    name = f"agentgym-{uuid.uuid4().hex}"
    os.environ["HOST_SECRET"] = SECRET
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as abstract:
        tcp.bind(("127.0.0.1", 0))
        abstract.bind(f"\0{name}")
        for listener in (tcp, abstract):
            listener.listen()
            listener.setblocking(False)
        yield {
            "env": {
                "HOST_PORT": str(tcp.getsockname()[1]),
                "HOST_SOCKET": name,
                "HOST_FILE": str(file),
                "HOST_DOCKER": os.environ.get("DOCKER_HOST", "").removeprefix("unix://") or "/var/run/docker.sock",
                "SECRET_REVERSED": SECRET[::-1],
                "MARK": MARK,
            },
            "file": file,
            "listeners": (tcp, abstract),
        }
    del os.environ["HOST_SECRET"]


class Place:
    """The sandbox that a back end's programs share; replaced where a program has managed to end it."""

    def __init__(self, backend):
        self.backend = backend
        self.opened = 0
        self.box = None

    def sandbox(self):
        if self.box is None or not self.box.alive:
            self.box = open_box(self.backend)
            self.opened += 1
        return self.box


def open_box(backend):
    from agentgym.sandbox.backends.bubblewrap import open_bubblewrap
    from agentgym.sandbox.backends.docker import open_docker

    return {"docker": open_docker, "bubblewrap": open_bubblewrap}[backend](SPEC, "hostile-tests")


@pytest.fixture(
    scope="module",
    params=[pytest.param("docker", marks=pytest.mark.docker), pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)],
)
def place(request, host):
    place = Place(request.param)
    yield place
    if place.box is not None:
        close_all([place.box], 20)


@pytest.fixture
def box(place):
    box = place.sandbox()
    yield box
    with contextlib.suppress(SandboxError):  # a test that failed must not fail the next one
        box.reset()


def processes_with_mark():
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if MARK.encode() in (folder / "environ").read_bytes() and folder.name != str(os.getpid()):
                found.append(folder.name)
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


def none_with_mark(seconds=5.0):
    until = time.monotonic() + seconds
    while found := processes_with_mark():
        assert time.monotonic() < until, f"processes outlived the program: {found}"
        time.sleep(0.02)


def next_episode_is_unaffected(box, host):
    started = time.monotonic()
    box.reset()
    probe = box.exec(["python3", "-c", PROBE], timeout=20)
    assert (probe.stdout, probe.stderr, probe.exit_code) == (UNHARMED, "", 0)
    assert not probe.timed_out
    assert not probe.oom_killed
    assert time.monotonic() - started < 30
    box.reset()
    none_with_mark(0.5)
    assert host["file"].read_text() == "the host's own"
    for listener in host["listeners"]:
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_there_are_enough_of_them_and_each_has_a_name():
    names = [program.name for program in PROGRAMS] + [attack.name for attack in ATTACKS]
    assert len(names) == len(set(names))
    assert len(names) >= 40


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_a_hostile_program_is_contained(program, box, place, host):
    if (
        program.name.startswith("bytes_in_")
        and place.backend == "docker"
        and not (ROOT / "cgroup.controllers").exists()
    ):
        pytest.xfail("with control groups of version 1 an engine takes a limit of socket memory and does not set it")
    box.write("/private/tests.py", TESTS)
    result, failure = None, ""
    try:
        result = box.exec(program.command, stdin=program.stdin, timeout=program.timeout, env=host["env"])
    except SandboxError as error:
        failure = str(error)
    if result is None:
        assert program.oom is not False, failure
        assert not box.facts["firm_scores"], "the kernel must choose a program, and not the guest"
        assert "for want of memory" in failure
        box.close()
        none_with_mark()
        place.opened -= 1
        next_episode_is_unaffected(place.sandbox(), host)
        return
    said = result.stdout + result.stderr
    assert "BREACH" not in said
    assert re.search(program.says, said), said[-2000:]
    if program.ends != "any":
        assert result.timed_out == (program.ends == "late"), said[-2000:]
    if program.oom is not None:
        assert result.oom_killed == program.oom, (result.exit_code, said[-2000:])
    assert result.truncated or not program.truncated
    assert max(len(result.stdout.encode()), len(result.stderr.encode())) <= 3 * SPEC.output + 200
    assert result.seconds < program.timeout + KILLING_SECONDS
    none_with_mark()
    assert box.read("/private/tests.py").decode() == TESTS
    next_episode_is_unaffected(box, host)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: a.name)
def test_an_attack_on_a_session_is_contained(attack, box, host):
    set_mark = f"import os; os.environ['MARK'] = '{MARK}'" if attack.kind == "python" else f"export MARK={MARK}"
    session = box.session(attack.kind)
    session.run(set_mark)
    for step in attack.steps:
        if not session.alive:
            break
        started = time.monotonic()
        result = session.run(step, timeout=attack.timeout)
        assert time.monotonic() - started < attack.timeout + KILLING_SECONDS
    if attack.says is not None:
        assert re.search(attack.says, result.stdout + result.stderr)
    if attack.lives is not None:
        assert session.alive == attack.lives, result
    session.close()
    none_with_mark()
    fresh = box.session(attack.kind)
    assert fresh.run("print(40 + 2)" if attack.kind == "python" else "echo 42").stdout == "42\n"
    fresh.close()
    next_episode_is_unaffected(box, host)


def test_none_of_them_has_ended_the_sandbox(place):
    assert place.opened <= 1
