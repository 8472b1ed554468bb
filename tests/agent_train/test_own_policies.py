"""Players with policies of their own: settings, room, who learns from what, and a run that goes on with all of them."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack, nullcontext

import pytest
import ray
import torch
from engine_models import reference_logprobs
from in_turn import in_turn
from learner_cases import make_config, make_rows, write_model
from run_cases import update
from safetensors.torch import load_file
from step_cases import algorithm
from transformers import AutoModelForCausalLM

from agent_train.cluster.placement import Parts, gpus_needed, learner_devices, parts_that_fit
from agent_train.config.compose import compose
from agent_train.config.schema import Config, ConfigError, EnvConfig
from agent_train.config.validation import validate
from agent_train.learner.actor_group import RankLostError
from agent_train.learner.role_start import Models, learning, start_models
from agent_train.report.metrics import Clock, read_metrics
from agent_train.rollout.ahead import Rollout
from agent_train.trainer.checkpoint import Progress
from agent_train.trainer.rl import train_on
from agent_train.weights.sync import checksum_of_all, checksum_of_policies
from agentgym.core.messages import assistant, user
from agentgym.core.trajectory import Group, Tokens, Trajectory, Turn, read_jsonl

GAME = ("+env=tic_tac_toe_self", "env.players.O=own")


# ---- settings


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([*GAME, "trainer.staleness=1"], "env.players.O=own: the policies of all players change together"),
        (
            [*GAME, "engine=vllm", "engine.placement=colocated"],
            "env.players.O=own: its policy needs an engine that the run starts",
        ),
        ([*GAME, "env.players.X=own"], "env.players: no player of tic_tac_toe_self is left to the run's policy"),
        (["+env=gsm8k_team", "env.players.solver=own", "env.players.verifier=past"], "env.players.solver=own: beside"),
        ([*GAME, "engine=vllm", "engine.adaptive=true"], "env.players.O=own: engine.adaptive=true follows"),
        ([*GAME, "algorithm=prime"], "env.players.O=own: algorithm.advantage.name=prime has a prm"),
        ([*GAME, "algorithm=ppo"], "env.players.O=own: algorithm.advantage.name=gae has a critic"),
        ([*GAME, "algorithm.kl.coef=0.1", "algorithm.kl.target=0.1"], "env.players.O=own: algorithm.kl.target=0.1"),
        (["+env=tic_tac_toe_self", "env.players.Y=own"], "env.players.Y: tic_tac_toe_self has no such player"),
        (["+env=frozen_lake", "env.players.O=own"], "env.players.O=own: frozen_lake has one agent, not players"),
    ],
)
def test_what_a_policy_of_one_s_own_cannot_be_combined_with_is_refused(words, told):
    with pytest.raises(ConfigError) as refused:
        validate(compose(["engine=embedded", *words]))
    assert any(problem.startswith(told) for problem in refused.value.problems), refused.value.problems


def test_two_of_three_players_may_have_policies_of_their_own():
    words = ("env.players.solver=own", "env.players.verifier=own")
    validate(compose(["engine=embedded", "+env=gsm8k_team", *words]))


def with_own(*players, **env):
    return Config(env=EnvConfig(players=dict.fromkeys(players, "own"), **env))


def test_each_policy_has_servers_of_its_own_and_ranks_that_may_share_devices():
    config = with_own("O", "P")
    config.engine.replicas, config.learner.workers = 2, 2
    config.learner.placement = "shared"
    assert (learner_devices(config), gpus_needed(config)) == (2, 2 + 3 * 2)
    eight, seven = [{"GPU": 8.0, "CPU": 16.0}], [{"GPU": 7.0, "CPU": 16.0}]
    assert parts_that_fit(config, eight) == Parts(2, 2, 0)
    assert parts_that_fit(config, seven) == Parts(2, 1, 0)
    assert parts_that_fit(config, [{"GPU": 3.0, "CPU": 16.0}]) is None
    config.learner.placement = "own"
    assert (learner_devices(config), gpus_needed(config)) == (3 * 2, 3 * 2 + 3 * 2)


def test_one_policy_is_known_by_its_checksum_and_several_by_that_of_all():
    assert checksum_of_policies([7]) == 7
    assert checksum_of_policies([7, 8]) == checksum_of_all({"0": 7, "1": 8}) != checksum_of_policies([8, 7])


# ---- who learns from what


class Taught:
    """A double of a policy's ranks, which keeps the samples that it is to learn from."""

    def __init__(self):
        self.samples = []

    async def update(self, samples, **_):
        self.samples += samples
        return update(loss=float(len(samples)))


