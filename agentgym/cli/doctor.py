import argparse
import sys
from dataclasses import asdict

from agentgym.cli.output import print_json

_COLOURS = {"ok": "32", "warning": "33", "missing": "2", "broken": "31"}
_EPILOG = """states: ok; warning: it works, but not as it should; missing: optional, and not here; broken: every command needs it,
or one of your settings (AGENTGYM_DATA, AGENTGYM_SANDBOX, DOCKER_HOST) names it, and it cannot be used.
exit code: 1 if something is broken, else 0"""


def add(commands: argparse._SubParsersAction) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check packages, hardware, sandboxes and data on this machine",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.add_argument("--network", action="store_true", help="also contact the Hugging Face hub")
    doctor.add_argument("--json", action="store_true", help="as JSON")
    doctor.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    from agentgym.doctor.finding import examine
    from agentgym.doctor.probes import NETWORK, PROBES

    found = examine([*PROBES, NETWORK] if args.network else PROBES)
    broken = sum(f.state == "broken" for findings in found.values() for f in findings)
    if args.json:
        parts = [{"part": part, **asdict(f)} for part, findings in found.items() for f in findings]
        print_json({"ok": not broken, "findings": parts})
        return int(broken > 0)
    for part, findings in found.items():
        print(part)
        for f in findings:
            state = f"{f.state:<7}"
            if sys.stdout.isatty():
                state = f"\x1b[{_COLOURS[f.state]}m{state}\x1b[0m"
            print(f"  {state}  {f.name}: {f.text}")
            if f.todo:
                print(f"{'':<11}-> {f.todo}")
    print("everything that is needed is here" if not broken else f"{broken} broken", flush=True)
    return int(broken > 0)
