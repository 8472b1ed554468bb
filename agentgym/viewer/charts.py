"""SVG charts as text: lines with bands, stacked bars, means with intervals. The caller sets the colours, so pages can theme them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

LEFT, RIGHT, TOP, BOTTOM = 58, 14, 34, 42
FEW_POINTS = 60
ROW = 22
# Of the width, for the names of rows; a letter is about seven pixels wide.
NAMES_SHARE = 0.42
LETTER = 7


@dataclass(frozen=True)
class Series:
    """One line: `(x, y)` points in the order of x, and where there is one a band of `(x, low, high)`."""

    name: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True)
class Estimate:
    """A named number with its interval, where it has one."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Palette:
    """Colours, in any form that SVG attributes take. `background` None leaves it to the page."""

    lines: tuple[str, ...]
    text: str
    grid: str
    background: str | None = None


@dataclass(frozen=True)
class Frame:
    """Size in pixels, words and ranges of a chart. A range of None spans 0 and the data; `percent` writes 0.5 as 50%."""

    title: str
    x_label: str = "step"
    y_label: str = ""
    width: int = 560
    height: int = 300
    percent: bool = False
    y_range: tuple[float, float] | None = None
    ticks: int = 5


@dataclass(frozen=True)
class _Scale:
    """From data to pixels. Ticks lie within the ranges, which they may have widened."""

    x: tuple[float, float]
    y: tuple[float, float]
    frame: Frame
    y_ticks: list[float] = field(default_factory=list)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Pixels from the top left."""
        wide, tall = self.frame.width - LEFT - RIGHT, self.frame.height - TOP - BOTTOM
        across = LEFT + wide * (x - self.x[0]) / (self.x[1] - self.x[0])
        return across, TOP + tall * (self.y[1] - y) / (self.y[1] - self.y[0])


def line_chart(series: Sequence[Series], frame: Frame, palette: Palette) -> str:
    """An `<svg>` of lines, with a legend where there are several. Points that are not finite are left out."""
    shown = [Series(s.name, [p for p in s.points if _finite(p)], [b for b in s.band if _finite(b)]) for s in series]
    xs = [x for s in shown for x, _ in s.points]
    ys = [y for s in shown for _, y in s.points] + [y for s in shown for _, low, high in s.band for y in (low, high)]
    scale = _scale(xs, ys, frame)
    body = []
    for i, one in enumerate(shown):
        color = palette.lines[i % len(palette.lines)]
        body += _band(one, scale, color)
        body += _line(one, scale, color)
    return _svg(scale, palette, body, [s.name for s in shown])


def stacked_bars(
    names: Sequence[str], bars: Sequence[tuple[float, Sequence[float]]], frame: Frame, palette: Palette
) -> str:
    """An `<svg>` of one bar for each `(x, values)`, its values (0 or more, one for each name) on top of each other."""
    xs = [x for x, _ in bars]
    steps = [b - a for a, b in pairwise(xs) if b > a]
    gap = min(steps, default=1.0)
    scale = _scale(
        [min(xs, default=0) - gap / 2, max(xs, default=1) + gap / 2], [0.0, *(sum(values) for _, values in bars)], frame
    )
    body = []
    for x, values in bars:
        bottom = 0.0
        for i, (name, value) in enumerate(zip(names, values, strict=True)):
            left, low = scale.at(x - 0.38 * gap, bottom)
            right, high = scale.at(x + 0.38 * gap, bottom + value)
            tip = f"<title>{escape(name)}, {escape(frame.x_label)} {_number(x)}: {value:.3g}</title>"
            color = palette.lines[i % len(palette.lines)]
            body.append(
                f'<rect x="{left:.1f}" y="{high:.1f}" width="{right - left:.2f}" height="{max(low - high, 0):.2f}" fill="{color}">{tip}</rect>'
            )
            bottom += value
    return _svg(scale, palette, body, names)


def interval_chart(estimates: Sequence[Estimate], frame: Frame, palette: Palette) -> str:
    """An `<svg>` of one row for each number: its name, a dot, its interval as a line. Its height follows from the rows.

    Numbers that are not finite are left out; long names lose their middle, and are whole in the tip.
    """
    rows = [e for e in estimates if math.isfinite(e.value)]
    ends = [n for e in rows for n in (e.value, e.low, e.high) if n is not None and math.isfinite(n)]
    low, high = frame.y_range or (min([0.0, *ends]), max(ends, default=1.0))
    ticks = nice_ticks(low, high, frame.ticks)
    left, right = frame.width * NAMES_SHARE, frame.width - RIGHT - 20
    height = TOP + ROW * len(rows) + 30

    def at(value: float) -> float:
        return left + (right - left) * (value - ticks[0]) / (ticks[-1] - ticks[0])

    body = []
    for tick in ticks:
        text = _value_text(tick, frame)
        body.append(f'<path d="M{at(tick):.1f},{TOP}V{height - 30}" stroke="{palette.grid}"/>')
        body.append(
            f'<text x="{at(tick):.1f}" y="{height - 12}" text-anchor="middle" font-size="12" fill="{palette.text}">{text}</text>'
        )
    for i, one in enumerate(rows):
        body += _estimate(one, TOP + ROW * (i + 0.5), at, left - 10, frame, palette)
    return "\n".join([*_opening(frame, height, palette), *body, "</svg>"])


def _estimate(
    one: Estimate, down: float, at: Callable[[float], float], names_end: float, frame: Frame, palette: Palette
) -> list[str]:
    color, letters = palette.lines[0], int(names_end / LETTER)
    name = (
        one.name if len(one.name) <= letters else f"{one.name[: letters // 3]}…{one.name[1 + letters // 3 - letters :]}"
    )
    tip = f"{one.name}: {_value_text(one.value, frame)}"
    line = []
    if one.low is not None and one.high is not None:
        tip += f" ({_value_text(one.low, frame)} to {_value_text(one.high, frame)})"
        line = [
            f'<path d="M{at(one.low):.1f},{down:.1f}H{at(one.high):.1f}" stroke="{color}" stroke-opacity="0.45" stroke-width="5"/>'
        ]
    return [
        f"<g><title>{escape(tip)}</title>",
        f'<text x="{names_end:.0f}" y="{down + 4:.1f}" text-anchor="end" font-size="12" fill="{palette.text}">{escape(name)}</text>',
        *line,
        f'<circle cx="{at(one.value):.1f}" cy="{down:.1f}" r="4" fill="{color}"/></g>',
    ]


def _value_text(value: float, frame: Frame) -> str:
    return f"{100 * value:.4g}%" if frame.percent else _number(float(f"{value:.4g}"))


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers that span low to high, the first at or below it, the last at or above."""
    if not high > low:
        low, high = (low - 0.5, high + 0.5) if low == 0 else (low - abs(low) / 2, high + abs(high) / 2)
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    size = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return [i * size for i in range(first, last + 1)]


