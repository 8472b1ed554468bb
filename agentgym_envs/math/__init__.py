"""Mathematics: word problems (alone, with a calculator, with Python), harder problems with Python, Countdown."""

from __future__ import annotations


def register_math() -> None:
    from agentgym.core.registration import register

    math = "agentgym_envs.math"
    register(
        id="gsm8k",
        entry_point=f"{math}.gsm8k:GSM8K",
        description="School word problems, answered in one message and compared as exact numbers.",
        tags=("math", "single-turn"),
    )
    register(
        id="gsm8k_tool",
        entry_point=f"{math}.gsm8k_tool:GSM8KTool",
        description="School word problems over several turns, with a calculator to call.",
        tags=("math", "multi-turn", "tools"),
    )
    register(
        id="gsm8k_python",
        entry_point=f"{math}.gsm8k_python:GSM8KPython",
        description="School word problems over several turns, with a Python session in a sandbox.",
        tags=("math", "multi-turn", "tools", "sandbox"),
        needs=("sandbox:python",),
    )
    register(
        id="math_python",
        entry_point=f"{math}.math_python:MathPython",
        description="Harder mathematics with a Python session in a sandbox; answers compared symbolically.",
        tags=("math", "multi-turn", "tools", "sandbox"),
        needs=("sandbox:python", "mpmath:agentgym-toolkit[math]"),
    )
    register(
        id="countdown",
        entry_point=f"{math}.countdown:Countdown",
        description="Reach a target with + - * / and given numbers, each at most once.",
        tags=("math", "multi-turn", "generated"),
    )
