"""Traps that a program leaves for the host: what it reads, writes and uploads afterwards must not follow them."""

import time

import pytest

from agentgym.sandbox.api import MEGABYTE, SandboxSpec, SandboxSpoiled
from agentgym.sandbox.backends.bubblewrap import open_bubblewrap
from agentgym.sandbox.backends.docker import open_docker

SECRET = "what only the grader may say"


@pytest.fixture(
    scope="module",
    params=[pytest.param("docker", marks=pytest.mark.docker), pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)],
)
def shared(request):
    box = {"docker": open_docker, "bubblewrap": open_bubblewrap}[request.param](
        SandboxSpec(disk=16 * MEGABYTE, memory=256 * MEGABYTE), "trap-tests"
    )
    yield box
    box.close()


@pytest.fixture
def box(shared):
    shared.reset()
    shared.write("/private/tests.py", SECRET)
    return shared


def lay(box, trap):
    result = box.exec(trap)
    assert result.ok, result.stderr


def works(box):
    assert box.exec("echo well").stdout == "well\n"


@pytest.mark.parametrize(
    ("trap", "error"),
    [
        ("mkfifo answer", ValueError),
        ("ln -s /dev/zero answer", (ValueError, OSError)),
        ("ln -s /dev/tty answer", (ValueError, OSError)),
        ("ln -s /dev/stdin answer", (ValueError, OSError)),
        ("ln -s /proc/1/fd/0 answer", (ValueError, OSError)),
        ("ln -s /proc/1/fd/1 answer", (ValueError, OSError)),
        ("ln -s /proc/1/mem answer", (ValueError, OSError)),
        ("ln -s /proc/self/mem answer", (ValueError, OSError)),
        ("ln -s /proc/kmsg answer", (ValueError, OSError)),
        ("ln -s answer answer", OSError),
        ("ln -s nowhere answer", FileNotFoundError),
        ("ln -s /etc/shadow answer", OSError),
        ("mkdir answer", IsADirectoryError),
        ("ln -s / answer", IsADirectoryError),
        ("touch answer; chmod 000 answer", PermissionError),
        ("truncate -s 16M answer; truncate -s +1 answer", ValueError),
        ("python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"answer\")'", (ValueError, OSError)),
    ],
)
def test_reading_an_answer_that_is_no_plain_file_fails_at_once_and_harms_nothing(box, trap, error):
    lay(box, trap)
    with pytest.raises(error):
        box.read("answer")
    works(box)


def test_an_answer_that_links_to_another_file_says_no_more_than_the_program_could_read_itself(box):
    lay(box, "ln -s /etc/passwd answer; ln -s /private/tests.py copied")
    assert box.read("copied") == box.exec("cat /private/tests.py").stdout.encode()
    assert box.read("answer") == box.exec("cat /etc/passwd").stdout.encode()


@pytest.mark.parametrize(
    "target", ["/private/tests.py", "/etc/passwd", "/proc/1/fd/1", "/proc/1/mem", "/dev/full", "/usr/bin/x"]
)
def test_writing_where_a_link_lies_does_not_write_to_its_target(box, target):
    lay(box, f"ln -s {target} input.txt")
    before = box.exec("cat /private/tests.py /etc/passwd").stdout
    box.write("input.txt", "from the host")
    assert box.read("input.txt") == b"from the host"
    assert box.exec("test -L input.txt; echo $?; cat input.txt").stdout == "1\nfrom the host"
    assert box.exec("cat /private/tests.py /etc/passwd").stdout == before


@pytest.mark.parametrize("folder", ["/private", "/etc", "/proc/1", "/root"])
def test_writing_below_a_folder_that_is_a_link_has_the_programs_rights_only(box, folder):
    lay(box, f"ln -s {folder} sub")
    box.write("sub/new.txt", "from the host")
    assert box.exec("ls /private; cat /workspace/sub/new.txt").stdout == "tests.py\nfrom the host"
    works(box)


def test_a_link_to_a_folder_that_programs_can_write_to_is_followed(box):
    lay(box, "mkdir -p /tmp/real inner; ln -s /tmp/real away; ln -s inner near")
    for name in "away", "near":
        box.write(f"{name}/new.txt", "from the host")
    assert box.exec("cat /tmp/real/new.txt inner/new.txt; test -L away && test -L near").ok
    assert box.read("near/new.txt") == box.read("away/new.txt") == b"from the host"


