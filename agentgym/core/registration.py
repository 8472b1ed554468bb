"""The registry: names of environments, and making one from its name.

Packages register environments by an entry point of the group `agentgym.envs`: a function that calls `register` and
`register_adapter`. It is loaded once, when an environment is first looked up.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

from agentgym.core.extensions import PATH, import_path
from agentgym.core.usage_error import nearest

if TYPE_CHECKING:
    from agentgym.core.env import Env
    from agentgym.core.tasks import TaskSet

    EntryPoint = str | Callable[..., Env]
    TaskSource = str | Callable[..., TaskSet]
    registry: dict[str, EnvSpec]
    adapters: dict[str, Adapter]

GROUP = "agentgym.envs"
SERVED_ENV = "agentgym.service.client.address:spec_of"  # makes the spec of a URL
_ID = re.compile(r"(?:(?P<namespace>[A-Za-z0-9_.-]+)/)?(?P<name>[A-Za-z0-9_.-]+?)(?:-v(?P<version>\d+))?")
_PREFIX = re.compile(r"[A-Za-z_]\w*")

registered_specs: dict[str, EnvSpec] = {}
known_adapters: dict[str, Adapter] = {}
_plugins_lock = threading.RLock()
_plugins_loaded = False
broken_plugins: dict[str, str] = {}


class UnknownEnvError(KeyError, ValueError):
    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class EnvSpec:
    """How to make one environment. Picklable, and JSON if its entry point and kwargs are.

    Attributes:
        entry_point: `"module:Class"`, or the class or function itself if no other process could import it.
        task_source: a function `split -> TaskSet`, or its `"module:function"`; None: the class's `default_tasks`.
        nondeterministic: True if the same task, seed and actions may give different results.
        needs: "sandbox:IMAGE", or "MODULE:REQUIREMENT", a module to import and the argument of `pip install` that gets it.
    """

    id: str
    entry_point: EntryPoint
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    description: str = ""
    tags: tuple[str, ...] = ()
    task_source: TaskSource | None = None
    nondeterministic: bool = False
    needs: tuple[str, ...] = ()

    def make(self, render_mode: str | None = None, **kwargs: Any) -> Env:
        from agentgym.core.env import Env, Wrapper

        given = {**self.kwargs, **kwargs}
        if render_mode is not None:
            given["render_mode"] = render_mode
        factory = self.load()
        check_kwargs(self, factory, given)
        env = factory(**given)
        if not isinstance(env, Env | Wrapper):
            made = type(env).__name__
            raise TypeError(f"environment {self.id!r}: {_name(self.entry_point)} made a {made}, no agentgym.Env")
        setattr(env.unwrapped, "spec", replace(self, kwargs=given))  # noqa: B010 - Gymnasium types it as its own EnvSpec
        return env

    def load(self) -> Callable[..., Env]:
        """The class, or the function that makes the environment. Raises ImportError, or TypeError if it is not an `agentgym.Env`."""
        factory: Any = self.entry_point
        if isinstance(factory, str):
            factory = _resolve(factory, self.id)
        if inspect.isclass(factory):
            from agentgym.core.env import Env, Wrapper

            if not issubclass(factory, Env | Wrapper):
                raise TypeError(f"environment {self.id!r}: {_name(factory)} is no subclass of agentgym.Env")
        elif not callable(factory):
            raise TypeError(f"environment {self.id!r}: {self.entry_point!r} is neither a class nor a function")
        return factory

    def missing(self) -> list[str]:
        """Arguments of `pip install` for the packages of `needs` that are not installed; none is imported."""
        found = (need.partition(":") for need in self.needs)
        return [what for module, _, what in found if module != "sandbox" and not is_here(module)]

    def tasks(self, split: str = "train", **settings: Any) -> TaskSet:
        """The task set of a split. `settings`, as for `make`, override the spec's kwargs. Raises ValueError, TypeError."""
        source: Any = self.task_source
        if isinstance(source, str):
            source = _resolve(source, self.id)
        if source is None:
            source = getattr(self.load(), "default_tasks", None)
        if source is None:
            raise ValueError(f"environment {self.id!r} has no tasks of its own: register it with tasks=")
        accepted = [name for name in inspect.signature(source).parameters if name != "split"]
        if settings:
            made_with = [p.name for p in parameters(self.load())[0] if p.name != "tasks"]
            _refuse_unknown(self, settings, list(dict.fromkeys([*accepted, *made_with])))
        found = source(split, **{k: v for k, v in {**self.kwargs, **settings}.items() if k in accepted})
        if not hasattr(found, "shuffled"):  # a list; its module imports this one, so the class itself is not asked
            raise TypeError(f"the tasks of environment {self.id!r} must be a TaskSet, not a {type(found).__name__}")
        return found

    def to_json(self) -> dict[str, Any]:
        """The spec as a JSON object. Raises ValueError if no other process can import its entry point or task source."""
        record = {name: value for name, value in vars(self).items() if value not in (None, "", (), {}, False)}
        for name in ("entry_point", "task_source"):
            if not isinstance(record.get(name, ""), str):
                text = f"{name} {record[name]!r} lives in {record[name].__module__!r} and has no importable name"
                raise ValueError(f"environment {self.id!r}: {text}; move it to the top of a module to send it as JSON")
        return {name: list(value) if isinstance(value, tuple) else value for name, value in record.items()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> EnvSpec:
        return cls(**{**record, "tags": tuple(record.get("tags", ())), "needs": tuple(record.get("needs", ()))})


def register(
    id: str,
    entry_point: EntryPoint,
    *,
    kwargs: Mapping[str, Any] | None = None,
    description: str = "",
    tags: Iterable[str] = (),
    tasks: TaskSource | None = None,
    nondeterministic: bool = False,
    needs: Iterable[str] = (),
) -> EnvSpec:
    """Give an environment an id: `name` or `namespace/name`, with `-v2` at the end for a version. See `EnvSpec`.

    Registering the same entry point and kwargs again only renews the rest. Raises ValueError if the id is malformed, or
    registered for something else.
    """
    if not _ID.fullmatch(id):
        form = "write name, namespace/name or name-v2, of letters, digits and _ . -"
        raise ValueError(f"bad environment id {id!r}: {form}")
    if isinstance(entry_point, str) and not PATH.fullmatch(entry_point):
        raise ValueError(f"environment {id!r}: bad entry point {entry_point!r}: write 'package.module:Class'")
    needs = tuple(needs)
    if bad := [need for need in needs if not all(need.partition(":"))]:
        raise ValueError(f"environment {id!r}: bad need {bad[0]!r}: write 'sandbox:IMAGE' or 'MODULE:REQUIREMENT'")
    task_source = None if tasks is None else _by_value(tasks)
    made_by = (_by_value(entry_point), dict(kwargs or {}))
    spec = EnvSpec(id, *made_by, description, tuple(tags), task_source, nondeterministic, needs)
    present = registered_specs.get(id)
    if present is not None and (present.entry_point, present.kwargs) != made_by:
        known = f"{_name(present.entry_point)} with {dict(present.kwargs)}"
        raise ValueError(f"environment {id!r} is already registered, as {known}; use a namespace or a version")
    registered_specs[id] = spec
    return spec


@dataclass(frozen=True)
class Adapter:
    """Makes environments of another package from `prefix:name`.

    `entry_point` is `"module:Class"`, made with `name=` and the arguments of `make`; `install` is the argument of `pip install`.
    """

    prefix: str
    entry_point: str
    install: str
    description: str = ""
    example: str = "NAME"


def register_adapter(adapter: Adapter) -> Adapter:
    if not _PREFIX.fullmatch(adapter.prefix) or not PATH.fullmatch(adapter.entry_point):
        raise ValueError(f"bad adapter {adapter}: write prefix='name' and entry_point='package.module:Class'")
    if known_adapters.setdefault(adapter.prefix, adapter) != adapter:
        raise ValueError(f"the prefix {adapter.prefix!r} is already registered, for {known_adapters[adapter.prefix]}")
    return adapter


def make(id: str | EnvSpec, **kwargs: Any) -> Env:
    """Make an environment; `kwargs` override the registered ones.

    Args:
        id: a spec; a registered id, without `-v2` the latest version; `"package.module:Class"`; `"prefix:name"` of an adapter; or the
            URL of an environment that servers serve, `http://host:8000/gsm8k`, several joined by commas.

    Raises UnknownEnvError, ImportError, or TypeError for a wrong argument.
    """
    return (id if isinstance(id, EnvSpec) else spec(id)).make(**kwargs)


def spec(id: str) -> EnvSpec:
    """The spec of an id, without contacting servers or importing other packages. Raises UnknownEnvError."""
    if id.startswith(("http://", "https://")):
        served: EnvSpec = _resolve(SERVED_ENV, id)(id)
        return served
    prefix, colon, name = id.partition(":")
    if colon and _PREFIX.fullmatch(prefix):
        load_plugins()
        if adapter := known_adapters.get(prefix):
            if not name:
                raise UnknownEnvError(f"{prefix}: needs a name, for example {prefix}:{adapter.example}")
            return EnvSpec(id, adapter.entry_point, {"name": name}, adapter.description)
        near = difflib.get_close_matches(prefix, known_adapters, n=2, cutoff=0.7)
        if near and prefix not in sys.modules and importlib.util.find_spec(prefix) is None:
            meant = " or ".join(repr(f"{p}:{name}") for p in near)
            raise UnknownEnvError(f"no environment {id!r}: did you mean {meant}?")
    if PATH.fullmatch(id):
        return EnvSpec(id=id, entry_point=id)
    wanted = _ID.fullmatch(id)
    if wanted is None:
        forms = "name, namespace/name, name-v2, package.module:Class, prefix:name or http://HOST:PORT/ENV"
        raise UnknownEnvError(f"bad environment id {id!r}: write {forms}")
    load_plugins()
    if wanted["version"] is not None and id in registered_specs:
        return registered_specs[id]
    versions = _versions(wanted["namespace"], wanted["name"])
    if versions and wanted["version"] is None:
        return versions[-1]
    if versions:
        raise UnknownEnvError(f"no environment {id!r}; registered versions: {', '.join(s.id for s in versions)}")
    raise UnknownEnvError(_unknown(id, wanted["name"]))


def load_plugins() -> None:
    """Call every entry point of the group `agentgym.envs`, once. A broken one logs a warning; the others load."""
    global _plugins_loaded  # noqa: PLW0603 - module state: loading happens once per process
    with _plugins_lock:
        if _plugins_loaded:
            return
        _plugins_loaded = True
        for plugin in metadata.entry_points(group=GROUP):
            try:
                plugin.load()()
            except Exception as error:
                broken_plugins[plugin.name] = why = f"{type(error).__name__}: {error}"
                text = f"the environments of plugin {plugin.name!r} ({plugin.value}) are missing: {why}"
                warnings.warn(text, RuntimeWarning, stacklevel=2)


def __getattr__(name: str) -> Any:
    # Reached through here, so that every reader sees the plugins' environments.
    if name not in ("registry", "adapters"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    load_plugins()
    return registered_specs if name == "registry" else known_adapters


def _versions(namespace: str | None, name: str) -> list[EnvSpec]:
    ids = [parts for known in registered_specs if (parts := _ID.fullmatch(known))]
    found = [parts for parts in ids if (parts["namespace"], parts["name"]) == (namespace, name)]
    return [registered_specs[parts[0]] for parts in sorted(found, key=lambda parts: int(parts["version"] or -1))]


def _unknown(id: str, name: str) -> str:
    near = difflib.get_close_matches(id, registered_specs, n=3, cutoff=0.5)
    near += [known for known in registered_specs if known.split("/")[-1] == name and known not in near]
    hint = f"did you mean {' or '.join(repr(n) for n in near)}?" if near else "`agentgym list` shows all there are"
    broken = "".join(f"; plugin {plugin!r} failed to load ({why})" for plugin, why in broken_plugins.items())
    return f"no environment {id!r}: {hint}{broken}"


def _resolve(path: str, id: str) -> Any:
    try:
        return import_path(path)
    except ImportError as error:
        raise ImportError(f"environment {id!r}: {error}") from error


def is_here(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a package above it is not here, or it was put into sys.modules by hand
        return module in sys.modules


def _by_value(target: Any) -> Any:
    """`"module:qualname"` where importing that gives the target, else the target itself."""
    if isinstance(target, str):
        return target
    module, qualname = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if not module or not qualname or module == "__main__":
        return target
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return f"{module}:{qualname}" if found == target else target


def _name(target: Any) -> str:
    return target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"


def parameters(factory: Callable[..., Env]) -> tuple[list[inspect.Parameter], bool]:
    """The parameters of a factory, and True if it takes others too. `**kwargs` of a class go to the class above."""
    levels: list[Any] = [factory]
    if inspect.isclass(factory):
        levels = [vars(c)["__init__"] for c in factory.__mro__ if "__init__" in vars(c)]
    taken: dict[str, inspect.Parameter] = {}
    for function in levels:
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"]
        taken = {p.name: p for p in named} | taken
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return list(taken.values()), False
    return list(taken.values()), True


def check_kwargs(spec: EnvSpec, factory: Callable[..., Env], kwargs: Mapping[str, Any]) -> None:
    valid, takes_any = parameters(factory)
    if not takes_any:
        _refuse_unknown(spec, kwargs, [p.name for p in valid])
    # Only its own arguments: a class may itself give those of the class above.
    own = inspect.signature(factory).parameters.values()
    named = [p for p in own if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in kwargs]
    if missing:
        names = ", ".join(p.name for p in valid)
        raise TypeError(f"environment {spec.id!r} needs the argument {missing[0]!r}; it takes {names}")


def _refuse_unknown(spec: EnvSpec, kwargs: Mapping[str, Any], known: list[str]) -> None:
    for name in kwargs:
        if name not in known:
            near = nearest(name, known)
            names = ", ".join(known) or "none"
            takes = f"{near} It takes" if near else "; it takes"
            raise TypeError(f"environment {spec.id!r} takes no argument {name!r}{takes} {names}")
