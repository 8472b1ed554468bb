"""What rollouts cost beyond the engine: episodes of 8 turns against an endpoint that answers each request after 50 ms.

The sampler, its environments, its journal and the HTTP client are the real ones; the endpoint is a double in another process, which answers
as many requests at a time as come. The ideal is 8 answers of 50 ms, one after another. CPU is this process's, by turn. Beside it, what one
process can do here: the same requests in a bare loop of aiohttp, without episodes, environments and a journal.

python benchmarks/generator.py [--out FILE.json] [--episodes 256,2048] [--rounds N]
"""

import argparse
import asyncio
import gc
import multiprocessing
import sys
import tempfile
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from conversation import Conversation, Talk
from found import write

from agent_train.cli import COLLECT_AFTER
from agent_train.engine.base import Completion, Engine, Sampling
from agent_train.engine.http import open_client, post
from agent_train.rollout.journal import Journal
from agent_train.rollout.sampler import Sampler
from agent_train.trainer.schedule import derive_seed
from agentgym import Task
from agentgym.core.messages import user
from agentgym.rollout.episode import Limits

TURNS, SECONDS = 8, 0.05
GOALS = {256: 1.10, 2048: 1.25}


class Endpoint(Engine):
    max_model_len = 1 << 30

    def __init__(self, url: str):
        self.url, self.client = url, open_client()

    async def generate(self, prompt_ids, sampling, episode=None):
        body = {"token_ids": prompt_ids, "sampling_params": {"max_tokens": sampling.max_tokens, "seed": sampling.seed}}
        answer = await post(self.client, self.url, "/generate", body, 60.0, "generate")
        return Completion(answer["ids"], answer["logprobs"], [self.version], "stop")


def answer_slowly(told: Connection) -> None:
    """The endpoint: says its port, and answers until it is killed."""
    from aiohttp import web

    async def generate(request: web.Request) -> web.Response:
        begun = time.perf_counter()
        await request.json()
        await asyncio.sleep(SECONDS - (time.perf_counter() - begun))
        return web.json_response({"ids": [0], "logprobs": [0.0]})

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        told.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(serve())


async def ask(url: str, episodes: int) -> dict[str, float]:
    """The requests of so many episodes and nothing else."""
    from aiohttp import ClientSession, TCPConnector

    async def one(client: ClientSession, episode: int) -> None:
        ids = [1]
        for turn in range(TURNS):
            params = {"max_tokens": 8, "seed": derive_seed(episode, turn)}
            async with client.post(f"{url}/generate", json={"token_ids": ids, "sampling_params": params}) as response:
                answer = await response.json()
            ids = [*ids, *answer["ids"], 1]

    async with ClientSession(connector=TCPConnector(limit=0)) as client:
        wall, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(one(client, episode) for episode in range(episodes)))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"bare_wall": wall, "bare_cpu_us_per_turn": 1e6 * cpu / (episodes * TURNS)}


async def play(url: str, episodes: int) -> dict[str, float]:
    engine = Endpoint(url)
    limits = Limits(act_timeout=None)  # as in a run, whose engine has its own
    given = {"group_size": 1, "concurrency": episodes, "limits": limits}
    sampler = Sampler(partial(Talk, TURNS), engine, Conversation(), Sampling(8), **given)
    tasks = [Task(f"t{n}", (user("begin"),)) for n in range(episodes)]
    wall, cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "turns.jsonl", sys.exit) as journal:
        groups = await sampler.collect(tasks, 0, journal=journal)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    await engine.client.close()
    trajectories = [t for group in groups for t in group.trajectories]
    assert all(len(t.turns) == TURNS and not t.failed for t in trajectories), [
        t.error for t in trajectories if t.failed
    ][:1]
    return {"wall": wall, "over_ideal": wall / (TURNS * SECONDS), "cpu_us_per_turn": 1e6 * cpu / (episodes * TURNS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--episodes", default="256,2048")
    parser.add_argument("--rounds", type=int, default=3, help="of which the least counts")
    args = parser.parse_args()
    gc.set_threshold(*COLLECT_AFTER)  # as a run does
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=answer_slowly, args=(there,), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{here.recv()}"
    asyncio.run(play(url, 32))  # what is done once
    rows = []
    out = [
        "| episodes | seconds | over the ideal | goal | CPU us/turn | bare loop, seconds | over the ideal | CPU us | ours to the bare loop |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for count in map(int, args.episodes.split(",")):
        found = [asyncio.run(play(url, count)) | asyncio.run(ask(url, count)) for _ in range(args.rounds)]
        row = {"episodes": count, **{name: min(each[name] for each in found) for name in found[0]}}
        rows.append(row)
        goal = (
            f"{GOALS[count]:.2f}: {'met' if row['over_ideal'] <= GOALS[count] else 'MISSED'}" if count in GOALS else ""
        )
        out.append(
            f"| {count:,} | {row['wall']:.2f} | {row['over_ideal']:.2f} | {goal} | {row['cpu_us_per_turn']:.0f} |"
            f" {row['bare_wall']:.2f} | {row['bare_wall'] / (TURNS * SECONDS):.2f} | {row['bare_cpu_us_per_turn']:.0f} |"
            f" {row['wall'] / row['bare_wall']:.2f} |"
        )
    server.terminate()
    sys.stdout.write("\n".join(out) + "\n")
    write(args.out, rows=rows)


if __name__ == "__main__":
    main()
