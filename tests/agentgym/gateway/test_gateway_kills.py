"""A gateway that is killed again and again, under agents whose connections break and who ask again: nothing is lost, and nothing is there twice."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import aiohttp
import pytest
from gateway_cases import TOOL, lines_of, serving, shape
from toy_model import ToyModel

ADMIN = "ag-the-admin-key-of-this-test"
HERE = Path(__file__).parent
ROOT = HERE.parents[2]


class Process:
    """The gateway, which can be killed and started again at its port."""

    def __init__(self, folder):
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def start(self):
        command = [sys.executable, str(HERE / "gateway_process.py"), str(self.folder), str(self.port), ADMIN]
        env = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env)
        line = await asyncio.to_thread(self.process.stdout.readline)
        assert line == b"serves\n"

    async def kill(self):
        self.process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(self.process.wait)
        self.process.stdout.close()


class Client:
    """Asks until it has a whole answer. With a share of `cuts` it leaves in mid-answer; a gateway that is down is asked again."""

    def __init__(self, session, url, key, seed, cuts):
        self.session, self.url, self.key = session, url, key
        self.random, self.cuts = random.Random(seed), cuts
        self.answered = Counter()  # by the id of the answer

    async def ask(self, path, body, key=None):
        tries, dropped = 0, [False]
        while True:
            headers = {"Authorization": f"Bearer {self.key}"}
            if key is not None:
                headers["Idempotency-Key"] = key
            # Not all clients say that they try again. One that may have dropped a whole answer must, or it asks anew.
            if tries and (dropped[0] or self.random.random() < 0.5):
                headers["x-stainless-retry-count"] = str(tries)
            tries += 1
            try:
                answer = await self.once(path, {**body, "stream": self.random.random() < 0.6}, headers, dropped)
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                dropped[0] |= isinstance(error, TimeoutError)
                await asyncio.sleep(0.02)
                continue
            if answer is not None:
                self.answered[answer["id"]] += 1
                return answer

    async def once(self, path, body, headers, dropped):
        leaves = self.random.random() < self.cuts
        limit = aiohttp.ClientTimeout(total=self.random.uniform(0, 0.1) if leaves and not body["stream"] else None)
        async with self.session.post(f"{self.url}{path}", json=body, headers=headers, timeout=limit) as response:
            assert response.status == 200, await response.text()
            if not body["stream"]:
                return await response.json()
            left = self.random.randint(0, 12) if leaves else -1
            events = []
            async for line in response.content:
                if left == 0:
                    dropped[0] |= response.content.is_eof()
                    response.close()
                    return None
                left -= 1
                if line.startswith(b"data: {"):
                    events.append(json.loads(line[6:]))
            return whole_of(path, events)


def whole_of(path, events):
    """The answer that a stream's events add up to; None: the stream was cut."""
    if path == "/v1/responses":
        return events[-1]["response"] if events and events[-1]["type"] == "response.completed" else None
    choices = {}
    for event in events:
        for choice in event["choices"]:
            whole = choices.setdefault(choice["index"], {"message": {"role": "assistant", "content": ""}})
            message, delta = whole["message"], choice["delta"]
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls", ()):
                message.setdefault("tool_calls", []).append({k: v for k, v in call.items() if k != "index"})
            whole["finish_reason"] = choice["finish_reason"]
    if not choices or any(choice["finish_reason"] is None for choice in choices.values()):
        return None
    return {"id": events[0]["id"], "choices": [choices[index] for index in sorted(choices)]}


def in_order(message):
    """A message as an agent keeps it, the same whether it was streamed: a request's seed is of its bytes."""
    said = {"role": "assistant", "content": message.get("content") or ""}
    return said | {name: message[name] for name in ("reasoning_content", "tool_calls") if message.get(name)}


