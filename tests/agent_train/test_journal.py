"""Turns are on disk as they end; whatever stops the run, its episodes are played again up to there and go on."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import multiprocessing
import os
import resource
import time
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path

import journal_cases
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_cases import count_calls, episodes_of, exactly, failures, lines_of, refuse

from agent_train.config.schema import Config
from agent_train.engine.base import Completion
from agent_train.report.metrics import read_metrics
from agent_train.rollout.journal import DivergedError, Journal
from agent_train.trainer.rl import play, trained_checksums
from agent_train.trainer.run_folder import RunFolder
from agentgym import Env
from agentgym.core.messages import text_of, user
from agentgym.core.registration import spec
from agentgym.core.tasks import Task, TaskSet
from agentgym.core.trajectory import Group, read_jsonl
from agentgym.sandbox import SandboxSpec, acquire
from agentgym_envs.games.frozen_lake import FrozenLake

numbers = st.lists(st.integers(0, 200_000), max_size=5)
completions = st.builds(
    Completion, numbers, st.lists(st.floats(-1e30, 0.0)), numbers, st.sampled_from(["stop", "length"])
)
turns = st.tuples(st.integers(0, 9), numbers, completions)


def turn(number: int):
    """What a turn of an episode keeps: shared and new ids of its prompt, and the answer."""
    return 0, [number], Completion([number, 1], [-0.1, -1e-7], [3, 4], "stop")


def written(path: Path, passes, told=None) -> None:
    """Keep the turns, (episode, turn), of each pass of the event loop, in a start that goes on where the last one was."""

    async def keep():
        with Journal(path, refuse if told is None else told.append) as journal:
            begun = set()
            for ended in passes:
                for episode, one in ended:
                    if episode not in begun:
                        replay(journal, episode)
                        begun.add(episode)
                    journal.keep(episode, *one)
                await asyncio.sleep(0)

    asyncio.run(keep())


def replay(journal: Journal, episode: str):
    """Begin a try of an episode, and have all answered again that is known of it; these turns."""
    journal.begin(episode, 3)
    known = [(each.shared, each.new, each.completion) for each in journal._episodes[episode].turns]
    assert [journal.answer(episode, shared, new) for shared, new, _ in known] == [answer for *_, answer in known]
    assert journal.answer(episode, 0, [0]) is None
    return known


def read(path: Path, *episodes: str):
    with Journal(path, refuse) as journal:
        return [replay(journal, episode) for episode in episodes]


@settings(deadline=None, max_examples=40)
@given(data=st.data(), passes=st.lists(st.dictionaries(st.sampled_from("abc"), turns, max_size=3), max_size=5))
def test_what_is_cut_anywhere_has_all_turns_of_a_pass_or_none_and_can_be_gone_on_with(tmp_path_factory, data, passes):
    path = tmp_path_factory.mktemp("journal") / "000001.jsonl"
    held = {episode: [] for episode in "abc"}
    states = [{episode: [] for episode in "abc"}]
    ended = []
    for each in passes:
        ended.append(list(each.items()))
        for episode, one in each.items():
            held[episode].append(one)
        if each:
            states.append({episode: list(of) for episode, of in held.items()})
    written(path, ended)
    whole = path.read_bytes()
    assert whole.count(b"\n") == len(states) - 1
    assert read(path, *"abc") == list(states[-1].values())
    size = round(data.draw(st.floats(0, 1)) * len(whole))  # a share: times make lines longer and shorter
    path.write_bytes(whole[:size])
    found = dict(zip("abc", read(path, *"abc"), strict=True))
    lines = whole[:size].count(b"\n")
    assert found in (states[lines], states[min(lines + 1, len(states) - 1)]), "a line may lack its end alone"
    written(path, [[("a", turn(5))]])
    assert read(path, *"abc") == [[*found["a"], turn(5)], found["b"], found["c"]]


def test_a_try_that_diverges_and_goes_on_is_read_as_it_went_on(tmp_path):
    """What an agent asks that plays by itself: its calls were in another order."""
    path = tmp_path / "a"
    written(path, [[("e", turn(0))], [("e", turn(1))]])

    async def go_on():
        with Journal(path, refuse) as journal:
            journal.begin("e", 4)
            assert journal.answer("e", *turn(0)[:2]) == turn(0)[2]
            with pytest.raises(DivergedError):
                journal.answer("e", 0, [9])
            journal.go_on("e")
            for number in (9, 10):
                assert journal.answer("e", 0, [number]) is None
                journal.keep("e", *turn(number))
                await asyncio.sleep(0)

    asyncio.run(go_on())
    assert read(path, "e") == [[turn(0), turn(9), turn(10)]]


@given(st.lists(st.integers(1, 30), min_size=3, max_size=20, unique=True))
def test_an_episode_that_goes_otherwise_in_each_try_is_tried_twice_more(lengths):
    """As of an agent that writes the time into its prompts, with an environment that fails for ever."""
    prompts = itertools.count()

    async def tries():
        with Journal() as journal:
            for tried, length in enumerate(lengths, 1):
                journal.begin("e", 0)
                for _ in range(length):
                    new = [next(prompts)]
                    try:
                        assert journal.answer("e", 0, new) is None
                    except DivergedError:
                        journal.go_on("e")
                    journal.keep("e", 0, new, turn(0)[2])
                if not journal.again("e"):
                    return tried
        raise AssertionError

    assert asyncio.run(tries()) == 3


def test_a_turn_is_on_disk_when_the_event_loop_has_passed(tmp_path):
    async def keep():
        with Journal(tmp_path / "a", refuse) as journal:
            journal.keep("e", *turn(0))
            await asyncio.sleep(0)
            return (tmp_path / "a").read_bytes()

    assert asyncio.run(keep()).endswith(b"\n")


def test_what_is_begun_anew_is_so_for_later_starts_too_and_what_follows_a_gap_is_left_out(tmp_path):
    path = tmp_path / "a"
    written(path, [[("e", turn(0))], [("e", turn(1))], [("f", turn(2))], [("f", turn(3))]])

    async def anew():
        with Journal(path, refuse) as journal:
            journal.begin("e", 4)
            with pytest.raises(DivergedError):
                journal.answer("e", 0, [9])
            assert journal.again("e")
            journal.begin("e", 4)
            journal.keep("e", *turn(5))
            await asyncio.sleep(0)

    asyncio.run(anew())
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], *lines[3:]]) + "\n")
    assert read(path, "e", "f", "nobody") == [[turn(5)], [], []]


def test_unknown_fields_and_foreign_lines_are_passed_over(tmp_path):
    path = tmp_path / "a"
    written(path, [[("e", turn(0))], [("e", turn(1))]])
    first, second = path.read_text().splitlines()
    known = {**json.loads(first)[0], "colour": "blue"}
    foreign = ["", "7", "null", '{"episode": "e"}', '[{"episode": "e", "turn": 1}]', '[["e"]]', "\ufffd", "[" * 9]
    path.write_text("\n".join([json.dumps([known]), *foreign, second]) + "\n")
    assert read(path, "e") == [[turn(0), turn(1)]]


@contextmanager
def files_no_longer_than(size: int):
    """What a full disk does: part of a line is written, and then nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 10])
