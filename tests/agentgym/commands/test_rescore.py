"""`agentgym rescore`: stored replies, graded by the environment as it is now."""

import asyncio
import json
import shutil
from dataclasses import replace

import pytest

from agentgym.cli import main
from agentgym.core.env import Env
from agentgym.core.messages import user
from agentgym.core.registration import EnvSpec
from agentgym.core.tasks import Task, TaskSet
from agentgym.core.trajectory import write_jsonl
from agentgym.evaluate import store
from agentgym.evaluate.plan import AgentSpec, Cell
from agentgym.evaluate.rescore import rescore
from agentgym.policies.base import Reply, ScriptedPolicy
from agentgym.rollout.episode import Episode, Limits, run_many

BROKEN: set[str] = set()


class Sum(Env):
    """Twice a number, in two turns. `pays` is what a right answer earns, `greets` changes what the agent sees."""

    max_turns = 2

    def __init__(self, pays=1.0, greets="", tasks_from=0, tag="", fails=False, **kwargs):
        super().__init__(**kwargs)
        self.pays, self.greets, self.fails = pays, greets, fails

    @classmethod
    def default_tasks(cls, split="train", tasks_from=0, tag=""):
        labels = {"tags": [tag]} if tag else {"difficulty": "easy"}
        return TaskSet([Task(str(i), answer=2 * i, metadata=labels) for i in range(tasks_from, 6)])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return [user(f"{self.greets}Twice {self.task.id}?")], {}

    def step(self, action):
        if (self.fails and self.task.id == "4") or self.task.id in BROKEN:
            raise OSError("no space")
        right = self.read(action) == str(self.task.answer)
        return self.outcome(
            "Right." if right else "No.", self.pays * right, terminated=right, success=right and self.pays > 0
        )


class Says:
    """Wrong at first, right where the task is even; with a count of tokens."""

    def __init__(self, task):
        self.script = iter(["?", str(task.answer) if int(task.id) % 2 == 0 else "!"])

    async def act(self, messages, tools):
        return Reply({"role": "assistant", "content": next(self.script)}, usage={"completion_tokens": 3})


@pytest.fixture
def run(tmp_path):
    """A run of six tasks; that of task 5 has failed."""
    spec = EnvSpec(id=f"{__name__}:Sum", entry_point=f"{__name__}:Sum")
    cell = Cell(spec, AgentSpec("says", "scripted", {"answers": []}))
    tasks = list(spec.tasks("test"))
    played = asyncio.run(run_many(spec.make, lambda e: Says(e.task), [Episode(t, 0, 7) for t in tasks], env_id=spec.id))
    folder = tmp_path / "run"
    with store.open_store(folder, [{**cell.to_json(), "tasks": len(tasks)}], settings={}) as opened:
        for trajectory in played:
            trajectory.metadata["cost"] = 0.5
            if trajectory.task_id == "5":
                trajectory.end, trajectory.error = "error", "Sum, task '5', turn 1: act failed: OSError: cut"
            opened.append(cell, trajectory)
    return folder


def episodes(folder):
    (file,) = (folder / "episodes").iterdir()
    return store.read_cell(file)


def graded(run, capsys, *words, code=0):
    assert main(["rescore", str(run), "--json", *words]) == code
    told = json.loads(capsys.readouterr().out)
    (cell,) = told["cells"]
    return told, cell


def test_the_same_environment_gives_the_same_grades(run, capsys):
    told, cell = graded(run, capsys)
    assert told["out"] == f"{run}-rescored"
    assert (cell["graded"], cell["changed"], cell["unfaithful"], cell["failed_before"]) == (5, 0, 0, 1)
    assert cell["old_reward"] == cell["new_reward"] == pytest.approx(3 / 5)
    before, after = episodes(run), episodes(run.with_name("run-rescored"))
    assert before.keys() == after.keys()
    for key, was in before.items():
        now = after[key]
        assert (now.reward, now.end, now.error, now.messages()) == (was.reward, was.end, was.error, was.messages())
    results = json.loads((run.with_name("run-rescored") / "results.json").read_text())
    assert results["cells"][0]["errors"] == 1


def test_new_grades_stand_beside_what_the_agent_said_and_took(run, tmp_path, capsys):
    out = tmp_path / "new"
    _, cell = graded(run, capsys, "--out", str(out), "--kwargs", '{"pays": 0.25}')
    assert (cell["changed"], cell["new_reward"]) == (3, pytest.approx(0.75 / 5))
    was, now = episodes(run)["2", 0], episodes(out)["2", 0]
    assert now.metadata["rescored"] == {"reward": 1.0, "success": 1.0, "differs": None}
    assert now.metadata["cost"] == 0.5
    assert [(t.reply, t.usage, t.act_seconds) for t in now.turns] == [
        (t.reply, t.usage, t.act_seconds) for t in was.turns
    ]


