"""What every game promises: its README, its expert, its splits, and steadiness under any reply."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from other_process import played_twice
from readme_parts import replay

import agentgym
from agentgym.core.tasks import Task
from agentgym_envs import games as games_package
from agentgym_envs import register_all
from agentgym_envs.games.grid import least_form

GAMES = ("frozen_lake", "sokoban", "wordle", "guess_number", "tic_tac_toe")
OF_PLAYERS = ("tic_tac_toe_self", "reference_game")  # which have more tests of their own
register_all()


def readme(game):
    return Path(games_package.__file__).with_name(game).joinpath("README.md").read_text(encoding="utf-8")


def play(env, task, player, rng=None):
    """Play one episode as the "expert" or at "random"; the rewards' sum and the last info."""
    env.reset(options={"task": task})
    total, over = 0.0, False
    while not over:
        _, reward, terminated, truncated, info = env.step(
            env.expert_action() if player == "expert" else env.random_action(rng)
        )
        total += reward
        over = terminated or truncated
    return total, info


@pytest.mark.parametrize("game", [*GAMES, *OF_PLAYERS])
class TestReadme:
    def test_its_episode_replays(self, game):
        tasks = [task for split in ("test", "train") for task in agentgym.spec(game).tasks(split).take(20)]
        replay(readme(game), agentgym.make(game), tasks)

    def test_its_numbers_are_those_of_the_test_split(self, game):
        table = [line[2:-2].split(" | ") for line in readme(game).splitlines() if re.match(r"\| .+ \| [\d.]+%", line)]
        rows = [
            (setting, player, *cell.replace("%", "").split(", "))
            for setting, *cells in table
            for player, cell in zip(("expert", "random"), cells, strict=True)
        ]
        assert table
        made = {}  # the levels of a setting are made once: that takes longer than all that is played
        for setting, player, *numbers in rows:
            if setting not in made:
                kwargs = {} if setting == "default" else eval(f"dict({setting.strip('`')})")
                env = agentgym.make(game, **kwargs)
                made[setting] = env, list(env.spec.tasks("test"))
            (env, tasks), rng = made[setting], random.Random(0)
            results = []
            for task in tasks:
                reward, info = play(env, task, player, rng)
                results.append((100 * info["success"], reward, env.turn))
            means = [sum(column) / len(tasks) for column in zip(*results, strict=True)]
            assert [f"{means[0]:.1f}", f"{means[1]:.3f}", f"{means[2]:.2f}"] == [
                numbers[0],
                numbers[1] if len(numbers) == 3 else f"{float(numbers[0]) / 100:.3f}",
                numbers[-1],
            ], (setting, player)

    def test_the_expert_always_succeeds_and_chance_rarely_does(self, game):
        (expert, chance), *_ = re.findall(r"^\| default \| ([\d.]+)%.*? \| ([\d.]+)%", readme(game), re.M)
        assert float(expert) == 100
        assert float(chance) < (60 if game == "tic_tac_toe" else 40)


@pytest.mark.parametrize("game", GAMES)
class TestContract:
    def test_gymnasium_accepts_it(self, game):
        check_env(agentgym.make(game), skip_render_check=True)

    def test_reset_by_seed_needs_no_task(self, game):
        env = agentgym.make(game)
        first = env.reset(seed=5)
        assert first == agentgym.make(game).reset(seed=5)
        openings = {repr(env.reset(seed=seed)) + repr(env.task) for seed in range(8)}
        assert len(openings) > 4

    def test_no_step_after_the_end(self, game):
        env = agentgym.make(game)
        with pytest.raises(RuntimeError, match="reset"):
            env.step("up")
        play(env, env.tasks[0], "expert")
        with pytest.raises(RuntimeError, match="reset"):
            env.step("up")

    def test_turns_run_out(self, game):
        env = agentgym.make(game)
        env.reset(seed=1)
        for turn in range(1, env.max_turns + 1):
            observation, reward, terminated, truncated, info = env.step("?!")
            assert (terminated or truncated) == (turn == env.max_turns)
            assert "invalid: answer" in observation[0]["content"]
        assert (reward, info["success"], info["invalid"]) == (0.0, False, env.max_turns)

    def test_another_process_plays_the_same(self, game):
        one, other = played_twice(game)
        assert one == other
        assert len(one) > 8

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(replies=st.lists(st.text(st.characters(), max_size=60), min_size=1, max_size=9), seed=st.integers(0, 500))
    def test_any_unicode_is_answered(self, game, replies, seed):
        env = agentgym.make(game)
        env.reset(seed=seed)
        for reply in replies:
            observation, reward, terminated, truncated, info = env.step(reply)
            assert env.observation_space.contains(observation)
            assert 0 <= reward <= 1
            assert isinstance(info["success"], bool)
            if terminated or truncated:
                break

    @pytest.mark.parametrize("reply", ["", "\ud800", "rıght", "rİght", "ＵＰ", "١", "x9_", "<answer>" * 5000])
    def test_odd_replies_are_no_moves(self, game, reply):
        env = agentgym.make(game)
        env.reset(seed=2)
        _, reward, _, _, info = env.step(reply)
        assert reward == 0
        assert info["invalid"] == 1

    def test_messages_are_actions_too(self, game):
        env = agentgym.make(game)
        env.reset(seed=3)
        env.step({"role": "assistant", "content": None})
        *_, info = env.step({"role": "assistant", "content": env.expert_action()})
        assert info["invalid"] == 1

    def test_unknown_splits_are_refused(self, game):
        with pytest.raises(ValueError, match=r"validation.*train, test"):
            agentgym.spec(game).tasks("validation")

    def test_a_task_without_its_level_is_refused(self, game):
        with pytest.raises(ValueError, match=f"{game}.*'empty'"):
            agentgym.make(game).reset(options={"task": Task("empty")})

    def test_a_wrong_number_of_turns_is_refused(self, game):
        with pytest.raises(ValueError, match="max_turns"):
            agentgym.make(game, max_turns=0)


