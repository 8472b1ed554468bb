"""The protocol "agentgym/1", in one place for both sides; docs/service_protocol.md tells its messages."""

import json
import math
import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from agentgym.storage.jsonl import line_of, plain

PROTOCOL = 1
NAME = "agentgym/1"
# WebSocket subprotocol, which a client may ask for.
SUBPROTOCOL = "agentgym.1"
RESUME_HEADER = "X-Agentgym-Resume"
KEPT_ANSWERS = 16
METHODS = ("expert_action", "random_action", "cut_off")  # that an environment may have

# Fields of requests, by call; besides id and call.
CALLS: dict[str, set[str]] = {
    "init": {"task"},
    "reset": {"seed", "options"},
    "step": {"action"},
    "close": set(),
    "tools": set(),
    "expert_action": set(),
    "random_action": {"rng"},
    "cut_off": {"reason"},
}
_FIELDS = {call: fields | {"id", "call"} for call, fields in CALLS.items()}

BAD_FRAME = "BAD_FRAME"
BAD_REQUEST = "BAD_REQUEST"
UNKNOWN_CALL = "UNKNOWN_CALL"
ENV_ERROR = "ENV_ERROR"
DEADLINE = "DEADLINE"
WORKER_DIED = "WORKER_DIED"
IDLE = "IDLE"
TOO_LARGE = "TOO_LARGE"
TOO_SLOW = "TOO_SLOW"
CAPACITY = "CAPACITY"
DRAINING = "DRAINING"
RESUME_REFUSED = "RESUME_REFUSED"
SANDBOX_ERROR = "SANDBOX_ERROR"
OUT_OF_MEMORY = "OUT_OF_MEMORY"
SHARED_WORKER_KILLED = "SHARED_WORKER_KILLED"

# The meaning of each code, and the WebSocket close code of those that end a session.
CODES: dict[str, tuple[str, int | None]] = {
    BAD_FRAME: ("the message is not JSON text, or not a request", 4400),
    BAD_REQUEST: ("a request is wrong, or its id out of order", None),
    UNKNOWN_CALL: ("no such call or method of the environment", None),
    ENV_ERROR: ("the environment raised; the session goes on", None),
    DEADLINE: ("a call took longer than its limit, and its process was killed", 4408),
    WORKER_DIED: ("the process of the session ended or was killed", 4500),
    IDLE: ("no request for too long, or the client did not reconnect", 4410),
    TOO_LARGE: ("a message is larger than the server takes", 4413),
    TOO_SLOW: ("a message took too long to arrive, or the client too long to read an answer", 4411),
    CAPACITY: ("the server could not start another session", 4503),
    DRAINING: ("the server is ending: use another", 4504),
    RESUME_REFUSED: ("the resume token is wrong or used, or its session has ended", 4401),
    OUT_OF_MEMORY: ("the environment took more memory than a session may", 4507),
    SANDBOX_ERROR: ("the sandbox could not be started, or has failed", 4501),
    SHARED_WORKER_KILLED: ("the process was killed for another session that shared it", 4509),
}
NORMAL_CLOSE = 1000
# Made once: json.dumps with settings makes an encoder for each value. A value within itself is a RecursionError then.
_encode = json.JSONEncoder(ensure_ascii=False, check_circular=False, default=plain).encode
_decoder = json.JSONDecoder()


@dataclass(frozen=True)
class ServiceLimits:
    """The limits of sessions, in seconds and bytes. The hello tells them to clients."""

    init_seconds: float = 120.0  # making the environment, and one `init`
    reset_seconds: float = 60.0
    step_seconds: float = 60.0  # and any other call
    close_seconds: float = 5.0  # and an end in good order, the exit of its process included
    idle_seconds: float = 600.0  # without a request
    resume_seconds: float = 60.0  # for a client to come back after its connection dropped
    message_seconds: float = 30.0  # for a message to arrive whole, and for an answer to be taken
    message_bytes: int = 8 << 20  # of one message from the client

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name} must be positive, not {value!r}")

    def told(self) -> dict[str, float | None]:
        """The limits as a hello has them: null is no limit, since JSON has no infinity."""
        return {name: None if value == math.inf else value for name, value in vars(self).items()}

    @classmethod
    def of_hello(cls, told: Any) -> "ServiceLimits":
        """The limits that a hello has; the default for each that it lacks or that is no positive number."""
        known = {name: told[name] for name in vars(cls()) if name in (told or {})}
        given = {name: math.inf if value is None else value for name, value in known.items()}
        return cls(**{name: n for name, n in given.items() if isinstance(n, int | float) and n > 0})  # type: ignore[arg-type]


class Refused(Exception):
    """A request or message that gets an error response; `fatal` ends the session."""

    def __init__(self, code: str, message: str, fatal: bool = False):
        super().__init__(message)
        self.code = code
        self.fatal = fatal


def text_of_json(value: Any) -> str:
    """A value as one line of JSON that UTF-8 can carry; NumPy values become numbers and lists."""
    try:
        text = _encode(value)
    except (TypeError, ValueError, RecursionError):
        return line_of(value)[:-1]
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return line_of(value)[:-1]
    return text


def error_frame(code: str, message: str, fatal: bool, id: int | None = None) -> dict[str, Any]:
    return {"id": id, "error": {"code": code, "message": message, "fatal": fatal}}


def json_of_text(text: str) -> Any:
    """The value of a message. Raises `Refused` if it is not JSON."""
    try:
        return decoded(text)
    except (ValueError, RecursionError) as error:
        raise Refused(BAD_FRAME, f"not JSON: {type(error).__name__}: {error}") from None


def decoded(text: str) -> Any:
    """`json.loads`, faster where there is no white space around the value. Raises ValueError."""
    try:
        value, end = _decoder.raw_decode(text)
    except ValueError:
        return _decoder.decode(text)
    return value if end == len(text) else _decoder.decode(text)


def call_of(request: Any, expected: int, calls: Collection[str]) -> str:
    """The name of a request's call; `expected` is the id that comes next. Raises `Refused`."""
    if not isinstance(request, dict):
        raise Refused(BAD_REQUEST, f"a request is an object, not {type(request).__name__}")
    id, call = request.get("id"), request.get("call")
    if type(id) is not int:
        raise Refused(BAD_REQUEST, f"a request has an id that is a whole number, not {id!r:.50}")
    if id != expected:
        raise Refused(BAD_REQUEST, f"ids rise by one: {expected} comes next, not {id}")
    if not isinstance(call, str) or call not in calls:
        raise Refused(UNKNOWN_CALL, f"no call {call!r:.50}; there are {', '.join(calls)}")
    return call


def check_request(request: Any, expected: int) -> None:
    """Check a request before it is run. Raises `Refused`."""
    call = call_of(request, expected, CALLS)
    if not request.keys() <= _FIELDS[call]:
        unknown = request.keys() - _FIELDS[call]
        takes = ", ".join(sorted(CALLS[call])) or "nothing"
        raise Refused(BAD_REQUEST, f"{call} takes {takes}, and no {min(unknown)!r:.50}")


def rng_to_json(rng: random.Random) -> list[Any]:
    """The state of a generator, for `random_action`."""
    version, words, gauss = rng.getstate()
    return [version, list(words), gauss]


def rng_of_json(state: Any) -> random.Random:
    """The generator with this state. Raises `Refused`."""
    rng = random.Random(0)
    try:
        version, words, gauss = state
        rng.setstate((version, tuple(words), gauss))
    except (TypeError, ValueError, OverflowError) as error:
        raise Refused(BAD_REQUEST, f"rng is no state of random.Random: {error}") from None
    return rng
