"""The process that holds a submission: it runs the code and answers the grader's requests over two pipes.

Nothing here is trusted once the code has run. The process never sees a test: it gets the arguments of each call, but
not the expected results.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import operator
import os
import resource
import sys
import types

from agentgym_envs.code.inside.values import NAME, can_change, decode, encode, frame_of

TYPE_CHECKING = False  # typing takes longer to import than all the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

FILE = "<code>"
_FRAMES = 4  # of a traceback, shown to the agent
_VERBS: dict[str, Callable[..., Any]] = {
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "iter": iter,
    "next": next,
    "len": len,
}
_TEXT = 400  # characters of an error message, and of a line of code


def serve(requests: int, replies: int, memory: int) -> None:
    """Answer requests, of which the first loads the program, until the pipe closes, which ends the process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    sys.stdout.reconfigure(encoding="utf-8", line_buffering=True)  # type: ignore[union-attr]
    module = types.ModuleType(NAME)
    sys.modules[NAME] = module  # dataclasses and typing look up a class's module here
    side = _Side(requests, replies, module)
    while True:
        side.respond(side.receive())


def _parses(code: str) -> bool:
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


class _Side:
    def __init__(self, requests: int, replies: int, module: types.ModuleType):
        self.requests, self.replies = open(requests, "rb"), replies  # noqa: SIM115 - until the process ends
        self.namespace = module.__dict__
        self.objects: list[Any] = []
        self.stdout = sys.stdout
        self.lines: list[str] = []  # of the source, for tracebacks
        self.before = 0  # how many of them belong to the prompt

    def load(self, prompt: str, code: str, names: list[str]) -> list[str]:
        """Run the code, after its prompt or as its continuation, and return the names that it defines.

        A prompt is a function's signature. The code may define the function again, or be its indented body.
        """
        if prompt and not _parses(code) and _parses(prompt + code):  # it parses as a continuation only
            self.before = prompt.count("\n")
            code = prompt + code
        elif prompt:
            exec(compile(prompt, "<prompt>", "exec"), self.namespace)
            for name in names:
                self.namespace.pop(name, None)  # its body is missing
        self.lines = code.split("\n")
        exec(compile(code, FILE, "exec"), self.namespace)
        return [name for name in names if name in self.namespace]

    def receive(self) -> Any:
        """The next message; the process exits at the end of the pipe."""
        header = self.requests.read(4)
        body = self.requests.read(int.from_bytes(header, "big"))
        if not body:
            os._exit(0)
        return json.loads(body)

    def send(self, message: Any) -> None:
        rest = memoryview(frame_of(message))
        while rest:
            rest = rest[os.write(self.replies, rest) :]

    def respond(self, request: list[Any]) -> None:
        verb, target, given = request
        try:
            *args, kwargs = items = [decode(item, self.resolve) for item in given]
            if verb == "load":
                result: Any = self.load(*args)
            elif verb == "get":
                result = self.namespace[target]
            elif verb == "call":
                result = self.objects[target](*args, **kwargs)
            else:
                result = _VERBS[verb](self.objects[target], *args)
            value = [self.encode(result), [self.encode(item) if can_change(item) else None for item in items]]
            with contextlib.suppress(ValueError, OSError):  # the submission closed it
                self.stdout.flush()  # the process may be killed any time
            self.send(["value", value])
        except BaseException as error:
            known = (kind for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind)
            args = _safely(lambda caught: [encode(arg, str) for arg in caught.args], error, [])
            self.send(["raise", next(known, Exception).__name__, args, self._explain(error)])

    def encode(self, value: Any) -> Any:
        return encode(value, self.refer)

    def refer(self, value: Any) -> list[Any]:
        if type(value) is _Callback:
            return ["callback", value.key]
        for place, known in enumerate(self.objects):
            if known is value:
                return ["object", place]
        self.objects.append(value)
        return ["object", len(self.objects) - 1]

    def resolve(self, data: list[Any]) -> Any:
        tag, key = data
        if tag == "callback":
            return _Callback(self, key)
        return self.objects[key]

    def call_back(self, key: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function that the test passed in; the grader may send more requests before the result."""
        self.send(["callback", key, [self.encode(item) for item in (*args, kwargs)]])
        while True:
            message = self.receive()
            if message[0] == "result":
                return decode(message[1], self.resolve)
            if message[0] == "error":
                raise getattr(builtins, message[1], Exception)(*(decode(arg, self.resolve) for arg in message[2]))
            self.respond(message)

    def _explain(self, error: BaseException) -> str:
        """An error for the agent, with the lines of the submission that led to it."""
        rows = []
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == FILE:
                rows.append((trace.tb_lineno, trace.tb_frame.f_code.co_name))
            trace = trace.tb_next
        if isinstance(error, SyntaxError) and error.filename == FILE and error.lineno:
            rows.append((error.lineno, ""))
        shown = []
        for number, name in rows[-_FRAMES:]:
            where = "" if name in ("", "<module>") else f", in {name}"
            line = self.lines[number - 1].strip()[:_TEXT] if 0 < number <= len(self.lines) else ""
            shown.append(f"  line {number - self.before}{where}: {line}")
        text = error.msg if isinstance(error, SyntaxError) else _safely(str, error, "")
        return "\n".join([f"{type(error).__name__}: {text:.{_TEXT}}".rstrip(": "), *shown])


class _Callback:  # a function of a test, as the submission sees it
    def __init__(self, side: _Side, key: int):
        self.side, self.key = side, key

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.side.call_back(self.key, args, kwargs)


def _safely(work: Callable[[Any], Any], value: Any, otherwise: Any) -> Any:
    try:
        return work(value)
    except Exception:
        return otherwise
