"""An environment in OpenEnv's terms: actions and observations as JSON objects, one episode after another.

docs/service_protocol.md has their form.
"""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from agentgym.core.messages import Action, Observation, assistant, text_of
from agentgym.core.tasks import Task, TaskSet

if TYPE_CHECKING:
    from agentgym.core.env import Env

Json = dict[str, Any]
_WHOLE = re.compile(r"[+-]?[0-9]+(_[0-9]+)*(\.0+)?")
_NO_INTEGER = {
    float: ("int_from_float", ", got a number with a fractional part"),
    str: ("int_parsing", ", unable to parse string as an integer"),
}
LONGEST_ID = 255  # characters of an episode's id
_ACTION_KEYS = {"message": ("message",), "call_tool": ("type", "tool_name", "arguments"), "list_tools": ("type",)}


class Invalid(ValueError):
    """An invalid frame or action. `errors` lists the problems, each as `{"type", "loc", "msg", "input"}`."""

    def __init__(self, kind: str, loc: tuple[str, ...], message: str, given: Any = None):
        super().__init__(f"{'.'.join(loc) or 'frame'}: {message}")
        self.errors = [{"type": kind, "loc": list(loc), "msg": message, "input": given}]


class UnknownTool(Exception):
    """A tool that the environment does not have."""


class Play:
    """Episodes of one environment, as OpenEnv sees them. Its methods are called one at a time, by `call`."""

    def __init__(self, env: Env, call: Callable[..., Any] = lambda name, function, *args, **kw: function(*args, **kw)):
        self.env = env
        self._call = call
        self._sets: dict[str, TaskSet] = {}
        self._random = random.Random()
        self._episode_id: str | None = None
        self._steps = 0
        self._reward = 0.0
        self._done = False

    def reset(self, data: Mapping[str, Any]) -> Json:
        """Begin an episode. Raises `Invalid`.

        `data` has `seed`, `episode_id`, and the task: `task` as JSON, or `split` and `index`. Without an `index` one is
        drawn, by the seed if there is one. Other keys are ignored, as OpenEnv's server does.
        """
        seed = _seed(data.get("seed"))
        episode_id = data.get("episode_id")
        if episode_id is not None and not isinstance(episode_id, str):
            raise Invalid("string_type", ("data", "episode_id"), "Input should be a valid string", episode_id)
        if episode_id is not None and len(episode_id) > LONGEST_ID:
            words = f"String should have at most {LONGEST_ID} characters"
            raise Invalid("string_too_long", ("data", "episode_id"), words, episode_id)
        task = self._task(data, seed)
        if task is not None:
            self._call("init", self.env.get_wrapper_attr("init"), task)
        messages, info = self._call("reset", self.env.reset, seed=seed)
        self._episode_id = episode_id or str(uuid.uuid4())
        self._steps, self._reward, self._done = 0, 0.0, False
        bound: Task | None = self.env.unwrapped.task  # type: ignore[attr-defined]
        metadata: Json = {} if bound is None else {"task_id": bound.id}
        if tools := self.env.get_wrapper_attr("tools"):
            metadata["tools"] = tools
        if info:
            metadata["info"] = info
        return answer_of({"messages": messages}, None, False, metadata)

    def step(self, action: Mapping[str, Any]) -> Json:
        kind = _kind(action)
        if kind == "list_tools":
            return answer_of({"tools": self.tools("input_schema")}, None, self._done, {})
        if kind == "call_tool":
            name = action["tool_name"]
            messages, reward, done, metadata = self._called(name, action.get("arguments") or {})
            said, known = "\n".join(map(text_of, messages)), self._has_tool(name)
            error = None if known else {"error_type": "tool_not_found", "message": said or f"there is no tool {name!r}"}
            result = _tool_result(said, {}) if known else None
            observation = {"tool_name": name, "result": result, "error": error, "messages": messages}
            return answer_of(observation, reward, done, metadata)
        reply = action["message"]
        try:
            reply = reply if isinstance(reply, str) else assistant(reply)
        except (TypeError, ValueError) as error:
            raise Invalid("value_error", ("message",), str(error), reply) from error
        messages, reward, done, metadata = self.stepped(reply)
        return answer_of({"messages": messages}, reward, done, metadata)

    def stepped(self, action: Action) -> tuple[Observation, float, bool, Json]:
        """A step of the environment: new messages, reward, whether the episode is over, and metadata."""
        messages, reward, terminated, truncated, info = self._call("step", self.env.step, action)
        reward = float(reward)
        self._steps += 1
        self._reward += reward
        self._done = bool(terminated or truncated)
        metadata: Json = {"info": info} if info else {}
        if truncated and not terminated:
            metadata["truncated"] = True
        return messages, reward, self._done, metadata

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Json:
        """Call a tool; the first call of a session begins an episode."""
        if self._episode_id is None:
            self.reset({})
        if not self._has_tool(name):
            raise UnknownTool(f"Tool not found: {name:.100}")
        messages, reward, done, metadata = self._called(name, arguments)
        return _tool_result("\n".join(map(text_of, messages)), {"reward": reward, "done": done, **metadata})

    def tools(self, schema_key: str) -> list[Json]:
        """The environment's tools, their schemas under MCP's or OpenEnv's key."""
        functions = [tool["function"] for tool in self.env.get_wrapper_attr("tools")]
        return [
            {
                "name": function["name"],
                "description": function.get("description") or "",
                schema_key: function.get("parameters") or {"type": "object", "properties": {}},
            }
            for function in functions
        ]

    def state(self) -> Json:
        task = self.env.unwrapped.task  # type: ignore[attr-defined]
        return {
            "episode_id": self._episode_id,
            "step_count": self._steps,
            "task_id": None if task is None else task.id,
            "reward": self._reward,
            "done": self._done,
        }

    def _called(self, name: str, arguments: Mapping[str, Any]) -> tuple[Observation, float, bool, Json]:
        function = {"name": name, "arguments": dict(arguments)}
        call = {"id": f"call_{self._steps}", "type": "function", "function": function}
        return self.stepped({"role": "assistant", "content": "", "tool_calls": [call]})

    def _has_tool(self, name: str) -> bool:
        return any(tool["function"]["name"] == name for tool in self.env.get_wrapper_attr("tools"))

    def _task(self, data: Mapping[str, Any], seed: int | None) -> Task | None:
        """The task of a reset, or one drawn as by `Env.reset`; None if the environment has no tasks."""
        if (given := data.get("task")) is not None:
            try:
                return Task.from_json(given)
            except (ValueError, TypeError) as error:
                raise Invalid("value_error", ("data", "task"), str(error), given) from error
        index, split = data.get("index"), data.get("split")
        # Reading tasks may take as long as a reset, so it is a call. A client's mistake is no error of the environment.
        found = self._call("tasks", self._chosen, split, index, seed)
        if isinstance(found, Invalid):
            raise found
        return found

    def _chosen(self, split: Any, index: Any, seed: int | None) -> Task | Invalid | None:
        try:
            return self._drawn(split, index, seed)
        except Invalid as wrong:
            return wrong

    def _drawn(self, split: Any, index: Any, seed: int | None) -> Task | None:
        if index is None and split is None:
            try:
                tasks = self.env.unwrapped.tasks  # type: ignore[attr-defined]
            except ValueError:  # it has no tasks, and may draw a problem in reset
                return None
        else:
            tasks = self._split("train" if split is None else split)
        if index is None:
            index = (self._random if seed is None else random.Random(seed)).randrange(len(tasks))
        number = whole_number(index)
        if number is None or not 0 <= number < len(tasks):
            raise Invalid("value_error", ("data", "index"), f"a task's index is from 0 to {len(tasks) - 1}", index)
        task: Task = tasks[number]
        return task

    def _split(self, split: Any) -> TaskSet:
        if not isinstance(split, str):
            raise Invalid("string_type", ("data", "split"), "Input should be a valid string", split)
        if split not in self._sets:
            env: Any = self.env.unwrapped
            try:
                self._sets[split] = env.spec.tasks(split) if hasattr(env.spec, "tasks") else env.default_tasks(split)
            except ValueError as error:
                raise Invalid("value_error", ("data", "split"), str(error), split) from error
        return self._sets[split]


