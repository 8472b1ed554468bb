"""Programs that use what the kernel counts for nobody, process trees that are hard to take down, and ends that imitate others."""

from hostile_programs import Hostile, endless

SOCKETS = [
    Hostile(
        "bytes_in_tcp_connections_to_itself",
        """
listener, held, sent = socket.create_server(("127.0.0.1", 0)), [], 0
while sent < 160 << 20 and len(held) < 900:
    near = socket.create_connection(listener.getsockname()); held += [near, listener.accept()[0]]
    near.setblocking(False)
    try:
        while sent < 160 << 20: sent += near.send(bytes(1 << 16))
    except OSError: pass
print("BREACH" if sent > 100 << 20 else "denied", "after", sent >> 20, "MiB")
""",
        says="denied",
    ),
    Hostile(
        "bytes_in_udp_sockets",
        """
held, taken = [], 0
for _ in range(400):
    inbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); inbox.bind(("127.0.0.1", 0)); held.append(inbox)
    inbox.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    outbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); outbox.connect(inbox.getsockname())
    try:
        for _ in range(300): outbox.send(bytes(1300))
    except OSError: pass
    outbox.close()
for inbox in held:
    inbox.setblocking(False)
    try:
        while True: inbox.recv(1500); taken += 2304
    except BlockingIOError: pass
print("BREACH" if taken > 100 << 20 else "denied", "after", taken >> 20, "MiB")
""",
        says="denied",
    ),
    Hostile(
        "answers_of_the_kernel_that_nobody_takes",
        """
for protocol in range(25): attempt(f"netlink {protocol}", lambda: socket.socket(16, 3, protocol))
print(socket.getaddrinfo("127.0.0.1", 80)[0][4])
""",
        says=r"(?s)(denied.*?){25}\('127.0.0.1', 80\)",
    ),
    Hostile(
        "filters_of_sockets",
        """
import struct
code = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 0xFFFF) * 4096)
for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6):
    plug = socket.socket(family, socket.SOCK_DGRAM)
    for option in (26, 50, 51, 52):
        attempt(f"filter {option} of {family}", lambda: plug.setsockopt(1, option, struct.pack("@HP", 4096, ctypes.addressof(code))))
for option in (2, 7, 8, 9, 15, 20, 21): plug.setsockopt(1, option, struct.pack("@qq", 1, 0))
plug.setsockopt(41, 26, 1); socket.socket().setsockopt(6, 1, 1)
""",
        says="(?s)(denied.*?){12}$",
    ),
    Hostile(
        "sockets_and_pipes_in_the_place_of_files",
        """
for n in range(200):
    socket.socket(socket.AF_UNIX).bind(f"/workspace/s{n}"); os.mkfifo(f"/tmp/p{n}")
attempt("one of the guest's", lambda: socket.socket(socket.AF_UNIX).bind("/private/s"))
""",
        says="denied",
    ),
]

