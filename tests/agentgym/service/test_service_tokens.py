"""Tokens: their file, what each is good for, and what happens as the file changes."""

import asyncio
import os

import aiohttp
import pytest
from service_harness import Client, browsing, serving, session, until

from agentgym import cli
from agentgym.service.server.tokens import SCOPES, AccessToken, AccessTokens, TokenFileError, read_tokens

ANN, BOB, EVE = "a" * 20, "b" * 20, "e" * 20


@pytest.fixture
def file(tmp_path):
    return tmp_path / "tokens"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "no token"),
        ("short\n", ":1:"),
        ("a b c\n", ":1:"),
        (f"{'ö' * 20}\n", ":1:"),
        (f"{ANN}\n\n# no\nname {ANN}\n", ":4:"),
        (f"ann {ANN} play,everything\n", ":1: no scope 'everything'; there are metrics, play, sandboxes"),
        (f"ann {ANN} play metrics\n", ":1:"),
    ],
)
def test_a_bad_file_is_told(file, text, wrong, capsys):
    file.write_text(text)
    with pytest.raises(TokenFileError, match=wrong):
        read_tokens(file)
    assert cli.main(["serve", "service_faults:Faulty", "--token-file", str(file)]) == 2
    assert "--token-file" in capsys.readouterr().err


def test_tokens_have_names_and_scopes(file):
    file.write_text(f"# who\nann {ANN}\n{BOB}\neve {EVE} metrics,play\n")
    every = frozenset(SCOPES)
    assert read_tokens(file) == {
        "ann": AccessToken(ANN, every),
        "line 3": AccessToken(BOB, every),
        "eve": AccessToken(EVE, frozenset({"metrics", "play"})),
    }


def test_a_token_is_good_for_its_scopes_alone():
    tokens = {scope: AccessToken(f"token-for-{scope}-only", frozenset({scope})) for scope in SCOPES}
    paths = {"/metrics": "metrics", "/envs": "play", "/envs/faulty/session": "play", "/ws": "play", "/schema": "play"}
    paths |= {"/sandboxes": "sandboxes", "/sandboxes/session": "sandboxes"}

    async def ask():
        async with serving(tokens=tokens, sandbox={"backend": "bubblewrap"}) as server:
            for scope, token in tokens.items():
                async with browsing(server, token.secret) as http:
                    for path, needed in paths.items():
                        async with http.get(path) as answer:
                            assert (answer.status == 403) == (scope != needed), (scope, path, answer.status)
                            if answer.status == 403:
                                assert f"takes one for {needed}" in (await answer.json())["error"]["message"]
                    async with http.get("/ready") as answer:
                        assert answer.status == 200

    asyncio.run(ask())


def test_the_file_is_read_again_when_it_changes(file, caplog):
    file.write_text(f"ann {ANN}\nbob {BOB}\n")

    async def status(server, token):
        async with browsing(server, token) as http, http.get("/envs") as answer:
            return answer.status

    async def play():
        async with serving(tokens=read_tokens(file), token_file=file) as server, session(server, token=BOB) as client:
            await client.begin()
            file.write_text(f"ann {ANN} metrics\neve {EVE}\n")
            await until(lambda: server.tokens.owner_of(f"Bearer {EVE}") == "eve", "the new token")
            assert (await status(server, ANN), await status(server, BOB), await status(server, EVE)) == (403, 401, 200)
            async with browsing(server, BOB) as http:
                for resume in (None, client.hello["resume"]):
                    with pytest.raises(aiohttp.WSServerHandshakeError, match="401"):
                        await Client(http).connect(resume)
            assert (await client.step("echo"))["result"], "what was open goes on"

    asyncio.run(play())
    assert "tokens now: ann, eve" in caplog.text
    assert EVE not in caplog.text


def test_a_file_that_cannot_be_keeps_the_tokens_from_before(file, caplog):
    file.write_text(f"ann {ANN}\n")
    tokens = AccessTokens(read_tokens(file), file)
    for wrong in (lambda: file.write_text("ann short\n"), file.unlink):
        wrong()
        caplog.clear()
        tokens.look()
        tokens.look()
        assert caplog.text.count("the tokens from before stay") == 1
        assert "short" not in caplog.text.replace("too short", "")
        assert tokens.owner_of(f"Bearer {ANN}") == "ann"
    (file.parent / "next").write_text(f"eve {EVE}\n")
    os.replace(file.parent / "next", file)
    tokens.look()
    assert tokens.owner_of(f"Bearer {ANN}") is None
    assert tokens.owner_of(f"Bearer {EVE}") == "eve"
