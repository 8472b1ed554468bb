"""code_mbpp and code_humaneval: their READMEs, players, tasks, and what a reply may be."""

from __future__ import annotations

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_episode import play
from readme_parts import players, replay

import agentgym
from agentgym import sandbox as sandboxes
from agentgym.checks.check_env import check_env
from agentgym.core.tasks import Task, TaskSet
from agentgym.rollout.episode import Limits
from agentgym_envs import code as package
from agentgym_envs import register_all
from agentgym_envs.code.env import HINT, SUBMIT, fenced, says_submit
from agentgym_envs.code.grading import grade
from agentgym_envs.code.problems import Problem, doctests, imports_for, names_between, problem_of

pytestmark = pytest.mark.sandbox
ENVS = ("code_mbpp", "code_humaneval")
OWN = {"train": 28, "test": 12}
register_all()


def readme(env_id):
    folder = env_id.removeprefix("code_")
    return Path(package.__file__).with_name(folder).joinpath("README.md").read_text(encoding="utf-8")


def own_tasks(env_id, split="test"):
    return agentgym.make(env_id, data="own").default_tasks(split, data="own")


def play_all(env_id, tasks, answer, **kwargs):
    """Play one episode of each task, four at a time: their results in order."""

    def one(place):
        rng = random.Random(place)
        env = agentgym.make(env_id, **kwargs)
        try:
            return play(env, tasks[place], lambda e: answer(e, rng))
        finally:
            env.close()

    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(one, range(len(tasks))))


def expert(env, rng):
    return env.unwrapped.expert_action()


def null(env, rng):
    return ""


def chance(env, rng):
    return env.unwrapped.random_action(rng)


def square(**more):
    fields = {"names": ["square"], "tests": ["assert square(3) == 9", "assert square(2) == 4"]} | more
    return Task("mine", ({"role": "user", "content": "Write square."},), fields)


def started(task=None, env_id="code_mbpp", **kwargs):
    env = agentgym.make(env_id, **kwargs)
    env.reset(options={"task": task or square(public=["assert square(3) == 9"])})
    return env


def block(code, language="python"):
    return f"```{language}\n{code}\n```"


RIGHT, WRONG = "def square(x):\n    return x * x", "def square(x):\n    return x + 6"


@pytest.mark.parametrize("env_id", ENVS)
class TestEvery:
    def test_its_readme_replays(self, env_id):
        replay(readme(env_id), agentgym.make(env_id), own_tasks(env_id))

    def test_its_readme_has_the_numbers_of_simple_players(self, env_id):
        rows = players(readme(env_id))
        simple = {"expert": expert, "random": chance, "null": null}
        assert [row[0] for row in rows] == list(simple)
        for player, success, turns in rows:
            ends = play_all(env_id, own_tasks(env_id), simple[player])
            assert f"{100 * sum(info['success'] for *_, info in ends) / len(ends):.1f}" == success
            assert f"{sum(n for _, n, _ in ends) / len(ends):.2f}" == turns

    @pytest.mark.parametrize("split", OWN)
    def test_gold_scores_1_and_nothing_and_chance_score_0_on_the_own_tasks(self, env_id, split, sample):
        tasks = own_tasks(env_id, split)
        assert len(tasks) == OWN[split]
        tasks = sample(tasks, 20)
        assert [end for end in play_all(env_id, tasks, expert) if end[:2] != (1.0, 1)] == []
        assert [end for end in play_all(env_id, tasks, null, max_turns=2) if end[0] != 0.0] == []
        for reward in ("all", "fraction"):
            ends = play_all(env_id, tasks, chance, reward=reward)
            assert [end for end in ends if end[0] != 0.0 or end[2]["success"]] == []

    def test_gold_holds_on_the_public_tests_too(self, env_id):
        for split in OWN:
            for task in own_tasks(env_id, split):
                problem = problem_of(task)
                assert problem.public
                assert grade(problem, problem.solution, problem.public).success

    def test_both_checkers_find_nothing(self, env_id, monkeypatch):
        monkeypatch.setenv("AGENTGYM_DATA", "")
        monkeypatch.setattr("agentgym.datasets.is_installed", lambda: False)
        assert check_env(env_id) == []  # Gymnasium's own is part of it

    def test_a_step_after_the_end_or_before_the_start_is_refused(self, env_id):
        env = agentgym.make(env_id, data="own")
        for call in (
            lambda: env.step("1"),
            env.unwrapped.expert_action,
            lambda: env.unwrapped.random_action(random.Random(0)),
        ):
            with pytest.raises(RuntimeError, match="reset"):
                call()
        play(env, own_tasks(env_id)[0], lambda e: e.unwrapped.expert_action())
        with pytest.raises(RuntimeError, match="reset"):
            env.step("1")

    def test_unknown_splits_and_data_are_refused(self, env_id):
        with pytest.raises(ValueError, match="no split 'dev'"):
            agentgym.spec(env_id).tasks("dev")
        with pytest.raises(ValueError, match="'mine'"):
            agentgym.make(env_id, data="mine").reset(seed=0)

    def test_no_sandbox_is_taken_before_there_is_code(self, env_id, monkeypatch):
        def refuse(*args, **kwargs):
            raise AssertionError("a sandbox was asked for")

        monkeypatch.setattr(sandboxes, "acquire", refuse)
        env = agentgym.make(env_id, data="own")
        env.reset(seed=1)
        assert env.step("I think.")[0][0]["content"] == HINT
        env.close()