def _scale(xs: Sequence[float], ys: Sequence[float], frame: Frame) -> _Scale:
    low, high = frame.y_range or (min(0.0, *ys, 0.0), max(ys, default=1.0))
    ticks = nice_ticks(low, high, frame.ticks)
    x_low, x_high = min(xs, default=0.0), max(xs, default=1.0)
    if x_high <= x_low:
        x_low, x_high = x_low - 0.5, x_high + 0.5
    return _Scale((x_low, x_high), (ticks[0], ticks[-1]), frame, ticks)


def _band(series: Series, scale: _Scale, color: str) -> list[str]:
    if len(series.band) == 1:
        x, low, high = series.band[0]
        (across, bottom), (_, top) = scale.at(x, low), scale.at(x, high)
        return [
            f'<path d="M{across:.1f},{bottom:.1f}V{top:.1f}" stroke="{color}" stroke-opacity="0.35" stroke-width="6"/>'
        ]
    upper = [scale.at(x, high) for x, _, high in series.band]
    lower = [scale.at(x, low) for x, low, _ in reversed(series.band)]
    return [f'<path d="{_path(upper + lower)}Z" fill="{color}" fill-opacity="0.16"/>'] if upper else []


def _line(series: Series, scale: _Scale, color: str) -> list[str]:
    pixels = [scale.at(x, y) for x, y in series.points]
    parts = (
        [f'<path d="{_path(pixels)}" fill="none" stroke="{color}" stroke-width="2" stroke-linejoin="round"/>']
        if len(pixels) > 1
        else []
    )
    radius = 3 if len(pixels) <= FEW_POINTS else 1.2
    for (x, y), (across, down) in zip(series.points, pixels, strict=True):
        value = f"{y:.1%}" if scale.frame.percent else f"{y:.4g}"
        tip = f"<title>{escape(series.name)}, {escape(scale.frame.x_label)} {_number(x)}: {value}</title>"
        parts.append(f'<circle cx="{across:.1f}" cy="{down:.1f}" r="{radius}" fill="{color}">{tip}</circle>')
    return parts


