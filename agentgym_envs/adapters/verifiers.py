"""Environments of verifiers that are made by `load_environment`. See README.md beside this file.

verifiers makes an environment once and runs many rollouts on one event loop, and so does this module, with a thread for
each loop. When a rollout requests a model's answer, its client puts the request into the episode's queue and waits for
the reply.
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
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from agentgym.core.env import Env, Opening, Step
from agentgym.core.messages import Action, Message, Observation, assistant, text_of, user
from agentgym.core.tasks import Task, TaskSet
from agentgym_envs.adapters.foreign import imported, plain, plain_info, settings_key

WAIT_SECONDS = 600.0  # for a rollout's next request; the agent loop's limits are shorter
# Stop conditions that are limits (truncation), not the end of the task.
_LIMITS = ("max_turns_reached", "prompt_too_long", "timeout_reached", "max_total_completion_tokens_reached")
_loading = threading.Lock()


class VerifiersEnv(Env):
    """An environment made by `verifiers.load_environment`, for verifiers before 0.4."""

    max_turns = 1_000
    tools_at_reset = True  # those of the rollout's first request

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any] | None = None,
        tasks: TaskSet | None = None,
        max_turns: int | None = None,
        render_mode: str | None = None,
    ):
        super().__init__(tasks, max_turns, render_mode)
        self.name = name
        self._settings = dict(settings or {})
        self._rollout: Rollout | None = None
        self._shown: list[Message] = []

    @classmethod
    def default_tasks(cls, split: str = "train", name: str = "", settings: Mapping[str, Any] | None = None) -> TaskSet:
        """The rows of the environment's `dataset` (train) or `eval_dataset` (test)."""
        env = host_of(name, settings or {}).env
        build = {"train": env.build_dataset, "test": env.build_eval_dataset}
        rows = build[split]() if split in build else None
        if rows is None:
            raise ValueError(f"verifiers:{name} has no split {split!r}; train is its dataset, test its eval_dataset")
        return TaskSet(
            lambda i: task_of_row(rows[i], f"{name}-{split}-{i}"),
            name=f"{name}/{split}",
            source="verifiers",
            size=len(rows),
        )

    @property
    def tasks(self) -> TaskSet:
        if self._tasks is None:
            self._tasks = self.default_tasks("train", self.name, self._settings)
        return self._tasks

    def init(self, task: Task) -> None:
        super().init(task)
        host_of(self.name, self._settings)  # loading takes its time here, not in the first reset

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        super().reset(seed=seed, options=options)
        self._stop()
        self._shown = []
        task = self.current_task
        row = {"prompt": [dict(message) for message in task.messages], "example_id": 0}
        answer = {} if task.answer is None else {"answer": task.answer}
        row |= {**answer, **dict(task.metadata.get("row") or {})}
        self._rollout = Rollout(host_of(self.name, self._settings), row)
        event = self._next(self._rollout)
        if not isinstance(event, Ask):
            raise RuntimeError(f"verifiers:{self.name}, task {task.id!r}: the rollout ended before its first request")
        return self._seen(event), {}

    def step(self, action: Action) -> Step:
        self.read(action)
        reply = assistant(action)
        if self._rollout is None:
            raise RuntimeError("VerifiersEnv: no rollout is running; call reset() before step()")
        self._shown.append(reply)
        self._rollout.answer(reply)
        event = self._next(self._rollout)
        if isinstance(event, Ask):
            outcome = self.outcome(self._seen(event))
            if outcome[3]:
                self._stop()
            return outcome
        stop_condition = str(event.get("stop_condition"))
        info = plain_info({**(event.get("metrics") or {}), "stop_condition": stop_condition})
        env = host_of(self.name, self._settings).env
        cut = stop_condition in _LIMITS and getattr(env, "max_turns", -1) != 1
        said = [without_empty_fields(message) for message in event.get("completion") or []]
        last = max((place for place, message in enumerate(said) if message["role"] == "assistant"), default=-1)
        messages, reward, terminated, truncated, _ = self.outcome(said[last + 1 :], float(event["reward"]), not cut)
        self.running = False
        return messages, reward, terminated, truncated or cut, info

    def close(self) -> None:
        super().close()
        self._stop()

    def _next(self, rollout: "Rollout") -> "Ask | Mapping[str, Any]":
        """The rollout's next request, or its output once it is finished and scored."""
        which = f"verifiers:{self.name}, task {self.current_task.id!r}: the rollout"
        try:
            event = rollout.events.get(timeout=WAIT_SECONDS)
        except queue.Empty:
            self._stop()
            raise RuntimeError(f"{which} sent no request in time") from None
        if not isinstance(event, Ask):
            self._rollout = None
        if isinstance(event, Exception):
            raise RuntimeError(f"{which} failed: {type(event).__name__}: {event}") from event
        if not isinstance(event, Ask) and event.get("error") is not None:
            raise RuntimeError(f"{which} failed: {event['error']}")
        return event

    def _seen(self, ask: "Ask") -> Observation:
        before = len(self._shown)
        # Assistant messages are always the same: theirs are made from the agent's replies.
        if len(ask.messages) < before or any(
            theirs["role"] != "assistant" if ours["role"] == "assistant" else theirs != ours
            for theirs, ours in zip(ask.messages, self._shown, strict=False)
        ):
            self._stop()
            raise RuntimeError(
                f"verifiers:{self.name} rewrites its conversation between turns, which is not supported here"
            )
        new = ask.messages[before:]
        self._shown += [dict(message) for message in new]
        self.tools = ask.tools  # type: ignore[misc]
        return [dict(message) for message in new]

    def _stop(self) -> None:
        if self._rollout is not None:
            self._rollout.running.cancel()
            self._rollout = None


