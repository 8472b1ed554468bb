"""Runs environments of verifiers, each in one thread whose event loop serves all its episodes.

verifiers makes an environment once and runs many rollouts on one event loop, and so does this module. When a rollout
requests a model's answer, its client puts the request into the episode's queue and waits for the reply.
"""

import asyncio
import functools
import json
import os
import queue
import signal
import sys
import threading
import time
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentgym.core.messages import Message, text_of
from agentgym_envs.adapters.foreign import imported, settings_key

WAIT_SECONDS = 600.0  # for a rollout's next request; the agent loop's limits are shorter
_loading = threading.Lock()


@dataclass(frozen=True)
class Ask:
    """A rollout's request to a model: the whole conversation, and OpenAI schemas of the tools."""

    messages: list[Message]
    tools: list[dict[str, Any]]


@dataclass(frozen=True)
class Ended:
    """A finished and scored rollout; `said` are the environment's messages after the last reply."""

    reward: float
    metrics: Mapping[str, Any]
    stop_condition: str
    said: list[Message]


class Rollout:
    def __init__(self, host: "Host", row: dict[str, Any]):
        self._loop = host.loop
        self._events: queue.SimpleQueue[Ask | Ended | Exception] = queue.SimpleQueue()
        self._reply: asyncio.Future[Message] | None = None
        self._running = asyncio.run_coroutine_threadsafe(self._run(host, row), self._loop)

    def next(self) -> Ask | Ended | Exception:
        return self._events.get(timeout=WAIT_SECONDS)

    def answer(self, reply: Message) -> None:
        self._loop.call_soon_threadsafe(self._take, reply)

    def cancel(self) -> None:
        self._running.cancel()

    async def ask(self, messages: list[Message], tools: list[dict[str, Any]]) -> Message:
        """Forward a request to the agent; the client calls it on the event loop."""
        self._reply = self._loop.create_future()
        self._events.put(Ask(messages, tools))
        return await self._reply

    def _take(self, reply: Message) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(reply)

    async def _run(self, host: "Host", row: dict[str, Any]) -> None:
        try:
            self._events.put(_ended(await host.env.run_rollout(row, _client(self), "agentgym", {})))
        except Exception as error:
            self._events.put(error)


class Host:
    def __init__(self, name: str, settings: Mapping[str, Any]):
        self.env = _loaded(name, settings)
        self.name = name
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name=f"verifiers {name}", daemon=True).start()

    def rows(self, split: str) -> Any:
        build = {"train": self.env.build_dataset, "test": self.env.build_eval_dataset}
        rows = build[split]() if split in build else None
        if rows is None:
            raise ValueError(
                f"verifiers:{self.name} has no split {split!r}; train is its dataset, test its eval_dataset"
            )
        return rows


def host_of(name: str, settings: Mapping[str, Any]) -> Host:
    """This process's host of an environment with these settings, created on first use."""
    with _loading:
        return _host(name, settings_key(settings), os.getpid())


@functools.lru_cache(maxsize=32)
def _host(name: str, key: str, pid: int) -> Host:
    return Host(name, json.loads(key))


def _loaded(name: str, settings: Mapping[str, Any]) -> Any:
    verifiers = imported("verifiers")
    if not hasattr(verifiers, "load_environment") or not hasattr(verifiers, "Client"):
        version = getattr(verifiers, "__version__", "?")
        raise ImportError(
            f"verifiers {version} has no load_environment with clients: pip install 'verifiers>=0.1.14,<0.4'"
        )
    _leave_signals(verifiers.Environment)
    module = name.replace("-", "_").split("/")[-1]
    try:
        return verifiers.load_environment(name, **settings)
    except ValueError as error:
        if not isinstance(error.__cause__, ImportError):
            raise
        raise ImportError(
            f"environment 'verifiers:{name}': cannot import its package {module!r} ({error.__cause__}); install it beside"
            f" verifiers, from where it is published"
        ) from error


def _leave_signals(environment: type) -> None:
    """Keep an environment from replacing this process's signal handlers, which only the main thread may do."""
    module: Any = sys.modules[environment.__module__]
    if getattr(module, "signal", None) is signal:
        module.signal = types.SimpleNamespace(
            SIGINT=signal.SIGINT, SIGTERM=signal.SIGTERM, signal=lambda number, handler: None
        )


def _client(rollout: Rollout) -> Any:
    kinds: Any = imported("verifiers", "verifiers.types")
    chat: Any = imported("verifiers", "verifiers.clients").OpenAIChatCompletionsClient

    class AgentClient(chat):  # type: ignore[misc]
        async def get_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any) -> Any:
            messages, _extra = await self.to_native_prompt(prompt)
            schemas = await self.to_native_tools(tools) or []
            reply = await rollout.ask([without_empty_fields(m) for m in messages], [dict(schema) for schema in schemas])
            return _response(kinds, reply, model)

    return AgentClient(object())


def _response(kinds: Any, reply: Message, model: str) -> Any:
    """A reply as a model's response. Empty replies are passed on: they are the agent's fault, not a failure."""
    calls = []
    for place, call in enumerate(reply.get("tool_calls") or []):
        if isinstance(call, Mapping) and isinstance(function := call.get("function"), Mapping):
            arguments = function.get("arguments")
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            name = str(function.get("name", ""))
            calls.append(kinds.ToolCall(id=str(call.get("id") or f"call_{place}"), name=name, arguments=text))
    message = kinds.ResponseMessage(
        content=text_of(reply),
        reasoning_content=reply.get("reasoning_content"),
        tool_calls=calls or None,
        finish_reason="tool_calls" if calls else "stop",
        is_truncated=False,
    )
    return kinds.Response(id="agentgym", created=int(time.time()), model=model, message=message)


def _ended(output: Mapping[str, Any]) -> Ended:
    if output.get("error") is not None:
        raise RuntimeError(f"{output['error']}")
    said = [without_empty_fields(message) for message in output.get("completion") or []]
    last = max((place for place, message in enumerate(said) if message["role"] == "assistant"), default=-1)
    reward, metrics = float(output["reward"]), output.get("metrics") or {}
    return Ended(reward, metrics, str(output.get("stop_condition")), said[last + 1 :])


def without_empty_fields(message: Mapping[str, Any]) -> Message:
    return {key: value for key, value in dict(message).items() if value is not None or key == "content"}