TREES = [
    Hostile(
        "tree_with_a_reaper_of_its_own",
        """
if os.fork() == 0:
    call("prctl", 36, 1, 0, 0, 0); os.setsid()
    for _ in range(10):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0: time.sleep(600)
            os._exit(0)
    time.sleep(600)
time.sleep(0.1); print("left")
""",
        says="left",
    ),
    Hostile(
        "siblings_instead_of_children",
        """
for _ in range(10):  # CLONE_PARENT: the first process of the sandbox becomes their parent
    if call(number(56, 220), 0x8000 | signal.SIGCHLD, 0, 0, 0, 0) == 0: time.sleep(600)
for _ in range(10):
    if call(number(56, 220), 0x8000 | signal.SIGCHLD, 0, 0, 0, 0) == 0: os._exit(9)
print("left")
""",
        says="left",
    ),
    Hostile(
        "children_that_announce_no_end",
        """
for kind in (0, 9, 19, 64) * 4:
    if os.fork() == 0:
        if call(number(56, 220), kind, 0, 0, 0, 0) == 0: time.sleep(600)
        os._exit(0)
print("left", flush=True); os._exit(0)
""",
        says="left",
    ),
    endless(
        "parent_that_waits_for_a_stopped_child",
        "call(number(56, 220), 0x4000 | signal.SIGCHLD, 0, 0, 0, 0) or (os.setsid(), os.kill(os.getpid(), signal.SIGSTOP))",
    ),
    endless(
        "processes_of_one_memory",
        """
stacks = [ctypes.create_string_buffer(1 << 16) for _ in range(20)]
sleep = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(("pause", libc))
for stack in stacks: libc.clone(sleep, ctypes.c_void_p((ctypes.addressof(stack) + (1 << 16)) & ~15), 0x100 | 0x200 | 0x400 | 17, None)
print("made", flush=True); time.sleep(600)
""",
        says="made",
    ),
    Hostile(
        "children_that_fork_when_their_parent_is_killed",
        """
def again(*_):
    if os.fork() == 0: call("prctl", 1, signal.SIGUSR1, 0, 0, 0)
signal.signal(signal.SIGUSR1, again)
for _ in range(8):
    if os.fork() == 0:
        call("prctl", 1, signal.SIGUSR1, 0, 0, 0)
        if os.fork() == 0: call("prctl", 1, signal.SIGUSR1, 0, 0, 0)
        while True: time.sleep(0.01)
time.sleep(0.1); print("left")
""",
        says="left",
    ),
    endless(
        "names_of_ended_processes",
        """
for name in (b"x) Z 1 1", b") Z 1 (x", b"a\\nGroups:\\t9", b"python3", b"\\xff\\n) X "):
    if os.fork() == 0:
        call("prctl", 15, name, 0, 0, 0); time.sleep(600)
time.sleep(600)
""",
    ),
    endless(
        "each_continued_by_the_other",
        """
for _ in range(4): os.fork()
while True:
    try: os.kill(-1, signal.SIGCONT)
    except OSError: pass
""",
    ),
    endless(
        "executed_anew_for_ever_by_threads",
        """
again = [sys.executable, "-c", "import os, sys, threading; threading.Thread(target=os.execv, args=(sys.executable, sys.orig_argv)).start(); __import__('time').sleep(60)"]
for _ in range(3): os.fork()
os.execv(again[0], again)
""",
    ),
    endless(
        "call_whose_supervisor_never_answers",
        """
import struct
steps = ((0x20, 0, 0, 0), (0x15, 0, 1, number(110, 173)), (6, 0, 0, 0x7FC00000), (6, 0, 0, 0x7FFF0000))
code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
call("prctl", 38, 1, 0, 0, 0)
try: call(number(317, 277), 1, 8, struct.pack("@HP", 4, ctypes.addressof(code)))
except OSError as error: print(error, flush=True)
os.fork(); os.setsid() if os.getpid() != os.getpgid(0) else None
os.getppid(); time.sleep(600)
""",
    ),
    Hostile(
        "exit_that_a_filter_turns_into_a_kill",
        """
import struct
steps = ((0x20, 0, 0, 0), (0x15, 0, 1, number(231, 94)), (6, 0, 0, 0x80000000), (6, 0, 0, 0x7FFF0000))
code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
call(number(317, 277), 1, 0, struct.pack("@HP", 4, ctypes.addressof(code)))
print("exits", flush=True); os._exit(0)
""",
        says="exits",
    ),
    endless(
        "busy_on_one_processor",
        """
for _ in range(5): os.fork()
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)); os.setsid() if os.getpid() != os.getpgid(0) else None
while True: call(number(324, 283), 1, 0, 0)
""",
    ),
]