def forms(board):
    """The eight ways to turn and mirror a board; rows are lines."""
    rows, found = board.split("\n"), set()
    for _ in range(4):
        rows = ["".join(column) for column in zip(*rows[::-1], strict=True)]
        found |= {"\n".join(rows), "\n".join(row[::-1] for row in rows)}
    return found


def opponents_alike(level):
    """The texts of the opponents that play as this one does on a board that is turned or mirrored."""
    starter, order, care = level.split(" ")
    boards = [form.replace("\n", "") for form in forms("123\n456\n789")]
    return {f"{starter} {''.join(board[int(cell) - 1] for cell in order)} {care}" for board in boards}


# Of a level: what play cannot change of it, and all that are the same.
FIXED = {
    "frozen_lake": lambda level: level.replace("P", "_"),
    "sokoban": lambda level: level.translate(str.maketrans("$@*+", "__..")),
    "guess_number": str,
    "tic_tac_toe": str,
}
ALIKE = {"frozen_lake": forms, "sokoban": forms, "guess_number": lambda level: {level}, "tic_tac_toe": opponents_alike}


def levels_of(game, split, count):
    return [task.metadata["level"] for task in agentgym.spec(game).tasks(split).take(count)]


@pytest.mark.parametrize(
    ("game", "distinct"), [("frozen_lake", 500), ("sokoban", 250), ("guess_number", 1000), ("tic_tac_toe", 1000)]
)
class TestSplits:
    def test_no_test_level_is_a_train_level_turned_or_mirrored(self, game, distinct):
        alike, fixed = ALIKE[game], FIXED[game]
        held_out = [min(alike(fixed(level))) for level in levels_of(game, "test", 1000)]
        seen = {form for level in levels_of(game, "train", 4000) for form in alike(fixed(level))}
        assert len(set(held_out)) >= distinct
        assert len(seen) > 600
        assert not seen & set(held_out)

    def test_no_test_level_comes_twice_turned_or_mirrored(self, game, distinct):
        found = [min(ALIKE[game](level)) for level in levels_of(game, "test", 1000)]
        assert len(set(found)) == len(found) == 1000

    def test_a_level_is_the_same_whichever_were_asked_for_before(self, game, distinct):
        tasks, again = (agentgym.spec(game).tasks("test") for _ in range(2))
        assert tasks[150] == list(again.take(151))[150]


@settings(max_examples=200, deadline=None)
@given(rows=st.integers(1, 5), columns=st.integers(1, 5), data=st.data())
def test_the_least_form_is_one_of_the_eight_and_the_same_for_all(rows, columns, data):
    row = st.text("_OG#", min_size=columns, max_size=columns)
    board = "\n".join(data.draw(st.lists(row, min_size=rows, max_size=rows)))
    assert least_form(board) in forms(board)
    assert {least_form(form) for form in forms(board)} == {least_form(board)}


def test_where_settings_leave_few_levels_these_come_first_and_then_again():
    tasks = replace(agentgym.spec("frozen_lake"), kwargs={"size": 3}).tasks("test")
    found = [min(forms(task.metadata["level"])) for task in tasks]
    different = len(set(found))
    assert 15 < different < 1000
    assert len(set(found[:different])) == different


def test_wordle_and_countdown_share_nothing_between_splits_and_repeat_nothing():
    words = {split: [task.answer for task in agentgym.spec("wordle").tasks(split)] for split in ("train", "test")}
    rounds = {
        split: [
            (*sorted(task.metadata["numbers"]), task.answer)
            for task in agentgym.spec("countdown").tasks(split).take(4000)
        ]
        for split in ("train", "test")
    }
    for found in (words, rounds):
        assert not set(found["train"]) & set(found["test"])
        assert len(set(found["test"])) == len(found["test"])


def test_seeds_make_different_levels():
    for game in ("frozen_lake", "sokoban", "tic_tac_toe"):
        levels = [task.metadata["level"] for task in agentgym.spec(game).tasks("train").take(300)]
        assert len(set(levels)) > 290


def test_registering_imports_no_game():
    script = (
        "import sys; from agentgym_envs import register_all; register_all();"
        "assert not [m for m in sys.modules if m.startswith('agentgym_envs.games.')]"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
