"""From the command line to a `Config`: Hydra composes `configs/`, the dataclasses are the schema. Nothing here imports torch."""

import contextlib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError, safe_load

from agent_train.cluster.placement import visible_gpus
from agent_train.config.model_folder import context_of, is_tiny
from agent_train.config.schema import MODES, Config, ConfigError, default_config, first_line, settings
from agentgym.core.registration import UnknownEnvError, registry, spec
from agentgym.core.usage_error import closest, more_words

GROUPS = ("env", "model", "engine", "algorithm")
FREE_KEYS = ("env.kwargs.", "env.players.", "algorithm.loss_settings.", "pools.weights.")
# Other toolkits' names of our settings that no rule of spelling would find: the last part of their keys.
ELSEWHERE = {
    **dict.fromkeys(("learning_rate", "actor_lr"), "learner.lr"),
    **dict.fromkeys(("batch_size", "train_batch_size", "per_device_train_batch_size"), "trainer.groups_per_step"),
    **dict.fromkeys(("num_generations", "n_samples_per_prompt", "rollouts_per_example"), "algorithm.group_size"),
    **dict.fromkeys(("max_completion_length", "max_new_tokens", "max_response_length"), "sampling.max_tokens"),
    **dict.fromkeys(("kl_coef", "kl_loss_coef"), "algorithm.kl.coef"),
    **dict.fromkeys(("model_path", "model_name_or_path"), "model.path"),
    **dict.fromkeys(("max_steps", "total_training_steps"), "trainer.steps"),
}
_INTERPOLATION = re.compile(r"(\\*)\$\{")
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
KINDS |= {list[str]: "a list, as in [A,B]", list[int]: "a list, as in [12,20]"}


def compose(overrides: Sequence[str], gpu: bool | None = None) -> Config:
    """The settings that a command line asks for, not yet validated.

    It has `+env=NAME` or `env=NAME` (a file of `configs/env`, a registered id or "pkg.mod:Class"), choices of other groups such as
    `engine=embedded`, and dotted keys such as `trainer.steps=3`. A mode that learns from files takes no environment. With
    `trainer.resume=FOLDER` and no choice at all, other settings are those of that run. ConfigError for an unknown key, choice or
    environment, or a value of the wrong type; it names the nearest valid one. Defaults are those of a machine with a GPU or
    without one; `gpu` None: of this machine.
    """
    groups: dict[str, str] = {}
    values: dict[str, str] = {}
    parsed = _parse(overrides)
    for override in parsed:
        key = override.key_or_group
        if key in (*GROUPS, "env.id"):  # the last of `env` and `env.id` counts, as of any key
            groups[key.removesuffix(".id")] = _choice_name(override)
        else:
            if not key.startswith(FREE_KEYS):
                _check_key(key)
            # The form that Hydra takes for a key that is there and for one that is new in a free dict.
            values[key] = "++" + str(override.input_line).lstrip("+")
    env = groups.pop("env", None)
    resumed = _value_of("trainer.resume", parsed)
    if env is None and not groups and resumed and (old := Path(resumed).expanduser() / "config.yaml").is_file():
        return _compose_again(old, parsed)
    mode = _known_choice("mode", _value_of("mode", parsed) or "rl", MODES)
    if mode != "rl":
        _refuse_env(mode, env, values)
    elif env is None:
        raise ConfigError(f"no environment: choose one with +env=NAME. {_environments()}")
    folder = _value_of("model.path", parsed)
    if is_tiny(folder):
        groups.setdefault("model", "tiny")
    chosen = [f"{group}={_known_choice(group, name, choices(group))}" for group, name in groups.items()]
    chosen += _env_overrides(env) if env else []
    if groups.get("model") == "tiny" and env in choices("tiny"):
        chosen.append(f"tiny={env}")
    has_gpu = visible_gpus() > 0 if gpu is None else gpu
    defaults = default_config(mode, has_gpu, context_of(folder) if folder else None)
    ConfigStore.instance().store(name="schema", node=defaults)
    with _explained(), initialize_config_dir(str(config_folder()), version_base="1.3"):
        config: Any = OmegaConf.to_object(hydra_compose("config", [*chosen, *values.values()]))
        recipe = hydra_compose("config", chosen) if "algorithm.loss" in values else config
    return _without_settings_of(recipe.algorithm.loss, config, parsed)


