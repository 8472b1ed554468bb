"""The system calls that programs in a sandbox may make: one profile, as a filter for bubblewrap and as JSON for Docker.

It is an allow list. All other calls fail with EPERM. Sockets are UNIX, INET and INET6 and have no filters: no sandbox is charged
for the kernel's memory of netlink and filters. `clone` makes no namespaces.

Calls that fill kernel memory beyond their program's life answer as programs expect: attributes of files ENOTSUP, System V
queues and semaphores ENOSYS. So do newer calls than this list, and `clone3`: a filter cannot see its flags, and the C library
falls back to `clone`. A call of another architecture's numbering ends the program.
"""

from __future__ import annotations

import errno
import json
import platform
import struct
from collections.abc import Iterator
from functools import cache
from typing import Any

# Name, number on x86_64, number on aarch64.
_ALLOWED = """
read:0:63 write:1:64 open:2:- close:3:57 stat:4:- fstat:5:80 lstat:6:- poll:7:- lseek:8:62 mmap:9:222 mprotect:10:226
munmap:11:215 brk:12:214 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 ioctl:16:29 pread64:17:67
pwrite64:18:68 readv:19:65 writev:20:66 access:21:- pipe:22:- select:23:- sched_yield:24:124 mremap:25:216
msync:26:227 mincore:27:232 madvise:28:233 shmget:29:194 shmat:30:196 shmctl:31:195 dup:32:23 dup2:33:- pause:34:-
nanosleep:35:101 getitimer:36:102 alarm:37:- setitimer:38:103 getpid:39:172 sendfile:40:71 connect:42:203
accept:43:202 sendto:44:206 recvfrom:45:207 sendmsg:46:211 recvmsg:47:212 shutdown:48:210 bind:49:200 listen:50:201
getsockname:51:204 getpeername:52:205 getsockopt:55:209 fork:57:- vfork:58:- execve:59:221
exit:60:93 wait4:61:260 kill:62:129 uname:63:160 semctl:66:191 shmdt:67:197 msgctl:71:187 fcntl:72:25 flock:73:32
fsync:74:82 fdatasync:75:83 truncate:76:45 ftruncate:77:46 getdents:78:- getcwd:79:17 chdir:80:49 fchdir:81:50
rename:82:- mkdir:83:- rmdir:84:- creat:85:- link:86:- unlink:87:- symlink:88:- readlink:89:- chmod:90:- fchmod:91:52
chown:92:- fchown:93:55 lchown:94:- umask:95:166 gettimeofday:96:169 getrlimit:97:163 getrusage:98:165 sysinfo:99:179
times:100:153 getuid:102:174 getgid:104:176 setuid:105:146 setgid:106:144 geteuid:107:175 getegid:108:177
setpgid:109:154 getppid:110:173 getpgrp:111:- setsid:112:157 setreuid:113:145 setregid:114:143 getgroups:115:158
setgroups:116:159 setresuid:117:147 getresuid:118:148 setresgid:119:149 getresgid:120:150 getpgid:121:155
setfsuid:122:151 setfsgid:123:152 getsid:124:156 capget:125:90 capset:126:91 rt_sigpending:127:136
rt_sigtimedwait:128:137 rt_sigqueueinfo:129:138 rt_sigsuspend:130:133 sigaltstack:131:132 utime:132:- mknod:133:-
statfs:137:43 fstatfs:138:44 getpriority:140:141 setpriority:141:140 sched_setparam:142:118 sched_getparam:143:121
sched_setscheduler:144:119 sched_getscheduler:145:120 sched_get_priority_max:146:125 sched_get_priority_min:147:126
sched_rr_get_interval:148:127 mlock:149:228 munlock:150:229 mlockall:151:230 munlockall:152:231 prctl:157:167
arch_prctl:158:- setrlimit:160:164 sync:162:81 gettid:186:178 readahead:187:213 getxattr:191:8 lgetxattr:192:9
fgetxattr:193:10 listxattr:194:11 llistxattr:195:12 flistxattr:196:13 removexattr:197:14 lremovexattr:198:15
fremovexattr:199:16 tkill:200:130 time:201:- futex:202:98 sched_setaffinity:203:122 sched_getaffinity:204:123
io_setup:206:0 io_destroy:207:1 io_getevents:208:4 io_submit:209:2 io_cancel:210:3 epoll_create:213:-
remap_file_pages:216:234 getdents64:217:61 set_tid_address:218:96 restart_syscall:219:128 fadvise64:221:223
timer_create:222:107 timer_settime:223:110 timer_gettime:224:108 timer_getoverrun:225:109 timer_delete:226:111
clock_gettime:228:113 clock_getres:229:114 clock_nanosleep:230:115 exit_group:231:94 epoll_wait:232:- epoll_ctl:233:21
tgkill:234:131 utimes:235:- mbind:237:235 set_mempolicy:238:237 get_mempolicy:239:236 mq_open:240:180
mq_unlink:241:181 mq_timedsend:242:182 mq_timedreceive:243:183 mq_notify:244:184 mq_getsetattr:245:185 waitid:247:95
ioprio_set:251:30 ioprio_get:252:31 inotify_init:253:- inotify_add_watch:254:27 inotify_rm_watch:255:28 openat:257:56
mkdirat:258:34 mknodat:259:33 fchownat:260:54 futimesat:261:- newfstatat:262:79 unlinkat:263:35 renameat:264:38
linkat:265:37 symlinkat:266:36 readlinkat:267:78 fchmodat:268:53 faccessat:269:48 pselect6:270:72 ppoll:271:73
set_robust_list:273:99 get_robust_list:274:100 splice:275:76 tee:276:77 sync_file_range:277:84 utimensat:280:88
epoll_pwait:281:22 signalfd:282:- timerfd_create:283:85 eventfd:284:- fallocate:285:47 timerfd_settime:286:86
timerfd_gettime:287:87 accept4:288:242 signalfd4:289:74 eventfd2:290:19 epoll_create1:291:20 dup3:292:24 pipe2:293:59
inotify_init1:294:26 preadv:295:69 pwritev:296:70 rt_tgsigqueueinfo:297:240 recvmmsg:299:243 prlimit64:302:261
syncfs:306:267 sendmmsg:307:269 getcpu:309:168 sched_setattr:314:274 sched_getattr:315:275 renameat2:316:276
seccomp:317:277 getrandom:318:278 memfd_create:319:279 execveat:322:281 membarrier:324:283 mlock2:325:284
copy_file_range:326:285 preadv2:327:286 pwritev2:328:287 pkey_mprotect:329:288 pkey_alloc:330:289 pkey_free:331:290
statx:332:291 io_pgetevents:333:292 rseq:334:293 pidfd_send_signal:424:424 pidfd_open:434:434 close_range:436:436
openat2:437:437 faccessat2:439:439 process_madvise:440:440 epoll_pwait2:441:441 landlock_create_ruleset:444:444
landlock_add_rule:445:445 landlock_restrict_self:446:446 process_mrelease:448:448 futex_waitv:449:449
set_mempolicy_home_node:450:450 cachestat:451:451 fchmodat2:452:452 map_shadow_stack:453:453 futex_wake:454:454
futex_wait:455:455 futex_requeue:456:456 lsm_get_self_attr:459:459 lsm_set_self_attr:460:460 lsm_list_modules:461:461
mseal:462:462 getxattrat:464:464 listxattrat:465:465 removexattrat:466:466 file_getattr:468:468
"""
LAST = 469  # the newest call that was looked at, Linux 6.17; both machines number new ones alike

