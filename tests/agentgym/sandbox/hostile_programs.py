"""Programs that attack the sandbox they run in, and what shows that each was contained.

A program prints "BREACH" if it does what it must not be able to, and "denied" where it was stopped. Those here use up what
they can and outlive what they may; hostile_escapes.py holds those that try to get out, hostile_sessions.py those that attack
a session from inside.
"""

from dataclasses import dataclass

PRELUDE = '''
import ctypes, errno, mmap, os, platform, resource, signal, socket, stat, subprocess, sys, threading, time

libc = ctypes.CDLL(None, use_errno=True)

def attempt(what, act):
    """What must fail. `act` divides by zero where it did not raise and yet came to nothing."""
    try:
        result = act()
    except (OSError, ValueError, ZeroDivisionError, subprocess.CalledProcessError) as error:
        print("denied:", what, repr(error)[:200], flush=True)
    else:
        print("BREACH:", what, repr(result)[:200], flush=True)

def call(name, *arguments):
    """A function of the C library, or a system call by its number."""
    function = libc.syscall if isinstance(name, int) else getattr(libc, name)
    result = function(*([name] if isinstance(name, int) else []), *arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result

def number(x86_64, aarch64):
    return x86_64 if platform.machine() == "x86_64" else aarch64

def until_refused(act, most):
    """How often it could be done, and why no more."""
    for count in range(most):
        try:
            act(count)
        except (OSError, RuntimeError, MemoryError) as error:
            print("denied after", count, repr(error)[:100], flush=True)
            return count
    print("never refused in", most, flush=True)
    return most
'''


@dataclass(frozen=True)
class Hostile:
    """A program and its expected end.

    Attributes:
        name: what it does, for the test's name.
        code: Python, after the prelude; with `shell` a text for bash.
        says: a pattern that its stdout and stderr together must match.
        ends: how: "itself" within its time, "late" when its time is up, or "any".
        oom: whether something of it must be killed for want of memory; None: either.
        truncated: whether its output must be cut.
        stdin: what it is given.
        timeout: seconds.
    """

    name: str
    code: str
    says: str = ""
    ends: str = "itself"
    shell: bool = False
    oom: bool | None = False
    truncated: bool = False
    stdin: bytes = b""
    timeout: float = 20.0

    @property
    def command(self):
        return self.code if self.shell else ["python3", "-c", PRELUDE + self.code]


def endless(name, code, **more):
    return Hostile(name, code, **{"ends": "late", "timeout": 1.0, **more})


FORKS = [
    endless("fork_bomb", "while True:\n    try: os.fork()\n    except OSError: pass"),
    Hostile("fork_bomb_in_bash", ":(){ :|:& };:", shell=True, ends="any", timeout=2),
    endless(
        "fork_bomb_of_sessions",
        """
while True:
    try:
        if os.fork() == 0:
            os.setsid()
            if os.fork(): os._exit(0)
    except OSError: pass
""",
    ),
    endless(
        "fork_bomb_that_ignores_signals",
        """
for each in range(1, 65):
    try: signal.signal(each, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True:
    try: os.fork()
    except OSError: pass
""",
    ),
    endless(
        "fork_bomb_whose_parents_end",
        """
if os.fork(): time.sleep(60)
while True:  # every process lives for a moment only: whoever walks a list of them always comes too late
    try:
        if os.fork(): os._exit(0)
    except OSError: pass
""",
    ),
    Hostile(
        "spawn_storm", "until_refused(lambda _: subprocess.Popen(['sleep', '60']), 1000)", says=r"denied after \d\d? "
    ),
    Hostile("zombies", "until_refused(lambda _: os.fork() or os._exit(0), 1000)", says=r"denied after \d\d? "),
    Hostile(
        "threads",
        "until_refused(lambda _: threading.Thread(target=time.sleep, args=(60,), daemon=True).start(), 1000)\nos._exit(0)",
        says=r"denied after \d\d? ",
    ),
    endless("busy_processes", "for _ in range(5): os.fork()\nwhile True: pass"),
]

