"""GSM8K in one turn: a word problem, one reply, an exact comparison. See README.md beside this file."""

import random

from agentgym.core.env import Step
from agentgym.core.messages import Action
from agentgym.core.tasks import TaskSet
from agentgym_envs.math.answers import final_answer, hashes_answer, number_of
from agentgym_envs.math.arithmetic import written
from agentgym_envs.math.word_problems import ProblemEnv
from agentgym_envs.settings import check_number


class GSM8K(ProblemEnv):
    """A word problem, answered in one message."""

    max_turns = 1
    instruction = 'Think step by step. Put the final answer, as a number alone, at the end after "####".'

    def __init__(self, format_reward: float = 0.0, tasks: TaskSet | None = None, render_mode: str | None = None):
        check_number("gsm8k: format_reward", format_reward, -100, 100)
        super().__init__(tasks=tasks, render_mode=render_mode)
        self.format_reward = float(format_reward)

    def step(self, action: Action) -> Step:
        """Judge the reply. `info`: `success`, `formatted`, `expected`, and `answer` (None without one)."""
        text = self.read(action)
        answer = final_answer(text)
        right = answer == number_of(str(self.current_task.answer))
        formatted = hashes_answer(text)
        told = "Correct." if right else "No answer found." if answer is None else "Wrong."
        shown = None if answer is None else written(answer)
        info = {"success": right, "formatted": formatted, "answer": shown, "expected": str(self.current_task.answer)}
        return self.outcome(told, float(right) + self.format_reward * formatted, terminated=True, **info)

    def expert_action(self) -> str:
        return self.expert_answer()

    def random_action(self, rng: random.Random) -> str:
        return self.random_answer(rng)
