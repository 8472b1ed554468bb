"""math_python and gsm8k_python: READMEs, every gold program, players, answers, and the real data."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path

import pytest
from gymnasium.utils.env_checker import check_env
from math_episodes import code, make, play_all, problem
from one_episode import play
from readme_parts import players, replay

import agentgym
from agentgym.checks.check_env import check_env as check_author
from agentgym.core.tasks import Task
from agentgym.processes.isolate import WAIT_SECONDS
from agentgym.sandbox import SandboxSpec
from agentgym.sandbox import acquire as acquire_sandbox
from agentgym_envs import math as package
from agentgym_envs import register_all
from agentgym_envs.math.math_python import own_problems, said_again, task_of
from agentgym_envs.math.symbolic import same_answer
from agentgym_envs.math.word_problems import load_svamp, own_word_problems

pytest.importorskip("mpmath")
pytestmark = pytest.mark.sandbox
register_all()

__all__ = ["make"]  # a fixture: used by its name

ENVS = ("math_python", "gsm8k_python")
OWN = {"math_python": own_problems, "gsm8k_python": own_word_problems}
PROBLEMS = [*own_problems("train"), *own_problems("test")]


@pytest.fixture
def own(monkeypatch, tmp_path):
    """The project's own problems, whatever this machine has."""
    monkeypatch.setenv("AGENTGYM_DATA", str(tmp_path))
    monkeypatch.setattr("agentgym.datasets.is_installed", lambda: False)


def readme(env_id):
    return Path(package.__file__).with_name(env_id).joinpath("README.md").read_text(encoding="utf-8")


def all_own(env_id):
    return [*OWN[env_id]("train"), *OWN[env_id]("test")]


@pytest.mark.parametrize("env_id", ENVS)
class TestEvery:
    def test_its_readme_replays(self, env_id):
        replay(readme(env_id), agentgym.make(env_id), OWN[env_id]("test"))

    def test_its_readme_has_the_numbers_of_simple_players_over_all_tasks(self, env_id):
        rows = players(readme(env_id))
        assert [row[0] for row in rows] == ["expert", "null", "random"]
        env = agentgym.make(env_id)
        for player, success, turns in rows:
            rng = random.Random(0)
            answers = {
                "expert": lambda e: e.expert_action(),
                "null": lambda e: "",
                "random": lambda e, rng=rng: e.random_action(rng),
            }
            ends = [play(env, task, answers[player]) for task in all_own(env_id)]
            assert f"{100 * sum(info['success'] for *_, info in ends) / len(ends):.1f}" == success
            assert f"{sum(n for _, n, _ in ends) / len(ends):.2f}" == turns
            assert (
                sum(total for total, *_ in ends) == len(ends) if player == "expert" else sum(t for t, *_ in ends) == 0
            )
        env.close()

    def test_many_at_a_time_do_as_well(self, env_id):
        ends = play_all(env_id, all_own(env_id), lambda env: env.expert_action(), concurrency=16)
        assert {end.reward for end in ends} == {1.0}

    @pytest.mark.usefixtures("own")
    def test_gymnasium_and_our_own_checker_find_nothing(self, env_id):
        check_env(agentgym.make(env_id))
        assert check_author(env_id) == []

    def test_a_thousand_of_them_take_no_sandbox(self, env_id, monkeypatch):
        monkeypatch.setattr("agentgym.sandbox.acquire", lambda *a, **k: pytest.fail("a sandbox was taken"))
        envs = [agentgym.make(env_id) for _ in range(1000)]
        for env in envs:
            env.close()

    @pytest.mark.parametrize("wrong", [{"timeout": 0}, {"max_output": 5}, {"max_turns": 0}])
    def test_wrong_settings_are_refused_by_name(self, env_id, wrong):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            agentgym.make(env_id, **wrong)

    def test_an_unknown_back_end_is_refused_with_the_nearest(self, env_id):
        env = agentgym.make(env_id, sandbox="dokcer")
        with pytest.raises(ValueError, match="did you mean docker"):
            env.reset(options={"task": problem()})


