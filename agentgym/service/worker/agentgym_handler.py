"""The protocol "agentgym/1" as the worker speaks it: requests of `frames.py`, each run once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentgym.core.tasks import Task
from agentgym.service.protocol.frames import (
    BAD_REQUEST,
    DRAINING,
    ENV_ERROR,
    KEPT_ANSWERS,
    OUT_OF_MEMORY,
    PROTOCOL,
    UNKNOWN_CALL,
    Refused,
    check_request,
    error_frame,
    json_of_text,
    last_word,
    rng_of_json,
    rng_to_json,
    text_of_json,
)
from agentgym.service.server.task_catalogue import made_with
from agentgym.service.worker.session_worker import CallRunner, SessionInfo, described

if TYPE_CHECKING:
    from agentgym.core.env import Env

_METHODS = ("expert_action", "random_action")


class AgentgymHandler:
    """Answers requests and keeps the last answers for a client that resumes. See `session_worker.ProtocolHandler`."""

    resumable = True
    last_word = staticmethod(last_word)

    def __init__(self, env: Env, calls: CallRunner, session: SessionInfo):
        self.ended = False
        self.draining = False
        self._env = env
        self._calls = calls
        self._session = session
        self._last = 0
        self._kept: dict[int, str] = {}
        self._tools: list[dict[str, Any]] = list(env.get_wrapper_attr("tools"))
        self._runs = {
            "init": self._init,
            "reset": self._reset,
            "step": self._step,
            "close": self._close,
            "tools": self._tell_tools,
            "expert_action": self._expert_action,
            "random_action": self._random_action,
        }

    def hello(self, resume: str | None) -> str:
        spec, env = self._session.spec, self._env
        self._tools = list(env.get_wrapper_attr("tools"))
        return text_of_json(
            {
                "session": self._session.id,
                "resume": resume,
                "protocol": PROTOCOL,
                "last": self._last,
                "env": {
                    "id": self._session.env_id,
                    "description": spec.description,
                    "tags": list(spec.tags),
                    "nondeterministic": spec.nondeterministic,
                    "max_turns": getattr(env.unwrapped, "max_turns", None),
                    "tools": self._tools,
                    "floor": env.get_wrapper_attr("floor"),
                    "runs_programs": getattr(env.unwrapped, "sandbox_image", None) is not None,
                    "kwargs": made_with(spec),
                    "methods": [name for name in _METHODS if env.has_wrapper_attr(name)],
                },
                "limits": vars(self._session.limits),
            }
        )

    def answer(self, text: str) -> str:
        """The answer to a request, or the list of answers to a list."""
        try:
            asked = json_of_text(text)
            if not isinstance(asked, list):
                return self._answered(asked, KEPT_ANSWERS)
            if not asked:
                raise Refused(BAD_REQUEST, "an empty list asks for nothing")
        except Refused as refused:
            if refused.fatal:
                raise
            self._calls.count_error(refused.code)
            return text_of_json(error_frame(refused.code, str(refused), fatal=False))
        answers: list[str] = []
        for request in asked:
            answers.append(self._answered(request, max(KEPT_ANSWERS, len(asked))))
            if self.ended:
                break
        return f"[{', '.join(answers)}]"

    def _answered(self, request: Any, keep: int) -> str:
        id = request.get("id") if isinstance(request, dict) else None
        if type(id) is int and 0 < id <= self._last:
            return self._kept_answer(id)
        try:
            check_request(request, self._last + 1)
            answer = f'{{"id": {id}, "result": {text_of_json(self._run(request))}}}'
        except Refused as refused:
            if refused.code == OUT_OF_MEMORY:
                raise
            self._calls.count_error(refused.code)
            answer = text_of_json(error_frame(refused.code, str(refused), refused.fatal, _id(id)))
            self.ended = self.ended or refused.fatal
        except (Exception, SystemExit) as error:
            answer = text_of_json(error_frame(ENV_ERROR, described(error), fatal=False, id=_id(id)))
        if id == self._last + 1:
            self._last += 1
            self._kept[self._last] = answer
            while len(self._kept) > keep:
                del self._kept[self._last + 1 - len(self._kept)]  # the oldest: ids follow one another
        return answer

    def _kept_answer(self, id: int) -> str:
        if id in self._kept:
            return self._kept[id]
        why = f"request {id} was run, and its answer is not kept any more; the last is {self._last}"
        return text_of_json(error_frame(BAD_REQUEST, why, fatal=False, id=id))

    def _run(self, request: dict[str, Any]) -> Any:
        call = request["call"]
        if self.draining and call in ("init", "reset"):
            raise Refused(DRAINING, "the server is ending: open a session at another", fatal=True)
        return self._runs[call](request)

    def _init(self, request: dict[str, Any]) -> dict[str, Any]:
        self._calls.call("init", self._env.get_wrapper_attr("init"), _task(request.get("task")))
        return self._new_tools()

    def _reset(self, request: dict[str, Any]) -> dict[str, Any]:
        options = request.get("options")
        if options is not None and not isinstance(options, dict):
            raise Refused(BAD_REQUEST, f"options are an object or null, not {type(options).__name__}")
        given = options is not None and "task" in options
        if options is not None and given:
            options = {**options, "task": _task(options["task"])}
        before = getattr(self._env.unwrapped, "task", None)
        observation, info = self._calls.call("reset", self._env.reset, seed=request.get("seed"), options=options)
        result = {"observation": observation, "info": info, **self._new_tools()}
        task = getattr(self._env.unwrapped, "task", None)
        if task is not before and task is not None and not given:
            result["task"] = task.to_json()
        return result

    def _step(self, request: dict[str, Any]) -> Any:
        if "action" not in request:
            raise Refused(BAD_REQUEST, "step needs an action")
        return self._calls.call("step", self._env.step, request["action"])

    def _close(self, request: dict[str, Any]) -> dict[str, Any]:
        # The worker closes the environment; here only the client is told of what goes wrong.
        self.ended = True
        self._calls.call("close", self._env.close)
        return {}

    def _tell_tools(self, request: dict[str, Any]) -> dict[str, Any]:
        self._tools = list(self._env.get_wrapper_attr("tools"))
        return {"tools": self._tools}

    def _new_tools(self) -> dict[str, Any]:
        tools = self._env.get_wrapper_attr("tools")
        if tools == self._tools:
            return {}
        self._tools = list(tools)
        return {"tools": self._tools}

    def _expert_action(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"action": self._calls.call("expert_action", self._method("expert_action"))}

    def _random_action(self, request: dict[str, Any]) -> dict[str, Any]:
        rng = rng_of_json(request.get("rng"))
        action = self._calls.call("random_action", self._method("random_action"), rng)
        return {"action": action, "rng": rng_to_json(rng)}

    def _method(self, name: str) -> Any:
        if not self._env.has_wrapper_attr(name):
            raise Refused(UNKNOWN_CALL, f"the environment {self._session.env_id!r} has no {name}")
        return self._env.get_wrapper_attr(name)


def _id(id: Any) -> int | None:
    return id if type(id) is int else None


def _task(record: Any) -> Task:
    if not isinstance(record, dict):
        raise Refused(BAD_REQUEST, f"a task is an object, not {type(record).__name__}")
    try:
        return Task.from_json(record)
    except (ValueError, TypeError) as error:
        raise Refused(BAD_REQUEST, str(error)) from None
