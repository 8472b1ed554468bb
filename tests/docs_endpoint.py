"""A double of a chat endpoint for the commands and code of the docs: a real HTTP server whose "model" answers in the form that
it is asked for. It gets little right, and that is all that the docs' examples need."""

import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

IN_DOCS = re.compile(r"http://localhost:800[01]/v1")


def answer_to(messages):
    """What the double says to a conversation."""
    asked = str(messages[-1]["content"]) + str(messages[0]["content"])
    if "There are" in asked and '{"ranking"' in asked:
        count = int(re.search(r"There are (\d+) candidates", asked)[1])
        return json.dumps({"ranking": list(range(1, count + 1))})
    if "<score>" in asked:
        return "<score>7</score>"
    return "right <answer>right</answer> #### 1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.reply({"object": "list", "data": [{"id": "my-model", "object": "model", "owned_by": "someone"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = answer_to(body["messages"])
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        if not body.get("stream"):
            self.reply({"id": "1", "model": body["model"], "choices": [choice], "usage": usage})
            return
        events = [
            {"choices": [{"index": 0, "delta": {"role": "assistant", "content": text}}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": usage},
        ]
        self.send("text/event-stream", "".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n")

    def reply(self, record):
        self.send("application/json", json.dumps(record))

    def send(self, kind, text):
        data = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@contextmanager
def chat_endpoint():
    """Its base URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
