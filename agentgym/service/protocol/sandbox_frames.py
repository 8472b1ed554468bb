"""The protocol "sandbox/1": a sandbox of the server's, used from elsewhere.

It is like agentgym/1 (docs/service_protocol.md), but takes one request at a time, no lists, and keeps only the last answer.
Bytes are base64, in `data`. Calls from `exec` to `reset` go to `agentgym/sandbox/guest/guest.py` as they are:

    start   spec: fields of `SandboxSpec`, all optional; run: a label. Answers sandbox, backend, facts
    exec    argv, env, cwd, timeout; data: standard input. Answers code, timed_out, oom, seconds, ended; data: first and last
            bytes of stdout, then of stderr; sizes: their four lengths; left_out: bytes omitted of each
    open    argv, env, form of its replies: "frame" (after a 4-byte length) or "zero" (before a zero byte). Answers session
    step    session, timeout; data: the program's input. Answers as exec; the reply on descriptor 3 is last in data; ended: the
            process is gone
    drop    session
    read    path, limit. Answers more, data; then: the end, {} or an error, once reached
    next    the next part of a read or pack, or its end
    write   path, mode, part (offset of the data), last; data
    folder  path
    unpack  path, part, last; data: a stream of entries, as `agentgym/sandbox/guest/guest_archives.py` describes them
    pack    path, limit. Answers as read: a stream of entries
    part    data, which goes before the next request's
    protect path, which programs then can neither change nor remove; for a writable root
    ping, reset   Answer left: what could not be removed, else empty
    close   ends the sandbox

Failures of programs and paths are results: errno and message; value, what is wrong; spoiled, why programs prevent this call;
broken, why they prevent every call.
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
GUEST_CALLS: dict[str, set[str]] = {
    "exec": {"argv", "env", "cwd", "timeout"},
    "open": {"argv", "env", "form"},
    "step": {"session", "timeout"},
    "drop": {"session"},
    "read": {"path", "limit"},
    "write": {"path", "mode", "part", "last"},
    "folder": {"path"},
    "unpack": {"path", "part", "last"},
    "pack": {"path", "limit"},
    "protect": {"path"},
    "ping": set(),
    "reset": set(),
}
OWN_CALLS: dict[str, set[str]] = {"start": {"spec", "run"}, "next": set(), "part": set(), "close": set()}
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