def test_labels_are_those_of_the_task_now(run, tmp_path, capsys):
    (file,) = (run / "episodes").iterdir()
    stored = list(store.read_cell(file).values())
    for each in stored:
        each.metadata |= {"difficulty": "easy", "expected": 99}
    file.unlink()
    write_jsonl(file, stored)
    graded(run, capsys, "--out", str(tmp_path / "new"), "--kwargs", '{"tag": "new"}')
    now = episodes(tmp_path / "new")["2", 0].metadata
    assert (now["tags"], now["expected"], now.get("difficulty"), now["cost"]) == (["new"], 4, None, 0.5)


def test_an_agent_that_played_by_itself_and_took_no_step_is_given_none(run, tmp_path, capsys):
    (file,) = (run / "episodes").iterdir()
    stored = list(store.read_cell(file).values())
    for each in stored:
        if each.task_id == "2":  # its turns are calls of its model, which the environment did not get
            each.metadata["steps"], each.end = [], "max_turns"
            each.turns = [replace(turn, reward=0.0, info={}) for turn in each.turns]
    file.unlink()
    write_jsonl(file, stored)
    out = tmp_path / "new"
    graded(run, capsys, "--out", str(out))
    was, now = episodes(run)["2", 0], episodes(out)["2", 0]
    assert (now.reward, now.end) == (0.0, "max_turns")
    assert [turn.reply for turn in now.turns] == [turn.reply for turn in was.turns]


def test_a_replay_that_failed_has_the_floor_of_its_environment(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Sum, "floor", -3.0)
    graded(run, capsys, "--out", str(tmp_path / "new"), "--kwargs", '{"fails": true}', code=1)
    assert episodes(tmp_path / "new")["4", 0].metadata["floor"] == -3.0


def test_of_several_environments_one_alone_can_be_given_arguments(tmp_path, capsys):
    words = (
        "eval",
        "frozen_lake",
        "gsm8k",
        "--policy",
        "random",
        "-n",
        "10",
        "--seed",
        "3",
        "--out",
        str(tmp_path / "two"),
    )
    assert main(list(words)) == 0
    assert main(["rescore", str(tmp_path / "two"), "--kwargs", '{"shaping": 0.5}']) == 2
    assert "'gsm8k' takes no argument 'shaping'" in capsys.readouterr().err
    assert not (tmp_path / "two-rescored").exists()
    kwargs = '{"frozen_lake": {"shaping": 0.5}}'
    assert main(["rescore", str(tmp_path / "two"), "--kwargs", kwargs, "--json"]) == 0
    lake, school = json.loads(capsys.readouterr().out)["cells"]
    assert lake["changed"] > 0
    assert school["changed"] == 0
    assert main(["rescore", str(tmp_path / "two"), "--kwargs", kwargs]) == 0
    assert "20 episodes were graded there before" in capsys.readouterr().err
    assert main(["rescore", str(tmp_path / "two")]) == 2
    assert "env kwargs shaping was 0.5, is now null" in capsys.readouterr().err


def test_where_the_agent_would_have_seen_something_else_it_is_told(run, tmp_path, capsys):
    out = tmp_path / "new"
    assert main(["rescore", str(run), "--out", str(out), "--kwargs", '{"greets": "Hello. "}']) == 0
    assert "5 episodes were shown something else" in capsys.readouterr().err
    assert {t.metadata["rescored"]["differs"] for t in episodes(out).values() if not t.failed} == {0}
    assert episodes(out)["2", 0].turns[0].observation == [user("Twice 2?")]


@pytest.mark.parametrize(
    ("kwargs", "field", "error"),
    [('{"fails": true}', "failed", "OSError: no space"), ('{"tasks_from": 1}', "missing", "no longer has this task")],
)
def test_what_cannot_be_graded_is_an_error_and_no_zero(kwargs, field, error, run, tmp_path, capsys):
    out = tmp_path / "new"
    _, cell = graded(run, capsys, "--out", str(out), "--kwargs", kwargs, code=1)
    assert (cell["graded"], cell[field]) == (4, 1)
    assert sum(error in (t.error or "") for t in episodes(out).values()) == 1
    assert cell["new_reward"] == pytest.approx(cell["old_reward"])


def test_steps_have_the_time_that_they_had(run, tmp_path, monkeypatch):
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "settings": {"limits": {"step_timeout": 900.0}}}))
    given = []

    async def noted(*arguments, limits, **more):
        given.append(limits.step_timeout)
        return await run_many(*arguments, limits=limits, **more)

    monkeypatch.setattr("agentgym.evaluate.rescore.run_many", noted)
    asyncio.run(rescore(run, tmp_path / "new"))
    assert given == [900.0]


