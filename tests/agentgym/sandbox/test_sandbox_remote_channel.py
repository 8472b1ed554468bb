"""The channel to a sandbox on a server, over doubles of connections that fail: what is passed over, and what is left open."""

import json

import pytest

from agentgym.sandbox import SandboxError
from agentgym.sandbox.backends.remote import NoRoom, RemoteChannel
from agentgym.service.client.address import Address
from agentgym.service.client.blocking_websocket import HandshakeRefused

SERVER = "http://a:1"
ADDRESS = Address((SERVER,), "sandboxes")
HELLO = json.dumps({"session": "s", "resume": "r", "protocol": 1, "last": 0, "limits": {}, "most": {}})


@pytest.mark.parametrize(
    ("status", "passed_over"), [(429, True), (500, True), (502, True), (503, True), (401, False), (404, False)]
)
def test_a_server_that_fails_is_passed_over_and_one_that_refuses_is_not(monkeypatch, status, passed_over):
    def refused(*_):
        raise HandshakeRefused(status, "no")

    monkeypatch.setattr("agentgym.sandbox.backends.remote.BlockingWebSocket", refused)
    with pytest.raises(SandboxError, match=str(status)) as caught:
        RemoteChannel(ADDRESS, SERVER)
    assert isinstance(caught.value, NoRoom) == passed_over


def test_one_that_is_closed_while_it_comes_back_leaves_no_connection(monkeypatch):
    opened = []

    class Connection:
        """The first drops what it is asked, the second answers it; another thread closes the channel before its hello."""

        def __init__(self, *_):
            self.open = True
            self.says = [HELLO, '{"id": 1, "result": {}}']
            opened.append(self)

        def receive(self, until):
            if len(opened) == 2 and len(self.says) == 2:
                channel.close()
            return self.says.pop(0)

        def send(self, text, until):
            if len(opened) == 1:
                raise ConnectionResetError("cut")

        def close(self, *, in_order=True):
            self.open = False

    monkeypatch.setattr("agentgym.sandbox.backends.remote.BlockingWebSocket", Connection)
    channel = RemoteChannel(ADDRESS, SERVER)
    with pytest.raises(SandboxError, match="closed"):
        channel.start({}, "mine", 30.0)
    assert [connection.open for connection in opened] == [False, False]
