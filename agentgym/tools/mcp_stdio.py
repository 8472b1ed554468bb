"""Run an MCP server as a child process that speaks JSON lines over its standard input and output.

A transport for the `mcp` package, in place of that package's `stdio_client`, which bounds neither the length of a message nor
the number of invalid lines, and reports neither the exit code nor the end of stderr of a server that died.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentgym.processes.child_process import with_default_signals

_log = logging.getLogger(__name__)

LONGEST_LINE = 16 << 20  # bytes of one message
MOST_INVALID_LINES = 100  # lines that are not messages, such as a careless server's prints
KEPT_STDERR = 2000  # bytes
GRACE = 1.0  # seconds for the server to exit once its input is closed


@dataclass
class Ending:
    """How a server process ended, for the error message. `reason` is empty while the connection works."""

    reason: str = ""
    stderr: str = ""

    def __str__(self) -> str:
        last = self.stderr.strip()[-500:]
        return (self.reason or "the connection was closed") + (f"; it last wrote to stderr: {last}" if last else "")


@asynccontextmanager
async def server_process(
    command: Sequence[str], ending: Ending, env: Mapping[str, str] | None = None, cwd: str | Path | None = None
) -> AsyncIterator[tuple[Any, Any]]:
    """Start a server and yield the streams that `mcp.Client` reads from and writes to. OSError if it cannot be started."""
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
        asyncio.create_task(_keep_stderr(process, ending)),
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


async def _receive(process: asyncio.subprocess.Process, received: Any, ending: Ending) -> None:
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
                ending.reason = ending.reason or await _death(process)
                return
            try:
                message = jsonrpc_message_adapter.validate_json(line, by_name=False)
            except ValueError:
                invalid += bool(line.strip())
                if invalid <= MOST_INVALID_LINES:
                    continue
                ending.reason = (
                    f"it wrote more than {MOST_INVALID_LINES} lines to stdout that are no messages: {line!r:.100}"
                )
                return
            with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                await received.send(SessionMessage(message))


async def _send(process: asyncio.subprocess.Process, outgoing: Any, received: Any, ending: Ending) -> None:
    stdin: Any = process.stdin
    async with outgoing:
        async for item in outgoing:
            try:
                stdin.write(item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                await stdin.drain()
            except OSError:
                ending.reason = ending.reason or await _death(process)
                await received.aclose()
                return


async def _keep_stderr(process: asyncio.subprocess.Process, ending: Ending) -> None:
    stderr: Any = process.stderr
    kept = b""
    while chunk := await stderr.read(1 << 16):
        kept = (kept + chunk)[-KEPT_STDERR:]
        ending.stderr = kept.decode("utf-8", "replace")


async def _death(process: asyncio.subprocess.Process) -> str:
    code = await _exit_code(process, GRACE)
    if code is None:
        return "it closed its stdout"
    return f"it ended with exit code {code}" if code >= 0 else f"it was ended by {signal.Signals(-code).name}"


async def _end(process: asyncio.subprocess.Process) -> None:
    stdin: Any = process.stdin
    stdin.close()
    await _exit_code(process, GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if await _exit_code(process, GRACE) is None:
        _log.warning("the MCP server process %d does not end", process.pid)
    transport = getattr(process, "_transport", None)  # a surviving descendant must not keep the pipes open here
    if transport is not None:
        transport.close()


async def _exit_code(process: asyncio.subprocess.Process, seconds: float) -> int | None:
    """The exit code, or None if it still runs. `wait()` would also wait for other processes that hold its pipes."""
    until = asyncio.get_running_loop().time() + seconds
    while process.returncode is None and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return process.returncode
