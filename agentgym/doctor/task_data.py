"""Published data that environments can use, and the hub that it comes from."""

from __future__ import annotations

import os

from agentgym.doctor.finding import Finding


def data() -> list[Finding]:
    """The data folder and the data sets in it."""
    from agentgym.datasets import FOLDER_VARIABLE, folder
    from agentgym.datasets.catalogue import data_sets, missing_files

    root, named = folder(), os.environ.get(FOLDER_VARIABLE)
    if root is None:
        return [
            Finding("data folder", "warning", f"{FOLDER_VARIABLE} is empty: there is none", "unset it, or name one")
        ]
    if named and not root.is_dir():
        todo = f"make it, name another in {FOLDER_VARIABLE}, or unset that"
        return [Finding("data folder", "broken", f"{FOLDER_VARIABLE} names {root}, which is no folder", todo)]
    where = f"{root}, {f'which {FOLDER_VARIABLE} names' if named else f'the default: {FOLDER_VARIABLE} is not set'}"
    every = data_sets()
    here = [name for name, one in every.items() if not missing_files(one)]
    lacking = [name for name in every if name not in here]
    found = [Finding("data folder", "ok", where)]
    if here:
        found.append(Finding("data sets", "ok", ", ".join(here)))
    if lacking:
        text = f"{', '.join(lacking)}: their environments use tasks of their own"
        found.append(Finding("other data sets", "missing", text, "agentgym data get DATA; agentgym data list"))
    return found


def network() -> list[Finding]:
    """Whether the Hugging Face hub answers: the only part that contacts another machine."""
    from agentgym.datasets import no_hub

    if reason := no_hub():
        return [
            Finding("Hugging Face hub", "warning", reason, "data sets can also be put into the data folder by hand")
        ]
    return [Finding("Hugging Face hub", "ok", "answers")]
