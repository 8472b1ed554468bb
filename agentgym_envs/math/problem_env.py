"""Bases of environments that pose a problem of mathematics: school word problems, unless a subclass says otherwise."""

import random
from typing import Any, ClassVar

from agentgym.core.env import Env, Opening, Step
from agentgym.core.messages import Action, assistant, instructed
from agentgym.core.tasks import Task, TaskSet
from agentgym.tools.text_forms import FinalAnswer
from agentgym.tools.toolset import ToolSet
from agentgym_envs.math.answers import number_of, stated_answer
from agentgym_envs.math.arithmetic import written
from agentgym_envs.math.word_problems import load_word_problems, solution_of


class ProblemEnv(Env):
    """Poses a task's messages, with the class's `instruction` at the end of the last."""

    instruction: ClassVar[str]

    @classmethod
    def default_tasks(cls, split: str = "train") -> TaskSet:
        """GSM8K's "train" (7,473) or "test" (1,319); the shipped problems (30 and 10) without it."""
        return load_word_problems(split)

    def check(self, task: Task) -> None:
        """Raise ValueError if the task's answer has the wrong form."""
        if number_of(str(task.answer)) is None:
            raise ValueError(
                f"task {task.id!r}: the answer must be a number, as text or as a value, not {task.answer!r:.100}"
            )

    def init(self, task: Task) -> None:
        if not task.messages:
            raise ValueError(f"task {task.id!r} has no messages: the question is missing")
        self.check(task)
        super().init(task)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        super().reset(seed=seed, options=options)
        return instructed(self.current_task.messages, self.instruction), {}

    def expert_answer(self) -> str:
        """A reply that states the right answer."""
        return solution_of(self.current_task)

    def random_answer(self, rng: random.Random) -> str:
        """A well-formed final reply that is almost surely wrong."""
        return f"#### {rng.randint(0, 1000)}"


class ToolProblemEnv(ProblemEnv):
    """A problem over several turns with tools, which a subclass puts into `_toolset`.

    A reply may call tools, natively (`tool_calls`) or in its text (`<tool_call>...</tool_call>`), and gets the results.
    A reply without a call that states an answer ends the episode: reward 1.0 for the right one, else 0.0. Any other
    reply gets a hint. Every reply takes a turn.
    """

    hint: ClassVar[str]
    _toolset: ToolSet

    def stated(self, text: str) -> FinalAnswer | None:
        """The answer that a reply states: the number after "####", in `\\boxed{}` or after "answer is"."""
        answer = stated_answer(text)
        if answer is None:
            return None
        short = written(answer)
        return FinalAnswer(short if number_of(short) == answer else str(answer))

    def judge(self, answer: str) -> bool:
        """True if an answer is right: numbers are compared exactly."""
        return number_of(answer) == number_of(str(self.current_task.answer))

    def step(self, action: Action) -> Step:
        """Run the calls, or judge the answer. `info`: `success`; after an answer also `answer` and `expected`."""
        text = self.read(action)
        results = self._toolset.answer(assistant(action))
        if results:
            return self.outcome(results, success=False)
        stated = self.stated(text)
        if stated is None or stated.problem:
            told = self.hint if stated is None else f"I cannot read the answer: {stated.problem}."
            return self.outcome(told, success=False)
        right = self.judge(stated.text)
        return self.outcome(
            "Correct." if right else "Wrong.",
            float(right),
            terminated=True,
            success=right,
            answer=stated.text,
            expected=str(self.current_task.answer),
        )
