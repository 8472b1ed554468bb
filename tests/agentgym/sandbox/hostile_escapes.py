"""Programs that try to get out of their sandbox, at its first process, at the network, or at what grades them."""

from hostile_programs import Hostile, endless

NETWORK = [
    Hostile("dns", "attempt('dns', lambda: socket.getaddrinfo('example.com', 80))", says="denied", timeout=30),
    Hostile(
        "tcp_outside",
        """
for host in ("1.1.1.1", "169.254.169.254", "172.17.0.1", "10.0.0.1"):
    attempt(host, lambda: socket.create_connection((host, 80), 2))
""",
        says="(?s)(denied.*?){4}",
    ),
    Hostile(
        "tcp_to_the_host",
        """
port = int(os.environ["HOST_PORT"])
for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0"):
    attempt(host, lambda: socket.create_connection((host, port), 2))
""",
        says="(?s)(denied.*?){4}",
    ),
    Hostile(
        "abstract_socket_of_the_host",
        """
plug = socket.socket(socket.AF_UNIX)
attempt("abstract socket", lambda: plug.connect("\\0" + os.environ["HOST_SOCKET"]))
""",
        says="denied",
    ),
    Hostile(
        "udp",
        "attempt('udp', lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('8.8.8.8', 53)))",
        says="denied",
    ),
    Hostile(
        "raw_sockets",
        """
attempt("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP))
attempt("packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
""",
        says="(?s)denied.*denied",
    ),
    Hostile(
        "interfaces",
        """
names = [line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]]
print("BREACH" if set(names) - {"lo", "sit0", "tunl0", "ip6tnl0", "gre0"} else "denied", names)
""",
        says="denied",
    ),
    Hostile(
        "docker_socket",
        """
for path in ("/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock", os.environ["HOST_DOCKER"]):
    attempt(path, lambda: socket.socket(socket.AF_UNIX).connect(path))
""",
        says="(?s)(denied.*?){4}",
    ),
]

