"""One setting of a run, and how `agent_train.config.schema` declares it."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Setting:
    """Facts of a setting. `settings()` gives them with its type (`kind`) and default."""

    doc: str  # one line for `docs/settings.md`
    choices: tuple[str | None, ...] = ()  # the only values, if there are few; None is null
    bounds: str = "(0, inf)"  # interval of a number
    needs: str | None = None  # what a value other than the default goes with: "KEY=A|B", or "KEY": neither null nor 0
    extensions: str | None = None  # the extension point (`agent_train.config.extensions`) whose names are the choices
    by_mode: Mapping[str, Any] = field(default_factory=dict)  # defaults of single modes
    on_gpu: Any = None  # default on a machine with a GPU; None: the same
    share_of_context: float = 0.0  # the default is at most this share of the tokens that the model reads; 0: no limit
    kind: Any = None
    default: Any = None


def setting(default: Any, doc: str, **more: Any) -> Any:
    """A field of a section: its default and its `Setting`, its choices as one text ("null" is None)."""
    choices = tuple(None if name == "null" else name for name in more.pop("choices", "").split())
    metadata = {"setting": Setting(doc, choices, **more)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)