class TestProblems:
    def test_there_are_enough_of_every_kind_and_none_twice(self):
        assert (len(own_problems("train")), len(own_problems("test"))) == (40, 12)
        subjects = {"algebra", "number theory", "counting", "geometry", "calculus"}
        for split in ("train", "test"):
            assert {task.metadata["subject"] for task in own_problems(split)} == subjects
        texts = [task.messages[0]["content"] for task in PROBLEMS]
        assert len(set(texts)) == len(texts)
        answers = [task.answer for task in PROBLEMS]
        for form in (r"\frac", r"\sqrt", "pmatrix", r"\{", r"\infty", "x^", r"\pi", "y =", r"\%", "(3, -4)"):
            assert any(form in answer for answer in answers), form

    @pytest.mark.parametrize("task", PROBLEMS, ids=lambda task: task.id)
    def test_no_formula_of_the_question_is_the_answer_but_the_gold_one(self, task):
        question, gold = task.messages[0]["content"], str(task.answer)
        assert not said_again(question, gold, gold)
        for formula in re.findall(r"\$([^$]+)\$", question):
            assert said_again(question, gold, formula) or not same_answer(gold, formula), formula

    @pytest.mark.parametrize(
        ("question", "gold", "answer", "again"),
        [
            (r"Compute $\dbinom{8}{4}$.", "70", r"\dbinom{8}{4}", True),
            (r"Find \[ \left\lceil 3 \right\rceil + 1. \]", "4", r"\lceil3\rceil + 1", True),
            (r"Simplify $\frac{12}{18}$.", r"\frac23", r"\dfrac{12}{18}", True),
            (r"Which is larger, $\frac12$ or $\frac23$?", r"\frac{2}{3}", r"\frac23", False),
            (r"Which is larger, $\frac12$ or $\frac23$?", "0.5", r"\frac{1}{2}", False),
            (r"Is it $-5$ or $x = 5$?", "-5.0", "-5", False),
            (r"Factor $x^2 + 2x + 1$.", "(1 + x)^2", "(x + 1)^2", False),
        ],
    )
    def test_what_only_repeats_the_question(self, question, gold, answer, again):
        assert said_again(question, gold, answer) == again

    @pytest.mark.parametrize("task", PROBLEMS, ids=lambda task: task.id)
    def test_every_gold_program_prints_the_gold_answer(self, task, box):
        result = box.exec(["python3", "-c", task.metadata["program"]], timeout=60)
        assert result.exit_code == 0, result.stderr
        assert same_answer(result.stdout.strip().splitlines()[-1], str(task.answer), seconds=30)

    @pytest.fixture(scope="class")
    def box(self):
        with_box = acquire_sandbox(SandboxSpec())
        yield with_box
        with_box.close()

    def test_records_of_math_are_read(self):
        record = {
            "problem": "P",
            "solution": r"so \boxed{1} or \boxed{\frac{1}{2}}.",
            "type": "Algebra",
            "level": "Level 2",
        }
        task = task_of(record, "m", "train")
        assert (task.answer, task.metadata["subject"], task.metadata["level"]) == (r"\frac{1}{2}", "Algebra", "Level 2")
        assert task_of({"problem": "P", "solution": r"so $\boxed 9$."}, "m", "train").answer == "9"
        with pytest.raises(ValueError, match="m: no answer"):
            task_of({"problem": "P", "solution": "none"}, "m", "train")

    def test_data_in_the_folder_comes_first(self, tmp_path, monkeypatch):
        (tmp_path / "math").mkdir()
        (tmp_path / "math" / "test.jsonl").write_text(json.dumps({"problem": "P?", "answer": "3"}) + "\n")
        monkeypatch.setenv("AGENTGYM_DATA", str(tmp_path))
        tasks = agentgym.spec("math_python").tasks("test")
        assert [(task.answer, task.messages[0]["content"]) for task in tasks] == [("3", "P?")]

    @pytest.mark.usefixtures("own")
    def test_without_data_the_own_problems_are_taken(self):
        for split, size in (("train", 40), ("test", 12)):
            tasks = agentgym.spec("math_python").tasks(split)
            assert (len(tasks), tasks.source) == (size, "the project's own problems")
        with pytest.raises(ValueError, match="no split 'dev'"):
            agentgym.spec("math_python").tasks("dev")

    @pytest.mark.parametrize(
        ("task", "says"),
        [
            (Task("odd", answer="1"), "no messages"),
            (problem(None), "must be LaTeX"),
            (problem(""), "must be LaTeX"),
            (problem(True), "must be LaTeX"),
            (problem(["1"]), "must be LaTeX"),
        ],
    )
    def test_a_task_that_is_no_problem_is_refused(self, task, says):
        with pytest.raises(ValueError, match=says):
            agentgym.make("math_python").init(task)


