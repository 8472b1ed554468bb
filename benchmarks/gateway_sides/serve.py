"""What the gateway's benchmark measures against, each a process that prints its port: python serve.py SIDE [FOLDER [ENGINE_URL]]

engine    an instant engine: an OpenAI-compatible endpoint that counts the messages and always says the same, with token ids
inside    the gateway with that answer from a backend in its own process, as a trainer's engine is
upstream  the gateway in front of an endpoint
"""

from __future__ import annotations

import asyncio
import json
import sys

from aiohttp import web

TEXT = "The answer is forty-two, as it has always been."
IDS = list(range(100, 112))
LOGPROBS = [-0.5] * len(IDS)
PROMPT = list(range(60))
FIRST, MOST = 3, 65  # messages of a conversation's first call, and of the longest one
EPISODES = 4096
WORDS = [f" {word}" for word in TEXT.split(" ")]
TEXT = "".join(WORDS)


def prompt_of(messages: int) -> tuple[list[int], dict[str, int]]:
    """The ids of a prompt with so many messages, which go on from those of the call before, and the usage."""
    ids = PROMPT + (IDS + PROMPT[:20]) * ((messages - FIRST) // 2)
    usage = {"prompt_tokens": len(ids), "completion_tokens": len(IDS), "total_tokens": len(ids) + len(IDS)}
    return ids, usage


def answers_of(messages: int) -> tuple[bytes, list[bytes]]:
    """An answer in one piece, and as events."""
    ids, usage = prompt_of(messages)
    made = {"id": "1", "created": 1, "model": "model"}
    told = {"content": [{"token": "x", "logprob": each, "top_logprobs": []} for each in LOGPROBS]}
    choice = {"index": 0, "finish_reason": "stop", "token_ids": IDS, "logprobs": told}
    message = {"role": "assistant", "content": TEXT}
    head = {**made, "object": "chat.completion", "prompt_token_ids": ids, "usage": usage}
    whole = json.dumps({**head, "choices": [{**choice, "message": message}]}).encode()
    chunk = {**made, "object": "chat.completion.chunk"}
    parts = [{**chunk, "choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]} for word in WORDS]
    parts[0]["prompt_token_ids"] = ids
    parts.append({**chunk, "choices": [{**choice, "delta": {}}]})
    parts.append({**chunk, "choices": [], "usage": usage})
    return whole, [f"data: {json.dumps(part)}\n\n".encode() for part in parts] + [b"data: [DONE]\n\n"]


def instant_engine() -> web.Server:
    answers = {messages: answers_of(messages) for messages in range(FIRST, MOST + 1, 2)}

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "model", "owned_by": "vllm"}]})
        asked = await request.read()
        whole, events = answers[asked.count(b'"role"')]
        if b'"stream": true' not in asked and b'"stream":true' not in asked:
            return web.Response(body=whole, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(event)
        await response.write_eof()
        return response

    return web.Server(answer, access_log=None)


class InstantBackend:
    models, honours = ("model",), None

    async def answer(self, call, episode, told):  # type: ignore[no-untyped-def]
        from agentgym.core.trajectory import Tokens
        from agentgym.gateway import ModelAnswer

        if call.streams:
            for word in WORDS:
                told("text", word)
        ids, usage = prompt_of(len(call.messages))
        message = {"role": "assistant", "content": TEXT}
        return ModelAnswer(message, Tokens(ids, IDS, LOGPROBS, [0] * len(IDS)), usage)


async def main(side: str, folder: str = "", engine: str = "") -> None:
    if side == "engine":
        loop = asyncio.get_running_loop()
        server = await loop.create_server(instant_engine(), "127.0.0.1", 0)
        told = {"url": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"}
    else:
        from agentgym.gateway import Gateway, Upstream

        backend = InstantBackend() if side == "inside" else Upstream(f"{engine}/v1")
        if isinstance(backend, Upstream):
            await backend.start()
        gateway = Gateway(backend, folder)
        await gateway.__aenter__()
        opened = await asyncio.gather(*(gateway.open() for _ in range(EPISODES)))
        told = {"url": gateway.url, "keys": [key for _, key in opened]}
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
