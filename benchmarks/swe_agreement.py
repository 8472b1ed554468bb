"""Do grades of swe_bench mean what they should, and does SWE-bench's own package say the same of the same logs?

Of every instance of a file that can be rebuilt: its gold patch must grade 1, the empty patch 0, a patch that only edits tests 0,
and the gold patch played through the tools of the environment 1. Each log is given to SWE-bench's package (version 5, where
`make setup` puts it) too, and both verdicts are compared test by test. The result is a file with a JSON line for each instance,
to which a second start adds those that are missing, and a table.

python benchmarks/swe_agreement.py FILE.jsonl [--only ID ...] [--sandbox NAME] [--out FILE.jsonl] [--table FILE.md]
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from agentgym.core.registration import registry, spec
from agentgym.policies import ExpertPolicy
from agentgym.rollout.episode import run_episode
from agentgym_envs.swe_bench.grading import Grade, grade
from agentgym_envs.swe_bench.images import build, image_of
from agentgym_envs.swe_bench.instances import Instance, read_instances
from agentgym_envs.swe_bench.logs import END, START
from agentgym_envs.swe_bench.releases import without_absent

WANTED = {"gold": True, "empty": False, "tests only": False, "gold through the tools": True}


def their_grading() -> ModuleType:
    """SWE-bench's module. Its outer packages stay empty: they import what is not installed, such as Modal's client."""
    root = Path(sys.prefix, "swebench", "5")
    if not root.is_dir():
        raise SystemExit(f"{root} is missing: run make setup")
    sys.path.append(str(root))
    for name in ("swebench", "swebench.harness"):
        package = ModuleType(name)
        package.__path__ = [str(Path(root, *name.split(".")))]
        sys.modules[name] = package
    return importlib.import_module("swebench.harness.grading")


def their_verdict(module: ModuleType, instance: Instance, patch: str, log: str) -> dict[str, Any]:
    """Whether they call the instance resolved, and the tests that they call good; of those that its release has, as ours."""
    instance = without_absent(instance)
    parser = f"parse_log_{instance.repo.partition('/')[2].replace('-', '_')}"
    told = SimpleNamespace(log_parser=parser, eval_type="pass_and_fail", instance_id=instance.id)
    told.FAIL_TO_PASS, told.PASS_TO_PASS = list(instance.fail_to_pass), list(instance.pass_to_pass)
    prediction = {"instance_id": instance.id, "model_patch": patch or "none"}  # of an empty one it reads no log
    with tempfile.NamedTemporaryFile("w", suffix=".log", errors="replace") as file:
        file.write(f"+ : '{START}'\n{log}\n+ : '{END}'\n")
        file.flush()
        report = module.get_eval_report(told, prediction, file.name, include_tests_status=True)[instance.id]
    kinds = report.get("tests_status", {})
    good = [name for kind in ("FAIL_TO_PASS", "PASS_TO_PASS") for name in kinds.get(kind, {}).get("success", [])]
    return {"resolved": bool(report["resolved"]), "good": sorted(good)}


def compared(module: ModuleType, instance: Instance, patch: str, found: Grade) -> dict[str, Any]:
    ours = sorted(test.name for test in found.verdict.tests if test.good) if found.verdict else []
    row: dict[str, Any] = {"resolved": found.resolved, "patch": found.patch, "seconds": round(found.seconds, 1)}
    known = without_absent(instance)
    row["tests"] = {"required": len(known.fail_to_pass) + len(known.pass_to_pass), "good": len(ours)}
    if found.verdict and not found.resolved:
        row["not good"] = [[test.name, test.status] for test in found.verdict.tests if not test.good][:5]
    if found.failure or (found.verdict and found.verdict.doubt):
        row["why"] = found.failure or (found.verdict.doubt if found.verdict else "")
    if found.log:
        theirs = their_verdict(module, instance, patch, found.log)
        row |= {"swebench": theirs["resolved"], "same_tests": theirs["good"] == ours}
    return row


def through_the_tools(instance: Instance, file: Path, sandbox: str | None) -> dict[str, Any]:
    """An episode of the expert, who applies the gold patch by the tools."""
    known = spec("swe_bench")
    known = replace(known, kwargs={**known.kwargs, "data": str(file), "sandbox": sandbox})
    task = next(task for task in known.tasks("all") if task.id == instance.id)
    played = asyncio.run(run_episode(known.make(), ExpertPolicy(), task=task))
    if played.failed:
        raise RuntimeError(played.error)
    info = played.turns[-1].info
    return {"resolved": bool(played.success), "exit": info.get("exit"), "seconds": round(played.seconds, 1)}


def measured(module: ModuleType, instance: Instance, file: Path, sandbox: str | None) -> dict[str, Any]:
    """All grades of one instance; an error of the machinery is told as such."""
    row: dict[str, Any] = {"instance": instance.id, "errors": {}}
    patches = {"gold": instance.patch, "empty": "", "tests only": instance.test_patch}
    for name, patch in patches.items():
        try:
            row[name] = compared(module, instance, patch, grade(instance, patch, sandbox=sandbox))
        except Exception as error:
            row["errors"][name] = f"{type(error).__name__}: {error}"[:500]
    if "swe_bench" in registry:
        try:
            row["gold through the tools"] = through_the_tools(instance, file, sandbox)
        except Exception as error:
            row["errors"]["gold through the tools"] = f"{type(error).__name__}: {error}"[:500]
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table: a line for each instance, and one of sums."""
    names = [name for name in WANTED if any(name in row for row in rows)]
    lines = [
        f"| instance | {' | '.join(names)} | tests | swebench says the same | s |",
        f"|---|{'---|' * (len(names) + 3)}",
    ]
    sums: Counter[str] = Counter()
    for row in sorted(rows, key=lambda row: row["instance"]):
        cells = []
        for name in names:
            found = row.get(name)
            cells.append("error" if name in row["errors"] else "" if found is None else str(int(found["resolved"])))
            sums[name] += found is not None and found["resolved"] == WANTED[name]
        judged = [row[name] for name in names if "swebench" in row.get(name, {})]
        same = sum(one["swebench"] == one["resolved"] and one["same_tests"] for one in judged)
        sums |= Counter({"judged": 0})
        sums["judged"] += len(judged)
        sums["same"] += same
        tests = row.get("gold", {}).get("tests", {}).get("required", "")
        seconds = row.get("gold", {}).get("seconds", "")
        lines.append(f"| {row['instance']} | {' | '.join(cells)} | {tests} | {same} of {len(judged)} | {seconds} |")
    totals = [f"{sums[name]} of {sum(name in row or name in row['errors'] for row in rows)} right" for name in names]
    lines.append(f"| {len(rows)} instances | {' | '.join(totals)} | | {sums['same']} of {sums['judged']} | |")
    runs, errors = (
        sum(name in row or name in row["errors"] for row in rows for name in names),
        sum(len(row["errors"]) for row in rows),
    )
    return "\n".join(lines) + f"\n\n{errors} of {runs} runs ended in an error of the machinery.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="instances, as `agentgym sandbox build swe --instances` takes")
    parser.add_argument("--only", nargs="*", default=[], metavar="ID", help="these instances")
    parser.add_argument("--sandbox", help="back end (default: what the machine has)")
    parser.add_argument("--out", type=Path, default=Path("swe_agreement.jsonl"), help="a line for each instance")
    parser.add_argument("--table", type=Path, help="write the table here too")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no instance after so long")
    args = parser.parse_args()
    verified = {json.loads(line)["instance_id"] for line in args.file.open() if '"rebuild_verified": true' in line}
    instances = [one for one in read_instances(args.file) if one.id in (args.only or verified or {one.id})]
    rows = [json.loads(line) for line in args.out.open()] if args.out.exists() else []
    done = {row["instance"] for row in rows}
    module, began = their_grading(), time.monotonic()
    for instance in instances:
        if instance.id in done or time.monotonic() - began > args.seconds:
            continue
        start = time.monotonic()
        [image] = build([instance], docker=args.sandbox == "docker")
        if image.error:
            row: dict[str, Any] = {"instance": instance.id, "errors": {"image": image.error[:500]}}
        else:
            row = measured(module, instance, args.file, args.sandbox)
            row |= {"image": Path(image_of(instance)).name, "image_bytes": image.built.bytes if image.built else 0}
        row["seconds"] = round(time.monotonic() - start, 1)
        rows.append(row)
        with args.out.open("a") as out:
            out.write(json.dumps(row) + "\n")
        print(
            {name: row.get(name, {}).get("resolved") for name in WANTED},
            instance.id,
            row["seconds"],
            row["errors"],
            flush=True,
        )
    text = table(rows)
    print(text)
    if args.table:
        args.table.write_text(text)


if __name__ == "__main__":
    main()
