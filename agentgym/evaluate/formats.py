"""Formats of numbers and names in tables, the live display and the report."""

NOTHING = "-"


def percent(share: float | None) -> str:
    """0.875 as 87.5%."""
    return NOTHING if share is None else f"{share:.1%}"


def percent_range(low: float | None, high: float | None) -> str:
    """0.821 and 0.913 as 82.1-91.3."""
    return NOTHING if low is None or high is None else f"{100 * low:.1f}-{100 * high:.1f}"


def number(value: float | None) -> str:
    """Three significant digits, or the whole part of large numbers: 0.875, 12.5, 1,234, 2.1e+09."""
    if value is None:
        return NOTHING
    if abs(value) >= 1e6 or 0 < abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def half_width(low: float | None, high: float | None) -> str:
    """Half the width of a symmetric interval, as ±0.02; empty if the width is zero or unknown."""
    return "" if low is None or high is None or low == high else f"±{(high - low) / 2:.2g}"


def count(value: float | None) -> str:
    """At most five characters: 999, 1.2k, 34k, 1.2M."""
    if value is None:
        return NOTHING
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            scaled = value / size
            return f"{scaled:.1f}{letter}" if scaled < 9.95 else f"{scaled:.0f}{letter}"
    return f"{value:.0f}"


def money(dollars: float | None) -> str:
    """US dollars: $0.0031, $0.42, $12.50, $1,234."""
    if dollars is None:
        return NOTHING
    if dollars >= 1000:
        return f"${dollars:,.0f}"
    return f"${dollars:.2f}" if dollars >= 0.1 or dollars == 0 else f"${dollars:.2g}"


def duration(seconds: float | None) -> str:
    """4.2 s, 75 s, 12 min, 3.4 h, 2.1 d."""
    if seconds is None:
        return NOTHING
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    for size, name in ((86_400, "d"), (3_600, "h")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def cut(text: str, width: int) -> str:
    """Shorten a name to `width` by cutting its middle, since names differ at their ends."""
    if len(text) <= width:
        return text
    if width < 2:
        return text[:width]
    end = (width - 1) * 2 // 3
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}"


def one_line(text: str) -> str:
    """Untrusted text as one terminal line: control characters are written as escapes."""
    words = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in words)
