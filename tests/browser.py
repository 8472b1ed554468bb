"""A real Chromium and the viewer's own server: what the tests of the page are made of. The fixtures are in `conftest.py`."""

import asyncio
import json
import os
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 30.0
# A real browser's window, and that of a telephone.
WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 360, "height": 740}


def chromium() -> str | None:
    """The path of a Chromium, or None: CHROMIUM names it, or it is on the path."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@cache
def missing() -> str | None:
    """Why no browser can be driven here, or None."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed: pip install playwright"
    return None if chromium() else "there is no Chromium: bash scripts/browser.sh"


def elsewhere(work, *arguments):
    """The result of a function that runs an event loop: the thread that drives the browser has one already."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work, *arguments).result()


class Served:
    """The viewer's server in a thread of its own. `stop` ends it, `start` starts it again at the same port."""

    def __init__(self, *paths: Path):
        self.paths, self.port, self.loop = paths, 0, asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.start()

    def start(self) -> None:
        from agentgym.viewer.run import Runs, roots_of
        from agentgym.viewer.server import serve

        self.server = self._do(serve(Runs(roots_of(list(self.paths))), port=self.port))
        self.url, self.port = self.server.url, self.server.port

    def stop(self) -> None:
        if self.server is not None:
            self._do(self.server.close())
            self.server = None

    def close(self) -> None:
        self.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(SECONDS)
        self.loop.close()

    def _do(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(SECONDS)


@contextmanager
def serving(*paths: Path):
    """A server over these folders while the block runs."""
    served = Served(*paths)
    try:
        yield served
    finally:
        served.close()


def watch(page, host: str) -> list[str]:
    """What the page does and should not; the list grows."""
    wrong: list[str] = []
    page.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    # A test's server may end before its page, which then finds nobody there.
    lost = "Failed to load resource: net::ERR_"
    page.on(
        "console",
        lambda said: (
            wrong.append(f"console: {said.text}") if said.type == "error" and not said.text.startswith(lost) else None
        ),
    )
    page.on("request", lambda asked: wrong.append(f"asked {asked.url}") if outside(asked.url, host) else None)
    page.on("popup", lambda other: wrong.append(f"opened {other.url}"))
    return wrong


def outside(url: str, host: str) -> bool:
    """Whether an address is of another host than the page's own."""
    parts = urlsplit(url)
    return parts.scheme not in ("data", "blob") and parts.netloc != host


def overflow(page) -> int:
    """By how many pixels the page is wider than the window."""
    return page.evaluate("document.documentElement.scrollWidth - window.innerWidth")


def colours(chrome, picture: bytes) -> int:
    """How many different colours a PNG has."""
    import base64

    page = chrome.new_page()
    try:
        return page.evaluate(
            """async (png) => {
              const image = new Image(); image.src = "data:image/png;base64," + png; await image.decode();
              const canvas = new OffscreenCanvas(image.width, image.height); const draw = canvas.getContext("2d");
              draw.drawImage(image, 0, 0);
              const pixels = new Uint32Array(draw.getImageData(0, 0, image.width, image.height).data.buffer);
              return new Set(pixels).size; }""",
            base64.b64encode(picture).decode(),
        )
    finally:
        page.close()


GROW = """
import fcntl, sys
from pathlib import Path
from agentgym.core.trajectory import read_jsonl, write_jsonl
run, source = Path(sys.argv[1]), Path(sys.argv[2])
lock = (run / "lock").open("a")
fcntl.flock(lock, fcntl.LOCK_EX)
for trajectory in read_jsonl(source):
    write_jsonl(run / "episodes" / source.name, [trajectory])
    print(trajectory.task_id, flush=True)
    sys.stdin.readline()
"""


@contextmanager
def writer(run: Path, source: Path):
    """A process that holds a run's lock. Each call of what this yields appends the next really played episode of a file."""
    import subprocess

    process = subprocess.Popen(
        [sys.executable, "-c", GROW, str(run), str(source)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    first = [process.stdout.readline()]

    def more() -> str:
        if first:
            return first.pop().strip()
        process.stdin.write("\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    try:
        yield more
    finally:
        process.kill()
        process.wait(SECONDS)
        process.stdin.close()
        process.stdout.close()


def many(run: Path, count: int, manifest: dict, lines: list[str]) -> Path:
    """A run of `count` episodes: really played ones, again and again with other ids."""
    (run / "episodes").mkdir(parents=True)
    cell = manifest["cells"][0]
    (run / "run.json").write_text(json.dumps({**manifest, "name": run.name, "cells": [cell]}))
    records = [json.loads(line) for line in lines]
    rest = [json.dumps({k: v for k, v in r.items() if k not in ("id", "task_id")})[1:] for r in records]
    with (run / cell["file"]).open("w") as out:
        for i in range(count):
            out.write(f'{{"id": "e{i}", "task_id": "task-{i:05d}", {rest[i % len(rest)]}\n')
    return run
