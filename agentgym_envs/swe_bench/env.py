"""Issues of real repositories: the agent works in a sandbox with a shell and an editor; hidden tests judge its patch.

See README.md beside this file.
"""

import base64
import contextlib
import random
import re
import time
from contextlib import closing
from typing import Any, ClassVar, Literal

from agentgym import sandbox as sandboxes
from agentgym.checks.audit import Hack
from agentgym.core.env import Env, Opening, Step
from agentgym.core.messages import Action, Observation, assistant, instructed, user
from agentgym.core.tasks import Task, TaskSet
from agentgym.sandbox import Sandbox, SandboxError
from agentgym.tools.text_forms import call_text, spoken
from agentgym.tools.toolset import ToolSet
from agentgym_envs.settings import check_choice, check_number
from agentgym_envs.swe_bench import worktree
from agentgym_envs.swe_bench.commands import build_command_of, command_of
from agentgym_envs.swe_bench.grading import Grade, GradingError, grade
from agentgym_envs.swe_bench.hacks import hacks_of
from agentgym_envs.swe_bench.images import image_of
from agentgym_envs.swe_bench.patches import PatchError
from agentgym_envs.swe_bench.tasks import instance_of, load_tasks
from agentgym_envs.swe_bench.verdict import reader_of
from agentgym_envs.swe_bench.worktree import ACTIVATE, DEFAULT_SIZE, FOLDER, Size
from agentgym_envs.workbench import RESTARTED, Workbench

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
FEW = 5  # turns left from which on an observation says so
WAIT = 110.0  # seconds for a sandbox, in `init` and to grade
PATIENCE = 86_400.0  # seconds more in `init` while other episodes have all the room that sandboxes may take
RESET_WAIT = 50.0
_MARGIN = 600.0  # seconds of a step besides commands and tests: waiting for sandboxes, reading and applying patches
TOOLS = """Work with the tools bash and edit, and end with submit. You have {turns} and {minutes} minutes; what you have \
changed by then counts."""
TEXT = """Reply each time with a thought and exactly one command, in a block:

```bash
ls
```

Its output answers you. The shell keeps its folder and variables from one command to the next; it has no input and no editor \
to type in. When the issue is resolved, submit with the command

```bash
echo {submit}
```

You have {turns} and {minutes} minutes; what you have changed by then counts."""
HINT = "I found no call of a tool. Call bash or edit, or submit if the issue is resolved."
TEXT_HINT = "I found {count} bash blocks. Reply with exactly one command, in one block that begins with ```bash."
_BLOCK = re.compile(r"```(?:bash|sh|shell)[ \t]*\n(.*?)\n?```", re.DOTALL)