def game(number, rewards):
    """a, b, c in turn, each with one sampled token."""
    earned = dict(zip("abc", rewards, strict=True))
    turns = [
        Turn(
            [user(f"{player}?")],
            assistant("x"),
            0.0,
            {"rewards": earned if player == "c" else dict.fromkeys("abc", 0.0)},
            Tokens([9], [ord(player)], [-0.5], [0]),
            player=player,
        )
        for player in "abc"
    ]
    return Trajectory(f"g/{number}", "e", "g", number, turns=turns)


def trained(models, **settings):
    config = Config(algorithm=algorithm("group", **settings), env=EnvConfig(players=dict.fromkeys(models.own, "own")))
    config.trainer.groups_per_step = 1
    games = [game(0, (1.0, 8.0, 0.0)), game(1, (0.0, 0.0, 4.0))]

    async def send(_):
        return 5

    step = train_on(config, models, Progress(), Rollout([Group("g", games)], [], 1), Clock(), nullcontext(), send)
    return asyncio.run(step)


def said_by(taught):
    return sorted({sample.player for sample in taught.samples}), [t for s in taught.samples for t in s.ids]


def test_a_policy_learns_from_the_samples_of_its_own_player_and_the_run_s_from_all_others():
    models = Models(Taught(), own={"b": Taught(), "z": Taught()})
    progress, metrics = trained(models)
    assert said_by(models.policy) == (["a", "c"], [9, ord("a"), 9, ord("a"), 9, ord("c"), 9, ord("c")])
    assert said_by(models.own["b"]) == (["b"], [9, ord("b")] * 2)
    assert models.own["z"].samples == []
    assert (metrics.update.loss, metrics.own["b"].loss, metrics.own["z"]) == (4.0, 2.0, None)
    assert (progress.step, metrics.weights_checksum) == (1, 5)


def advantages_of(taught):
    return [sample.advantages[-1] for sample in taught.samples]


def test_advantages_are_normalised_over_the_samples_of_a_policy_alone():
    models = Models(Taught(), own={"b": Taught()})
    trained(models, std_level="batch", std="population", eps=0.0)
    # b earns 8 and 0: mean 4, deviation 4.
    assert advantages_of(models.own["b"]) == pytest.approx([1.0, -1.0])
    # a earns 1 and 0, c 0 and 4: the four have mean 1.25 and deviation sqrt(10.75 / 4) = 1.63936.
    assert advantages_of(models.policy) == pytest.approx([0.30500, -0.30500, -1.21999, 1.21999], abs=1e-4)


# ---- ranks


async def ranks_together(model_dir):
    """Checksums of the run's policy and of a player's before and after the latter moves; the errors of its death."""
    config, rows = make_config(workers=1, timeout=300.0), make_rows()
    config.env.players = {"O": "own"}
    async with AsyncExitStack() as stack:
        models = await start_models(config, model_dir, model_dir, stack)
        own = models.own["O"]
        assert learning(config, models) == models.policies == [models.policy, own]
        before = [await each.checksums() for each in models.policies]
        await own.update(rows)
        after = [await each.checksums() for each in models.policies]
        pid = await own.actors[0].__ray_call__.remote(lambda self: os.getpid())
        watching = asyncio.create_task(own.watch())
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankLostError, match=r"^learner: players/O: watch: rank 0 died"):
            await asyncio.wait_for(watching, 60)
        assert await models.policy.checksums() == after[0]
    return before, after


@pytest.mark.ray
def test_a_player_s_policy_moves_alone_and_a_dead_rank_of_it_is_named_and_is_a_loss(workers_as_forks, tmp_path):
    with workers_as_forks():
        ray.init(address="local", num_cpus=4, num_gpus=0, include_dashboard=False, log_to_driver=False)
    try:
        before, after = asyncio.run(ranks_together(write_model(tmp_path / "model")))
    finally:
        ray.shutdown()
    assert before[0] == before[1]
    assert after[0] == before[0]
    assert after[1] != before[1]


# ---- a run

RUN = [
    *("+env=opposite_players:Sides", "env.players.bob=own", "engine=embedded", "learner.workers=1"),
    *("model.tiny.hidden=64", "model.tiny.heads=2", "model.tiny.intermediate=128", "model.tiny.layers=2"),
    *("sft.episodes=256", "sft.mistakes=1.0", "sft.batch_rows=16", "sft.lr=4e-3", "sampling.max_tokens=4"),
    *("trainer.groups_per_step=4", "trainer.eval_every=100", "trainer.eval_episodes=4", "learner.lr=2e-3"),
    *("trainer.save_every=1", "trainer.keep_checkpoints=9", "trainer.deterministic=true"),
]


