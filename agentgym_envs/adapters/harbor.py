"""Harbor's task folders. See README.md beside this file."""

import base64
import json
import logging
import math
import posixpath
import random
import shlex
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentgym.core.env import Env, Opening, Step
from agentgym.core.messages import Action, assistant, instructed, user
from agentgym.core.tasks import Task, TaskSet
from agentgym.sandbox import Sandbox, SandboxError, SandboxSpec, acquire
from agentgym.sandbox.api import MEGABYTE
from agentgym.tools.text_forms import call_text
from agentgym.tools.toolset import ToolSet, shortened, tool
from agentgym_envs.adapters.harbor_images import TOLD, archive, files_below, place_of
from agentgym_envs.adapters.harbor_tasks import read_task, readable, task_folders
from agentgym_envs.settings import check_number
from agentgym_envs.workbench import Workbench

INSTRUCTION = """Work in {folder} with the tools bash and edit. When you are done, call submit: then tests judge the state of \
the files, and you see no result. Programs that still run are ended first. You have {turns}{time}."""
HINT = "I found no tool call. Call bash or edit to work, and submit when you are done."
OVER = "Error: the work is submitted, the episode is over"
REWARDS = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")  # in the order in which Harbor looks for them
MOST_DISK = 512 * MEGABYTE  # of a sandbox's own files, which under bubblewrap are in memory
_HIDDEN = ("HOME", "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_", "TERM")  # of an image's variables
_PRINTED = 4_000  # characters kept of what the tests print

_log = logging.getLogger("agentgym.harbor")


@dataclass(frozen=True)
class Verdict:
    """The tests' result: the rewards of the reward file, or why there is none, and their output."""

    rewards: dict[str, float]
    problem: str
    output: str


