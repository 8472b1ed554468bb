"""The tools of an MCP server: `with McpTools(["python", "server.py"]) as server: tools = ToolSet([*server, my_own_tool])`.

Needs `agentgym-toolkit[mcp]`. Calls block the calling thread; one more thread speaks the protocol for all servers.
"""

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import os
import signal
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from agentgym.core.install import pip_install
from agentgym.processes.child_process import with_default_signals
from agentgym.tools.schemas import problem_of_names
from agentgym.tools.toolset import Tool, ToolError, shortened

T = TypeVar("T")

PROBE_SECONDS = 5.0  # for a server to list its tools after a call timed out; otherwise it counts as dead
CLOSE_SECONDS = 10.0
MOST_TOOLS = 1000
LONGEST_LINE = 16 << 20  # bytes of one message
MOST_INVALID_LINES = 100  # lines that are not messages, such as a careless server's prints
KEPT_STDERR = 2000  # bytes
GRACE = 1.0  # seconds for the server to exit once its input is closed

_log = logging.getLogger(__name__)


class McpServerError(RuntimeError):
    """The server cannot be started or reached, has died, or no longer answers. The environment fails; the agent gets no answer."""


class McpTools:
    """The tools of one MCP server. Iterate over it to get them, which starts it; close it, or use it in a `with` statement.

    A call that fails, or takes longer than `timeout` while the server still answers, is answered with "Error: ..." and the
    tool's text. If the server no longer answers, the call raises `McpServerError`.

    Args:
        command: program and arguments of a server that speaks over its standard input and output. It inherits few environment
            variables (PATH, HOME ...). `close` kills it.
        url: of a server that speaks streamable HTTP; instead of `command`.
        env: more environment variables for `command`.
        cwd: working directory of `command`.
        headers: sent with every request to `url`.
        timeout: seconds for one call.
        start_timeout: seconds to start or connect and to list the tools.
        max_output: characters of a result that the agent gets; the middle of a longer one is left out.
        stateless: calls do not depend on each other, so a server that died may be started again between two calls. Otherwise
            a server that dies after its first call stays dead until `close`.
    """

    def __init__(
        self,
        command: Sequence[str] | None = None,
        *,
        url: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 30.0,
        start_timeout: float = 60.0,
        max_output: int = 20_000,
        stateless: bool = False,
    ):
        if (command is None) == (url is None):
            raise ValueError("McpTools needs either a command or a url")
        if isinstance(command, str):
            raise ValueError(f"command is a list of a program and its arguments, not the text {command!r}")
        self.name = url or " ".join(command or [])  # as error messages show it
        if command is not None:
            self._streams: _Streams = partial(_server_process, list(command), env, cwd)
        else:
            self._streams = partial(_http, str(url), dict(headers or {}))
        self.timeout, self.start_timeout = timeout, start_timeout
        self.max_output, self.stateless = max_output, stateless
        self._lock = threading.Lock()
        self._connection: _McpConnection | None = None
        self._finalizer: weakref.finalize[..., McpTools] | None = None

    @property
    def tools(self) -> list[Tool]:
        """The server's tools, as it listed them when the connection was made."""
        return [
            Tool(one.name, one.description or "", one.input_schema, partial(self._run, one.name), problem_of_names)
            for one in self._open().listed
        ]

    def _run(self, tool_name: str, /, **arguments: Any) -> str:
        return self.call(tool_name, arguments)

    def __iter__(self) -> Iterator[Tool]:
        return iter(self.tools)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The result of a tool as text. Content other than text is described.

        Raises:
            ToolError: the tool failed, was called wrongly, or took too long; the agent gets the message.
            McpServerError: the server cannot be used.
        """
        connection = self._open()
        from pydantic_core import to_json  # comes with mcp

        given = dict(arguments)
        try:
            to_json(given)
        except ValueError as error:  # half of a surrogate pair, or nested too deep: it would end the connection
            raise ToolError(f"{name}: the arguments cannot be sent: {error}") from None
        connection.used = True
        try:
            result = connection.wait(connection.call(name, given, self.timeout), self.timeout + PROBE_SECONDS)
        except McpServerError:
            connection.stop()
            raise
        text = shortened(_text_of(result), self.max_output)
        if result.is_error:
            raise ToolError(f"{name}: {text or 'the tool failed and gave no reason'}")
        return text

    def close(self) -> None:
        """End the connection and the server process. The next use connects again."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.stop()

    def __enter__(self) -> "McpTools":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> "_McpConnection":
        with self._lock:
            known = self._connection
            if known is not None:
                if known.alive:
                    return known
                if known.used and not self.stateless and known.owner == os.getpid():
                    raise McpServerError(f"the MCP server {known.name} is gone, and its state with it: {known.ending}")
                known.stop()
            self._connection = _McpConnection(self.name, self._streams)
            try:
                self._connection.start(self.start_timeout)
            except BaseException:
                self._connection.stop()
                self._connection = None
                raise
            # Without a call of close, the server ends with this object or with the process.
            if self._finalizer is not None:
                self._finalizer.detach()
            self._finalizer = weakref.finalize(self, self._connection.stop)
            return self._connection


