"""docs/service_protocol.md says what the server does: each of its examples is asked of a real one, and its tables are complete."""

import asyncio
import contextlib
import json
import re
from pathlib import Path

import aiohttp
import pytest
from service_harness import SECONDS, serving

from agentgym.service.openenv.routes import PATHS
from agentgym.service.protocol.frames import CALLS, CODES

PAGE = (Path(__file__).parents[3] / "docs" / "service_protocol.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```frames\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
ENVS = {"countdown": "countdown", "gsm8k_tool": "gsm8k_tool"}
ANY = "…"


def rows(heading):
    """The cells of the table that follows a line."""
    lines = PAGE.split(heading, 1)[1].split("\n\n", 2)[1].splitlines()
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines[2:]]


def fits(shown, found):
    if shown == ANY:
        return True
    if isinstance(shown, dict):
        named = shown.keys() - {ANY}
        whole = isinstance(found, dict) and (ANY in shown or found.keys() == named) and found.keys() >= named
        return whole and all(fits(shown[key], found[key]) for key in named)
    if isinstance(shown, list):
        return isinstance(found, list) and len(shown) == len(found) and all(map(fits, shown, found))
    return shown == found


class Reader:
    """Plays the lines of one example."""

    def __init__(self, http):
        self.http = http
        self.ws = None
        self.resume = ""

    async def play(self, lines):
        while lines:
            method, path, *_ = lines.pop(0).split()
            if method == "WS":
                await self.connect(path, lines)
            else:
                body = json.loads(lines.pop(0)[2:]) if lines[0].startswith(">") else None
                async with self.http.request(method, path, json=body) as answer:
                    self.check_status(lines.pop(0), answer.status, await answer.json())
            while lines and lines[0][:2] in ("> ", "< ", "--"):
                await self.go_on(lines.pop(0))
        if self.ws is not None:
            await self.ws.close()

    async def connect(self, path, lines):
        headers = {"X-Agentgym-Resume": self.resume} if self.resume else {}
        if re.match(r"< \d{3} ", lines[0]):
            upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
            upgrade |= {"Sec-WebSocket-Key": "MDEyMzQ1Njc4OTAxMjM0NQ=="}
            async with self.http.get(path, headers=upgrade) as answer:
                self.check_status(lines.pop(0), answer.status, await answer.json())
        else:
            self.ws = await self.http.ws_connect(path, headers=headers)

    async def go_on(self, line):
        if line.startswith("> "):
            await self.ws.send_str(line[2:])
        elif line.startswith("--"):
            self.ws._response.connection.transport.abort()
            await self.ws.close()
        elif line.startswith("< close "):
            message = await self.ws.receive(SECONDS)
            assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, int(line[8:]))
        else:
            found = json.loads(await self.ws.receive_str(timeout=SECONDS))
            assert fits(json.loads(line[2:]), found), f"{line}\nis\n< {json.dumps(found)}"
            if isinstance(found, dict):
                self.resume = found.get("resume", self.resume)

    def check_status(self, line, status, found):
        shown = re.match(r"< (\d{3}) (.*)", line)
        assert status == int(shown[1]), f"{line}\nis\n< {status} {json.dumps(found)}"
        assert fits(json.loads(shown[2]), found), f"{line}\nis\n< {status} {json.dumps(found)}"


@contextlib.asynccontextmanager
async def server_of(first):
    """The kind of server that an example's first line names."""
    if first.endswith("# with --token-file"):
        async with serving(envs=ENVS, tokens={"t": "a-token-of-16-letters"}) as server:
            yield server
    elif first.endswith("# full"):
        async with (
            serving(envs=ENVS, max_sessions=1) as server,
            aiohttp.ClientSession(server.url) as http,
            http.ws_connect("/envs/countdown/session") as held,
        ):
            await held.receive_str()
            yield server
    else:
        async with serving(envs=ENVS) as server:
            yield server


def kind(block):
    return block.partition("\n")[0].partition("#")[2]


@pytest.mark.parametrize("words", sorted({kind(block) for block in BLOCKS}))
def test_its_examples_are_what_a_server_answers(words, monkeypatch):
    monkeypatch.delenv("AGENTGYM_DATA", raising=False)
    mine = [block for block in BLOCKS if kind(block) == words]

    async def replay():
        async with server_of(mine[0].partition("\n")[0]) as server:
            for block in mine:
                timeout = aiohttp.ClientTimeout(SECONDS)
                async with aiohttp.ClientSession(server.url, timeout=timeout) as http:
                    await Reader(http).play(block.splitlines())

    asyncio.run(replay())


def test_there_are_examples_of_every_kind_of_message():
    assert len(BLOCKS) >= 11
    sent = [line[2:] for block in BLOCKS for line in block.splitlines() if line.startswith("> ")]
    for word in ('"close"', '"init"', '"reset"', '"step"', '"state"', '"tools/call"'):
        assert any(word in text for text in sent)


def test_every_code_is_there_with_its_meaning_and_the_number_of_its_close():
    expected = [[f"`{code}`", str(number or ""), what] for code, (what, number) in CODES.items()]
    assert rows("Either side ends a session normally with 1000.") == expected, "\n".join(
        f"| {' | '.join(row)} |" for row in expected
    )


def test_every_call_is_there_with_what_it_carries():
    told = {name.strip("`"): carries for name, carries, _ in rows("counted from 1, and a `call`:")}
    assert told.keys() == CALLS.keys()
    for call, fields in CALLS.items():
        assert all(f"`{field}`" in told[call] for field in fields)


def test_every_route_and_every_code_of_openenv_is_there():
    for path in PATHS:
        assert path.replace("{env_name}", "ENV") in PAGE
    source = Path(__file__).parents[3] / "agentgym" / "service"
    written = "".join(file.read_text() for file in source.glob("openenv*.py"))
    for code in re.findall(r'"([A-Z]+_[A-Z]+)"', written):
        assert f"`{code}`" in PAGE, code
