"""The command `agentgym completion`: a script that makes a shell complete command lines, by argcomplete.

The script runs `agentgym` with the unfinished line in its environment. Metavars say what a value is: ENV is an environment, SPLIT
a split, RUN the folder of a run, DATA a data set, IMAGE an image of sandboxes; FILE, DIR and arguments of type `Path` are files and
folders.
"""

import argparse
import glob
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentgym.cli.shared import print_json, set_run
from agentgym.core.usage_error import UsageError

SHELLS = ("bash", "zsh", "fish")
_RUN_FILES = ("run.json", "config.yaml")  # in the folder of an evaluation, and of a training run
_MOST_RUNS = 200
_ENV_FILES = (".py", ".yaml", ".yml")  # an environment's own file, and a suite's

Words = dict[str, str]  # each with a description, or ""


def add_completion(commands: argparse._SubParsersAction) -> None:
    completion = commands.add_parser(
        "completion",
        help="print a script that completes commands, options, environments and runs in a shell",
        epilog='for example: eval "$(agentgym completion bash)"',
    )
    completion.add_argument("shell", nargs="?", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    set_run(completion, _completion, "the script as JSON")


def _completion(args: argparse.Namespace) -> int:
    if args.shell is None:
        raise UsageError(f"name a shell: {', '.join(SHELLS)}")
    import argcomplete

    script = argcomplete.shellcode(["agentgym"], shell=args.shell)
    if args.json:
        print_json({"shell": args.shell, "script": script})
    else:
        print(script)
    return 0


def answer_shell(parser: argparse.ArgumentParser, **how: Any) -> None:
    """Write the candidates for the line that argcomplete's script has put into the environment, then exit.

    `how` are more arguments of argcomplete's finder.
    """
    from argcomplete.completers import SuppressCompleter
    from argcomplete.finders import ExclusiveCompletionFinder

    _set_completers(parser)
    finder = ExclusiveCompletionFinder()  # offers no option twice, unless it may be repeated
    finder(parser, always_complete_options=False, default_completer=SuppressCompleter(), **how)


def _set_completers(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _set_completers(command)
        elif action.choices is None and action.nargs != 0:
            action.completer = _values  # type: ignore[attr-defined]  # argcomplete's own


def _values(prefix: str, action: argparse.Action, **_: Any) -> Words:
    kind = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if kind in _KINDS:
        return _KINDS[kind](prefix)
    if action.type is Path or kind in ("FILE", "DIR"):
        return _files(prefix, folders_only=kind == "DIR")
    return {}


def _envs(prefix: str) -> Words:
    from agentgym.core.registration import adapters, registry

    ours = {spec.id: spec.description for spec in registry.values()}
    ours |= {f"{name}:": adapter.description for name, adapter in adapters.items()}
    if any(name.startswith(prefix) for name in ours):
        return ours
    return {file: "" for file in _files(prefix) if file.endswith(("/", *_ENV_FILES))}


def _images(prefix: str) -> Words:
    from agentgym.sandbox.images.build import image_names

    return dict.fromkeys(image_names(), "")


def _data(prefix: str) -> Words:
    from agentgym.datasets import data_sets

    return {name: data.items for name, data in data_sets().items()}


def _runs(prefix: str) -> Words:
    """The runs in `runs/`, newest first, then the folders that the word leads to."""
    folders = {file.parent for name in _RUN_FILES for file in Path("runs").glob(f"*/{name}")}
    found = sorted(folders, key=lambda folder: folder.stat().st_mtime, reverse=True)
    known = {str(folder): "run" for folder in found[:_MOST_RUNS]}
    return known | {name: "" for name in _files(prefix) if name.rstrip("/") not in known}


def _files(prefix: str, folders_only: bool = False) -> Words:
    """The files and folders that a word may become. Hidden ones only if the word begins with a dot."""
    above, name = os.path.split(prefix)
    folder = os.path.expanduser(above)
    found = {}
    for entry in sorted(glob.glob(f"{glob.escape(name)}*", root_dir=folder or None)):
        path = os.path.join(above, entry)
        if os.path.isdir(os.path.join(folder, entry)):
            found[f"{path}/"] = ""
        elif not folders_only:
            found[path] = ""
    return found


_KINDS: dict[str, Callable[[str], Words]] = {
    "ENV": _envs,
    "SPLIT": lambda prefix: {"test": "what is evaluated", "train": "what is trained on"},
    "RUN": _runs,
    "DATA": _data,
    "IMAGE": _images,
}
