"""Tic-tac-toe against oneself, and the game of speaker and listener: who is asked, what each sees and earns."""

import asyncio
import random

import pytest

import agentgym
from agentgym import ScriptedPolicy, Task, run_episode
from agentgym.checks.check_env import check_env
from agentgym.policies.base import ExpertPolicy, RandomPolicy
from agentgym_envs.games.reference_game import LISTENER, SPEAKER, description, fits
from agentgym_envs.games.tic_tac_toe import RULES, TicTacToe

LEVEL = "small red circle, large blue star, small blue star, large red star / 2 / 3142"


def play(env_id, level, policy):
    env = agentgym.make(env_id)
    task = level if isinstance(level, Task) else Task("t", metadata={"level": level})
    return asyncio.run(run_episode(env, policy, task))


def told(done):
    return [(turn.player, turn.observation[0]["content"].split("\n")[-3:]) for turn in done.turns]


@pytest.mark.parametrize("env_id", ["tic_tac_toe_self", "reference_game"])
def test_our_own_checker_finds_nothing(env_id):
    assert check_env(env_id) == []


def test_both_sides_are_asked_in_turn_and_see_the_same_board():
    done = play("tic_tac_toe_self", "O 5", ScriptedPolicy(["1", "3", "9", "7"]))
    assert [player for player, _ in told(done)] == ["X", "O", "X", "O"]
    assert told(done)[1] == ("O", ["X 2 3", "4 O 6", "7 8 9"])
    assert told(done)[2] == ("X", ["X 2 O", "4 O 6", "7 8 9"])
    assert (done.rewards, done.reward, done.success) == ({"X": 0.0, "O": 1.0}, 0.0, 0.0)
    assert done.final_observation == [{"role": "user", "content": "O wins."}]


def test_perfect_players_draw_from_every_start_without_moves():
    for starter in "XO":
        done = play("tic_tac_toe_self", f"{starter} ", ExpertPolicy())
        assert done.rewards == {"X": 0.5, "O": 0.5}
        assert (done.success, len(done.turns)) == (1.0, 9)


def test_a_player_who_makes_five_mistakes_loses_and_the_other_may_make_its_own():
    done = play("tic_tac_toe_self", "X ", ScriptedPolicy(["?", "5", "5", *"?" * 4]))
    assert [turn.player for turn in done.turns] == ["X", "X", *"O" * 5]
    assert (
        done.turns[2].observation[0]["content"].startswith(RULES.replace("X", "?").replace("O", "X").replace("?", "O"))
    )
    assert done.rewards == {"X": 1.0, "O": 0.0}
    assert done.metrics["invalid"] == 6
    assert "O has made too many mistakes. X wins." in done.final_observation[0]["content"]


def test_the_first_mistake_may_lose_the_game():
    env = agentgym.make("tic_tac_toe_self", mistakes=0)
    done = asyncio.run(run_episode(env, ScriptedPolicy(["5", "5"]), Task("t", metadata={"level": "X "})))
    assert (len(done.turns), done.rewards) == (2, {"X": 1.0, "O": 0.0})


@pytest.mark.parametrize("mistakes", [-1, 5, 1.5, True])
def test_a_wrong_number_of_mistakes_is_refused(mistakes):
    with pytest.raises(ValueError, match="tic_tac_toe_self: mistakes must be a whole number from 0 to 4"):
        agentgym.make("tic_tac_toe_self", mistakes=mistakes)


def test_a_game_ends_within_its_turns_whatever_is_said():
    rng = random.Random(0)
    for task in agentgym.spec("tic_tac_toe_self").tasks("train").take(200):
        done = play("tic_tac_toe_self", task, ScriptedPolicy(lambda _: rng.choice("123456789?")))
        assert done.end == "terminated"
        assert sum(done.rewards.values()) == 1.0


def test_held_out_games_ask_x_alone_and_go_as_those_of_tic_tac_toe():
    tasks = agentgym.spec("tic_tac_toe_self").tasks("test").take(20)
    for number, task in enumerate(tasks):
        alone = asyncio.run(run_episode(TicTacToe(), RandomPolicy(random.Random(number)), task))
        done = play("tic_tac_toe_self", task, RandomPolicy(random.Random(number)))
        assert {turn.player for turn in done.turns} == {"X"}
        assert [turn.observation for turn in done.turns] == [turn.observation for turn in alone.turns]
        assert (done.reward, done.success) == (alone.reward, alone.success)