class SWEBench(Env):
    """Resolve an issue of a real repository; see README.md.

    `init` acquires a sandbox (`reset` for later episodes) and the end of the work releases it. Then the patch is graded in a
    fresh one, within the last step.
    """

    max_turns = 100
    sandbox_image = "swe"
    writable_root = True
    init_seconds = WAIT + PATIENCE + 300.0
    SHOWN: ClassVar = 200  # tests by name in `info`

    def __init__(
        self,
        data: str | None = None,
        interface: Literal["tools", "text"] = "tools",
        reward: Literal["binary", "fraction"] = "binary",
        command_timeout: float = 60.0,
        test_timeout: float = 1800.0,
        episode_seconds: float = 3600.0,
        max_output: int = 16_000,
        memory: int = DEFAULT_SIZE.memory,
        cpus: float = DEFAULT_SIZE.cpus,
        pids: int = DEFAULT_SIZE.pids,
        disk: int = DEFAULT_SIZE.disk,
        sandbox: str | None = None,
        tasks: TaskSet | None = None,
        max_turns: int | None = None,
        render_mode: str | None = None,
    ):
        super().__init__(tasks=tasks, max_turns=max_turns, render_mode=render_mode)
        check_choice("interface", interface, ("tools", "text"))
        check_choice("reward", reward, ("binary", "fraction"))
        for name, value in (("test_timeout", test_timeout), ("episode_seconds", episode_seconds)):
            check_number(name, value, 1, 1_000_000)
        self.data, self.interface, self.reward, self.sandbox = data, interface, reward, sandbox
        self.test_timeout, self.episode_seconds = float(test_timeout), float(episode_seconds)
        self.size = Size(memory, cpus, pids, disk)
        self._bench = Workbench(command_timeout, max_output)
        # A message's calls, of which the last may begin just in time; then the tests, twice, and twice those of the gold patch.
        self.step_seconds = 4 * self._bench.command_timeout + 4 * self.test_timeout + _MARGIN
        self._toolset = ToolSet([self._bench.bash, self._bench.edit, self.submit], seconds=2 * command_timeout)
        self.tools = self._toolset.schemas if interface == "tools" else []  # type: ignore[misc]
        self._sandbox: Sandbox | None = None
        self._fresh = False  # True until the agent's first reply

    @classmethod
    def default_tasks(cls, split: str = "train", data: str | None = None) -> TaskSet:
        return load_tasks(split, data)

    def init(self, task: Task) -> None:
        instance = instance_of(task)
        # Their errors say what an instance lacks.
        image_of(instance), command_of(instance), build_command_of(instance), reader_of(instance)
        super().init(task)
        self._instance = instance
        self._release()
        self._open(WAIT, PATIENCE)

    def prepare(self, task: Task) -> None:
        """Begin to start a sandbox for a coming `init` of a task."""
        with contextlib.suppress(SandboxError, ValueError):  # `init` will raise it
            sandboxes.prepare(worktree.spec_of(instance_of(task), self.size), self.sandbox)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        super().reset(seed=seed, options=options)
        self._open(RESET_WAIT)
        self._submitted, self._until = False, time.monotonic() + self.episode_seconds
        turns = "one reply" if self.max_turns == 1 else f"{self.max_turns} replies"
        told = {"turns": turns, "minutes": max(1, round(self.episode_seconds / 60)), "submit": SUBMIT}
        instruction = (TOOLS if self.interface == "tools" else TEXT).format(**told)
        return instructed(self.current_task.messages, instruction), {}

    def step(self, action: Action) -> Step:
        """Run what the agent asks for, or grade its work.

        `info`: `success`; at the end also `exit` ("submitted", "turns", "time", or what the loop says, such as "context"),
        `model_patch`, and what grading found.
        """
        text = self.read(action)
        self._fresh = False
        observation = self._answer(action, text)
        late = time.monotonic() >= self._until
        exit = "submitted" if self._submitted else "time" if late else "turns" if self.turn >= self.max_turns else None
        if exit is None:
            return self.outcome(self._warned(observation), success=False)
        reward, info = self._finish(exit)
        self.running = False
        return _with(observation, _told(exit, info)), reward, self._submitted, not self._submitted, info

    def cut_off(self, reason: str) -> Step | None:
        """Judge the work so far when the agent cannot go on."""
        if not self.running or reason == "interrupted":
            return None
        reward, info = self._finish(reason)
        self.running = False
        return [], reward, False, True, info

    def close(self) -> None:
        self._release()
        super().close()

    def submit(self) -> str:
        """Submit the work: the changed files are judged by hidden tests, and the work ends."""
        self._submitted = True
        return "Submitted."

    def expert_action(self) -> str:
        """The gold patch by a command, then the submission. Raises ValueError if it is not known."""
        patch = self._instance.patch
        if not patch:
            raise ValueError(f"task {self.current_task.id!r} has no gold patch")
        # Encoded, since a patch may hold what ends a block.
        encoded = base64.encodebytes(patch.encode("utf-8", "surrogateescape")).decode()
        command = f"base64 -d <<'END' | git apply --whitespace=nowarn\n{encoded}END"
        return self._submission() if self.turn else self._reply(command)

    def random_action(self, rng: random.Random) -> str:
        if rng.random() < 0.2:
            return self._submission()
        looks = "ls", "git status --short", "git log --oneline", "grep -rn TODO --include=*.py . | head -n 3"
        return self._reply(rng.choice(looks))

    def hacks(self, task: Task) -> list[Hack]:
        """The hacks that `agentgym validate --audit` plays: none may earn anything."""
        found = hacks_of(instance_of(task))
        return [Hack(each.name, each.what, (*map(self._reply, each.commands), self._submission())) for each in found]

    def _reply(self, command: str) -> str:
        """An agent's reply that runs a command."""
        if self.interface == "tools":
            return call_text("bash", command=command)
        return f"```bash\n{command}\n```"

    def _submission(self) -> str:
        return call_text("submit") if self.interface == "tools" else self._reply(f"echo {SUBMIT}")

    def _answer(self, action: Action, text: str) -> Observation:
        if self.interface == "tools":
            return self._toolset.answer(assistant(action)) or [user(HINT)]
        blocks = _BLOCK.findall(spoken(text))
        if len(blocks) != 1:
            return [user(TEXT_HINT.format(count=len(blocks)))]
        result = self._bench.run(blocks[0].replace("\0", ""), timeout=max(1.0, self._until - time.monotonic()))
        first = result.stdout.removeprefix(RESTARTED).lstrip("\n").partition("\n")[0]
        self._submitted = result.ok and first.strip() == SUBMIT
        return [user(f"<returncode>{result.exit_code}</returncode>\n<output>\n{self._bench.told(result)}\n</output>")]

    def _warned(self, observation: Observation) -> Observation:
        left = self.max_turns - self.turn
        if left > FEW:
            return observation
        return _with(
            observation, f"({left} {'reply' if left == 1 else 'replies'} left, then what you have changed is judged.)"
        )

    def _finish(self, exit: str) -> tuple[float, dict[str, Any]]:
        """Read the patch, give the sandbox back, and grade in a fresh one: an episode holds one at a time."""
        unreadable, patch = "", ""
        try:
            self._bench.end()
            patch = worktree.patch_of(self._held, self._base)
        except PatchError as error:
            unreadable = str(error)
        self._release()
        if unreadable:
            self._check_git(unreadable)
        if patch:
            limits = {"test_timeout": self.test_timeout, "wait": WAIT}
            found = grade(self._instance, patch, sandbox=self.sandbox, size=self.size, **limits)  # type: ignore[arg-type]
        else:
            found = Grade(f"unreadable: {unreadable}" if unreadable else "empty")
        earned = found.fraction if self.reward == "fraction" else float(found.resolved)
        return earned, {"success": found.resolved, "exit": exit, "submitted": self._submitted} | _facts(found, patch)

    def _check_git(self, problem: str) -> None:
        """Raise GradingError if git cannot read a repository that nobody has changed either, in half of the time."""
        with closing(worktree.open_repository(self._instance, self.sandbox, self.size, WAIT)) as box:
            try:
                worktree.patch_of(box, worktree.base_of(box), share=0.5)
            except PatchError as error:
                raise GradingError(f"{problem}; in a fresh sandbox: {error}") from error

    def _open(self, seconds: float, patience: float = 0.0) -> None:
        """A sandbox in which the agent has done nothing."""
        if self._sandbox is not None and self._fresh and self._sandbox.alive:
            return
        self._release()
        where = self._instance, self.sandbox, self.size, seconds
        self._sandbox = worktree.open_repository(*where, tests=False, patience=patience)
        self._base = worktree.base_of(self._sandbox)
        self._bench.begin(self._sandbox, FOLDER, ACTIVATE)
        self._fresh = True

    @property
    def _held(self) -> Sandbox:
        if self._sandbox is None:
            raise SandboxError("no sandbox is held: call reset() first")
        return self._sandbox

    def _release(self) -> None:
        box, self._sandbox, self._fresh = self._sandbox, None, False
        if box is not None:
            box.close()


