"""Everything that can be wrong with an evaluation, tried before anything is played."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from agentgym.core import registration
from agentgym.core.registration import EnvSpec
from agentgym.evaluate.agents import check_plays, located, policy_maker
from agentgym.evaluate.plan import AgentSpec, Cell
from agentgym.evaluate.prices import Prices
from agentgym.evaluate.probe import probe
from agentgym.evaluate.run import model_of
from agentgym.rollout.episode import close_env

_ANYWHERE = "http://127.0.0.1:9/v1"


def check_agents(agents: Sequence[AgentSpec], serve_args: Sequence[str] = ()) -> None:
    """Whether agents can be made; nothing is asked of any endpoint.

    Args:
        agents: what plays.
        serve_args: more arguments of the server of model folders.

    Raises:
        ValueError: one cannot.
    """
    for agent in agents:
        folder = agent.settings.get("serve")
        if folder is not None:
            from agentgym.evaluate.serving import check_serving

            check_serving(folder, serve_args)
            agent = located(agent, _ANYWHERE)  # noqa: PLW2901 - where it will be is not known yet
        policy_maker(agent)


def check_envs(cells: Sequence[Cell]) -> list[str]:
    """Whether each environment can be made, has the split and suits its agents.

    Returns:
        What people should know: where tasks come from, and which back end sandboxes have.

    Raises:
        ValueError: one of this is not so.
    """
    from agentgym.sandbox import SandboxError, describe

    notes: dict[str, None] = {}
    by_env: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        by_env[cell.env.id].append(cell)
    for own in by_env.values():
        env = own[0].env
        try:
            _check_needs(env)
            image = _tried(env, [cell.agent for cell in own])
            for cell in own:
                tasks = cell.tasks()
                if tasks.source:
                    notes[f"{env.id}: tasks: {tasks.source}"] = None
            if image:
                notes[f"{env.id}: sandbox: {describe(env.kwargs.get('sandbox'), image)}"] = None
        except (ValueError, TypeError, ImportError, OSError, SandboxError) as error:
            # Most say which environment it is; those of other people's code need not.
            text = str(error) or type(error).__name__
            raise ValueError(text if env.id in text else f"{env.id}: {text}") from error
        except Exception as error:
            raise ValueError(f"{env.id}: cannot be made: {type(error).__name__}: {error}") from error
    return list(notes)


def _check_needs(env: EnvSpec) -> None:
    """Whether the packages are here that an environment needs as it is registered; other arguments may need others.

    Raises:
        ValueError: one is not.
    """
    missing = env.missing()
    made = (env.entry_point, env.kwargs)
    if missing and any((known.entry_point, known.kwargs) == made for known in registration.registry.values()):
        raise ValueError(f"{env.id} needs {missing[0]}, which is not installed: pip install {missing[0]!r}")


def _tried(of: EnvSpec, agents: Sequence[AgentSpec]) -> str | None:
    """Make an environment, and close it; the image of its sandboxes."""
    env = of.make()
    try:
        for agent in agents:
            check_plays(agent, env)
        return getattr(env.unwrapped, "sandbox_image", None)
    finally:
        asyncio.run(close_env(env))


async def check_endpoints(agents: Sequence[AgentSpec]) -> list[str]:
    """Whether the endpoints of chats answer and have their models; see `probe`.

    Returns:
        What is not known.

    Raises:
        ValueError: one cannot play.
    """
    models: dict[str, list[str]] = defaultdict(list)
    for agent in agents:
        if agent.kind == "chat" and "serve" not in agent.settings:
            models[agent.settings["base_url"]].append(agent.settings["model"])
    found = await asyncio.gather(*(probe(url, names) for url, names in models.items()))
    return [note for note in found if note is not None]


def check_prices(agents: Sequence[AgentSpec], prices: Prices | None) -> None:
    """Whether a limit of cost can be kept: every model behind an endpoint, and every agent of the user's own, needs a price.

    Raises:
        ValueError: one has none.
    """
    for agent in agents:
        if agent.kind == "python" or (agent.kind == "chat" and "serve" not in agent.settings):
            if prices is None:
                raise ValueError("a limit of cost needs a table of prices: --prices FILE")
            if prices.cost(model_of(agent), {}) is None:
                raise ValueError(
                    f"a limit of cost needs prices of all models: the table has none of {model_of(agent)!r}"
                )
