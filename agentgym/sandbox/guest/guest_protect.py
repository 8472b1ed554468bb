"""Takes files and folders away from the programs: they then belong to the guest, which alone could give them back.

No link is followed. A folder is taken before what is in it, so programs can exchange nothing on the way.
"""

from __future__ import annotations

import os
import stat

from agentgym.sandbox.guest.guest_files import DEEPEST, FOLDER, KERNELS
from agentgym.sandbox.guest.guest_programs import GROUP_ID, AsProgram

STICKY = 0o1000  # of a folder: only a file's owner, or the folder's, may rename or remove it


def protect(path: str) -> None:
    """Take a file or a folder with all in it; of the folders above, programs keep the right to make files in them."""
    whole = os.path.normpath(os.path.join("/workspace", path))
    *above, name = whole.strip("/").split("/")
    if not name or f"{whole}/".startswith(tuple(root + "/" for root in KERNELS)):
        raise ValueError(f"not below /, or in {', '.join(KERNELS)}")
    folder = os.open("/", FOLDER)
    try:
        for each in above:
            take(each, folder, above=True)
            step = os.open(each, FOLDER, dir_fd=folder)
            os.close(folder)
            folder = step
        if take(name, folder):
            take_content(os.open(name, FOLDER, dir_fd=folder))
    finally:
        os.close(folder)


def take(name: str, folder: int, above: bool = False) -> bool:
    """Take one entry of a folder, if programs could change it. True if it is a folder."""
    found = os.lstat(name, dir_fd=folder)
    mode = stat.S_IMODE(found.st_mode)
    # Programs may do as anybody what they may do as its owner or in its group.
    if own := found.st_uid == AsProgram.user:
        mode |= (mode & 0o700) >> 6
    elif found.st_gid == GROUP_ID:
        mode |= (mode & 0o070) >> 3
    is_folder, is_link = stat.S_ISDIR(found.st_mode), stat.S_ISLNK(found.st_mode)
    if own or (mode & 0o002 and not is_link):
        os.chown(name, 0, 0, dir_fd=folder, follow_symlinks=False)
        if not is_link:
            mode |= (mode & 0o007) << 3  # the guest may be in root's group, and reads for programs
            mode = mode & 0o777 | STICKY if above else mode & 0o755
            os.chmod(name, mode | (0o700 if is_folder else 0o600), dir_fd=folder)
    return is_folder


def take_content(top: int) -> None:
    """Take all that is in a folder, whose descriptor this closes."""
    stack = [(top, os.scandir(top))]
    try:
        while stack:
            folder, names = stack[-1]
            entry = next(names, None)
            if entry is None:
                names.close()
                os.close(folder)
                stack.pop()
            elif take(entry.name, folder):
                if len(stack) >= DEEPEST:
                    raise ValueError(f"{entry.name!r:.200}: more than {DEEPEST} folders deep")
                step = os.open(entry.name, FOLDER, dir_fd=folder)
                stack.append((step, os.scandir(step)))
    finally:
        for folder, names in stack:
            names.close()
            os.close(folder)
