"""A server that looks at nothing and gives every message the same answer: what clients and this machine allow at most.

`serve_bare.py PORT`. It takes whatever arrives at once for one message, which holds for the players here.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import socket
import sys

from load import MESSAGE

ANSWER = {
    "observation": {"messages": [{"role": "user", "content": MESSAGE}], "metadata": {}},
    "reward": 1.0,
    "done": False,
}
MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455
SHAKEN = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: %s\r\n\r\n"
)


def answered(sock: socket.socket, whole: bytes) -> None:
    head = sock.recv(65536)
    if head.startswith(b"GET /health"):
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        return
    [key] = [
        line.partition(b":")[2].strip()
        for line in head.split(b"\r\n")
        if line.lower().startswith(b"sec-websocket-key:")
    ]
    sock.sendall(SHAKEN % base64.b64encode(hashlib.sha1(key + MAGIC).digest()))
    while data := sock.recv(65536):
        if data[0] == 136:  # a close
            return
        sock.sendall(whole)


def main(port: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    text = json.dumps({"type": "observation", "data": ANSWER}).encode()
    whole = bytes((129, 126)) + len(text).to_bytes(2, "big") + text
    listening = socket.create_server(("127.0.0.1", port), backlog=1024)
    while True:
        sock, _ = listening.accept()
        if os.fork() == 0:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            answered(sock, whole)
            os._exit(0)
        sock.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
