"""Text to SQL over real SQLite databases. See README.md beside this file."""

from __future__ import annotations


def register_sql() -> None:
    from agentgym.core.registration import register

    register(
        id="sql",
        entry_point="agentgym_envs.sql.env:SQL",
        description="Questions about SQLite databases: explore with a tool, then answer with a query.",
        tags=("sql", "multi-turn", "tools", "sandbox"),
        needs=("sandbox:sql",),
    )
