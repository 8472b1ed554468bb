"""What the machine does not allow is refused by the command before anything starts: exit code 2 and one line."""

import os
import socket
import subprocess
from pathlib import Path

from training_process import COMMAND

VLLM = ["+env=frozen_lake", "engine=vllm"]


def refused(*settings: str, folder: Path, env: dict[str, str] | None = None) -> str:
    """The one line of a command that is refused and leaves nothing behind."""
    before = sorted(folder.iterdir())
    done = subprocess.run(
        [COMMAND, *settings],
        cwd=folder,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert sorted(folder.iterdir()) == before
    (line,) = done.stderr.splitlines()
    assert line.startswith("agent-train: error: ")
    return line


def test_a_port_that_is_in_use(tmp_path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused(*VLLM, f"engine.port={port}", folder=tmp_path)
    assert f"engine.port={port}" in line
    assert "in use" in line
    assert "0 for a free one" in line


def test_a_run_folder_that_cannot_be_written(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    line = refused("+env=frozen_lake", "engine=embedded", "trainer.runs_dir=file/runs", folder=tmp_path)
    assert "trainer.runs_dir=file/runs" in line
    assert "choose another folder" in line


def test_a_run_folder_that_holds_other_things(tmp_path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "metrics.jsonl").write_text("")
    line = refused("+env=frozen_lake", "engine=embedded", "trainer.name=mine", folder=tmp_path)
    assert "trainer.name=mine" in line
    assert "already holds other things" in line


def test_vllm_that_is_not_installed(tmp_path) -> None:
    """A machine without vLLM, played by an interpreter that cannot find it."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import sys\nsys.modules['vllm'] = None\n")
    line = refused(*VLLM, folder=tmp_path, env={"PYTHONPATH": str(site)})
    assert "engine=vllm" in line
    assert "engine=embedded" in line
    assert "pip install" in line
