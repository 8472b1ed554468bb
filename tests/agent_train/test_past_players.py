"""Players whom the policy plays as it was at an earlier step: ratings, who is met, the engine of the past, and a run that goes on."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from dataclasses import asdict

import pytest
import torch
from engine_models import build, reference_logprobs
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from agent_train.algorithms.ratings import UNIFORM, after_games, chances, draw, expected, kept_steps, score_of
from agent_train.cluster.placement import Parts, gpus_needed, parts_that_fit
from agent_train.config.compose import compose, config_from_yaml
from agent_train.config.schema import Config, ConfigError
from agent_train.config.validation import validate
from agent_train.engine.base import Sampling
from agent_train.engine.embedded import EmbeddedEngine
from agent_train.report.metrics import read_metrics
from agent_train.rollout.past import Past, opponent_of, rated
from agent_train.trainer.checkpoint import CheckpointError, Progress
from agent_train.trainer.run_folder import RunFolder
from agent_train.weights.collective import checksum
from agent_train.weights.sync import WeightSyncError, load_saved
from agentgym.core.trajectory import read_jsonl

GAME = "+env=tic_tac_toe_self"

# ---- ratings


def test_four_hundred_points_more_are_ten_wins_to_one():
    assert expected(1000, 1000) == 0.5
    assert expected(1400, 1000) == pytest.approx(10 / 11)
    assert expected(1000, 1400) == pytest.approx(1 / 11)


def test_a_rating_moves_by_eight_times_the_surprise_of_each_game_and_the_other_s_by_the_opposite():
    assert after_games(1000, 1000, [1.0]) == (1004, 996)
    assert after_games(1000, 1000, [0.5, 0.5]) == (1000, 1000)
    assert after_games(1400, 1000, [0.0]) == pytest.approx((1400 - 80 / 11, 1000 + 80 / 11))
    # The second game is expected to be won by 1 / (1 + 10^(-8 / 400)) = 0.5115.
    assert after_games(1000, 1000, [1.0, 1.0]) == pytest.approx((1007.908, 992.092), abs=1e-3)


@pytest.mark.parametrize(
    ("rewards", "score"),
    [
        ({"X": 1.0, "O": 0.0}, 1.0),
        ({"X": 0.5, "O": 0.5}, 0.5),
        ({"X": -1.0, "O": 0.0}, 0.0),
        ({"X": 1.0, "Y": 0.0, "O": 0.5}, 0.5),  # a team's mean
        ({"X": 0.1}, 1.0),  # who earned nothing has 0
    ],
)
def test_who_learns_has_won_with_the_higher_reward(rewards, score):
    assert score_of(rewards, ["O"], [name for name in rewards if name != "O"]) == score


def test_the_start_and_the_newest_policies_can_be_met():
    assert kept_steps(0, 10, 3) == kept_steps(9, 10, 3) == [0]
    assert kept_steps(25, 10, 3) == [0, 10, 20]
    assert kept_steps(30, 10, 3) == [0, 20, 30]
    assert kept_steps(30, 10, 2) == [0, 30]


def test_the_harder_a_past_policy_the_oftener_it_is_met_and_none_is_forgotten():
    ratings = {"now": 1000.0, "0": 1000.0, "10": 1400.0, "20": -2000.0}
    hard = [0.25, (10 / 11) ** 2, 0.0]  # (1 - p)^2
    wanted = [(1 - UNIFORM) * each / sum(hard) + UNIFORM / 3 for each in hard]
    assert chances(ratings, [0, 10, 20]) == pytest.approx(wanted, abs=1e-9)
    drawn = [draw(ratings, [0, 10, 20], seed) for seed in range(4000)]
    assert [drawn.count(step) / 4000 for step in (0, 10, 20)] == pytest.approx(wanted, abs=0.03)
    assert drawn == [draw(ratings, [0, 10, 20], seed) for seed in range(4000)]


# ---- settings


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            [GAME, "env.players.O=past", "trainer.staleness=1"],
            "env.players.O=past: all episodes of a step have the same",
        ),
        (
            [GAME, "env.players.O=past", "engine=vllm", "engine.placement=colocated"],
            "env.players.O=past: its weights need an engine that the run starts",
        ),
        ([GAME, "env.players.Y=past"], "env.players.Y: tic_tac_toe_self has no such player, only X, O"),
        ([GAME, "env.players.O=past", "env.players.X=expert"], "env.players: no player of tic_tac_toe_self is left to"),
        ([GAME, "env.players.O=past", "env.past_keep=1"], "env.past_keep=1: must be 2 or more"),
        ([GAME, "env.past_every=5"], "env.past_every=5: has no effect without env.players"),
        (["+env=frozen_lake", "env.players.O=past"], "env.players.O=past: frozen_lake has one agent, not players"),
    ],
)
def test_a_past_that_nobody_can_meet_is_refused(words, told):
    with pytest.raises(ConfigError) as refused:
        validate(compose(["engine=embedded", *words]))
    assert any(problem.startswith(told) for problem in refused.value.problems), refused.value.problems


def test_the_server_of_the_past_has_a_gpu_of_its_own():
    config = Config()
    config.engine.replicas, config.learner.workers, config.env.players = 2, 2, {"O": "expert"}
    four = [{"GPU": 4.0, "CPU": 16.0}]
    assert (gpus_needed(config), parts_that_fit(config, four)) == (4, Parts(2, 2, 0))
    config.env.players = {"O": "past"}
    assert (gpus_needed(config), parts_that_fit(config, four)) == (5, Parts(2, 1, 0))
    assert parts_that_fit(config, [{"GPU": 1.0, "CPU": 16.0}]) is None


# ---- the engine of the past


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return build(tmp_path_factory.mktemp("model"))


def test_episodes_that_ask_two_engines_in_turn_are_answered_the_same_whatever_their_pace(model_dir):
    async def play(pace: int):
        now, past = (EmbeddedEngine(model_dir, 256, batch_wait=None) for _ in range(2))
        past.play_beside(now)
        seconds = random.Random(pace)

        async def episode(number: int):
            said = []
            for turn in range(4 + number % 2):
                await asyncio.sleep(seconds.random() * 0.02)
                engine = past if (turn + number) % 3 else now
                said.append(await engine.generate([7 + number, turn + 3], Sampling(4, seed=number * 10 + turn)))
            now.close_session()
            return said

        now.open_session(6)
        try:
            return await asyncio.wait_for(asyncio.gather(*map(episode, range(6))), 60)
        finally:
            await now.close()
            await past.close()

    assert asyncio.run(play(1)) == asyncio.run(play(2))


def test_weights_that_are_not_as_they_were_saved_are_not_played(model_dir, tmp_path):
    weights = load_file(f"{model_dir}/model.safetensors")
    changed = {name: tensor + 0.25 for name, tensor in weights.items()}
    save_file(changed, tmp_path / "model.safetensors")

    async def load(sums):
        engine = EmbeddedEngine(model_dir, 256)
        try:
            await load_saved(engine, tmp_path, 3, sums)
            return engine.version, engine.model.state_dict()
        finally:
            await engine.close()

    version, state = asyncio.run(load({name: checksum(tensor) for name, tensor in changed.items()}))
    assert version == 3
    assert all(torch.equal(state[name], tensor) for name, tensor in changed.items())
    with pytest.raises(WeightSyncError, match="step 3"):
        asyncio.run(load({name: checksum(tensor) for name, tensor in weights.items()}))


class Replaced:
    """A double of an engine whose server has died, which shows when the second weights are loaded; its successor takes them too."""

    def __init__(self):
        self.version, self.lacks_weights, self.loaded, self._stale = 0, False, [], asyncio.Event()

    async def stale(self):
        await self._stale.wait()

    async def losses(self):
        return 0

    async def fetch_weights(self, folder):
        if len(self.loaded) == 1:
            self.lacks_weights = True
            self._stale.set()
            await asyncio.sleep(0.05)
        return [{}]

    async def load_fetched(self, version):
        self.loaded.append(version)
        self.version, self.lacks_weights = version, False
        self._stale.clear()
        return {}


def test_a_successor_of_a_server_of_the_past_gets_the_weights_of_this_step_and_not_those_that_it_had(tmp_path):
    async def two_steps():
        past = Past(compose([GAME, "env.players.O=past"]), RunFolder(tmp_path), Replaced())
        for step in 1, 2:
            past.run.past_weights(step).mkdir(parents=True)
            past.run.past_weights(step).with_suffix(".json").write_text("{}")
        await past.meet(1)
        watching = asyncio.create_task(past.watch())
        await asyncio.sleep(0)
        await past.meet(2)
        await asyncio.sleep(0.05)
        watching.cancel()
        with pytest.raises(CheckpointError, match="000003 is gone"):
            await past.meet(3)
        return past.engine.loaded

    assert asyncio.run(asyncio.wait_for(two_steps(), 60)) == [1, 2]


# ---- a run

RUN = [
    *(GAME, "env.players.O=past", "env.past_every=1", "env.past_keep=3", "engine=embedded", "learner.workers=1"),
    *("model.tiny.hidden=64", "model.tiny.heads=2", "model.tiny.intermediate=128", "model.tiny.layers=2"),
    *("trainer.groups_per_step=4", "algorithm.group_size=4", "sampling.max_tokens=4", "engine.max_model_len=1024"),
    *("sft.episodes=0", "learner.lr=2e-3", "trainer.eval_every=100", "trainer.eval_episodes=4"),
    *("trainer.save_every=6", "trainer.keep_checkpoints=1", "trainer.deterministic=true"),
]


def begin(forks, run, shared_ray, *words):
    where = f"trainer.runs_dir={run.parent}", f"trainer.name={run.name}"
    with run.with_name("told").open("wb") as told:
        words = ["-m", "agent_train.cli", *RUN, *where, *words]
        return forks.start(words, {**os.environ, **shared_ray}, out=told, err=told)


def steps_of(run):
    records = read_metrics(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
    return [record for record in records if record["kind"] == "train"]


def stopped_after(steps, forks, run, shared_ray, *words):
    """The steps of a run that is stopped after so many, or a few more."""
    started, deadline = begin(forks, run, shared_ray, "trainer.steps=100", *words), time.monotonic() + 500
    while len(steps_of(run)) < steps and started.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    started.send_signal(signal.SIGTERM)
    started.wait(60)
    assert len(steps_of(run)) >= steps, run.with_name("told").read_text()
    return steps_of(run)


def model_of(run, step):
    """The model of a run with the weights that it kept of a step."""
    model = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    model.load_state_dict(load_file(run / "past" / f"{step:06d}" / "model.safetensors"), strict=False)
    return model.eval()


def gaps(run, step, version, model):
    """The largest differences of log-probabilities between what a version said in a step, by the journal, and what a model finds."""
    said, found = {}, []
    for line in (run / "turns" / f"{step:06d}.jsonl").read_text().splitlines():
        for turn in json.loads(line):
            key = turn["episode"], turn["versions"][0]
            prompt = said.get(key, [])[: turn["shared"]] + turn["new"]
            said[key] = prompt + turn["ids"]
            if key[1] == version:
                there = reference_logprobs(model, prompt, turn["ids"], 1.0)
                found.append(float((torch.tensor(turn["logprobs"]) - there).abs().max()))
    return found


def told_apart(run, steps, first, close, far):
    """The steps from `first` on that met older weights than those that learned: whether each side's tokens are its own weights'."""
    met = {record["step"]: record["players"]["opponent"] for record in steps if record["step"] >= first}
    older = [(step, past) for step, past in met.items() if past < step - 1]
    for step, past in older:
        now, then = model_of(run, step - 1), model_of(run, past)
        assert len(gaps(run, step, past, then)) >= 4
        assert max(gaps(run, step, past, then) + gaps(run, step, step - 1, now)) < close
        assert max(gaps(run, step, past, now)) > far
        assert max(gaps(run, step, step - 1, then)) > far
    return older


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_past_plays_by_its_own_weights_and_a_run_that_goes_on_meets_it_with_the_ratings_it_had(
    in_shared_ray, forks, tmp_path
):
    run = tmp_path / "run"
    before = stopped_after(8, forks, run, in_shared_ray)
    assert len(before) < 12, "the turns since the checkpoint of step 6 are on the disk"
    assert told_apart(run, before, first=7, close=1e-4, far=1e-3)

    again = begin(forks, run, in_shared_ray, "trainer.steps=13")
    assert again.wait(300) == 0, run.with_name("told").read_text()
    steps, config = steps_of(run), config_from_yaml((run / "config.yaml").read_text())
    assert [r["players"] for r in steps[: len(before)]] == [r["players"] for r in before]
    progress = Progress()
    for record in steps:
        played = list(read_jsonl(run / "trajectories" / f"train-{record['step']:06d}.jsonl"))
        assert record["players"]["opponent"] == opponent_of(config, progress)
        ratings, metrics = rated(config, progress, played)
        assert record["players"] == asdict(metrics)
        progress = Progress(record["step"], ratings=ratings)
        assert {turn.player for t in played for turn in t.turns if turn.tokens} == {"X"}
        assert record["update"]["tokens"] == sum(t.sampled_tokens for t in played)
    kept = json.loads((run / "checkpoints" / "step-000013" / "progress.json").read_text())["progress"]["ratings"]
    assert kept == progress.ratings
    assert kept.keys() == {"now", "0", "12", "13"}
    left = {int(path.name) for path in (run / "past").iterdir() if path.is_dir()}
    assert {0, 11, 12, 13} <= left, "the checkpoint of step 12 needs two of them"
    assert left.isdisjoint(range(1, 5)), "no checkpoint has needed these since that of step 6"


@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_beside_those_of_the_run_plays_the_past(forks, tmp_path, uncut):
    if not uncut:
        pytest.skip("takes minutes; set AGENTGYM_TEST_ALL to run it")
    words = "engine=vllm", "engine.kv_cache_bytes=268435456", "engine.max_concurrent=16", "engine.start_timeout=480"
    steps = stopped_after(
        5, forks, tmp_path / "run", {}, *words, "trainer.deterministic=false", "trainer.save_every=100"
    )
    assert told_apart(tmp_path / "run", steps, first=1, close=1e-3, far=3e-3)
