"""GSM8K over several turns with a calculator. See README.md beside this file."""

import random
from typing import Any, ClassVar

from agentgym.tools.text_forms import call_text
from agentgym.tools.toolset import ToolError, ToolSet, tool
from agentgym_envs.math.arithmetic import ArithmeticProblem, compute, parse, written
from agentgym_envs.math.word_problems import ToolProblemEnv, calculations_of


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


class GSM8KTool(ToolProblemEnv):
    """A word problem with a calculator tool; see `ToolProblemEnv`."""

    max_turns = 6
    instruction = """Think step by step. You have a calculator. To use it, reply with a call such as
<tool_call>{"name": "calculator", "arguments": {"expression": "3 * (12 + 4)"}}</tool_call>
and wait for its result. When you are done, put the final answer, as a number alone, at the end after "####"."""
    hint = (
        "I found neither a calculator call nor an answer. Call the calculator, or give the final answer after "
        '"####", for example "#### 42".'
    )
    _toolset = ToolSet([calculator])
    tools: ClassVar[list[dict[str, Any]]] = _toolset.schemas

    def expert_action(self) -> str:
        calculations = calculations_of(self.current_task)[: self.max_turns - 1]
        if self.turn >= len(calculations):
            return self.expert_answer()
        return call_text("calculator", expression=calculations[self.turn])

    def random_action(self, rng: random.Random) -> str:
        if rng.random() < 0.5:
            return self.random_answer(rng)
        return call_text("calculator", expression=f"{rng.randint(0, 100)} {rng.choice('+-*/')} {rng.randint(0, 100)}")