def to_yaml(config: Config) -> str:
    """The settings as YAML text; `config_from_yaml` reads it back to an equal `Config`."""
    return OmegaConf.to_yaml(OmegaConf.create(_literal(asdict(config))))


def _literal(value: Any) -> Any:
    """A setting whose text stays as it is: OmegaConf would replace `${NAME}`."""
    if isinstance(value, str):
        return _INTERPOLATION.sub(lambda found: 2 * found[1] + r"\${", value)
    if isinstance(value, dict):
        return {name: _literal(each) for name, each in value.items()}
    return [_literal(each) for each in value] if isinstance(value, list) else value


def config_from_yaml(text: str) -> Config:
    """The reverse of `to_yaml`: keys that are left out keep their defaults."""
    try:
        given = safe_load(text)
        if not isinstance(given, dict | None):
            raise ConfigError(f"not a YAML of settings: {given!r:.80}")
        with _explained():
            config: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(text)))
    except ConfigError:
        raise
    except (ValueError, YAMLError) as error:
        raise ConfigError(f"not a YAML of settings: {' '.join(str(error).split())}") from error
    return config  # a Config: its schema says so


def config_folder() -> Path:
    """The folder `configs/`: beside the packages in a checkout, inside `agent_train` when installed from a wheel."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(f"configs/config.yaml is neither in {package} nor beside it: install agentgym again")


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (config_folder() / group).glob("*.yaml"))


def environment_names() -> list[str]:
    """Every environment that can be named: files of `configs/env` and registered ids, sorted."""
    return sorted({*choices("env"), *registry})


def _parse(overrides: Sequence[str]) -> list[Override]:
    parser = OverridesParser.create()
    parsed = []
    for given in overrides:
        key, _, value = given.partition("=")
        text = given
        if key in ("agent", "agent.run") and value != "null":  # its words may have any characters
            text = f"agent.run={QuotedString(_literal(value), Quote.single).with_quotes()}"
        elif key.lstrip("+").startswith("env.players.") and value == "null":  # the agent of this name
            text = f"{key}='null'"
        if "=" not in text:
            hint = f"did you mean +env={text}" if text in environment_names() else "settings are written key=value"
            raise ConfigError(f"{text!r} is not a setting: {hint}")
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            hint = "cannot be read as key=value; put a value with special characters in quotes"
            raise ConfigError(f"{text}: {hint}") from error
        if override.is_delete() or override.package or override.is_sweep_override():
            raise ConfigError(f"{text}: a run takes one value for each key, as in key=value")
        parsed.append(override)
    return parsed


def _compose_again(settings: Path, overrides: Sequence[Override]) -> Config:
    try:
        given = to_yaml(config_from_yaml(settings.read_text(encoding="utf-8")))
        merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(given))
    except ConfigError as error:
        raise ConfigError(*(f"{settings}: {problem}" for problem in error.problems)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{settings} cannot be read: {error}") from error
    loss = merged.algorithm.loss
    with _explained():
        for override in overrides:
            key = override.key_or_group
            OmegaConf.update(merged, key, _plain(override.value()), force_add=key.startswith(FREE_KEYS))
        config: Any = OmegaConf.to_object(merged)
    return _without_settings_of(loss, config, overrides)


def _without_settings_of(loss: str, config: Config, overrides: Sequence[Override]) -> Config:
    """Without the settings of a `loss` that the overrides replace, unless they give them: another loss has its own."""
    algorithm = config.algorithm
    if algorithm.loss != loss:
        given: set[str] = set()
        for override in overrides:
            section, _, name = override.key_or_group.partition("loss_settings")
            if section == "algorithm.":
                given |= {name[1:]} if name else set(_plain(override.value()))
        algorithm.loss_settings = {name: value for name, value in algorithm.loss_settings.items() if name in given}
    return config


def _plain(value: Any) -> Any:
    """The value of an override, without its quotes."""
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, dict):
        return {_plain(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def _choice_name(override: Override) -> str:
    value = _plain(override.value())
    if not isinstance(value, str) or not value:
        group = override.key_or_group
        hint = f"{group} takes the name of a choice; settings are written {group}.key=value"
        raise ConfigError(f"{override.input_line}: {hint}")
    return value


def _value_of(key: str, overrides: Sequence[Override]) -> str | None:
    """The last value that the command line gives a key."""
    named = [_plain(override.value()) for override in overrides if override.key_or_group == key]
    return str(named[-1]) if named and named[-1] else None


def _check_key(key: str) -> None:
    keys = settings()
    if key in keys:
        return
    if inside := [known for known in keys if known.startswith(f"{key}.")]:
        raise ConfigError(f"{key!r} is a section: set one of its keys: {', '.join(inside)}")
    raise ConfigError(f"unknown key {key!r}: did you mean {' or '.join(_meant(key, keys))}?")


def _meant(key: str, keys: Collection[str]) -> list[str]:
    """Suggestions for an unknown key: a name of other toolkits, a longer or shorter form, one with more words, or the most alike."""
    section, _, name = key.rpartition(".")
    leaf_of = {known: known.rpartition(".")[2] for known in keys}
    if ours := ELSEWHERE.get(name):
        beside = f"{section}.{leaf_of[ours]}"
        return [beside if beside in keys else ours]
    long = [known for known, leaf in leaf_of.items() if min(len(name), len(leaf)) > 2]
    near = [known for known in long if known.rpartition(".")[0] == section]
    forms = [known for known in near if leaf_of[known].startswith(name) or name.startswith(leaf_of[known])]
    same = [known for known, leaf in leaf_of.items() if leaf == name]
    same += [known for known in long if not section and leaf_of[known].startswith(name) and known not in same]
    shortest = sorted(same, key=lambda known: len(leaf_of[known]))
    return forms or more_words(key, keys) or shortest or [closest(key, keys)]


def _known_choice(group: str, name: str, names: Sequence[str]) -> str:
    if name not in names:
        guess = f"did you mean {group}={closest(name, names)}? Choices: {', '.join(names)}"
        raise ConfigError(f"{group}={name}: unknown choice: {guess}")
    return name


def _refuse_env(mode: str, env: str | None, values: dict[str, str]) -> None:
    for named in [*([f"env={env}"] if env else []), *(key for key in values if key.startswith("env."))]:
        raise ConfigError(
            f"{named}: mode={mode} learns from data.train and plays no environment: leave one of the two out"
        )


def _env_overrides(name: str) -> list[str]:
    if name in choices("env"):
        return [f"env={name}"]
    try:
        found = spec(name)
    except UnknownEnvError as error:
        guess = f"did you mean {closest(name, environment_names())}? {_environments()}"
        raise ConfigError(f"unknown environment {name!r}: {guess}") from error
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"env={name}: {first_line(error)}") from error
    env_id = name if ":" in name else found.id
    return [f"++env.id={QuotedString(env_id, quote=Quote.single).with_quotes()}"]


def _environments() -> str:
    return f"Environments: {', '.join(environment_names())}"


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error)) from error


def _explain(error: BaseException) -> str:
    """One line for an error of Hydra or OmegaConf: the key, the value, and what the key takes."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return first_line(error)
    key = str(getattr(cause, "full_key", None) or "")
    keys = settings()
    is_section = any(known.startswith(f"{key}.") for known in keys)
    if key and key not in keys and not is_section and not key.startswith(FREE_KEYS):
        return f"unknown key {key!r}: did you mean {closest(key, keys)}?"
    wanted = KINDS.get(keys[key].kind) if key in keys else None
    problem = first_line(cause)
    return f"{key}: needs {wanted}: {problem}" if wanted else f"{key}: {problem}" if key else problem