def test_starts_have_up_to_two_moves_and_either_side_begins():
    levels = {task.metadata["level"] for task in agentgym.spec("tic_tac_toe_self").tasks("train").take(3000)}
    assert len(levels) == 2 * (1 + 9 + 9 * 8)
    with pytest.raises(ValueError, match="a level is like"):
        agentgym.make("tic_tac_toe_self").reset(options={"task": Task("t", metadata={"level": "X 55"})})


def test_the_listener_sees_two_words_and_the_things_in_its_own_order():
    done = play("reference_game", LEVEL, ScriptedPolicy(["<think>the star</think>I say: large blue", "2, no, 4"]))
    said, seen = (turn.observation[0]["content"] for turn in done.turns)
    assert said.endswith("The thing: large blue star\nThe others: small red circle, small blue star, large red star")
    assert seen.endswith(
        "1 small blue star\n2 small red circle\n3 large red star\n4 large blue star\nYour partner says: large blue"
    )
    assert [turn.player for turn in done.turns] == [SPEAKER, LISTENER]
    assert done.rewards == {SPEAKER: 1.0, LISTENER: 1.0}


@pytest.mark.parametrize("answer", ["1", "", "5", "four", "\u0664"])
def test_another_number_or_none_earns_nothing_for_both(answer):
    done = play("reference_game", LEVEL, ScriptedPolicy(["", answer]))
    assert done.turns[1].observation[0]["content"].endswith("Your partner says: nothing")
    assert (done.rewards, done.success) == ({SPEAKER: 0.0, LISTENER: 0.0}, 0.0)


def test_two_words_always_suffice_and_fewer_are_taken_where_they_do():
    assert description(["small red circle", "large red star"], 0) == ["small"]
    assert description(LEVEL.split(" / ")[0].split(", "), 1) == ["large", "blue"]
    for task in agentgym.spec("reference_game").tasks("test").take(300):
        things, target, _ = task.metadata["level"].split(" / ")
        words = description(things.split(", "), int(target) - 1)
        assert [fits(thing, words) for thing in things.split(", ")].count(True) == 1


def test_no_held_out_level_comes_in_training_in_another_order():
    def fixed(task):
        things, target, _ = task.metadata["level"].split(" / ")
        return tuple(sorted(things.split(", "))), things.split(", ")[int(target) - 1]

    train, test = ({fixed(t) for t in agentgym.spec("reference_game").tasks(s).take(2000)} for s in ("train", "test"))
    assert len(test) == 1000
    assert not train & test


@pytest.mark.parametrize("level", ["a / 1 / 1234", LEVEL.replace("3142", "3141"), LEVEL.replace("/ 2", "/ 5")])
def test_wrong_levels_are_refused(level):
    with pytest.raises(ValueError, match="a level is four things"):
        agentgym.make("reference_game").reset(options={"task": Task("t", metadata={"level": level})})


def team(*said, answer="18"):
    task = Task("mine", ({"role": "user", "content": "How many?"},), answer)
    return asyncio.run(run_episode(agentgym.make("gsm8k_team"), ScriptedPolicy(said), task))


@pytest.mark.parametrize(
    ("said", "rewards", "without"),
    [
        (["#### 18", "Verdict: right", "#### 18"], (1.0, 1.0, 1.0), 1.0),
        (["#### 17", "Verdict: wrong", "#### 18"], (1.0, 0.0, 1.0), 0.0),
        (["#### 18", "Verdict: right? No. Verdict: Wrong", "#### 17"], (0.0, 1.0, 0.0), 1.0),
        (["#### 18", "It is right.", "nothing"], (0.0, 1.0, 0.0), 1.0),
    ],
)
def test_each_of_a_team_is_paid_for_its_own_part_and_the_refiner_s_is_the_team_s(said, rewards, without):
    done = team(*said)
    assert [turn.player for turn in done.turns] == ["solver", "verifier", "refiner"]
    assert (done.rewards, done.reward) == (
        dict(zip(("refiner", "solver", "verifier"), rewards, strict=True)),
        rewards[0],
    )
    assert done.turns[-1].info["without"] == {"refiner": without, "verifier": without}


def test_a_team_sees_what_was_said_before_it_but_no_thoughts():
    done = team("<think>psst</think>It is #### 18", "<think>hush</think>Verdict: right", "#### 18")
    solver, verifier, refiner = (turn.observation[0]["content"] for turn in done.turns)
    assert solver.startswith("How many?\n\nThink step by step.")
    assert "A colleague's solution:\nIt is #### 18\n\nCheck the solution" in verifier
    assert "A colleague's solution:\nIt is #### 18\n\nThe check of it:\nVerdict: right" in refiner
    assert "Check the solution" not in refiner
    assert not any(thought in text for text in (verifier, refiner) for thought in ("psst", "hush"))