class Harbor(Env):
    """A task of Harbor: a shell and an editor in the task's container, then its tests.

    Args:
        name: a task folder, or a folder of them.
        key: the reward's name in a `reward.json` with several.
        command_timeout: seconds for one command.
        memory, disk: bytes, `cpus`: cores; None: what the task says, else 2 GiB, 512 MiB (also the most by default), 1 core.
        network: give it to the tasks that allow it.
    """

    max_turns = 50
    sandbox_image = "python"
    writable_root = True

    def __init__(
        self,
        name: str,
        key: str = "reward",
        command_timeout: float = 120.0,
        max_output: int = 16_000,
        memory: int | None = None,
        cpus: float | None = None,
        pids: int = 256,
        disk: int | None = None,
        network: bool = False,
        sandbox: str | None = None,
        tasks: TaskSet | None = None,
        max_turns: int | None = None,
        render_mode: str | None = None,
    ):
        super().__init__(tasks=tasks, max_turns=max_turns, render_mode=render_mode)
        for what, value, most in (("memory", memory, 2**50), ("cpus", cpus, 1024), ("disk", disk, 2**50)):
            if value is not None:
                check_number(what, value, 0.01, most)
        check_number("pids", pids, 4, 1 << 20, whole=True)
        self.name, self.key, self.sandbox = name, key, sandbox
        self._most = {"memory": memory, "cpus": cpus, "disk": disk}
        self._pids, self._network = pids, bool(network)
        self._folders = task_folders(name)
        self._bench = Workbench(command_timeout, max_output)
        bash = tool(self._bench.bash)
        if network:  # some tasks have one then
            bash = replace(bash, description=bash.description.replace("no network and ", ""))
        self._toolset = ToolSet([bash, self._bench.edit, self.submit], seconds=2 * command_timeout)
        self.tools = self._toolset.schemas  # type: ignore[misc]
        self._box: Sandbox | None = None
        # The last step runs the tests, where they fail twice, and may wait for a sandbox.
        seconds = max(task.verifier_seconds for task in readable(self._folders, _log.debug).values())
        self.step_seconds = 2 * command_timeout + 2 * seconds + 120.0

    @classmethod
    def default_tasks(cls, split: str = "test", name: str = "") -> TaskSet:
        """The tasks below the folder of the split's name; where there is no such folder, all are test tasks."""
        root = Path(name).expanduser()
        if split != "test" and not (root / split).is_dir():
            raise ValueError(f"harbor:{name} has no split {split!r}: put its tasks into {root / split}")
        folders = task_folders(root)
        if (root / split).is_dir():
            folders = {id: folder for id, folder in folders.items() if id.startswith(f"{split}/")}
        found = readable(folders, _log.warning)
        return TaskSet([task.to_task(id) for id, task in found.items()], name=f"harbor/{split}", source=str(root))

    @property
    def tasks(self) -> TaskSet:
        if self._tasks is None:
            split = "train" if Path(self.name).expanduser().joinpath("train").is_dir() else "test"
            self._tasks = self.default_tasks(split, self.name)
        return self._tasks

    def init(self, task: Task) -> None:
        if task.id not in self._folders:
            raise ValueError(f"harbor:{self.name} has no task {task.id!r}: {', '.join(list(self._folders)[:5])} ...")
        self._read = read_task(self._folders[task.id])
        self._place = place_of(self._read)
        super().init(task)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        super().reset(seed=seed, options=options)
        self._release()
        self._box, self._folder, self._variables = self._opened()
        self._bench.begin(self._box, self._folder, _exports(self._variables))
        seconds = self._read.agent_seconds
        self._submitted, self._until = False, time.monotonic() + (seconds or math.inf)
        told = INSTRUCTION.format(
            folder=self._folder,
            turns="one reply" if self.max_turns == 1 else f"{self.max_turns} replies",
            time=f" and {seconds:g} seconds" if seconds else "",
        )
        return instructed(self.current_task.messages, told), {}

    def step(self, action: Action) -> Step:
        """Answer calls; with `submit`, the last turn or the end of the task's time, run the tests.

        `info` at the end: `success` (a reward of 1 or more), `exit` (submitted, turns, time), `rewards` by name, `verifier`
        ("reward", or why there is none), and what the tests printed.
        """
        self.read(action)
        late = time.monotonic() >= self._until
        results = [] if late else self._toolset.answer(assistant(action)) or [user(HINT)]
        last = self.turn >= self.max_turns
        if not (self._submitted or late or last):
            return self.outcome(results, success=False)
        verdict = self._verified()
        reward = verdict.rewards.get(self.key, 0.0)  # none where the agent broke the tests
        told = {
            "success": reward >= 1.0,
            "exit": "submitted" if self._submitted else "time" if late else "turns",
            "rewards": verdict.rewards,
            "verifier": verdict.problem or "reward",
            "verifier_output": verdict.output,
        }
        results = results or [user("The time for this task is over.")]
        step = self.outcome(results, reward, terminated=self._submitted or late, **told)
        self._release()
        return step

    def submit(self) -> str:
        """End the work: tests judge the state of the files."""
        if self._submitted:
            return OVER
        self._submitted = True
        return "Submitted."

    def close(self) -> None:
        super().close()
        self._release()

    def expert_action(self) -> str:
        if self.turn > 0:
            return call_text("submit")
        solution = self._read.folder / "solution"
        if not (solution / "solve.sh").is_file():
            raise NotImplementedError(f"{self._read.folder} has no solution/solve.sh")
        packed = base64.encodebytes(archive(files_below(solution))).decode()
        unpack = f"base64 -d <<'END' | tar -xf - -C /solution\n{packed}END"
        return call_text("bash", command=f"{unpack}\n/solution/solve.sh")

    def random_action(self, rng: random.Random) -> str:
        command = rng.choice(("ls", "pwd", "git status", "cat *", "id"))
        return rng.choice((call_text("bash", command=command), call_text("submit"), "Let me think."))

    def _opened(self, first: bool = False) -> tuple[Sandbox, str, dict[str, str]]:
        """A fresh sandbox of the task, with the files of its environment, its working folder and its variables.

        `first`: before those of new episodes, as for one that cannot end without it.
        """
        box = acquire(self._spec(), self.sandbox, first=first)
        try:
            folder, variables = self._place.workdir, dict(self._place.variables)
            if folder is None or self._place.image.startswith("/"):
                told_folder, told_variables = _told(box)
                folder, variables = folder or told_folder, told_variables | variables
            files = [(file, posixpath.join(folder, path)) for file, path in self._place.files]
            if any(path.count("/") == 1 for _, path in files):
                raise ValueError(f"{self._read.folder}: no file can be put into /: give workdir in task.toml")
            for made in {folder, "/solution"} - {"/"}:  # the solution's folder is for the expert, which is not root
                box.put_archive(archive([]), made)
            for top in sorted({path.split("/")[1] for _, path in files}):
                below = [(file, path.removeprefix(f"/{top}/")) for file, path in files if path.startswith(f"/{top}/")]
                box.put_archive(archive(below), f"/{top}")
        except BaseException:
            box.close()
            raise
        return box, folder, variables | dict(self._read.variables)

    def _spec(self) -> SandboxSpec:
        task, most = self._read, self._most
        return SandboxSpec(
            image=self._place.image,
            cpus=float(most["cpus"] or task.cpus or 1.0),
            memory=int(most["memory"] or task.memory or 2048 * MEGABYTE),
            pids=self._pids,
            disk=int(most["disk"] or min(task.disk or MOST_DISK, MOST_DISK)),
            network=self._network and task.network,
            writable_root=True,
        )

    def _verified(self) -> Verdict:
        """The tests' verdict on the agent's sandbox. Where they give none, an untouched sandbox tells whose fault it is.

        Raises SandboxError if the tests give no reward there either.
        """
        if self._box is None:
            raise SandboxError("no sandbox is held: call reset() first")
        self._bench.end()
        verdict = self._tried(self._box, self._folder, self._variables)
        if not verdict.problem or verdict.problem.startswith("timed out"):
            return verdict
        self._release()
        box, folder, variables = self._opened(first=True)
        with closing(box):
            control = self._tried(box, folder, variables)
        if control.problem:
            what = f"the tests of {self._read.folder} give no reward ({control.problem}), also on untouched files"
            raise SandboxError(f"{what}. They printed: {control.output[-500:]}")
        return verdict

    def _tried(self, box: Sandbox, folder: str, variables: dict[str, str]) -> Verdict:
        """`_judged`. Folders that are root's in the image are no doing of the agent's, as the control shows."""
        try:
            return self._judged(box, folder, variables)
        except PermissionError as error:
            return Verdict({}, f"the tests cannot be put in: {error}", "")

    def _judged(self, box: Sandbox, folder: str, variables: dict[str, str]) -> Verdict:
        """Put the tests into a sandbox whose programs have ended, and run them as Harbor does."""
        box.exec(["rm", "-rf", *REWARDS], cwd="/")
        box.put_archive(archive([]), "/logs/verifier")
        box.put_archive(archive(files_below(self._read.folder / "tests")), "/tests")
        if any(_content(box, path) is not None for path in REWARDS):
            return Verdict({}, "a reward file that could not be removed", "")
        environment = variables | dict(self._read.verifier_variables)
        result = box.exec("/tests/test.sh 2>&1", timeout=self._read.verifier_seconds, cwd=folder, env=environment)
        output = shortened(result.stdout + result.stderr, _PRINTED)
        if result.timed_out:
            return Verdict({}, f"timed out after {self._read.verifier_seconds:g} seconds", output)
        try:
            return Verdict(_rewards(box, self.key), "", output)
        except ValueError as error:
            return Verdict({}, str(error), output)

    def _release(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            self._bench.end()
            box.close()


def _exports(variables: dict[str, str]) -> str:
    return "; ".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items())


