"""Several players in one episode: what each is shown and earns, who answers for whom, and what is stored and told of it."""

import asyncio
import contextlib

import pytest

import agentgym
from agentgym import PlayersEnv, ScriptedPolicy, Task, TaskSet, Wrapper, run_episode, user
from agentgym.checks.check_env import check_env
from agentgym.cli import main
from agentgym.core.agent_failure import AgentFailure
from agentgym.core.registration import registry
from agentgym.core.trajectory import Tokens, Trajectory, read_jsonl, write_jsonl
from agentgym.evaluate import Results
from agentgym.evaluate.results import results_of
from agentgym.policies.base import ByPlayer, ExpertPolicy, Reply
from agentgym.rewards import Reward, Rewarded, Rubric
from agentgym.rollout.episode import Limits
from agentgym.viewer.rows import result_of, row_of


class Bids(PlayersEnv):
    """Two bid at the same time, and the higher bid wins what the lower one was; a third sees both bids and only says who won."""

    players = ("ann", "bob", "judge")
    max_turns = 6

    @classmethod
    def default_tasks(cls, split="train"):
        if split not in ("train", "test"):
            raise ValueError(f"no split {split!r}; it has train, test")
        return TaskSet([Task(f"{split}-{n}", answer=n) for n in range(3)], name=f"bids/{split}")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.bids = {}
        self.tell(f"You begin with {self.task.answer}.", "ann", "bob")
        return self.opening("ann")

    def step(self, action):
        player, text = self.turn_of, self.read(action)
        if player == "judge":
            self.tell("It is over.")
            right = text == max(self.bids, key=self.bids.get)
            return self.end({"judge": 1.0 if right else -1.0}, success=right)
        self.bids[player] = int(text) if text.isdecimal() else 0
        if len(self.bids) < 2:
            return self.pass_to("bob")
        self.tell(f"Bids: {self.bids['ann']} and {self.bids['bob']}.")
        low, high = sorted(self.bids, key=self.bids.get)
        return self.pass_to("judge", {high: float(self.bids[low])})

    def cut_off(self, reason):
        self.running = False
        return [user("cut")], 0.0, False, True, {"rewards": {"ann": -3.0, "bob": 0.5}}

    def expert_action(self):
        return {"judge": max(self.bids, key=self.bids.get, default="")}.get(self.turn_of, "5")

    def random_action(self, rng):
        return rng.choice(["1", "2", "ann", "bob"])


@pytest.fixture(autouse=True)
def registered():
    agentgym.register(id="bids", entry_point=Bids)
    yield
    del registry["bids"]


def play(policy, env=None, **more):
    return asyncio.run(run_episode(env or Bids(), policy, Task("t", answer=7), **more))


class Listening:
    """Remembers what it was shown, and says what its script says."""

    def __init__(self, *said):
        self.said, self.heard, self.children = iter(said), [], {}

    async def act(self, messages, tools):
        self.heard.append([message["content"] for message in messages])
        reply = {"role": "assistant", "content": next(self.said)}
        return Reply(reply, Tokens([len(self.heard)], [1, 2], [0.0, 0.0], [0, 0]))


def test_each_player_is_shown_its_own_conversation_and_no_bid_before_both_are_made():
    ann, bob, judge = Listening("3"), Listening("4"), Listening("bob")
    done = play({"ann": ann, "bob": bob, "judge": judge})
    assert (ann.heard, bob.heard) == ([["You begin with 7."]], [["You begin with 7."]])
    assert judge.heard == [["Bids: 3 and 4."]]
    assert [turn.player for turn in done.turns] == ["ann", "bob", "judge"]
    assert done.final_observation == [user("Bids: 3 and 4.\nIt is over.")]


def test_rewards_are_by_player_and_the_episodes_is_that_of_the_first():
    done = play(ScriptedPolicy(["9", "4", "ann"]))
    assert done.rewards == {"ann": 4.0, "bob": 0.0, "judge": 1.0}
    assert (done.reward, [turn.reward for turn in done.turns]) == (4.0, [0.0, 4.0, 0.0])
    assert done.success == 1.0


def test_one_policy_answers_for_all_with_the_messages_of_each():
    shared = Listening("3", "4", "bob")
    play(shared)
    assert shared.heard == [["You begin with 7."], ["You begin with 7."], ["Bids: 3 and 4."]]


def test_a_policy_that_keeps_a_conversation_makes_one_for_each_player():
    class Keeping(Listening):
        def for_player(self, name):
            return self.children.setdefault(name, Listening("2"))

    keeping = Keeping()
    play(keeping)
    assert list(keeping.children) == ["ann", "bob", "judge"]
    assert keeping.heard == []


def test_a_player_without_a_policy_fails_the_episode_by_name():
    done = play({"ann": ScriptedPolicy(["3"])})
    assert done.failed
    assert "there is no policy for 'bob', only for ann" in done.error
    alone = asyncio.run(run_episode(agentgym.make("frozen_lake"), {"ann": ScriptedPolicy(["up"])}, seed=0))
    assert "the environment has one agent, and these policies are for ann" in alone.error


