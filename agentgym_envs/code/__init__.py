"""Program synthesis: the agent writes Python, sees the result, and submits it to hidden tests."""

from __future__ import annotations


def register_code() -> None:
    from agentgym.core.registration import register

    code = "agentgym_envs.code"
    register(
        id="code_mbpp",
        entry_point=f"{code}.mbpp:CodeMBPP",
        description="Write a Python function for a short request, run it on an example, submit it to hidden tests.",
        tags=("code", "multi-turn", "tools", "sandbox"),
        needs=("sandbox:python",),
    )
    register(
        id="code_humaneval",
        entry_point=f"{code}.humaneval:CodeHumanEval",
        description="Write a Python function from its head and docstring, run it, submit it to hidden tests.",
        tags=("code", "multi-turn", "tools", "sandbox"),
        needs=("sandbox:python",),
    )
