"""The protocol "sandbox/1": a sandbox of the server's, used from elsewhere; docs/service_protocol.md tells its messages.

Calls from `exec` to `reset` go to `agentgym/sandbox/guest/guest.py` as they are.
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
