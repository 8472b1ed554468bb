"""An exported folder, served by the real package: `serve_folder.py FOLDER PACKAGES ...`, with agentgym from PACKAGES."""

import importlib
import socket
import sys

import uvicorn

sys.path[0] = sys.argv[1]  # as `python -m server.app` in the folder has it
sys.path += sys.argv[2:]  # last: what both have is theirs

if __name__ == "__main__":
    listening = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"{listening.getsockname()[1]}\n")
    sys.stdout.flush()
    uvicorn.Server(uvicorn.Config(importlib.import_module("server.app").app, log_level="error")).run(
        sockets=[listening]
    )
