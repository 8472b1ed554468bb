"""The protocol "sandbox/1": a sandbox of the server's, used from elsewhere. One session is one sandbox.

As in "agentgym/1" (`frames.py`), at /sandboxes/session: a hello, requests whose `id` rises by one, an answer to each, a
resume token for a connection that dropped. One request at a time; no lists. Bytes are base64, under "data".

    {"session", "resume", "protocol": 1, "last", "limits", "most"}     the hello; `most`: what a sandbox may be given

    {"id": 1, "call": "start", "spec": {...}, "run": "mine"}           -> {"sandbox", "backend", "facts"}
    {"id", "call": "exec", "argv", "env", "cwd", "timeout", "data"}    -> {"code", "timed_out", "oom", "seconds",
                                                                           "sizes", "left_out", "ended", "data"}
    {"id", "call": "open", "argv", "env", "form"}                      -> {"session": n}
    {"id", "call": "step", "session": n, "timeout", "data"}            -> as exec; the reply comes after the outputs
    {"id", "call": "drop", "session": n}                               -> {}
    {"id", "call": "read", "path", "limit"}                            -> {"more": true, "data"}; at last {"then": {}}
    {"id", "call": "next"}                                             -> the next part of what is read, or its end, {}
    {"id", "call": "write", "path", "mode", "part", "last", "data"}    -> {}
    {"id", "call": "folder", "path"}                                   -> {}
    {"id", "call": "part", "data"}                                     -> {}: goes before the next request's data
    {"id", "call": "ping"} | {"id", "call": "reset"}                   -> {} | {"left": [...]}
    {"id", "call": "close"}                                            -> {}, and the sandbox is gone

`spec` is `SandboxSpec` by field, all optional. Calls from `exec` to `reset` go to `agentgym/sandbox/guest/guest.py` as
they are: `data` of an exec's answer is head and tail of stdout, then of stderr, their lengths in `sizes`, with `left_out`
bytes between each two. `form` is how a session's program replies: "frame" or "zero". An error of a program or path is a
result, {"errno", "message"} or {"value": why}; an error of the sandbox is SANDBOX_ERROR, which is fatal.
"""

from typing import Any

from agentgym.service.protocol.frames import BAD_REQUEST, Refused, call_of

PROTOCOL = 1
NAME = "sandbox/1"
# Under which the zygote knows how sandboxes are served; no id of an environment.
SERVED = "~sandbox"
PATH = "/sandboxes"
# Of requests: bytes of data in one, and of all parts together.
PART = 1 << 20
LARGEST_DATA = 48 << 20

# Calls that go to the guest, and the fields that each must have besides its data.
GUEST_CALLS: dict[str, frozenset[str]] = {
    "exec": frozenset({"argv", "env", "cwd", "timeout"}),
    "open": frozenset({"argv", "env", "form"}),
    "step": frozenset({"session", "timeout"}),
    "drop": frozenset({"session"}),
    "read": frozenset({"path", "limit"}),
    "write": frozenset({"path", "mode", "part", "last"}),
    "folder": frozenset({"path"}),
    "ping": frozenset(),
    "reset": frozenset(),
}
OWN_CALLS: dict[str, frozenset[str]] = {
    "start": frozenset({"spec", "run"}),
    "next": frozenset(),
    "part": frozenset(),
    "close": frozenset(),
}
_TYPES: dict[str, type | tuple[type, ...]] = {
    "argv": list,
    "env": dict,
    "cwd": str,
    "path": str,
    "form": str,
    "timeout": (int, float),
    "session": int,
    "limit": int,
    "mode": int,
    "part": int,
    "last": bool,
    "spec": dict,
    "run": str,
    "data": str,
}


def check_sandbox_request(request: Any, expected: int) -> None:
    """Check a request before it is run; see `frames.check_request`."""
    calls = GUEST_CALLS | OWN_CALLS
    call = call_of(request, expected, calls)
    given = request.keys() - {"id", "call", "data"}
    if given != calls[call]:
        wrong = min(given ^ calls[call])
        raise Refused(BAD_REQUEST, f"{call} {'lacks' if wrong in calls[call] else 'takes no'} {wrong!r:.50}")
    for name in request.keys() - {"id", "call"}:
        value, kind = request[name], _TYPES[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise Refused(BAD_REQUEST, f"{call}: {name} cannot be {value!r:.50}")
    words = [*request.get("argv", ()), *request.get("env", {}).values()]
    if not all(isinstance(word, str) for word in words):
        raise Refused(BAD_REQUEST, f"{call}: argv and env hold texts")
