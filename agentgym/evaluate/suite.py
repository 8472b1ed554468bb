"""A suite: everything `agentgym eval` plays, read from a YAML file (`examples/suite.yaml` is one) or made from the command line."""

import inspect
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentgym.agents.programs import plays_episodes
from agentgym.core.registration import EnvSpec, spec
from agentgym.core.usage_error import instead
from agentgym.evaluate import agents
from agentgym.evaluate.budget import Budget, Prices
from agentgym.evaluate.plan import AgentSpec, Cell, read_values
from agentgym.evaluate.store import cells_of, read_run
from agentgym.rollout.episode import Limits

TASKS = 100  # of an environment if the suite gives no number
_WHOLE, _NUMBER, _TEXT, _TABLE, _LIST = "a whole number", "a number", "a text", "a table", "a list"
_COUNT, _SWITCH = "a whole number or all", "true or false"
_TYPES: dict[str, tuple[type, ...]] = {
    _WHOLE: (int,),
    _COUNT: (int, str),
    _NUMBER: (int, float),
    _TEXT: (str,),
    _TABLE: (Mapping,),
    _LIST: (list, tuple),
    _SWITCH: (bool,),
}
_EXTENT = {"split": _TEXT, "n": _COUNT, "k": _WHOLE, "seed": _WHOLE, "max_turns": _WHOLE, "shuffle": _SWITCH}
_SUITE = {
    **dict.fromkeys(("name", "prices"), _TEXT),
    **_EXTENT,
    **dict.fromkeys(("concurrency", "retries"), _WHOLE),
    **{"limits": _TABLE, "agents": _LIST, "envs": _LIST},
}
_ENV = {"id": _TEXT, "name": _TEXT, "kwargs": _TABLE, **_EXTENT, "tasks": _LIST, "agents": _LIST}
_AGENT = {
    **dict.fromkeys(("policy", "model", "serve", "agent", "image", "script", "name", "base_url", "system"), _TEXT),
    **dict.fromkeys(("kwargs", "extra"), _TABLE),
    **dict.fromkeys(("temperature", "timeout", "mistakes"), _NUMBER),
    **dict.fromkeys(("max_tokens", "retries"), _WHOLE),
    **dict.fromkeys(("send_reasoning", "stream"), _SWITCH),
}
_LIMITS = {
    **dict.fromkeys(("episodes", "tokens", "episode_tokens"), _WHOLE),
    **dict.fromkeys(("cost", "seconds", "episode_seconds", "answer_seconds", "step_seconds"), _NUMBER),
}
_EPISODE_LIMITS = {
    "episode_tokens": "tokens",
    "episode_seconds": "episode_timeout",
    "answer_seconds": "act_timeout",
    "step_seconds": "step_timeout",
}
# The key in an agent's entry that says which kind it is, and what makes its spec.
_AGENTS: dict[str, Callable[..., AgentSpec]] = {
    "model": agents.chat,
    "serve": agents.chat,
    "policy": agents.built_in,
    "agent": agents.python,
    "script": agents.scripted_file,
}


@dataclass(frozen=True)
class Suite:
    """Cells, and how they are played; see `run.run_plan`. The run's folder has its name by default.

    Raises ValueError for a concurrency or retries that nothing can be played with, before a run's folder holds them.
    """

    name: str
    cells: tuple[Cell, ...]
    concurrency: int = 64
    retries: int = 1
    limits: Limits = field(default_factory=Limits)
    budget: Budget = field(default_factory=Budget)
    prices: Prices | None = None

    def __post_init__(self) -> None:
        _at_least(vars(self), concurrency=1, retries=0)


def read_suite(path: Path) -> dict[str, Any]:
    """The object in a YAML file. Files that it names are found from its own folder on. Raises as `read_values`."""
    record = read_values(path)
    if not isinstance(record, dict):
        raise ValueError(f"{path}: a suite is a table with agents and envs, not {record!r:.60}")
    record.setdefault("name", path.stem)
    if isinstance(record.get("prices"), str):
        record["prices"] = str(path.parent / record["prices"])
    for agent in record["agents"] if isinstance(record.get("agents"), list) else []:
        if isinstance(agent, dict) and isinstance(agent.get("script"), str):
            agent["script"] = str(path.parent / agent["script"])
    return record


def suite_of(record: Mapping[str, Any], find: Callable[[str], EnvSpec] = spec) -> Suite:
    """The suite that an object describes. `find` makes the spec of an environment's id.

    Raises:
        ValueError: an unknown key; a value of another type; an agent, an environment or a limit that cannot be. Splits and
            tasks are not checked.
    """
    _check(record, _SUITE, "the suite")
    for key in ("agents", "envs"):
        if not record.get(key):
            raise ValueError(f"the suite needs {key}")
    found: dict[str, AgentSpec] = {}
    for entry in record["agents"]:
        agent = _agent_of(entry)
        if agent.name in found:
            raise ValueError(f"two agents are called {agent.name!r}: give one another name:")
        found[agent.name] = agent
    cells = tuple(cell for entry in record["envs"] for cell in _cells_of(entry, record, found, find))
    if not cells:
        raise ValueError("no environment of the suite has agents: leave `agents` out of one to have all play it")
    name, times = Counter(cell.name for cell in cells).most_common(1)[0]
    if times > 1:
        raise ValueError(f"{name} is there twice: give one of the environments another name:")
    prices = Prices.load(record["prices"]) if record.get("prices") else None
    limits, budget = limits_of(record.get("limits") or {}, Limits(), Budget())
    counts: dict[str, Any] = {key: record[key] for key in ("concurrency", "retries") if record.get(key) is not None}
    name = record.get("name") or cells[0].name
    return Suite(name, cells, limits=limits, budget=budget, prices=prices, **counts)


