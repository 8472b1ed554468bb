"""The plan of an evaluation: cells, each one agent on one environment. A cell is a row of the results table."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentgym.core.registration import EnvSpec
from agentgym.core.tasks import TaskSet
from agentgym.core.usage_error import nearest


def cell_name(env: str, split: str, agent: str) -> str:
    """`ENV@AGENT`, with `/SPLIT` after the environment where the split is known and not "test"."""
    return f"{env}{'' if split in ('test', '') else f'/{split}'}{f'@{agent}' if agent else ''}"


@dataclass(frozen=True)
class AgentSpec:
    """An agent as plain JSON values, never with a key; `agents.policy_maker` makes policies of it.

    Attributes:
        name: how tables and files call it.
        kind: "chat", "expert", "random", "null", "scripted" or "python".
        settings: what its kind takes.
    """

    name: str
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "settings": dict(self.settings)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "AgentSpec":
        return cls(**record)


@dataclass(frozen=True)
class Cell:
    """One agent on one environment: the first `n` tasks of a split, or those of `ids`, `k` episodes of each.

    Attributes:
        n: None: all tasks of the split.
        seed: sample i is reset with seed `seed + i`; an endpoint gets the same seed.
        max_turns: replies after which an episode is ended; None: the environment's.
        shuffle: whether the split is shuffled first, by `seed` alone.
    """

    env: EnvSpec
    agent: AgentSpec
    split: str = "test"
    n: int | None = None
    k: int = 1
    seed: int = 0
    max_turns: int | None = None
    ids: tuple[str, ...] | None = None
    shuffle: bool = False

    def tasks(self) -> TaskSet:
        """Raises ValueError if the environment has no such split, or the split no task of an id."""
        tasks = self.env.tasks(self.split)
        if self.ids is not None:
            by_id = {task.id: task for task in tasks}
            if unknown := [id for id in self.ids if id not in by_id]:
                where = f"{self.env.id}/{self.split}"
                raise ValueError(f"{where} has no task {unknown[0]!r}{nearest(unknown[0], by_id)}")
            return TaskSet([by_id[id] for id in self.ids], name=tasks.name, source=tasks.source)
        tasks = tasks.shuffled(self.seed) if self.shuffle else tasks
        return tasks if self.n is None else tasks.take(self.n)

    @property
    def name(self) -> str:
        return cell_name(self.env.id, self.split, self.agent.name)

    @property
    def file_name(self) -> str:
        return re.sub(r"[^\w.@+-]+", "-", self.name).strip("-.") + ".jsonl"

    def to_json(self) -> dict[str, Any]:
        """Raises ValueError if its environment has no importable name."""
        rest = {name: getattr(self, name) for name in ("split", "n", "k", "seed", "max_turns")}
        if self.ids is not None:
            rest["ids"] = list(self.ids)
        if self.shuffle:
            rest["shuffle"] = True
        return {"name": self.name, "env": self.env.to_json(), "agent": self.agent.to_json(), **rest}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Cell":
        rest = {name: record[name] for name in ("split", "n", "k", "seed", "max_turns")}
        if record.get("ids") is not None:
            rest["ids"] = tuple(record["ids"])
        rest["shuffle"] = bool(record.get("shuffle"))
        return cls(env=EnvSpec.from_json(record["env"]), agent=AgentSpec.from_json(record["agent"]), **rest)
