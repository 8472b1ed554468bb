r"""How often graders of mathematics err on labelled answers: ours, and `math-verify` as shipped.

    python benchmarks/math_graders.py [--wrong PART] [--out FILE.json] [FILE]

FILE has JSON Lines with `gold`, `answer` (a whole reply), `right` and `why`; by default `tests/agentgym_envs/math_answers.jsonl`.
Two thirds of the cases were built on; the third that a hash of the case chooses was not looked at before the rules were done.
`--wrong` prints the cases of a part that ours gets wrong. `math-verify` is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from found import write

from agentgym.tools.text_forms import answer_in
from agentgym_envs.math.symbolic import same_answer

CASES = Path(__file__).parents[1] / "tests" / "agentgym_envs" / "math_answers.jsonl"
PARTS = ("built on", "held out")

Case = dict[str, Any]


def ours(case: Case) -> bool:
    """As `math_python` grades a reply."""
    stated = answer_in(case["answer"], "boxed")
    return stated is not None and not stated.problem and same_answer(case["gold"], stated.text)


def math_verify(case: Case) -> bool:
    """`verify(parse(gold), parse(reply))`, as the package's README shows it."""
    from math_verify import parse, verify

    return bool(verify(parse(f"\\boxed{{{case['gold']}}}"), parse(case["answer"])))


def part_of(case: Case) -> str:
    """Which part a case is in."""
    digest = hashlib.sha256(f"{case['gold']}\n{case['answer']}".encode()).digest()
    return PARTS[digest[0] % 3 == 0]


def errors(cases: list[Case], grade: Callable[[Case], bool]) -> tuple[list[Case], list[Case]]:
    """The wrong answers that a grader takes and the right ones that it refuses."""
    wrong = [case for case in cases if grade(case) != case["right"]]
    return [case for case in wrong if not case["right"]], [case for case in wrong if case["right"]]


def main() -> None:
    """Print a table of errors."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--wrong", choices=PARTS, action="append", default=[], help="print what ours gets wrong")
    options.add_argument("--out", type=Path, help="write the numbers as JSON")
    options.add_argument("file", nargs="?", type=Path, default=CASES)
    chosen = options.parse_args()
    cases = [json.loads(line) for line in chosen.file.read_text(encoding="utf-8").splitlines()]
    graders, rows = [("ours", ours), ("math-verify", math_verify)], []
    print(f"{'grader':12} {'part':9} cases  right  false accepts  false refusals")
    for name, grade in graders:
        for part in PARTS:
            chosen_cases = [case for case in cases if part_of(case) == part]
            try:
                accepts, refusals = errors(chosen_cases, grade)
            except ModuleNotFoundError as error:
                print(f"{name:12} not measured: {error}")
                break
            right = sum(case["right"] for case in chosen_cases)
            wrong = {"false_accepts": len(accepts), "false_refusals": len(refusals)}
            rows.append({"grader": name, "part": part, "cases": len(chosen_cases), "right": right, **wrong})
            print("{:12} {:9} {:5} {:6} {:14} {:15}".format(*rows[-1].values()), flush=True)
            if name == "ours" and part in chosen.wrong:
                for case in accepts + refusals:
                    kind = "refused" if case["right"] else "ACCEPTED"
                    print(f"  {kind}: {case['gold']!r} answered {case['answer']!r}")
    write(chosen.out, rows=rows)


if __name__ == "__main__":
    main()
