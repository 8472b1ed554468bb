"""The protocol "agentgym/1" as the worker speaks it; see `frames.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentgym.core.tasks import Task
from agentgym.service.protocol import frames
from agentgym.service.protocol.frames import Refused, check_request, rng_of_json, rng_to_json
from agentgym.service.server.task_catalogue import facts_of
from agentgym.service.worker.protocol_handler import CallRunner, RequestHandler, SessionInfo

if TYPE_CHECKING:
    from agentgym.core.env import Env


class AgentgymHandler(RequestHandler):
    check = staticmethod(check_request)

    def __init__(self, env: Env, calls: CallRunner, session: SessionInfo):
        super().__init__(env, calls, session)
        self._env = env
        self._tools: list[dict[str, Any]] = list(env.get_wrapper_attr("tools"))

    def hello(self, resume: str | None) -> str:
        spec, env = self._session.spec, self._env
        facts = {
            "id": self._session.env_id,
            "description": spec.description,
            "tags": list(spec.tags),
            "nondeterministic": spec.nondeterministic,
            "floor": env.get_wrapper_attr("floor"),
            "runs_programs": getattr(env.unwrapped, "sandbox_image", None) is not None,
            **facts_of(spec, env),
        }
        self._tools = facts["tools"]
        return self._hello(resume, frames.PROTOCOL, env=facts)

    def _answered(self, request: Any, keep: int = frames.KEPT_ANSWERS) -> str:
        if not isinstance(request, list):
            return super()._answered(request, keep)
        if not request:
            raise Refused(frames.BAD_REQUEST, "an empty list asks for nothing")
        answers: list[str] = []
        for one in request:
            answers.append(super()._answered(one, max(keep, len(request))))
            if self.ended:
                break
        return f"[{', '.join(answers)}]"

    def call_init(self, request: dict[str, Any]) -> dict[str, Any]:
        self._begin()
        self._calls.call("init", self._env.get_wrapper_attr("init"), _task(request.get("task")))
        return self._new_tools()

    def call_reset(self, request: dict[str, Any]) -> dict[str, Any]:
        self._begin()
        options = request.get("options")
        if options is not None and not isinstance(options, dict):
            raise Refused(frames.BAD_REQUEST, f"options are an object or null, not {type(options).__name__}")
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

    def call_step(self, request: dict[str, Any]) -> Any:
        if "action" not in request:
            raise Refused(frames.BAD_REQUEST, "step needs an action")
        return self._calls.call("step", self._env.step, request["action"])

    def call_close(self, request: dict[str, Any]) -> dict[str, Any]:
        # The worker closes the environment; here only the client is told of what goes wrong.
        self.ended = True
        self._calls.call("close", self._env.close)
        return {}

    def call_tools(self, request: dict[str, Any]) -> dict[str, Any]:
        self._tools = list(self._env.get_wrapper_attr("tools"))
        return {"tools": self._tools}

    def call_expert_action(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"action": self._calls.call("expert_action", self._method("expert_action"))}

    def call_random_action(self, request: dict[str, Any]) -> dict[str, Any]:
        rng = rng_of_json(request.get("rng"))
        action = self._calls.call("random_action", self._method("random_action"), rng)
        return {"action": action, "rng": rng_to_json(rng)}

    def _begin(self) -> None:
        if self.draining:
            raise Refused(frames.DRAINING, "the server is ending: open a session at another", fatal=True)

    def _new_tools(self) -> dict[str, Any]:
        return {} if self._env.get_wrapper_attr("tools") == self._tools else self.call_tools({})

    def _method(self, name: str) -> Any:
        if not self._env.has_wrapper_attr(name):
            raise Refused(frames.UNKNOWN_CALL, f"the environment {self._session.env_id!r} has no {name}")
        return self._env.get_wrapper_attr(name)


def _task(record: Any) -> Task:
    if not isinstance(record, dict):
        raise Refused(frames.BAD_REQUEST, f"a task is an object, not {type(record).__name__}")
    try:
        return Task.from_json(record)
    except (ValueError, TypeError) as error:
        raise Refused(frames.BAD_REQUEST, str(error)) from None