def test_some_players_have_policies_of_their_own_and_another_answers_for_the_rest():
    rest, ann = Listening("4", "bob"), ExpertPolicy()
    done = play(ByPlayer({"ann": ann}, rest))
    assert [turn.reply["content"] for turn in done.turns] == ["5", "4", "bob"]
    assert rest.heard == [["You begin with 7."], ["Bids: 5 and 4."]]


def test_what_a_cut_off_episode_is_judged_by_counts_for_each_player():
    done = play(ScriptedPolicy(["9", "4"]), limits=Limits(max_turns=2))
    assert (done.end, done.rewards) == ("max_turns", {"ann": 1.0, "bob": 0.5, "judge": 0.0})


def test_a_step_that_names_no_rewards_gives_its_reward_to_all():
    class Team(Bids):
        def step(self, action):
            observation, *rest, info = super().step(action)
            info.pop("rewards")
            return observation, *rest, info

    assert play(ScriptedPolicy(["9", "4", "ann"]), Team()).rewards == dict.fromkeys(("ann", "bob", "judge"), 4.0)


def test_who_breaks_an_episode_brings_every_player_to_the_floor():
    class Breaks(Bids):
        def step(self, action):
            if self.turn_of == "judge":
                raise AgentFailure("session_lost")
            return super().step(action)

    done = play(ScriptedPolicy(["9", "4", "ann"]), Breaks())
    assert done.agent_failure == "session_lost"
    assert done.rewards == dict.fromkeys(Bids.players, Breaks.floor), "ann had won 4"


def test_a_rubric_s_total_is_that_of_each_player():
    done = play(
        ScriptedPolicy(["9", "4", "ann"]),
        Rewarded(Bids(), Rubric([Reward(lambda reward: 10 * reward, name="tenfold")])),
    )
    assert done.rewards == dict.fromkeys(Bids.players, 40.0)


@pytest.mark.parametrize("wrong", [{"ann": float("nan")}, {"ann": "much"}, 3])
def test_rewards_that_are_no_numbers_by_player_fail_the_episode(wrong):
    class Wrong(Wrapper):
        def step(self, action):
            observation, *rest, info = self.env.step(action)
            return observation, *rest, {**info, "rewards": wrong}

    done = play(ScriptedPolicy(["9", "4", "ann"]), Wrong(Bids()))
    assert "info['rewards'] must be finite numbers by player" in done.error
    assert done.to_json()["turns"]


def test_strangers_earn_nothing():
    env = Bids()
    env.reset(options={"task": Task("t", answer=7)})
    with pytest.raises(ValueError, match=r"rewards of \['carl'\], who are no players"):
        env.end({"carl": 1.0})


def test_it_is_stored_and_read_with_players_and_the_tokens_of_each(tmp_path):
    done = play({"ann": Listening("3"), "bob": Listening("4"), "judge": Listening("bob")})
    done.turns[2].player = "ann"
    done.turns[2].tokens.prompt_ids[:] = [1, 1, 2, 9]
    write_jsonl(tmp_path / "e.jsonl", [done])
    (again,) = read_jsonl(tmp_path / "e.jsonl")
    assert vars(again) == vars(done)
    record = done.to_json()
    assert record["rewards"] == {"ann": 0.0, "bob": 3.0, "judge": 1.0}
    assert [turn["tokens"]["shared"] for turn in record["turns"]] == [0, 0, 3], "a prompt extends that of its player"
    assert Trajectory("", "", "").to_json().keys().isdisjoint({"rewards"})


def test_results_have_the_mean_reward_of_each_player_also_those_that_the_viewer_makes():
    episodes = [play(ScriptedPolicy(["9", "4", said])) for said in ("ann", "bob")]
    cell = results_of(episodes, env="bids")
    assert cell.players == {"ann": 4.0, "bob": 0.0, "judge": 0.0}
    assert Results.from_json(Results("r", [cell]).to_json()).cells == [cell]
    rows = [row_of(episode.to_json(), 0, 0) for episode in episodes]
    assert result_of(rows, "bids", "", "test", 1, 2).players == cell.players


def test_the_check_accepts_it_and_says_what_is_wrong_with_another():
    class Lost(Bids):
        def reset(self, **given):
            observation, _ = super().reset(**given)
            return observation, {}

    class Strange(Bids):
        def pass_to(self, turn_of, *given, **info):
            observation, *rest, told = super().pass_to(turn_of, *given, **info)
            return observation, *rest, {**told, "rewards": {"carl": 1.0}}

    assert check_env("bids") == []
    assert any("info['turn_of'] must be one of ann, bob, judge, not None" in text for text in check_env(Lost()))
    assert any("must be finite numbers by player (ann, bob, judge)" in text for text in check_env(Strange()))


def test_the_commands_tell_of_players(tmp_path, capsys):
    with contextlib.chdir(tmp_path):
        assert main(["eval", "bids", "--policy", "expert", "--n", "2", "--out", "run"]) == 0
        assert "mean reward of ann 0, bob 5, judge 1" in " ".join(capsys.readouterr().out.split())
        assert main(["play", "bids", "--policy", "expert", "--seed", "1"]) == 0
    told = capsys.readouterr().out
    assert [line for line in told.splitlines() if line.endswith("'s turn")] == [
        "ann's turn",
        "bob's turn",
        "judge's turn",
    ]
    assert told.count("You begin with") == 2
    assert "reward 0 (ann 0, bob 5, judge 1), success" in told