def test_a_full_disk_is_told_once_and_costs_the_later_turns_alone(tmp_path, room):
    path, told = tmp_path / "a", []
    written(path, [[("e", turn(0))]])
    with files_no_longer_than(path.stat().st_size + room):
        written(path, [[("e", turn(1))], [("e", turn(2))]], told)
    assert len(told) == 1
    assert str(path) in told[0]
    assert read(path, "e") == [[turn(0)]]
    written(path, [[("e", turn(1))]])
    assert read(path, "e") == [[turn(0), turn(1)]]


def test_a_journal_that_cannot_be_opened_is_told_and_empty(tmp_path):
    told = []
    written(tmp_path / "missing" / "a", [[("e", turn(0))]], told)
    assert len(told) == 1
    assert "missing" in told[0]


@pytest.fixture(scope="module")
def rollout(tmp_path_factory):
    """Plays two tasks, three episodes each, by a journal: the groups, the journal, and how often the engine answered."""
    return partial(journal_cases.rollout, journal_cases.build(tmp_path_factory.mktemp("policy")))


def lake(**said):
    """A lake that says otherwise: `said` maps a turn to what comes before its observation, in the first task."""
    first = next(iter(spec("frozen_lake").tasks("train"))).id

    class Other(FrozenLake):
        def step(self, action):
            observation, *rest = super().step(action)
            if self.task.id == first and (more := said.get(f"turn_{self.turn}")):
                observation = [{**message, "content": more + message["content"]} for message in observation]
            return observation, *rest

    return Other