@pytest.mark.data
class TestRealData:
    @pytest.fixture(autouse=True)
    def _real(self):
        if not os.environ.get("AGENTGYM_DATA"):
            pytest.skip("AGENTGYM_DATA names no folder with the real GSM8K and SVAMP")

    @pytest.mark.slow
    @pytest.mark.parametrize(("data", "size"), [("gsm8k", 1319), ("svamp", 1000)])
    def test_every_gold_solution_is_right_and_silence_is_not(self, data, size, sample):
        env = agentgym.make("gsm8k_python", data=data)
        tasks = list(env.default_tasks("test", data))
        if data == "svamp":
            tasks += list(env.default_tasks("train", data))
        assert len(tasks) == size
        tasks = sample(tasks, 25)
        ends = play_all("gsm8k_python", tasks, lambda env: env.expert_action(), data=data)
        assert [end.task_id for end in ends if end.reward != 1.0] == []
        assert {len(end.turns) for end in ends} <= {1, 2}
        rng = random.Random(1)
        for answer in (lambda env: "I do not know", lambda env: env.random_answer(rng)):
            ends = play_all("gsm8k_python", tasks, answer, data=data)
            assert sum(end.reward for end in ends) / len(tasks) < 0.03

    def test_the_splits_of_svamp_share_no_problem(self):
        train, test = (
            {
                task.messages[0]["content"]
                for task in agentgym.make("gsm8k_python", data="svamp").default_tasks(split, "svamp")
            }
            for split in ("train", "test")
        )
        assert not train & test
        assert len(test) > 80

    def test_svamp_is_drawn_from_by_reset_with_and_without_the_registry(self):
        from agentgym_envs.math.gsm8k_python import GSM8KPython

        for env in (agentgym.make("gsm8k_python", data="svamp"), GSM8KPython(data="svamp")):
            env.reset(seed=3)
            assert env.task.id.startswith("svamp-")
            env.close()


def test_svamp_that_is_not_there_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTGYM_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"svamp/svamp.jsonl"):
        load_svamp("train")
    with pytest.raises(ValueError, match="no split"):
        load_svamp("dev")
    with pytest.raises(ValueError, match="gsm8k, svamp"):
        agentgym.make("gsm8k_python", data="aqua")


class TestAnswers:
    @pytest.mark.parametrize(
        ("gold", "reply"),
        [
            (r"\frac{1}{2}", r"\boxed{0.5}"),
            (r"\frac{1}{2}", r"first \boxed{2}, no: \boxed{\frac12}."),
            ("(-3, 4)", r"<think>\boxed{1}</think>\boxed{-3 < x < 4}"),
            (r"\{2, 5\}", r"\boxed{5, 2}"),
            (18, r"\boxed{18}"),
            (0.5, r"\boxed{\frac{1}{2}}"),
        ],
    )
    def test_a_right_answer_ends_with_1(self, make, gold, reply):
        env = make(task=problem(gold))
        observation, reward, terminated, truncated, info = env.step(reply)
        assert observation == [{"role": "user", "content": "Correct."}]
        assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
        assert info["expected"] == str(gold)

    @pytest.mark.parametrize(
        "reply", [r"\boxed{19}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{\text{eighteen}}", r"\boxed{17 18}"]
    )
    def test_any_other_ends_with_0(self, make, reply):
        _, reward, terminated, _, info = make().step(reply)
        assert (reward, terminated, info["success"]) == (0.0, True, False)

    @pytest.mark.parametrize(
        ("reply", "says"),
        [
            ("The answer is 18.", "neither a block of Python nor an answer"),
            (r"\boxed{18", "I cannot read the answer: the braces of \\boxed{...} are not closed."),
            (r"\boxed{}", "is empty"),
            ("```python\n18", "block is not closed"),
            ("<tool_call>python</tool_call>", "one JSON object"),
            ('<tool_call>{"name": "pyton", "arguments": {"code": "1"}}</tool_call>', "the tools are: python"),
            ('<tool_call>{"name": "python", "arguments": {}}</tool_call>', 'the argument "code" is missing'),
            ('<tool_call>{"name": "python", "arguments": {"code": 3}}</tool_call>', "must be string, not integer"),
        ],
    )
    def test_a_reply_that_cannot_be_read_is_told_why_and_costs_a_turn(self, make, reply, says):
        env = make()
        observation, reward, terminated, truncated, _ = env.step(reply)
        assert says in observation[0]["content"]
        assert (reward, terminated, truncated, env.turn) == (0.0, False, False, 1)
        assert env.step(r"\boxed{18}")[1] == 1.0

    @pytest.mark.parametrize("reply", ["#### 18", r"\boxed{18}", "The answer is $18.00."])
    def test_word_problems_take_what_gsm8k_takes(self, make, reply):
        assert make("gsm8k_python").step(reply)[1:3] == (1.0, True)

    def test_fractions_that_no_decimal_is_are_compared_exactly(self, make):
        assert make("gsm8k_python", problem("1/3")).step("#### 1/3")[1] == 1.0
        assert make("gsm8k_python", problem("1/3")).step("#### 0.333333")[1] == 0.0

    def test_an_answer_beside_code_waits_for_the_result(self, make):
        env = make()
        assert env.step(code("9 * 2") + r" \boxed{18}")[2] is False
        assert env.step(r"\boxed{18}")[1] == 1.0


def test_a_comparison_may_wait_for_others():
    """Each takes a worker process for up to its limit, and there are few."""
    assert agentgym.make("math_python").unwrapped.step_seconds > WAIT_SECONDS
