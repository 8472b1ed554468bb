"""Plays games of PettingZoo through the adapter, and the same actions with `pettingzoo.make` alone."""

import asyncio

import pettingzoo
from drive import check_env, refusal, report, spec_of
from gymnasium import spaces

import agentgym
from agentgym import ScriptedPolicy, Task, run_episode
from agentgym_envs.adapters.gymnasium import written

TICTACTOE, RPS = "classic/tictactoe-v3", "classic/rps-v2"
ROWS = [4, 0, 1, 8, 7]  # the first player wins the middle column, on the fifth move
INFO = {"reward": 9.0, "turn_of": "nobody", "observation": "x"}  # keys that agentgym's own functions take
THROWS = [0, 1, 2, 2, 1, 0]


class Auction(pettingzoo.ParallelEnv):
    """Parallel alone: three bid at once; the lowest leaves with -1, and the last earns 2."""

    metadata = {"name": "auction_v0", "render_modes": []}  # noqa: RUF012 - declared so by PettingZoo
    render_mode = None
    possible_agents = ("a", "b", "c")

    def observation_space(self, agent):
        return spaces.Discrete(4)

    def action_space(self, agent):
        return spaces.Discrete(5)

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        return dict.fromkeys(self.agents, 3), {agent: dict(INFO) for agent in self.agents}

    def step(self, actions):
        out = min(self.agents, key=lambda agent: actions[agent])
        playing, self.agents = self.agents, [agent for agent in self.agents if agent != out]
        won = len(self.agents) == 1
        rewards = {agent: (-1.0 if agent == out else 2.0 * won) for agent in playing}
        ends = {agent: won or agent == out for agent in playing}
        self.agents = [] if won else self.agents
        seen = dict.fromkeys(playing, len(self.agents))
        return seen, rewards, ends, dict.fromkeys(playing, False), {agent: dict(INFO) for agent in playing}


pettingzoo.register("parallel", "tests/auction-v0", entry_point=Auction)


def direct(name, actions, **settings):
    """Who acts, what each sees, and all rewards, when nothing of agentgym is in between."""
    env = pettingzoo.make("aec", name, **settings)
    env.reset(seed=5)
    out = {"players": [], "seen": [], "rewards": dict.fromkeys(env.possible_agents, 0.0)}
    for action in actions:
        observation = env.last()[0]
        out["players"].append(env.agent_selection)
        out["seen"].append(written(observation["observation"] if isinstance(observation, dict) else observation))
        env.step(action)
        for agent, reward in env.rewards.items():
            out["rewards"][agent] += float(reward)
    out["over"] = all(env.terminations[agent] or env.truncations[agent] for agent in env.agents)
    env.close()
    return out


def ours(name, replies, **kwargs):
    env = spec_of(f"pettingzoo:{name}", **kwargs).make()
    done = asyncio.run(run_episode(env, ScriptedPolicy([str(reply) for reply in replies]), Task("t", seed=5)))
    env.close()
    shown = [turn.observation[0]["content"] for turn in done.turns]
    seen = [next(line for line in text.split("\n") if line.startswith("Observation: ")) for text in shown]
    found = {"players": [turn.player for turn in done.turns], "seen": [line.partition(": ")[2] for line in seen]}
    told = {"opening": shown[0], "final": done.final_observation, "infos": [turn.info for turn in done.turns]}
    return {**found, **told, "rewards": done.rewards, "end": done.end, "error": done.error}


report(
    tictactoe=[ours(TICTACTOE, ROWS), direct(TICTACTOE, ROWS)],
    rps=[ours(RPS, THROWS, settings={"max_cycles": 3}), direct(RPS, THROWS, max_cycles=3)],
    auction=ours("tests/auction-v0", [3, 1, 2, 4, 3]),
    garbled=ours(RPS, ["throw!", 1] * 9, settings={"max_cycles": 9}),
    nonsense=ours(TICTACTOE, ["the middle", *[8] * 3]),
    named=ours(RPS, ["Rock", "paper"], settings={"max_cycles": 1}, actions=["rock", "paper", "scissors"]),
    chess=agentgym.make("pettingzoo:classic/chess-v6").reset(seed=0)[0][0]["content"],
    checks={name: check_env(f"pettingzoo:{name}") for name in (TICTACTOE, RPS)},
    in_both=refusal(lambda: agentgym.make("pettingzoo:classic/rps-v3")),
    unknown=refusal(lambda: agentgym.make("pettingzoo:classic/tictacto-v3")),
    unseen=refusal(lambda: agentgym.make("pettingzoo:classic/go-v5").reset(seed=0)),
)
