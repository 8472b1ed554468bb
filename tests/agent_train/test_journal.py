"""Turns are on disk as they end; whatever stops the run, its episodes are played again up to there and go on."""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_train.config.schema import EngineConfig, TinyConfig
from agent_train.engine.base import Completion, Sampling
from agent_train.engine.embedded import EmbeddedEngine
from agent_train.learner.tiny import build_tiny, texts_of_env
from agent_train.report.metrics import read_metrics
from agent_train.rollout.journal import Journal, JournalTurn
from agent_train.rollout.renderer import Renderer
from agent_train.rollout.sampler import Sampler
from agentgym.core.registration import spec
from agentgym.core.trajectory import read_jsonl
from agentgym_envs.games.frozen_lake import FrozenLake

numbers = st.lists(st.integers(0, 200_000), max_size=5)
turns = st.builds(
    JournalTurn,
    shared=st.integers(0, 9),
    new=numbers,
    completion=st.builds(
        Completion, numbers, st.lists(st.floats(-1e30, 0.0)), numbers, st.sampled_from(["stop", "length"])
    ),
)


def turn(number: int) -> JournalTurn:
    return JournalTurn(0, [number], Completion([number, 1], [-0.1, -1e-7], [3, 4], "stop"))


def written(path: Path, passes, told=None) -> None:
    """Keep the turns, (episode, number, turn), of each pass of the event loop."""

    async def keep():
        with Journal(path, refuse if told is None else told.append) as journal:
            for ended in passes:
                for one in ended:
                    journal.keep(*one)
                await asyncio.sleep(0)

    asyncio.run(keep())


def refuse(line: str) -> None:
    raise AssertionError(line)


def read(path: Path, *episodes: str) -> list[list[JournalTurn]]:
    with Journal(path, refuse) as journal:
        return [list(journal.take(episode)) for episode in episodes]


@settings(deadline=None, max_examples=40)
@given(data=st.data(), passes=st.lists(st.dictionaries(st.sampled_from("abc"), turns, max_size=3), max_size=5))
def test_what_is_cut_anywhere_has_all_turns_of_a_pass_or_none_and_can_be_gone_on_with(tmp_path_factory, data, passes):
    path = tmp_path_factory.mktemp("journal") / "000001.jsonl"
    held = {episode: [] for episode in "abc"}
    states = [{episode: [] for episode in "abc"}]
    ended = []
    for each in passes:
        ended.append([(episode, len(held[episode]), one) for episode, one in each.items()])
        for episode, one in each.items():
            held[episode].append(one)
        if each:
            states.append({episode: list(of) for episode, of in held.items()})
    written(path, ended)
    whole = path.read_bytes()
    assert whole.count(b"\n") == len(states) - 1
    assert read(path, *"abc") == list(states[-1].values())
    size = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:size])
    found = dict(zip("abc", read(path, *"abc"), strict=True))
    lines = whole[:size].count(b"\n")
    assert found in (states[lines], states[min(lines + 1, len(states) - 1)]), "a line may lack its end alone"
    written(path, [[("a", len(found["a"]), turn(5))]])
    assert read(path, *"abc") == [[*found["a"], turn(5)], found["b"], found["c"]]


def test_a_turn_is_on_disk_when_the_event_loop_has_passed(tmp_path):
    async def keep():
        with Journal(tmp_path / "a", refuse) as journal:
            journal.keep("e", 0, turn(0))
            await asyncio.sleep(0)
            return (tmp_path / "a").read_bytes()

    assert asyncio.run(keep()).endswith(b"\n")


def test_another_try_of_an_episode_begins_it_anew_and_what_follows_a_gap_is_left_out(tmp_path):
    path = tmp_path / "a"
    written(path, [[("e", 0, turn(0))], [("e", 1, turn(1))], [("e", 0, turn(2))], [("f", 1, turn(3))]])
    assert read(path, "e", "f", "nobody") == [[turn(2)], [], []]
    with Journal(path, refuse) as journal:
        assert list(journal.take("e")) == [turn(2)]
        assert not journal.take("e"), "a second try in the same start has none"


def test_unknown_fields_and_foreign_lines_are_passed_over(tmp_path):
    path = tmp_path / "a"
    written(path, [[("e", 0, turn(0))], [("e", 1, turn(1))]])
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
    written(path, [[("e", 0, turn(0))]])
    with files_no_longer_than(path.stat().st_size + room):
        written(path, [[("e", 1, turn(1))], [("e", 2, turn(2))]], told)
    assert len(told) == 1
    assert str(path) in told[0]
    assert read(path, "e") == [[turn(0)]]
    written(path, [[("e", 1, turn(1))]])
    assert read(path, "e") == [[turn(0), turn(1)]]


def test_a_journal_that_cannot_be_opened_is_told_and_empty(tmp_path):
    told = []
    written(tmp_path / "missing" / "a", [[("e", 0, turn(0))]], told)
    assert len(told) == 1
    assert "missing" in told[0]


