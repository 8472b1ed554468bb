"""The profile of system calls: as a filter and as Docker's JSON it gives the same answers."""

import errno
import json
import os
import struct
from pathlib import Path

import pytest

from agentgym.sandbox.backends import seccomp
from agentgym.sandbox.images import build as images

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x50000
COLUMNS = [("x86_64", 0), ("aarch64", 1)]
# What may not be forgotten: number on x86_64, number on aarch64.
NEVER = {
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "finit_module": (313, 273),
    "fsopen": (430, 430),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "kcmp": (312, 272),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "move_mount": (429, 429),
    "open_by_handle_at": (304, 265),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vmsplice": (278, 75),
}
ANSWERS = {
    "clone3": ((435, 435), errno.ENOSYS),
    "msgget": ((68, 186), errno.ENOSYS),
    "semget": ((64, 190), errno.ENOSYS),
    "setxattr": ((188, 5), errno.ENOTSUP),
    "lsetxattr": ((189, 6), errno.ENOTSUP),
    "fsetxattr": ((190, 7), errno.ENOTSUP),
    "setxattrat": ((463, 463), errno.ENOTSUP),
}
CLONE = (56, 220)
SOCKET, SOCKETPAIR, PERSONALITY, SETSOCKOPT = (41, 198), (53, 199), (135, 92), (54, 208)


@pytest.mark.parametrize(("machine", "column"), COLUMNS)
class TestAnswers:
    def test_what_no_program_needs_is_refused(self, machine, column):
        for name, numbers in NEVER.items():
            assert answers(machine, name, numbers[column]) == ERRNO | errno.EPERM, name

    def test_what_fills_memory_answers_as_if_the_kernel_had_none(self, machine, column):
        for name, (numbers, number) in ANSWERS.items():
            assert answers(machine, name, numbers[column]) == ERRNO | number, name

    def test_what_is_listed_is_allowed(self, machine, column):
        for name, numbers in seccomp.allowed().items():
            if numbers[column] is not None:
                assert answers(machine, name, numbers[column]) == ALLOW, name

    def test_what_is_newer_is_not_there(self, machine, column):
        for number in range(seccomp.LAST + 1, seccomp.LAST + 40):
            assert run_filter(machine, number) == ERRNO | errno.ENOSYS

    def test_sockets_are_of_three_families(self, machine, column):
        for family in range(64):
            for above in (0, 1 << 32):  # the kernel does not look at the upper half
                answer = answers(machine, "socket", SOCKET[column], family + above, 1, 0)
                assert answer == (ALLOW if family in {1, 2, 10} else ERRNO | errno.EPERM), family
            answer = answers(machine, "socketpair", SOCKETPAIR[column], family, 1, 0)
            assert answer == (ALLOW if family == 1 else ERRNO | errno.EPERM), family

    def test_sockets_have_all_options_but_filters_of_their_own(self, machine, column):
        for level in (0, 1, 6, 17, 41, 270):
            for option in range(128):
                refused = level == 1 and option in {26, 50, 51, 52}
                answer = answers(machine, "setsockopt", SETSOCKOPT[column], 3, level, option, 0, 0)
                assert answer == (ERRNO | errno.EPERM if refused else ALLOW), (level, option)

    @pytest.mark.parametrize("bit", [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000])
    def test_clone_makes_processes_and_threads_and_no_namespaces(self, machine, column, bit):
        assert answers(machine, "clone", CLONE[column], 0x003D0F00) == ALLOW  # as a thread is made
        assert answers(machine, "clone", CLONE[column], 17) == ALLOW  # as fork does, with SIGCHLD
        assert answers(machine, "clone", CLONE[column], bit | 17) == ERRNO | errno.EPERM

    def test_the_addresses_stay_random(self, machine, column):
        assert answers(machine, "personality", PERSONALITY[column], 0xFFFFFFFF) == ALLOW
        assert answers(machine, "personality", PERSONALITY[column], 0x40000) == ERRNO | errno.EPERM


def test_the_numbering_of_another_architecture_ends_the_program():
    assert run_filter("x86_64", 1, architecture=seccomp.MACHINES["aarch64"][1]) == KILL
    assert run_filter("x86_64", 0x40000000 | 1) == KILL


def test_an_unknown_machine_has_none():
    assert seccomp.program("vax") is None


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="reads the numbers of this machine's C headers")
def test_the_numbers_are_the_kernel_s():
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("no kernel headers here")
    known = dict(line.split()[1:3] for line in header.read_text().splitlines() if line.startswith("#define __NR_"))
    numbers = {name: each[0] for name, each in seccomp.allowed().items() if each[0] is not None}
    numbers |= {name: each[0] for name, each in NEVER.items()} | {name: each[0][0] for name, each in ANSWERS.items()}
    for name, number in numbers.items():
        assert known.get(f"__NR_{name}", str(number)) == str(number), name


