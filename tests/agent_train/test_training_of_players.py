"""Episodes of several players in training: what each earns, baselines of its own, exact tokens, and a run that learns from them."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import journal_cases
import pytest
from journal_cases import count_calls, exactly
from sample_tokenizers import renderer
from step_cases import advantages, algorithm, samples_for

from agent_train.algorithms.advantage_inputs import AdvantageInputs
from agent_train.algorithms.selection import choose, greedy_rewards
from agent_train.algorithms.step_advantages import with_advantages
from agent_train.algorithms.turn_rewards import state_key
from agent_train.config.compose import compose
from agent_train.config.schema import ConfigError
from agent_train.config.validation import validate
from agent_train.data.players import apart, parts
from agent_train.data.samples import samples_of
from agent_train.report.metrics import eval_metrics, read_metrics
from agent_train.rollout.others import maker_of
from agent_train.rollout.renderer import Renderer
from agent_train.trainer.offline.records import read_examples
from agent_train.trainer.warm_start import sft_samples
from agentgym.core.messages import assistant, user
from agentgym.core.registration import spec
from agentgym.core.trajectory import Group, Summary, Tokens, Trajectory, Turn, read_jsonl, write_jsonl
from agentgym_envs.games.tic_tac_toe_self import TicTacToeSelf


def turn(player, said, reward, rewards, **info):
    tokens = Tokens([100], list(range(said)), [-0.5] * said, [0] * said)
    own = {"rewards": dict(zip("ab", rewards, strict=True)), **info}
    return Turn([user(f"{player}?")], assistant("x"), reward, own, tokens, player=player)


def episode(sample=0, last=(1.0, 2.0), without=0.5):
    """a, b, a; b earns before it has acted, and both at the other's turn."""
    turns = [turn("a", 2, 0.0, (0.0, 0.5)), turn("b", 3, 1.0, (1.0, 0.0))]
    turns += [turn("a", 1, last[0], last, without={"a": without})]
    return Trajectory(f"t/{sample}", "e", "t", sample, turns=turns)


def earned(credit):
    groups = apart([Group("t", [episode()])], credit)
    return {group.task_id: [turn.reward for turn in group.trajectories[0].turns] for group in groups}


@pytest.mark.parametrize(
    ("credit", "of_a", "of_b"),
    [
        ("own", [0.0 + 1.0, 1.0], [0.5 + 2.0]),
        ("team", [0.0 + 1.0, 1.0], [0.0 + 1.0 + 1.0]),
        ("difference", [0.0 + 1.0, 1.0 - 0.5], [2.0]),
    ],
)
def test_what_a_player_earns_counts_with_its_turn_before_or_with_its_first(credit, of_a, of_b):
    assert earned(credit) == {"t a": of_a, "t b": of_b}


def test_what_a_player_earned_before_its_first_turn_counts_once():
    whole = episode()
    whole.turns += [turn("b", 1, 0.0, (0.0, 4.0)), turn("a", 1, 0.0, (0.0, 8.0))]
    b = parts(whole)[1]
    assert [each.reward for each in b.turns] == [0.5 + 2.0, 4.0 + 8.0]
    assert b.reward == whole.rewards["b"]


@pytest.mark.parametrize(
    ("turns", "end", "expected"),
    [
        (3, None, {"t a": 2.0, "t b": 2.5}),
        (3, "error", {"t a": None, "t b": None}),
        (1, None, {"t a": 0.0, "t b": 0.5}),  # b had no turn
        (0, "error", {"t a": None, "t b": None}),
    ],
)
def test_each_player_s_greedy_baseline_is_what_it_earned_in_the_greedy_episode(turns, end, expected):
    greedy = episode()
    greedy.turns, greedy.end = greedy.turns[:turns], end or greedy.end
    groups = apart([Group("t", [episode(0), episode(1)])])
    assert greedy_rewards([greedy], groups, algorithm("remax")) == expected


@pytest.mark.parametrize(("credit", "expected"), [("own", 0.5), ("team", 1.0), ("difference", 1.0 - 0.75)])
def test_a_greedy_episode_that_ended_before_a_player_s_turn_is_its_baseline_by_its_credit(credit, expected):
    greedy = Trajectory("g", "e", "t", turns=[turn("a", 2, 1.0, (0.0, 0.5), without={"b": 0.75})])
    groups = apart([Group("t", [episode(0), episode(1)])], credit)
    assert greedy_rewards([greedy], groups, replace(algorithm("remax"), credit=credit))["t b"] == expected


