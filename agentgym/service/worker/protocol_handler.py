"""Calls environments and answers clients in a worker: the part common to all protocols, and "agentgym/1"."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from agentgym.core.executor import EnvExecutor, passed_on
from agentgym.core.extensions import import_path
from agentgym.core.registration import EnvSpec
from agentgym.core.tasks import Task, TaskSet
from agentgym.core.tracebacks import text_of_error
from agentgym.service.protocol import frames
from agentgym.service.protocol.frames import (
    Refused,
    ServiceLimits,
    check_request,
    error_frame,
    json_of_text,
    rng_of_json,
    rng_to_json,
    text_of_json,
)
from agentgym.service.server import slots
from agentgym.service.server.bounds import why_no_memory
from agentgym.service.server.slots import Slot
from agentgym.service.server.task_catalogue import facts_of
from agentgym.service.worker.websocket import TEXT, close_frame, encoded

# Protocols of sessions by name, and their handlers. The path of a request chooses one.
HANDLERS = {
    "agentgym/1": "agentgym.service.worker.protocol_handler:AgentgymHandler",
    "openenv": "agentgym.service.openenv.handler:OpenEnvHandler",
    "openenv/mcp": "agentgym.service.openenv.handler:BareMcpHandler",
    "sandbox/1": "agentgym.service.worker.sandbox_handler:SandboxHandler",
}
_STATES = {"init": slots.INIT, "tasks": slots.RESET, "reset": slots.RESET, "close": slots.CLOSE}


@dataclass(frozen=True)
class SessionInfo:
    id: str
    env_id: str
    spec: EnvSpec
    limits: ServiceLimits


class CallRunner:
    """Runs an environment's functions and writes the state into the slot; `async def` in one task of another thread."""

    def __init__(self, slot: Slot, raised: Callable[[str, BaseException], None] = lambda call, error: None):
        self.slot = slot
        self._raised = raised  # told of what the environment raises, and in which call
        self._loop: asyncio.AbstractEventLoop | None = None
        self._executor = EnvExecutor("agentgym async calls")

    def call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of `function(*args, **kwargs)`, awaited if need be; MemoryError becomes a fatal `Refused`.

        `name` is "init", "reset", "step" or "close", whose time limit holds; "tasks" has that of a reset, any other name that of a step.
        """
        slot = self.slot
        begun = slot.enter(_STATES.get(name, slots.STEP))
        try:
            result = function(*args, **kwargs)
            if type(result) is not tuple and inspect.isawaitable(result):
                result = self._awaited(result)
        except MemoryError as error:  # whatever the environment was about, it is half done
            self._raised(name, error)
            raise Refused(frames.OUT_OF_MEMORY, f"{name} ran out of memory: {why_no_memory()}", fatal=True) from error
        except BaseException as error:
            slot.count_error(frames.ENV_ERROR)
            self._raised(name, error)
            if isinstance(error, Exception | SystemExit):
                raise
            raise passed_on(error) from error  # else it would end this process, and nobody would learn why
        finally:
            now = slot.enter(slots.WRITING)
        if name in ("step", "reset"):
            slot.count_time(name, now - begun)
        if name == "step":
            slot.words[slots.STEPS] += 1
        if name in ("step", "cut_off") and type(result) is tuple and len(result) == 5 and (result[2] or result[3]):
            slot.words[slots.EPISODES] += 1
        return result

    def _awaited(self, awaitable: Awaitable[Any]) -> Any:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run_loop, args=(self._loop,), name="agentgym async calls", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(self._executor.call(_await, awaitable), self._loop).result()

    def stop(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


async def _await(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


class ProtocolHandler:
    """Answers the messages of a session's connections."""

    resumable: ClassVar[bool] = False  # a client whose connection dropped may come back
    clean = False  # the session may end when the server drains: nothing would be lost

    def __init__(self, held: Any, calls: CallRunner, session: SessionInfo):
        self.ended = False  # the session ends once the last answer is sent
        self.draining = False  # set by the worker when the server is about to end: no new episode is to begin
        self._held = held
        self._calls = calls
        self._session = session

    @staticmethod
    def make(spec: EnvSpec, tasks: TaskSet | None) -> Any:
        """The object of the session, with a `close`: an environment, whose `reset` draws from `tasks`."""
        env = spec.make()
        bare: Any = env.unwrapped
        if tasks is not None and getattr(bare, "_tasks", tasks) is None:
            bare._tasks = tasks
        return env

    @staticmethod
    def has_sandbox(held: Any) -> bool:
        return getattr(held.unwrapped, "sandbox_image", None) is not None

    def hello(self, resume: str | None) -> str | None:
        return None

    def answer(self, text: str) -> str | None:
        raise NotImplementedError

    @staticmethod
    def last_word(code: str, message: str) -> str:
        """The client's last message before the server closes."""
        return text_of_json(error_frame(code, message, fatal=True))

    @classmethod
    def last_frames(cls, code: str, message: str) -> bytes:
        """The last message and the close frame, as bytes. The server itself sends them for a worker that died.

        They leave together, so that a client that has read the message does not call again on a closing connection.
        """
        word = encoded(TEXT, cls.last_word(code, message).encode())
        return word + close_frame(frames.CODES[code][1] or frames.NORMAL_CLOSE)


