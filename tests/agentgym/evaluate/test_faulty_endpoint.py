"""An endpoint that fails 30% of calls: an evaluation is complete all the same, and knows exactly what it took.

The endpoint is a double, for its faults: a real HTTP server on this machine whose "model" is a function of the conversation.
It answers 429 (with and without Retry-After), 500, cut bodies and streams, garbage, and 60 s of silence, and keeps its own
log of that.
"""

import asyncio
import json
import random
from collections import Counter
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from agentgym.core.trajectory import read_jsonl
from agentgym.evaluate import evaluate
from agentgym.evaluate.agents import chat, policy_maker
from agentgym.policies import endpoints

FAULTS = {"429": 2, "429 later": 1, "500": 2, "cut": 2, "garbage": 2, "timeout": 1}  # and how often each
SILENCE, PATIENCE = 60.0, 1.0


def answer(messages):
    """What the double says: a move that follows from the conversation alone."""
    seen = "".join(str(message["content"]) for message in messages)
    return random.Random(seen).choice(["right", "down", "down", "right", "left", "up"])


class FaultyEndpoint:
    """Fails a share of all calls, each in the way that comes next in a shuffled order, and logs each cause."""

    def __init__(self, share):
        self.share = share
        self.rng = random.Random(7)
        self.requests = 0
        self.faults = Counter()
        self.usage = Counter()
        self.gone = False

    async def complete(self, request):
        body = await request.json()
        self.requests += 1
        if self.rng.random() >= self.share:
            return await self.well(request, body)
        fault = self.rng.choices(list(FAULTS), list(FAULTS.values()))[0]
        self.faults[fault.split()[0]] += 1
        if fault.startswith("429"):
            later = {"Retry-After": "0.05"} if fault == "429 later" else {}
            return web.Response(status=429, headers=later, text="slow down")
        if fault == "500":
            return web.Response(status=500, text="worker died")
        if fault == "garbage":
            return web.Response(text="<html>bad gateway, but 200</html>")
        if fault == "timeout":
            await asyncio.sleep(SILENCE)
            return web.Response(status=504)
        return await self.cut(request, body)

    async def well(self, request, body):
        text = answer(body["messages"])
        usage = {
            "prompt_tokens": 10 * len(body["messages"]),
            "completion_tokens": len(text),
            "prompt_tokens_details": {"cached_tokens": len(body["messages"])},
            "completion_tokens_details": {"reasoning_tokens": 1},
        }
        self.usage.update({k: v for k, v in usage.items() if isinstance(v, int)})
        self.usage.update(cached_tokens=len(body["messages"]), reasoning_tokens=1)
        if not body.get("stream"):
            choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            return web.json_response({"choices": [choice], "usage": usage})
        response = await self.begun(request)
        for letter in text:
            await response.write(event({"choices": [{"delta": {"content": letter}}]}))
        await response.write(event({"choices": [{"delta": {}, "finish_reason": "stop"}]}))
        await response.write(event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        return response

    async def cut(self, request, body):
        """A wrong move begins to arrive, and the connection breaks."""
        if body.get("stream"):
            response = await self.begun(request)
            await response.write(event({"choices": [{"delta": {"content": "up"}}]}))
        else:
            response = web.StreamResponse(headers={"Content-Length": "1000"})
            await response.prepare(request)
            await response.write(b'{"choices": [{"message": {"content": "up"')
        request.transport.close()
        return response

    async def begun(self, request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        return response

    @asynccontextmanager
    async def running(self):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()


def event(record):
    return f"data: {json.dumps(record)}\n\n".encode()


def evaluated(endpoint, out, n, **settings):
    async def go():
        async with endpoint.running() as url:
            agent = chat("double", url, timeout=PATIENCE, **settings)
            return await evaluate("frozen_lake", policy_maker(agent), n=n, k=2, concurrency=32, out=out)

    report = asyncio.run(go())
    [file] = (out / "episodes").glob("*.jsonl")
    return report, {(t.task_id, t.sample): t for t in read_jsonl(file)}, len(list(read_jsonl(file)))


@pytest.mark.parametrize(("stream", "n"), [(False, 25), (True, 50)], ids=["whole", "streamed"])
def test_an_endpoint_that_fails_30_percent_of_calls_changes_nothing_but_the_time(stream, n, tmp_path, monkeypatch):
    monkeypatch.setattr(endpoints, "FIRST_WAIT", 0.02)
    sound, faulty = FaultyEndpoint(0.0), FaultyEndpoint(0.3)
    expected, undisturbed, _ = evaluated(sound, tmp_path / "sound", n, stream=stream)
    report, episodes, lines = evaluated(faulty, tmp_path / "faulty", n, stream=stream, retries=20)

    assert (report.episodes, report.errors, lines, len(episodes)) == (2 * n, 0, 2 * n, 2 * n)
    assert {cause for cause, count in faulty.faults.items() if count >= 5} == {f.split()[0] for f in FAULTS}
    assert faulty.requests * 0.2 < faulty.faults.total() < faulty.requests * 0.4

    calls = [episode.metadata["calls"] for episode in episodes.values()]
    assert sum((Counter(each["retries"]) for each in calls), Counter()) == faulty.faults
    assert sum(each["requests"] for each in calls) == faulty.requests
    assert sum((Counter(each["usage"]) for each in calls), Counter()) == faulty.usage == sound.usage
    assert sum(each["waited"] for each in calls) > 0

    assert (report.reward, report.success, report.turns) == (expected.reward, expected.success, expected.turns)
    assert 0 < report.success < 1
    for key, episode in episodes.items():
        assert [turn.reply for turn in episode.turns] == [turn.reply for turn in undisturbed[key].turns]
        assert episode.reward == undisturbed[key].reward


def test_an_endpoint_that_never_recovers_is_an_error_of_its_episodes_and_no_score(tmp_path, monkeypatch):
    monkeypatch.setattr(endpoints, "FIRST_WAIT", 0.001)

    class Broken(FaultyEndpoint):
        async def complete(self, request):
            self.requests += 1
            return web.Response(status=500, text="worker died")

    endpoint = Broken(1.0)

    async def go():
        async with endpoint.running() as url:
            agent = chat("double", url, timeout=PATIENCE, retries=2)
            return await evaluate("frozen_lake", policy_maker(agent), n=3, out=tmp_path, retries=1)

    report = asyncio.run(go())
    assert (report.episodes, report.errors, report.reward, report.success) == (0, 3, None, None)
    [file] = (tmp_path / "episodes").glob("*.jsonl")
    for trajectory in read_jsonl(file):
        assert trajectory.failed
        assert "answered 500: worker died (3 tries)" in trajectory.error
        assert trajectory.metadata["calls"]["requests"] == 6, "two tries of the episode, three of each request"
        assert trajectory.metadata["calls"]["retries"] == {"500": 4}
    assert endpoint.requests == 18