def _facts(found: Grade, patch: str) -> dict[str, Any]:
    """A grade as plain JSON, for `info`."""
    lines = [line for line in patch.split("\n") if line.startswith(("+", "-"))]
    doubt = found.verdict.doubt if found.verdict else ""
    told: dict[str, Any] = {
        "patch": found.patch,
        "model_patch": patch.encode("utf-8", "surrogateescape").decode("utf-8", "replace"),
        "patch_lines": sum(not line.startswith(("+++ ", "--- ")) for line in lines),
        "dropped": len(found.dropped),
        "failure": found.failure,
        "doubt": doubt,
        "doubted": bool(doubt),
        "grading_seconds": round(found.seconds, 3),
    }
    if (verdict := found.verdict) is not None:
        failed = [test for test in verdict.pass_to_pass if not test.good]
        told |= {
            "resolution": verdict.resolution,
            "tests": {
                "fail_to_pass": {test.name: test.status for test in verdict.fail_to_pass[: SWEBench.SHOWN]},
                "pass_to_pass_failed": [test.name for test in failed[: SWEBench.SHOWN]],
            },
        }
    return told


def _told(exit: str, info: dict[str, Any]) -> str:
    """The last observation. It says nothing of the hidden tests."""
    why = {"submitted": "The work is submitted.", "time": "The time is up.", "turns": "The replies are used up."}[exit]
    return f"{why} {'The issue is resolved.' if info['success'] else 'The issue is not resolved.'}"


def _with(observation: Observation, line: str) -> Observation:
    """The observation with one more line at its end."""
    *before, last = observation
    return [*before, {**last, "content": f"{last['content']}\n{line}"}]
