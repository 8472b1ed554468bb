"""Tic-tac-toe: rules, perfect play and the opponents."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from agentgym.core.tasks import Task
from agentgym_envs.games.tic_tac_toe import (
    EMPTY,
    PREFERRED,
    RULES,
    TicTacToe,
    best_cell,
    free_cells,
    placed,
    value,
    winner,
)


def opponent(level):
    return Task("opponent", metadata={"level": level})


def begin(level, **kwargs):
    env = TicTacToe(**kwargs)
    env.reset(options={"task": opponent(level)})
    return env


def test_the_board_shows_the_numbers_of_free_cells_and_o_answers_at_once():
    env = TicTacToe()
    observation, _ = env.reset(options={"task": opponent("X 123456789 00000")})
    assert observation[0]["content"] == f"{RULES}\n1 2 3\n4 5 6\n7 8 9"
    assert env.step("I take cell 5.")[0][0]["content"] == "O 2 3\n4 X 6\n7 8 9"


def test_o_begins_where_the_task_says_so():
    env = TicTacToe()
    observation, _ = env.reset(options={"task": opponent("O 913456782 00000")})
    assert observation[0]["content"].endswith("\n1 2 3\n4 5 6\n7 8 O")


@pytest.mark.parametrize(
    ("level", "moves", "ending", "reward", "success"),
    [
        ("X 123456789 00000", "789", "You win.", 1.0, True),
        ("X 123456789 00000", "489", "You lose.", 0.0, False),
        ("O 123456789 00000", "59", "You lose.", 0.0, False),
        ("O 194356782 00000", "537", "You win.", 1.0, True),
    ],
)
def test_endings(level, moves, ending, reward, success):
    env = begin(level)
    for move in moves:
        assert env.running
        observation, gained, terminated, truncated, info = env.step(move)
    assert (observation[0]["content"], gained, info["success"]) == (ending, reward, success)
    assert (terminated, truncated) == (True, False)


@pytest.mark.parametrize("starter", ["X", "O"])
def test_a_draw_is_half_a_win(starter):
    env = begin(f"{starter} 512346789 11111")
    while env.running:
        observation, reward, terminated, _, info = env.step(env.expert_action())
    assert (observation[0]["content"], reward, terminated, info["success"]) == ("Draw.", 0.5, True, True)


def test_moves_that_are_none_cost_a_turn_and_name_the_free_cells():
    env = begin("X 123456789 00000")
    env.step("5")
    board = "O 2 3\n4 X 6\n7 8 9"
    assert env.step("1")[0][0]["content"] == f"taken: answer one of 2 3 4 6 7 8 9\n{board}"
    assert env.step("5")[0][0]["content"] == f"taken: answer one of 2 3 4 6 7 8 9\n{board}"
    for reply in ("0", "10", "the middle", ""):
        observation, *_, info = env.step(reply)
        assert observation[0]["content"] == f"invalid: answer one of 2 3 4 6 7 8 9\n{board}"
    assert info["invalid"] == 6
    assert env.turn == 7


def test_an_unfinished_game_is_no_success():
    env = begin("X 123456789 00000", max_turns=2)
    env.step("5")
    _, reward, terminated, truncated, info = env.step("5")
    assert (reward, terminated, truncated, info["success"]) == (0.0, False, True, False)


def test_values_of_known_boards():
    assert value(EMPTY, "X") == 0
    assert value("XX_OO____", "X") == 5  # wins at once, four cells left
    assert value("XX_OO____", "O") == 5
    assert value("X___O___X", "O") == 0
    assert best_cell("X___X____", "O", PREFERRED) == 9
    assert best_cell("OO__X____", "X", PREFERRED) == 3


def test_the_expert_never_loses_whatever_o_does():
    """Every line of play against the expert, not only the opponents of a task set."""

    def worst(board, mover):
        if winner(board) is not None or "_" not in board:
            return {"X": 1, "O": -1, None: 0}[winner(board)]
        if mover == "X":
            return worst(placed(board, best_cell(board, "X", PREFERRED), "X"), "O")
        return min(worst(placed(board, cell, "O"), "X") for cell in free_cells(board))

    assert worst(EMPTY, "X") == 0
    assert worst(EMPTY, "O") == 0


@pytest.mark.parametrize("kind", ["random", "minimax", "mix"])
def test_the_expert_never_loses_to_a_generated_opponent(kind):
    env = TicTacToe(opponent=kind)
    results = Counter()
    for task in TicTacToe.default_tasks("test", opponent=kind).take(500):
        env.reset(options={"task": task})
        while env.running:
            _, reward, _, _, info = env.step(env.expert_action())
        assert info["success"]
        results[reward] += 1
    assert results[0.0] == 0
    assert (results[1.0] == 0) == (kind == "minimax")


def test_nobody_beats_the_perfect_opponent():
    env, rng = TicTacToe(opponent="minimax"), random.Random(0)
    for task in TicTacToe.default_tasks("test", opponent="minimax").take(500):
        env.reset(options={"task": task})
        while env.running:
            _, reward, *_ = env.step(env.random_action(rng))
        assert reward < 1


def test_random_opponents_move_anywhere_alike_and_begin_half_the_games():
    tasks = [task.metadata["level"].split(" ") for task in TicTacToe.default_tasks("train").take(3000)]
    assert 1350 < sum(starter == "O" for starter, _, _ in tasks) < 1650
    answers = Counter(next(cell for cell in order if cell != "5") for _, order, _ in tasks)
    assert set(answers) == set("12346789")
    assert all(300 < count < 450 for count in answers.values())


def test_kinds_differ_in_care():
    care = {
        kind: "".join(t.metadata["level"][-5:] for t in TicTacToe.default_tasks("train", opponent=kind).take(400))
        for kind in ("random", "minimax", "mix")
    }
    assert set(care["random"]) == {"0"}
    assert set(care["minimax"]) == {"1"}
    assert 800 < care["mix"].count("1") < 1200


def test_bad_settings_and_levels_are_refused():
    with pytest.raises(ValueError, match="opponent must be one of random, minimax, mix"):
        TicTacToe(opponent="human")
    for level in ("X 123456789", "Z 123456789 00000", "X 113456789 00000", "X 123456789 0000", "X 123456789 00002"):
        with pytest.raises(ValueError, match="a level is like"):
            begin(level)
