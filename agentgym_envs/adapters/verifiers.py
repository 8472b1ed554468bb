"""Environments of verifiers that are made by `load_environment`. See README.md beside this file."""

import queue
from collections.abc import Mapping
from typing import Any

from agentgym.core.env import Env, Opening, Step
from agentgym.core.messages import Action, Message, Observation, assistant, user
from agentgym.core.tasks import Task, TaskSet
from agentgym_envs.adapters.foreign import plain, plain_info
from agentgym_envs.adapters.verifiers_host import Ask, Ended, Host, Rollout, host_of, without_empty_fields

MOST_TURNS = 1_000
# Stop conditions that are limits (truncation), not the end of the task.
_LIMITS = ("max_turns_reached", "prompt_too_long", "timeout_reached", "max_total_completion_tokens_reached")


class VerifiersEnv(Env):
    """An environment made by `verifiers.load_environment`, for verifiers before 0.4."""

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any] | None = None,
        tasks: TaskSet | None = None,
        max_turns: int | None = None,
        render_mode: str | None = None,
    ):
        super().__init__(tasks, MOST_TURNS if max_turns is None else max_turns, render_mode)
        self.name = name
        self._settings = dict(settings or {})
        self._rollout: Rollout | None = None
        self._shown: list[Message] = []
        self._offered: list[dict[str, Any]] = []

    @classmethod
    def default_tasks(cls, split: str = "train", name: str = "", settings: Mapping[str, Any] | None = None) -> TaskSet:
        """The rows of the environment's `dataset` (train) or `eval_dataset` (test)."""
        rows = host_of(name, settings or {}).rows(split)
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

    @property
    def tools(self) -> list[dict[str, Any]]:  # type: ignore[override]  # a class variable where they are always the same
        return self._offered

    def init(self, task: Task) -> None:
        super().init(task)
        self._host  # noqa: B018 - loading takes its time here, not in the first reset

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        super().reset(seed=seed, options=options)
        self._stop()
        self._shown = []
        self._rollout = Rollout(self._host, row_of_task(self.current_task))
        event = self._next()
        if isinstance(event, Ended):
            raise RuntimeError(
                f"verifiers:{self.name}, task {self.current_task.id!r}: the rollout ended before its first request"
            )
        return self._seen(event), {}

    def step(self, action: Action) -> Step:
        self.read(action)
        reply = assistant(action)
        self._shown.append(reply)
        self._current.answer(reply)
        event = self._next()
        if isinstance(event, Ask):
            outcome = self.outcome(self._seen(event))
            if outcome[3]:
                self._stop()
            return outcome
        info = plain_info({**event.metrics, "stop_condition": event.stop_condition})
        cut = event.stop_condition in _LIMITS and getattr(self._host.env, "max_turns", -1) != 1
        messages, reward, terminated, truncated, _ = self.outcome(event.said, event.reward, not cut)
        self.running = False
        return messages, reward, terminated, truncated or cut, info

    def close(self) -> None:
        super().close()
        self._stop()

    @property
    def _host(self) -> Host:
        return host_of(self.name, self._settings)

    @property
    def _current(self) -> Rollout:
        if self._rollout is None:
            raise RuntimeError("VerifiersEnv: no rollout is running; call reset() before step()")
        return self._rollout

    def _next(self) -> Ask | Ended:
        rollout = f"verifiers:{self.name}, task {self.current_task.id!r}: the rollout"
        try:
            event = self._current.next()
        except queue.Empty:
            self._stop()
            raise RuntimeError(f"{rollout} sent no request in time") from None
        if not isinstance(event, Ask):
            self._rollout = None
        if isinstance(event, Exception):
            raise RuntimeError(f"{rollout} failed: {type(event).__name__}: {event}") from event
        return event

    def _seen(self, ask: Ask) -> Observation:
        before = len(self._shown)
        same = len(ask.messages) >= before and all(
            _same(theirs, ours) for theirs, ours in zip(ask.messages, self._shown, strict=False)
        )
        if not same:
            self._stop()
            raise RuntimeError(
                f"verifiers:{self.name} rewrites its conversation between turns, which is not supported here"
            )
        new = ask.messages[before:]
        self._shown += [dict(message) for message in new]
        self._offered = ask.tools
        return [dict(message) for message in new]

    def _stop(self) -> None:
        if self._rollout is not None:
            self._rollout.cancel()
            self._rollout = None


def _same(theirs: Message, ours: Message) -> bool:
    """True if two messages are the same. Assistant messages always match: theirs are made from the agent's replies."""
    return theirs["role"] == "assistant" if ours["role"] == "assistant" else theirs == ours


def task_of_row(row: Mapping[str, Any], id: str) -> Task:
    prompt = row["prompt"]
    rest = {key: plain(value) for key, value in row.items() if key not in ("prompt", "answer") and value is not None}
    asked = [user(prompt)] if isinstance(prompt, str) else prompt
    messages = tuple(plain(without_empty_fields(message)) for message in asked)
    return Task(id, messages, plain(row.get("answer")), metadata={"row": rest})


def row_of_task(task: Task) -> dict[str, Any]:
    row = {"prompt": [dict(message) for message in task.messages], "example_id": 0}
    answer = {} if task.answer is None else {"answer": task.answer}
    return {**row, **answer, **dict(task.metadata.get("row") or {})}
