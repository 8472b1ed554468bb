"""GSM8K over several turns with a calculator."""

from __future__ import annotations

import random
from typing import Any, ClassVar

from agentgym.core.env import Step
from agentgym.core.messages import Action, assistant
from agentgym.tools.text_forms import call_text
from agentgym.tools.toolset import ToolError, ToolSet, tool
from agentgym_envs.math.answers import number_of, stated_answer
from agentgym_envs.math.arithmetic import ArithmeticProblem, compute, parse, written
from agentgym_envs.math.problem_env import ProblemEnv
from agentgym_envs.math.word_problems import calculations_of, solution_of

INSTRUCTION = """Think step by step. You have a calculator. To use it, reply with a call such as
<tool_call>{"name": "calculator", "arguments": {"expression": "3 * (12 + 4)"}}</tool_call>
and wait for its result. When you are done, put the final answer, as a number alone, at the end after "####"."""
HINT = (
    'I found neither a calculator call nor an answer. Call the calculator, or give the final answer after "####", '
    'for example "#### 42".'
)


@tool
def calculator(expression: str) -> str:
    """Compute an arithmetic expression exactly.

    Args:
        expression: numbers, parentheses and the operators + - * / // % **, for example "3 * (12 + 4) / 2".
    """
    try:
        return written(compute(parse(expression)))
    except ArithmeticProblem as problem:
        raise ToolError(f"calculator: {problem}") from problem


TOOLS = ToolSet([calculator])


class GSM8KTool(ProblemEnv):
    """A word problem with a calculator tool.

    A reply may call the calculator, natively (`tool_calls`) or in its text (`<tool_call>...</tool_call>`), and gets the
    results. A reply without a call that states an answer, after "####", in `\\boxed{}` or after "answer is", ends the
    episode: reward 1.0 for the right number, else 0.0. Any other reply gets a hint. Every reply takes a turn.

    Args:
        tasks: see `agentgym.Env`; each needs `messages` and a number as `answer`.
        max_turns: replies, 6 by default.
        render_mode: unused, as in every text environment.
    """

    max_turns = 6
    instruction = INSTRUCTION
    tools: ClassVar[list[dict[str, Any]]] = TOOLS.schemas

    def step(self, action: Action) -> Step:
        """Answer calls, or judge the answer. `info`: `success`; after an answer also `answer` and `expected`."""
        text = self.read(action)
        results = TOOLS.answer(assistant(action))
        if results:
            return self.outcome(results, success=False)
        answer = stated_answer(text)
        if answer is None:
            return self.outcome(HINT, success=False)
        right = answer == number_of(str(self.current_task.answer))
        return self.outcome(
            "Correct." if right else "Wrong.",
            float(right),
            terminated=True,
            success=right,
            answer=written(answer),
            expected=str(self.current_task.answer),
        )

    def expert_action(self) -> str:
        """The gold solution's next calculation as a call; the solution at the end or on the last turn."""
        calculations = calculations_of(self.current_task)[: self.max_turns - 1]
        if self.turn >= len(calculations):
            return solution_of(self.current_task)
        return call_text("calculator", expression=calculations[self.turn])

    def random_action(self, rng: random.Random) -> str:
        if rng.random() < 0.5:
            return f"#### {rng.randint(0, 1000)}"
        return call_text("calculator", expression=f"{rng.randint(0, 100)} {rng.choice('+-*/')} {rng.randint(0, 100)}")