SAMPLING = Sampling(max_tokens=6, temperature=0.8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy")
    texts = texts_of_env("frozen_lake", n=16)
    build_tiny(path, texts, TinyConfig(hidden=64, layers=2, heads=2, intermediate=96), 512, seed=0)
    return path


@pytest.fixture(scope="module")
def rollout(folder):
    """Plays two tasks, three episodes each, by a journal: the groups, the journal, and how often the engine answered."""
    renderer = Renderer.of_folder(folder)
    problems = list(spec("frozen_lake").tasks("train").take(2))

    def play(path: Path, make_env=FrozenLake):
        answered = []

        class Counted(EmbeddedEngine):
            async def generate(self, *given):
                completion = await super().generate(*given)
                answered.append(completion)
                return completion

        async def collect():
            config = EngineConfig("embedded", max_model_len=512, request_timeout=30)
            engine = await Counted.start(config, folder, folder, dtype="float32", deterministic=True)
            with Journal(path, refuse) as journal:
                sampler = Sampler(make_env, engine, renderer, SAMPLING, group_size=3, seed=11)
                groups = await asyncio.wait_for(sampler.collect(problems, 0, journal=journal), 60)
                assert engine.live_sessions == 0
            await engine.close()
            return groups, journal, len(answered)

        return asyncio.run(collect())

    return play


def exactly(groups):
    """All that the episodes said, were told and earned, to the last bit."""
    return [
        [t.id, t.seed, t.end, t.error, [[n.observation, n.reply, n.reward, vars(n.tokens)] for n in t.turns]]
        for group in groups
        for t in group.trajectories
    ]


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


def turns_of(groups) -> int:
    return sum(len(t.turns) for group in groups for t in group.trajectories)


def test_a_rollout_that_was_cut_off_anywhere_ends_as_if_it_had_not_been(rollout, tmp_path):
    """To the last bit, since the embedded engine's batches are what they would have been."""
    undisturbed, journal, asked = rollout(tmp_path / "whole")
    assert (journal.answered, journal.diverged, asked) == (0, 0, turns_of(undisturbed))
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    for count in (0, 1, len(lines) // 2, len(lines)):
        path = tmp_path / f"{count}"
        path.write_bytes(b"".join(lines[:count]) + b'[{"episode":')
        written = sum(len(json.loads(line)) for line in lines[:count])
        groups, journal, asked = rollout(path)
        assert exactly(groups) == exactly(undisturbed)
        assert (journal.answered, journal.diverged, asked) == (written, 0, turns_of(undisturbed) - written)
        assert path.read_bytes() == (tmp_path / "whole").read_bytes(), "and the journal is whole"


def test_an_environment_that_does_not_say_the_same_again_begins_its_episodes_anew_and_is_counted(rollout, tmp_path):
    path = tmp_path / "a"
    before, _, _ = rollout(path)
    longest = max(len(t.turns) for t in before[0].trajectories)
    assert longest > 2, "else nothing is played again before the difference"
    groups, journal, asked = rollout(path, lake(turn_2="It rains. "))
    diverging = [t for t in before[0].trajectories if len(t.turns) > 2]
    assert journal.diverged == len(diverging)
    assert journal.answered == turns_of(before) - sum(len(t.turns) - 2 for t in diverging)
    again = {t.id for t in diverging}
    for t in (t for group in groups for t in group.trajectories):
        assert not t.failed
        assert bool(t.metadata.get("errors")) == (t.id in again)
        assert all("DivergedError" in error for error in t.metadata.get("errors", []))
    assert asked == sum(len(t.turns) for group in groups for t in group.trajectories if t.id in again)
    assert exactly(groups[1:]) == exactly(before[1:])
    third, journal, asked = rollout(path, lake(turn_2="It rains. "))
    assert exactly(third) == exactly(groups), "and what was begun anew is in the journal in place of what was there"
    assert (journal.answered, journal.diverged, asked) == (turns_of(groups), 0, 0)


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_that_is_killed_while_it_is_ahead_goes_on_within_the_bound_and_loses_no_turn(tmp_path):
    words = ["+env=frozen_lake", "engine=embedded", "learner.workers=1", "trainer.staleness=1", "trainer.eval_every=9"]
    words += ["trainer.groups_per_step=4", "algorithm.group_size=4", "trainer.eval_episodes=2", "sft.episodes=16"]
    words += ["model.tiny.hidden=64", "model.tiny.heads=2", "model.tiny.intermediate=128", "model.tiny.layers=1"]
    command = [sys.executable, "-m", "agent_train.cli", *words, f"trainer.runs_dir={tmp_path}", "trainer.name=run"]
    run, steps = tmp_path / "run", 5
    command.append(f"trainer.steps={steps}")
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 200
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

    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [record for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "train"]
    assert [record["step"] for record in found] == list(range(1, steps + 1))
    assert all(record["update"]["staleness_max"] <= 1 for record in found)
    assert sum(record["journal_turns"] for record in found if record["step"] > saved) == len(kept)
    assert [record["diverged"] for record in found] == [0] * steps
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
