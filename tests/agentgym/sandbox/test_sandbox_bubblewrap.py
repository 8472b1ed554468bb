"""The embedded back end by itself: how it starts, what is left of it when its process is killed, what it does without rights."""

import errno
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from agentgym import cgroups
from agentgym.cgroups import Limits
from agentgym.sandbox import SandboxError, SandboxSpec, bubblewrap, seccomp
from agentgym.sandbox.bubblewrap import bubblewrap_sandboxes, open_bubblewrap, records, remove

needs_bubblewrap = pytest.mark.bubblewrap
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root")


@pytest.fixture
def start():
    boxes = []

    def start(run="tests", rootfs=None, **settings):
        boxes.append(open_bubblewrap(SandboxSpec(**settings), run, rootfs))
        return boxes[-1]

    yield start
    for box in boxes:
        box.close()


@needs_bubblewrap
class TestStart:
    def test_no_bwrap(self, monkeypatch):
        monkeypatch.setenv("PATH", "/nowhere")
        with pytest.raises(SandboxError, match="no bwrap on the PATH: install bubblewrap"):
            open_bubblewrap(SandboxSpec(), "tests")

    def test_an_image_that_there_is_not(self):
        with pytest.raises(SandboxError, match="no image 'debian:12'"):
            open_bubblewrap(SandboxSpec(image="debian:12"), "tests")

    def test_a_root_without_python_says_what_bwrap_said(self, tmp_path):
        (tmp_path / "usr").mkdir()
        with pytest.raises(SandboxError, match=r"bwrap ended with 1, bwrap: execvp python3: No such file") as raised:
            open_bubblewrap(SandboxSpec(), "tests", tmp_path)
        assert leftovers(str(raised.value).split()[1]) == []

    def test_this_machine_s_own_programs_where_the_image_was_not_built(self, start, monkeypatch):
        monkeypatch.setattr("agentgym.sandbox.images.rootfs", lambda name: None)
        box = start()
        code = "import sys; print(sys.version_info[:3], sys.argv); open('/etc/passwd').read()"
        assert box.exec(["python3", "-c", code]).stdout == f"{sys.version_info[:3]} ['-c']\n"
        assert box.exec("ls /etc/shadow /home /work").exit_code == 2
        assert box.exec("touch /etc/x /usr/x /x").stderr.count("Read-only") == 3

    def test_which_does_not_do_for_every_image(self, monkeypatch):
        monkeypatch.setattr("agentgym.sandbox.images.rootfs", lambda name: None)
        with pytest.raises(SandboxError, match="the image 'search' is not built: run `agentgym sandbox build search`"):
            open_bubblewrap(SandboxSpec(image="search"), "tests")

    def test_the_network_where_it_is_asked_for(self, start):
        ours = {line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]}
        box = start(network=True)
        assert set(box.exec("tail -n +3 /proc/net/dev | cut -d: -f1").stdout.split()) == ours
        assert box.read("/etc/hosts") == Path("/etc/hosts").read_bytes()
        with socket.create_server(("127.0.0.1", 0)) as server:
            code = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), timeout=3)"
            assert box.exec(["python3", "-c", code]).ok

    def test_the_end_of_the_thread_that_started_it_is_not_its_end(self, start):
        made = []
        thread = threading.Thread(target=lambda: made.append(start()))
        thread.start()
        thread.join()
        time.sleep(0.2)
        assert made[0].exec("true").ok


