"""The page about a run, and the record of its result. Both are made from what the run left in its folder.

python -m agent_train.report runs/NAME                     write runs/NAME/report.html again
python -m agent_train.report --curves OUT.svg RECORD ...   one picture of several result records
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from agent_train.report.metrics_file import broken_lines, read_metrics
from agent_train.trainer.offline.metrics import HELD_OUT, KINDS
from agent_train.trainer.run_folder import RunFolder
from agentgym.core.trajectory import read_jsonl
from agentgym.evaluate.formats import number, percent
from agentgym.storage.files import write_json, write_text
from agentgym.viewer.charts import Frame, Series, line_chart, stacked_bars
from agentgym.viewer.page import PAGE, PRINT, Decode, card, document, episodes_html, examples, folded, table
from agentgym.viewer.token_texts import token_decoder

RESULT_KEYS = ("env", "seed", "start", "end", "minutes", "curve", "command")

Record = dict[str, Any]


def write_report(run_folder: RunFolder | Path | str) -> Path:
    """Write `report.html`: one file that needs no other and no network.

    What a crash has left of a line of metrics or trajectories is named on the page and left out.

    Raises:
        FileNotFoundError: the run has no metrics.jsonl.
    """
    run = run_folder if isinstance(run_folder, RunFolder) else RunFolder(Path(run_folder))
    records = read_metrics(run.metrics)
    parts = [
        _left_out(run),
        _headline(records),
        f'<section class="charts">{"".join(f"<figure>{svg}</figure>" for svg in _charts(records))}</section>',
        _evaluations(records),
        _episodes(run),
        _settings(run),
    ]
    write_text(run.report, document(run.path.absolute().name, "agentgym run", parts))
    return run.report


def write_result(
    path: str | Path,
    *,
    env: str,
    seed: int,
    start: float,
    end: float,
    minutes: float,
    curve: Sequence[tuple[int, float]],
    command: str,
    details: Mapping[str, Any] | None = None,
) -> None:
    """Write the JSON record of a result.

    Args:
        path: the file; its folder is made.
        env: id of the environment.
        seed: `trainer.seed`.
        start: held-out success before training, 0 to 1; `end`: after it.
        minutes: wall time of the run.
        curve: `(step, held-out success)` of every evaluation.
        command: what was run.
        details: anything else that a reader may want: machine, versions, model.
    """
    record: Record = {
        "env": env,
        "seed": seed,
        "start": round(start, 4),
        "end": round(end, 4),
        "minutes": round(minutes, 2),
        "curve": [[step, round(success, 4)] for step, success in curve],
        "command": command,
    }
    if details:
        record["details"] = dict(details)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_json(Path(path), record)


def read_result(path: str | Path) -> Record:
    """A record that `write_result` wrote.

    Raises:
        ValueError: it is no JSON or lacks a key; the message names the file and the key.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not a result: {error}") from error
    missing = [key for key in RESULT_KEYS if not isinstance(record, dict) or key not in record]
    if missing:
        raise ValueError(f"{path}: not a result: no {missing[0]!r}")
    return record


def draw_curves(records: Sequence[Record], path: str | Path, title: str | None = None) -> None:
    """One SVG with the curve of every record, on a light background.

    Args:
        records: as `read_result` gives them.
        path: the file; its folder is made.
        title: default: the environments' names.
    """
    envs = sorted({record["env"] for record in records})
    series = [
        Series(
            f"seed {record['seed']}" if len(envs) == 1 else f"{record['env']} {record['seed']}",
            [(step, success) for step, success in record["curve"]],
        )
        for record in records
    ]
    frame = Frame(
        title or ", ".join(envs),
        "training step",
        "held-out success",
        width=760,
        height=420,
        percent=True,
        y_range=(0, 1),
    )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_text(Path(path), line_chart(series, frame, PRINT) + "\n")


