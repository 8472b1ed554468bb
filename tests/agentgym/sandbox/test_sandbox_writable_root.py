"""A writable root: programs may change the image's files for as long as their sandbox lives. On all back ends."""

import io
import os
import tarfile

import pytest
from opened import open_on

from agentgym.sandbox import SandboxError, SandboxSpec, SandboxSpoiled
from agentgym.sandbox.backends import bubblewrap, docker, engine
from agentgym.sandbox.images import build as images

MEGABYTE = 1 << 20


def tar_of_one(name, content):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return made.getvalue()


@pytest.fixture(scope="module", autouse=True)
def built():
    """The image itself: this machine's programs cannot stand in for it."""
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
    return open_sandbox(writable_root=True, disk=16 * MEGABYTE)


def test_programs_write_where_the_modes_allow_it(box):
    box.write("/testbed/a", "x")
    made = box.exec("cd /testbed && mkdir -p src && mv src lib && rm a && echo y > b && cp b /var/tmp/c && ls -d lib b")
    assert (made.exit_code, made.stdout) == (0, "b\nlib\n")
    for command in "touch /usr/x", "rm /etc/passwd", "mkdir /other", "mv /testbed /other", "echo >> /usr/bin/env":
        assert not box.exec(command).ok, command
    assert box.exec("ls -ld / | cut -c1-10").stdout == "drwxr-xr-x\n"


def test_the_host_writes_archives_and_files_outside_the_usual_folders(box):
    box.put_archive(tar_of_one("pkg/a.py", b"print(6 * 7)"), "/testbed")
    box.write("/testbed/b.py", "x = 1\n")
    assert (
        box.exec("python3 pkg/a.py; echo y = 2 >> b.py; cat b.py; echo z > new", cwd="/testbed").stdout
        == "42\nx = 1\ny = 2\n"
    )
    assert box.read("/testbed/new") == b"z\n"
    with tarfile.open(fileobj=io.BytesIO(box.get_archive("/testbed"))) as archive:
        assert archive.getnames() == ["b.py", "new", "pkg", "pkg/a.py"]


@pytest.mark.parametrize("path", ["/", "/proc/self/oom_score_adj", "/sys/x", "/dev/x", "/workspace", "/proc/1/fd/0"])
def test_but_not_in_the_kernels_own(box, path):
    with pytest.raises(ValueError, match="/proc, /sys, /dev"):
        box.write(path, "x")


def test_the_host_too_has_the_programs_rights_only(box):
    for _ in range(2):
        with pytest.raises(PermissionError):
            box.write("/usr/bin/python3", "x")
        with pytest.raises(PermissionError):
            box.put_archive(tar_of_one("python3", b"x"), "/usr/bin")
        box.exec("true")  # programs have run now


def test_a_link_in_the_root_leads_the_host_nowhere(box):
    box.write("/private/tests.py", "secret")
    box.write("/testbed/a", "x")
    assert box.exec("ln -s /private /testbed/one; ln -s /etc /testbed/two").ok
    box.put_archive(tar_of_one("tests.py", b"x"), "/testbed/one")
    box.write("/testbed/two/passwd", "x")
    assert box.exec("cat /private/tests.py; head -c4 /etc/passwd").stdout == "secretroot"


def test_reset_drops_all_changes(box):
    session = box.session("shell")
    assert session.run("echo x > /var/tmp/a").ok
    box.write("/testbed/a", "x")
    box.write("/private/x", "x")
    box.reset()
    assert not session.alive
    with pytest.raises(ValueError, match="ended"):
        session.run("true")
    assert (
        box.exec("test -e /testbed; echo $?; ls -A /var/tmp /workspace /private").stdout
        == "1\n/private:\n\n/var/tmp:\n\n/workspace:\n"
    )
    assert box.session("shell").run("echo again").stdout == "again\n"


def test_the_image_and_other_sandboxes_stay_as_they_are(box, open_sandbox):
    root = images.rootfs("python")
    before = sorted((str(path), path.lstat().st_mtime_ns) for path in root.rglob("*"))
    box.write("/testbed/a", "x")
    assert box.exec("echo x > /var/tmp/x; echo y > /testbed/a").ok
    other = open_sandbox(writable_root=True)
    assert not other.exec("test -e /testbed || test -e /var/tmp/x").ok
    assert sorted((str(path), path.lstat().st_mtime_ns) for path in root.rglob("*")) == before


