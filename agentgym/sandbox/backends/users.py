"""A separate user id for each sandbox's programs.

The kernel limits inotify watches, pages of pipes, queued signals and descriptors in flight per user id: a sandbox that exhausts
them would starve another with the same id. Pseudo-terminals have no limit per user.
"""

from __future__ import annotations

import random
from pathlib import Path

FIRST, LAST = 0x70000000, 0x7FFFFFFE  # unused by distributions; two sandboxes hardly ever get the same
SMALL = 10_000, 59_999  # where a user namespace has but 65,536 ids
PTYS = 16  # pseudo-terminals of a sandbox; the kernel has 3,072 for all (kernel.pty.max, less its reserve)
PTY_OPTIONS = f"newinstance,max={PTYS},ptmxmode=0666,mode=0620,nosuid,noexec"

_dice = random.SystemRandom()  # the global one is the episodes', and a forked process has its parent's


def own_user(few: bool) -> int:
    return _dice.randint(*(SMALL if few else (FIRST, LAST)))


def few_users() -> bool:
    """True if this process is in a user namespace with too few user ids."""
    ranges = [[int(word) for word in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return not any(begin <= FIRST and begin + count > LAST for begin, _, count in ranges)