@pytest.mark.parametrize(
    ("credit", "expected"),
    [
        # own: a earns 2 and 0, b 2.5 and 0.5; team: both earn 2 and 0; a's difference is 1.5 and 0 - 1.
        ("own", {"t/0 a": 1.0, "t/1 a": -1.0, "t/0 b": 1.0, "t/1 b": -1.0}),
        ("team", {"t/0 a": 1.0, "t/1 a": -1.0, "t/0 b": 1.0, "t/1 b": -1.0}),
        ("difference", {"t/0 a": 1.25, "t/1 a": -1.25, "t/0 b": 1.0, "t/1 b": -1.0}),
    ],
)
def test_each_player_has_a_baseline_of_its_own(credit, expected):
    groups = apart([Group("t", [episode(0), episode(1, last=(-1.0, 0.0), without=1.0)])], credit)
    found, samples = advantages(groups, algorithm("group", std_level="none"))
    assert {name: set(values) for name, values in found.items()} == {name: {value} for name, value in expected.items()}
    assert {sample.id: (sample.player, sample.group) for sample in samples}["t/0 b#0"] == ("b", "t b")
    assert sum(sample.sampled for sample in samples) == 2 * 6


def test_who_wins_has_the_opposite_advantage_of_who_loses():
    won, lost = ({"X": 1.0, "O": 0.0}, {"X": 0.0, "O": 1.0})

    def game(number, rewards):
        turns = [Turn([user("?")], assistant("5"), 0.0, {"rewards": dict.fromkeys(rewards, 0.0)}) for _ in "XO"]
        turns[1] = replace(turns[1], reward=rewards["X"], info={"rewards": rewards})
        turns = [
            replace(each, player=name, tokens=Tokens([9], [1], [-0.1], [0]))
            for each, name in zip(turns, "XO", strict=True)
        ]
        return Trajectory(f"g/{number}", "e", "g", number, turns=turns)

    groups = apart([Group("g", [game(0, won), game(1, won), game(2, lost), game(3, lost)])])
    found, _ = advantages(groups, algorithm("group"))
    one = 0.5 / (math.sqrt(4 * 0.25 / 3) + 1e-6)
    assert {name: values[0] for name, values in found.items()} == {
        f"g/{n} {player}": pytest.approx(one if (n < 2) == (player == "X") else -one)
        for n in range(4)
        for player in "XO"
    }


def test_episodes_of_one_agent_stay_as_they_are_and_failed_ones_fail_for_every_player():
    alone = Trajectory("s", "e", "s", turns=[Turn([user("?")], assistant("x"), 1.0)])
    assert apart([Group("s", [alone])])[0].trajectories[0] is alone
    broken = Trajectory("t/1", "e", "t", 1, end="error", error="broke")
    groups = apart([Group("t", [episode(), broken])])
    assert [[t.failed for t in group.trajectories] for group in groups] == [[False, True]] * 2


def test_states_and_summaries_go_with_their_player():
    whole = episode()
    whole.metadata["state"] = "s0"
    for number, each in enumerate(whole.turns, start=1):
        each.info["state"] = f"s{number}"
    whole.summaries = [Summary(2, [user("sum up")], assistant("so far"), player="a")]
    a, b = parts(whole)
    assert [a.metadata["state"], a.turns[0].info["state"]] == ["s0", "s2"]
    assert b.metadata["state"] == "s1"
    assert ([s.turn for s in a.summaries], b.summaries) == ([1], [])
    assert state_key([{"state": "s1"}]) != state_key([{"state": "s2"}])
    assert whole.turns[0].info["state"] == "s1", "the episode itself is not changed"


def test_the_state_of_the_reset_is_not_that_of_a_player_who_acts_later():
    whole = episode()
    whole.metadata["state"] = "s0"
    a, b = parts(whole)
    assert a.metadata["state"] == "s0"
    assert "state" not in b.metadata, "the step before its turn told none"


def test_the_metric_of_the_length_penalty_is_what_players_lose_by_their_own_tokens():
    # a samples 3 tokens and b as many.
    for longest, expected in ((3, 0.0), (2, -1.0)):
        settings = algorithm("group", overlong={"length": longest})
        _, selection = choose([Group("t", [episode()])], settings, 1)
        assert selection.penalty == expected


def test_imitation_and_files_take_each_player_s_conversation(tmp_path):
    whole = episode()
    write_jsonl(tmp_path / "e.jsonl", [whole])
    samples = sft_samples([whole], renderer("tiny"))
    assert [(sample.player, len(sample.turn_ends)) for sample in samples] == [("a", 2), ("b", 1)]
    assert "b?" not in renderer("tiny").tokenizer.decode(samples[0].ids)
    said = [
        [message["content"] for message in (*answer.prompt, *answer.said)]
        for example in read_examples(tmp_path / "e.jsonl", "sft")
        for answer in example.answers
    ]
    assert said == [["a?", "x", "a?", "x"], ["b?", "x"]]


def test_metrics_have_the_mean_reward_of_each_player():
    assert eval_metrics(1, [episode(), episode(1, last=(0.0, 4.0))]).env == {"reward/a": 1.5, "reward/b": 3.5}


# ---- rollouts and runs


