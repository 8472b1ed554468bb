"""The page of all reports: one HTML file that contacts no host, in light and dark, on wide and narrow screens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from agentgym.viewer.charts import Palette

COLORS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#0891b2", "#db2777")
PAGE = Palette(tuple(f"var(--c{i})" for i in range(len(COLORS))), text="var(--text)", grid="var(--grid)")
PRINT = Palette(COLORS, text="#1f2937", grid="#e5e7eb", background="#ffffff")

# Should anything slip through the escaping, a browser still runs no script and asks no host.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def document(title: str, kind: str, parts: Iterable[str]) -> str:
    """A whole page.

    Args:
        title: its heading; any text.
        kind: what it is a page of, above the heading.
        parts: the body, as HTML.
    """
    name = escape(title)
    page = "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><title>{name}</title>',
            f"<style>{STYLE}</style></head><body><main>",
            f"<header><p>{escape(kind)}</p><h1>{name}</h1></header>",
            *parts,
            "</main></body></html>\n",
        ]
    )
    # Models can write half of a surrogate pair, which no file can hold.
    return page.encode("utf-8", "replace").decode()


def card(name: str, value: str, note: str) -> str:
    """A number with its name above and a note below."""
    return f'<div class="card"><p>{escape(name)}</p><strong>{escape(value)}</strong><small>{escape(note)}</small></div>'


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], names: int = 0) -> str:
    """A table of texts; the first `names` columns are words and stand to the left."""

    def line(tag: str, texts: Sequence[str]) -> str:
        kinds = [' class="name"' if i < names else "" for i in range(len(texts))]
        return "".join(f"<{tag}{kind}>{escape(text)}</{tag}>" for kind, text in zip(kinds, texts, strict=True))

    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{line("th", headings)}</tr>{body}</table></div>'


def folded(title: str, text: str) -> str:
    """A text as it is, folded away under its title."""
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


STYLE = """
:root { color-scheme: light dark; --text: #1f2937; --soft: #6b7280; --grid: #e5e7eb; --page: #f8fafc; --panel: #ffffff;
  --good: #15803d; --bad: #b91c1c; --said: #eff6ff; --shade: 234, 88, 12;
  --c0: #2563eb; --c1: #ea580c; --c2: #16a34a; --c3: #9333ea; --c4: #0891b2; --c5: #db2777; }
@media (prefers-color-scheme: dark) { :root { --text: #e5e7eb; --soft: #9ca3af; --grid: #374151; --page: #0b1120;
  --panel: #111827; --good: #4ade80; --bad: #f87171; --said: #172554; --shade: 251, 146, 60;
  --c0: #60a5fa; --c1: #fb923c; --c2: #4ade80; --c3: #c084fc; --c4: #22d3ee; --c5: #f472b6; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 28px 20px 60px; }
header p { margin: 0; color: var(--soft); font-size: 13px; letter-spacing: .06em; text-transform: uppercase; }
h1 { margin: 0 0 18px; font-size: 26px; overflow-wrap: anywhere; }
h2 { margin: 34px 0 12px; font-size: 19px; }
h3 { margin: 22px 0 8px; font-size: 15px; color: var(--soft); font-weight: 600; }
.cards { display: grid; gap: 12px; grid-template-columns: repeat(auto-fill, minmax(148px, 1fr)); }
.card, figure, details, table { background: var(--panel); border: 1px solid var(--grid); border-radius: 8px; }
.card { padding: 12px 14px; }
.card p { margin: 0; color: var(--soft); font-size: 13px; }
.card strong { display: block; font-size: 23px; font-variant-numeric: tabular-nums; }
.card small { color: var(--soft); }
.charts { display: grid; gap: 14px; margin-top: 18px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); }
figure { margin: 0; padding: 10px; }
figure svg { display: block; width: 100%; height: auto; }
table { border-collapse: separate; border-spacing: 0; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 16px; text-align: right; }
th { color: var(--soft); font-weight: 600; font-size: 13px; }
td { border-top: 1px solid var(--grid); }
.scroll { overflow-x: auto; }
.scroll td, .scroll th { white-space: nowrap; }
.scroll th.name, .scroll td.name { text-align: left; white-space: normal; overflow-wrap: break-word; max-width: 40ch; }
.alone { max-width: 780px; margin-top: 14px; }
details { margin: 8px 0; }
summary { cursor: pointer; padding: 8px 14px; }
summary .task { overflow-wrap: anywhere; font-weight: 600; }
summary .facts { color: var(--soft); margin-left: 10px; font-size: 13px; }
.badge { display: inline-block; min-width: 66px; font-size: 12px; font-weight: 700; margin-right: 10px; }
.good { color: var(--good); }
.bad { color: var(--bad); }
.turns { padding: 2px 14px 14px; }
.message { border-left: 3px solid var(--grid); margin: 8px 0; padding: 2px 12px; border-radius: 0 6px 6px 0; }
.message.assistant { border-left-color: var(--c0); background: var(--said); }
.message > b { color: var(--soft); font-size: 12px; font-weight: 600; }
pre { margin: 2px 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, monospace; max-height: 420px; overflow: auto; }
details > pre { padding: 0 14px 12px; max-height: none; }
.reward { color: var(--soft); font-size: 13px; margin: 2px 0 10px; }
.note { color: var(--soft); font-size: 13px; }
@media (max-width: 640px) { main { padding: 18px 12px 40px; } h1 { font-size: 21px; } th, td { padding: 5px 9px; } }
.token { background: rgba(var(--shade), var(--a)); border-radius: 2px; }
"""