SOCKETS = """
held = []
def fill(_):
    pair = socket.socketpair()
    held.append(pair)
    pair[0].setblocking(False)
    pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
    while True:
        try: pair[0].send(bytes(1 << 16))
        except BlockingIOError: return
"""
MEMORY = [
    Hostile("memory", "held = []\nwhile True: held.append(bytearray(1 << 24))", ends="any", oom=True),
    Hostile(
        "memory_shared_map",
        "m = mmap.mmap(-1, 1 << 31)\nfor at in range(0, 1 << 31, 4096): m[at] = 1",
        ends="any",
        oom=True,
    ),
    Hostile(
        "memory_of_many_processes",
        """
for _ in range(20):
    if os.fork() == 0:
        held = bytearray(b"x") * (64 << 20)
        time.sleep(30)
        os._exit(0)
for _ in range(20): print(os.wait()[1])
""",
        ends="any",
        oom=True,
        timeout=5,
    ),
    Hostile(
        "memory_of_small_processes_that_hide",
        """
try: open("/proc/self/oom_score_adj", "wb", buffering=0).write(b"0"); print("BREACH: hidden", flush=True)
except OSError as error: print("denied", error, flush=True)
for _ in range(55):
    if os.fork() == 0:
        held = bytearray(b"x") * (9 << 20)
        time.sleep(30)
        os._exit(0)
time.sleep(30)
""",
        says="denied",
        ends="any",
        oom=None,
        timeout=3,
    ),
    Hostile("memory_in_one_line", "b'x' * (1 << 40)", says="MemoryError"),
    Hostile(
        "recursion_in_c",
        "import sys\nsys.setrecursionlimit(1 << 30)\nf = lambda: f()\nf()",
        ends="any",
        oom=None,
        timeout=5,
    ),
    Hostile(
        "pipes_full_of_bytes",
        """
import fcntl
def fill(_):
    _, write = os.pipe()
    try: fcntl.fcntl(write, 1031, 1 << 20)
    except PermissionError: pass
    os.set_blocking(write, False)
    os.write(write, bytes(1 << 20))
until_refused(fill, 2000)
""",
        says="denied after",
        ends="any",
        oom=None,
    ),
    Hostile("sockets_full_of_bytes", SOCKETS + "until_refused(fill, 5000)", ends="any", oom=None),
    Hostile(
        "sockets_full_of_bytes_of_small_processes_that_hide",
        SOCKETS
        + """
try: open("/proc/self/oom_score_adj", "wb", buffering=0).write(b"0"); print("BREACH: hidden", flush=True)
except OSError as error: print("denied", error, flush=True)
for _ in range(50):
    if os.fork() == 0:
        until_refused(fill, 300)
        time.sleep(60)
time.sleep(60)
""",
        says="denied",
        ends="any",
        oom=None,
        timeout=3,
    ),
]

DISK = [
    Hostile(
        f"disk_{name}",
        f"""
file = open({path!r}, "wb", buffering=0)
until_refused(lambda _: file.write(bytes(1 << 20)) == 1 << 20 or 1 / 0, 4096)
print(os.path.getsize({path!r}) >> 20, "MiB")
""",
        says=r"(?s)(denied|ZeroDivisionError|File size limit|^$)",
        ends="any",
        oom=None,
    )
    for name, path in (("workspace", "/workspace/big"), ("tmp", "/tmp/big"), ("shm", "/dev/shm/big"))
] + [
    Hostile(
        "disk_by_many_files",
        """
def fill(count):
    with open(f"/workspace/{count}", "wb", buffering=0) as file: file.write(bytes(1 << 20))
until_refused(fill, 4096)
""",
        says=r"denied after \d\d? .*(No space|Cannot allocate)",
    ),
    Hostile(
        "inodes",
        "until_refused(lambda n: os.close(os.open(f'/workspace/{n}', os.O_CREAT)), 1 << 20)",
        ends="any",
        oom=None,
        timeout=15,
    ),
    Hostile(
        "sparse_file",
        """
attempt("a file of a terabyte", lambda: os.truncate(os.open("/workspace/sparse", os.O_CREAT | os.O_RDWR), 1 << 40))
""",
        ends="any",
    ),
    Hostile(
        "deep_folders",
        """
def deeper(_):
    os.mkdir("d"); os.chdir("d")
until_refused(deeper, 20000)
""",
        ends="any",
        oom=None,
    ),
    Hostile(
        "folders_that_cannot_be_entered",
        """
for n in range(50):
    os.makedirs(f"/workspace/a{n}/b/c"); open(f"/workspace/a{n}/b/c/f", "w").close()
    for path in (f"/workspace/a{n}/b/c", f"/workspace/a{n}/b", f"/workspace/a{n}"): os.chmod(path, 0)
os.mkdir("/tmp/x", 0o1777); open("/tmp/x/y", "w").close(); os.chmod("/tmp/x/y", 0); os.chmod("/tmp/x", 0)
print("made")
""",
        says="made",
    ),
    Hostile(
        "closed_workspace",
        """
for path in ("/workspace", "/tmp", "/dev/shm", "/private"):
    try: os.chmod(path, 0); print("closed", path)
    except OSError as error: print("denied", path, error)
""",
        says="denied|closed",
    ),
    Hostile(
        "access_lists_on_the_workspace",
        """
import struct
acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *e) for e in
      ((1, 0, 0xFFFFFFFF), (4, 0, 0xFFFFFFFF), (16, 0, 0xFFFFFFFF), (32, 0, 0xFFFFFFFF)))
for path in ("/workspace", "/tmp", "/dev/shm", "/private"):
    for kind in ("default", "access"):
        try: os.setxattr(path, "system.posix_acl_" + kind, acl); print("BREACH: set", kind, path)
        except OSError as error: print("denied", kind, path, error)
""",
        says="(?s)(denied.*?){8}",
    ),
    Hostile(
        "odd_names",
        r"""
for name in (b"new\nline", b"\xff\xfe", b"-rf", b"*", b" ", b"a" * 255, b"\x1b[31m", "\u202e".encode()):
    open(b"/workspace/" + name, "w").close()
    os.symlink(b"/private", b"/tmp/" + name)
print(sorted(os.listdir(b"/workspace")), sep="\n")
sys.stdout.buffer.write(b"\xff\xfe\x00 made")
""",
        says="made",
    ),
    Hostile(
        "no_descriptors", "until_refused(lambda _: os.dup(1), 1 << 20)", says=r"denied after \d+ .*Too many open files"
    ),
]