def _of_kind(records: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def _left_out(run: RunFolder) -> str:
    """The number of lines of the metrics that are no records."""
    if not (broken := broken_lines(run.metrics)):
        return ""
    lines = f"{len(broken)} line{'s' * (len(broken) > 1)} of {run.metrics.name}"
    return f'<p class="note">{lines} cannot be read and are left out; the first is line {broken[0]}.</p>'


def _headline(records: Sequence[Record]) -> str:
    evals, steps = _of_kind(records, "eval"), _of_kind(records, "train")
    measured = [e for e in evals if e["success"] is not None]
    cards: list[tuple[str, str, str]] = []
    if measured:
        best = max(measured, key=lambda e: e["success"])
        cards += [
            ("held-out, start", percent(measured[0]["success"]), _interval(measured[0])),
            ("held-out, end", percent(measured[-1]["success"]), _interval(measured[-1])),
            ("held-out, best", percent(best["success"]), f"after step {best['step']}"),
        ]
    cards += _file_cards(records)
    cards.append(
        (
            "time",
            f"{max((r['elapsed'] for r in records), default=0) / 60:.1f} min",
            f"{len(steps)} steps" if steps else "",
        )
    )
    if steps:
        tokens = sum(s["sampled_tokens"] for s in steps)
        seconds = sum(s["rollout_seconds"] for s in steps)
        failed, retried = (sum(s.get(key, 0) for s in steps) for key in ("failed", "retried"))
        again = f", {retried:,} run again" if retried else ""
        gap = [value for _, value in _points_of(steps, "update", "gap_mean")]
        cards += [
            ("training episodes", f"{sum(s['episodes'] for s in steps):,}", f"{failed:,} failed and left out{again}"),
            ("sampled tokens", f"{tokens:,}", f"{tokens / seconds:,.0f} a second" if seconds else ""),
            ("engine gap", f"{max(gap, default=0):.1e}", "largest step mean, nats a token"),
        ]
    return f'<section class="cards">{"".join(card(*one) for one in cards)}</section>'


def _charts(records: Sequence[Record]) -> list[str]:
    evals, steps = (_of_kind(records, kind) for kind in ("eval", "train"))
    sft = [record for record in _of_kind(records, "sft") if "epoch" not in record]
    charts = _file_charts(records)
    if evals:
        held_out = Series(
            "held-out",
            _points(evals, "success"),
            [(e["step"], e["low"], e["high"]) for e in evals if e["success"] is not None],
        )
        lines = [held_out, Series("training episodes", _points(steps, "success"))] if steps else [held_out]
        charts.append(line_chart(lines, Frame("Success (band: 95% interval)", percent=True, y_range=(0, 1)), PAGE))
    if steps:
        charts.append(line_chart([Series("reward", _points(steps, "reward"))], Frame("Training reward"), PAGE))
        for title, key in (
            ("Engine / trainer gap, nats a token", "gap_mean"),
            ("Entropy, nats a token", "entropy"),
            ("Gradient norm", "grad_norm"),
        ):
            charts.append(line_chart([Series(key, _points_of(steps, "update", key))], Frame(title), PAGE))
        parts = ("rollout", "score", "learn", "sync")
        bars = [(s["step"], [s.get(f"{part}_seconds", 0.0) for part in parts]) for s in steps]
        charts.append(stacked_bars(parts, bars, Frame("Seconds a step"), PAGE))
        shares = [
            Series("groups that differ", _points(steps, "mixed_groups")),
            Series("truncated", _points(steps, "truncated")),
        ]
        charts.append(line_chart(shares, Frame("Shares", percent=True, y_range=(0, 1)), PAGE))
        charts += _charts_of_learning(steps)
    if sft:
        charts.append(
            line_chart(
                [Series("loss", _points(sft, "loss"))], Frame("Warm start: loss, nats a token", "optimizer step"), PAGE
            )
        )
    return charts


def _charts_of_learning(steps: Sequence[Record]) -> list[str]:
    """Signs of a collapse, and what a run has that not every run has: roles, filters, a KL."""
    charts = []
    for title, part, keys in (
        ("Sampled tokens of an episode", "health", ("length", "length_max")),
        ("Spread of rewards inside a group", "health", ("reward_spread",)),
        ("Repeated n-grams, equal episodes", "health", ("repetition", "same")),
        ("Critic: explained variance", "critic", ("explained_variance",)),
        ("Process reward model: accuracy", "prm", ("accuracy",)),
        ("KL to the reference, nats a token", "update", ("kl_reference",)),
        ("Versions behind", "update", ("staleness", "staleness_max")),
        ("Groups and episodes left out", "selection", ("dropped_groups", "dropped")),
    ):
        lines = [Series(key, _points_of(steps, part, key)) for key in keys]
        if any(value for line in lines for _, value in line.points):
            charts.append(line_chart(lines, Frame(title), PAGE))
    return charts


def _points(records: Sequence[Record], key: str) -> list[tuple[float, float]]:
    return [(r["step"], r[key]) for r in records if r[key] is not None]


def _points_of(records: Sequence[Record], part: str, key: str) -> list[tuple[float, float]]:
    """A number out of a part of the records; those that lack it, or hold null, are left out."""
    found = [(record["step"], (record.get(part) or {}).get(key)) for record in records]
    return [(step, value) for step, value in found if value is not None]


def _evaluations(records: Sequence[Record]) -> str:
    headings = ("step", "success", "95% interval", "reward", "turns", "episodes", "failed")
    rows = [
        [
            str(e["step"]),
            percent(e["success"]),
            _interval(e),
            number(e["reward"]),
            number(e["turns"]),
            str(e["episodes"]),
            str(e["failed"]),
        ]
        for e in _of_kind(records, "eval")
    ]
    return f"<section><h2>Held-out evaluations</h2>{table(headings, rows)}</section>" if rows else ""


def _settings(run: RunFolder) -> str:
    files = (("Settings", run.config), ("Versions and command", run.versions))
    parts = [folded(name, path.read_text(encoding="utf-8", errors="replace")) for name, path in files if path.is_file()]
    return f"<section><h2>Settings</h2>{''.join(parts)}</section>" if parts else ""


def _interval(record: Record) -> str:
    return f"{percent(record['low'])} to {percent(record['high'])}"


def main(argv: Sequence[str] | None = None) -> int:
    """Write a report or a picture again. Exit code 2 where the files are not there or broken."""
    parser = argparse.ArgumentParser(
        "python -m agent_train.report", description="Make a run's report, or a picture of results, again."
    )
    parser.add_argument("--curves", metavar="OUT.svg", help="draw the curves of result records instead")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a run folder, or with --curves result records")
    arguments = parser.parse_args(argv)
    try:
        if arguments.curves:
            draw_curves([read_result(path) for path in arguments.paths], arguments.curves)
            written = [Path(arguments.curves)]
        else:
            written = [write_report(path) for path in arguments.paths]
    except (OSError, ValueError) as error:
        sys.stderr.write(f"agent_train.report: error: {error}\n")
        return 2
    sys.stdout.write("".join(f"{path}\n" for path in written))
    return 0


# Title, fields, whether they are shares.
FILE_CURVES = (
    ("Loss", ("loss",), False),
    ("Accuracy", ("accuracy",), True),
    ("Rewards or scores of the answers", ("chosen", "rejected"), False),
    ("Gradient norm", ("grad_norm",), False),
)


def _file_steps(records: Sequence[Record]) -> list[Record]:
    """The optimizer steps of a mode that learns from files. Those of a warm start are none: they have no epoch."""
    return [record for record in records if record["kind"] in KINDS.values() and "epoch" in record]


def _file_cards(records: Sequence[Record]) -> list[tuple[str, str, str]]:
    """Title, number and remark of each number at the top of the page."""
    steps = _file_steps(records)
    held_out = [record for record in records if record["kind"] == HELD_OUT and record["loss"] is not None]
    found = []
    for name, one in (("start", held_out[0]), ("end", held_out[-1])) if held_out else ():
        right = (
            f"accuracy {one['accuracy']:.1%}" if one.get("accuracy") is not None else f"{one['examples']:,} examples"
        )
        found.append((f"held-out loss, {name}", f"{one['loss']:.4f}", right))
    if steps:
        skipped = sum(step["skipped"] for step in steps)
        remark = f"{skipped:,} of them skipped" if skipped else f"{steps[-1]['epoch']} epochs"
        found.append(("optimizer steps", f"{len(steps):,}", remark))
        found.append(("learned tokens", f"{sum(step['tokens'] for step in steps):,}", ""))
    return found


def _file_charts(records: Sequence[Record]) -> list[str]:
    """A curve for each number that the run has, with the held-out examples beside the batches."""
    steps, held_out = _file_steps(records), [record for record in records if record["kind"] == HELD_OUT]
    found = []
    for title, keys, share in FILE_CURVES if steps else ():
        lines = [
            Series(f"{key}{suffix}", points)
            for key in keys
            for suffix, part in (("", steps), (", held out", held_out))
            if (points := [(r["step"], r[key]) for r in part if r.get(key) is not None])
        ]
        frame = (
            Frame(title, "optimizer step", percent=True, y_range=(0, 1)) if share else Frame(title, "optimizer step")
        )
        if lines:
            found.append(line_chart(lines, frame, PAGE))
    return found


def _episodes(run: RunFolder) -> str:
    """Episodes of the first and the last step: held-out ones where there are any, else of training."""
    files = sorted(run.trajectories.glob("eval-*.jsonl")) or sorted(run.trajectories.glob("train-*.jsonl"))
    if not files:
        return ""
    decode = token_decoder(run.path.resolve())
    parts = [_file_html(path, decode) for path in dict.fromkeys((files[0], files[-1]))]
    shading = '<p class="note">The darker a token, the less likely the policy was to say it.</p>' if decode else ""
    return f"<section><h2>Episodes</h2>{shading}{''.join(parts)}</section>"


def _file_html(path: Path, decode: Decode | None) -> str:
    kind, _, step = path.stem.partition("-")
    where = "held-out tasks" if kind == "eval" else "training"
    when = (
        "before training"
        if kind == "eval" and int(step) == 0
        else f"after step {int(step)}"
        if kind == "eval"
        else f"step {int(step)}"
    )
    try:
        shown = episodes_html(examples(read_jsonl(path)), decode)
    except ValueError as error:  # a crash has left half of a line
        shown = f'<p class="note">{escape(str(error))}</p>'
    return f"<h3>{where}, {when}</h3>{shown}"