@needs_bubblewrap
class TestEnd:
    def test_nothing_is_left(self, start):
        box = start()
        box.session("shell").run("sleep 300 &")
        assert len(leftovers(box.id)) >= 1
        assert [found.run for found in bubblewrap_sandboxes() if found.id == box.id] == ["tests"]
        box.close()
        assert leftovers(box.id) == []

    def test_a_guest_that_is_killed_is_told_with_its_reason(self, start):
        box = start()
        for pid in bubblewrap._children(process_of(box)):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(SandboxError, match=r"failed in 'exec': .*bwrap ended with"):
            box.exec("true")
        assert not box.alive

    def test_one_that_is_stopped_does_not_hang_its_host(self, start, monkeypatch):
        monkeypatch.setattr("agentgym.sandbox.guest_sandbox.GRACE", 0.5)
        box = start()
        for pid in bubblewrap._children(process_of(box)):
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(SandboxError, match=r"did not answer 'exec' within 1\.0 s"):
            box.exec("true", timeout=0.5)
        box.close()
        assert process_of(box) is None

    def test_a_forked_child_does_not_end_it(self, start):
        box = start()
        pid = os.fork()
        if not pid:
            box.close()
            os._exit(0)
        os.waitpid(pid, 0)
        assert box.exec("echo alive").stdout == "alive\n"

    def test_a_host_that_is_killed(self, tmp_path, monkeypatch):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where records are: nobody else is to clean up here
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        code = """
import sys, time
from agentgym.sandbox import SandboxSpec
from agentgym.sandbox.bubblewrap import open_bubblewrap
box = open_bubblewrap(SandboxSpec(), "doomed")
box.session("shell").run("sleep 12345 &")
print(box.id, flush=True)
box.exec("while :; do :; done", timeout=1000)
"""
        host = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        id = host.stdout.readline().strip()
        time.sleep(0.3)
        (before,) = [found for found in bubblewrap_sandboxes() if found.id == id]
        assert (before.run, before.alive, before.pid, before.backend) == ("doomed", True, host.pid, "bubblewrap")
        host.kill()
        host.wait()
        wait_until(lambda: not any("12345" in line for line in command_lines()))
        (after,) = [found for found in bubblewrap_sandboxes() if found.id == id]
        assert not after.alive
        remove(after)
        remove(after)
        assert leftovers(id) == []

    def test_one_of_a_living_process_can_be_removed_too(self, start):
        box = start()
        (found,) = [found for found in bubblewrap_sandboxes() if found.id == box.id]
        remove(found)
        with pytest.raises(SandboxError):
            box.exec("true")
        assert leftovers(box.id) == []

    def test_a_record_that_cannot_be_read_hides_no_other(self, start):
        box = start()
        (records() / "agentgym-bad.json").write_text("{")
        try:
            assert box.id in [found.id for found in bubblewrap_sandboxes()]
        finally:
            (records() / "agentgym-bad.json").unlink()