def test_a_task_that_is_gone_counts_as_the_environments_least_reward_where_errors_do(
    run, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(Sum, "floor", -1.0)
    out = tmp_path / "new"
    graded(run, capsys, "--out", str(out), "--kwargs", '{"tasks_from": 1}', code=1)
    (gone,) = [t for t in episodes(out).values() if "no longer has this task" in (t.error or "")]
    assert gone.metadata["floor"] == -1.0


def test_started_again_it_goes_on(run, tmp_path):
    out = tmp_path / "new"

    def stop(cell, trajectory):
        raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, asyncio.CancelledError)):
        asyncio.run(rescore(run, out, concurrency=1, on_end=stop))
    begun = sum(len(file.read_text().splitlines()) for file in (out / "episodes").iterdir())
    asyncio.run(rescore(run, out))
    (file,) = (out / "episodes").iterdir()
    assert 0 < begun < 6
    assert len(file.read_text().splitlines()) == 6
    assert episodes(out).keys() == episodes(run).keys()


def test_an_episode_that_failed_and_was_played_again_since_is_graded_then(run, capsys):
    assert graded(run, capsys)[1]["failed_before"] == 1
    was = episodes(run)["5", 0]
    was.end, was.error = "truncated", None
    (file,) = (run / "episodes").iterdir()
    with file.open("a") as lines:
        lines.write(json.dumps(was.to_json()) + "\n")
    _, cell = graded(run, capsys)
    assert (cell["graded"], cell["failed_before"], cell["failed"]) == (6, 0, 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{run}", "--kwargs", '{"sides": 3}'], "takes no argument 'sides'"),
        (["{run}", "--kwargs", f'{{"{__name__}:Sum": 3}}'], "alone must be an object"),
        (["{run}", "--out", "{run}"], "holds another run: choose another folder"),
        (["{run}/episodes"], "holds no evaluation"),
        (["{run}-nowhere"], "there is no such folder"),
        (["{run}", "--concurrency", "0"], "at least 1"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(words, said, run, capsys):
    assert main(["rescore", *(word.replace("{run}", str(run)) for word in words)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_runs_of_one_name_are_told_apart(run, tmp_path):
    other = tmp_path / "elsewhere" / run.name
    shutil.copytree(run, other)
    record = json.loads((other / "run.json").read_text())
    (other / "run.json").write_text(json.dumps({**record, "created": record["created"] - 60}))
    asyncio.run(rescore(run, tmp_path / "new"))
    with pytest.raises(ValueError, match="concurrency must be at least 1, not 0"):
        asyncio.run(rescore(run, tmp_path / "none", concurrency=0))
    with pytest.raises(ValueError, match="holds another run"):
        asyncio.run(rescore(other, tmp_path / "new"))


def test_an_episode_that_was_played_again_meanwhile_is_graded(run, tmp_path):
    (before,), _ = asyncio.run(rescore(run, tmp_path / "new"))
    (file,) = (run / "episodes").iterdir()
    (failed,) = [t for t in episodes(run).values() if t.failed]
    write_jsonl(file, [replace(failed, end="truncated", error=None)])
    (after,), _ = asyncio.run(rescore(run, tmp_path / "new"))
    assert (before.graded, before.failed_before, after.graded, after.failed_before) == (5, 1, 6, 0)


def test_a_replay_that_failed_is_tried_once_more(run, tmp_path):
    BROKEN.add("4")
    (before,), _ = asyncio.run(rescore(run, tmp_path / "new"))
    BROKEN.clear()
    (after,), _ = asyncio.run(rescore(run, tmp_path / "new"))
    assert (before.graded, before.failed, after.graded, after.failed) == (4, 1, 5, 0)


class LaterSum(Sum):
    closed = 0

    async def close(self):
        await asyncio.sleep(0)
        type(self).closed += 1


def test_environments_that_close_later_are_closed(run, tmp_path):
    text = (run / "run.json").read_text()
    (run / "run.json").write_text(text.replace(f'"{__name__}:Sum"', f'"{__name__}:LaterSum"'))
    asyncio.run(rescore(run, tmp_path / "new", concurrency=1))
    assert LaterSum.closed == 2  # that which was tried, and that which was played


def test_a_replay_ends_where_its_replies_end():
    spec = EnvSpec(id="sum", entry_point=f"{__name__}:Sum")
    (task,) = spec.tasks().take(1)
    (played,) = asyncio.run(
        run_many(spec.make, lambda e: ScriptedPolicy(["?"], "context"), [Episode(task)], limits=Limits())
    )
    assert (played.end, len(played.turns)) == ("context", 1)
