"""What programs may not have, each shown by one that tries. On both back ends.

Those that look for the network, the host, rights or the guest are in hostile_escapes.py.
"""

import os

import pytest

from agentgym.sandbox import SandboxSpoiled

MB = 1 << 20

# Makes a System V segment, fills it, and leaves it behind.
SEGMENT = """
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
place = libc.shmat(libc.shmget(0, 90 << 20, 0o1600), None, 0)
ctypes.memset(place, 1, 90 << 20)
print(open("/proc/sysvipc/shm").readlines()[1].split()[3])
"""


class TestResources:
    def test_memory(self, open_sandbox):
        sandbox = open_sandbox(memory=128 * MB, disk=16 * MB)
        result = sandbox.exec(["python3", "-c", "x = bytearray(100 << 20); print(len(x))"])
        assert (result.stdout, result.oom_killed) == (f"{100 << 20}\n", False)
        result = sandbox.exec(["python3", "-c", "x = bytearray(400 << 20)"], timeout=60)
        assert (result.exit_code, result.oom_killed, result.timed_out) == (137, True, False)
        result = sandbox.exec("true")
        assert (result.ok, result.oom_killed) == (True, False)

    def test_memory_of_all_together(self, open_sandbox):
        sandbox = open_sandbox(memory=128 * MB, disk=16 * MB)
        code = "import os\nfor i in range(5): os.fork()\nx = bytearray(20 << 20)\nimport time; time.sleep(3)"
        assert sandbox.exec(["python3", "-c", code], timeout=60).oom_killed
        assert sandbox.exec("true").ok

    def test_memory_of_a_session(self, open_sandbox):
        sandbox = open_sandbox(memory=128 * MB, disk=16 * MB)
        session = sandbox.session()
        result = session.run("x = bytearray(400 << 20)", timeout=60)
        assert (result.exit_code, result.oom_killed, session.alive) == (137, True, False)
        assert sandbox.session().run("1 + 1").stdout == "2\n"

    def test_files_count_as_memory(self, open_sandbox):
        sandbox = open_sandbox(memory=128 * MB, disk=100 * MB)
        sandbox.exec("head -c 90M /dev/zero > /workspace/a")
        assert sandbox.exec(["python3", "-c", "x = bytearray(90 << 20)"], timeout=60).oom_killed

    @pytest.mark.skipif(os.getuid() != 0, reason="without root, segments stay until `reset`")
    def test_a_segment_goes_with_its_last_program(self, open_sandbox):
        sandbox = open_sandbox(memory=128 * MB, disk=16 * MB)
        made = sandbox.exec(["python3", "-c", SEGMENT])
        assert (made.stdout, made.exit_code) == (f"{90 * MB}\n", 0), made.stderr
        assert sandbox.exec("tail -n +2 /proc/sysvipc/shm").stdout == ""
        assert sandbox.exec(["python3", "-c", "bytearray(90 << 20)"]).ok

    def test_processor_time(self, open_sandbox):
        sandbox = open_sandbox(cpus=0.2)
        code = "import time\nb = time.monotonic()\nwhile time.monotonic() < b + 2: pass\nprint(time.process_time())"
        assert float(sandbox.exec(["python3", "-c", code], timeout=60).stdout) < 1.0

    def test_processes(self, open_sandbox):
        sandbox = open_sandbox(pids=20)
        code = "import os, time\nn = 1\ntry:\n  while n < 100:\n    if not os.fork(): time.sleep(60)\n    n += 1\nexcept OSError as e: print(n, e.errno)"
        count, number = sandbox.exec(["python3", "-c", code]).stdout.split()
        assert int(count) in {20, 21}  # a container has room for one more while it starts a program
        assert int(number) == 11
        assert sandbox.exec("true").ok

    def test_a_session_that_takes_all_processes_leaves_none_for_others(self, open_sandbox):
        sandbox = open_sandbox(pids=20)
        bomb = sandbox.session()
        bomb.run(
            "import os, time\ntry:\n  while True:\n    os.fork() or time.sleep(600)\nexcept OSError: pass", timeout=20
        )
        result = sandbox.exec("true")
        assert (result.exit_code, result.timed_out) == (126, False)
        assert "the limit of running programs is reached" in result.stderr
        for kind in "python", "shell":
            with pytest.raises(SandboxSpoiled, match="the limit of running programs is reached"):
                sandbox.session(kind)
        assert sandbox.alive
        sandbox.write("file", "files need no process")
        bomb.close()
        assert sandbox.exec("cat file").stdout == "files need no process"
        assert sandbox.session().run("1 + 1").stdout == "2\n"

    def test_a_sandbox_without_room_for_any_process_says_so(self, backend, open_sandbox):
        if backend == "remote":
            pytest.skip("a server refuses the setting")
        sandbox = open_sandbox(pids=-1 if backend == "docker" else 0)  # a container has room for one more
        for start in (lambda: sandbox.exec("true"), sandbox.session, lambda: sandbox.session("shell")):
            with pytest.raises(SandboxSpoiled, match="the limit of running programs is reached"):
                start()
        assert sandbox.alive

    def test_threads_are_processes(self, open_sandbox):
        sandbox = open_sandbox(pids=20)
        code = "import threading, time\nn = 0\ntry:\n  while n < 100:\n    threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); n += 1\nexcept RuntimeError: print(n)"
        assert int(sandbox.exec(["python3", "-c", code]).stdout) in {19, 20}

    @pytest.mark.parametrize("folder", ["/workspace", "/tmp"])
    def test_disk(self, open_sandbox, folder):
        sandbox = open_sandbox(disk=4 * MB)
        result = sandbox.exec(f"head -c 10M /dev/zero > {folder}/big; stat -c %s {folder}/big")
        assert "No space left" in result.stderr or "File too large" in result.stderr
        assert 3 * MB < int(result.stdout) <= 4 * MB
        sandbox.reset()
        assert sandbox.exec(f"head -c 3M /dev/zero > {folder}/again").ok

    def test_no_core_files(self, sandbox):
        assert sandbox.exec("ulimit -c; kill -SEGV $$; ls").stdout == "0\n"


class TestPrivileges:
    def test_an_unprivileged_user(self, sandbox):
        user, *groups = sandbox.exec("id -u; id -g; id -G").stdout.split()
        assert int(user) >= (10_000 if os.getuid() == 0 else 0)
        assert groups == ["65534", "65534"]

    def test_the_root_is_read_only(self, sandbox):
        mounts = sandbox.exec("cat /proc/self/mounts").stdout.splitlines()
        root = [line.split()[3].split(",") for line in mounts if line.split()[1] == "/"]
        assert all("ro" in options for options in root)

    def test_programs_go_first_when_memory_runs_out(self, sandbox):
        assert sandbox.exec("cat /proc/self/oom_score_adj").stdout == "1000\n"


class TestHostIsHidden:
    def test_its_name(self, sandbox):
        assert sandbox.exec("cat /proc/sys/kernel/hostname").stdout == "sandbox\n"
        assert os.uname().nodename != "sandbox"

    def test_its_kernel_s_insides(self, sandbox):
        for name in "kcore", "kmsg", "keys", "timer_list", "sysrq-trigger":
            assert sandbox.exec(f"head -c 1 /proc/{name}").stdout == "", name
