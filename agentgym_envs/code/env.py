"""Multi-turn program synthesis, the base of `code_mbpp` and `code_humaneval`."""

from __future__ import annotations

import random
from typing import Any, ClassVar, Literal

from agentgym.core.env import Env, Step
from agentgym.core.messages import Action, Observation, assistant, instructed
from agentgym.core.tasks import Task, TaskSet
from agentgym_envs.code import grading
from agentgym_envs.code.attempt import SUBMIT, Attempt, fenced, tools_for
from agentgym_envs.code.problems import Problem, check_data, problem_of

INSTRUCTION = f"""Write Python code in a block that begins with ```python and ends with ```. It is run, and you see which public \
tests fail and what it prints; then you can write it again. To submit the code, put a line with the word {SUBMIT} after the \
block: hidden tests judge it, and you are done. You have {{turns}}; after the last one the latest code counts as submitted."""


class CodeEnv(Env):
    """A programming problem over several turns: write code, see the result, submit it.

    A Python block in a reply is run against the public tests. With `SUBMIT` as its first or last line the reply is a
    submission, which hidden tests judge: reward 1.0 if all pass, else 0.0. The tools `run` and `submit` do the same. On
    the last turn the latest code is submitted.

    Args:
        reward: "all", or "fraction": the share of hidden assertions that hold.
        timeout: seconds for one call of the code; all calls of a run have twice that.
        data: "auto" (published tasks if available) or "own" (the shipped tasks).
        sandbox: the sandbox's back end; see `agentgym.sandbox.acquire`.
        tasks: see `agentgym.Env`; each answer is a problem, see `agentgym_envs.code.problems`.
        max_turns: replies, 5 by default.
        render_mode: unused, as in every text environment.
    """

    max_turns = 5
    sandbox_image = "python"
    tools: ClassVar[list[dict[str, Any]]] = tools_for(lambda verb, code: verb).schemas

    def __init__(
        self,
        reward: Literal["all", "fraction"] = "all",
        timeout: float = 5.0,
        data: str = "auto",
        sandbox: str | None = None,
        tasks: TaskSet | None = None,
        max_turns: int | None = None,
        render_mode: str | None = None,
    ):
        super().__init__(tasks=tasks, max_turns=max_turns, render_mode=render_mode)
        if reward not in ("all", "fraction"):
            raise ValueError(f'reward must be "all" or "fraction", not {reward!r}')
        check_data(data)
        self.reward = reward
        self.data = data
        self.sandbox = sandbox
        self.limits = grading.GradingLimits(call=float(timeout), total=2 * float(timeout))
        self._attempt: Attempt | None = None

    def init(self, task: Task) -> None:
        problem_of(task)
        super().init(task)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._attempt = Attempt(problem_of(self.current_task), self._grade)
        turns = "one reply" if self.max_turns == 1 else f"{self.max_turns} replies"
        return instructed(self.current_task.messages, INSTRUCTION.replace("{turns}", turns)), {}

    def step(self, action: Action) -> Step:
        """Run or judge code. `info`: `success`; at the end also `verdict`, and assertions `passed` of `total`."""
        self.read(action)
        attempt = self._attempt
        if attempt is None:
            raise RuntimeError(f"{type(self).__name__}: no episode is running; call reset() before step()")
        last = self.turn >= self.max_turns
        observation = attempt.answer(assistant(action), last)
        report = attempt.report or (grading.Report("none") if last else None)
        if report is None:
            return self.outcome(observation, success=False)
        earned = report.passed / report.total if self.reward == "fraction" else float(report.success)
        return self.outcome(
            observation,
            earned,
            terminated=attempt.report is not None,
            success=report.success,
            verdict=report.verdict,
            passed=report.passed,
            total=report.total,
        )

    def _grade(self, problem: Problem, code: str, tests: tuple[str, ...]) -> grading.Report:
        return grading.grade(problem, code, tests, backend=self.sandbox, limits=self.limits)

    def expert_action(self) -> str:
        solution = problem_of(self.current_task).solution
        if not solution:
            raise ValueError(f"task {self.current_task.id!r} has no solution")
        return f"{fenced(solution)}\n{SUBMIT}"

    def random_action(self, rng: random.Random) -> str:
        names = problem_of(self.current_task).names
        code = "\n\n".join(f"def {name}(*args, **kwargs):\n    return {rng.randint(10**6, 10**9)}" for name in names)
        return fenced(code) + (f"\n{SUBMIT}" if rng.random() < 0.5 else "")
