"""gsm8k, gsm8k_tool, gsm8k_team and countdown: their READMEs, players, splits, and steadiness under any reply."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st
from one_episode import play
from other_process import played_twice
from readme_parts import players, replay

import agentgym
from agentgym.checks.check_env import check_env as check_author
from agentgym.core.messages import assistant
from agentgym.core.tasks import Task, TaskSet
from agentgym_envs import math as package
from agentgym_envs import register_all
from agentgym_envs.math.arithmetic import compute, parse
from agentgym_envs.math.countdown import random_expression, solve
from agentgym_envs.math.word_problems import calculations_of, own_word_problems, solution_of

ENVS = ("gsm8k", "gsm8k_tool", "gsm8k_team", "countdown")
REAL = pytest.mark.data
register_all()


@pytest.fixture
def own(monkeypatch):
    """The project's own problems, whatever this machine has."""
    monkeypatch.delenv("AGENTGYM_DATA", raising=False)
    monkeypatch.setattr("agentgym.datasets.is_installed", lambda: False)


@pytest.fixture
def real():
    if not os.environ.get("AGENTGYM_DATA"):
        pytest.skip("AGENTGYM_DATA names no folder with the real GSM8K")


def readme(env_id):
    return Path(package.__file__).with_name(env_id).joinpath("README.md").read_text(encoding="utf-8")


def own_tasks(env_id, split="test"):
    return agentgym.spec(env_id).tasks(split) if env_id == "countdown" else own_word_problems(split)


def call(expression):
    return f"<tool_call>{json.dumps({'name': 'calculator', 'arguments': {'expression': expression}})}</tool_call>"


def problem(answer="18", **more):
    return Task("mine", ({"role": "user", "content": "How many?"},), answer, **more)


def started(env_id, task=None, **kwargs):
    env = agentgym.make(env_id, **kwargs)
    env.reset(options={"task": task or problem()})
    return env


@pytest.mark.parametrize("env_id", ENVS)
class TestEvery:
    def test_its_readme_replays(self, env_id):
        replay(readme(env_id), agentgym.make(env_id), own_tasks(env_id).take(10))

    def test_its_readme_has_the_numbers_of_simple_players(self, env_id):
        rows = players(readme(env_id))
        assert [row[0] for row in rows] == ["expert", "random"]
        for player, success, turns in rows:
            rng, env = random.Random(0), agentgym.make(env_id)
            answer = (lambda e: e.expert_action()) if player == "expert" else (lambda e, rng=rng: e.random_action(rng))
            ends = [play(env, task, answer) for task in own_tasks(env_id)]
            assert f"{100 * sum(info['success'] for *_, info in ends) / len(ends):.1f}" == success
            assert f"{sum(n for _, n, _ in ends) / len(ends):.2f}" == turns

    def test_an_empty_reply_earns_nothing(self, env_id):
        env = agentgym.make(env_id)
        for task in own_tasks(env_id).take(10):
            total, turns, info = play(env, task, lambda e: "")
            assert (total, turns, info["success"]) == (0.0, env.max_turns, False)

    def test_a_random_player_earns_next_to_nothing(self, env_id):
        rng, env = random.Random(1), agentgym.make(env_id)
        totals = [play(env, task, lambda e: e.random_action(rng))[0] for task in own_tasks(env_id, "train").take(100)]
        assert sum(totals) / len(totals) < 0.15

    @pytest.mark.usefixtures("own")
    def test_gymnasium_and_our_own_checker_find_nothing(self, env_id):
        check_env(agentgym.make(env_id))
        assert check_author(env_id) == []

    @pytest.mark.usefixtures("own")
    def test_another_process_plays_the_same(self, env_id, monkeypatch):
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        one, other = played_twice(env_id)
        assert one == other
        assert len(one) > 8

    @settings(max_examples=60, deadline=None)
    @given(text=st.text(st.characters(), max_size=60))
    def test_any_text_is_an_action(self, env_id, text):
        env = agentgym.make(env_id)
        env.reset(options={"task": own_tasks(env_id)[0]})
        observation, reward, _, _, info = env.step(text)
        assert observation in env.observation_space
        assert reward == float(info["success"])
        json.dumps([observation, info], ensure_ascii=False).encode("utf-8")

    def test_a_step_after_the_end_or_before_the_start_is_refused(self, env_id):
        env = agentgym.make(env_id)
        with pytest.raises(RuntimeError, match="reset"):
            env.step("1")
        with pytest.raises(RuntimeError, match="reset"):
            env.expert_action()
        play(env, own_tasks(env_id)[0], lambda e: e.expert_action())
        with pytest.raises(RuntimeError, match="reset"):
            env.step("1")

    def test_an_unknown_split_is_refused(self, env_id):
        with pytest.raises(ValueError, match="no split 'dev'"):
            agentgym.spec(env_id).tasks("dev")


