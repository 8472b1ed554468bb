"""Records of results, and one SVG with the curves of several: success by training step."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from agent_train.report.metrics import Summary
from agentgym.storage.files import write_json, write_text

RESULT_KEYS = ("env", "seed", "start", "end", "minutes", "curve", "command")
WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 34, 42
LEGEND_ROW = 18
COLORS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#0891b2", "#db2777", "#ca8a04", "#475569")
TEXT, GRID, BACKGROUND = "#1f2937", "#e5e7eb", "#ffffff"

Record = dict[str, Any]


def write_result(path: Path, env: str, seed: int, summary: Summary, command: str) -> None:
    """Write the JSON record of a run that was evaluated; the folder of `path` is made."""
    curve = [[step, round(success, 4)] for step, success in summary.curve]
    numbers = (env, seed, curve[0][1], curve[-1][1], round(summary.minutes, 2), curve, command)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, dict(zip(RESULT_KEYS, numbers, strict=True)))


def read_result(path: str | Path) -> Record:
    """A record that `write_result` wrote. ValueError if it is no JSON or lacks a key; it names the file and the key."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not a result: {error}") from error
    missing = [key for key in RESULT_KEYS if not isinstance(record, dict) or key not in record]
    if missing:
        raise ValueError(f"{path}: not a result: no {missing[0]!r}")
    return record


def draw_curves(records: Sequence[Record], path: str | Path) -> None:
    """One SVG file with the curve of every record that `read_result` gives."""
    envs = sorted({record["env"] for record in records})
    name = "seed {seed}" if len(envs) == 1 else "{env} {seed}"
    series = [Series(name.format(**record), record["curve"]) for record in records]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_text(Path(path), curves_svg(series, ", ".join(envs)))


@dataclass(frozen=True)
class Series:
    """One line: `(step, success)` in the order of steps, and where there is one a band of `(step, low, high)`."""

    name: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()


def curves_svg(series: Sequence[Series], title: str, across: str = "training step") -> str:
    """An `<svg>` of lines with axes and a legend, on a light background. Points that are not finite are left out."""
    steps = [step for one in series for step, value in one.points if math.isfinite(value)] or [0.0, 1.0]
    first, last = (min(steps), max(steps)) if max(steps) > min(steps) else (steps[0] - 0.5, steps[0] + 0.5)

    def at(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / (last - first)
        return x, TOP + (HEIGHT - TOP - BOTTOM) * (1 - value)

    def path(points: Sequence[tuple[float, float]]) -> str:
        return "M" + "L".join("{:.1f},{:.1f}".format(*at(*point)) for point in points)

    names = [escape(one.name) for one in series]
    places, lower = _legend([one.name for one in series], title)
    height = HEIGHT + lower
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="12" fill="{TEXT}">',
        f'<rect width="{WIDTH}" height="{height}" fill="{BACKGROUND}"/>',
        f'<text x="{LEFT}" y="18" font-size="14" font-weight="600">{escape(title)}</text>',
        f'<g transform="translate(0 {lower})">',
        *_axes([(at(tick, 0)[0], tick) for tick in nice_ticks(first, last, 6) if first <= tick <= last], across),
    ]
    colors = [COLORS[i % len(COLORS)] for i in range(len(series))]
    for name, one, color in reversed(list(zip(names, series, colors, strict=True))):
        points = [point for point in one.points if math.isfinite(point[1])]
        whole = [edges for edges in one.band if all(map(math.isfinite, edges))]
        band = [(s, low) for s, low, _ in whole] + [(s, high) for s, _, high in reversed(whole)]
        if band:
            parts.append(f'<path d="{path(band)}Z" fill="{color}" fill-opacity="0.16"/>')
        if points:
            parts.append(f'<path d="{path(points)}" fill="none" stroke="{color}" stroke-width="2"/>')
        for step, value in points:
            (x, y), tip = at(step, value), f"{name}, {across} {step:g}: {value:.1%}"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"><title>{tip}</title></circle>')
    parts.append("</g>")
    for name, color, (left, row) in zip(names, colors, places, strict=True):
        parts.append(f'<rect x="{left}" y="{row - 9}" width="11" height="11" rx="2" fill="{color}"/>')
        parts.append(f'<text x="{left + 16}" y="{row}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _legend(names: Sequence[str], title: str) -> tuple[list[tuple[int, int]], int]:
    """Left edge and base line of each name, and by how much the plot moves down for them.

    They stand beside the title, or in rows below it if they do not fit there.
    """
    widths, right = [28 + 7 * len(name) for name in names], WIDTH - RIGHT
    left, row = right - sum(widths), 18
    beside = left >= LEFT + 8 * len(title)
    if not beside:
        left, row = LEFT, row + LEGEND_ROW
    places = []
    for width in widths:
        if left + width > right + 12 and left > LEFT:  # of the width, 12 are the gap to the next name
            left, row = LEFT, row + LEGEND_ROW
        places.append((left, row))
        left += width
    return places, row - 18


def _axes(ticks: Sequence[tuple[float, float]], name: str) -> list[str]:
    bottom, middle = HEIGHT - BOTTOM, (TOP + HEIGHT - BOTTOM) / 2
    parts = []
    for percent in range(0, 101, 20):
        y = bottom - (bottom - TOP) * percent / 100
        parts.append(f'<path d="M{LEFT},{y:.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{percent}%</text>')
    for x, tick in ticks:
        parts.append(f'<path d="M{x:.1f},{bottom}v4" stroke="{TEXT}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:,g}</text>')
    turned = f'x="14" y="{middle}" transform="rotate(-90 14 {middle})" text-anchor="middle"'
    across = f'x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle"'
    parts.append(f'<path d="M{LEFT},{bottom}H{WIDTH - RIGHT}" stroke="{TEXT}"/>')
    return [*parts, f"<text {across}>{name}</text>", f"<text {turned}>held-out success</text>"]


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers that span low to high, which is above it."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    size = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    return [i * size for i in range(math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9) + 1)]
