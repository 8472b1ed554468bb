"""One run from settings to report: what `agent-train` does once the settings are accepted."""

import asyncio
import os
import shlex
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_train.cluster.lost import LostError
from agent_train.cluster.placement import PlacementError
from agent_train.config.extensions import trackers
from agent_train.config.schema import Config, ConfigError, first_line
from agent_train.engine.base import EngineError
from agent_train.learner.actor_group import LearnerError
from agent_train.learner.determinism import make_deterministic
from agent_train.learner.roles import VocabularyError
from agent_train.report.curves import write_result
from agent_train.report.metrics import Summary
from agent_train.report.tracking import Tracker
from agent_train.rollout.renderer import RendererError
from agent_train.trainer.checkpoint import CheckpointError
from agent_train.trainer.loop import train
from agent_train.trainer.offline.context import open_offline
from agent_train.trainer.offline.records import DataError
from agent_train.trainer.resume import OpenRun, go_back, open_run, resume_command
from agent_train.trainer.rl import StepError, open_rl
from agent_train.trainer.run_folder import RunFolder
from agent_train.trainer.warm_start import ExpertError
from agent_train.weights.sync import WeightSyncError
from agentgym.rollout.calls import leaving
from agentgym.viewer.export import write_report

FAILURES = (
    LostError,
    EngineError,
    LearnerError,
    RendererError,
    PlacementError,
    CheckpointError,
    WeightSyncError,
    StepError,
    DataError,
    ExpertError,
    VocabularyError,
    OSError,
)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOP_SECONDS = 8.0


@dataclass
class Stop:
    """The signal that ends a run before it is done; 0 while there is none."""

    number: int = 0
    _deadline: threading.Timer | None = None

    def begin(self, number: int) -> None:
        """Remember the signal. The process ends within STOP_SECONDS even if something hangs, and all it started with it."""
        self.number = number
        self._deadline = threading.Timer(STOP_SECONDS, os._exit, (128 + number,))
        self._deadline.daemon = True
        self._deadline.start()

    def done(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()


def run(config: Config) -> int:
    """Train, or go on training, report, and return the exit code: 0 done, 1 failed, 2 refused, 130 or 143 stopped by a signal.

    However it ends, no process of the run stays behind, and the last checkpoint and the report are whole.
    """
    command = ["agent-train", *sys.argv[1:]]
    try:
        opened = open_run(config, command)
    except ConfigError as refused:  # since the settings were looked at, another process came first, say
        print("\n".join(f"agent-train: error: {problem}" for problem in refused.problems), file=sys.stderr)
        return 2
    except OSError as failure:  # the disk is full, say
        print(f"agent-train: error: {failure}", file=sys.stderr)
        return 1
    folder, checkpoint = opened.folder, opened.checkpoint
    os.environ.setdefault("AGENTGYM_RUN", folder.path.name)  # the label of its sandboxes, also in Ray's workers
    if config.trainer.deterministic:
        make_deterministic(config.trainer.seed)
    stop = Stop()
    elapsed = checkpoint.elapsed if checkpoint else 0.0
    try:
        also = [trackers.load(name)(folder.path) for name in config.trainer.trackers]
    except Exception as failure:  # a server that refuses the key, say
        print(f"agent-train: error: trainer.trackers: {first_line(failure)}", file=sys.stderr)
        return 1
    with Tracker(folder, config.trainer.steps, elapsed=elapsed, also=also) as tracker:
        for line in opened.told:
            tracker.note(line)
        code, error = 0, ""
        try:
            asyncio.run(leaving(_until_stopped(config, opened, tracker, stop, command)))
        except FAILURES as failure:
            code, error = 1, str(failure) or type(failure).__name__
        if stop.number:  # failures while stopping do not count
            code, error = 128 + stop.number, ""
        summary = tracker.finish({0: "finished", 1: "failed"}.get(code, "interrupted"))
    if code:
        tracker.note(f"to go on: {shlex.join(resume_command(folder))}")
    try:
        write_report(folder.path, "training")
    except OSError as failure:  # the disk is full, say
        tracker.note(f"{folder.report} was not written: {failure}")
    stop.done()
    if code == 0 and summary.curve:
        error = _write_results(config, folder, summary, shlex.join(command))
        code = 1 if error else 0
    if error:
        print(f"agent-train: error: {error}", file=sys.stderr)
        print(f"agent-train: logs and all that was measured: {folder.path}", file=sys.stderr)
    return code


def _write_results(config: Config, folder: RunFolder, summary: Summary, command: str) -> str:
    """Write the results of the run; returns the reason if that failed, else ""."""
    also_here = [Path(config.trainer.record)] if config.trainer.record else []
    for path in [folder.path / "result.json", *also_here]:
        try:
            write_result(path, config.env.id, config.trainer.seed, summary, command)
        except OSError as failure:
            return f"the run is done, but {path} was not written: {failure}"
    return ""


async def _until_stopped(config: Config, opened: OpenRun, tracker: Tracker, stop: Stop, command: Sequence[str]) -> None:
    """Train. Ctrl-C and SIGTERM cancel this task, once; a second one ends the process at once."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def begin(number: int) -> None:
        stop.begin(number)
        no_longer()
        if task is not None:
            task.cancel()

    def no_longer() -> None:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, begin, number)
    try:
        await _until_done(config, opened, tracker, stop, command)
    except asyncio.CancelledError:
        if not stop.number:
            raise
    finally:
        no_longer()


async def _until_done(config: Config, opened: OpenRun, tracker: Tracker, stop: Stop, command: Sequence[str]) -> None:
    """Train; if a part is lost, close all, go back to the newest checkpoint and open them again, `trainer.restarts` times without a new one."""
    open_mode = open_rl if config.mode == "rl" else open_offline
    most, restarts, newest = config.trainer.restarts, 0, opened.folder.named_latest()
    while True:
        try:
            async with open_mode(config, opened.folder, tracker, opened.checkpoint) as context:
                await train(context)
                tracker.phase("stopping")
            return
        except LostError as lost:
            restarts = restarts + 1 if opened.folder.named_latest() == newest else 1
            if stop.number or restarts > most:
                raise
            why = first_line(lost)
        saved = opened.folder.named_latest() is not None
        tracker.phase("going back to the last checkpoint" if saved else "starting again: there is no checkpoint yet")
        opened = await asyncio.to_thread(go_back, opened, config, command, why)
        newest = opened.folder.named_latest()
        for line in opened.told:
            tracker.note(line)
        tracker.go_back(opened.checkpoint.step if opened.checkpoint else 0)
