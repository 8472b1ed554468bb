"""The names of the policy losses. No torch here: settings are checked before it is imported.

A loss of one's own is named by where it is, `"package.module:function"`; `agent_train.algorithms.policy_loss` says what it may
read. Nothing has to be registered.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from types import MappingProxyType

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

# One ratio for all tokens of a row, times one advantage: what differs inside a row would be averaged away.
of_whole_rows = frozenset({"gspo", "gmpo"})


def loss_path(name: str) -> str:
    """Where the function of a loss is: by its name, or the name itself where that is `"package.module:function"`.

    Raises:
        ValueError: neither; the message names the nearest names.
    """
    if name in losses:
        return losses[name]
    if _PATH.fullmatch(name):
        return name
    near = difflib.get_close_matches(name, losses, n=3, cutoff=0.5) or sorted(losses)
    raise ValueError(
        f"unknown policy loss {name!r}: known are {', '.join(near)}; your own is named as package.module:function"
    )
