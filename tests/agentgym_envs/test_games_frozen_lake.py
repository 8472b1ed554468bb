"""FrozenLake: moves, endings, shaping, slips and its generated lakes."""

from __future__ import annotations

import random

import pytest

from agentgym.core.tasks import Task
from agentgym_envs.games.frozen_lake import NEAR_RULES, RULES, FrozenLake
from agentgym_envs.games.grid import read_direction

LAKE = Task("lake", metadata={"level": "P_O\n___\nO_G"}, seed=1)


def begin(task=LAKE, **kwargs):
    env = FrozenLake(**kwargs)
    env.reset(options={"task": task})
    return env


def text_of_step(env, action):
    return env.step(action)[0][0]["content"]


def test_the_first_message_has_the_rules_and_the_lake_and_later_ones_the_lake_alone():
    env = FrozenLake()
    observation, info = env.reset(options={"task": LAKE})
    assert observation == [{"role": "user", "content": f"{RULES}\nP _ O\n_ _ _\nO _ G"}]
    assert len(RULES.split()) <= 25
    assert info["distance"] == 4
    assert text_of_step(env, "down") == "_ _ O\nP _ _\nO _ G"


def test_the_near_view_shows_the_cells_around_and_the_way_to_the_goal():
    env = FrozenLake(view="near")
    observation, _ = env.reset(options={"task": LAKE})
    start = "corners # # # _\nopen down right\ngoal down 2 right 2"
    assert observation == [{"role": "user", "content": f"{NEAR_RULES}\n{start}"}]
    assert text_of_step(env, "left") == f"wall\n{start}"
    assert text_of_step(env, "down") == "corners # _ # _\nopen up right\ngoal down 1 right 2"
    assert text_of_step(env, "right") == "corners _ O O G\nopen up down left right\ngoal down 1 right 1"
    far = Task("far", metadata={"level": "G__\n___\n__P"})
    assert FrozenLake(view="near").reset(options={"task": far})[0][0]["content"].endswith("goal up 2 left 2")
    beside = Task("beside", metadata={"level": "_G_\n_P_\n_O_"})
    assert (
        FrozenLake(view="near")
        .reset(options={"task": beside})[0][0]["content"]
        .endswith("\nopen up left right\ngoal up 1")
    )


def test_a_view_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="view must be one of map, near, not 'far'"):
        FrozenLake(view="far")


def test_the_goal_gives_one_and_success():
    env = begin()
    for word in ("down", "right", "right"):
        assert env.step(word)[1] == 0
    observation, reward, terminated, truncated, info = env.step("down")
    assert (observation[0]["content"], reward, terminated, truncated) == ("You reached the goal.", 1.0, True, False)
    assert info["success"] is True


def test_a_hole_ends_the_episode_with_nothing():
    env = begin()
    env.step("right")
    observation, reward, terminated, _, info = env.step("right")
    assert (observation[0]["content"], reward, terminated) == ("You fell into a hole.", 0.0, True)
    assert info["success"] is False


def test_walls_stop_and_unread_replies_cost_a_turn():
    env = begin()
    for word in ("up", "left"):
        assert text_of_step(env, word) == "wall\nP _ O\n_ _ _\nO _ G"
    assert text_of_step(env, "jump") == "invalid: answer up, down, left or right\nP _ O\n_ _ _\nO _ G"
    assert env.turn == 3
    for word in ("down", "right", "right"):
        env.step(word)
    assert text_of_step(env, "right").startswith("wall\n")
    assert text_of_step(env, "down") == "You reached the goal."


def test_every_wall_of_a_lake_that_is_no_square():
    env = begin(Task("long", metadata={"level": "__P__\n___G_"}), max_turns=50)
    for word, columns in (("left", 2), ("up", 1)):
        for _ in range(columns):
            env.step(word)
        assert text_of_step(env, word).startswith("wall\n")
    env.step("down")
    assert text_of_step(env, "down").startswith("wall\n")


@pytest.mark.parametrize(
    ("reply", "move"),
    [
        ("right", "right"),
        ("RIGHT.", "right"),
        ("I go right", "right"),
        ("<answer>right</answer>", "right"),
        ("not up, not left: down!", "down"),
        ("upward", None),
        ("rightdown", None),
        ("çup", None),
        ("", None),
    ],
)
def test_the_last_standalone_direction_counts(reply, move):
    assert read_direction(reply) == move


