from __future__ import annotations

import argparse
import contextlib
import faulthandler
import math
import sys
import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from agentgym.cli.output import print_json
from agentgym.cli.spec_of import ENVS, spec_of
from agentgym.core.usage_error import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentgym.checks.findings import Finding
    from agentgym.core.registration import EnvSpec

_GRACE = 15.0  # seconds, past the timeout, of an interpreter that a call does not let go of


def add(commands: argparse._SubParsersAction) -> None:
    check = commands.add_parser("check", help="check environments before publishing them")
    check.add_argument("envs", nargs="+", metavar="ENV", help=ENVS)
    timeout = "seconds that one call may take (default: 30)"
    check.add_argument("--timeout", type=float, default=30.0, metavar="S", help=timeout)
    check.add_argument("--json", action="store_true", help="the findings as JSON")
    check.set_defaults(run=_check)


def _check(args: argparse.Namespace) -> int:
    if not 0 < args.timeout < math.inf:
        raise UsageError(f"--timeout must be a positive number of seconds, not {args.timeout:g}")
    code, rows = 0, []
    for spec in [spec_of(id) for id in args.envs]:
        started = time.perf_counter()
        found, error = _examined(spec, args.timeout)
        seconds = time.perf_counter() - started
        ok = not error and all(finding.state != "problem" for finding in found)
        row = {"id": spec.id, "ok": ok, "seconds": round(seconds, 2), "checks": [asdict(finding) for finding in found]}
        if error:
            print(f"agentgym check: {spec.id}: {error}", file=sys.stderr)
            row["error"] = error
        elif not args.json:
            print_findings(spec.id, found, seconds)
        rows.append(row)
        code = max(code, 2 if error else int(not ok))
    if args.json:
        print_json(rows)
    return code


def _examined(spec: EnvSpec, timeout: float) -> tuple[list[Finding], str]:
    """The findings, and the user's mistake if the environment cannot be examined here: a missing package, a wrong name."""
    from agentgym.checks.check_env import examine
    from agentgym.checks.findings import Finding
    from agentgym.core.registration import UnknownEnvError
    from agentgym.service.client.address import Unavailable

    # A call may hold the interpreter (a regular expression that never ends does), so that no thread here could say so.
    # Then faulthandler, which needs no interpreter, shows where it is and ends this process with exit code 1.
    on_beat = partial(faulthandler.dump_traceback_later, timeout + _GRACE, exit=True, file=2)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the environment prints is no part of the result
            return examine(spec, timeout=timeout, on_beat=on_beat), ""
    except (ImportError, UnknownEnvError, Unavailable) as error:  # what others have, or it needs, is only seen here
        return [], str(error)
    except (TypeError, ValueError) as error:
        return [Finding("spec", "problem", f"cannot be made: {error}")], ""
    finally:
        faulthandler.cancel_dump_traceback_later()


def print_findings(title: str, found: Sequence[Finding], seconds: float) -> None:
    count = {state: sum(finding.state == state for finding in found) for state in ("problem", "note")}
    parts = [f"{n} {state}{'s' if n > 1 else ''}" for state, n in count.items() if n]
    verdict = ", ".join(parts if count["problem"] else ["ok", *parts])
    checks = len({finding.check for finding in found})
    print(f"{title}: {verdict} ({checks} check{'s' if checks > 1 else ''} in {seconds:.1f} s)")
    width = max((len(finding.check) for finding in found), default=0)
    for finding in found:
        print(f"  {finding.state:<8}{finding.check:<{width}}  {finding}".rstrip())
    sys.stdout.flush()