class TestWordProblems:
    def test_there_are_40_of_our_own_with_right_calculations(self):
        assert [len(own_word_problems(split)) for split in ("train", "test")] == [30, 10]
        questions = set()
        for split in ("train", "test"):
            for task in own_word_problems(split):
                questions.add(task.messages[0]["content"])
                marks = re.findall(r"<<([^=]*)=([^>]*)>>([\d.,-]+)", task.metadata["solution"])
                assert marks
                for expression, result, shown in marks:
                    assert compute(parse(expression)) == compute(parse(result)) == compute(parse(shown.rstrip(".,")))
                assert compute(parse(marks[-1][1])) == compute(parse(task.answer))
        assert len(questions) == 40

    @pytest.mark.usefixtures("own")
    def test_the_source_says_that_they_are_our_own(self):
        tasks = agentgym.TaskSet.load("gsm8k", split="test")
        assert (len(tasks), tasks.source) == (10, "the project's own word problems")

    @pytest.mark.parametrize("env_id", ["gsm8k", "gsm8k_tool"])
    def test_gold_scores_1(self, env_id):
        env = agentgym.make(env_id)
        for task in [*own_word_problems("train"), *own_word_problems("test")]:
            total, _, info = play(env, task, lambda e: e.expert_action())
            assert (total, info["success"]) == (1.0, True)

    @REAL
    @pytest.mark.usefixtures("real")
    @pytest.mark.parametrize(("split", "size"), [("train", 7473), ("test", 1319)])
    def test_every_real_gold_scores_1(self, split, size):
        tasks = agentgym.spec("gsm8k").tasks(split)
        assert len(tasks) == size
        assert tasks.source.endswith(f"{split}.jsonl")
        env = agentgym.make("gsm8k", tasks=tasks)
        assert [task.id for task in tasks if play(env, task, lambda e: e.expert_action())[0] != 1.0] == []
        bare = [task.id for task in tasks if play(env, task, lambda e: f"#### {e.task.answer}")[0] != 1.0]
        assert bare == []

    @REAL
    @pytest.mark.usefixtures("real")
    def test_every_real_gold_scores_1_with_the_calculator(self):
        tasks = agentgym.spec("gsm8k_tool").tasks("test")
        env = agentgym.make("gsm8k_tool", tasks=tasks)
        assert [task.id for task in tasks if play(env, task, lambda e: e.expert_action())[0] != 1.0] == []

    @REAL
    @pytest.mark.usefixtures("real")
    def test_every_real_calculation_can_be_computed(self):
        calculations = [
            c for split in ("train", "test") for t in agentgym.spec("gsm8k").tasks(split) for c in calculations_of(t)
        ]
        assert len(calculations) > 25_000
        for calculation in calculations:
            compute(parse(calculation))

    def test_the_solution_is_shown_without_annotations(self):
        task = problem(metadata={"solution": "She has 9 * 2 = <<9*2=18>>18.\n#### 18"})
        assert solution_of(task) == "She has 9 * 2 = 18.\n#### 18"
        assert calculations_of(task) == ["9*2"]
        assert solution_of(problem()) == "#### 18"

    @pytest.mark.parametrize("env_id", ["gsm8k", "gsm8k_tool"])
    def test_a_task_without_question_or_number_is_refused_by_its_id(self, env_id):
        env = agentgym.make(env_id)
        with pytest.raises(ValueError, match=r"'mine'.*no messages"):
            env.init(Task("mine", answer="3"))
        with pytest.raises(ValueError, match=r"'mine'.*must be a number.*eighteen"):
            env.init(problem("eighteen"))


