import argparse
import os.path
import sys
from pathlib import Path

from agentgym.cli.output import print_json, print_table
from agentgym.core.usage_error import UsageError, instead


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("data", help="list and download data sets")
    commands = parser.add_subparsers(dest="what", required=True, metavar="COMMAND", parser_class=type(parser))

    listing = commands.add_parser("list", help="list data sets, and which are on this machine")
    listing.add_argument("--json", action="store_true", help="as JSON")
    listing.set_defaults(run=_list)

    get = commands.add_parser("get", help="fetch data sets from the Hugging Face hub into the data folder")
    get.add_argument("names", nargs="+", metavar="DATA", help="which; `agentgym data list` shows them")
    get.add_argument("--force", action="store_true", help="overwrite existing files")
    get.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds for each part (default: 600)")
    get.add_argument("--json", action="store_true", help="which files were written, as JSON")
    get.set_defaults(run=_get)


def _list(args: argparse.Namespace) -> int:
    from agentgym.datasets import FOLDER_VARIABLE, folder
    from agentgym.datasets.catalogue import data_sets, missing_files

    root, rows = folder(), []
    for data in data_sets().values():
        where = str(Path(root or "", os.path.commonpath(data.files)))
        if missing := len(missing_files(data)):
            parts = "missing" if missing == len(data.files) else f"{missing} of {len(data.files)} files missing"
            where = f"{parts}: {f'agentgym data get {data.name}' if data.parts else f'see {data.source}'}"
        envs = ", ".join(data.envs)
        rows.append({"name": data.name, "items": data.items, "licence": data.licence, "where": where, "envs": envs})
    if args.json:
        print_json(rows)
        return 0
    from rich.table import Table

    table = Table("data", "items", "licence", "where", "environments", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(value or "-" for value in row.values()))
    print(f"data folder: {root or f'none ({FOLDER_VARIABLE} is empty)'}", flush=True)
    print_table(table)
    return 0


def _get(args: argparse.Namespace) -> int:
    from agentgym.datasets.catalogue import DownloadError, data_sets, fetch

    known = data_sets()
    for name in args.names:
        if name not in known:
            raise UsageError(f"no data set {name!r}{instead(name, known)}")
    if not args.timeout > 0:
        raise UsageError(f"--timeout must be positive, not {args.timeout:g}")
    records = []
    for name in args.names:
        written, problem = [], None
        try:
            written = fetch(known[name], force=args.force, seconds=args.timeout)
        except DownloadError as error:
            problem = str(error)
            print(f"agentgym data: {problem}", file=sys.stderr)
        records.append({"name": name, "written": [str(path) for path in written], "error": problem})
        if args.json or problem:
            continue
        for path in written:
            print(f"{name}: {path}, {path.stat().st_size:,} bytes", flush=True)
        if not written:
            print(f"{name}: already there; --force writes it again", flush=True)
    if args.json:
        print_json(records)
    return 1 if any(record["error"] for record in records) else 0