# What lies where the host is about to write `task/tests/a.py`.
IN_THE_WAY = {
    "a folder where the file was to be written first": "mkdir -p task/tests/a.py.part task/tests/.a.py.part",
    "a folder": "mkdir -p task/tests/a.py/b; touch task/tests/a.py/b/c",
    "a closed folder": "mkdir -p task/tests/a.py/b; touch task/tests/a.py/b/c; chmod 0 task/tests/a.py/b task/tests/a.py",
    "a deep folder": "python3 -c \"import os\nos.makedirs('task/tests/a.py'); os.chdir('task/tests/a.py')\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')\"",
    "a full folder": "mkdir -p task/tests/a.py; cd task/tests/a.py; touch $(seq 3000)",
    "long and odd names": "mkdir -p task/tests/a.py; cd task/tests/a.py; touch $(printf 'x%.0s' {1..255}) $'\\xff\\n' -- -rf",
    "a fifo": "mkdir -p task/tests; mkfifo task/tests/a.py",
    "a fifo that somebody reads": "mkdir -p task/tests; mkfifo task/tests/a.py; (cat task/tests/a.py &)",
    "a socket": "mkdir -p task/tests; python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('task/tests/a.py')\"",
    "a link to itself": "mkdir -p task/tests; ln -s a.py task/tests/a.py",
    "a link to a device": "mkdir -p task/tests; ln -s /dev/full task/tests/a.py",
    "a hard link": "mkdir -p task/tests; echo kept > /workspace/other; ln other task/tests/a.py",
    "a file without rights": "mkdir -p task/tests; touch task/tests/a.py; chmod 0 task/tests/a.py",
    "a folder without rights": "mkdir -p task/tests; chmod 0 task/tests",
    "folders without rights": "mkdir -p task/tests; chmod 0 task/tests task",
    "a workspace without rights": "mkdir -p task/tests; chmod 0 task; chmod 0 . || true",
    "a sticky folder of odd modes": "mkdir -p task/tests; chmod 7111 task/tests; chmod 1333 task",
    "a file above": "mkdir task; touch task/tests",
    "a file at the top": "touch task; chmod 0 task",
    "a fifo above": "mkdir task; mkfifo task/tests",
    "a socket above": "python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('task')\"",
    "a link to nowhere above": "ln -s nowhere task",
    "a link to itself above": "ln -s task task",
    "links in a circle above": "mkdir task; ln -s b task/tests; ln -s tests task/b",
    "a link to a process above": "ln -s /proc/1 task",
    "a link to the guest's files above": "mkdir task; ln -s /proc/1/fd task/tests",
    "a link to the root above": "ln -s / task",
    "a link to private above": "mkdir task; ln -s /private task/tests",
    "a link through the guest's root above": "mkdir task; ln -s /proc/1/root/private task/tests",
    "a link to a device above": "ln -s /dev/null task",
    "a link to message queues above": "ln -s /dev/mqueue task",
    "a link of a name that is too long above": "python3 -c \"import os; os.symlink('x/' * 2000, 'task')\"",
}


@pytest.mark.parametrize("trap", IN_THE_WAY.values(), ids=IN_THE_WAY)
def test_the_host_writes_where_programs_laid_whatever_they_could(box, trap):
    lay(box, trap)
    box.write("task/tests/a.py", b"from the host" * 100_000)
    assert box.read("task/tests/a.py") == b"from the host" * 100_000
    assert box.exec("cd /workspace && test ! -L task/tests/a.py && stat -c '%a %h' task/tests/a.py").stdout == "644 1\n"
    assert box.exec("ls /private; cat /private/tests.py").stdout == f"tests.py\n{SECRET}"
    box.session("shell").close()


@pytest.mark.parametrize("trap", IN_THE_WAY.values(), ids=IN_THE_WAY)
def test_the_host_uploads_where_programs_laid_whatever_they_could(box, trap, tmp_path):
    lay(box, trap)
    (tmp_path / "task" / "tests" / "a.py" / "empty").mkdir(parents=True)
    (tmp_path / "task" / "tests" / "a.py" / "b.py").write_text("from the host")
    box.upload(tmp_path / "task")
    assert box.read("task/tests/a.py/b.py") == b"from the host"
    assert box.exec("ls -A /private; test -d /workspace/task/tests/a.py/empty").stdout == "tests.py\n"


LEASE = """
import fcntl, os, signal, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
os.makedirs("task", exist_ok=True)
held = [os.open(name, os.O_RDWR | os.O_CREAT) for name in ("task/a.py", "answer")]
for fd in held: fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
"""


