"""A training run as its user starts it: the installed command in a process of its own, watched from outside."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from preloaded import Forked, Preloaded

from agent_train.report.metrics import read_metrics

COMMAND = str(Path(sys.executable).with_name("agent-train"))
MARK = "AGENT_TRAIN_TEST_ID"
POLL_SECONDS, LOOK_SECONDS = 0.1, 0.5
# Longer than any run here takes on a busy machine; what is asked of the time it takes is asked by the tests themselves.
RUN_SECONDS = 240.0
# Every process of a killed run ends within seconds of it; a machine that does ten other things takes longer.
ENDED_SECONDS = 60.0
# Ray's core (C++) may write to the process's own standard error when its calls to workers are cut off.
_OF_RAYS_CORE = re.compile(r"^\[\d{4}-\d\d-\d\d [\d:,]+ [IWE] \d+ \d+\] \w+\.cc:\d+: .*\n?", re.MULTILINE)
# Shaped rewards, so that a policy that hardly knows the game gets a gradient all the same. One rank: a second one takes longer to
# start than all that it does here.
SMALL = (
    "learner.workers=1",
    "env.kwargs.shaping=1.0",
    "model.tiny.hidden=64",
    "model.tiny.heads=2",
    "model.tiny.intermediate=128",
    "model.tiny.layers=1",
    "sft.episodes=128",
    "sft.batch_rows=8",
    "sft.lr=5e-3",
    "trainer.groups_per_step=4",
    "algorithm.group_size=4",
    "trainer.eval_episodes=16",
)
# A warm start of two steps and then steps of many episodes, so that a rollout and an update take seconds.
LONG_STEPS = (*SMALL, "sft.episodes=16", "trainer.groups_per_step=16", "algorithm.group_size=8")


@dataclass
class Training:
    """One run. `folder` is its run folder, `scratch` its TMPDIR and working directory, both its own."""

    process: subprocess.Popen[bytes] | Forked
    mark: str
    folder: Path
    scratch: Path
    port: int
    seen: set[psutil.Process] = field(default_factory=set)
    strangers: set[psutil.Process] = field(default_factory=set)
    titles: set[str] = field(default_factory=set)

    @property
    def out(self) -> str:
        """All that it printed to standard output."""
        return (self.scratch / "out").read_text(encoding="utf-8", errors="replace")

    @property
    def err(self) -> str:
        """What it printed to standard error."""
        return _OF_RAYS_CORE.sub("", (self.scratch / "err").read_text(encoding="utf-8", errors="replace"))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of `metrics.jsonl` so far."""
        path = self.folder / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []

    @property
    def measured(self) -> int:
        """The number of records so far."""
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    @property
    def checkpoint(self) -> Path:
        """The folder that `latest` names."""
        return self.folder / "checkpoints" / (self.folder / "checkpoints" / "latest").read_text().strip()

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The records of one kind, in order."""
        return [record for record in self.metrics if record["kind"] == kind]

    def family(self) -> list[psutil.Process]:
        """Every living process of this run except zombies, however it came by its parent, group, title or environment."""
        if self.process.poll() is None:
            with contextlib.suppress(psutil.Error):
                driver = psutil.Process(self.process.pid)
                self.seen |= {driver, *driver.children(recursive=True)}
        new = set(psutil.process_iter()) - self.seen - self.strangers
        owned = {process for process in new if self._owns(process)}
        self.seen |= owned
        self.strangers |= new - owned
        living = [process for process in self.seen if _alive(process)]
        self.titles |= {_title(process) for process in living}
        return living

    def find(self, title: str) -> psutil.Process | None:
        """A process of this run whose command line has `title` in it."""
        return next((process for process in self.family() if title in _title(process)), None)

    def wait_for(self, what: str, condition: Callable[[], Any], seconds: float = RUN_SECONDS) -> Any:
        """Poll until the condition holds, and return what it gave; the run must not end before."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {what}:\n{self.told()}"
            assert time.monotonic() < deadline, f"{what} did not happen in {seconds:g} s:\n{self.told()}"
            time.sleep(POLL_SECONDS)
        return found

    def wait(self, seconds: float = RUN_SECONDS) -> int:
        """Wait for the end, looking on at its processes; its exit code."""
        deadline = time.monotonic() + seconds
        while True:
            self.family()  # takes a tenth of a processor if it is asked every time
            with contextlib.suppress(subprocess.TimeoutExpired):
                return int(self.process.wait(LOOK_SECONDS))
            assert time.monotonic() < deadline, f"still running after {seconds:g} s:\n{self.told()}"

    def saw(self, title: str) -> bool:
        """Whether a process with `title` in its command line was among those seen so far."""
        return any(title in line for line in self.titles)

    def send(self, number: int) -> float:
        """Signal the run: SIGINT to its whole group, as a terminal does, others to it alone. The time it was sent."""
        self.family()
        if number == signal.SIGINT:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        return time.monotonic()

    def left_behind(self, seconds: float) -> list[str]:
        """What is still there after at most so many seconds: processes, Ray's folder, the engine's port."""
        deadline = time.monotonic() + seconds
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return left

    def told(self) -> str:
        """What a failed test should show."""
        logs = [f"{p.name}:\n{p.read_text(errors='replace')[-2000:]}" for p in sorted(self.folder.glob("logs/*.log"))]
        return "\n".join([f"stdout:\n{self.out[-3000:]}", f"stderr:\n{self.err[-3000:]}", *logs])

    def destroy(self) -> None:
        """Kill what is left of the run and remove its scratch folder."""
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait(10)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _left(self) -> list[str]:
        processes = [f"process {p.pid}: {_title(p)[:200]}" for p in self.family()]
        folders = [f"folder {path.name}" for path in self.scratch.iterdir() if path.name not in ("out", "err")]
        return [*processes, *folders, *([] if port_is_free(self.port) else [f"port {self.port}"])]

    def _owns(self, process: psutil.Process) -> bool:
        # Ray and vLLM write their titles over the environment that /proc shows, so that it alone does not tell.
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == self.mark:
                return True
        # A folder that was removed, with a long name, has one that /proc cannot tell.
        with contextlib.suppress(psutil.Error, OSError):
            if str(self.scratch) in " ".join(process.cmdline()) or process.cwd().startswith(str(self.scratch)):
                return True
        with contextlib.suppress(OSError):
            return os.getsid(process.pid) == self.process.pid
        return False


