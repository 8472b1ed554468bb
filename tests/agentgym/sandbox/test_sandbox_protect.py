"""`protect`: files that programs can read and not change, in a writable root. On all back ends."""

import os

import pytest
from test_sandbox_writable_root import tar_of_one

from agentgym.sandbox import SandboxError, SandboxSpec, acquire
from agentgym.sandbox.backends import docker
from agentgym.sandbox.images import build as images

MEGABYTE = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def built():
    images.build("python", docker=None)


@pytest.fixture(autouse=True)
def unlimited(monkeypatch):
    """The engine of the tests is on ext4, where it cannot limit layers."""
    monkeypatch.setenv(docker.UNLIMITED, "1")


@pytest.fixture(autouse=True)
def as_root(backend):
    if backend != "docker" and os.getuid():
        pytest.skip("bubblewrap gives a writable root to root only")


@pytest.fixture
def box(open_sandbox):
    """One with a repository that programs have made, of which the tests are protected."""
    box = open_sandbox(writable_root=True, disk=16 * MEGABYTE)
    box.put_archive(tar_of_one("src/a.py", b"print(1)\n"), "/testbed")
    made = "mkdir -p pkg/tests/deep/er pkg/lib && cd pkg/tests && echo t > deep/er/t.py && echo s > setup && chmod 600 setup"
    assert box.exec(f"{made} && chmod 750 deep && ln -s setup link && echo c > ../../conf", cwd="/testbed").ok
    box.protect(["/testbed/pkg/tests", "/testbed/conf"])
    return box


def test_programs_still_read_and_run_it(box):
    assert (
        box.exec("cat pkg/tests/deep/er/t.py pkg/tests/setup pkg/tests/link conf", cwd="/testbed").stdout
        == "t\ns\ns\nc\n"
    )
    assert box.read("/testbed/pkg/tests/setup") == b"s\n"


@pytest.mark.parametrize(
    "command",
    [
        "echo x > conf",
        "echo x >> pkg/tests/deep/er/t.py",
        "echo x >> pkg/tests/link",
        "rm -f conf",
        "rm -f pkg/tests/deep/er/t.py",
        "rm -f pkg/tests/link",
        "mv conf conf2",
        "mv pkg/lib/new conf",
        "touch pkg/tests/new.py",
        "touch pkg/tests/deep/er/conftest.py",
        "mkdir pkg/tests/__pycache__",
        "mv pkg/tests pkg/tests2",
        "mv pkg pkg2",
        "mv /testbed /testbed2",
        "rmdir pkg/tests/deep/er",
        "chmod 777 conf",
        "chmod 777 pkg",
        "chmod 777 /testbed",
        "chmod -R 777 pkg/tests",
        "chown $(id -u) conf",
        "ln -sfn /tmp pkg/tests",
        "truncate -s 0 pkg/tests/setup",
        "touch -d 2001-01-01 conf",
        "sed -i s/c/d/ conf",
        "python3 -c \"import os; os.link('conf', 'other'); open('other', 'w').write('x')\"",
        "python3 -c \"import os; os.rename('pkg/lib', 'pkg/tests')\"",
        "python3 -c \"import ctypes; l = ctypes.CDLL(None); exit(l.renameat2(-100, b'pkg/lib', -100, b'pkg/tests', 2) != 0)\"",
    ],
)
def test_what_programs_cannot_do(box, command):
    box.exec("echo n > pkg/lib/new", cwd="/testbed")
    before = box.get_archive("/testbed")
    assert not box.exec(command, cwd="/testbed").ok
    box.exec("rm -f other", cwd="/testbed")
    assert box.get_archive("/testbed") == before


def test_beside_it_they_work_on(box):
    work = "echo 2 >> src/a.py && mv src/a.py src/b.py && mkdir new pkg/more && touch pkg/new && rm pkg/new && rmdir pkg/lib && rm -r src"
    assert box.exec(work, cwd="/testbed").ok
    assert sorted(box.exec("ls /testbed /testbed/pkg").stdout.split()) == sorted(
        ["/testbed:", "conf", "new", "pkg", "/testbed/pkg:", "more", "tests"]
    )


def test_the_host_can_no_longer_write_it_either(box):
    for _ in range(2):
        with pytest.raises(PermissionError):
            box.write("/testbed/conf", "x")
        with pytest.raises(PermissionError):
            box.put_archive(tar_of_one("t.py", b"x"), "/testbed/pkg/tests/deep/er")
        box.protect(["/testbed/conf"])  # again
    box.write("/testbed/pkg/lib/new", "x")


def test_a_hard_link_elsewhere_is_the_same_file(box):
    assert box.exec("echo x > one && ln one two", cwd="/testbed").ok
    box.protect(["/testbed/one"])
    assert not box.exec("echo y > /testbed/two").ok
    assert box.read("/testbed/one") == b"x\n"


def test_files_of_the_image_and_of_the_usual_folders(box):
    box.write("a/b", "x")
    box.protect(["/workspace/a", "/etc/passwd", "/usr/share", "/tmp"])
    assert not box.exec("echo y > a/b || rm -r a || mv a c || touch /tmp/x").ok
    assert box.exec("touch d && rm d && head -c4 /etc/passwd").stdout == "root"


def test_reset_gives_everything_back(box):
    box.reset()
    assert not box.exec("test -e /testbed").ok
    box.write("/testbed/conf", "x")
    assert box.exec("echo y > /testbed/conf && mv /testbed/conf /testbed/x").ok


@pytest.mark.parametrize("path", ["/", "/proc/self", "/sys", "/dev/null", "/testbed/../dev"])
def test_what_cannot_be_protected(box, path):
    with pytest.raises(ValueError, match="not below /, or in /proc, /sys, /dev"):
        box.protect([path])


def test_missing_files_and_links_on_the_way_are_told(box):
    with pytest.raises(FileNotFoundError, match="/testbed/none"):
        box.protect(["/testbed/none"])
    assert box.exec("ln -s pkg/tests t", cwd="/testbed").ok
    with pytest.raises(OSError, match="/testbed/t/deep"):
        box.protect(["/testbed/t/deep"])


def test_too_deep_a_tree_is_refused(box):
    assert box.exec(
        ["python3", "-c", "import os\nfor _ in range(300): os.mkdir('d'); os.chdir('d')"], cwd="/testbed"
    ).ok
    with pytest.raises(ValueError, match="200 folders deep"):
        box.protect(["/testbed/d"])
    assert box.exec("true").ok


def test_only_with_a_writable_root(sandbox):
    sandbox.write("a", "x")
    with pytest.raises(ValueError, match="writable root"):
        sandbox.protect(["a"])


def test_a_pooled_sandbox_protects_too(where):
    box = acquire(SandboxSpec(writable_root=True), where)
    box.write("/testbed/a", "x")
    box.protect(["/testbed/a"])
    assert not box.exec("echo y > /testbed/a").ok
    box.close()
    with pytest.raises(SandboxError, match="returned"):
        box.protect(["/testbed/a"])
