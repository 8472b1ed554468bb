"""A double of an SGLang server, which cannot be installed here: the endpoints that the trainer asks, as SGLang documents them.

It computes: `/generate` samples with transformers, and `/update_weights_from_disk` loads the folder that it is given. Its faults
are set by a test. What it stands for: SGLang 0.5, docs.sglang.io (native API, sampling parameters, SGLang for RL systems).
"""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agent_train.engine.base import Sampling
from agent_train.engine.decoding import Request, decode

# SGLang refuses a sampling parameter that it does not know.
KNOWN = {
    *("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos", "n"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
}


@dataclass
class SglangDouble:
    """One server. Attributes after `key` are its faults, and what it was asked."""

    model_dir: str
    key: str = ""
    context: int = 512
    dtype: str = "auto"
    dies: bool = False  # closes connections in place of any answer
    hangs: bool = False  # answers nothing, not even /health
    lies: str = ""  # a weight version that it tells in place of its own
    refuses: str = ""  # why it loads no weights
    seconds: float = 0.0  # before it answers /generate
    url: str = ""
    version: str = "default"
    generated: int = 0
    loaded: list[Path] = field(default_factory=list)
    busy: int = 0

    def __post_init__(self) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32).eval()
        self.eos: int | None = self.model.config.eos_token_id

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/health", self._health)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/update_weights_from_disk", self._update_weights)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.dies:
            assert request.transport is not None
            request.transport.abort()
        while self.hangs:
            await asyncio.sleep(0.05)
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.key and given != self.key and request.path != "/health":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _server_info(self, request: web.Request) -> web.Response:
        own = {"model_path": self.model_dir, "dtype": self.dtype, "weight_version": self.version}
        return web.json_response({**own, "context_length": None, "max_req_input_len": self.context - 6})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        params = body["sampling_params"]
        if unknown := params.keys() - KNOWN:
            return web.json_response({"error": {"message": f"Unexpected keyword {unknown}"}}, status=400)
        assert params["temperature"] in (0, 1)
        assert body["return_logprob"]
        self.generated += 1
        self.busy += 1
        await asyncio.sleep(self.seconds)
        stops = (
            () if params.get("ignore_eos") else (*params["stop_token_ids"], *([] if self.eos is None else [self.eos]))
        )
        sampling = Sampling(params["max_new_tokens"], params["temperature"], stops, seed=self.generated)
        said = decode(self.model, [Request(body["input_ids"], sampling)], 0)[0]
        self.busy -= 1
        reason: dict[str, Any] = {"type": "length", "length": len(said.ids)}
        if len(said.ids) < sampling.max_tokens:  # SGLang looks at the length first
            reason = {"type": "stop", "matched": said.ids[-1]}
        told = [[logprob, token, None] for logprob, token in zip(said.logprobs, said.ids, strict=True)]
        meta = {"finish_reason": reason, "weight_version": self.lies or self.version, "output_token_logprobs": told}
        return web.json_response({"text": "", "output_ids": said.ids, "meta_info": meta})

    async def _update_weights(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert not self.busy, "weights come while requests are in flight"
        folder = Path(body["model_path"])
        why = self.refuses or (
            "" if (folder / "config.json").is_file() else f"Failed to get weights iterator: {folder}"
        )
        if why:
            return web.json_response({"success": False, "message": why, "num_paused_requests": 0}, status=400)
        self.model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
        self.version = body["weight_version"]
        self.loaded.append(folder)
        return web.json_response({"success": True, "message": "Succeeded", "num_paused_requests": 0})


@contextlib.contextmanager
def running(*doubles: SglangDouble) -> Iterator[None]:
    """Serve doubles from a thread, each at a port of its own."""
    loop, begun = asyncio.new_event_loop(), threading.Event()

    async def serve() -> list[web.AppRunner]:
        runners = []
        for double in doubles:
            runner = web.AppRunner(double.app(), shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            double.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            runners.append(runner)
        return runners

    def run() -> None:
        torch.set_num_threads(1)
        runners = loop.run_until_complete(serve())
        begun.set()
        loop.run_forever()
        for runner in runners:
            loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert begun.wait(30)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
