"""What no client should send: frames, texts and requests of HTTP for test_service_fuzz.py, made by hypothesis."""

import json

from hypothesis import strategies as st

from agentgym.service.protocol import frames
from agentgym.service.worker.websocket import CLOSE, PING, TEXT, unmasked

# ---- what is sent

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_TASK = st.fixed_dictionaries({"id": st.just("a")}, optional={"messages": _JSON, "data": _JSON, "x": _JSON}) | _JSON
_WORDS = st.sampled_from(["add 1", "end 1", "add x", ""]) | st.text(max_size=9)
_REQUEST = st.fixed_dictionaries(
    {},
    optional={
        "id": st.integers(-1, 9) | _JSON,
        "call": st.sampled_from(sorted(frames.CALLS.keys() - {"close"})) | _JSON,
        "task": _TASK,
        "seed": st.integers(-1, 3) | _JSON,
        "options": st.fixed_dictionaries({}, optional={"task": _TASK, "x": _JSON}) | _JSON,
        "action": _WORDS | _JSON,
        "rng": st.just([3, [1] * 625, None]) | _JSON,
    },
)
_RPC = st.fixed_dictionaries(
    {},
    optional={
        "jsonrpc": st.just("2.0") | _JSON,
        "id": st.integers(0, 9) | _JSON,
        "method": st.sampled_from(["tools/list", "tools/call", "openenv/session/create", "openenv/session/close", "x"])
        | _JSON,
        "params": st.fixed_dictionaries({}, optional={"name": _JSON, "arguments": _JSON, "session_id": _JSON}) | _JSON,
    },
)
_ACTION = st.fixed_dictionaries(
    {},
    optional={
        "message": _WORDS | _JSON | st.fixed_dictionaries({"role": st.just("assistant"), "content": _JSON}),
        "type": st.sampled_from(["call_tool", "list_tools"]) | _JSON,
        "tool_name": _JSON,
        "arguments": _JSON,
        "metadata": _JSON,
    },
)
_OPENING = st.fixed_dictionaries(
    {},
    optional={
        "seed": _JSON,
        "episode_id": _JSON,
        "task": _TASK,
        "split": st.just("train") | _JSON,
        "index": st.integers(-2, 2) | _JSON,
    },
)
_OPENENV = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["reset", "step", "state", "mcp"]) | _JSON,
        "data": _ACTION | _OPENING | _RPC | _JSON,
        "x": _JSON,
    },
)
# Half a surrogate pair cannot be sent, but stands in JSON as an escape.
_NOT_JSON = st.text(max_size=20) | st.sampled_from(
    ["[" * 50_000, '{"a":' * 9000, "1" * 5000, "NaN", '"\\ud800"', "\x00"]
)


def _text(value):
    return value if isinstance(value, str) else json.dumps(value)


TEXTS = (_REQUEST | st.lists(_REQUEST, max_size=3) | _JSON | _NOT_JSON).map(_text)
OPENENV_TEXTS = (_OPENENV | _OPENENV | _JSON | _NOT_JSON).map(_text)


def frame(fin, reserved, opcode, is_masked, mask, payload, told, form):
    """One frame, right or wrong.

    Args:
        told: added to its length.
        form: in how many bytes its length is told: 0: as few as do.
    """
    size = max(0, len(payload) + told)
    if form == 2 or (form == 0 and size > 125):
        head, length = 126, (size & 0xFFFF).to_bytes(2, "big")
    elif form == 8:
        head, length = 127, size.to_bytes(8, "big")
    else:
        head, length = size & 127, b""
    first = (128 if fin else 0) | reserved << 4 | opcode
    body = unmasked(payload, mask) if is_masked else payload
    return bytes((first, (128 if is_masked else 0) | head)) + length + (mask if is_masked else b"") + body


