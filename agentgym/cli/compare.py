import argparse
import sys
from pathlib import Path

from agentgym.cli.output import print_json, print_table
from agentgym.core.usage_error import UsageError, usage_errors


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "compare",
        help="compare two or more runs, paired by task",
        description="Compare runs with the first, on the tasks that both have: differences with 95% intervals, an exact"
        " sign test, the tasks that changed most. A run is the folder of an evaluation, that of a training run (its last"
        " evaluation), or a file of trajectories.",
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="two or more; the first is the baseline")
    measure = "measure in the table; tokens are those that the agent wrote (default: success)"
    add("--measure", choices=("success", "reward", "turns", "tokens"), default="success", help=measure)
    help_json = "print all measures as JSON: an object, or a list where there are more than two runs"
    add("--json", action="store_true", help=help_json)
    parser.set_defaults(run=_compare)


def _compare(args: argparse.Namespace) -> int:
    from agentgym.evaluate.compare import compare_all, comparison_table

    if len(args.runs) < 2:
        raise UsageError(f"needs at least two runs, got only {args.runs[0]}")
    with usage_errors(ValueError, OSError):
        comparisons = compare_all(args.runs)
    if args.json:
        found = [comparison.to_json() for comparison in comparisons]
        print_json(found[0] if len(found) == 1 else found)
    code = 0
    for position, comparison in enumerate(comparisons):
        if not args.json:
            if position:
                print()
            print_table(comparison_table(comparison, args.measure))
        if not any(cell.measures for cell in comparison.cells):
            print(f"agentgym compare: {comparison.a} and {comparison.b} have no task in common", file=sys.stderr)
            code = 1
    return code
