"""Programs that fill the kernel's memory rather than their own, or make the kernel end the guest for it.

Each first tries to be the last that is killed for want of memory: by its score, and by having little memory itself.
"""

from hostile_programs import Hostile

HIDE = """
def hide():
    for path in ("/proc/self/oom_score_adj", f"/proc/{os.getppid()}/oom_score_adj", "/proc/thread-self/oom_score_adj", "/proc/self/oom_adj"):
        try: open(path, "wb", buffering=0).write(b"0"); print("BREACH: hidden by", path, flush=True)
        except OSError as error: print("denied", path, error, flush=True)
hide()
def fork_small(act, count=40):
    for _ in range(count):
        try:
            if os.fork() == 0:
                hide()
                try: act()
                except (OSError, MemoryError): pass
                time.sleep(60)
                os._exit(0)
        except OSError: break
    print("killed" if os.WIFSIGNALED(os.wait()[1]) else "BREACH: one has ended", flush=True)
"""
MAP = """
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
def place(size, protection=mmap.PROT_READ):
    found = libc.mmap(None, size, protection, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, -1, 0)  # reserved nowhere
    if found == ctypes.c_void_p(-1).value: raise OSError(ctypes.get_errno(), "mmap")
    return found
"""


def filler(name, code, **more):
    return Hostile(
        name, HIDE + code, **{"says": "(?s)(denied.*?){4}", "ends": "any", "oom": True, "timeout": 20.0, **more}
    )


def folders(code):
    return f"for folder in ('/workspace', '/tmp', '/dev/shm'):\n    os.chdir(folder)\n{code}"


MEMORY = [
    filler(
        "attributes_of_files_in_memory",
        folders("""
    for n in range(3000):
        with open(f"f{n}", "w") as file:
            for set in (lambda: os.setxattr(f"f{n}", "user.a", bytes(60000)), lambda: os.setxattr(file.fileno(), "user.b", bytes(60000)),
                        lambda: os.setxattr(f"f{n}", "user.c", bytes(60000), follow_symlinks=False)):
                try: set(); print("BREACH: an attribute in", folder); break
                except OSError: pass
attempt("setxattrat", lambda: call(463, -100, b"f0", 0, b"user.d", ctypes.create_string_buffer(64), 16))
print("none was set")
"""),
        says="denied: setxattrat.*\nnone was set",
        ends="itself",
        oom=False,
    ),
    filler(
        "memory_files_that_nobody_has_mapped",
        "def act():\n    fd = os.memfd_create('x')\n    for _ in range(64): os.write(fd, bytes(1 << 20))\nfork_small(act)",
    ),
    filler(
        "page_tables_of_empty_pages",
        MAP
        + """
def act():
    begin = place(1 << 40)
    for n in range(1 << 19): ctypes.string_at(begin + (n << 21), 1)
fork_small(act)
""",
    ),
    filler(
        "messages_left_in_queues",
        """
attempt("a System V queue", lambda: call("msgget", 0, 0o1666))
attempt("System V semaphores", lambda: call("semget", 0, 32000, 0o1666))
attempt("a POSIX queue", lambda: call(number(240, 180), b"queue", os.O_CREAT | os.O_RDWR, 0o666, None))
""",
        says="(?s)(denied: .*){3}",
        ends="itself",
        oom=False,
    ),
]

FILES = [
    filler(
        f"{name}_without_number",
        folders(f"""
    names = ("n" * 200 + str(n) for n in range(1 << 20))
    print(folder, end=" ")
    count = until_refused(lambda _: {act}, 20500)  # a file for each 4096 bytes of the 16 MiB, and 1024 more, would be 5120
    if count > 6000: print("BREACH: no limit in", folder)
"""),
        says=r"(?s)(/\S+ denied after \d+ .*No space left.*){3}",
        ends="itself",
        oom=False,
    )
    for name, act in (
        ("files", "open(next(names), 'x').close()"),
        ("folders", "os.mkdir(next(names))"),
        ("links", "os.symlink('x' * 100, next(names))"),
        ("hard_links", "os.link('first', next(names)) if os.path.exists('first') else open('first', 'w').close()"),
        ("pipes_with_names", "os.mkfifo(next(names))"),
    )
]

CALLS = [
    Hostile(
        "calls_that_no_program_needs",
        """
for name, numbers in {"io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "bpf": (321, 280),
                      "perf_event_open": (298, 241), "userfaultfd": (323, 282), "add_key": (248, 217), "request_key": (249, 218),
                      "keyctl": (250, 219), "memfd_secret": (447, 447), "ptrace": (101, 117), "open_tree_attr": (467, 467),
                      "process_vm_readv": (310, 270), "statmount": (457, 457), "vmsplice": (278, 75), "of the future": (600, 600)}.items():
    try: call(number(*numbers), 0, 0, 0, 0, 0, 0); print("BREACH:", name)
    except OSError as error: print("denied" if error.errno in (errno.EPERM, errno.ENOSYS) else "BREACH", name, error)
""",
        says="(?s)(denied.*?){16}",
    ),
    Hostile(
        "sockets_of_odd_families",
        """
for family in range(50):
    for kind in (1, 2, 3, 5):
        try: socket.socket(family, kind).close()
        except OSError: continue
        print("made" if family in (1, 2, 10) else "BREACH", family)
        break
attempt("vsock", lambda: socket.socket(40, 1))
attempt("vsock, with bits that the kernel does not look at", lambda: call(number(41, 198), ctypes.c_ulong((1 << 32) + 40), 1, 0))
attempt("alg", lambda: socket.socket(38, 5))
attempt("netfilter", lambda: socket.socket(16, 3, 12))
attempt("audit", lambda: socket.socket(16, 3, 9))
attempt("a pair", lambda: socket.socketpair(40, 1))
""",
        says="(?s)made 1\n.*made 2\n.*made 10\n.*(denied.*){6}",
    ),
]

PROGRAMS = MEMORY + FILES + CALLS
