"""An environment on an OpenEnv server, played and evaluated like any other; and one of agentgym's behind OpenEnv's protocol.

python examples/openenv_env.py                                serves frozen_lake, which every OpenEnv client can play then
python examples/openenv_env.py --url http://host:8000         an OpenEnv server that is there; the agent says --say at each turn
agent-train +env=openenv:http://host:8000 model.path=...      trains on it
"""

import argparse
import asyncio
import itertools

import aiohttp
from remote_env import server
from rich.console import Console

import agentgym
from agentgym import ScriptedPolicy
from agentgym.evaluate import evaluate, table_of


async def as_a_client_of_openenv(url):
    """What OpenEnv's own client does: a WebSocket is a session, and each message on it has one answer."""
    async with aiohttp.ClientSession() as http, http.ws_connect(f"{url}/ws") as session:
        await session.send_json({"type": "reset", "data": {"seed": 0}})
        opening = await session.receive_json()
        print("reset:", opening["data"]["observation"]["messages"][0]["content"].splitlines()[0])
        await session.send_json({"type": "step", "data": {"message": "right"}})
        answer = await session.receive_json()
        print("step: ", {name: answer["data"][name] for name in ("reward", "done")})


async def play(url, words, n):
    """`openenv:URL` is an id: make it, list its tasks, evaluate it, train on it."""
    env = agentgym.make(f"openenv:{url}")
    try:
        episode = await agentgym.run_episode(env, ScriptedPolicy(list(words)), env.spec.tasks("test")[0])
    finally:
        await env.close()
    for message in episode.messages()[:4]:
        print(f"{message['role']:>9}: {message['content']}")
    print(f"{episode.end}, reward {episode.reward:g}" if not episode.failed else episode.error)
    report = await evaluate(f"openenv:{url}", lambda episode: ScriptedPolicy(list(words)), n=n, agent="script")
    Console().print(table_of([report]))


def main():
    parser = argparse.ArgumentParser(description="Play an environment by OpenEnv's protocol.")
    parser.add_argument("--url", help="of an OpenEnv server (default: starts one of ours)")
    parser.add_argument("--say", nargs="*", default=["right", "down"], help="what the agent says, again and again")
    parser.add_argument("-n", type=int, default=20, help="tasks of the test split")
    args = parser.parse_args()
    words = list(itertools.islice(itertools.cycle(args.say), 100))
    if args.url:
        asyncio.run(play(args.url, words, args.n))
        return
    with server("frozen_lake") as url:
        asyncio.run(as_a_client_of_openenv(url))
        asyncio.run(play(url, words, args.n))


if __name__ == "__main__":
    main()