@needs_bubblewrap
@needs_root
class TestWithoutRights:
    def test_no_control_groups(self, start, monkeypatch, caplog):
        def refuse(*_):
            raise OSError(errno.EROFS, "read-only")

        monkeypatch.setattr(cgroups, "create", refuse)
        bubblewrap._warn_once.cache_clear()
        with caplog.at_level(logging.WARNING):
            box = start(memory=300 << 20)
        assert "no control groups" in caplog.text
        assert "MemoryError" in box.exec(["python3", "-c", "bytearray(400 << 20)"]).stderr
        assert box.exec("sleep 60", timeout=0.3).timed_out

    def test_not_root(self, tmp_path):
        """The same as another user, with this machine's own Python, as our virtual environment may be out of its reach."""
        python = "/usr/bin/python3"
        if (
            not Path(python).exists()
            or subprocess.run(
                [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"], check=False
            ).returncode
        ):
            pytest.skip("no Python 3.11 in /usr/bin")
        package = tmp_path / "lib"
        subprocess.run(["cp", "-r", str(Path(bubblewrap.__file__).parents[1]), f"{package}"], check=True)
        (tmp_path / "agentgym").symlink_to(package)
        tmp_path.chmod(0o777)
        for parent in tmp_path.parents:
            if parent.stat().st_uid == os.getuid() and str(parent).startswith("/tmp/"):
                parent.chmod(0o755)
        result = subprocess.run(
            ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", python, "-c", NOT_ROOT],
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(tmp_path),
                "TMPDIR": str(tmp_path),
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        told = json.loads(result.stdout.splitlines()[-1])
        assert told["id"] == "65534 65534\n"
        assert told["two_users"] is False
        assert told["capabilities"] == ["CapEff:", "0" * 16]
        assert told["pids"] == "11\n"
        assert told["leftover"] == 0
        assert told["kept"] == "sleep 201 \n"
        assert told["guest"] == 1
        assert told["unshare"] == "-1 EPERM\n"
        assert "not root: programs are one user with the guest" in result.stderr


NOT_ROOT = """
import json, logging, time
logging.basicConfig()
from agentgym.sandbox import SandboxSpec, bubblewrap
bubblewrap.image_root = lambda name: None
box = bubblewrap.open_bubblewrap(SandboxSpec(pids=30), "tests")
told = {"two_users": box.facts["two_users"], "id": box.exec("echo $(id -u) $(id -g)").stdout}
told["capabilities"] = box.exec("grep CapEff /proc/self/status").stdout.split()
bomb = "import os, time\\ntry:\\n  while os.fork(): pass\\n  time.sleep(60)\\nexcept OSError as e: print(e.errno)"
told["pids"] = box.exec(["python3", "-c", bomb]).stdout
told["leftover"] = box.exec("sleep 200 & disown").exit_code
first, second = box.session("shell"), box.session("shell")
first.run("sleep 201 & disown")
second.run("sleep 202 & disown")
second.close()
told["kept"] = box.exec("for p in /proc/[0-9]*; do tr '\\\\0' ' ' < $p/cmdline | grep ^sleep; done").stdout
told["guest"] = box.exec("kill -9 1; kill -STOP 1; cat /proc/1/environ /proc/1/mem").exit_code
call = "import ctypes, errno\\nlibc = ctypes.CDLL(None, use_errno=True)\\nprint(libc.unshare(0x10000000), errno.errorcode[ctypes.get_errno()])"
told["unshare"] = box.exec(["python3", "-c", call]).stdout
box.write("/private/x", "x")
box.reset()
box.close()
print(json.dumps(told))
"""


class TestControlGroups:
    @needs_bubblewrap
    @needs_root
    @pytest.mark.parametrize("what", ["files", "segments"])
    def test_a_guest_outlives_programs_that_fill_their_memory_with_what_outlives_them(self, start, what):
        box = start(memory=64 << 20, disk=64 << 20)
        result = box.exec(["python3", "-c", FILL], stdin=what, timeout=4)
        assert not result.ok
        assert box.exec("true").exit_code in {0, 137}
        box.reset()
        assert box.exec("echo empty again").stdout == "empty again\n"

    def test_settings_of_version_2(self):
        assert cgroups.settings(Limits(memory=1000, pids=7, cpus=0.5), 2) == {
            "memory.max": "1000",
            "memory.swap.max": "0",
            "pids.max": "7",
            "cpu.max": "50000 100000",
        }

    def test_settings_of_version_1(self):
        settings = cgroups.settings(Limits(memory=1000, pids=7, cpus=2), 1)
        assert settings["memory.limit_in_bytes"] == settings["memory.memsw.limit_in_bytes"] == "1000"
        assert (settings["cpu.cfs_quota_us"], settings["cpu.cfs_period_us"]) == ("200000", "100000")

    def test_in_version_2_it_is_the_nearest_group_whose_children_can_have_limits(self, tmp_path, monkeypatch):
        monkeypatch.setattr(cgroups, "ROOT", tmp_path)
        (tmp_path / "user.slice" / "session.scope").mkdir(parents=True)
        with pytest.raises(OSError, match=r"cgroup\.subtree_control"):
            cgroups._delegating(tmp_path / "user.slice" / "session.scope")
        for folder, controllers in ((tmp_path, "cpuset cpu io memory pids\n"), (tmp_path / "user.slice", "memory\n")):
            (folder / "cgroup.subtree_control").write_text(controllers)
            assert cgroups._delegating(tmp_path / "user.slice" / "session.scope") == folder
        assert (tmp_path / "user.slice" / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"

    @needs_bubblewrap
    @needs_root
    def test_a_group_holds_and_kills(self):
        group = cgroups.create("agentgym-test-group", Limits(64 << 20, 10, 1.0))
        try:
            command = 'for g in $0; do echo $$ > "$g/cgroup.procs"; done; exec sleep 300'
            process = subprocess.Popen(["sh", "-c", command, " ".join(map(str, group.folders))])
            wait_until(lambda: group.processes() == [process.pid])
            assert cgroups.remove(group)
            assert process.wait(60) == -signal.SIGKILL
            assert not any(folder.exists() for folder in group.every)
        finally:
            cgroups.remove(group)


# Fills its memory, and asks that the guest be killed for it.
FILL = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.shmat.restype, libc.shmdt.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
open("/proc/self/oom_score_adj", "w").write("0")
segments = input() == "segments"
n = 0
while True:
    n += 1
    if not os.fork():
        if segments:
            place = libc.shmat(libc.shmget(0, 4 << 20, 0o1600), None, 0)
            ctypes.memset(place, 1, 4 << 20)
            libc.shmdt(place)
        else:
            open(f"/{['workspace', 'tmp', 'dev/shm'][n % 3]}/{n}", "wb").write(b"x" * (4 << 20))
        os._exit(0)
    try:
        os.wait()
    except OSError:
        pass
"""


class TestSystemCallFilter:
    ALLOW, KILL = 0x7FFF0000, 0x80000000

    @pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
    def test_refused_calls(self, machine, column):
        code = seccomp.program(machine)
        for name, numbers in seccomp.REFUSED.items():
            if numbers[column] is not None:
                assert run_filter(code, machine, numbers[column]) == 0x50000 | errno.EPERM, name
        assert run_filter(code, machine, seccomp.CLONE3[column]) == 0x50000 | errno.ENOSYS

    @pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
    def test_all_others_are_allowed(self, machine, column):
        code = seccomp.program(machine)
        refused = {numbers[column] for numbers in seccomp.REFUSED.values()} | {seccomp.CLONE3[column]}
        assert all(run_filter(code, machine, n) == self.ALLOW for n in range(470) if n not in refused)

    @pytest.mark.parametrize("bit", [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000])
    def test_clone_makes_processes_and_threads_and_no_namespaces(self, bit):
        code = seccomp.program("x86_64")
        assert run_filter(code, "x86_64", 56, 0x003D0F00) == self.ALLOW  # as a thread is made
        assert run_filter(code, "x86_64", 56, 17) == self.ALLOW  # as fork does, with SIGCHLD
        assert run_filter(code, "x86_64", 56, bit | 17) == 0x50000 | errno.EPERM

    def test_the_numbering_of_another_architecture_ends_the_program(self):
        code = seccomp.program("x86_64")
        assert run_filter(code, "aarch64", 1) == self.KILL
        assert run_filter(code, "x86_64", 0x40000000 | 1) == self.KILL

    def test_an_unknown_machine_has_none(self):
        assert seccomp.program("vax") is None

    @pytest.mark.skipif(os.uname().machine != "x86_64", reason="reads the numbers of this machine's C headers")
    def test_the_numbers_are_the_kernel_s(self):
        header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
        if not header.exists():
            pytest.skip("no kernel headers here")
        known = dict(line.split()[1:3] for line in header.read_text().splitlines() if line.startswith("#define __NR_"))
        for name, (number, _) in seccomp.REFUSED.items():
            assert known.get(f"__NR_{name}", str(number)) == str(number), name


def run_filter(code, machine, number, argument=0):
    """What the kernel would answer: the few instructions that our filter uses, interpreted."""
    data = struct.pack("=IIQ6Q", number, seccomp.MACHINES[machine][1], 0, argument, 0, 0, 0, 0, 0)
    steps = [struct.unpack_from("=HBBI", code, at) for at in range(0, len(code), 8)]
    at, value = 0, 0
    while True:
        kind, if_true, if_false, k = steps[at]
        at += 1
        if kind == 0x06:
            return k
        if kind == 0x20:
            (value,) = struct.unpack_from("=I", data, k)
            continue
        holds = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[kind]
        at += if_true if holds else if_false


def process_of(box):
    """The process id of a sandbox's bwrap; None once it is gone."""
    file = records() / f"{box.id}.json"
    return json.loads(file.read_text())["bwrap"] if file.exists() else None


def leftovers(id):
    """A sandbox's record and control groups, where they are still there."""
    # By os.walk: a folder of another's that goes meanwhile is not worth an error.
    groups = [Path(folder) for folder, _, _ in os.walk(cgroups.ROOT) if folder.endswith(f"/{id}")]
    return [path for path in (records() / f"{id}.json", *groups) if path.exists()]


def command_lines():
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue


def wait_until(holds, seconds=60.0):
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it has not come about in time"
        time.sleep(0.02)