class RequestHandler(ProtocolHandler):
    """Runs each numbered request once, and keeps the last answers for a client that resumes.

    A subclass has a method `call_NAME` for each call, and checks requests by `check`.
    """

    resumable = True
    check: Callable[[Any, int], None]

    def __init__(self, held: Any, calls: CallRunner, session: SessionInfo):
        super().__init__(held, calls, session)
        self._last = 0
        self._kept: dict[int, str] = {}

    def _hello(self, resume: str | None, protocol: int, **more: Any) -> str:
        told = {"session": self._session.id, "resume": resume, "protocol": protocol, "last": self._last}
        return text_of_json({**told, **more, "limits": self._session.limits.told()})

    def answer(self, text: str) -> str:
        try:
            return self._answered(json_of_text(text))
        except Refused as refused:
            if refused.fatal:
                raise
            self._calls.slot.count_error(refused.code)
            return text_of_json(error_frame(refused.code, str(refused), fatal=False))

    def _answered(self, request: Any, keep: int = 1) -> str:
        id = request.get("id") if isinstance(request, dict) else None
        id = id if type(id) is int else None
        if id is not None and 0 < id <= self._last:
            why = f"request {id} was run, and its answer is not kept any more; the last is {self._last}"
            return self._kept.get(id) or text_of_json(error_frame(frames.BAD_REQUEST, why, fatal=False, id=id))
        try:
            self.check(request, self._last + 1)
            answer = f'{{"id": {id}, "result": {text_of_json(self._run(request))}}}'
        except (Exception, SystemExit) as error:
            refused = self._refusal(error)
            if refused.code == frames.OUT_OF_MEMORY:
                raise
            if isinstance(error, Refused):  # others were counted as they were raised
                self._calls.slot.count_error(refused.code)
            answer = text_of_json(error_frame(refused.code, str(refused), refused.fatal, id))
            self.ended = self.ended or refused.fatal
        if id == self._last + 1:
            self._last += 1
            self._kept[self._last] = answer
            while len(self._kept) > keep:
                del self._kept[self._last + 1 - len(self._kept)]  # the oldest: ids follow one another
        return answer

    def _run(self, request: dict[str, Any]) -> Any:
        return getattr(self, f"call_{request['call']}")(request)

    def _refusal(self, error: BaseException) -> Refused:
        return error if isinstance(error, Refused) else Refused(frames.ENV_ERROR, described(error))


class AgentgymHandler(RequestHandler):
    """The protocol "agentgym/1"."""

    check = staticmethod(check_request)

    def __init__(self, env: Any, calls: CallRunner, session: SessionInfo):
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
            "step_seconds": env.get_wrapper_attr("step_seconds") or 0.0,
            "runs_programs": self.has_sandbox(env),
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

    def call_cut_off(self, request: dict[str, Any]) -> Any:
        if not isinstance(request.get("reason"), str):
            raise Refused(frames.BAD_REQUEST, "cut_off needs a reason, a text")
        return self._calls.call("cut_off", self._env.get_wrapper_attr("cut_off"), request["reason"])

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


def handler_class(name: str) -> type[ProtocolHandler]:
    handler: type[ProtocolHandler] = import_path(HANDLERS[name])
    return handler


def described(error: BaseException) -> str:
    """An error in words, cut to 2,000 characters."""
    if isinstance(error, Refused):
        return str(error)[:2000]
    return f"{type(error).__name__}: {text_of_error(error)}"[:2000]
