"""Limits that the back ends set alike.

Each sandbox's programs have a user id of their own: the kernel limits inotify watches, pages of pipes, queued signals and
descriptors in flight per user id, so a sandbox that exhausts them would starve another. Pseudo-terminals have no such limit.
"""

import random
from pathlib import Path

from agentgym.sandbox.api import MEGABYTE

GUEST_MEMORY = 24 * MEGABYTE  # for the guest and its starter, besides the programs'
GUEST_PROCESSES = 2  # the guest, and a program that it is just starting
PROGRAM_NICENESS = 10  # so that the guest comes first when programs keep the processor busy
PTYS = 16  # pseudo-terminals of a sandbox; the kernel has 3,072 for all (kernel.pty.max, less its reserve)
PTY_OPTIONS = f"newinstance,max={PTYS},ptmxmode=0666,mode=0620,nosuid,noexec"
FIRST, LAST = 0x70000000, 0x7FFFFFFE  # user ids unused by distributions; two sandboxes hardly ever get the same
SMALL = 10_000, 59_999  # where a user namespace has but 65,536 ids

_dice = random.SystemRandom()  # the global one is the episodes', and a forked process has its parent's


def own_user(few: bool) -> int:
    """A user id for a new sandbox. `few`: it is started in a user namespace of 65,536 ids."""
    return _dice.randint(*(SMALL if few else (FIRST, LAST)))


def few_users() -> bool:
    """True if this process is in a user namespace with too few user ids."""
    ranges = [[int(word) for word in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return not any(begin <= FIRST and begin + count > LAST for begin, _, count in ranges)


def files_of(disk: int) -> int:
    """The number of files that a folder of `disk` bytes may hold."""
    return disk // 4096 + 1024
