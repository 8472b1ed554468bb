"""A served environment with several players is played as the same one here."""

import asyncio
import random

from served import served

import agentgym
from agentgym import ScriptedPolicy, run_episode
from agentgym.service.client import lookup


def test_players_have_their_turns_and_rewards_through_a_server(monkeypatch):
    monkeypatch.setattr(lookup, "known_records", {})

    def play(env_id):
        rng = random.Random(3)
        policies = {name: ScriptedPolicy(lambda _: rng.choice("123456789")) for name in "XO"}
        task = agentgym.spec("tic_tac_toe_self").tasks("train")[3]
        done = asyncio.run(run_episode(agentgym.make(env_id), policies, task))
        return done.error, done.rewards, [(turn.player, turn.observation, turn.info) for turn in done.turns]

    with served("tic_tac_toe_self") as server:
        there = play(f"{server.url}/tic_tac_toe_self")
    assert there == play("tic_tac_toe_self")
    assert there[0] is None
    assert {player for player, *_ in there[2]} == {"X", "O"}
