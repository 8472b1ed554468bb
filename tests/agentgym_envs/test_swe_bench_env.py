"""swe_bench: episodes on a real instance of flask, its tools and limits, and what the agent sees."""

import asyncio
import dataclasses
import json
import re

import pytest
from swe_bench_cases import built, instance, require

import agentgym
from agentgym import ScriptedPolicy, run_episode
from agentgym.core.tasks import Task, TaskSet
from agentgym.tools.text_forms import call_text
from agentgym_envs import register_all
from agentgym_envs.swe_bench import worktree
from agentgym_envs.swe_bench.env import SUBMIT
from agentgym_envs.swe_bench.grading import GradingError
from agentgym_envs.swe_bench.tasks import instance_of, task_of

register_all()
ID = "pallets__flask-4992"


@pytest.fixture(scope="module")
def task():
    return task_of(built(ID))


@pytest.fixture(params=["bubblewrap", "docker"])
def backend(request, task, monkeypatch):
    return require(request.param, monkeypatch)


@pytest.fixture
def start(task, monkeypatch):
    """Starts an episode on bubblewrap, or where it is told."""
    made = []

    def begin(task=task, backend="bubblewrap", **settings):
        require(backend, monkeypatch)
        env = agentgym.make("swe_bench", sandbox=backend, tasks=TaskSet([task]), **settings)
        made.append(env)
        env.reset(seed=0)
        return env.unwrapped

    yield begin
    for env in made:
        env.close()


def said(step):
    return step[0][-1]["content"]


def block(command):
    return f"I look.\n\n```bash\n{command}\n```"


@pytest.mark.parametrize("interface", ["tools", "text"])
def test_the_gold_patch_through_the_tools_resolves_the_issue(start, backend, interface):
    env = start(backend=backend, interface=interface)
    assert env.step(env.expert_action())[1:4] == (0.0, False, False)
    observation, reward, terminated, truncated, info = env.step(env.expert_action())
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert observation[-1]["content"].endswith("The work is submitted. The issue is resolved.")
    names = ("success", "exit", "submitted", "patch", "resolution", "dropped", "doubt", "doubted")
    told = {name: info[name] for name in names}
    assert told == {
        "success": True,
        "exit": "submitted",
        "submitted": True,
        "patch": "applied",
        "resolution": "RESOLVED_FULL",
        "dropped": 0,
        "doubt": "",
        "doubted": False,
    }
    assert set(info["tests"]["fail_to_pass"].values()) == {"PASSED"}
    assert info["tests"]["pass_to_pass_failed"] == []
    assert "diff --git a/src/flask/config.py" in info["model_patch"]
    assert json.loads(json.dumps(info)) == info


def test_an_empty_patch_earns_nothing(start):
    env = start()
    _, reward, terminated, _, info = env.step(call_text("submit"))
    assert (reward, terminated, info["success"], info["patch"], info["model_patch"]) == (0.0, True, False, "empty", "")


def test_the_marker_submits_in_a_new_shell_too(start):
    env = start(interface="text")
    env.step(block("exit 1"))
    _, _, terminated, _, info = env.step(block(f"echo {SUBMIT}"))
    assert (terminated, info["submitted"]) == (True, True)


def test_the_replies_are_used_up_and_the_work_counts(start):
    env = start(max_turns=1)
    _, reward, terminated, truncated, info = env.step(env.expert_action())
    assert (reward, terminated, truncated) == (1.0, False, True)
    assert (info["exit"], info["submitted"]) == ("turns", False)


def test_the_time_is_up_and_the_work_counts(start):
    env = start(episode_seconds=1)
    _, _, terminated, truncated, info = env.step(call_text("bash", command="echo x > new.txt; sleep 1.2"))
    assert (terminated, truncated, info["exit"], info["patch_lines"]) == (False, True, "time", 1)


def test_the_context_is_full_and_the_work_counts(start, task):
    env = start()
    done = asyncio.run(run_episode(env, ScriptedPolicy([env.expert_action()], "context"), task))
    assert (done.end, done.error, done.reward, done.success) == ("context", None, 1.0, 1.0)
    assert [done.metrics[name] for name in ("submitted", "doubted", "dropped")] == [0.0, 0.0, 0.0]
    assert (done.turns[-1].info["exit"], done.turns[-1].info["patch"]) == ("context", "applied")
    assert env.cut_off("again") is None


def test_a_person_who_interrupts_an_episode_waits_for_no_tests(start):
    env = start()
    env.step(env.expert_action())
    assert env.cut_off("interrupted") is None


def test_a_fraction_of_the_tests_earns_a_fraction(start):
    env = start(reward="fraction")
    env.step(env.expert_action())
    env.step(call_text("bash", command="echo 'Config.get_namespace = None' >> src/flask/config.py"))
    _, reward, terminated, _, info = env.step(call_text("submit"))
    assert (reward, terminated, info["success"]) == (pytest.approx(17 / 18), True, False)
    assert info["tests"]["pass_to_pass_failed"] == ["tests/test_config.py::test_get_namespace"]


def test_few_replies_left_are_told(start):
    env = start(max_turns=7)
    assert "left" not in said(env.step(call_text("bash", command="true")))
    assert said(env.step("I think.")).endswith("(5 replies left, then what you have changed is judged.)")


