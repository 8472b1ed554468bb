"""The plan of an evaluation: cells, each one agent on one environment, and the files of values that users write."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
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
        name: in tables and files.
        kind: "chat", "expert", "random", "null", "scripted", "python" or "playing".
        settings: of its kind.
    """

    name: str
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """One agent on one environment: the first `n` tasks of a split, or those of `ids`, `k` episodes of each.

    Attributes:
        n: None: all tasks of the split.
        seed: sample i is reset with seed `seed + i`; requests to models have seeds made from that, the task and the turn.
        max_turns: replies after which an episode is ended; None: the environment's.
        shuffle: True to shuffle the split first, by `seed` alone.
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

    def to_json(self) -> dict[str, Any]:
        """Raises ValueError if its environment has no importable name."""
        given = {name: value for name, value in vars(self).items() if value or name not in ("ids", "shuffle")}
        return {"name": self.name, **given, "env": self.env.to_json(), "agent": dict(vars(self.agent))}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Cell":
        given = {name: record[name] for name in cls.__dataclass_fields__ if name in record}
        given |= {"env": EnvSpec.from_json(record["env"]), "agent": AgentSpec(**record["agent"])}
        return cls(**given | ({"ids": tuple(given["ids"])} if given.get("ids") else {}))


def read_text(path: Path) -> str:
    """The text of a file. Raises ValueError, which names it, if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error.reason}") from error


def read_values(path: Path) -> Any:
    """The value in a JSON file (`.json`), or in a YAML file, where no key of a table may stand twice.

    Raises:
        ValueError: there is no such file, or it holds something else. The message names the file.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> Any:  # as it is written: `<<` has added no keys yet
            node = super().compose_mapping_node(anchor)
            for place, (key, _) in enumerate(node.value):
                if key.value in [before.value for before, _ in node.value[:place]]:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
            return node

    # A date stays text, and a tag that asks for what JSON does not have is refused: the values are stored as JSON.
    other = {f"tag:yaml.org,2002:{kind}" for kind in ("timestamp", "binary", "set", "omap", "pairs")}
    Loader.yaml_implicit_resolvers = {
        start: [(tag, words) for tag, words in found if tag not in other]
        for start, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.yaml_constructors = {k: v for k, v in yaml.SafeLoader.yaml_constructors.items() if k not in other}

    text = read_text(path)
    try:
        return json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{path}{line}: {error.problem or error.context}") from error
    except (ValueError, yaml.YAMLError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise ValueError(f"{path}: not valid {kind}: {' '.join(str(error).split())}") from error
