"""LiteLLM's proxy in front of an engine, with a callback that records each call: python serve_litellm.py FOLDER ENGINE_URL MODEL"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

CONFIG = """
model_list:
  - model_name: {model}
    litellm_params: {{model: "hosted_vllm/{model}", api_base: "{engine}/v1", api_key: none}}
litellm_settings:
  callbacks: recorder.recorder
  telemetry: false
"""
RECORDER = """
import json
from litellm.integrations.custom_logger import CustomLogger

class Recorder(CustomLogger):
    def __init__(self, path):
        super().__init__()
        self.file = open(path, "a", buffering=1)

    async def async_log_success_event(self, kwargs, response, start, end):
        told = {{"messages": kwargs["messages"], "answer": response.model_dump(), "began": start.timestamp()}}
        self.file.write(json.dumps(told, default=str) + "\\n")

recorder = Recorder({path!r})
"""


def main(folder: str, engine: str, model: str) -> None:
    place = Path(folder) / "litellm"
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.yaml").write_text(CONFIG.format(model=model, engine=engine))
    (place / "recorder.py").write_text(RECORDER.format(path=str(place / "calls.jsonl")))
    os.chdir(place)
    sys.path.insert(0, str(place))
    os.environ |= {"CONFIG_FILE_PATH": str(place / "config.yaml"), "LITELLM_LOG": "ERROR"}
    os.environ["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"  # only this machine reaches it
    import uvicorn
    from litellm.proxy.proxy_server import app

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    class Server(uvicorn.Server):
        async def startup(self, sockets=None):  # type: ignore[no-untyped-def]
            await super().startup(sockets)
            sys.stdout.write(json.dumps({"url": f"http://127.0.0.1:{port}"}) + "\n")
            sys.stdout.flush()

    Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", access_log=False)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