def start(
    runs: Path,
    *settings: str,
    env: dict[str, str] | None = None,
    name: str | None = None,
    within: Sequence[str] = (),
    forks: Preloaded | None = None,
) -> Training:
    """Start `agent-train` with these settings, in a session, folder and TMPDIR of its own; its run folder is `runs/name`, or a new one.

    `within` are the words of a command that becomes the one behind it. With `forks` it need not import what it needs.
    """
    # The sockets of Ray and vLLM lie in TMPDIR, and their names may have 107 characters.
    scratch = Path(tempfile.mkdtemp(prefix="at-", dir="/tmp"))
    mark, port, name = uuid.uuid4().hex, free_port(), name or f"run-{uuid.uuid4().hex[:6]}"
    own = {MARK: mark, "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"}
    own["TORCHINDUCTOR_CACHE_DIR"] = str(runs / "torch")  # torch leaves it, in a deterministic run
    placed = [f"trainer.runs_dir={runs}", f"trainer.name={name}", f"engine.port={port}"]
    words, env = [COMMAND, *settings, *placed], {**os.environ, **own, "COLUMNS": "200", **(env or {})}
    process: subprocess.Popen[bytes] | Forked
    with (scratch / "out").open("wb") as out, (scratch / "err").open("wb") as err:
        if forks:
            assert not within, "a fork runs Python"
            process = forks.start(words, env, scratch, out, err)
        else:
            process = subprocess.Popen(
                [*within, *words],
                env=env,
                cwd=scratch,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
    return Training(process, mark, runs / name, scratch, port)


@contextlib.contextmanager
def training(
    runs: Path,
    *settings: str,
    env: dict[str, str] | None = None,
    name: str | None = None,
    forks: Preloaded | None = None,
) -> Iterator[Training]:
    """`start`, and nothing left of it afterwards whatever the test says."""
    run = start(runs, *settings, env=env, name=name, forks=forks)
    try:
        yield run
    finally:
        run.destroy()


def importing(run: Training) -> bool:
    """Torch is loaded and nothing has been said: what follows it is being imported."""
    try:
        maps = Path(f"/proc/{run.process.pid}/maps").read_text(encoding="utf-8")
    except OSError:
        return False
    return "libtorch_python" in maps and not run.out


def server_started(run: Training) -> bool:
    """The vLLM server's process is there; it takes seconds until it answers."""
    return bool(run.find("vllm.entrypoints.openai.api_server"))


def warm_start(run: Training) -> bool:
    """The ranks are in a supervised step, which is not the first."""
    return bool(run.of_kind("sft")) and bool(run.find("ray::_Actor.on_batches"))


def rollout(run: Training) -> bool:
    """The first checkpoint is kept, which the first rollout follows at once; half a second later it goes on."""
    if not (run.folder / "checkpoints" / "latest").exists():
        return False
    time.sleep(0.5)
    return not run.of_kind("train") and not run.find("ray::_Actor.on_batches")


def update(run: Training) -> bool:
    """A rank is in its first update: the warm start is over, and no model scores samples in these runs."""
    return (run.folder / "checkpoints" / "latest").exists() and bool(run.find("ray::_Actor.on_batches"))


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int) -> bool:
    """Whether a server could listen on it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "gone"