async def play(client, episode):
    """An agent: a main line with tools, a sub-agent beside it, branches, a summary to go on from, the same question twice."""
    messages = [{"role": "user", "content": f"task {episode}"}]

    async def turn(messages, **more):
        answer = await client.ask(
            "/v1/chat/completions", {"model": "toy", "messages": messages, "tools": [TOOL], **more}
        )
        message = in_order(answer["choices"][0]["message"])
        messages.append(message)
        for call in message.get("tool_calls", ()):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "result"})
        messages.append({"role": "user", "content": f"go on {len(messages)}"})

    async def helper():
        said = [{"role": "system", "content": "you help"}, {"role": "user", "content": f"part of {episode}"}]
        for _ in range(2):
            await turn(said)
        answer = await client.ask("/v1/responses", {"model": "toy", "input": f"title of {episode}"})
        await client.ask("/v1/responses", {"model": "toy", "input": "shorter", "previous_response_id": answer["id"]})

    async def main():
        for _ in range(3):
            await turn(messages)
        await turn([*messages], n=2)

    await asyncio.gather(helper(), main())
    twice = {"model": "toy", "messages": [*messages, {"role": "user", "content": "sum up"}]}
    answers = await asyncio.gather(*(client.ask("/v1/chat/completions", twice, key=f"try-{n}") for n in range(2)))
    said = min(answer["choices"][0]["message"]["content"] for answer in answers)
    summary = {"role": "user", "content": f"task {episode}: {said}"}
    await turn([summary])


async def play_all(url, keys, cuts):
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        clients = [Client(session, url, key, number, cuts) for number, key in enumerate(keys)]
        await asyncio.gather(*(play(client, number) for number, client in enumerate(clients)))
    return clients


async def undisturbed(folder, episodes):
    async with serving(folder) as gateway:
        keys = [(await gateway.open(f"e{number}", seed=number))[1] for number in range(episodes)]
        await play_all(gateway.url, keys, cuts=0.0)
        return {id: shape(episode) for id, episode in gateway.episodes.items()}


async def disturbed(folder, episodes, kills, lines):
    """Kill the gateway so many times on the way to so many lines of its record."""
    gateway = Process(folder)
    await gateway.start()
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {ADMIN}"}) as admin:
        keys = []
        for number in range(episodes):
            async with admin.post(f"{gateway.url}/v1/episodes", json={"id": f"e{number}", "seed": number}) as opened:
                keys.append((await opened.json())["key"])
    playing = asyncio.create_task(play_all(gateway.url, keys, cuts=0.3))
    for kill in range(1, kills + 1):
        while not playing.done() and len((folder / "calls.jsonl").read_bytes().splitlines()) < lines * kill / (
            kills + 1
        ):
            await asyncio.sleep(0.01)
        if playing.done():
            await playing  # raises what an agent failed with
        assert not playing.done(), "it was killed under load"
        await gateway.kill()
        await gateway.start()
    clients = await playing
    await gateway.kill()
    return clients


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_answered_call_is_recorded_once_and_the_trees_are_those_of_an_undisturbed_run(tmp_path, uncut):
    episodes, kills = (256, 10) if uncut else (64, 4)

    async def go():
        calm = await undisturbed(tmp_path / "calm", episodes)
        lines = len(lines_of(tmp_path / "calm"))
        clients = await disturbed(tmp_path / "killed", episodes, kills, lines)
        async with serving(tmp_path / "killed", ToyModel()) as again:
            assert {id: shape(episode) for id, episode in again.episodes.items()} == calm
            recorded = {id for episode in again.episodes.values() for id in episode.by_id}
            for client in clients:
                for answer, times in client.answered.items():
                    assert times == 1
                    assert answer.rpartition("-")[2].removeprefix("resp_") in recorded
        exchanges = [line["exchange"]["number"] for line in lines_of(tmp_path / "killed") if "exchange" in line]
        assert len(exchanges) == sum(len(client.answered) for client in clients)

    asyncio.run(asyncio.wait_for(go(), 1700))