def task_of_row(row: Mapping[str, Any], id: str) -> Task:
    prompt = row["prompt"]
    rest = {key: plain(value) for key, value in row.items() if key not in ("prompt", "answer") and value is not None}
    asked = [user(prompt)] if isinstance(prompt, str) else prompt
    messages = tuple(plain(without_empty_fields(message)) for message in asked)
    return Task(id, messages, plain(row.get("answer")), metadata={"row": rest})


# ---- rollouts


@dataclass(frozen=True)
class Ask:
    """A rollout's request to a model: the whole conversation, and OpenAI schemas of the tools."""

    messages: list[Message]
    tools: list[dict[str, Any]]


class Rollout:
    def __init__(self, host: "Host", row: dict[str, Any]):
        self.events: queue.SimpleQueue[Ask | Mapping[str, Any] | Exception] = queue.SimpleQueue()
        self._loop = host.loop
        self._reply: asyncio.Future[Message] | None = None
        self.running = asyncio.run_coroutine_threadsafe(self._run(host, row), self._loop)

    def answer(self, reply: Message) -> None:
        def take() -> None:
            if self._reply is not None and not self._reply.done():
                self._reply.set_result(reply)

        self._loop.call_soon_threadsafe(take)

    async def ask(self, messages: list[Message], tools: list[dict[str, Any]]) -> Message:
        """Forward a request to the agent; the client calls it on the event loop."""
        self._reply = self._loop.create_future()
        self.events.put(Ask(messages, tools))
        return await self._reply

    async def _run(self, host: "Host", row: dict[str, Any]) -> None:
        failures: list[Exception] = []
        _judges_failures.set(failures)
        try:
            output = await host.env.run_rollout(row, _client(self), "agentgym", {})
            self.events.put(failures[0] if failures else output)
        except Exception as error:
            self.events.put(error)


# verifiers scores 0 for whatever fails in a reward function. A judge that fails is no doing of the agent's.
_judges_failures: ContextVar[list[Exception]] = ContextVar("judges_failures")


@functools.cache
def _watch_judges(rubric: Any) -> None:
    """Note in a rollout what its judges raise."""
    asked = rubric.judge

    @functools.wraps(asked)
    async def judge(*arguments: Any, **options: Any) -> Any:
        try:
            return await asked(*arguments, **options)
        except Exception as error:
            _judges_failures.get([]).append(error)
            raise

    rubric.judge = judge


class Host:
    def __init__(self, name: str, settings: Mapping[str, Any]):
        verifiers = imported("verifiers")
        if not hasattr(verifiers, "load_environment") or not hasattr(verifiers, "Client"):
            version = getattr(verifiers, "__version__", "?")
            raise ImportError(
                f"verifiers {version} has no load_environment with clients: pip install 'verifiers>=0.1.14,<0.4'"
            )
        # Keep the environment from replacing this process's signal handlers, which only the main thread may do.
        base: Any = sys.modules[verifiers.Environment.__module__]
        if getattr(base, "signal", None) is signal:
            base.signal = types.SimpleNamespace(
                SIGINT=signal.SIGINT, SIGTERM=signal.SIGTERM, signal=lambda number, handler: None
            )
        if (rubric := getattr(verifiers, "JudgeRubric", None)) is not None:
            _watch_judges(rubric)
        module = name.replace("-", "_").split("/")[-1]
        try:
            self.env = verifiers.load_environment(name, **settings)
        except ValueError as error:
            if not isinstance(error.__cause__, ImportError):
                raise
            raise ImportError(
                f"environment 'verifiers:{name}': cannot import its package {module!r} ({error.__cause__}); install it beside"
                f" verifiers, from where it is published"
            ) from error
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name=f"verifiers {name}", daemon=True).start()


def host_of(name: str, settings: Mapping[str, Any]) -> Host:
    """This process's host of an environment with these settings, created on first use."""
    with _loading:
        return _host(name, settings_key(settings), os.getpid())


@functools.lru_cache(maxsize=32)
def _host(name: str, key: str, pid: int) -> Host:
    return Host(name, json.loads(key))


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


def without_empty_fields(message: Mapping[str, Any]) -> Message:
    return {key: value for key, value in dict(message).items() if value is not None or key == "content"}