def _path(pixels: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{across:.1f},{down:.1f}" for across, down in pixels)


def _svg(scale: _Scale, palette: Palette, body: Sequence[str], names: Sequence[str]) -> str:
    frame = scale.frame
    words = f'font-size="12" fill="{palette.text}"'
    parts = _opening(frame, frame.height, palette)
    parts += _axes(scale, palette, words)
    parts += body
    parts += _legend(names, frame, palette) if len(names) > 1 else []
    return "\n".join([*parts, "</svg>"])


def _opening(frame: Frame, height: int, palette: Palette) -> list[str]:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {frame.width} {height}" width="{frame.width}" height="{height}" '
        f'role="img" aria-label="{escape(frame.title)}" font-family="system-ui, sans-serif">'
    ]
    if palette.background:
        parts.append(f'<rect width="{frame.width}" height="{height}" fill="{palette.background}"/>')
    parts.append(
        f'<text x="{LEFT}" y="18" font-size="14" font-weight="600" fill="{palette.text}">{escape(frame.title)}</text>'
    )
    return parts


def _axes(scale: _Scale, palette: Palette, words: str) -> list[str]:
    frame, parts = scale.frame, []
    bottom = frame.height - BOTTOM
    for tick in scale.y_ticks:
        _, down = scale.at(scale.x[0], tick)
        text = f"{100 * tick:g}%" if frame.percent else _number(tick)
        parts.append(f'<path d="M{LEFT},{down:.1f}H{frame.width - RIGHT}" stroke="{palette.grid}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{down + 4:.1f}" text-anchor="end" {words}>{text}</text>')
    for tick in nice_ticks(*scale.x, 6):
        if scale.x[0] - 1e-9 <= tick <= scale.x[1] + 1e-9:
            across, _ = scale.at(tick, scale.y[0])
            parts.append(f'<path d="M{across:.1f},{bottom}v4" stroke="{palette.text}"/>')
            parts.append(
                f'<text x="{across:.1f}" y="{bottom + 18}" text-anchor="middle" {words}>{_number(tick)}</text>'
            )
    parts.append(f'<path d="M{LEFT},{bottom}H{frame.width - RIGHT}" stroke="{palette.text}"/>')
    parts.append(
        f'<text x="{(LEFT + frame.width - RIGHT) / 2}" y="{frame.height - 6}" text-anchor="middle" {words}>{escape(frame.x_label)}</text>'
    )
    if frame.y_label:
        middle = (TOP + bottom) / 2
        parts.append(
            f'<text x="14" y="{middle}" transform="rotate(-90 14 {middle})" text-anchor="middle" {words}>{escape(frame.y_label)}</text>'
        )
    return parts


def _legend(names: Sequence[str], frame: Frame, palette: Palette) -> list[str]:
    """One row at the top right, set from the right."""
    parts, right = [], frame.width - RIGHT
    for i, name in reversed(list(enumerate(names))):
        left = right - 7 * len(name)
        color = palette.lines[i % len(palette.lines)]
        parts.append(f'<text x="{left}" y="18" font-size="12" fill="{palette.text}">{escape(name)}</text>')
        parts.append(f'<rect x="{left - 16}" y="9" width="11" height="11" rx="2" fill="{color}"/>')
        right = left - 28
    return parts


def _number(value: float) -> str:
    """A tick's words: 0.25, 1,500, 2e-06."""
    if value == 0:
        return "0"
    return f"{value:,.10g}" if 1e-3 <= abs(value) < 1e6 else f"{value:.3g}"


def _finite(numbers: Sequence[float | None]) -> bool:
    return all(n is not None and math.isfinite(n) for n in numbers)
