"""The names of policy losses and advantages. No torch here: settings are checked before it is imported.

Your own is named by its path, `"package.module:function"`, and needs no registration. `policy_loss.LossInputs` says what a loss
may read, `advantage_inputs.AdvantageInputs` what an advantage may.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

_ROOM = "agent_train.algorithms"
_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

losses: Mapping[str, str] = MappingProxyType(
    {
        "ppo": f"{_ROOM}.losses:ppo_clip",
        "reinforce": f"{_ROOM}.policy_losses:reinforce",
        "gspo": f"{_ROOM}.sequence_losses:gspo",
        "gspo_token": f"{_ROOM}.sequence_losses:gspo_token",
        "gmpo": f"{_ROOM}.sequence_losses:gmpo",
        "cispo": f"{_ROOM}.policy_losses:cispo",
        "sapo": f"{_ROOM}.policy_losses:sapo",
        "topr": f"{_ROOM}.policy_losses:topr",
        "topr_sequence": f"{_ROOM}.sequence_losses:topr_sequence",
        "raft_pp": f"{_ROOM}.policy_losses:raft_pp",
        "kimi": f"{_ROOM}.policy_losses:kimi",
        "dppo": f"{_ROOM}.policy_losses:dppo",
        "aipo": f"{_ROOM}.policy_losses:aipo",
        "m2po": f"{_ROOM}.policy_losses:m2po",
    }
)

advantages: Mapping[str, str] = MappingProxyType(
    {
        name: f"{_ROOM}.step_advantages:{name}_advantage"
        for name in (
            *("group", "rloo", "opo", "maxrl", "remax", "best_of", "reinforce_pp", "reinforce_pp_baseline"),
            *("gae", "bilevel_gae", "turn", "gigpo", "prime", "distill", "constant"),
        )
    }
)

# One ratio for all tokens of a row, times one advantage: what differs inside a row would be averaged away.
of_whole_rows = frozenset({"gspo", "gmpo"})


def loss_path(name: str) -> str:
    """The path of a policy loss, by its name or path.

    Raises:
        ValueError: an unknown name; the message suggests the nearest ones.
    """
    return _path("policy loss", name, losses)


def advantage_path(name: str) -> str:
    """The path of an advantage, by its name or path. Raises as `loss_path`."""
    return _path("advantage", name, advantages)


def imported(kind: str, name: str, path: str) -> Callable[..., Any]:
    """The function at a path.

    Raises:
        ValueError: it cannot be imported, or is not a function.
    """
    module, _, attribute = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{kind} {name!r} cannot be imported: {error}") from error
    if not callable(function):
        raise ValueError(f"{kind} {name!r} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def _path(kind: str, name: str, known: Mapping[str, str]) -> str:
    if name in known:
        return known[name]
    if _PATH.fullmatch(name):
        return name
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or sorted(known)
    raise ValueError(f"unknown {kind} {name!r}: known are {', '.join(near)}; name your own as package.module:function")