class TestAttacks:
    def test_filling_the_disk_through_the_layer(self, box, backend):
        """One file is limited by the programs' limits too; many are not."""
        fill = "mkdir /var/tmp/fill; for i in $(seq 64); do head -c 4000000 /dev/zero > /var/tmp/fill/$i || break; done; du -sm /var/tmp/fill | cut -f1"
        if backend == "docker":  # which has no limit here, and so says no by default
            assert int(box.exec(fill, timeout=60).stdout) > 200
            return
        result = box.exec(fill, timeout=60)
        assert "No space left" in result.stderr
        assert int(result.stdout) <= 16
        with pytest.raises(SandboxSpoiled, match="No space left"):
            box.write("/testbed/x", "x" * 100_000)
        box.reset()
        box.write("/testbed/x", "x" * 100_000)

    def test_filling_the_memory_through_the_layer(self, open_sandbox, backend):
        """Under bubblewrap a layer's bytes are the programs' memory, and so count among all that a machine has."""
        if backend == "docker":
            pytest.skip("the engine keeps it on its disk")
        box = open_sandbox(writable_root=True, memory=64 * MEGABYTE, disk=256 * MEGABYTE)
        assert box.exec("head -c 150000000 /dev/zero > /var/tmp/fill", timeout=60).oom_killed

    def test_filling_it_with_empty_files(self, box, backend):
        code = "import os\nos.mkdir('/var/tmp/fill')\nfor n in range(20_000): open(f'/var/tmp/fill/{n}', 'w').close()"
        result = box.exec(["python3", "-c", code], timeout=60)
        assert result.ok if backend == "docker" else "No space left" in result.stderr

    def test_no_docker_layer_without_a_limit_unless_it_is_asked_for(self, backend, monkeypatch):
        if backend != "docker":
            pytest.skip("docker only")
        monkeypatch.delenv(docker.UNLIMITED)
        with pytest.raises(SandboxError, match=f"pquota.*{docker.UNLIMITED}=1"):
            open_on("docker", SandboxSpec(writable_root=True))

    def test_the_guest_has_no_rights_beyond_its_own(self, box):
        """bwrap keeps every right if it is asked for one that it lacks itself."""
        line = next(
            line for line in box.exec(["cat", "/proc/1/status"]).stdout.splitlines() if line.startswith("CapEff")
        )
        assert (
            int(line.split()[1], 16) & ~(1 | 1 << 6 | 1 << 7 | 1 << 24) == 0
        )  # CHOWN, SETGID, SETUID; SYS_RESOURCE by docker

    @pytest.mark.parametrize(
        "command",
        [
            "mknod /disk b 8 0",
            "mknod /mem c 1 1",
            "mount -t tmpfs none /mnt",
            "mount -o remount,dev,suid /",
            "umount /private",
            "umount -l /proc",
            "chroot / true",
            "unshare -Urm true",
            "python3 -c \"import os; os.setxattr('/testbed', 'trusted.overlay.opaque', b'y')\"",
            "python3 -c \"import os; os.setxattr('/testbed', 'user.overlay.redirect', b'/')\"",
            "chown 0 /testbed",
            "chmod 777 /etc",
            "mv /etc /etc2",
            "rmdir /private || rm -rf /private/x",
            "mv /usr/bin/python3 /testbed/",
            "ln -s x /etc/ld.so.preload",
            "echo -1000 > /proc/self/oom_score_adj",
            "echo x > /proc/sys/kernel/core_pattern",
            "cat /proc/1/environ",
            "cat /sys/fs/cgroup/memory/cgroup.procs > /sys/fs/cgroup/memory/cgroup.procs",
            "mkdir /new",
        ],
    )
    def test_what_stays_forbidden(self, box, command):
        box.write("/private/x", "x")
        box.write("/testbed/x", "x")
        assert not box.exec(command).ok
        assert box.exec("cat /private/x").stdout == "x"

    def test_set_user_id_files_give_no_rights(self, box):
        code = (
            "cp /usr/bin/python3 /testbed/p; chmod 6777 /testbed/p; /testbed/p -c "
            "'import os; print(os.getresuid() == (os.getuid(),) * 3, os.getuid() > 0)'; grep NoNewPrivs /proc/self/status"
        )
        box.write("/testbed/x", "x")
        assert box.exec(code).stdout == "True True\nNoNewPrivs:\t1\n"

    def test_a_root_owned_set_user_id_program_of_the_image_gives_none(self, box):
        found = box.exec("find / -xdev -perm /6000 -type f 2>/dev/null").stdout.split()
        assert found == []

    def test_the_layer_itself_is_out_of_reach(self, box, backend):
        if backend == "docker":
            pytest.skip("the engine keeps it on its disk")
        line = box.exec("grep ' / / ' /proc/self/mountinfo").stdout
        assert " overlay " in line
        assert "nosuid,nodev" in line
        for place in (str(bubblewrap.layer_place()), "/tmp/agentgym-bubblewrap-0", "/upper", "/work"):
            assert not box.exec(["test", "-e", place]).ok
        assert box.exec("cat /proc/self/mountinfo | grep -c tmpfs").ok
        assert not box.exec("ls /proc/1/root/ /proc/1/cwd/").ok

    def test_open_folders_above_the_root_are_not_reached(self, box):
        escape = (
            "import os\nfor _ in range(50): os.chdir('..')\nprint(sorted(os.listdir('.')) == sorted(os.listdir('/')))"
        )
        assert box.exec(["python3", "-c", escape]).stdout == "True\n"

    def test_programs_replace_nothing_that_the_guest_loads(self, box):
        """The guest imports ctypes and others late; they are the system's, and only its owner changes them."""
        box.put_archive(tar_of_one("ctypes.py", b"raise SystemExit"), "/var/tmp")
        box.exec("cp /var/tmp/ctypes.py /usr/lib/python3/; cp /var/tmp/ctypes.py /")
        assert box.exec("echo well").stdout == "well\n"
        box.reset()
        assert box.exec("echo well").stdout == "well\n"


def test_many_cost_no_copy_and_leave_nothing(open_sandbox, backend):
    boxes = [open_sandbox(writable_root=True, disk=8 * MEGABYTE) for _ in range(4)]
    for number, box in enumerate(boxes):
        assert box.exec(f"echo {number} > /var/tmp/n; cat /var/tmp/n").stdout == f"{number}\n"
    for box in boxes:
        box.close()
    if backend == "bubblewrap":
        assert list(bubblewrap.layer_place().iterdir()) == []
    if backend == "docker":
        assert not [found for found in docker.docker_sandboxes() if found.id in {box.id for box in boxes}]
        assert engine.unavailable() is None
