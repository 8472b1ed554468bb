"""Write reports and pictures again.

python -m agent_train.report runs/NAME                     write runs/NAME/report.html again
python -m agent_train.report --curves OUT.svg RECORD ...   one picture of several result records
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from agent_train.report.curves import draw_curves, read_result
from agentgym.viewer.export import write_report


def main(argv: Sequence[str] | None = None) -> int:
    about = "Make a run's report, or a picture of results, again."
    parser = argparse.ArgumentParser("python -m agent_train.report", description=about)
    parser.add_argument("--curves", metavar="OUT.svg", type=Path, help="draw the curves of result records instead")
    paths = "run folders, or with --curves result records"
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help=paths)
    arguments = parser.parse_args(argv)
    try:
        if arguments.curves:
            draw_curves([read_result(path) for path in arguments.paths], arguments.curves)
            written = [arguments.curves]
        else:
            written = [write_report(path, "training") for path in arguments.paths]
    except (OSError, ValueError) as error:
        sys.stderr.write(f"agent_train.report: error: {error}\n")
        return 2
    sys.stdout.write("".join(f"{path}\n" for path in written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