class TestGSM8K:
    @pytest.mark.parametrize(
        "reply", ["#### 18", "#### $18.00", r"\boxed{18}", "The answer is 18.", "9 * 2 = 18", "36/2"]
    )
    def test_a_right_answer_ends_with_1(self, reply):
        observation, reward, terminated, truncated, info = started("gsm8k").step(reply)
        assert observation == [{"role": "user", "content": "Correct."}]
        assert (reward, terminated, truncated) == (1.0, True, False)
        assert (info["success"], info["answer"], info["expected"]) == (True, "18", "18")

    @pytest.mark.parametrize(
        ("reply", "answer"), [("#### 19", "19"), ("eighteen", None), ("#### 18 * 1", None), ("", None)]
    )
    def test_any_other_ends_with_0(self, reply, answer):
        _, reward, terminated, _, info = started("gsm8k").step(reply)
        assert (reward, terminated, info["success"], info["answer"]) == (0.0, True, False, answer)

    def test_the_form_can_be_rewarded(self):
        for reply, reward in [("#### 18", 1.25), ("#### 19", 0.25), ("18", 1.0), ("19", 0.0)]:
            assert started("gsm8k", format_reward=0.25).step(reply)[1] == reward

    @pytest.mark.parametrize("wrong", [float("nan"), float("inf"), "0.25", True])
    def test_its_reward_is_a_number(self, wrong):
        with pytest.raises(ValueError, match="gsm8k: format_reward must be a number"):
            agentgym.make("gsm8k", format_reward=wrong)

    def test_answers_may_be_numbers_and_questions_of_many_messages(self):
        shots = [
            {"role": "system", "content": "Ünï"},
            {"role": "user", "content": [{"type": "text", "text": "Wie viele?"}]},
        ]
        task = Task("mine", tuple(shots), 0.5)
        env = agentgym.make("gsm8k")
        observation, _ = env.reset(options={"task": task})
        assert observation[0] == shots[0]
        assert [part["type"] for part in observation[1]["content"]] == ["text", "text"]
        assert '"####"' in observation[1]["content"][1]["text"]
        assert task.messages == tuple(shots)
        assert env.step("#### 1/2")[1] == 1.0

    def test_an_answer_in_content_parts_counts(self):
        parts = {"role": "assistant", "content": [{"type": "text", "text": "#### 18"}]}
        assert started("gsm8k").step(parts)[1] == 1.0


class TestGSM8KTool:
    def test_it_tells_its_tool_to_both_kinds_of_model(self):
        env = agentgym.make("gsm8k_tool")
        assert env.tools[0]["function"]["name"] == "calculator"
        assert list(env.tools[0]["function"]["parameters"]["properties"]) == ["expression"]
        observation, _ = env.reset(options={"task": problem()})
        example = re.search(r"<tool_call>.*</tool_call>", observation[0]["content"])[0]
        assert env.step(example)[0][0]["content"] == "<tool_response>\n48\n</tool_response>"

    def test_native_calls_are_answered_by_tool_messages(self):
        env = started("gsm8k_tool")
        calls = [
            {
                "id": f"c{n}",
                "type": "function",
                "function": {"name": "calculator", "arguments": json.dumps({"expression": e})},
            }
            for n, e in enumerate(["9 * 2", "1 / 0"])
        ]
        observation, reward, terminated, truncated, info = env.step({**assistant(""), "tool_calls": calls})
        assert observation == [
            {"role": "tool", "tool_call_id": "c0", "content": "18"},
            {"role": "tool", "tool_call_id": "c1", "content": "Error: calculator: division by zero in 1 / 0"},
        ]
        assert (reward, terminated, truncated, info) == (0.0, False, False, {"success": False})
        assert env.step("#### 18")[1:3] == (1.0, True)

    @pytest.mark.parametrize(
        ("reply", "says"),
        [
            (call("9 ** 9 ** 9"), "too large"),
            (call("__import__('os').system('id')"), "cannot be in an expression"),
            (call("1+" * 1000), "characters"),
            ('<tool_call>{"name": "calc", "arguments": {"expression": "1"}}</tool_call>', "the tools are: calculator"),
            ('<tool_call>{"name": "calculator", "arguments": {}}</tool_call>', '"expression" is missing'),
            ("<tool_call>1 + 1</tool_call>", "there must be one JSON object"),
            ("<tool_call>", "without </tool_call>"),
        ],
    )
    def test_a_wrong_call_is_told_and_the_episode_goes_on(self, reply, says):
        env = started("gsm8k_tool")
        observation, reward, terminated, truncated, _ = env.step(reply)
        assert says in observation[0]["content"]
        assert (reward, terminated, truncated, env.turn) == (0.0, False, False, 1)
        assert env.step("#### 18")[1] == 1.0

    def test_an_answer_beside_a_call_waits_for_the_result(self):
        env = started("gsm8k_tool")
        assert env.step(call("9 * 2") + "\n#### 18")[2] is False

    def test_a_reply_of_neither_kind_gets_a_hint_and_costs_a_turn(self):
        env = started("gsm8k_tool", max_turns=3)
        for reply in ("I think it is 18", "#### 9 * 2"):
            observation, reward, terminated, truncated, _ = env.step(reply)
            assert "neither a calculator call nor an answer" in observation[0]["content"]
            assert (reward, terminated, truncated) == (0.0, False, False)
        assert env.step("hm")[1:] == (0.0, False, True, {"success": False})

    def test_six_turns_are_the_default(self):
        env = started("gsm8k_tool")
        ends = [env.step(call("1 + 1"))[2:4] for _ in range(6)]
        assert ends == [(False, False)] * 5 + [(False, True)]

    def test_the_expert_leaves_a_turn_for_its_answer(self):
        solution = "".join(f"<<{n}+1={n + 1}>>" for n in range(9)) + "#### 18"
        task = problem(metadata={"solution": solution})
        for turns in (1, 2, 6, 20):
            env = agentgym.make("gsm8k_tool", max_turns=turns)
            assert play(env, task, lambda e: e.expert_action())[:2] == (1.0, min(turns, 10))