# Allowed where all checks of one of the alternatives hold: the argument of this index, under a mask, has this value.
_INT, _NAMESPACES = 0xFFFFFFFF, 0x7E020000  # CLONE_NEW*: mount, cgroup, uts, ipc, user, pid, net
_UNIX, _INET, _INET6 = 1, 2, 10
_SOL_SOCKET = 1
_FILTERS = (26, 50, 51, 52)  # options that attach one


def _blocks(*without: int, first: int = 0, size: int = 128) -> Iterator[tuple[int, int]]:
    """First number and size of the largest aligned blocks, sizes being powers of two, that hold all numbers but some."""
    if not any(first <= number < first + size for number in without):
        yield first, size
    elif size > 1:
        yield from _blocks(*without, first=first, size=size // 2)
        yield from _blocks(*without, first=first + size // 2, size=size // 2)


_CHECKED: dict[str, tuple[tuple[int, int], list[list[tuple[int, int, int]]]]] = {
    "clone": ((56, 220), [[(0, _NAMESPACES, 0)]]),
    "personality": ((135, 92), [[(0, _INT, value)] for value in (0, 0x8, 0x20000, 0x20008, _INT)]),
    "socket": ((41, 198), [[(0, _INT, family)] for family in (_UNIX, _INET, _INET6)]),
    # Another level than that of the socket itself, or one of its options that is no filter: each alternative is a block of
    # numbers with the same upper bits.
    "setsockopt": (
        (54, 208),
        [
            [(1, _SOL_SOCKET, 0)],
            *([(1, 1 << bit, 1 << bit)] for bit in range(1, 32)),
            *([(2, _INT ^ (size - 1), first)] for first, size in _blocks(*_FILTERS)),
        ],
    ),
    "socketpair": ((53, 199), [[(0, _INT, _UNIX)]]),
}
_ANSWERED = {
    "clone3": ((435, 435), errno.ENOSYS),
    "msgget": ((68, 186), errno.ENOSYS),
    "semget": ((64, 190), errno.ENOSYS),
    "setxattr": ((188, 5), errno.ENOTSUP),
    "lsetxattr": ((189, 6), errno.ENOTSUP),
    "fsetxattr": ((190, 7), errno.ENOTSUP),
    "setxattrat": ((463, 463), errno.ENOTSUP),
}
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
X32 = 0x40000000

_LOAD, _AND, _EQUAL, _ABOVE, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x25, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data, whose arguments take 8 bytes each
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


@cache
def allowed() -> dict[str, tuple[int | None, int | None]]:
    """The calls that are allowed with any arguments, with their numbers on x86_64 and aarch64 (None: not there)."""

    def number(text: str) -> int | None:
        return None if text == "-" else int(text)

    entries = (entry.split(":") for entry in _ALLOWED.split())
    return {name: (number(x86_64), number(aarch64)) for name, x86_64, aarch64 in entries}


@cache
def docker_profile() -> str:
    """The profile as Docker takes it. Its default answers EPERM; what the engine's library does not know is not allowed."""
    rules: list[dict[str, Any]] = [{"names": list(allowed()), "action": "SCMP_ACT_ALLOW"}]
    for name, (_, alternatives) in _CHECKED.items():
        for checks in alternatives:
            args = [{"index": i, "op": "SCMP_CMP_MASKED_EQ", "value": m, "valueTwo": v} for i, m, v in checks]
            rules.append({"names": [name], "action": "SCMP_ACT_ALLOW", "args": args})
    for name, (_, number) in _ANSWERED.items():
        rules.append({"names": [name], "action": "SCMP_ACT_ERRNO", "errnoRet": number})
    machines = [{"architecture": f"SCMP_ARCH_{name.upper()}", "subArchitectures": []} for name in MACHINES]
    return json.dumps({"defaultAction": "SCMP_ACT_ERRNO", "archMap": machines, "syscalls": rules})


def program(machine: str | None = None) -> bytes | None:
    """The filter for a machine (default: this one), as an array of `struct sock_filter`; None where its numbers are unknown."""
    known = MACHINES.get(machine or platform.machine())
    if known is None:
        return None
    column, architecture = known
    steps = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, architecture, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
    ]
    if column == 0:
        steps += [_step(_AT_LEAST, X32, 0, 1), _step(_RETURN, _KILL)]
    for numbers, alternatives in _CHECKED.values():
        checked = []
        for checks in alternatives:
            for left, (index, mask, value) in zip(range(len(checks) - 1, -1, -1), checks, strict=True):
                checked += [
                    _step(_LOAD, _ARGUMENTS + 8 * index),
                    _step(_AND, mask),
                    _step(_EQUAL, value, 0, 3 * left + 1),
                ]
            checked.append(_step(_RETURN, _ALLOW))
        checked.append(_step(_RETURN, _ERRNO | errno.EPERM))
        steps += [_step(_EQUAL, numbers[column], 0, len(checked)), *checked]
    for numbers, answer in _ANSWERED.values():
        steps += [_step(_EQUAL, numbers[column], 0, 1), _step(_RETURN, _ERRNO | answer)]
    for first, last in _ranges(column):
        steps += [_step(_AT_LEAST, first, 0, 2), _step(_ABOVE, last, 1, 0), _step(_RETURN, _ALLOW)]
    steps += [_step(_ABOVE, LAST, 0, 1), _step(_RETURN, _ERRNO | errno.ENOSYS), _step(_RETURN, _ERRNO | errno.EPERM)]
    return b"".join(steps)


def _ranges(column: int) -> Iterator[tuple[int, int]]:
    numbers = {number for each in allowed().values() if (number := each[column]) is not None}
    firsts = sorted(number for number in numbers if number - 1 not in numbers)
    lasts = sorted(number for number in numbers if number + 1 not in numbers)
    yield from zip(firsts, lasts, strict=True)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
