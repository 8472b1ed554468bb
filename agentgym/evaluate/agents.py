"""Agents: a command line becomes an `AgentSpec`, which makes the policy of each episode."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.core.messages import Action, assistant
from agentgym.core.usage_error import instead
from agentgym.evaluate.plan import AgentSpec, read_text, read_values
from agentgym.policies.base import ExpertPolicy, NullPolicy, Policy, RandomPolicy, ScriptedPolicy
from agentgym.rollout.episode import Episode

if TYPE_CHECKING:
    from agentgym.core.env import Env

MakePolicy = Callable[[Episode], Policy]
BUILT_IN = ("expert", "random", "null")
# Settings of a chat that say how it is asked, and not what; they may differ between a run and its resumption.
ASKING = frozenset({"timeout", "retries", "stream"})


def chat(
    model: str,
    base_url: str | None = None,
    *,
    serve: str | Path | None = None,
    name: str | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    extra: Mapping[str, Any] | None = None,
    system: str | None = None,
    send_reasoning: bool = False,
    timeout: float | None = None,
    retries: int | None = None,
    stream: bool = False,
) -> AgentSpec:
    """A model behind an OpenAI-compatible endpoint; arguments as in `ChatPolicy`. The key is no part of it.

    Args:
        base_url: the endpoint. None for a model folder that is served for the run only; see `located`.
        serve: that folder.
        name: default: the model's.
    """
    given = {**locals(), "serve": None if serve is None else str(Path(serve).resolve()), "extra": dict(extra or {})}
    del given["name"]
    settings = {key: value for key, value in given.items() if value is not None and value is not False and value != {}}
    return AgentSpec(name or model, "chat", settings)


def located(agent: AgentSpec, base_url: str, model: str | None = None) -> AgentSpec:
    """The same chat at the endpoint where its folder is served. It is not what a run stores."""
    found = {"base_url": base_url, "model": model or agent.settings["model"]}
    return replace(agent, settings={**agent.settings, **found})


def built_in(policy: str, mistakes: float = 0.0, name: str | None = None) -> AgentSpec:
    """One of `BUILT_IN`: "expert" (`mistakes` is the chance of a random action), "random" or "null"."""
    if policy not in BUILT_IN:
        raise ValueError(f"no policy {policy!r}{instead(policy, BUILT_IN)}")
    return AgentSpec(name or policy, policy, {"mistakes": mistakes} if mistakes else {})


def scripted(answers: Sequence[Action] | Mapping[str, Sequence[Action]], name: str = "scripted") -> AgentSpec:
    """The same answers in every episode, or those of its task by the task's id."""
    return AgentSpec(name, "scripted", {"answers": dict(answers) if isinstance(answers, Mapping) else list(answers)})


def scripted_file(script: str | Path, name: str | None = None) -> AgentSpec:
    """A script from a file: `.json` has a list of answers, or an object of them by task; any other an answer a line."""
    path = Path(script)
    answers = read_values(path) if path.suffix == ".json" else read_text(path).splitlines()
    if not isinstance(answers, list | dict):
        raise ValueError(f"script {path}: a list of answers is needed, or an object of lists by task id")
    return scripted(answers, name or path.stem)


def python(agent: str, kwargs: Mapping[str, Any] | None = None, name: str | None = None) -> AgentSpec:
    """The user's own agent, `pkg.mod:run`; see `agentgym.evaluate.python_agent` for what it may be."""
    return AgentSpec(name or agent, "python", {"target": agent, **({"kwargs": dict(kwargs)} if kwargs else {})})


def policy_maker(agent: AgentSpec) -> MakePolicy:
    """The function that makes the policy of each episode.

    Raises:
        ValueError: an unknown kind or setting, a bad URL, a target that is not there or takes other arguments.
    """
    maker = _MAKERS.get(agent.kind)
    if maker is None:
        raise ValueError(f"agent {agent.name!r}: there is no kind {agent.kind!r}, only {', '.join(_MAKERS)}")
    try:
        return maker(**agent.settings)
    except TypeError as error:
        raise ValueError(f"agent {agent.name!r} ({agent.kind}): {error}") from error


def check_plays(agent: AgentSpec, env: Env) -> None:
    """Raise ValueError if an agent plays by a method that the environment does not have."""
    name = {"expert": "expert_action", "random": "random_action"}.get(agent.kind)
    if name is not None and not hasattr(env.unwrapped, name):
        raise ValueError(f"agent {agent.name!r} cannot play {type(env.unwrapped).__name__}: it has no {name}()")


def _chat_maker(model: str, base_url: str | None = None, serve: str | None = None, **settings: Any) -> MakePolicy:
    from agentgym.policies.chat import ChatPolicy

    if not base_url:
        served = f" of {serve}, which is not served yet" if serve else ""
        raise ValueError(f"model {model!r}: the base_url of its endpoint{served} is missing")
    make = partial(ChatPolicy, model, base_url, None, **settings)
    make(seed=0)
    return lambda episode: make(seed=episode.seed)


def _expert_maker(mistakes: float = 0.0) -> MakePolicy:
    ExpertPolicy(mistakes=mistakes)
    return lambda episode: ExpertPolicy(mistakes=mistakes, rng=_generator(episode))


def _generator(episode: Episode) -> random.Random:
    """A generator seeded for this episode, or random play would repeat itself."""
    return random.Random(f"{(episode.seed or 0) - episode.sample} {episode.task.id} {episode.sample}")


def _scripted_maker(answers: Sequence[Action] | Mapping[str, Sequence[Action]]) -> MakePolicy:
    for where, answer in _answers_of(answers):
        try:
            assistant(answer)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the script's answer {where}: {error}") from error
    return lambda episode: ScriptedPolicy(answers.get(episode.task.id, ()) if isinstance(answers, Mapping) else answers)


def _answers_of(answers: Any) -> Iterator[tuple[str, Any]]:
    for place, listed in answers.items() if isinstance(answers, Mapping) else [("", answers)]:
        if not isinstance(listed, list | tuple):
            raise ValueError(f"a script is a list of answers, or an object of lists by task id, not {listed!r:.80}")
        for number, answer in enumerate(listed, start=1):
            yield f"{place} {number}".strip(), answer


def _python_maker(target: str, kwargs: Mapping[str, Any] | None = None) -> MakePolicy:
    from agentgym.evaluate.python_agent import PythonAgent, PythonPolicy

    agent = PythonAgent.load(target, kwargs or {})
    return lambda episode: PythonPolicy(agent)


_MAKERS: dict[str, Callable[..., MakePolicy]] = {
    "chat": _chat_maker,
    "expert": _expert_maker,
    "random": lambda: lambda episode: RandomPolicy(rng=_generator(episode)),
    "null": lambda: lambda episode: NullPolicy(),
    "scripted": _scripted_maker,
    "python": _python_maker,
}
