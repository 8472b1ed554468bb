import argparse
import sys
from dataclasses import replace
from pathlib import Path

from agentgym.cli.output import print_json
from agentgym.cli.spec_of import ENVS, add_kwargs, spec_of
from agentgym.core.usage_error import UsageError, usage_errors


def add(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("export", help="export an environment for another framework")
    forms = command.add_subparsers(dest="form", required=True, metavar="FORM", parser_class=type(command))
    openenv = forms.add_parser("openenv", help="write a folder that OpenEnv's tools can build, validate and deploy")
    add = openenv.add_argument
    add("env", metavar="ENV", help=ENVS)
    add("--out", type=Path, required=True, metavar="DIR", help="output folder, new or empty")
    add_kwargs(openenv, "keyword arguments of the environment")
    wheel = "a package file that is on no index; repeatable"
    add("--wheel", type=Path, action="append", default=[], metavar="FILE", help=wheel)
    add("--json", action="store_true", help="print the written files as JSON")
    openenv.set_defaults(run=_openenv)


def _openenv(args: argparse.Namespace) -> int:
    from agentgym.service.openenv.export import export_openenv, lacks_agentgym

    spec = spec_of(args.env)
    try:
        with usage_errors(ValueError, TypeError, ImportError, FileExistsError):
            replace(spec, kwargs={**spec.kwargs, **args.kwargs}).make()
            files = export_openenv(spec, args.out, args.kwargs, args.wheel)
    except OSError as error:
        raise UsageError(f"{args.out}: cannot be written ({error.strerror or error})") from error
    if lacks_agentgym(args.wheel):
        why = "agentgym here did not come from a package index, and a container's build would ask one for it"
        print(
            f"agentgym export: {why}: give its wheel too, --wheel FILE (pip wheel --no-deps makes it)", file=sys.stderr
        )
    names = [str(file.relative_to(args.out)) for file in files]
    if args.json:
        print_json({"env": spec.id, "folder": str(args.out), "files": names})
        return 0
    for name in names:
        print(args.out / name)
    print(f"\nNext:\n  openenv validate {args.out}\n  cd {args.out} && python -m server.app")
    return 0