def _told(box: Sandbox) -> tuple[str, dict[str, str]]:
    """The working folder and the variables that an image says of itself if it was built for a task."""
    folder = (_content(box, f"{TOLD}/workdir") or b"").decode().strip()
    lines = (_content(box, f"{TOLD}/env") or b"").decode(errors="replace").splitlines()
    pairs = dict(line.split("=", 1) for line in lines if "=" in line)
    return folder or "/workspace", {name: value for name, value in pairs.items() if name not in _HIDDEN}


def _content(box: Sandbox, path: str) -> bytes | None:
    try:
        return box.read(path, limit=MEGABYTE)
    except (OSError, ValueError):
        return None


def _rewards(box: Sandbox, key: str) -> dict[str, float]:
    """The reward file's content. ValueError, as Harbor's error, if there is none or it holds no finite numbers, or not `key`."""
    found = next(((path, data) for path in REWARDS if (data := _content(box, path)) is not None), None)
    if found is None:
        raise ValueError("no reward file")
    path, data = found
    try:
        value = json.loads(data) if path.endswith(".json") else float(data)
        rewards = value if isinstance(value, dict) else {"reward": value}
        if not rewards or not all(isinstance(v, int | float) and math.isfinite(v) for v in rewards.values()):
            raise ValueError
    except (ValueError, OverflowError, RecursionError):  # an integer beyond a float's, JSON nested too deep
        raise ValueError(f"no number in {path}") from None
    if key not in rewards:
        raise ValueError(f"no reward {key!r} in {path}, which has {', '.join(map(str, rewards))}")
    return {str(name): float(value) for name, value in rewards.items()}