def test_a_shared_policy_plays_both_sides_by_exact_tokens_and_a_journal_answers_both(tmp_path):
    model = journal_cases.build(tmp_path / "model")
    tasks = list(spec("tic_tac_toe_self").tasks("train").take(2))
    first, _, asked = journal_cases.rollout(model, tmp_path / "turns", TicTacToeSelf, tasks)
    assert asked == count_calls(first) > 0
    one = Renderer.of_folder(model)
    for trajectory in (t for group in first for t in group.trajectories):
        for own in parts(trajectory):
            player = own.turns[0].player
            told = [one.decode(each.tokens.prompt_ids) for each in own.turns]
            assert all(f"you are {player}" in text for text in told)
            assert not any(f"you are {'O' if player == 'X' else 'X'}" in text for text in told)
            (row,) = samples_of(own)
            assert row.sampled == own.sampled_tokens
    said = {tuple(turn.tokens.completion_ids) for t in first[0].trajectories for turn in t.turns[:2]}
    assert len(said) > 2, "players and samples draw by seeds of their own"

    lines = (tmp_path / "turns").read_text().splitlines(keepends=True)
    (tmp_path / "half").write_text("".join(lines[: len(lines) // 2]))
    again, journal, later = journal_cases.rollout(model, tmp_path / "half", TicTacToeSelf, tasks)
    assert exactly(again) == exactly(first)
    assert (journal.diverged, later) == (0, asked - sum(len(json.loads(line)) for line in lines[: len(lines) // 2]))


def test_a_player_that_an_agent_plays_has_no_tokens_and_is_not_trained(tmp_path):
    model = journal_cases.build(tmp_path / "model")
    tasks = list(spec("tic_tac_toe_self").tasks("train").take(2))

    def against_the_expert(sampler, problems, journal):
        return replace(sampler, others={"O": maker_of("expert")}).collect(problems, 0, journal=journal)

    groups, _, asked = journal_cases.rollout(model, tmp_path / "t", TicTacToeSelf, tasks, play=against_the_expert)
    turns = [turn for group in groups for t in group.trajectories for turn in t.turns]
    assert {turn.player for turn in turns if turn.tokens} == {"X"}
    assert any(turn.player == "O" for turn in turns)
    assert asked == sum(turn.player == "X" for turn in turns)
    settings = algorithm("group")
    kept, samples = samples_for(apart(groups), settings)
    assert {sample.player for sample in samples} == {"X"}
    assert len(with_advantages(AdvantageInputs(settings, kept, samples), samples)) == len(samples)


def test_a_player_may_be_the_agent_whose_name_is_null():
    assert compose(["+env=tic_tac_toe_self", "env.players.O=null"]).env.players == {"O": "null"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["env.players.Y=expert"], "env.players.Y: tic_tac_toe_self has no such player, only X, O"),
        (["env.players.O=nowhere.at_all:f"], "env.players.O=nowhere.at_all:f: "),
        (["env.players.O=perfect"], "env.players.O=perfect: write expert, random, null, past, own, NAME@URL"),
        (["env.players.O=model@nowhere"], "env.players.O=model@nowhere: "),
        (["env=frozen_lake", "env.players.O=expert"], "env.players.O=expert: frozen_lake has one agent, not players"),
    ],
)
def test_agents_and_players_that_are_none_are_refused(words, told):
    with pytest.raises(ConfigError) as refused:
        validate(compose(["+env=tic_tac_toe_self", "engine=embedded", *words]))
    assert any(problem.startswith(told) for problem in refused.value.problems), refused.value.problems


RUN = [
    *("+env=opposite_players:Sides", "engine=embedded", "learner.workers=1", "trainer.steps=40", "learner.lr=2e-3"),
    *("model.tiny.hidden=64", "model.tiny.heads=2", "model.tiny.intermediate=128", "model.tiny.layers=2"),
    *("sft.episodes=256", "sft.mistakes=1.0", "sft.batch_rows=16", "sft.lr=4e-3", "sampling.max_tokens=4"),
    *("trainer.groups_per_step=8", "trainer.eval_every=40", "trainer.eval_episodes=8", "trainer.deterministic=true"),
    "trainer.dump=[1]",
]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_policy_learns_what_each_player_is_paid_for_though_they_want_the_opposite(in_shared_ray, forks, tmp_path):
    def told(*words):
        here = Path(__file__).parent  # where the environment's module is
        return forks.run(["-m", "agent_train.cli", *words], {**os.environ, **in_shared_ray}, 500, here)

    told(*RUN, f"trainer.runs_dir={tmp_path}", "trainer.name=run")
    steps = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "train"]
    for player in ("reward/ann", "reward/bob"):
        first, last = (sum(record["env"][player] for record in part) / 4 for part in (steps[:4], steps[-4:]))
        assert last > first + 0.3, (player, first, last)
    for record in (steps[0], steps[-1]):
        played = list(read_jsonl(tmp_path / "run" / "trajectories" / f"train-{record['step']:06d}.jsonl"))
        assert {turn.player for t in played for turn in t.turns} == {"ann", "bob"}
        assert record["update"]["tokens"] == sum(t.sampled_tokens for t in played)
        assert 0 <= record["update"]["gap_max"] < 1e-4
    replayed = told("replay", str(tmp_path / "run"), "step=1", "through=2")
    assert replayed.count("the same weights, bit for bit") == 2
