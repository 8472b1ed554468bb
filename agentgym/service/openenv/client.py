"""Environments behind OpenEnv's wire protocol (0.2 or later): `agentgym.make("openenv:http://host:8000")`."""

import asyncio
import contextlib
import http.client
import json
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp

from agentgym.core.env import AsyncEnv, Step
from agentgym.core.messages import Action, Message, Observation, assistant, text_of, tool_result, user
from agentgym.core.tasks import Task, TaskSet
from agentgym.service.client.address import Address, Full, RemoteEnvError, SessionLost, Unavailable
from agentgym.service.client.connection import cut, get, open_websocket
from agentgym.service.client.lookup import fetch, why_not
from agentgym.service.openenv.forms import Form, Json, Unreadable, form_of, metadata_of, shown, shown_result

MOST_TURNS = 100
MOST_BYTES = 100 << 20  # of one message, as OpenEnv's own client takes
CONNECT_SECONDS = 10.0
_UNKNOWN = Form("fields")  # before the server was asked
_SEEDS = {"train": range(100_000), "test": range(1_000_000, 1_001_000)}


class OpenEnvEnv(AsyncEnv):
    """An environment on an OpenEnv server. One environment is one session, lost with its connection.

    A server of agentgym's speaks in chat messages, which pass as they are. MCP tools of another server become tools
    here, and a reply that calls none ends the episode. An environment without tools takes its action as a JSON
    object, as the call of one tool `act` with the action's fields, or, if the action is one text, as that text. An
    invalid reply is answered with its error and takes a turn.

    Args:
        name: the server, "http://host:8000" or "https://host/path".
        settings: given to every reset besides the seed; plain JSON.
        actions: "text" or "tool": how an environment without tools offers its action. Either is read anyway.
        instruction: told to the agent. Default: the server's description, and how to reply.
        timeout: seconds for one answer of the server.
        patience: seconds to wait for a session while the server is full.
        token_file: holds a bearer token in its first line.
        ca_file: certificates to trust beside the system's, for https.
        max_turns: steps after which an episode is truncated.
        tasks: see `agentgym.Env`. Reset is given a task's `metadata["reset"]` and its seed.

    Raises:
        ValueError: a malformed address, or unknown `actions`.
    """

    max_turns = MOST_TURNS

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any] | None = None,
        actions: str = "text",
        instruction: str | None = None,
        timeout: float = 60.0,
        patience: float = 25.0,
        token_file: str | None = None,
        ca_file: str | None = None,
        tasks: TaskSet | None = None,
        max_turns: int | None = None,
        render_mode: str | None = None,
    ):
        super().__init__(tasks, max_turns, render_mode)
        if actions not in ("text", "tool"):
            raise ValueError(f"openenv:{name}: actions is 'text' or 'tool', not {actions!r}")
        if not timeout > 0 or not patience >= 0:
            raise ValueError(
                f"openenv:{name}: timeout must be positive and patience at least 0, not {timeout} and {patience}"
            )
        self.url = checked_url(name)
        self._settings = dict(settings or {})
        self._actions = actions
        self._instruction = instruction
        self._timeout = timeout
        self._patience = patience
        self._address = Address((self.url,), "", token_file, ca_file)
        given_token(self._address)  # raises if its file cannot be read
        self._address.tls()
        self._connection: OpenEnvConnection | None = None
        self._form = _UNKNOWN
        self._description = ""
        self._offered: list[Json] = []

    @classmethod
    def default_tasks(
        cls, split: str = "train", name: str = "", token_file: str | None = None, ca_file: str | None = None
    ) -> TaskSet:
        """The tasks that the server lists by split and index; if it lists none, 100,000 train or 1,000 test seeds."""
        url = checked_url(name)
        address = Address((url,), "", token_file, ca_file)
        envs = get_json(address, "/list_environments")
        env = str(envs[0]) if isinstance(envs, list) and envs else ""
        listed = get_json(address, f"/{quote(env)}/splits") if env else None
        if listed is None:
            if split not in _SEEDS:
                raise ValueError(f"openenv:{name} has no split {split!r}; it has {', '.join(_SEEDS)}")
            return TaskSet.generate(_seed_task, _SEEDS[split], name=f"{url}/{split}")
        names = [str(item["name"] if isinstance(item, Mapping) else item) for item in listed]
        if split not in names:
            raise ValueError(f"openenv:{name} has no split {split!r}; it has {', '.join(names) or 'none'}")
        size = int((get_json(address, f"/{quote(env)}/num_tasks", {"split": split}) or {}).get("num_tasks", 0))

        def make(index: int) -> Task:
            reset = {"split": split, "index": index}
            return Task(id=f"{env}-{split}-{index}", metadata={"split": split, "reset": reset})

        return TaskSet(make, name=f"{env}/{split}", source=url, size=size)

    @property
    def tools(self) -> list[dict[str, Any]]:  # type: ignore[override]  # elsewhere a class variable
        return self._offered

    async def reset(  # type: ignore[override]
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode on the server. Raises `Unavailable` if it is away or stays full, or `RemoteEnvError`."""
        if self._tasks is None and self.task is None and "task" not in (options or {}):
            await asyncio.to_thread(getattr, self, "tasks")  # the server is asked, which others need not wait for
        await super().reset(seed=seed, options=options)
        self.running = False
        task = self.current_task
        data = {**self._settings, **dict(task.metadata.get("reset") or {})}
        chosen = seed if task.seed is None else task.seed
        if chosen is not None:
            data["seed"] = chosen
        try:
            answer = await self._asked_first({"type": "reset", "data": data})
        except Rejected as refused:
            raise RemoteEnvError(f"openenv:{self.url}: reset refused {data!r:.300}: {refused}") from None
        self.running = True
        metadata = metadata_of(answer)
        form = self._form
        if form.kind == "chat":
            self._offered = metadata.pop("tools", [])
            return list(answer["observation"].get("messages", [])), dict(metadata.get("info") or {})
        self._offered = form.schemas if form.kind == "tools" or self._actions == "tool" else []
        told = f"{self._description}\n\n{form.told}" if self._instruction is None else self._instruction
        opening = f"{told}\n\n{shown(answer.get('observation') or {})}"
        return [user(opening.strip())], metadata

    async def step(self, action: Action) -> Step:  # type: ignore[override]
        """Take the action of a reply; `info` is the server's metadata. Raises `SessionLost` or `RemoteEnvError`."""
        self.read(action)  # which checks that an episode runs
        message = assistant(action)
        form = self._form
        if form.kind == "chat":
            sent = text_of(message) if message.keys() <= {"role", "content"} else message
            answer = await self._stepped({"message": sent})
            metadata = metadata_of(answer)
            return self._ended(answer["observation"].get("messages", []), [answer], dict(metadata.get("info") or {}))
        if form.kind == "tools":
            return await self._call_tools(form, message)
        try:
            answer = await self._stepped(_whole(form.action_of(message)))
        except (Unreadable, Rejected) as error:
            return self.outcome(_replied(message, f"Error: {error}"), invalid=True)
        return self._ended(_replied(message, shown(answer.get("observation") or {})), [answer], metadata_of(answer))

    async def close(self) -> None:  # type: ignore[override]
        await super().close()
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _call_tools(self, form: Form, message: Message) -> Step:
        calls = form.calls(message)
        if isinstance(calls, str):
            return self.outcome(_replied(message, f"Error: {calls}; no tool was called"), invalid=True)
        if not calls:
            return self.outcome([], terminated=True)
        answers: list[Json] = []
        told: list[str] = []
        for call in calls:
            if answers and answers[-1].get("done"):
                told.append("Error: the episode was over, and this tool was not called")
                continue
            text, answer = await self._tool_called(form, call.name, call.arguments)
            told.append(text)
            answers += [answer] if answer else []
        info = metadata_of(answers[-1]) if answers else {}
        return self._ended(_replied(message, *told), answers, info)

    async def _tool_called(self, form: Form, name: str, arguments: Json) -> tuple[str, Json]:
        if not form.by_step:
            params = {"name": name, "arguments": _whole(arguments)}
            request = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
            response = await self._asked({"type": "mcp", "data": request})
            error = response.get("error")
            return (f"Error: {error.get('message')}" if error else shown_result(response.get("result"))), {}
        try:
            answer = await self._stepped({"type": "call_tool", "tool_name": name, "arguments": _whole(arguments)})
        except Rejected as refused:
            return f"Error: {name}: {refused}", {}
        observation = answer.get("observation") or {}
        if error := observation.get("error"):
            return f"Error: {error.get('message') if isinstance(error, Mapping) else error}", answer
        return shown_result(observation.get("result")), answer

    def _ended(self, messages: Observation, answers: list[Json], info: Json) -> Step:
        done = any(bool(answer.get("done")) for answer in answers)
        reward = sum(float(answer.get("reward") or 0.0) for answer in answers)
        short = done and any(metadata_of(answer).get("truncated") is True for answer in answers)
        messages, reward, terminated, truncated, _ = self.outcome(messages, reward, done and not short)
        self.running = not (done or truncated)
        return messages, reward, terminated, truncated or short, info

    async def _stepped(self, action: Json) -> Json:
        return await self._asked({"type": "step", "data": action})

    async def _asked(self, frame: Json) -> Json:
        connection = self._connection
        if connection is None:
            raise SessionLost(f"openenv:{self.url}: the session was closed")
        try:
            return await connection.ask(frame, self._timeout)
        except (Rejected, RemoteEnvError):
            raise
        except BaseException:  # a cancelled call too: its answer would be taken for the next one's
            self.running = False
            self._connection = None
            await connection.drop()
            raise

    async def _asked_first(self, frame: Json) -> Json:
        """As `_asked`, on a new connection if there is none, or if it dropped between two episodes."""
        until = time.monotonic() + self._patience
        pause = 0.05
        while True:
            fresh = self._connection is None or not self._connection.alive
            try:
                await self._connected()
                return await self._asked(frame)
            except SessionLost:
                if fresh:
                    raise
            except Full as error:
                if time.monotonic() + pause > until:
                    advice = "run fewer episodes at a time (--concurrency), or wait longer (patience=)"
                    raise Full(f"{error}, and no session became free within {self._patience:g} s: {advice}") from error
                await asyncio.sleep(pause)
                pause = min(2 * pause, 2.0)

    async def _connected(self) -> None:
        if self._connection is None or not self._connection.alive:
            if self._connection is not None:
                await self._connection.drop()
            self._connection = await OpenEnvConnection.to(self._address)
        if self._form is _UNKNOWN:  # also where an earlier try got the connection and no schema
            schema = await self._connection.get("/schema")
            if not isinstance(schema, Mapping) or not isinstance(schema.get("action"), Mapping):
                raise Unavailable(f"openenv:{self.url}: no OpenEnv server: GET {self.url}/schema tells no schemas")
            told = await self._connection.get("/metadata")
            self._description = str(told.get("description") or "") if isinstance(told, Mapping) else ""
            request = {"jsonrpc": "2.0", "id": 0, "method": "tools/list", "params": {}}
            tools = None
            with contextlib.suppress(Rejected, RemoteEnvError):  # a server that knows no such frame
                tools = ((await self._asked({"type": "mcp", "data": request})).get("result") or {}).get("tools")
            self._form = form_of(schema["action"], tools if isinstance(tools, list) else [])


class Rejected(Exception):
    """The server refused a frame or an action; the session continues."""


class OpenEnvConnection:
    """One WebSocket to an OpenEnv server. Each frame is answered by one frame."""

    def __init__(self, address: Address, ws: aiohttp.ClientWebSocketResponse):
        self._address = address
        [self._url] = address.servers
        self._ws = ws
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def to(cls, address: Address) -> "OpenEnvConnection":
        [url] = address.servers
        headers = given_token(address)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                ws = await open_websocket(address, f"{url}/ws", headers, max_msg_size=MOST_BYTES, heartbeat=20.0)
        except aiohttp.WSServerHandshakeError as error:
            wants = error.status in (401, 403)
            hint = "it wants a token, or another than this: token_file=" if wants else "is this an OpenEnv server?"
            raise Unavailable(f"openenv:{url}: {url}/ws answers with status {error.status}; {hint}") from error
        except (aiohttp.ClientError, OSError) as error:
            why = why_not(error) if str(error) else f"no answer within {CONNECT_SECONDS:g} s"
            raise Unavailable(f"openenv:{url}: cannot be reached: {why}") from error
        return cls(address, ws)

    @property
    def alive(self) -> bool:
        """True if the connection is open and belongs to the running event loop."""
        return not self._ws.closed and self._loop is asyncio.get_running_loop()

    async def ask(self, frame: Json, timeout: float) -> Json:
        """The data of the frame that answers.

        Raises `Rejected`, `RemoteEnvError`, `Full` or `Unavailable` if the server has no session to give, `SessionLost`
        if the connection is over or no answer came in time.
        """
        if self._loop is not asyncio.get_running_loop():
            why = "the episode began in another event loop: begin another in this one"
            raise SessionLost(f"openenv:{self._url}: {why}")
        try:
            # A server that gives no session says so, and closes, before it is asked: its refusal is still to be read.
            with contextlib.suppress(ConnectionError, aiohttp.ClientError):
                await self._ws.send_str(json.dumps(frame))
            message = await self._ws.receive(timeout)
        except (ConnectionError, aiohttp.ClientError) as error:  # it closed while it was sent something
            raise self._lost(frame, str(error)) from error
        except TimeoutError:
            late = f"no answer to {frame['type']} within {timeout:g} s; the episode is lost: reset begins another"
            raise SessionLost(f"openenv:{self._url}: {late}, and timeout= allows more") from None
        if message.type is aiohttp.WSMsgType.TEXT:
            return self._data(message.data)
        if message.type is aiohttp.WSMsgType.ERROR:
            raise self._lost(frame, str(message.data))
        raise self._lost(frame, f"closed by the server, code {message.data}" if message.data else "closed")

    def _lost(self, frame: Json, why: str) -> SessionLost:
        lost = f"the connection ended during {frame['type']} ({why}), and the episode with it: reset begins another"
        return SessionLost(f"openenv:{self._url}: {lost}")

    def _data(self, text: str) -> Json:
        try:
            answer = json.loads(text)
            kind, data = answer["type"], answer["data"]
        except (ValueError, TypeError, KeyError) as error:
            raise SessionLost(f"openenv:{self._url}: no OpenEnv frame: {text[:200]!r}") from error
        if kind != "error":
            return dict(data)
        code, told = data.get("code"), str(data.get("message"))
        if code == "VALIDATION_ERROR":
            raise Rejected(_problems(data) or told)
        if code in ("INVALID_JSON", "UNKNOWN_TYPE"):
            raise Rejected(f"{told} ({code})")
        if code == "EXECUTION_ERROR":
            raise RemoteEnvError(f"openenv:{self._url}: the environment failed: {told}")
        if code in ("CAPACITY_REACHED", "FACTORY_ERROR"):
            raise (Full if code == "CAPACITY_REACHED" else Unavailable)(f"openenv:{self._url}: {told} ({code})")
        raise SessionLost(f"openenv:{self._url}: {told} ({code}); the episode is lost: reset begins another")

    async def get(self, path: str) -> Any:
        """GET a path as JSON; None if there is no such route. Raises `Unavailable`."""
        try:
            headers = given_token(self._address)
            status, body = await get(self._address, self._url, path, 30.0, headers=headers)
            return json.loads(body) if status == 200 else None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unavailable(f"openenv:{self._url}: GET {path} failed: {error or 'no answer within 30 s'}") from error

    async def close(self) -> None:
        if self._loop is not asyncio.get_running_loop():
            await self.drop()
            return
        with contextlib.suppress(ConnectionError, aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._ws.send_str('{"type": "close"}')
                await self._ws.close()

    async def drop(self) -> None:
        """Drop the connection in any state; one of another event loop is cut."""
        cut(self._ws)
        if self._loop is asyncio.get_running_loop() or self._loop.is_closed():
            self._ws._response.close()  # or it would want its loop when it is forgotten


def get_json(address: Address, path: str, body: Json | None = None) -> Any:
    """GET, or with a body POST, a path as JSON, without an event loop; None if there is no such route."""
    [url] = address.servers
    sent = None if body is None else json.dumps(body).encode()
    try:
        status, answer = fetch(address, url, path, given_token(address), sent, seconds=30.0)
        if status == 200:
            return json.loads(answer)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unavailable(f"openenv:{url}: cannot be reached: {why_not(error)}") from error
    if status in (401, 403):
        raise Unavailable(f"openenv:{url}: it wants a token, or another than this: token_file=")
    if status < 400 or status in (408, 429) or (status >= 500 and status != 501):
        # It may well have such a thing: with other tasks instead, something else would be measured.
        raise Unavailable(f"openenv:{url}: {path} answers with status {status}")
    return None


def given_token(address: Address) -> dict[str, str]:
    """The headers of a request. Only a token that was given for this server goes there, not AGENTGYM_TOKEN."""
    return address.headers() if address.token_file is not None else {}


def checked_url(name: str) -> str:
    """The URL of a server without a trailing slash. Raises ValueError."""
    parts = urlsplit(name)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"bad address in 'openenv:{name}': write openenv:http://HOST:PORT")
    if parts.username or parts.password:
        raise ValueError(f"an address must not hold a secret: put the token of {parts.hostname} into token_file=")
    return name.rstrip("/")


def _problems(data: Mapping[str, Any]) -> str:
    errors = data.get("errors")
    found = [error for error in errors if isinstance(error, Mapping)] if isinstance(errors, list) else []
    return "; ".join(f"{'.'.join(map(str, error.get('loc', [])))}: {error.get('msg')}" for error in found)


def _seed_task(seed: int) -> Task:
    return Task(id=f"seed-{seed}", seed=seed)


def _whole(action: Json) -> Json:
    """An action in which half of a surrogate pair, which OpenEnv's server cannot answer, is a "?"."""
    text = json.dumps(action, ensure_ascii=False)
    return action if text.isascii() else dict(json.loads(text.encode(errors="replace")))


def _replied(message: Message, *texts: str) -> Observation:
    """The messages that answer a reply: a tool message for each native call, else a user message."""
    native = message.get("tool_calls")
    if not native:
        return [user("\n".join(texts))]
    raws = native if isinstance(native, list) else [native]
    ids = [raw.get("id") if isinstance(raw, Mapping) else None for raw in raws]
    said = [*texts, *[texts[-1]] * (len(ids) - len(texts))]
    return [tool_result(id or f"call_{n}", text) for n, (id, text) in enumerate(zip(ids, said, strict=False))]