HOARDS = [
    Hostile(
        "removed_files_held_by_sockets_that_hold_each_other",
        """
import array
for n in range(12):
    near, far = socket.socketpair()
    file = os.open("held", os.O_CREAT | os.O_RDWR); os.write(file, bytes(1 << 20)); os.unlink("held")
    socket.send_fds(near, [b"x"], [near.fileno(), far.fileno(), file]); socket.send_fds(far, [b"x"], [near.fileno(), far.fileno(), file])
    for fd in (file, near.detach(), far.detach()): os.close(fd)
print("hoarded")
""",
        says="hoarded",
    ),
    Hostile(
        "removed_files_mapped_by_stopped_processes",
        """
file = os.open("/workspace/held", os.O_CREAT | os.O_RDWR); os.write(file, bytes(12 << 20)); os.unlink("/workspace/held")
for _ in range(10):
    if os.fork() == 0:
        os.setsid(); held = mmap.mmap(file, 0); os.close(file); os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(0.2); print("hoarded")
""",
        says="hoarded",
    ),
    Hostile(
        "descriptors_of_every_kind",
        """
import select
kinds = {"timerfd": lambda _: call("timerfd_create", 1, 0), "eventfd": lambda _: call("eventfd", 0, 0), "epoll": lambda _: held.append(select.epoll()),
         "signalfd": lambda _: call("signalfd", -1, (ctypes.c_ulong * 16)(), 0), "memfd": lambda _: os.memfd_create("x"), "pidfd": lambda _: os.pidfd_open(os.getpid())}
held = []
for name, act in kinds.items():
    if os.fork() == 0: print(name, until_refused(act, 5000)); os._exit(0)
    os.wait()
""",
        says="(?s)(denied after.*){6}",
    ),
    Hostile(
        "polls_of_polls",
        """
import select
polls = [select.epoll() for _ in range(300)]
until_refused(lambda n: polls[n].register(polls[n + 1]), 299)
attempt("a ring", lambda: [polls[n + 1].register(polls[n]) for n in range(299)])
""",
        says="(?s)denied after.*denied: a ring",
    ),
    Hostile(
        "locks_without_number",
        """
import fcntl, struct
file = os.open("/workspace/locked", os.O_CREAT | os.O_RDWR)
for _ in range(2): os.fork()
for n in range(60000): fcntl.fcntl(file, 37, struct.pack("hhqqi4x", 1, 0, n * 4, 1, 0))
""",
        ends="any",
        oom=None,
        timeout=2,
    ),
    Hostile(
        "maps_without_number",
        """
pages = mmap.mmap(-1, 1 << 30)
begin = ctypes.addressof(ctypes.c_char.from_buffer(pages))
for _ in range(3): os.fork()
until_refused(lambda n: call("mprotect", ctypes.c_void_p(begin + n * 8192), 4096, 1), 1 << 17)
""",
        says="denied|^$",
        ends="any",
        oom=None,
        timeout=5,
    ),
    Hostile(
        "timers_without_number",
        """
event, timer = (ctypes.c_int * 16)(0, 0, 40, 0), ctypes.c_void_p()
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
until_refused(lambda _: call("timer_create", 1, event, ctypes.byref(timer)), 1 << 18)
""",
        says="denied|never",
        ends="any",
        oom=None,
        timeout=20,
    ),
    Hostile(
        "large_pages_and_locked_ones",
        """
attempt("huge", lambda: os.memfd_create("x", 4) and os.write(os.memfd_create("x", 4), bytes(1 << 21)))
attempt("huge map", lambda: mmap.mmap(-1, 1 << 30, 0x22 | 0x40000))
attempt("locked", lambda: call("mlockall", 7) or bytearray(64 << 20) and 1 / 0)
attempt("locked map", lambda: mmap.mmap(-1, 64 << 20, 0x22 | 0x2000) and 1 / 0)
""",
        says="(?s)(denied.*?){3}|MemoryError",
        ends="any",
        oom=None,
    ),
    Hostile(
        "arguments_as_long_as_may_be",
        """
attempt("one", lambda: os.execv("/bin/true", ["true", "x" * (1 << 20)]))
attempt("all", lambda: os.execve("/bin/true", ["true"], {f"N{n}": "x" * 100000 for n in range(100)}))
os.execve("/bin/sleep", ["/usr/bin/python3 -I -S -c guest", "0.1"], {f"N{n}": "x" * 10000 for n in range(100)})
""",
        says="denied: one",
        ends="any",
    ),
    Hostile(
        "sync_of_all_disks",
        """
for _ in range(3): os.fork()
begin = time.monotonic()
root = os.open("/", os.O_RDONLY)
for _ in range(2000): os.sync(); call("syncfs", root)
print("quick" if time.monotonic() - begin < 15 else "BREACH: slow", flush=True)
""",
        says="quick",
    ),
]

FILES = [
    Hostile(
        "file_of_an_exbibyte",
        """
for folder in ("/workspace", "/tmp", "/dev/shm"):
    file = os.open(f"{folder}/sparse", os.O_CREAT | os.O_RDWR)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    attempt("truncate", lambda: os.truncate(file, 1 << 60))
    attempt("write far out", lambda: os.pwrite(file, b"x", 1 << 60))
    attempt("allocate", lambda: os.posix_fallocate(file, 0, 1 << 60))
""",
        says="(?s)(denied.*?){9}",
    ),
    Hostile(
        "mount_points_replaced",
        """
for path in ("/workspace", "/tmp", "/private", "/dev/shm", "/proc", "/"):
    attempt("remove " + path, lambda: os.rmdir(path))
    attempt("rename " + path, lambda: os.rename(path, "/tmp/old"))
    attempt("exchange " + path, lambda: call("renameat2", -100, path.encode(), -100, b"/workspace", 2))
    attempt("link over " + path, lambda: os.symlink("/etc", path))
""",
        says="(?s)(denied.*?){24}",
    ),
    Hostile(
        "whiteouts",
        """
for n in range(20):
    open(f"w{n}", "w").close()
    try: call("renameat2", -100, f"w{n}".encode(), -100, f"v{n}".encode(), 4)
    except OSError as error: print(error)
for name in os.listdir("."):
    if stat.S_ISCHR(os.lstat(name).st_mode): attempt("open " + name, lambda: os.open(name, os.O_RDWR))
print("made")
""",
        says="made",
    ),
    Hostile(
        "files_that_cannot_be_changed",
        """
import fcntl, struct
for path in ("/workspace/f", "/tmp/f", "/dev/shm/f"):
    file = os.open(path, os.O_CREAT | os.O_RDWR)
    for flags in (0x10, 0x20, 0x30): attempt(f"flags {flags}", lambda: fcntl.ioctl(file, 0x40086602, struct.pack("q", flags)))
    attempt("owner", lambda: os.chown(path, 0, 0)); attempt("group", lambda: os.chown(path, -1, 0))
for path in ("/workspace", "/tmp"): attempt("of the folder", lambda: fcntl.ioctl(os.open(path, os.O_RDONLY), 0x40086602, struct.pack("q", 0x30)))
""",
        says="(?s)(denied.*?){17}",
    ),
    Hostile(
        "left_for_who_comes_next",
        """
harm = "import os; open('/workspace/harmed', 'a').write('x'); print('harmed')\\n"
site = f"/workspace/.local/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
os.makedirs(site)
for path in (site + "/usercustomize.py", site + "/sitecustomize.py", site + "/a.pth", "/workspace/ast.py", "/workspace/os.py", "/tmp/traceback.py"):
    open(path, "w").write(harm)
for name in (".bashrc", ".profile", ".bash_profile", ".bash_login", ".bash_logout", ".inputrc", ".pythonrc", ".bash_history"):
    open("/workspace/" + name, "w").write("echo harmed\\n")
for path in ("/etc/ld.so.preload", "/etc/profile.d/x.sh", "/var/spool/cron/crontabs/x", "/etc/cron.d/x", "/root/.bashrc", site.replace("/workspace", "/root")):
    attempt(path, lambda: open(path, "w"))
""",
        says="(?s)(denied.*?){6}",
    ),
]

