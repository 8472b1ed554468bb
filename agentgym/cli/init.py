import argparse
from pathlib import Path

from agentgym.cli.output import print_json
from agentgym.core.usage_error import UsageError, usage_errors


def add(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("init", help="create a new environment as an installable package")
    add = command.add_argument
    add("name", metavar="NAME", help="name of the package and the environment, such as my_env")
    add("--dir", type=Path, default=Path("."), metavar="DIR", help="parent of the new folder NAME (default: here)")
    kind = command.add_mutually_exclusive_group()
    for name, verb in (("tools", "calls tools"), ("sandbox", "runs commands in a sandbox")):
        about = f"create an environment whose agent {verb}"
        kind.add_argument(f"--{name}", action="store_const", dest="kind", const=name, default="plain", help=about)
    add("--json", action="store_true", help="print the written files as JSON")
    command.set_defaults(run=_init)


def _init(args: argparse.Namespace) -> int:
    from agentgym.scaffold import scaffold

    try:
        with usage_errors(ValueError):
            root, files = scaffold(args.name, args.dir, args.kind)
    except OSError as error:
        raise UsageError(f"{args.dir / args.name}: cannot be made ({error.strerror or error})") from error
    if args.json:
        print_json({"folder": str(root), "files": [str(file.relative_to(root)) for file in files]})
        return 0
    for file in files:
        print(file)
    print(f"\nNext:\n  cd {root}\n  pip install -e '.[dev]'")
    for words in (f"check {args.name}", f"validate {args.name}", f"eval {args.name} --policy expert"):
        print(f"  agentgym {words}")
    print("  python -m pytest")
    return 0
