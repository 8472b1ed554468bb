"""GSM8K in one turn: a word problem, one reply, the number in it compared exactly."""

from __future__ import annotations

import random

from agentgym.core.env import Step
from agentgym.core.messages import Action
from agentgym.core.tasks import TaskSet
from agentgym_envs.math.answers import final_answer, hashes_answer, number_of
from agentgym_envs.math.arithmetic import written
from agentgym_envs.math.problem_env import ProblemEnv
from agentgym_envs.math.word_problems import solution_of

INSTRUCTION = 'Think step by step. Put the final answer, as a number alone, at the end after "####".'


class GSM8K(ProblemEnv):
    """A word problem, answered in one message.

    Reward 1.0 for the right number, 0.0 otherwise. The answer is the number right behind the last mark (`####`, `\\boxed{}`,
    "answer is", "answer:"), or the last number where there is no mark, in what follows the last correction ("wait,", "actually,",
    "I mean") that has a number; one that is denied, only bounded, or goes on as an alternative, a list, a range, a time or an
    unfinished calculation is no answer.

    Args:
        format_reward: added when the reply ends with "####" and a number, right or wrong.
        tasks: see `agentgym.Env`; each needs `messages` and a number as `answer`.
        render_mode: unused, as in every text environment.
    """

    max_turns = 1
    instruction = INSTRUCTION

    def __init__(self, format_reward: float = 0.0, tasks: TaskSet | None = None, render_mode: str | None = None):
        super().__init__(tasks=tasks, render_mode=render_mode)
        self.format_reward = float(format_reward)

    def step(self, action: Action) -> Step:
        """Judge the reply. `info`: `success`, `formatted`, and the numbers `answer` (None if there is none) and `expected`."""
        text = self.read(action)
        answer = final_answer(text)
        right = answer is not None and answer == number_of(str(self.current_task.answer))
        formatted = hashes_answer(text)
        return self.outcome(
            "Correct." if right else "No answer found." if answer is None else "Wrong.",
            float(right) + self.format_reward * formatted,
            terminated=True,
            success=right,
            formatted=formatted,
            answer=None if answer is None else written(answer),
            expected=str(self.current_task.answer),
        )

    def expert_action(self) -> str:
        """The gold solution."""
        return solution_of(self.current_task)

    def random_action(self, rng: random.Random) -> str:
        """A well-formed answer, almost surely a wrong one."""
        return f"#### {rng.randint(0, 1000)}"