def test_shaping_pays_for_the_way_and_takes_back_what_is_lost():
    env = begin(shaping=0.4)
    gains = [env.step(word)[1] for word in ("down", "up", "down", "right", "right", "down")]
    assert gains == pytest.approx([0.1, -0.1, 0.1, 0.1, 0.1, 1.1])
    env = begin(shaping=0.4)
    assert [env.step("right")[1] for _ in range(2)] == pytest.approx([0.1, -0.1])


def test_slips_go_sideways_about_as_often_as_said_and_repeat():
    lake = Task(
        "wide", metadata={"level": "\n".join(["_" * 9] * 4 + ["____P____"] + ["_" * 9] * 3 + ["________G"])}, seed=4
    )
    env = FrozenLake(slippery=0.3)
    sideways = 0
    for seed in range(1000):
        env.reset(options={"task": lake}, seed=seed)
        grid = text_of_step(env, "left").split("\n")
        row = next(i for i, line in enumerate(grid) if "P" in line)
        assert row in (3, 4, 5)
        sideways += row != 4
        assert ("_ _ _ P _ _ _ _ _" in grid) == (row == 4)
    assert 250 < sideways < 350
    again = [env.reset(options={"task": lake}, seed=9) and text_of_step(env, "up") for _ in range(5)]
    assert len(set(again)) == 1


def test_a_slippery_lake_says_so():
    env = FrozenLake(slippery=0.1)
    assert "slip" in env.reset(seed=0)[0][0]["content"]


@pytest.mark.parametrize("size", [3, 4, 6, 9])
def test_generated_lakes_can_be_crossed_and_the_expert_takes_the_shortest_way(size):
    env = FrozenLake(size=size)
    lengths = set()
    for split in ("train", "test"):
        for task in FrozenLake.default_tasks(split, size=size).take(150):
            _, info = env.reset(options={"task": task})
            rows = task.metadata["level"].split("\n")
            assert [len(row) for row in rows] == [size] * size
            assert "P" in (rows[0][0], rows[0][-1], rows[-1][0], rows[-1][-1])
            over = False
            while not over:
                _, reward, terminated, truncated, _ = env.step(env.expert_action())
                over = terminated or truncated
            assert reward == 1
            assert env.turn == info["distance"]
            lengths.add(env.turn)
    assert min(lengths) == 2
    assert max(lengths) > size
    assert max(lengths) <= env.max_turns


def test_the_expert_finds_its_way_back_from_anywhere():
    env, rng = FrozenLake(max_turns=60), random.Random(0)
    for task in FrozenLake.default_tasks("test").take(200):
        env.reset(options={"task": task})
        over = False
        for _ in range(6):
            if not over:
                _, _, over, _, _ = env.step(env.random_action(rng))
        while not over:
            _, _, over, truncated, info = env.step(env.expert_action())
            assert not truncated
            assert info["success"] == over


def test_ten_turns_on_the_small_lake_and_more_on_larger_ones():
    assert [FrozenLake(size=n).max_turns for n in (4, 5, 8)] == [10, 12, 20]
    assert FrozenLake(max_turns=7).max_turns == 7


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("size", 2),
        ("size", 17),
        ("size", "4"),
        ("size", True),
        ("holes", -0.1),
        ("holes", 0.6),
        ("slippery", 1.5),
        ("shaping", "0.5"),
        ("shaping", float("nan")),
        ("shaping", float("inf")),
    ],
)
def test_settings_out_of_range_are_refused_by_name(setting, value):
    with pytest.raises(ValueError, match=setting):
        FrozenLake(**{setting: value})


@pytest.mark.parametrize(
    ("level", "why"),
    [("P_\nG", "equal length"), ("PP\n_G", "one P"), ("P_\n_x", "one P"), ("P__\nOO_\nGO_", "no safe way")],
)
def test_levels_that_are_none_are_refused(level, why):
    with pytest.raises(ValueError, match=why):
        FrozenLake().init(Task("bad", metadata={"level": level}))
