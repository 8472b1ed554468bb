"""Sokoban: pushes, the solver, generated rooms and Boxoban files."""

from __future__ import annotations

import random
from collections import deque

import pytest

from agentgym.core.tasks import Task
from agentgym_envs.games.grid import DIRECTIONS
from agentgym_envs.games.sokoban import Sokoban
from agentgym_envs.games.sokoban.levels import generated_levels, longest
from agentgym_envs.games.sokoban.room import content, drawn, moved, parse_level, solve

CORRIDOR = Task("corridor", metadata={"level": "######\n#_@$.#\n######"})
BOXOBAN = """; 0
##########
##########
##########
##########
###  @ ###
### $$ ###
### .. ###
##########
##########
##########

; 1
##########
#@ $ .   #
##########
##########
##########
##########
##########
##########
##########
##########
"""


def shortest(level):
    """The fewest moves by plain breadth-first search over single moves; None if there is no plan."""
    room, player, boxes = parse_level(level)
    seen, frontier = {(player, boxes)}, deque([(player, boxes, 0)])
    while frontier:
        player, boxes, moves = frontier.popleft()
        if boxes == room.targets:
            return moves
        for step in room.steps:
            after = moved(room, player, boxes, step)
            if after is not None and after not in seen:
                seen.add(after)
                frontier.append((*after, moves + 1))
    return None


def begin(task, **kwargs):
    env = Sokoban(**kwargs)
    env.reset(options={"task": task})
    return env


def test_a_push_moves_player_and_box_and_solves():
    env = begin(CORRIDOR)
    observation, reward, terminated, _, info = env.step("right")
    assert (observation[0]["content"], reward, terminated) == ("All boxes are on targets.", 1.0, True)
    assert info["success"] is True


def test_what_cannot_move_is_blocked_and_the_room_stays():
    env = begin(Task("two", metadata={"level": "#######\n#@$$..#\n#######"}))
    room = "# # # # # # #\n# @ $ $ . . #\n# # # # # # #"
    for word in DIRECTIONS:  # walls on three sides, and two boxes in a row
        observation, *_, info = env.step(word)
        assert observation[0]["content"] == f"blocked\n{room}"
    assert info["invalid"] == 0
    assert env.step("shove it")[0][0]["content"] == f"invalid: answer up, down, left or right\n{room}"


def test_every_sign_is_drawn():
    level = "#######\n#+$*._#\n#_$___#\n#######"
    assert drawn(*parse_level(level)).replace(" ", "") == level
    env = begin(Task("signs", metadata={"level": level}))
    assert env.step("down")[0][0]["content"].split("\n")[1] == "# . $ * . _ #"


def test_shaping_pays_the_moves_of_the_shortest_plan_and_takes_back_a_detour():
    env = begin(Task("two", metadata={"level": "######\n#@$._#\n#_$._#\n######"}), shaping=0.6)
    gains = [env.step(word)[1] for word in ("right", "left", "right", "left", "down", "right")]
    assert gains == pytest.approx([0.15, 0.15, -0.15, 0.15, 0.15, 1.15])


def test_shaping_takes_all_back_when_a_box_is_stuck():
    level = "#######\n#____.#\n#_$___#\n#@____#\n#######"
    env = begin(Task("corner", metadata={"level": level}), shaping=0.7)  # the plan has 7 moves
    gains = [env.step(word)[1] for word in ("up", "right", "right", "right", "up", "right", "down")]
    assert gains == pytest.approx([0.1, 0.1, 0.1, 0.1, -0.1, -0.1, -0.2])


def test_shaping_of_an_episode_is_the_progress_at_its_end():
    rng = random.Random(2)
    stuck = 0
    for number in range(60):
        task = generated_levels("train", 5, 1, 0.25)[number]
        env = begin(task, shaping=0.5, size=5)
        paid, solved, truncated = 0.0, False, False
        while not (solved or truncated):
            _, reward, solved, truncated, _ = env.step(env.random_action(rng))
            paid += reward
        level = drawn(env._room, env._player, env._boxes).replace(" ", "")
        left = shortest(level)
        stuck += left is None
        done = 0.0 if left is None else max(0.0, 1 - left / task.metadata["difficulty"])
        assert paid == pytest.approx(0.5 * done + solved)
    assert 5 < stuck < 55


def test_the_plan_is_the_shortest_of_all():
    rng = random.Random(0)
    for seed in range(120):
        boxes = rng.choice([1, 2])
        level = generated_levels("train", 6, boxes, 0.2)[seed].metadata["level"]
        plan = solve(*parse_level(level))
        assert plan is not None
        assert len(plan) == shortest(level)
        assert 4 <= len(plan) <= longest(6, boxes)


def test_the_solver_and_plain_search_agree_on_what_is_hopeless():
    rng = random.Random(1)
    hopeless = 0
    for _ in range(300):
        cells = list("".join("_#"[rng.random() < 0.2] for _ in range(16)))
        for sign, cell in zip("@$$..", rng.sample(range(16), 5), strict=True):
            cells[cell] = sign
        rows = ["######", *("#" + "".join(cells[i : i + 4]) + "#" for i in range(0, 16, 4)), "######"]
        level = "\n".join(rows)
        plan, truth = solve(*parse_level(level)), shortest(level)
        assert (None if plan is None else len(plan)) == truth
        hopeless += truth is None
    assert 50 < hopeless < 290