ENDS = [
    Hostile("exit_of_a_timeout", "sleep 0.1; exit 124", shell=True),
    Hostile("kill_that_looks_like_want_of_memory", "kill -KILL $$", shell=True),
    Hostile("alarm_that_looks_like_a_timeout", "signal.alarm(1); time.sleep(60)"),
    endless("every_stream_closed", "exec 0<&- 1>&- 2>&-; sleep 600", shell=True),
    Hostile(
        "half_characters_and_zero_bytes",
        "os.write(2, b'\\xe2\\x82'); os.write(1, b'\\xac\\0' + b'\\xe2\\x82\\xac' * 100000 + b'\\xf0\\x9f'); os.write(2, bytes(200001))",
        truncated=True,
    ),
    endless(
        "output_in_packets_of_a_byte",
        "import fcntl\nfcntl.fcntl(1, fcntl.F_SETFL, os.O_WRONLY | os.O_DIRECT)\ntry: fcntl.fcntl(1, 1031, 4096)\nexcept OSError: pass\nwhile True: os.write(1, b'x')",
    ),
    Hostile(
        "output_read_by_itself",
        """
if os.fork() == 0:
    os.setsid(); own = os.open("/proc/self/fd/1", os.O_RDONLY)
    while True: os.read(own, 1 << 16)
for _ in range(100): os.write(1, b"x" * 4096)
""",
    ),
    Hostile(
        "signals_of_a_pipe_for_the_guest",
        """
import fcntl
for fd in (0, 1, 2):
    for who in (1, -1):
        for each in (0, 9, 17, 19):
            try:
                fcntl.fcntl(fd, fcntl.F_SETOWN, who); fcntl.fcntl(fd, 10, each)
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC); os.write(2, b"x" * 4096)
            except OSError: pass
time.sleep(0.1); print("still here")
""",
        ends="any",
    ),
    Hostile(
        "the_guest_by_a_descriptor_of_it",
        """
guest = os.pidfd_open(1)
for each in (9, 19, 15, 17): attempt(f"signal {each}", lambda: signal.pidfd_send_signal(guest, each))
vector = (ctypes.c_void_p * 2)(4096, 4096)
attempt("pages", lambda: call(440, guest, vector, 1, 20, 0))
attempt("release", lambda: call(448, guest, 0))
attempt("wait", lambda: os.waitid(os.P_PIDFD, guest, os.WEXITED))
""",
        says="(?s)(denied.*?){7}",
    ),
    Hostile(
        "input_of_terminals",
        """
import fcntl, pty
near, far = os.openpty()
attempt("typed into it", lambda: fcntl.ioctl(far, 0x5412, b"x") and 1 / 0)
if os.fork() == 0:
    os.setsid(); fcntl.ioctl(far, 0x540E, 0); signal.signal(signal.SIGHUP, signal.SIG_IGN); time.sleep(600)
attempt("hang up", lambda: call(number(153, 58)))
for path in ("/dev/tty", "/dev/console", "/dev/tty0", "/dev/tty1"): attempt(path, lambda: os.open(path, os.O_RDWR))
""",
        says="(?s)denied: hang up(.*denied){4}",
    ),
]

PROGRAMS = SOCKETS + TREES + HOARDS + FILES + ENDS
