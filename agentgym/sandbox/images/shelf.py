"""The cache of built images: the least recently used are evicted when all together exceed their share of the disk.

An image is its folder, NAME/DIGEST with an `image.json`, whose time says when it was last used and which is locked while it is.
"""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from agentgym.sandbox.api import MEGABYTE, SandboxError

RECORD = "image.json"
_DIGEST = re.compile(r"[0-9a-f]{12}")
LOCK = "lock"  # beside the images of a name
PART = ".part"  # ending of a folder that is being made
_GOING = ".going"  # ending of a folder that is being removed


def read(place: Path) -> dict[str, Any] | None:
    """The record of an image; None if there is no image."""
    try:
        record: dict[str, Any] = json.loads((place / RECORD).read_text())
    except FileNotFoundError:
        return None
    return record


def hold(places: Iterable[Path]) -> list[BinaryIO]:
    """Use images: while the files that this returns are open, nothing removes them. SandboxError: one is gone."""
    held: list[BinaryIO] = []
    try:
        for place in places:
            held.append((place / RECORD).open("rb"))
            fcntl.flock(held[-1], fcntl.LOCK_SH)
            _touch(place / RECORD)
    except OSError as error:
        for file in held:
            file.close()
        raise SandboxError(f"the image in {place} was removed: build it again ({error})") from error
    return held


def _touch(record: Path) -> None:
    """Record that it is used now. FileNotFoundError: it was removed in the meantime."""
    try:
        os.utime(record)
    except FileNotFoundError:
        raise
    except OSError:  # it is another user's: then that one's uses count
        return


def evict(
    folder: Path, most: int, keep: Path, untag: Callable[[str], bool], say: Callable[[str], None] = lambda text: None
) -> None:
    """Evict images until the rest takes `most` bytes, but none that is in use, below another one, or `keep`.

    Args:
        untag: removes the Docker image of a tag; False if that is in use.
    """
    for rest in folder.glob(f"*/*{_GOING}"):
        shutil.rmtree(rest, ignore_errors=True)
    for rest in folder.glob(f"*/*{PART}"):
        _remove_unfinished(rest)
    found = {place: read(place) for place in folder.glob("*/*") if _DIGEST.fullmatch(place.name)}
    images = {place: record for place, record in found.items() if record is not None}
    taken, stay = sum(record["bytes"] for record in images.values()), {keep}
    while taken > most:
        below = {record.get("base") for record in images.values()}
        free = [place for place in images if place not in stay and _tag(place) not in below]
        if not free:
            say(f"the images take {taken // MEGABYTE} MB, more than {most // MEGABYTE}, and none can be removed")
            return
        oldest = min(free, key=_used)
        if _remove(oldest, untag):
            say(f"removed the image {_tag(oldest)}: all together took more than {most // MEGABYTE} MB")
            taken -= images.pop(oldest)["bytes"]
        else:
            stay.add(oldest)


def _remove_unfinished(work: Path) -> None:
    """Remove what a build that was killed left. A build holds the lock of its name."""
    with suppress(OSError), (work.parent / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(work, ignore_errors=True)


def _tag(place: Path) -> str:
    return f"agentgym/{place.parent.name}:{place.name}"


def _used(place: Path) -> float:
    with suppress(FileNotFoundError):
        return (place / RECORD).stat().st_mtime
    return 0.0


def _remove(place: Path, untag: Callable[[str], bool]) -> bool:
    """True if it is gone; False if it is in use."""
    going = place.with_name(place.name + _GOING)
    try:
        with (place / RECORD).open("rb") as record:
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not untag(_tag(place)):
                return False
            place.rename(going)
    except BlockingIOError:
        return False
    except FileNotFoundError:  # another process was faster
        return True
    shutil.rmtree(going, ignore_errors=True)
    return True