ROOT = [
    Hostile(
        "become_root",
        "attempt('setuid', lambda: os.setuid(0))\nattempt('setgid', lambda: os.setgid(0))\nattempt('groups', lambda: os.setgroups([0]))",
        says="(?s)(denied.*?){3}",
    ),
    Hostile(
        "privileges",
        """
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
for name in ("CapPrm", "CapEff", "CapAmb"):  # CapInh gives nothing where there are no new privileges
    print("BREACH" if int(status[name], 16) else "denied", name, status[name])
print("denied" if status["NoNewPrivs"].strip() == "1" else "BREACH", "NoNewPrivs")
print("denied" if status["Seccomp"].strip() == "2" else "BREACH", "Seccomp", status["Seccomp"])
print("denied" if len(set(status["Uid"].split())) == 1 and os.getuid() >= 10_000 else "BREACH", "Uid", status["Uid"])
""",
        says="(?s)(denied.*?){6}",
    ),
    Hostile(
        "setuid_programs",
        """
found = subprocess.run("find / -xdev -perm /6000 -type f 2>/dev/null", shell=True, capture_output=True, text=True).stdout.split()
for path in found[:20]:
    done = subprocess.run([path], stdin=subprocess.DEVNULL, capture_output=True, timeout=5)
print("denied", found, subprocess.run(["su", "-c", "id"], capture_output=True, text=True, stdin=subprocess.DEVNULL) if "/usr/bin/su" in found else "")
attempt("setuid copy", lambda: (os.system("cp /bin/sh /workspace/sh; chmod 6755 /workspace/sh"), subprocess.run(["/workspace/sh", "-p", "-c", "echo $EUID; test $(id -u) = 0"], check=True)))
""",
        says="denied: setuid copy",
    ),
    Hostile("chroot", "os.mkdir('r'); attempt('chroot', lambda: os.chroot('r'))", says="denied"),
    Hostile(
        "mounts",
        """
attempt("tmpfs", lambda: call("mount", b"none", b"/workspace", b"tmpfs", 0, None))
attempt("bind", lambda: call("mount", b"/private", b"/workspace", None, 4096, None))
attempt("root writable", lambda: call("mount", None, b"/", None, 32, None))
attempt("private writable", lambda: call("mount", None, b"/private", None, 32 | 4096, None))
attempt("unmount", lambda: call("umount2", b"/private", 2))
attempt("pivot_root", lambda: call(number(155, 41), b"/", b"/workspace"))
attempt("new mount api", lambda: call(430, b"tmpfs", 0))
""",
        says="(?s)(denied.*?){7}",
    ),
    Hostile(
        "namespaces",
        """
for name, flag in (("user", 0x10000000), ("mount", 0x20000), ("pid", 0x20000000), ("net", 0x40000000), ("ipc", 0x8000000), ("user and mount", 0x10020000)):
    attempt("unshare " + name, lambda: call("unshare", flag))
for kind in ("mnt", "pid", "net", "user", "ipc"):
    attempt("setns " + kind, lambda: call("setns", os.open(f"/proc/1/ns/{kind}", os.O_RDONLY), 0))
""",
        says="(?s)(denied.*?){11}",
    ),
    Hostile(
        "clone_into_user_namespace",
        "attempt('clone', lambda: call(number(56, 220), 0x10000000 | 17, 0, 0, 0, 0) or os._exit(0))",
        says="denied",
    ),
    Hostile(
        "devices",
        """
for kind, major, minor in ((stat.S_IFBLK, 8, 0), (stat.S_IFCHR, 1, 1), (stat.S_IFCHR, 1, 3), (stat.S_IFBLK, 254, 0)):
    attempt(f"mknod {major} {minor}", lambda: os.mknod(f"/workspace/d{major}{minor}", kind | 0o666, os.makedev(major, minor)))
for path in ("/dev/mem", "/dev/kmem", "/dev/kmsg", "/dev/port", "/dev/sda", "/dev/vda", "/dev/fuse", "/dev/net/tun", "/dev/kvm", "/dev/loop-control", "/dev/tty"):
    attempt(path, lambda: os.open(path, os.O_RDWR))
extra = set(os.listdir("/dev")) - set("core fd full mqueue null ptmx pts random shm stderr stdin stdout tty urandom zero console".split())
print("BREACH" if extra else "denied", sorted(extra))
""",
        says="(?s)(denied.*?){15}",
    ),
    Hostile(
        "kernel",
        """
attempt("module", lambda: call(number(175, 105), b"x", 1, b""))
attempt("finit_module", lambda: call(number(313, 273), 0, b"", 0))
attempt("kexec", lambda: call(number(246, 104), 0, 0, 0, 0))
attempt("reboot", lambda: call("reboot", 0xCAD0000 // 65536 if False else 0x0))
attempt("swapoff", lambda: call("swapoff", b"/workspace"))
attempt("hostname", lambda: call("sethostname", b"x", 1))
attempt("clock", lambda: time.clock_settime(time.CLOCK_REALTIME, 0))
attempt("kernel log", lambda: call("klogctl", 3, ctypes.create_string_buffer(100), 100) > 0 or 1 / 0)
attempt("accounting", lambda: call("acct", b"/workspace/x"))
attempt("quota", lambda: call(number(179, 60), 0x800002 << 8, b"/", 0, 0))
if platform.machine() == "x86_64":
    attempt("ports", lambda: call("iopl", 3))
""",
        says="(?s)(denied.*?){10}",
    ),
    Hostile(
        "kernel_interfaces",
        """
attempt("bpf", lambda: call(number(321, 280), 0, ctypes.create_string_buffer(bytes([1, 0, 0, 0, 4, 0, 0, 0, 4, 0, 0, 0, 1] + [0] * 60)), 72))
attempt("keyring", lambda: call(number(248, 217), b"user", b"agentgym", b"secret", 6, -3))
attempt("request key", lambda: call(number(250, 219), 0, -3, 1))
attempt("perf", lambda: call(number(298, 241), ctypes.create_string_buffer(bytes(128)), 1, -1, -1, 0))
attempt("file handles", lambda: call("open_by_handle_at", os.open("/", os.O_RDONLY), ctypes.create_string_buffer(bytes([8, 0, 0, 0, 1, 0, 0, 0, 2] + [0] * 7)), 0))
attempt("userfaultfd", lambda: call(number(323, 282), 0))
attempt("watch everything", lambda: call(number(300, 262), 0, 0))
attempt("memory policy of another", lambda: call(number(256, 238), 1, 2, ctypes.byref(ctypes.c_ulong(1)), ctypes.byref(ctypes.c_ulong(1))))
""",
        says="(?s)(denied.*?){8}",
    ),
    Hostile(
        "io_uring_and_personality",
        """
for name, act in (("io_uring", lambda: call(425, 8, ctypes.create_string_buffer(bytes(120)))), ("personality", lambda: call("personality", 0x0040000))):
    attempt(name, act)
""",
        says="(?s)(denied.*?){2}",
    ),
    Hostile(
        "proc_and_sys",
        """
for path in ("/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/vm/drop_caches",
             "/proc/sys/vm/overcommit_memory", "/proc/sys/kernel/randomize_va_space", "/proc/sys/net/ipv4/ip_forward",
             "/sys/kernel/uevent_helper", "/sys/power/state", "/sys/module/printk/parameters/time"):
    attempt(path, lambda: os.open(path, os.O_WRONLY))
for path in ("/proc/kcore", "/proc/kmsg", "/proc/1/mem"):
    attempt(path, lambda: os.read(os.open(path, os.O_RDONLY), 1) or 1 / 0)
""",
        says="(?s)(denied.*?){13}",
    ),
    Hostile(
        "cgroups",
        """
written = []
for folder in ("/sys/fs/cgroup", "/proc/1"):
    for base, folders, names in os.walk(folder):
        folders[:] = [] if base.count("/") > 5 or folder != "/sys/fs/cgroup" else folders
        for name in names:
            if name.startswith(("cgroup.procs", "tasks", "release_agent", "notify_on_release", "memory.limit", "memory.max", "pids.max", "cpu.max", "devices.allow", "cgroup.kill")):
                try: os.close(os.open(os.path.join(base, name), os.O_WRONLY)); written.append(os.path.join(base, name))
                except OSError: pass
print("BREACH" if written else "denied", written)
attempt("a group of its own", lambda: os.mkdir("/sys/fs/cgroup/memory/x"))
attempt("mounted anew", lambda: call("mount", b"cgroup", b"/workspace", b"cgroup", 0, b"rdma"))
""",
        says="(?s)(denied.*?){3}",
    ),
    Hostile(
        "read_only_root",
        """
for path in ("/x", "/etc/x", "/usr/bin/x", "/usr/lib/x", "/var/x", "/root/x", "/home/x", "/opt/x", "/private/x", "/proc/x", "/sys/x", "/run/x", "/dev/x", "/bin/bash", "/etc/passwd", "/usr/bin/python3"):
    attempt(path, lambda: os.open(path, os.O_WRONLY | os.O_CREAT))
writable = []
for base, folders, names in os.walk("/", followlinks=False):
    if base.startswith(("/proc", "/workspace", "/tmp", "/dev/shm", "/dev/mqueue", "/dev/pts", "/dev/fd")): folders[:] = []; continue
    if os.access(base, os.W_OK): writable.append(base)
print("BREACH" if writable else "denied", "folders that can be written:", writable)
""",
        says="(?s)(denied.*?){17}",
    ),
    Hostile(
        "host_files_and_environment",
        """
for path in ("/root/.ssh", "/home", "/etc/shadow", "/work", os.environ["HOST_FILE"], "/var/lib/docker"):
    attempt(path, lambda: (os.listdir(path) if os.path.isdir(path) else open(path).read()) or 1 / 0)
seen = b""
for name in os.listdir("/proc"):
    for part in ("environ", "cmdline", "mountinfo"):
        try: seen += open(f"/proc/{name}/{part}", "rb").read()
        except OSError: pass
print("BREACH" if os.environ["SECRET_REVERSED"][::-1].encode() in seen else "denied", "host environment")
print("BREACH" if set(os.environ) & {"DOCKER_HOST", "AGENTGYM_DATA", "VIRTUAL_ENV", "SSH_AUTH_SOCK", "HOST_SECRET"} else "denied", sorted(os.environ))
""",
        says="(?s)(denied.*?){8}",
    ),
    Hostile(
        "processes_of_the_host",
        """
seen = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
print("denied" if len(seen) < 5 and seen[0] == 1 and os.getpid() in seen else "BREACH", seen)
""",
        says="denied",
    ),
]