def test_a_rollout_that_was_cut_off_anywhere_ends_as_if_it_had_not_been(rollout, tmp_path):
    """To the last bit, since the embedded engine's batches are what they would have been."""
    undisturbed, journal, asked = rollout(tmp_path / "whole")
    assert (journal.answered, journal.diverged, asked) == (0, 0, count_calls(undisturbed))
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    for count in (0, 1, len(lines) // 2, len(lines)):
        path = tmp_path / f"{count}"
        path.write_bytes(b"".join(lines[:count]) + b'[{"episode":')
        written = sum(len(json.loads(line)) for line in lines[:count])
        groups, journal, asked = rollout(path)
        assert exactly(groups) == exactly(undisturbed)
        assert (journal.answered, journal.diverged, asked) == (written, 0, count_calls(undisturbed) - written)
        assert lines_of(path) == lines_of(tmp_path / "whole"), "and the journal is whole"


def test_an_environment_that_does_not_say_the_same_again_begins_its_episodes_anew_and_is_counted(rollout, tmp_path):
    path = tmp_path / "a"
    before, _, _ = rollout(path)
    longest = max(len(t.turns) for t in before[0].trajectories)
    assert longest > 2, "else nothing is played again before the difference"
    groups, journal, asked = rollout(path, lake(turn_2="It rains. "))
    diverging = [t for t in before[0].trajectories if len(t.turns) > 2]
    assert journal.diverged == len(diverging)
    assert journal.answered == count_calls(before) - sum(len(t.turns) - 2 for t in diverging)
    again = {t.id for t in diverging}
    for t in (t for group in groups for t in group.trajectories):
        assert not t.failed
        assert bool(t.metadata.get("errors")) == (t.id in again)
        assert all("DivergedError" in error for error in t.metadata.get("errors", []))
    assert asked == sum(len(t.turns) for group in groups for t in group.trajectories if t.id in again)
    assert exactly(groups[1:]) == exactly(before[1:])
    third, journal, asked = rollout(path, lake(turn_2="It rains. "))
    assert exactly(third) == exactly(groups), "and what was begun anew is in the journal in place of what was there"
    assert (journal.answered, journal.diverged, asked) == (count_calls(groups), 0, 0)


def test_an_environment_that_ends_its_episode_earlier_than_before_ends_it_and_is_counted(rollout, tmp_path):
    class Short(FrozenLake):
        def step(self, action):
            observation, reward, *_, info = super().step(action)
            return observation, reward, True, False, info

    before, _, _ = rollout(tmp_path / "a")
    longer = sum(len(t.turns) > 1 for t in episodes_of(before))
    groups, journal, asked = rollout(tmp_path / "a", Short)
    assert [(t.end, len(t.turns)) for t in episodes_of(groups)] == [("terminated", 1)] * 6
    assert (journal.diverged, journal.answered, asked) == (longer, 6, 0)


def test_the_greedy_episodes_of_remax_are_in_the_journal(rollout, tmp_path):
    config = Config()
    config.algorithm.advantage.name, config.trainer.groups_per_step = "remax", 2

    async def with_greedy(sampler, tasks, journal):
        played, _ = await play(config, sampler, TaskSet(tasks), None, 0, [0, 1], journal)
        return [*played.groups, Group("greedy", played.greedy)]

    groups, _, asked = rollout(tmp_path / "a", play=with_greedy)
    assert asked == count_calls(groups)
    again, journal, asked = rollout(tmp_path / "a", play=with_greedy)
    assert (journal.answered, asked) == (count_calls(groups), 0)
    assert exactly(again) == exactly(groups)


# ---- sandboxes


class Notes(Env):
    """Appends every answer to a file in its sandbox and says the file's hash: of all actions so far. The second task's adds chance."""

    tasks = [Task(f"notes {n}", (user("Write."),)) for n in range(2)]  # noqa: RUF012 - as environments do
    max_turns = 4

    def __init__(self, hangs_in=None):
        super().__init__()
        self.hangs_in, self.box = hangs_in, None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.free()
        self.box = acquire(SandboxSpec(), backend="bubblewrap")
        return list(self.current_task.messages), {}

    def step(self, action):
        text = self.read(action)
        if self.turn == self.hangs_in:
            time.sleep(600)
        more = "" if self.task.id == "notes 0" else "; od -An -N8 /dev/urandom >> notes"
        told = self.box.exec(f"cat >> notes{more}; sha256sum notes", stdin=text)
        return self.outcome(told.stdout)

    def free(self):
        if self.box is not None:
            self.box.close()

    def close(self):
        self.free()
        super().close()


@pytest.mark.bubblewrap
def test_a_sandbox_is_what_its_actions_make_it_again_after_a_kill_unless_chance_is_in_it(rollout, tmp_path):
    path = tmp_path / "a"
    given = (*rollout.args, path, partial(Notes, hangs_in=3), Notes.tasks)
    played = multiprocessing.get_context("spawn").Process(target=journal_cases.rollout, args=given)
    played.start()
    deadline = time.monotonic() + 400
    while not path.exists() or len(list(chain(*lines_of(path)))) < 3 * 6:
        assert played.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    played.kill()
    played.join()
    (same, other), journal, asked = rollout(path, Notes, Notes.tasks)
    assert journal.answered == 3 * 3 + 3 * 1, "the first turn is sampled before any chance"
    assert (journal.diverged, asked) == (3, 3 * 1 + 3 * 4)
    assert failures([same, other]) == [0] * 3 + [1] * 3
    for episode in same.trajectories:
        written = "".join(text_of(turn.reply) for turn in episode.turns).encode()
        assert text_of(episode.final_observation[0]).split()[0] == hashlib.sha256(written).hexdigest()
    assert [len(t.turns) for t in other.trajectories] == [4] * 3


# ---- what it knows of weights and times


def test_an_episode_began_when_the_first_of_its_turns_did_in_whatever_start(tmp_path):
    async def start(version, known=None):
        with Journal(tmp_path / "a", refuse) as journal:
            journal.begin("e", version)
            if known == "otherwise":
                with pytest.raises(DivergedError):
                    journal.answer("e", 0, [9])
                assert journal.again("e")
                journal.begin("e", version)
            elif known:
                assert journal.answer("e", 0, [0])
            journal.keep("e", *turn(0))
            await asyncio.sleep(0)
            return journal.end("e")

    first, second, third = (asyncio.run(start(*given)) for given in ((3,), (7, "as it was"), (8, "otherwise")))
    assert first["version"] == 3
    assert second == first
    assert third["version"] == 8
    assert third["began"] > first["began"]


def test_tokens_of_weights_that_the_run_trained_otherwise_since_are_counted(rollout, tmp_path):
    rollout(tmp_path / "whole", weights={0: 11})
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)[:2]
    tokens = sum(len(turn["ids"]) for line in lines for turn in json.loads(line))
    for now, replaced in (({0: 11}, 0), ({0: 12}, tokens), ({}, 0)):
        (tmp_path / "a").write_bytes(b"".join(lines))
        _, journal, _ = rollout(tmp_path / "a", weights=now)
        assert journal.answered > 0
        assert journal.counts()["replaced_tokens"] == replaced
    now[0] = 12
    assert journal.counts()["replaced_tokens"] == tokens, "a version counts as soon as it is trained"