_mostly = lambda usual, other: st.sampled_from([True] * 9 + [False]).flatmap(  # noqa: E731
    lambda yes: st.just(usual) if yes else other
)
_PAYLOADS = st.binary(max_size=200) | st.sampled_from(
    [b'{"id": 1, "call": "reset"}', b'{"type": "reset"}', b"[]", b"\xff\xfe", b"x" * 6000, b" " * 126, b"\x03\xe8bye"]
)
FRAMES = st.builds(
    frame,
    fin=_mostly(True, st.booleans()),
    reserved=_mostly(0, st.integers(0, 7)),
    opcode=st.sampled_from([TEXT, TEXT, TEXT, 0, PING, CLOSE]) | st.integers(0, 15),
    is_masked=_mostly(True, st.booleans()),
    mask=st.binary(min_size=4, max_size=4),
    payload=_PAYLOADS,
    told=_mostly(0, st.sampled_from([-1, 1, 200, 70_000, 1 << 40])),
    form=_mostly(0, st.sampled_from([1, 2, 8])),
)
BYTES = st.lists(FRAMES, max_size=4).map(b"".join) | st.binary(max_size=100)


# ---- HTTP

_PATHS = st.sampled_from(
    [
        "/",
        "/health",
        "/ready",
        "/metrics",
        "/envs",
        "/envs/Chaos/tasks",
        "/envs/Chaos/session",
        "/schema",
        "/state",
        "/metadata",
        "/mcp",
        "/ws",
        "/reset",
        "/step",
        "/Chaos/tasks",
        "/Chaos/task",
        "/Chaos/num_tasks",
        "/Chaos/task_range",
        "/Chaos/splits",
        "/openapi.json",
        "/list_environments",
        "/envs/../envs",
        "//",
        "/%00",
        "/envs/%2e%2e/tasks",
        "*",
    ]
) | st.text(st.characters(codec="ascii"), max_size=15).map(lambda text: "/" + text)
_QUERIES = st.sampled_from(
    [
        "",
        "?resume=x",
        "?session_id=x",
        "?start=1&stop=0",
        "?start=99999999999999999999",
        "?split=%ff",
        "?split=train&start=7",
    ]
) | st.text(st.characters(codec="latin-1"), max_size=9).map(lambda text: "?" + text)
_HEADERS = st.dictionaries(
    st.sampled_from(
        [
            "Upgrade",
            "Connection",
            "Sec-WebSocket-Key",
            "Sec-WebSocket-Version",
            "Authorization",
            "X-Agentgym-Resume",
            "Content-Length",
            "Transfer-Encoding",
            "Content-Type",
            "Origin",
            "Expect",
            "Content-Encoding",
            "Host",
            "Accept",
        ]
    )
    | st.text(st.characters(codec="latin-1"), max_size=6),
    st.sampled_from(
        (
            f"websocket Upgrade 13 AAAAAAAAAAAAAAAAAAAAAA== 0 5 -1 chunked gzip 100-continue application/json h2c identity"
            f" http://elsewhere.example //[ http://[ {'9' * 30} {'x' * 9000}"
        ).split()
    )
    | st.just("Bearer x")
    | st.text(st.characters(codec="latin-1"), max_size=9),
    max_size=5,
)
_BODIES = (
    st.binary(max_size=60)
    | (_RPC | _ACTION | _OPENING | _JSON).map(lambda value: json.dumps(value).encode())
    | st.fixed_dictionaries({"action": _ACTION}).map(lambda value: json.dumps(value).encode())
    | st.sampled_from([b"5\r\nhello\r\n0\r\n\r\n", b"zz\r\n", b"[" * 4000])
)


def _http(method, path, query, version, headers, body, honest):
    if honest:
        headers = {**headers, "Host": "localhost", "Content-Length": str(len(body)), "Connection": "close"}
        headers.pop("Transfer-Encoding", None)
    lines = [f"{method} {path}{query} {version}", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1", "replace") + body


REQUESTS_OF_HTTP = st.builds(
    _http,
    method=st.sampled_from(["GET", "POST", "POST", "HEAD", "PUT", "OPTIONS", "get", "", "CONNECT", "\0"]),
    path=_PATHS,
    query=_QUERIES,
    version=_mostly("HTTP/1.1", st.sampled_from(["HTTP/1.0", "HTTP/2.0", "HTTP/9", "", "X"])),
    headers=_HEADERS,
    body=_BODIES,
    honest=st.booleans(),
)