OUTPUT = [
    endless("endless_output", "yes hello", shell=True, truncated=True),
    endless("endless_errors", "yes hello >&2", shell=True, truncated=True),
    endless("endless_output_and_errors", "yes out & yes err >&2", shell=True, truncated=True, ends="any"),
    endless("endless_line", "while True: os.write(1, b'x' * 65536)", truncated=True),
    endless("endless_bytes", "cat /dev/urandom", shell=True, truncated=True),
    endless(
        "endless_output_of_many", "for _ in range(4): os.fork()\nwhile True: os.write(1, b'x' * 65536)", truncated=True
    ),
    Hostile(
        "output_from_a_daemon",
        "if os.fork() == 0:\n    os.setsid()\n    while True: os.write(1, b'x' * 65536)\nprint('left')",
        ends="itself",
    ),
    Hostile(
        "output_held_open", "if os.fork() == 0:\n    os.setsid(); time.sleep(60)\nprint('left')", says="left", timeout=5
    ),
    Hostile(
        "forged_frames",
        r"""
import json, struct
for header, body in (({}, b""), ({"code": 0, "timed_out": False, "oom": False, "seconds": 0, "sizes": [4, 0, 0, 0],
        "left_out": [0, 0]}, b"fake"), ({"left": []}, b"")):
    text = json.dumps(header).encode()
    frame = struct.pack(">II", len(text), len(body)) + text + body
    for descriptor in (1, 2, 3, 4, 5, 6, 7):
        try: os.write(descriptor, frame * 3)
        except OSError: pass
sys.exit(7)
""",
        says="fake",
    ),
    Hostile("input_never_read", "time.sleep(0.3); print('did not read')", says="did not read", stdin=b"x" * (8 << 20)),
    endless("input_never_read_by_one_that_stays", "time.sleep(60)", stdin=b"x" * (8 << 20)),
    Hostile("input_closed", "os.close(0); time.sleep(0.2); print('closed')", says="closed", stdin=b"x" * (8 << 20)),
]

DAEMONS = [
    Hostile(
        "daemon",
        """
if os.fork() == 0:
    os.setsid()
    if os.fork(): os._exit(0)
    for descriptor in range(3): os.close(descriptor)
    while True: time.sleep(0.01); open("/workspace/alive", "a").write("x")
print("left")
""",
        says="left",
    ),
    Hostile("daemon_by_nohup", "nohup sleep 600 >/dev/null 2>&1 & disown; echo left", shell=True, says="left"),
    Hostile(
        "daemon_by_setsid",
        "setsid -f sleep 600; (setsid bash -c 'trap \"\" TERM HUP; sleep 600' &) ; echo left",
        shell=True,
        says="left",
    ),
    Hostile(
        "daemon_born_at_exit",
        "import atexit\natexit.register(lambda: os.fork() == 0 and (os.setsid(), time.sleep(600)))\nprint('left')",
        says="left",
        ends="any",
    ),
    Hostile(
        "daemon_that_forks_when_hit",
        """
def again(*_):
    if os.fork() == 0: print("again", flush=True)
for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGCONT, signal.SIGCHLD): signal.signal(each, again)
if os.fork() == 0:
    os.setsid()
    while True: time.sleep(0.01)
print("left")
""",
        says="left",
    ),
    Hostile(
        "daemon_that_is_stopped",
        "if os.fork() == 0:\n    os.setsid(); os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(0.1); print('left')",
        says="left",
    ),
    Hostile(
        "daemon_that_is_traced",
        """
child = os.fork()
if child == 0:
    os.setsid(); call("ptrace", 0, 0, 0, 0); os.kill(os.getpid(), signal.SIGSTOP); time.sleep(600)
if os.fork() == 0:
    os.setsid(); time.sleep(600)
print("left")
""",
        says="left",
    ),
    Hostile(
        "shared_memory_left_behind",
        """
for key in range(5): print(call("shmget", 0x5EC0 + key, 1 << 16, 0o1666))
attempt("semaphores", lambda: call("semget", 0x5EC0, 1, 0o1666)), attempt("queues", lambda: call("msgget", 0x5EC0, 0o1666))
open("/dev/shm/left", "w").write("x") if os.path.isdir("/dev/shm") else None
print("left")
""",
        says="(?s)denied.*denied.*left",
    ),
]

PROGRAMS = FORKS + MEMORY + DISK + OUTPUT + DAEMONS