@dataclass
class _Ending:
    """How a server process ended. `reason` is empty while the connection works."""

    reason: str = ""
    stderr: str = ""

    def __str__(self) -> str:
        last = self.stderr.strip()[-500:]
        return (self.reason or "the connection was closed") + (f"; it last wrote to stderr: {last}" if last else "")


# The streams for `mcp.Client`. OSError if the server cannot be started.
_Streams = Callable[[_Ending], contextlib.AbstractAsyncContextManager[tuple[Any, Any]]]


class _McpConnection:
    """One connection. Its task runs in the event loop's thread; other threads wait for it."""

    def __init__(self, name: str, streams: "_Streams"):
        self.name = name
        self.ending = _Ending()
        self.listed: list[Any] = []
        self.used = False  # whether it has carried a call, after which the server may have state
        self.owner = os.getpid()
        self._streams = streams
        self._loop, self._thread = _event_loop(self.owner)
        self._task: concurrent.futures.Future[None] | None = None
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._stop = asyncio.Event()
        self._client: Any = None

    @property
    def alive(self) -> bool:
        here = self.owner == os.getpid() and self._task is not None and not self._task.done()
        return here and not self.ending.reason

    def start(self, timeout: float) -> None:
        self._task = asyncio.run_coroutine_threadsafe(self._live(), self._loop)
        try:
            self._ready.result(timeout)
        except TimeoutError:
            self._task.cancel()
            said = self.ending.stderr.strip()[-500:]
            raise McpServerError(f"the MCP server {self.name} was not ready within {timeout:g} s ({said})") from None

    def wait(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """The result of work in the event loop. The timeout is for a stuck loop."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout + PROBE_SECONDS)
        except TimeoutError:
            future.cancel()
            raise McpServerError(f"the MCP server {self.name} does not answer") from None

    def stop(self) -> None:
        if self._task is None or self.owner != os.getpid() or self._task.done():
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is self._thread:
            return  # called by the garbage collector, which runs in any thread; this one must not wait for itself
        with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
            self._task.result(CLOSE_SECONDS)

    async def _live(self) -> None:
        try:
            from mcp import Client
        except ModuleNotFoundError:
            why = f"MCP servers need the package mcp: {pip_install('agentgym-toolkit[mcp]')}"
            self._ready.set_exception(ModuleNotFoundError(why))
            return
        try:
            async with Client(self._streams(self.ending)) as self._client:
                self.listed = await self._list()
                self._ready.set_result(None)
                await self._stop.wait()
        except BaseException as error:
            self.ending.reason = self.ending.reason or _error_text(error)
            if not self._ready.done():
                self._ready.set_exception(McpServerError(f"cannot use the MCP server {self.name}: {self.ending}"))

    async def _list(self) -> list[Any]:
        page = await self._client.list_tools(cursor=None, cache_mode="refresh")
        listed = list(page.tools)
        while page.next_cursor:
            if len(listed) > MOST_TOOLS:
                raise McpServerError(f"the MCP server {self.name} lists more than {MOST_TOOLS} tools")
            page = await self._client.list_tools(cursor=page.next_cursor, cache_mode="refresh")
            listed += page.tools
        return listed

    async def call(self, name: str, arguments: dict[str, Any], timeout: float) -> Any:
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, INVALID_PARAMS

        try:
            async with asyncio.timeout(timeout):
                return await self._client.call_tool(name, arguments)
        except TimeoutError:
            problem = f"no result within {timeout:g} s; the call was given up"
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise ToolError(f"{name}: {error.message}") from error
            if error.code == CONNECTION_CLOSED:
                raise self._failed(error) from error
            problem = error.message
        except Exception as error:  # the package raises many kinds for a server that breaks the protocol
            raise self._failed(error) from error
        # Tell a failed call from a failed server: a working server can still list its tools.
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await self._list()
        except Exception as error:
            raise self._failed(error, f"after the call of {name} ({problem}) it did not answer") from error
        raise ToolError(f"{name}: {problem}")

    def _failed(self, error: Exception, what: str = "") -> McpServerError:
        self.ending.reason = self.ending.reason or what or _error_text(error)
        return McpServerError(f"the MCP server {self.name} failed: {self.ending}")


@contextlib.asynccontextmanager
async def _http(url: str, headers: dict[str, str], ending: _Ending) -> AsyncIterator[tuple[Any, Any]]:
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    async with (
        create_mcp_http_client(headers=headers) as client,
        streamable_http_client(url, http_client=client) as streams,
    ):
        yield streams


# A transport in place of the package's own `stdio_client`, which bounds neither the length of a message nor the number of
# invalid lines, and reports neither the exit code nor the end of stderr of a server that died.


@contextlib.asynccontextmanager
async def _server_process(
    command: Sequence[str], env: Mapping[str, str] | None, cwd: str | Path | None, ending: _Ending
) -> AsyncIterator[tuple[Any, Any]]:
    import anyio
    from mcp.client.stdio import get_default_environment

    process = await asyncio.create_subprocess_exec(
        *with_default_signals(command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=get_default_environment() | dict(env or {}),
        cwd=cwd,
        start_new_session=True,
        limit=LONGEST_LINE,
    )
    received, read = anyio.create_memory_object_stream[Any](0)
    write, outgoing = anyio.create_memory_object_stream[Any](0)
    tasks = [
        asyncio.create_task(_receive(process, received, ending)),
        asyncio.create_task(_send(process, outgoing, received, ending)),
        asyncio.create_task(_keep_stderr(process.stderr, ending)),
    ]
    try:
        yield read, write
    finally:
        for task in tasks[:2]:
            task.cancel()
        await asyncio.shield(_end(process))
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in (received, read, write, outgoing):
            stream.close()


async def _receive(process: asyncio.subprocess.Process, received: Any, ending: _Ending) -> None:
    import anyio
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    stdout: Any = process.stdout
    invalid = 0
    async with received:
        while True:
            try:
                line = await stdout.readline()
            except ValueError:
                ending.reason = f"it wrote a line of more than {LONGEST_LINE} bytes to stdout"
                return
            if not line:
                await _tell_death(process, ending)
                return
            try:
                message = jsonrpc_message_adapter.validate_json(line, by_name=False)
            except ValueError:
                invalid += bool(line.strip())
                if invalid <= MOST_INVALID_LINES:
                    continue
                what = f"lines to stdout that are no messages: {line!r:.100}"
                ending.reason = f"it wrote more than {MOST_INVALID_LINES} {what}"
                return
            with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                await received.send(SessionMessage(message))


async def _send(process: asyncio.subprocess.Process, outgoing: Any, received: Any, ending: _Ending) -> None:
    stdin: Any = process.stdin
    async with outgoing:
        async for item in outgoing:
            try:
                stdin.write(item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                await stdin.drain()
            except OSError:
                await _tell_death(process, ending)
                await received.aclose()
                return


async def _keep_stderr(stderr: Any, ending: _Ending) -> None:
    kept = b""
    while chunk := await stderr.read(1 << 16):
        kept = (kept + chunk)[-KEPT_STDERR:]
        ending.stderr = kept.decode("utf-8", "replace")


async def _tell_death(process: asyncio.subprocess.Process, ending: _Ending) -> None:
    code = await _exit_code(process, GRACE)
    how = f"it was ended by {signal.Signals(-code).name}" if code and code < 0 else f"it ended with exit code {code}"
    ending.reason = ending.reason or ("it closed its stdout" if code is None else how)


async def _end(process: asyncio.subprocess.Process) -> None:
    stdin: Any = process.stdin
    stdin.close()
    await _exit_code(process, GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if await _exit_code(process, GRACE) is None:
        _log.warning("the MCP server process %d does not end", process.pid)
    transport: Any = vars(process)["_transport"]
    transport.close()  # a surviving descendant must not keep the pipes open here


async def _exit_code(process: asyncio.subprocess.Process, seconds: float) -> int | None:
    """The exit code, or None if it still runs. `wait()` would also wait for other processes that hold its pipes."""
    until = asyncio.get_running_loop().time() + seconds
    while process.returncode is None and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return process.returncode


@cache
def _event_loop(process: int) -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    """The event loop of a process, and the thread that runs it; a forked process has its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="agentgym mcp", daemon=True)
    thread.start()
    return loop, thread


def _text_of(result: Any) -> str:
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(_block_text(block) for block in result.content)


def _block_text(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type in ("image", "audio"):
        return f"[{block.type}, {block.mime_type}, {len(block.data) * 3 // 4} bytes]"
    if block.type == "resource_link":
        return f"[link to {block.uri}]"
    text = getattr(getattr(block, "resource", None), "text", None)
    return str(text) if text is not None else f"[{block.type}]"


def _error_text(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