def _seed(given: Any) -> int | None:
    if given is None:
        return None
    seed = whole_number(given)
    if seed is None:
        kind, words = _NO_INTEGER.get(type(given), ("int_type", ""))
        raise Invalid(kind, ("data", "seed"), f"Input should be a valid integer{words}", given)
    if seed < 0:
        raise Invalid("greater_than_equal", ("data", "seed"), "Input should be greater than or equal to 0", given)
    return seed


def whole_number(given: Any) -> int | None:
    """A JSON value as an integer by OpenEnv's rules: 7, 7.0, "7", " 7.0 " and true are valid; else None."""
    if isinstance(given, int):
        return int(given)
    if isinstance(given, float):
        return int(given) if given.is_integer() and abs(given) < 1 << 63 else None
    if not isinstance(given, str) or not _WHOLE.fullmatch(text := given.strip()):
        return None
    try:
        return int(text.partition(".")[0])
    except ValueError:  # thousands of digits
        return None


def _kind(action: Mapping[str, Any]) -> str:
    kind = action.get("type", "message")
    if not isinstance(kind, str) or kind not in _ACTION_KEYS or (kind == "message" and "type" in action):
        raise Invalid("literal_error", ("type",), "Input should be 'call_tool' or 'list_tools'", kind)
    for key in action:
        if key not in _ACTION_KEYS[kind] and key != "metadata":
            raise Invalid("extra_forbidden", (str(key),), "Extra inputs are not permitted", action[key])
    if kind == "message" and "message" not in action:
        raise Invalid("missing", ("message",), "Field required", dict(action))
    if kind == "call_tool" and "tool_name" not in action:
        raise Invalid("missing", ("tool_name",), "Field required")
    if kind == "call_tool" and not isinstance(action["tool_name"], str):
        raise Invalid("string_type", ("tool_name",), "Input should be a valid string", action["tool_name"])
    for key in ("arguments", "metadata"):
        if not isinstance(action.get(key, {}), dict):
            raise Invalid("dict_type", (key,), "Input should be a valid dictionary", action[key])
    return kind


def _tool_result(text: str, meta: Json) -> Json:
    """A tool's result in the form of FastMCP, whose `data` OpenEnv's clients take out."""
    return {
        "content": [{"type": "text", "text": text}],
        "structured_content": {"result": text},
        "meta": meta or None,
        "data": text,
        "is_error": text.startswith("Error: "),
    }


def answer_of(observation: Json, reward: float | None, done: bool, metadata: Json) -> Json:
    """OpenEnv's result: metadata stands inside of the observation, and beside it if there is any."""
    answer: Json = {"observation": {**observation, "metadata": metadata}, "reward": reward, "done": done}
    if metadata:
        answer["metadata"] = metadata
    return answer
