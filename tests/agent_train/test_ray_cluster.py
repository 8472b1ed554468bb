"""Ray is started for a run and cleaned up after it, however either ends."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from agent_train.cluster.lost import LostError
from agent_train.cluster.placement import PlacementError
from agent_train.cluster.ray_cluster import reaped, start_ray

# Keeps a file open; what follows on its command line is how it looks to the reaper.
HOLDS_FILE = "import sys, time; f = open(sys.argv[1]); print('open', flush=True); time.sleep(60)"


@pytest.fixture
def holder():
    """A function that starts a process which holds a file open, with one more word on its command line."""
    started = []

    def start(path: Path, word: str) -> subprocess.Popen:
        command = [sys.executable, "-c", HOLDS_FILE, str(path), word]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        assert started[-1].stdout.readline() == b"open\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_what_ray_left_in_the_folder_is_killed_and_nothing_else(tmp_path, holder) -> None:
    folder, elsewhere = tmp_path / "scratch", tmp_path / "elsewhere"
    for each in (folder, elsewhere):
        each.mkdir()
        (each / "log").write_text("")
    with reaped(str(folder)):
        of_ray = holder(folder / "log", "/site-packages/ray/agent.py")
        a_reader = holder(folder / "log", "tail")
        other_ray = holder(elsewhere / "log", "/site-packages/ray/agent.py")
        time.sleep(0.2)
        assert of_ray.poll() is None
    assert of_ray.wait(60) == -9
    assert a_reader.poll() is None
    assert other_ray.poll() is None
    assert not folder.exists()


def test_it_reaps_after_a_parent_that_was_killed(tmp_path, holder) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    (folder / "log").write_text("")
    code = (
        "import sys, time; from agent_train.cluster.ray_cluster import reaped\n"
        "with reaped(sys.argv[1]):\n    print('in', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout.readline() == b"in\n"
        of_ray = holder(folder / "log", "/site-packages/ray/agent.py")
        parent.kill()
    assert of_ray.wait(10) == -9
    deadline = time.monotonic() + 60
    while folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount what cannot be removed")
def test_it_removes_the_folder_as_soon_as_others_let_it(tmp_path) -> None:
    busy = tmp_path / "scratch" / "of a server"
    busy.mkdir(parents=True)
    with reaped(str(busy.parent)):
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", busy], check=True)
        threading.Timer(2, subprocess.run, [["umount", busy]], {"check": True}).start()
    assert not busy.parent.exists()


@pytest.mark.parametrize(
    ("address", "where", "kind"),
    [("", "on this machine", LostError), ("127.0.0.1:1", "at RAY_ADDRESS=127.0.0.1:1", PlacementError)],
)
def test_a_ray_that_does_not_start_is_told_in_one_line(monkeypatch, address, where, kind) -> None:
    import ray

    def init(**_):
        raise RuntimeError("the node did not answer\nits log is long")

    async def start() -> None:
        async with AsyncExitStack() as stack:
            await start_ray(1, stack)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(kind, match=f"^Ray {where} did not start: RuntimeError: the node did not answer$"):
        asyncio.run(start())