GUEST = [
    Hostile(
        "look_into_the_guest",
        """
for part in ("mem", "root/etc", "cwd", "exe", "fd", "fd/0", "fd/1", "environ", "maps", "map_files", "stack", "syscall", "task/1/mem", "io"):
    path = "/proc/1/" + part
    attempt(path, lambda: os.listdir(path) if os.path.isdir(path) else os.readlink(path) if os.path.islink(path) else open(path, "rb").read(1) or 1 / 0)
""",
        says="(?s)(denied.*?){14}",
    ),
    Hostile(
        "write_to_the_guest",
        """
for path in ("/proc/1/fd/0", "/proc/1/fd/1", "/proc/1/fd/2", "/proc/1/mem", "/proc/1/oom_score_adj", "/proc/1/clear_refs", "/proc/1/comm", "/proc/1/timerslack_ns", "/proc/1/attr/current"):
    attempt(path, lambda: os.write(os.open(path, os.O_WRONLY), b"1"))
""",
        says="(?s)(denied.*?){9}",
    ),
    Hostile(
        "trace_the_guest",
        """
attempt("attach", lambda: call("ptrace", 16, 1, 0, 0))
attempt("seize", lambda: call("ptrace", 0x4206, 1, 0, 0))
buffer = ctypes.create_string_buffer(64)
vector = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 64)
attempt("read memory", lambda: call("process_vm_readv", 1, vector, 1, vector, 1, 0))
attempt("write memory", lambda: call("process_vm_writev", 1, vector, 1, vector, 1, 0))
attempt("take a descriptor", lambda: call(438, call(434, 1, 0), 0, 0))
""",
        says="(?s)(denied.*?){5}",
    ),
    Hostile(
        "signal_the_guest",
        """
for each in (9, 19, 15, 2, 11, 6, 17, 10, 13, 23):
    attempt(f"signal {each}", lambda: os.kill(1, each))
attempt("limits", lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (3, 3)))
attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, 1, 19))
attempt("scheduler", lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)))
attempt("processors", lambda: os.sched_setaffinity(1, {0}))
""",
        says="(?s)(denied.*?){14}",
    ),
    Hostile("kill_all", "kill -9 -1; echo still here", shell=True, ends="any"),
    Hostile("kill_all_from_python", "signal.signal(15, signal.SIG_IGN)\nos.kill(-1, 15); os.kill(-1, 9)", ends="any"),
    endless(
        "stop_all", "os.fork() or time.sleep(600)\nos.kill(-1, signal.SIGSTOP); os.kill(os.getpid(), signal.SIGSTOP)"
    ),
    endless("stop_itself", "kill -STOP $$", shell=True),
    endless(
        "ignore_every_signal",
        """
for each in range(1, 65):
    try: signal.signal(each, lambda *_: None)
    except (OSError, ValueError): pass
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True: time.sleep(1)
""",
    ),
    Hostile(
        "flood_of_signals",
        """
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
until_refused(lambda _: call("sigqueue", os.getpid(), signal.SIGRTMIN, None), 1 << 20)
""",
        says="denied|never",
        ends="any",
    ),
    Hostile(
        "better_treatment",
        """
attempt("nice", lambda: os.nice(-10))
attempt("real time", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
attempt("files", lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 20, 1 << 20)))
attempt("cores", lambda: resource.setrlimit(resource.RLIMIT_CORE, (1 << 20, 1 << 20)))
attempt("never killed", lambda: open("/proc/self/oom_score_adj", "wb", buffering=0).write(b"-1000"))
attempt("locked memory", lambda: call("mlock", ctypes.create_string_buffer(1 << 27), 1 << 27))
""",
        says="(?s)(denied.*?){6}",
    ),
    Hostile("dump_core", "kill -SEGV $$", shell=True, ends="any"),
    Hostile("exit_codes", "os._exit(256 + 137)", ends="any"),
    Hostile(
        "limits_of_its_own",
        "for kind in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU): resource.setrlimit(kind, (1, 1))\nprint('set')",
        ends="any",
        oom=None,
    ),
]

