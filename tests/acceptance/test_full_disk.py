"""The disk of a run fills up: the run ends with one line, and goes on from its last checkpoint once there is room."""

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from soak import Soak, assert_nothing_was_lost
from training_process import SMALL

MEGABYTE = 1 << 20
FULL = 6 * MEGABYTE  # room for one or two checkpoints of this model, with the optimizer's state

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small disk"),
]


@contextlib.contextmanager
def disk(place: Path, size: int) -> Iterator[None]:
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def test_a_run_on_a_full_disk_says_so_and_goes_on_when_there_is_room(tmp_path) -> None:
    runs = tmp_path / "runs"
    parts = ("engine=embedded", "trainer.save_every=1", "trainer.keep_checkpoints=8", "trainer.eval_every=50")
    settings = ("+env=frozen_lake", *SMALL, *parts, "trainer.staleness=2", "trainer.steps=6")
    with disk(runs, FULL), Soak.begin(runs, *settings) as soak:
        assert soak.run.wait() == 1, soak.run.told()
        told = [line for line in soak.run.err.splitlines() if "agent-train: error" in line]
        assert len(told) == 1
        assert re.search(r"No space left on device|its disk has 0\.\d MB free", told[0]), told[0]
        assert "to go on: " in soak.run.out
        assert "Traceback" not in soak.run.out + soak.run.err
        assert soak.run.left_behind(10) == []
        subprocess.run(["mount", "-o", f"remount,size={100 * FULL}", runs], check=True)
        soak.again()
        assert soak.run.wait() == 0, soak.run.told()
        assert_nothing_was_lost(soak)
