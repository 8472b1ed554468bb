from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from agentgym.cli.output import print_json
from agentgym.core.usage_error import UsageError, usage_errors

if TYPE_CHECKING:
    from agentgym.viewer.run import Runs


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "view",
        help="view runs in the browser: curves, comparisons, episodes turn by turn",
        description="Serve a page that shows runs, evaluations and training runs, until Ctrl-C; to this machine only, and"
        " nothing is sent anywhere. With --export, write the page and the runs into one HTML file.",
    )
    add = parser.add_argument
    paths = "run folders, or folders of runs (default: runs)"
    add("paths", nargs="*", type=Path, default=[Path("runs")], metavar="DIR", help=paths)
    add("--port", type=int, default=0, help="port of the page (default: a free one)")
    add("--host", default="127.0.0.1", help="address to listen on; other machines need the token in the printed URL")
    add("--no-open", action="store_true", help="do not open the browser")
    add("--export", type=Path, metavar="FILE", help="write one static HTML file and exit")
    episodes = "episodes of each run in the exported file (default: 200)"
    add("--episodes", type=int, default=200, metavar="N", help=episodes)
    add("--json", action="store_true", help="print the page's address, or what was exported, as JSON")
    parser.set_defaults(run=_view)


def _view(args: argparse.Namespace) -> int:
    from agentgym.viewer.run import Runs, roots_of

    if not 0 <= args.port <= 65535:
        raise UsageError(f"--port is from 0 (a free one) to 65535, not {args.port}")
    runs = Runs(roots_of(args.paths))
    if args.export:
        return _export(args, runs)
    count = len(runs.look())
    if not count:
        names = ", ".join(map(str, args.paths))
        print(f"agentgym view: no runs in {names} yet; the page shows them as they come", file=sys.stderr)
    return _serve(args, runs, count)


def _export(args: argparse.Namespace, runs: Runs) -> int:
    from agentgym.viewer.export import export

    if args.episodes < 0:
        raise UsageError(f"--episodes is at least 0, not {args.episodes}")
    try:
        with usage_errors(ValueError):
            exported = export(runs, args.export, args.episodes)
    except OSError as error:
        raise UsageError(f"--export {args.export}: cannot be written ({error.strerror or error})") from error
    if args.json:
        print_json({**vars(exported), "path": str(exported.path)})
    else:
        what = f"{_many(exported.runs, 'run')}, {_many(exported.episodes, 'episode')}"
        print(f"{exported.path}: {what}, {exported.bytes / 1e6:.1f} MB")
        if exported.note:
            print(f"agentgym view: {exported.note}", file=sys.stderr)
    return 0


def _serve(args: argparse.Namespace, runs: Runs, count: int) -> int:
    import asyncio
    import signal

    async def serving() -> None:
        from agentgym.hosts import LOCAL_HOSTS
        from agentgym.viewer.server import serve

        ended = asyncio.Event()
        for how in (signal.SIGINT, signal.SIGTERM):  # before the address is printed, so that Ctrl-C works from then on
            asyncio.get_running_loop().add_signal_handler(how, ended.set)
        try:
            served = await serve(runs, args.host, args.port)
        except OSError as error:
            raise UsageError(f"cannot listen at {args.host}, port {args.port}: {error.strerror or error}") from error
        try:
            if args.json:
                print_json({"url": served.url, "port": served.port, "runs": count})
            else:
                print(f"{_many(count, 'run')} at {served.url} (Ctrl-C ends it)", flush=True)
            if args.host not in LOCAL_HOSTS:
                risk = "anyone with this address can read these runs; the connection is not encrypted"
                print(f"agentgym view: {risk}", file=sys.stderr)
            if not args.no_open and not args.json:
                await asyncio.to_thread(_open, served.url)
            await ended.wait()
        finally:
            await served.close()

    asyncio.run(serving())
    return 0


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _open(url: str) -> None:
    """Open the browser if this machine has a display."""
    import webbrowser

    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return
    webbrowser.open(url)