PRIVATE = [
    Hostile(
        "change_the_tests",
        """
import shutil
test = "/private/tests.py"
for what, act in (("write", lambda: open(test, "w")), ("append", lambda: open(test, "a")), ("truncate", lambda: os.truncate(test, 0)),
    ("unlink", lambda: os.unlink(test)), ("rename", lambda: os.rename(test, "/private/old")), ("rename over", lambda: (open("/workspace/n", "w").close(), os.rename("/workspace/n", test))),
    ("mode", lambda: os.chmod(test, 0o777)), ("owner", lambda: os.chown(test, os.getuid(), os.getgid())), ("folder", lambda: os.rename("/private", "/workspace/p")),
    ("beside it", lambda: open("/private/conftest.py", "w")), ("link", lambda: os.symlink("/workspace/x", "/private/x")), ("times", lambda: os.utime(test, (0, 0))),
    ("hard link", lambda: (os.link(test, "/workspace/hard"), open("/workspace/hard", "w"))), ("rmdir", lambda: os.rmdir("/private")),
    ("attributes", lambda: os.setxattr(test, "user.x", b"1")), ("write through proc", lambda: open(f"/proc/self/fd/{os.open(test, os.O_RDONLY)}", "w"))):
    attempt(what, act)
print(open(test).read())
""",
        says="(?s)(denied.*?){16}the tests as they were",
    )
]

PROGRAMS = NETWORK + ROOT + GUEST + PRIVATE