def folder_of(run, step, player):
    """The checkpoint of a step, of the policy that plays this player."""
    checkpoint = run / "checkpoints" / f"step-{step:06d}"
    return checkpoint / "players" / player if player != "ann" else checkpoint


def weights_of(run, step, player):
    return load_file(folder_of(run, step, player) / "model.safetensors")


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def gap(run, step, player, saved, policy):
    """The largest difference between the log-probabilities that a player sampled with in a step, and those of saved weights."""
    model = AutoModelForCausalLM.from_pretrained(folder_of(run, saved, policy), dtype=torch.float32).eval()
    played = read_jsonl(run / "trajectories" / f"train-{step:06d}.jsonl")
    said = [turn.tokens for trajectory in played for turn in trajectory.turns if turn.player == player]
    assert {version for tokens in said for version in tokens.versions} == {step - 1}
    found = [reference_logprobs(model, each.prompt_ids, each.completion_ids, 1.0) for each in said]
    pairs = zip(said, found, strict=True)
    return max(float((torch.tensor(each.logprobs) - there).abs().max()) for each, there in pairs)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_policies_learn_in_one_run_each_by_its_own_engine_and_go_on_as_if_never_stopped(
    in_shared_ray, forks, tmp_path
):
    run, again, env = tmp_path / "run", tmp_path / "again", {**os.environ, **in_shared_ray}
    words = [*RUN, f"trainer.runs_dir={tmp_path}"]
    in_turn(
        forks,
        [[*words, "trainer.name=run", "trainer.steps=3"], [*words, "trainer.name=again", "trainer.steps=2"]],
        env,
        400,
    )
    replay = ["replay", str(run), "step=2", "through=3"]
    _, replayed = in_turn(forks, [[*words, "trainer.name=again", "trainer.steps=3"], replay], env, 400)
    assert equal(weights_of(run, 0, "ann"), weights_of(run, 0, "bob")), "both imitated the same"
    for step in (1, 2):
        ann, bob = (weights_of(run, step, player) for player in ("ann", "bob"))
        assert not equal(ann, bob)
        assert not equal(ann, weights_of(run, step - 1, "ann"))
        assert not equal(bob, weights_of(run, step - 1, "bob"))
    for player, other in (("ann", "bob"), ("bob", "ann")):
        assert gap(run, 3, player, saved=2, policy=player) < 1e-4
        assert gap(run, 3, player, saved=2, policy=other) > 1e-3
        assert gap(run, 3, player, saved=1, policy=player) > 1e-3

    steps = [record for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "train"]
    for record in steps:
        played = list(read_jsonl(run / "trajectories" / f"train-{record['step']:06d}.jsonl"))
        tokens = {
            player: sum(len(t.tokens.completion_ids) for each in played for t in each.turns if t.player == player)
            for player in ("ann", "bob")
        }
        assert (record["update"]["tokens"], record["own"]["bob"]["tokens"]) == (tokens["ann"], tokens["bob"])
        assert max(record["update"]["gap_max"], record["own"]["bob"]["gap_max"]) < 1e-4

    resumed = [record for record in read_metrics(again / "metrics.jsonl") if record["kind"] == "train"]
    assert [record["weights_checksum"] for record in resumed] == [record["weights_checksum"] for record in steps]
    for player in ("ann", "bob"):
        assert equal(weights_of(again, 3, player), weights_of(run, 3, player))
    assert replayed.count("the same weights, bit for bit") == 2


@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_policies_learn_in_one_run_each_by_its_own_vllm_server(in_shared_ray, forks, tmp_path, uncut):
    if not uncut:
        pytest.skip("starts three servers; set AGENTGYM_TEST_ALL to run it")
    run, env = tmp_path / "run", {**os.environ, **in_shared_ray}
    three = ("+env=opposite_players:ThreeSides", "env.players.cat=own", "engine=vllm", "engine.kv_cache_bytes=33554432")
    words = [*RUN[1:], *three, "trainer.deterministic=false", f"trainer.runs_dir={tmp_path}", "trainer.name=run"]
    in_turn(forks, [[*words, "trainer.steps=2"]], env, 800)
    players = ("ann", "bob", "cat")
    for player in players:
        assert not equal(weights_of(run, 1, player), weights_of(run, 0, player))
        for other in players:
            found = gap(run, 2, player, saved=1, policy=other)
            assert found < 1e-3 if other == player else found > 1e-3
