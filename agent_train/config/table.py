"""The tables of settings in docs/settings.md, made from the schema: `python -m agent_train.config.table` writes it there."""

import json
from pathlib import Path
from typing import Any

from agent_train.config.extensions import POINTS
from agent_train.config.schema import settings
from agent_train.config.setting import Setting

BEGIN, END = "<!-- settings: made from agent_train/config/schema.py -->", "<!-- end of settings -->"


def with_tables(page: str) -> str:
    """A page with the tables of all settings, by section, between its two marks."""
    lines, section = [], None
    for key, known in settings().items():
        if (own := key.rpartition(".")[0].partition(".")[0]) != section or not lines:
            heading = ["", f"## {own}", ""] if own else []
            lines += [*heading, "| setting | default | what |", "|---|---|---|"]
            section = own
        lines.append(f"| `{key}` | {_default(known)} | {_what(known)} |")
    before, _, rest = page.partition(BEGIN)
    return "\n".join([before + BEGIN, "", *lines, "", END + rest.partition(END)[2]])


def _default(said: Setting) -> str:
    others = [f"`{_text(other)}` with mode={mode}" for mode, other in said.by_mode.items()]
    others += [f"`{_text(said.on_gpu)}` on a GPU"] if said.on_gpu is not None else []
    return "; ".join([f"`{_text(said.default)}`", *others])


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-3 else str(value)
    if isinstance(value, list):
        return f"[{', '.join(value)}]"
    if isinstance(value, str):
        return value or "''"
    return json.dumps(value)


def _what(said: Setting) -> str:
    parts = [said.doc]
    names = POINTS[said.extensions].shipped if said.extensions else said.choices
    if names and not all(name is None or name in said.doc for name in names):
        parts.append(", ".join(name or "null" for name in names))
    if said.extensions:
        parts.append("or `package.module:function`" if names else "`package.module:function`")
    if said.needs:
        parts.append(f"needs `{said.needs.replace('|', ' or ')}`")
    if said.share_of_context:
        share = "what" if said.share_of_context == 1 else "half of what"
        parts.append(f"at most {share} the model reads")
    return "; ".join(parts)


if __name__ == "__main__":
    page = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
    page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