def suite_in(path: Path, **given: Any) -> Suite:
    """The suite that a run folder was made for, to go on with it. `given`: values in place of those of its last start."""
    record = read_run(path)
    settings, prices = record["settings"], record["prices"] and Prices.from_json(record["prices"])
    cells = tuple(cell for cell, _ in cells_of(path, record))
    limits, budget = Limits(**settings["limits"]), Budget(**settings["budget"])
    counts = {name: settings[name] for name in ("concurrency", "retries")}
    return Suite(record["name"], cells, **{**counts, "limits": limits, "budget": budget, "prices": prices, **given})


def _agent_of(entry: Any) -> AgentSpec:
    if isinstance(entry, str):
        entry = {"policy" if entry in agents.BUILT_IN else "agent": entry}
    if not isinstance(entry, Mapping):
        raise ValueError(f"an agent is a table with {', '.join(_AGENTS)}, not {entry!r:.60}")
    kind = next((name for name in ("agent", *_AGENTS) if entry.get(name) is not None), None)
    if kind is None:
        raise ValueError(f"an agent needs one of {', '.join(_AGENTS)}: {dict(entry)!r:.100}")
    make = agents.playing if kind == "agent" and plays_episodes(str(entry[kind])) else _AGENTS[kind]
    if make is agents.playing and not (entry.get("model") or entry.get("serve")):
        raise ValueError(f"agent {entry[kind]!r} plays by itself: it needs the model that it asks, model or serve")
    _check(entry, {name: _AGENT[name] for name in inspect.signature(make).parameters}, f"agent {str(entry[kind])!r}")
    given = dict(entry)
    if entry.get("serve"):
        given.setdefault("model", Path(entry["serve"]).resolve().name)
    elif entry.get("model"):
        given.setdefault("base_url", os.environ.get("OPENAI_BASE_URL") or None)
    return make(**given)


def _cells_of(
    entry: Any, suite: Mapping[str, Any], known: Mapping[str, AgentSpec], find: Callable[[str], EnvSpec]
) -> list[Cell]:
    if isinstance(entry, str):
        entry = {"id": entry}
    if not isinstance(entry, Mapping) or "id" not in entry:
        raise ValueError(f"an environment is an id, or a table with one, not {entry!r:.60}")
    where = f"environment {entry['id']!r}"
    _check(entry, _ENV, where)
    names = list(known) if entry.get("agents") is None else entry["agents"]
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise ValueError(f"{where}: no agent {name!r}{instead(name, known)}")
    try:
        env = find(entry["id"])
        env.load()
    except (ImportError, TypeError) as error:
        raise ValueError(str(error)) from error
    env = replace(env, id=entry.get("name") or env.id, kwargs={**env.kwargs, **(entry.get("kwargs") or {})})
    given = {name: value for part in (suite, entry) for name, value in part.items() if value is not None}
    extent = {"n": TASKS} | {name: given[name] for name in _EXTENT if name in given}
    if isinstance(extent["n"], str):
        if extent["n"] != "all":
            raise ValueError(f"{where}: n must be {_COUNT}, not {extent['n']!r}")
        extent["n"] = None
    if entry.get("tasks"):
        extent |= {"ids": tuple(dict.fromkeys(map(str, entry["tasks"]))), "n": None}
    _at_least(extent, n=1, k=1, max_turns=1)
    return [Cell(env, known[name], **extent) for name in names]


def limits_of(record: Mapping[str, Any], limits: Limits, budget: Budget) -> tuple[Limits, Budget]:
    """The given limits of an episode and of the whole run, with those of a suite's `limits` in their place."""
    _check(record, _LIMITS, "limits")
    given = {name: value for name, value in record.items() if value is not None}
    for name, value in given.items():
        if not value > 0:
            raise ValueError(f"limits: {name} must be positive, not {value}")
    of_episode = {_EPISODE_LIMITS[name]: value for name, value in given.items() if name in _EPISODE_LIMITS}
    of_run = {name: value for name, value in given.items() if name not in _EPISODE_LIMITS}
    return replace(limits, **of_episode), replace(budget, **of_run)


def _check(record: Mapping[str, Any], known: Mapping[str, str], where: str) -> None:
    """Check that all keys are known and their values have the right type; None means not given."""
    for name, value in record.items():
        if name not in known:
            raise ValueError(f"{where} has no {name!r}{instead(name, known)}")
        wanted = known[name]
        if value is None:
            continue
        if not isinstance(value, _TYPES[wanted]) or (isinstance(value, bool) and wanted != _SWITCH):
            raise ValueError(f"{where}: {name} must be {wanted}, not {value!r:.60}")


def _at_least(record: Mapping[str, Any], **least: int) -> None:
    for name, low in least.items():
        if record.get(name) is not None and record[name] < low:
            raise ValueError(f"{name} must be at least {low}, not {record[name]}")