@pytest.mark.parametrize(
    "settings", [{}, {"size": 5}, {"boxes": 2}, {"size": 8, "boxes": 3}, {"size": 10, "walls": 0.3}]
)
def test_the_expert_solves_every_generated_room(settings):
    env = Sokoban(**settings)
    for task in Sokoban.default_tasks("test", **settings).take(25 if settings else 400):
        env.reset(options={"task": task})
        over = False
        while not over:
            _, reward, over, truncated, _ = env.step(env.expert_action())
            assert not truncated
        assert reward == 1


def test_the_expert_plans_anew_after_other_moves_and_goes_on_where_nothing_helps():
    env, rng = Sokoban(boxes=2, max_turns=80), random.Random(3)
    solved = 0
    for task in Sokoban.default_tasks("test", boxes=2).take(150):
        env.reset(options={"task": task})
        observation, *_ = env.step(env.expert_action())
        for _ in range(6):
            if env.running:
                observation, *_ = env.step(env.random_action(rng))
        rows = observation[0]["content"].replace(" ", "").splitlines()[-6:]
        can = env.running and solve(*parse_level("\n".join(rows))) is not None
        success = False
        while env.running:
            *_, info = env.step(env.expert_action())
            success = info["success"]
        assert success == can
        solved += success
    assert 20 < solved < 145


def test_random_moves_are_never_blocked():
    env, rng = Sokoban(max_turns=1000), random.Random(0)
    env.reset(seed=1)
    for _ in range(300):
        if env.running:
            assert not env.step(env.random_action(rng))[0][0]["content"].startswith("blocked")


def test_boxoban_files_are_read_and_split_by_content(tmp_path, monkeypatch):
    (tmp_path / "sokoban").mkdir()
    (tmp_path / "sokoban" / "medium_x.txt").write_text(BOXOBAN)
    monkeypatch.setenv("AGENTGYM_DATA", str(tmp_path))
    tasks = [task for split in ("train", "test") for task in Sokoban.default_tasks(split, levels="boxoban:medium")]
    assert sorted(task.id for task in tasks) == ["sokoban-medium-medium_x-0", "sokoban-medium-medium_x-1"]
    for task in tasks:
        env = begin(task, levels="boxoban:medium", tasks=Sokoban.default_tasks("train"))
        assert env.max_turns == 200
        while env.running:
            *_, info = env.step(env.expert_action())
        assert info["success"]


def test_a_broken_boxoban_file_is_named(tmp_path, monkeypatch):
    (tmp_path / "sokoban").mkdir()
    (tmp_path / "sokoban" / "hard_x.txt").write_text("; 7\n####\n#@ #\n####\n")
    monkeypatch.setenv("AGENTGYM_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"hard_x\.txt: level 7: .*as many targets as boxes"):
        Sokoban(levels="boxoban:hard")


def test_missing_boxoban_files_are_told_how_to_get(tmp_path, monkeypatch):
    monkeypatch.delenv("AGENTGYM_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="AGENTGYM_DATA"):
        Sokoban(levels="boxoban:medium")
    monkeypatch.setenv("AGENTGYM_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"sokoban/medium\*\.txt"):
        Sokoban(levels="boxoban:medium")


@pytest.mark.data
@pytest.mark.parametrize("difficulty", ["unfiltered", "medium"])
def test_the_expert_solves_real_boxoban_rooms(difficulty):
    levels = f"boxoban:{difficulty}"
    train, test = (Sokoban.default_tasks(split, levels=levels) for split in ("train", "test"))
    rooms = [{content(task.metadata["level"]) for task in tasks} for tasks in (train, test)]
    assert not rooms[0] & rooms[1]
    assert len(train) + len(test) >= 1000
    env = Sokoban(levels=levels)
    for task in test.take(15):
        env.reset(options={"task": task})
        while env.running:
            *_, info = env.step(env.expert_action())
        assert info["success"], task.id


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("size", 4),
        ("size", 11),
        ("size", 6.0),
        ("boxes", 0),
        ("boxes", 4),
        ("walls", 0.5),
        ("shaping", "0.5"),
        ("shaping", float("nan")),
        ("shaping", float("inf")),
        ("levels", "boxoban"),
        ("levels", "x"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(setting, value):
    with pytest.raises(ValueError, match=setting):
        Sokoban(**{setting: value})


def test_more_boxes_than_fit_are_refused():
    with pytest.raises(ValueError, match="3 boxes do not fit"):
        Sokoban(size=5, boxes=3)


@pytest.mark.parametrize(
    ("level", "why"),
    [
        ("####\n#@_#\n###", "rectangle"),
        ("#####\n#@$?#\n#####", "signs"),
        ("#####\n_@$.#\n#####", "border"),
        ("#####\n#@@_#\n#####", "one player"),
        ("#####\n#@$_#\n#####", "as many targets"),
    ],
)
def test_levels_that_are_none_are_refused(level, why):
    with pytest.raises(ValueError, match=why):
        Sokoban().init(Task("bad", metadata={"level": level}))
