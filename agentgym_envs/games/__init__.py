"""Single-player text games with procedural levels and a scripted expert; each folder has a README."""

from __future__ import annotations


def register_games() -> None:
    from agentgym.core.registration import register

    games = "agentgym_envs.games"
    tags = ("game", "multi-turn", "generated")
    register(
        id="frozen_lake",
        entry_point=f"{games}.frozen_lake:FrozenLake",
        description="Cross a frozen lake to the goal without falling into a hole.",
        tags=tags,
    )
    register(
        id="sokoban",
        entry_point=f"{games}.sokoban:Sokoban",
        description="Push every box onto a target; boxes cannot be pulled.",
        tags=tags,
    )
    register(
        id="wordle",
        entry_point=f"{games}.wordle:Wordle",
        description="Find a five-letter word in six guesses, told after each which letters are right.",
        tags=tags,
    )
    register(
        id="tic_tac_toe",
        entry_point=f"{games}.tic_tac_toe:TicTacToe",
        description="Three in a row against an opponent that plays at random, perfectly, or a mix of both.",
        tags=tags,
    )