def test_a_lease_makes_the_host_wait_neither_to_write_nor_to_read(box):
    session = box.session("python")
    assert session.run(LEASE).ok
    began = time.monotonic()
    box.write("task/a.py", "from the host")
    assert box.read("task/a.py") == b"from the host"
    with pytest.raises(ValueError, match="lease"):
        box.read("answer")
    assert time.monotonic() - began < 20  # the kernel gives a lease up after 45 s
    session.close()


WARS = {
    "folders are made where the file is": "os.makedirs('task/tests/a.py/b')",
    "the folder is removed": "shutil.rmtree('task')",
    "the folder is closed": "os.chmod('task', 0)",
    "the folder becomes a link": "os.rename('task', f'/tmp/{n}'); os.symlink('/private', 'task')",
}


@pytest.mark.parametrize("act", WARS.values(), ids=WARS)
def test_a_program_that_fights_for_the_place_gets_it_or_spoils_the_sandbox(box, act):
    session = box.session("python")
    loop = f"import os, shutil\nn = 0\nif os.fork() == 0:\n  while True:\n    n += 1\n    try: {act}\n    except OSError: pass"
    session.run(loop)
    for number in range(100):
        try:
            box.write("task/tests/a.py", f"from the host {number}")
        except SandboxSpoiled:  # and no other error
            continue
    session.close()
    box.write("task/tests/a.py", "from the host")
    assert box.read("task/tests/a.py") == b"from the host"
    assert box.exec("ls -A /private").stdout == "tests.py\n"


def test_a_workspace_that_programs_have_closed_is_entered_all_the_same(box):
    box.exec("chmod 0 /workspace")
    assert box.exec("pwd").stdout == "/workspace\n"
    for kind in "python", "shell":
        session = box.session(kind)
        assert session.run("print(42)" if kind == "python" else "echo 42").stdout == "42\n"
        session.close()


def test_a_shell_reads_no_history_that_programs_laid(box):
    lay(
        box, "mkfifo .bash_history; printf 'exit 7\\n' > .inputrc; echo 'exit 7' | tee .bashrc .profile > .bash_profile"
    )
    shell = box.session("shell")
    assert shell.run("echo 42; history | wc -l").stdout.startswith("42\n")


def test_a_forged_exit_code_of_many_digits_is_a_failure_and_no_error(box):
    shell = box.session("shell")
    forged = shell.run("printf '9%.0s' {1..6000} >&3; printf '\\0' >&3")
    assert forged.exit_code == 1
    assert box.session("shell").run("exit_with() { return $1; }; exit_with 200").exit_code == 200


def test_a_folder_swapped_for_a_link_while_the_host_writes_there_does_not_lead_it_away(box):
    box.write("/workspace/swapped/a", "x")
    session = box.session("python")
    session.run(
        """
import os, threading
os.rename("swapped", "folder"); os.symlink("/private", "link")
def swap():
    while True:
        for source in ("folder", "link"):
            try: os.rename(source, "swapped"); os.rename("swapped", source)
            except OSError: pass
threading.Thread(target=swap, daemon=True).start()
"""
    )
    for number in range(200):
        try:
            box.write(f"swapped/{number}", "from the host")
        except SandboxSpoiled:
            continue
    session.close()
    assert box.exec("ls /private").stdout == "tests.py\n"


FILES = "python3 -c \"for n in range(30_000): open(str(n), 'w').close()\" 2>/dev/null; true"


@pytest.mark.parametrize("fill", ["head -c 64M /dev/zero > big 2>/dev/null; true", FILES], ids=["bytes", "files"])
def test_a_disk_that_programs_have_filled_is_their_doing_and_nothing_else(box, fill):
    lay(box, fill)
    if fill == FILES and box.exec("touch one_more").ok:
        pytest.skip("this back end does not limit the number of files")
    with pytest.raises(SandboxSpoiled, match="No space left"):
        box.write("input.txt", "x" * MEGABYTE)
    with pytest.raises(SandboxSpoiled, match="No space left"):
        box.write("folder/input.txt", "x" * MEGABYTE)
    box.write("/private/more.py", "there is room for the grader")
    box.reset()
    box.write("input.txt", "x" * MEGABYTE)


def test_an_answer_that_grows_while_it_is_read_is_cut_off(box):
    session = box.session("shell")
    session.run("(while :; do head -c 1M /dev/zero; done > answer) & sleep 0.05; (while :; do : > answer; done) &")
    for _ in range(10):
        try:
            assert len(box.read("answer", limit=4 * MEGABYTE)) <= 4 * MEGABYTE
        except ValueError:
            continue
    session.close()
