"""Question answering with a search tool. See README.md beside this file."""

from __future__ import annotations


def register_search() -> None:
    from agentgym.core.registration import register

    register(
        id="search",
        entry_point="agentgym_envs.search.env:Search",
        description="Questions over a corpus of passages, with a search tool; scored by exact match or F1.",
        tags=("search", "multi-turn", "tools"),
        needs=("bm25s:agentgym-toolkit[search]",),
    )