def countdown(numbers=(3, 4, 9), target=21, **kwargs):
    return started("countdown", Task("mine", answer=target, metadata={"numbers": list(numbers)}), **kwargs)


class TestCountdown:
    @pytest.mark.parametrize(
        "reply",
        [
            "<answer>(3 + 4) * (9 / 3)</answer> no, <answer>9 + 3 * 4</answer>",
            "<answer>3*4+9</answer>",
            "<answer>3 × 4 + 9 = 21</answer>",
            "I multiply.\n3 * 4 + 9",
            "3 * 4 + 9 = 21",
            "<think><answer>1</answer></think><answer>9 - -3 * 4</answer>",
            "<answer>\n(3 * 4)\n + 9</answer>",
        ],
    )
    def test_the_target_ends_the_episode_with_1(self, reply):
        observation, reward, terminated, _, info = countdown().step(reply)
        assert observation[0]["content"] == "Correct."
        assert (reward, terminated, info) == (1.0, True, {"success": True, "value": "21"})

    @pytest.mark.parametrize(
        ("reply", "says"),
        [
            ("<answer>3 + 4</answer>", "3 + 4 = 7, not 21. 2 attempts left."),
            ("<answer>9 / (3 + 4)</answer>", "9 / (3 + 4) = 1.28571428571, not 21. 2 attempts left."),
            ("<answer>3 * 7</answer>", "Not valid: 7 is not among the numbers. 2 attempts left."),
            ("<answer>9 + 9 + 3</answer>", "Not valid: 9 is used too often. 2 attempts left."),
            ("<answer>34 - 9</answer>", "Not valid: 34 is not among the numbers. 2 attempts left."),
            ("<answer>21</answer>", "Not valid: 21 is not among the numbers. 2 attempts left."),
            ("<answer>9 / (3 - 3)</answer>", "Not valid: 3 is used too often. 2 attempts left."),
            ("<answer>9 ** 3</answer>", "Not valid: the operator ** is not allowed: use + - * /. 2 attempts left."),
            ("<answer></answer>", "Not valid: the expression is empty. 2 attempts left."),
            ("", "Not valid: the expression is empty. 2 attempts left."),
        ],
    )
    def test_any_other_reply_is_told_what_it_came_to(self, reply, says):
        observation, reward, terminated, truncated, info = countdown().step(reply)
        assert observation[0]["content"] == says
        assert (reward, terminated, truncated, info["success"]) == (0.0, False, False, False)

    def test_a_number_given_twice_may_be_used_twice(self):
        assert countdown((3, 3, 5), 45).step("<answer>3 * 3 * 5</answer>")[1] == 1.0
        assert countdown((3, 3, 5), 27).step("<answer>3 * 3 * 3</answer>")[1] == 0.0

    def test_a_value_close_to_the_target_is_not_the_target(self):
        assert countdown((1, 3, 9), 3).step("<answer>9 * (1 / 3)</answer>")[1] == 1.0
        assert countdown((1, 3, 1000), 333).step("<answer>1000 / 3</answer>")[1] == 0.0

    def test_three_wrong_attempts_end_it(self):
        env = countdown()
        for left in (2, 1):
            assert env.step("3 + 4")[0][0]["content"].endswith(f"{left} attempt{'s' * (left > 1)} left.")
        observation, _, terminated, truncated, info = env.step("3 + 4")
        assert observation[0]["content"] == "3 + 4 = 7, not 21."
        assert (terminated, truncated, info["success"]) == (False, True, False)

    def test_every_round_has_a_solution_and_takes_two_numbers(self):
        for split in ("train", "test"):
            for task in agentgym.spec("countdown").tasks(split).take(150):
                assert len(task.metadata["numbers"]) in (3, 4)
                assert task.answer not in task.metadata["numbers"]
                assert compute(parse(solve(task.metadata["numbers"], task.answer))) == task.answer

    def test_splits_share_no_round_also_across_settings(self):
        def rounds(split, **settings):
            tasks = agentgym.make("countdown").default_tasks(split, **settings).take(400)
            return {(tuple(t.metadata["numbers"]), t.answer) for t in tasks}

        small = {"max_count": 3, "max_number": 10}
        assert not rounds("train") & rounds("test")
        assert not rounds("train", **small) & (rounds("test", **small) | rounds("test"))
        assert not rounds("test", **small) & rounds("train")

    def test_settings_reach_the_tasks(self):
        tasks = agentgym.make("countdown", min_count=5, max_count=5, max_number=50, max_target=999).tasks.take(50)
        assert {len(t.metadata["numbers"]) for t in tasks} == {5}
        assert max(n for t in tasks for n in t.metadata["numbers"]) > 20
        assert max(t.answer for t in tasks) > 100

    @pytest.mark.parametrize(
        "wrong",
        [{"max_count": 6}, {"min_count": 1}, {"min_count": 4, "max_count": 3}, {"max_number": 0}, {"max_target": "9"}],
    )
    def test_wrong_settings_are_refused_by_name(self, wrong):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            agentgym.make("countdown", **wrong)

    @pytest.mark.parametrize(
        "task",
        [
            Task("odd", answer=3),
            Task("odd", answer=3, metadata={"numbers": [1]}),
            Task("odd", answer=3, metadata={"numbers": [1, 0]}),
            Task("odd", answer=3, metadata={"numbers": "12"}),
            Task("odd", answer="3", metadata={"numbers": [1, 2]}),
            Task("odd", answer=True, metadata={"numbers": [1, 2]}),
        ],
    )
    def test_a_task_that_is_no_round_is_refused_by_its_id(self, task):
        with pytest.raises(ValueError, match="'odd'"):
            agentgym.make("countdown").init(task)

    def test_an_empty_task_set_is_not_taken_for_none(self):
        assert len(agentgym.make("countdown", tasks=TaskSet([])).tasks) == 0

    def test_what_cannot_be_solved_has_no_expert(self):
        env = countdown((1, 1), 50)
        with pytest.raises(ValueError, match=r"\[1, 1\] cannot make 50"):
            env.expert_action()

    @given(st.lists(st.integers(1, 20), min_size=2, max_size=4), st.integers(0, 10**6))
    @settings(deadline=None, max_examples=60)
    def test_random_expressions_are_legal_and_what_they_make_is_found(self, numbers, seed):
        env = countdown(numbers, 1000, max_turns=1)
        expression = random_expression(numbers, random.Random(seed))
        _, _, _, _, info = env.step(f"<answer>{expression}</answer>")
        if "value" not in info:
            assert "/" in expression  # the one way to go wrong: a division by zero
            return
        made = compute(parse(expression))
        if made.denominator == 1 and made > 0:
            assert compute(parse(solve(numbers, int(made)))) == made


def test_registering_imports_no_environment():
    code = (
        "import sys, agentgym_envs; agentgym_envs.register_all()\n"
        "from agentgym.core.registration import registry\n"
        "assert {'gsm8k', 'gsm8k_tool', 'countdown', 'frozen_lake'} <= set(registry)\n"
        "print([m for m in sys.modules if m.startswith('agentgym_envs.math.') or m in ('torch', 'ray', 'datasets')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