def test_a_run_that_goes_on_knows_the_weights_that_it_has_trained(tmp_path):
    run = RunFolder(tmp_path)
    assert trained_checksums(run) == {}
    records = [{"kind": "eval", "step": 0}, *({"kind": "train", "step": n, "weights_checksum": 10 * n} for n in (1, 2))]
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert trained_checksums(run) == {1: 10, 2: 20}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_is_killed_while_it_is_ahead_goes_on_within_the_bound_and_loses_no_turn(
    in_shared_ray, forks, tmp_path
):
    """It goes on from its beginning with smaller micro-batches, whose sums round otherwise: each version has other weights then."""
    words = ["+env=frozen_lake", "engine=embedded", "learner.workers=1", "trainer.staleness=1", "trainer.eval_every=9"]
    words += ["trainer.groups_per_step=4", "algorithm.group_size=4", "trainer.eval_episodes=2", "sft.episodes=16"]
    words += ["model.tiny.hidden=64", "model.tiny.heads=2", "model.tiny.intermediate=128", "model.tiny.layers=1"]
    words += ["trainer.save_every=9", "env.kwargs.shaping=1.0"]
    command = ["-m", "agent_train.cli", *words, f"trainer.runs_dir={tmp_path}", "trainer.name=run"]
    run, steps = tmp_path / "run", 5
    command.append(f"trainer.steps={steps}")
    env = {**os.environ, **in_shared_ray}
    driver = forks.start(command, env)
    try:
        deadline = time.monotonic() + 400
        while not (run / "trajectories" / "train-000003.jsonl").exists():
            assert driver.poll() is None, "it ended before its third step"
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        driver.kill()
        driver.wait()
    saved = int((run / "checkpoints" / "latest").read_text().strip().removeprefix("step-"))
    files = [file for file in (run / "turns").iterdir() if int(file.stem) > saved]
    kept = [turn for file in files for line in file.read_text().split("\n")[:-1] for turn in json.loads(line)]
    assert len({turn["episode"] for turn in kept}) > 4 * 4, "of more than one step"

    forks.run([*command, "learner.microbatch_tokens=128"], env, 400)
    found = [record for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "train"]
    assert [record["step"] for record in found] == list(range(1, steps + 1))
    assert all(record["update"]["staleness_max"] <= 1 for record in found)
    assert sum(record["journal_turns"] for record in found if record["step"] > saved) == len(kept)
    assert [record["diverged"] for record in found] == [0] * steps
    now = {str(record["step"]): record["weights_checksum"] for record in found}
    other = [v for turn in kept for v in turn["versions"] if now.get(str(v)) not in (None, turn["weights"][str(v)])]
    assert sum(record["replaced_tokens"] for record in found) == len(other) > 0
    assert found[0]["replaced_tokens"] == 0
    trained = [t for step in range(1, steps + 1) for t in read_jsonl(run / "trajectories" / f"train-{step:06d}.jsonl")]
    said = {(f"{t.seed:x}", n): turn.tokens for t in trained for n, turn in enumerate(t.turns)}
    for turn in kept:
        tokens = said[turn["episode"], turn["turn"]]
        for name, value in (
            ("ids", tokens.completion_ids),
            ("logprobs", tokens.logprobs),
            ("versions", tokens.versions),
        ):
            assert turn[name] == value
    assert len(trained) == steps * 4 * 4
    assert len({t.task_id for t in trained}) == steps * 4, "no task is skipped or trained on twice"
    assert not list((run / "turns").iterdir()), "the last checkpoint holds all that they were for"