def test_a_broken_repository_is_the_agent_s_failure(start):
    env = start()
    env.step(call_text("bash", command="rm -rf .git"))
    _, reward, _, _, info = env.step(call_text("submit"))
    assert (reward, info["model_patch"]) == (0.0, "")
    assert info["patch"].startswith("unreadable: git cannot tell")


def test_a_repository_that_git_cannot_read_anywhere_is_an_error(start, monkeypatch):
    env = start()
    monkeypatch.setattr(worktree, "_DIFF", "exit 1")  # a fault of the machine's
    with pytest.raises(GradingError, match=r"git cannot tell what has changed: ; in a fresh sandbox: git cannot"):
        env.step(call_text("submit"))


def test_a_sandbox_that_the_agent_kills_ends_the_episode(start):
    env = start()
    _, reward, terminated, _, info = env.step(call_text("bash", command="kill -9 -1; sleep 9"))
    while not terminated:  # the shell may end alone
        _, reward, terminated, _, info = env.step(call_text("submit"))
    assert (reward, info["success"]) == (0.0, False)


class TestTools:
    def test_they_are_told_and_work_in_the_repository(self, start):
        env = start()
        assert [tool["function"]["name"] for tool in env.tools] == ["bash", "edit", "submit"]
        assert "/testbed" in said(env.step(call_text("bash", command="pwd")))
        seen = said(env.step(call_text("edit", command="view", path="src/flask/config.py", view_range=[3, 4])))
        assert "     3\timport errno" in seen
        version = said(env.step(call_text("bash", command="python -c 'import flask; print(flask.__file__)'")))
        assert "/testbed/src/flask/__init__.py" in version

    def test_a_reply_without_a_call_is_answered_by_a_hint(self, start):
        assert "I found no call of a tool" in said(start().step("I think."))

    def test_the_next_episode_starts_from_the_repository_as_it_was(self, start):
        env = start()
        env.step(call_text("bash", command="touch /testbed/new.txt"))
        env.reset(seed=0)
        assert "new.txt" not in said(env.step(call_text("bash", command="ls /testbed")))


class TestText:
    def test_a_block_is_run_and_answered_as_by_mini_swe_agent(self, start):
        env = start(interface="text")
        assert env.tools == []
        assert (
            said(env.step(block("cd docs && false")))
            == "<returncode>1</returncode>\n<output>\n(exit code 1)\n</output>"
        )
        assert "/testbed/docs" in said(env.step(block("pwd")))

    @pytest.mark.parametrize("reply", ["none", block("a") + block("b"), "<think>" + block("ls") + "</think>"])
    def test_exactly_one_block_is_taken(self, start, reply):
        assert re.match(r"I found \d bash blocks\. Reply with exactly one", said(start(interface="text").step(reply)))

    def test_the_word_submits_as_the_first_line_alone(self, start):
        env = start(interface="text")
        assert not env.step(block(f"echo no; echo {SUBMIT}"))[2]
        assert not env.step(block(f"echo {SUBMIT}; false"))[2]
        assert env.step(block(f"echo {SUBMIT}"))[2]


class TestTasks:
    def test_an_instance_survives_a_task_of_json(self):
        case = instance(expected={"A.test": "PASSED"})
        task = Task.from_json(json.loads(json.dumps(task_of(case).to_json())))
        assert instance_of(task) == case

    def test_the_agent_sees_the_issue_and_not_its_solution(self):
        case = dataclasses.replace(instance(), problem_statement="It breaks.")
        (message,) = task_of(case).messages
        assert "It breaks." in message["content"]
        assert not any(secret in message["content"] for secret in (case.patch, case.test_patch, *case.fail_to_pass))

    def test_a_task_without_an_instance_is_refused(self):
        with pytest.raises(ValueError, match="has no instance"):
            instance_of(Task("t"))

    @pytest.mark.data
    def test_the_verified_instances_are_split_by_their_ids(self):
        load = agentgym.spec("swe_bench").tasks
        every, train, test = ({task.id for task in load(split)} for split in ("all", "train", "test"))
        assert len(every) == 70
        assert (train | test, train & test) == (every, set())
        assert len(test) == 10

    def test_a_file_of_one_s_own_is_taken_whole(self, tmp_path):
        record = {
            "instance_id": "pallets__flask-1",
            "repo": "pallets/flask",
            "base_commit": "0",
            "FAIL_TO_PASS": '["t"]',
        }
        (tmp_path / "mine.jsonl").write_text(json.dumps({**record, "problem_statement": "x", "version": "2.3"}))
        tasks = agentgym.TaskSet.load("swe_bench", split="all", data=str(tmp_path / "mine.jsonl"))
        assert [task.id for task in tasks] == ["pallets__flask-1"]

    def test_no_data_says_what_to_do(self, monkeypatch, tmp_path):
        monkeypatch.setenv("AGENTGYM_DATA", str(tmp_path))
        with pytest.raises(ValueError, match="put it there, or give data="):
            agentgym.TaskSet.load("swe_bench", split="test")


@pytest.mark.parametrize(
    "wrong",
    [
        {"interface": "voice"},
        {"reward": "half"},
        {"command_timeout": 0},
        {"test_timeout": 0},
        {"episode_seconds": -1},
        {"max_output": 5},
        {"memory": 5},
        {"cpus": 0},
        {"max_turns": 0},
    ],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        agentgym.make("swe_bench", **wrong)


def test_a_step_may_take_as_long_as_its_tests():
    assert agentgym.make("swe_bench", test_timeout=100).unwrapped.step_seconds > 200
