"""Adapters against the real packages from PyPI, which lie in a folder of their own, since a few of their pins clash with ours.

A driver in `foreign/` finds that folder before our packages, plays the same replies through the adapter and with the package
alone, and reports both.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOREIGN = Path(__file__).parent / "foreign"
PINS = FOREIGN / "packages.txt"
UNREACHABLE = re.compile(r"NewConnectionError|NameResolutionError|Network is unreachable|ConnectTimeout|ProxyError")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def packages(pytestconfig):
    """The folder with the packages of `foreign/packages.txt`, filled once and kept in pytest's cache."""
    kept = pytestconfig.cache.mkdir("agentgym_foreign")
    folder = kept / hashlib.sha256(PINS.read_bytes() + sys.version.encode()).hexdigest()[:12]
    if not folder.exists():
        for old in kept.iterdir():
            if not old.name.startswith("."):  # one that another process is filling
                shutil.rmtree(old)
        with tempfile.TemporaryDirectory(prefix=".", dir=kept) as new:
            installed = install(Path(new, "packages"))
            if not folder.exists():
                installed.rename(folder)
    return folder


def install(folder):
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile", "--target", folder]
    command = [sys.executable, "-m", "pip", "install", *options, "--requirement", PINS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode and UNREACHABLE.search(done.stderr):
        pytest.skip(f"no package index can be reached, so the packages are not at hand: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    return folder


def driven(package, packages, *arguments):
    """What the driver of a package reports."""
    env = {k: v for k, v in os.environ.items() if k not in ("AGENTGYM_DATA", "PYTHONHOME")}
    env |= {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, FOREIGN, packages))),
        "HF_HUB_OFFLINE": "1",
        "MPLBACKEND": "agg",
    }
    done = subprocess.run(
        [sys.executable, FOREIGN / f"drive_{package}.py", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def pettingzoo(packages):
    return driven("pettingzoo", packages)


@pytest.fixture(scope="module")
def reasoning_gym(packages):
    return driven("reasoning_gym", packages)


@pytest.fixture(scope="module")
def skyrl_gym(packages, tmp_path_factory):
    return driven("skyrl_gym", packages, tmp_path_factory.mktemp("skyrl"))


@pytest.fixture(scope="module")
def verifiers(packages):
    return driven("verifiers", packages)


# ---- pettingzoo


@pytest.mark.parametrize("game", ["tictactoe", "rps"])
def test_games_go_as_pettingzoo_plays_them_in_turns_and_at_the_same_time(pettingzoo, game):
    ours, direct = pettingzoo[game]
    assert ours["error"] is None
    assert [ours[key] for key in ("players", "seen", "rewards")] == [
        direct[key] for key in ("players", "seen", "rewards")
    ]
    assert direct["over"]
    assert ours["end"] == {"tictactoe": "terminated", "rps": "truncated"}[game]
    assert ours["final"][0]["content"].startswith("It is over: ")


def test_a_parallel_game_asks_all_in_each_round_and_those_who_are_out_no_more(pettingzoo):
    auction = pettingzoo["auction"]
    assert auction["players"] == ["a", "b", "c", "a", "c"]
    assert auction["seen"] == ["3", "3", "3", "2", "2"]
    assert auction["rewards"] == {"a": 2.0, "b": -1.0, "c": -1.0}
    assert (auction["end"], auction["error"]) == ("terminated", None)


def test_a_reply_that_is_no_action_of_a_game_is_replaced_and_earns_nothing(pettingzoo):
    nonsense = pettingzoo["nonsense"]
    assert nonsense["infos"][0]["invalid"] is True
    assert nonsense["players"][:2] == ["player_1", "player_2"]
    assert min(nonsense["rewards"].values()) == -1.0, "a cell that is taken ends the game, by its own rules"


def test_a_replaced_reply_earns_nothing_either_when_the_others_have_acted(pettingzoo):
    garbled = pettingzoo["garbled"]["rewards"]
    assert garbled["player_0"] <= 0
    assert garbled["player_1"] < -garbled["player_0"], "player_0 was not paid for the rounds that chance won"


def test_players_of_pettingzoo_are_told_who_they_are_what_is_legal_and_see_pictures_of_text(pettingzoo):
    opening = pettingzoo["tictactoe"][0]["opening"]
    assert "place 3 of their marks" in opening
    assert "You are player_1. Answer with a whole number from 0 to 8." in opening
    assert opening.endswith("Legal actions: 0, 1, 2, 3, 4, 5, 6, 7, 8")
    assert pettingzoo["named"]["rewards"] == {"player_0": -1.0, "player_1": 1.0}
    assert "P P P P P P P P" in pettingzoo["chess"]
    assert "<a href" not in pettingzoo["chess"]


def test_players_of_pettingzoo_are_told_what_numbers_mean_also_in_parts_of_parts(pettingzoo):
    opening = pettingzoo["rps"][0]["opening"]
    assert "Rock is 0, paper is 1 and scissors is 2." in opening
    assert "3 represents no action taken yet" in opening
    assert "Legal Actions Mask\n" not in pettingzoo["tictactoe"][0]["opening"]


def test_the_check_accepts_pettingzoo_and_what_cannot_be_played_is_told(pettingzoo):
    assert list(pettingzoo["checks"].values()) == [[], []]
    assert "among them classic/tictactoe-v3" in pettingzoo["unknown"][1]
    assert "among them classic/rps-v2, classic/go-v5" in pettingzoo["in_both"][1], "each name once"
    assert pettingzoo["unseen"][0] == "TypeError"
    assert "cannot be shown as text" in pettingzoo["unseen"][1]


# ---- reasoning_gym

# Data sets whose entries carry no full answer of their own: any answer that fits wins, and their `answer` scores less.
UNANSWERED = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


# Data sets whose own scores pay for wrong answers.
OVERPAID = {"coin_flip", "complex_arithmetic", "game_of_life_halting"}


def test_every_data_set_poses_and_scores_as_the_package_does(reasoning_gym):
    found = reasoning_gym["datasets"]
    assert len(found) > 100
    for name, case in found.items():
        assert case["question"] == case["direct question"], name
        if name in OVERPAID:
            continue
        # What makes `score_answer` raise counts 0 here.
        assert case["rewards"] == [0.0 if isinstance(r, str) else r for r in case["direct rewards"]], name


def test_wrong_answers_that_data_sets_pay_in_full_are_not(reasoning_gym):
    assert reasoning_gym["overpaid"].keys() == OVERPAID
    for name, rewards in reasoning_gym["overpaid"].items():
        assert max(rewards) < 0.5, name


def test_the_data_sets_own_answers_score_the_maximum_and_others_less(reasoning_gym):
    found = reasoning_gym["datasets"]
    assert {name for name, case in found.items() if case["rewards"][0] < 1.0} == UNANSWERED
    assert {name for name, case in found.items() if case["expert"] != "plays"} == UNANSWERED
    random = [case["rewards"][1] for case in found.values()]
    assert sum(random) / len(random) < 0.15


def test_an_answer_that_computes_for_ever_scores_0_and_holds_up_nobody(reasoning_gym):
    _, reward, terminated, _, info = reasoning_gym["endless"]
    assert (reward, terminated, info) == (0.0, True, {"success": False, "timed_out": True})


def test_an_answer_that_is_a_program_is_not_run(reasoning_gym):
    assert reasoning_gym["programs"] == {"polynomial_multiplication": [0.0] * 5, "n_queens": [0.0] * 5}
    assert max(reasoning_gym["formulas"]) < 1.0


def test_the_splits_of_a_data_set_differ_and_the_check_passes(reasoning_gym):
    size, shared = reasoning_gym["splits"]
    assert size == 200
    assert shared == 0
    assert reasoning_gym["check"] == []


def test_wrong_names_and_settings_of_reasoning_gym_are_told(reasoning_gym):
    kind, text = reasoning_gym["unknown"]
    assert kind == "UnknownEnvError"
    assert "among them chain_sum" in text
    kind, text = reasoning_gym["settings"]
    assert kind == "ValueError"
    assert "refuses its settings {'terms': 2}" in text
    assert reasoning_gym["no_table"] == ["TypeError", "settings must be a table of JSON values, not 'terms=2'"]
    assert "take tasks from default_tasks" in reasoning_gym["foreign_task"][1]
    assert "set the same PYTHONHASHSEED in all" in reasoning_gym["altered"][1]


# ---- skyrl_gym

SKYRL_ENDS = {"gsm8k right": 1.0, "gsm8k wrong": 0.0, "turns": 1.0, "aime": 1.0, "sql right": 1.0, "search": 1.0}


def test_skyrl_episodes_go_as_the_package_plays_them(skyrl_gym):
    for name, case in skyrl_gym["cases"].items():
        ours, direct = case["ours"], case["direct"]
        assert ours["error"] is None, name
        assert ours["rewards"] == direct["rewards"], name
        assert [*ours["observations"], ours["final"]] == direct["observations"], name
        assert (ours["end"] == "terminated") == direct["done"], name
        assert direct["metrics"].items() <= ours["info"].items(), name


def test_skyrl_rewards_tell_right_from_wrong(skyrl_gym):
    ends = {name: case["ours"]["rewards"][-1] for name, case in skyrl_gym["cases"].items()}
    assert {name: ends[name] for name in SKYRL_ENDS} == SKYRL_ENDS
    assert ends["sql wrong"] < ends["sql right"]
    assert len(skyrl_gym["cases"]["turns used up"]["ours"]["rewards"]) == 2
    seen = skyrl_gym["cases"]["sql right"]["ours"]["observations"][1][0]["content"]
    assert "<observation>" in seen or "a" in seen


def test_every_shipped_word_problem_is_won_by_its_answer(skyrl_gym):
    assert skyrl_gym["golds"] == [1.0] * 40
    assert skyrl_gym["checks"] == {"gsm8k": [], "gsm8k_multi_turn": []}


def test_a_file_in_skyrls_form_makes_tasks(skyrl_gym):
    task = skyrl_gym["file"]["task"]
    assert task["id"] == "gsm8k-train-0"
    assert task["answer"] == "3"
    extras = {"reward_spec": {"method": "rule", "ground_truth": "3"}, "data_source": "x"}
    assert task["metadata"]["extras"] == extras
    assert skyrl_gym["file"]["reward"] == [1.0]


def test_what_skyrl_refuses_is_told(skyrl_gym):
    assert skyrl_gym["unknown"][0] == "UnknownEnvError"
    assert "gsm8k" in skyrl_gym["unknown"][1]
    assert "give data=FILE" in skyrl_gym["no_tasks"][1]
    assert skyrl_gym["no_split"] == [
        "ValueError",
        "skyrl_gym:aime has no split 'test': there is no file aime-test.jsonl",
    ]
    assert "skyrl_gym:text2sql refuses task 't': db_id field is required" in skyrl_gym["refused"]["error"]


# ---- verifiers


def texts(messages):
    return [(message["role"], message["content"]) for message in messages if message["role"] != "assistant"]


def test_rollouts_go_as_verifiers_plays_them(verifiers):
    for name, case in verifiers["cases"].items():
        ours, direct = case["ours"], case["direct"]
        assert ours["error"] is None, name
        assert sum(ours["rewards"]) == pytest.approx(direct["reward"]), name
        assert set(ours["rewards"][:-1]) <= {0.0}, name
        shown = [message for observation in [*ours["observations"], ours["final"]] for message in observation]
        assert texts(shown) == texts(direct["messages"]), name
        assert direct["metrics"].items() <= ours["info"].items(), name
        assert ours["info"]["stop_condition"] == direct["stop_condition"], name


def test_verifiers_rewards_and_ends(verifiers):
    found = {name: (case["ours"]["end"], sum(case["ours"]["rewards"])) for name, case in verifiers["cases"].items()}
    assert found == {
        "single right": ("terminated", pytest.approx(1 - 0.025)),
        "single wrong": ("terminated", pytest.approx(-0.025)),
        "turns right": ("terminated", pytest.approx(1 - 0.07)),
        "turns used up": ("truncated", pytest.approx(-0.01)),
        "turns quit": ("terminated", pytest.approx(-0.025)),
        "tool right": ("terminated", pytest.approx(1 - 0.025)),
        "tool misused": ("terminated", pytest.approx(1 - 0.025)),
    }
    assert texts(verifiers["cases"]["turns quit"]["ours"]["final"]) == [("user", "bye")]


def test_tools_are_offered_as_openai_schemas(verifiers):
    [schema] = verifiers["tools"]
    assert schema["function"]["name"] == "backward"
    assert schema["function"]["parameters"]["required"] == ["word"]


def test_an_environment_that_raises_fails_its_trajectory_and_an_empty_reply_does_not(verifiers):
    assert verifiers["crashed"]["end"] == "error"
    assert "the rollout failed: RuntimeError: the hint book is gone" in verifiers["crashed"]["error"]
    assert verifiers["judged"]["end"] == "error", "verifiers itself scores 0 where its judge cannot be reached"
    assert "the rollout failed: RuntimeError: Judge model API error" in verifiers["judged"]["error"]
    assert verifiers["silent"]["error"] is None
    assert sum(verifiers["silent"]["rewards"]) == pytest.approx(1 - 0.025)


def test_tasks_are_the_rows_of_the_data_sets(verifiers):
    train, test = verifiers["tasks"]["train"], verifiers["tasks"]["test"]
    assert [task["answer"] for task in train] == ["elppa", "raep"]
    assert train[0]["metadata"]["row"]["info"] == {"word": "apple"}
    assert [task["id"] for task in test] == ["vf_letters-test-0"]
    assert verifiers["no_split"][0] == "ValueError"
    assert verifiers["checks"] == {"single": [], "tool": [], "turns": []}


def test_a_package_that_is_not_installed_is_named(verifiers):
    kind, text = verifiers["missing"]
    assert kind == "ImportError"
    assert "cannot import its package 'no_such_env'" in text