class TestReplies:
    def test_code_is_run_on_the_public_tests_and_may_be_written_again(self):
        env = started()
        observation, reward, terminated, truncated, info = env.step(f"First try.\n{block(WRONG)}\nLet us see.")
        assert observation[0]["content"] == "1 of 1 public tests passed."
        assert (reward, terminated, truncated, info) == (0.0, False, False, {"success": False})
        assert "got 0" in env.step(block("def square(x):\n    return 0"))[0][0]["content"]
        observation, reward, terminated, _, info = env.step(f"{block(RIGHT)}\n{SUBMIT}")
        assert observation[0]["content"] == "Correct: 2 of 2 hidden tests passed."
        assert (reward, terminated) == (1.0, True)
        assert info == {"success": True, "verdict": "passed", "passed": 2, "total": 2}

    def test_hidden_tests_are_not_told(self):
        observation, reward, terminated, _, info = started().step(f"{block(WRONG)}\n\n{SUBMIT}\n")
        assert observation[0]["content"] == "Wrong: 1 of 2 hidden tests passed."
        assert (reward, terminated, info["verdict"]) == (0.0, True, "wrong")

    def test_a_fraction_can_be_the_reward(self):
        assert started(reward="fraction").step(f"{block(WRONG)}\n{SUBMIT}")[1] == 0.5
        assert started(reward="fraction").step(f"{block(RIGHT)}\n{SUBMIT}")[1] == 1.0
        with pytest.raises(ValueError, match="'half'"):
            agentgym.make("code_mbpp", reward="half")

    def test_a_step_may_take_as_long_as_the_tests(self):
        assert Limits().step_limit(agentgym.make("code_mbpp", timeout=100.0)) > 200

    def test_submit_alone_means_the_code_before(self):
        env = started()
        assert env.step(SUBMIT)[0][0]["content"] == HINT
        env.step(block(RIGHT))
        assert env.step(f"That is it.\n{SUBMIT}")[1:3] == (1.0, True)

    def test_on_the_last_turn_the_latest_code_counts(self):
        env = started(max_turns=2)
        env.step(block(WRONG))
        assert env.step(block(RIGHT))[1:4] == (1.0, True, False)
        env = started(max_turns=2)
        env.step(block(RIGHT))
        observation, reward, terminated, _, _ = env.step("I am happy with it.")
        assert [m["content"] for m in observation] == [HINT, "Correct: 2 of 2 hidden tests passed."]
        assert (reward, terminated) == (1.0, True)
        assert started(max_turns=1).step(block(RIGHT))[1] == 1.0

    def test_no_code_at_all_is_truncated_with_0(self):
        env = started(max_turns=2)
        assert env.step("Hm.")[2:4] == (False, False)
        info = {"success": False, "verdict": "none", "passed": 0, "total": 1}
        assert env.step("Hm.")[1:] == (0.0, False, True, info)

    @pytest.mark.parametrize("verb", ["run", "submit"])
    def test_native_calls_are_answered_by_tool_messages(self, verb):
        env = started()
        assert [tool["function"]["name"] for tool in env.unwrapped.tools] == ["run", "submit"]
        arguments = json.dumps({"code": RIGHT})
        calls = [
            {"id": "a", "type": "function", "function": {"name": verb, "arguments": arguments}},
            {"id": "b", "type": "function", "function": {"name": "submit", "arguments": arguments}},
        ]
        observation, reward, terminated, _, _ = env.step({"role": "assistant", "content": None, "tool_calls": calls})
        assert [message["tool_call_id"] for message in observation] == ["a", "b"]
        assert observation[1]["content"] == "Error: not done: one call in a reply, please"
        assert (reward, terminated) == (float(verb == "submit"), verb == "submit")

    def test_calls_may_be_written_in_the_text(self):
        call = json.dumps({"name": "submit", "arguments": {"code": RIGHT}})
        assert started().step(f"<tool_call>{call}</tool_call>")[1:3] == (1.0, True)
        observation, *_ = started().step('<tool_call>{"name": "run", "arguments": {}}</tool_call>')
        assert '"code" is missing' in observation[0]["content"]

    @pytest.mark.parametrize(
        ("reply", "reward"),
        [
            (f"{block(WRONG)}\n{block(RIGHT)}\n{SUBMIT}", 1.0),
            (f"{SUBMIT}\n{block(RIGHT, '')}", 1.0),
            (f"<think>{block(WRONG)}</think>\n{block(RIGHT, 'py')}\n{SUBMIT}", 1.0),
            (f"{block(RIGHT)}\n{block('square(3)', 'text')}\n{SUBMIT}", 1.0),
            (f"{block(RIGHT)}\nIt prints:\n{block('9', '')}\n{SUBMIT}", 1.0),
            (f"<think>{block(RIGHT)}\n{SUBMIT}", None),
            (f"```python\n{RIGHT}\n{SUBMIT}", None),
            (f"{block(RIGHT)}\nI {SUBMIT} this.", None),
            (f"{block(RIGHT, 'rust')}\n{SUBMIT}", None),
            (RIGHT, None),
        ],
    )
    def test_the_last_block_of_python_that_is_said_counts(self, reply, reward):
        _, got, terminated, _, _ = started().step(reply)
        assert (got, terminated) == (reward or 0.0, reward is not None)

    def test_without_public_tests_code_is_only_loaded(self):
        env = started(square())
        assert env.step(block("print('hi')"))[0][0]["content"] == (
            "The code loads. There are no public tests.\n\nIt printed:\nhi"
        )
        assert "The code does not run.\nZeroDivisionError" in env.step(block("1 / 0"))[0][0]["content"]

    def test_much_output_is_cut(self):
        text = started().step(block(f"print('x' * 9999)\n{RIGHT}"))[0][0]["content"]
        assert text.endswith("x\n(the rest is cut)")
        assert len(text) < 1700

    @given(text=st.text(st.characters(), max_size=60))
    @settings(max_examples=60, deadline=None)
    def test_any_text_is_an_action(self, text):
        env = started(max_turns=1)
        observation, reward, _, _, info = env.step(text)
        assert observation in env.observation_space
        assert (reward, info["success"]) == (0.0, False)

    @given(st.text(max_size=200) | st.lists(st.sampled_from(["```", "````", "`", "x\n", "\n```python\n"])).map("".join))
    def test_any_code_can_be_fenced(self, code):
        reply = fenced(code)
        assert not says_submit(reply)
        assert says_submit(f"{reply}\n{SUBMIT}")