def answers(machine, name, number, *arguments):
    """What both forms of the profile answer, which must be the same."""
    answer = run_filter(machine, number, *arguments)
    assert answer == ask_docker(name, *arguments), name
    return answer


def ask_docker(name, *arguments):
    """What an engine's filter would answer, by the meaning of the rules."""
    profile = json.loads(seccomp.docker_profile())
    for rule in profile["syscalls"]:
        checks = rule.get("args", [])
        assert all(check["op"] == "SCMP_CMP_MASKED_EQ" for check in checks)
        if name in rule["names"] and all(
            (arguments[check["index"]] & check["value"]) == check["valueTwo"] for check in checks
        ):
            return ALLOW if rule["action"] == "SCMP_ACT_ALLOW" else ERRNO | rule["errnoRet"]
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    return ERRNO | errno.EPERM


def run_filter(machine, number, *arguments, architecture=None):
    """What the kernel would answer: the few instructions that our filter uses, interpreted."""
    code = seccomp.program(machine)
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("=IIQ6Q", number, architecture or seccomp.MACHINES[machine][1], 0, *padded)
    steps = [struct.unpack_from("=HBBI", code, at) for at in range(0, len(code), 8)]
    at, value = 0, 0
    while True:
        kind, if_true, if_false, k = steps[at]
        at += 1
        if kind == 0x06:
            return k
        if kind == 0x20:
            (value,) = struct.unpack_from("=I", data, k)
        elif kind == 0x54:
            value &= k
        else:
            at += if_true if {0x15: value == k, 0x25: value > k, 0x35: value >= k}[kind] else if_false


ORDINARY = """
import asyncio, concurrent.futures, hashlib, multiprocessing, os, shutil, sqlite3, ssl, subprocess, tempfile, threading
from multiprocessing import shared_memory
import numpy
assert numpy.allclose(numpy.linalg.inv(numpy.eye(300) * 2), numpy.eye(300) / 2)
database = sqlite3.connect("x.db")
assert database.execute("pragma journal_mode=wal").fetchone() == ("wal",)
database.execute("create table t (a)"); database.execute("insert into t values (1)"); database.commit()
assert sqlite3.connect("x.db").execute("select a from t").fetchall() == [(1,)]
with concurrent.futures.ProcessPoolExecutor(2) as pool: assert list(pool.map(abs, [-1, -2])) == [1, 2]
memory = shared_memory.SharedMemory(create=True, size=1000); memory.close(); memory.unlink()
async def serve():
    async def answer(reader, writer): writer.write(await reader.readline()); writer.close()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"line\\n")
    assert await reader.readline() == b"line\\n"
    process = await asyncio.create_subprocess_shell("echo sub", stdout=subprocess.PIPE)
    assert await process.communicate() == (b"sub\\n", None)
asyncio.run(serve())
open("a", "w").write("x")
shutil.copy2("a", "b"); os.mkdir("c"); os.rename("b", "c/b"); shutil.copytree("c", "/tmp/d"); shutil.move("c/b", "/tmp/e")
print("all of Python")
"""
BASH = """set -e -o pipefail
mkdir -p s/t; echo x > s/t/f; cp -a s u; cp -p s/t/f g; mv u /tmp/v; tar cf t.tar s; rm -r s; tar xf t.tar; install -m 755 g h; ln -s g l
cat <(echo substituted); mkfifo p; (echo piped > p &); cat p; seq 3 | sort -rn | head -1; sleep 0.1 & wait; cat s/t/f
touch -d yesterday g; chmod 600 g; exec 5<> /dev/null; echo done >&5; trap 'echo trapped' EXIT"""


class TestOrdinaryPrograms:
    def test_they_work(self, open_sandbox):
        if images.rootfs("search") is None:
            pytest.skip("the image search, which has NumPy, is not built")
        sandbox = open_sandbox(image="search")
        result = sandbox.exec(["python3", "-c", ORDINARY], timeout=60)
        assert (result.stdout, result.stderr) == ("all of Python\n", "")
        result = sandbox.exec(BASH)
        assert (result.stdout, result.stderr) == ("substituted\npiped\n3\nx\ntrapped\n", "")
        shell = sandbox.session("shell")
        assert shell.run("set -m; sleep 60 & kill %1; wait; echo over").stdout.endswith("over\n")
        assert shell.run("timeout 0.1 sleep 5; echo $?").stdout == "124\n"