class TestTasks:
    @pytest.mark.parametrize(
        ("answer", "says"),
        [
            (None, "must be an object"),
            ({"names": ["f"]}, "must be an object"),
            ({"names": ["f"], "tests": ["assert f()"], "more": 1}, "must be an object"),
            ({"names": "f", "tests": ["assert f()"]}, "names must be"),
            ({"names": ["f"], "tests": [3]}, "tests must be"),
            ({"names": ["f"], "tests": []}, "no tests"),
            ({"names": [], "tests": ["assert f()"]}, "no names"),
            ({"names": ["f"], "tests": ["assert f("]}, "tests is not Python"),
            ({"names": ["f"], "tests": ["assert f()"], "setup": "import"}, "setup is not Python"),
        ],
    )
    def test_what_is_no_problem_is_refused_by_its_id(self, answer, says):
        task = Task("odd", ({"role": "user", "content": "?"},), answer)
        with pytest.raises(ValueError, match=f"'odd'.*{says}"):
            agentgym.make("code_mbpp").init(task)

    def test_a_task_without_text_or_solution_is_told(self):
        with pytest.raises(ValueError, match="'mine' has no messages"):
            agentgym.make("code_mbpp").init(Task("mine", answer=square().answer))
        with pytest.raises(ValueError, match="'mine' has no solution"):
            started().unwrapped.expert_action()

    def test_the_opening_keeps_the_messages_of_the_task(self):
        parts = [{"type": "text", "text": "Write square."}]
        task = Task("mine", ({"role": "system", "content": "Ünï"}, {"role": "user", "content": parts}), square().answer)
        observation, _ = agentgym.make("code_mbpp", max_turns=1).reset(options={"task": task})
        assert observation[0] == task.messages[0]
        assert [part["type"] for part in observation[1]["content"]] == ["text", "text"]
        assert "You have one reply;" in observation[1]["content"][1]["text"]
        assert parts == [{"type": "text", "text": "Write square."}]

    def test_what_tests_take_is_read_from_the_solution(self):
        solution = "import sys, re as r\nfrom math import *\nclass N: pass\nlimit: int = 3\na, b = 1, 2\ndef f(): pass\ndef g(): pass\n"
        assert names_between(solution, ["assert f(N()) == limit + b"]) == ("f", "b", "limit", "N")
        with pytest.raises(ValueError, match="nothing that the solution defines"):
            names_between(solution, ["assert h()"])
        assert imports_for(solution, ["assert r.match and f()"]) == "import sys, re as r\n"

    def test_examples_of_docstrings_become_tests(self):
        prompt = 'def f(x):\n    """ F.\n    >>> f(1)\n    2\n    >>> f(2)\n    >>> x = 3\n    3\n    >>> f("a")\n    <f>\n    >>> f([])\n    []\n    """\n'
        assert doctests(prompt, "f") == ("assert f(1) == 2", "assert f([]) == []")
        assert doctests(prompt, "g") == ()

    def test_a_problem_goes_through_a_task_and_back(self):
        problem = Problem(("f",), ("assert f()",), solution="f = int")
        assert problem_of(Task("t", ({"role": "user", "content": "?"},), problem.to_json())) == problem

    def test_an_empty_task_set_is_not_taken_for_none(self):
        assert len(agentgym.make("code_mbpp", tasks=TaskSet([])).unwrapped.tasks) == 0


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.timeout(900)
class TestRealData:
    """MBPP and HumanEval: what the published solutions, nothing and chance score."""

    @pytest.mark.parametrize(
        ("env_id", "split", "size"),
        [
            ("code_mbpp", "prompt", 10),
            ("code_mbpp", "test", 500),
            ("code_mbpp", "validation", 90),
            ("code_mbpp", "train", 374),
            ("code_humaneval", "test", 164),
        ],
    )
    def test_every_published_solution_scores_1_and_nothing_and_chance_0(self, env_id, split, size, sample):
        tasks = agentgym.spec(env_id).tasks(split)
        assert len(tasks) == size
        assert tasks.source.startswith(os.environ["AGENTGYM_DATA"])
        tasks = sample(tasks, 10)
        golds = play_all(env_id, tasks, expert, timeout=60)  # number 123 takes its time
        assert [task.id for task, end in zip(tasks, golds, strict=True) if end[:2] != (1.0, 1)] == []
        ends = play_all(env_id, tasks, chance, max_turns=1) + play_all(env_id, tasks, null, max_turns=1)
        assert [end for end in ends if end[0] != 0.0 or end[2]["success"]] == []

    def test_the_examples_of_docstrings_hold_but_for_one(self):
        tasks = [task for task in agentgym.spec("code_humaneval").tasks("test") if problem_of(task).public]
        assert len(tasks) == 70

        def holds(task):
            problem = problem_of(task)
            return grade(problem, problem.solution, problem.public).success

        with ThreadPoolExecutor(4) as threads:
            held = list(threads.map(holds, tasks))
        # Number 47 says that the median of -10, 4, 6, 1000, 10, 20 is 15.
        assert [task.id for task, ok in zip(tasks, held, strict=True) if not ok] == ["humaneval-47"]
