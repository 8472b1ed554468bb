"""Starting the models of a run, side by side, and giving those that begin as the policy does its weights."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_train.cluster.lost import side_by_side
from agent_train.config.schema import Config
from agent_train.learner.roles import check_folder, learns, own_players, roles_of, source_of, start_of
from agent_train.report.timeline import Timeline

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from agent_train.engine.teacher import Teacher
    from agent_train.learner.actor_group import Learner


@dataclass(frozen=True)
class Models:
    """The models of a run. None where nothing asks for one."""

    policy: Learner  # the model that is trained
    reference: Learner | None = None  # frozen; the policy is held to it, and PRIME's reward model started from it
    critic: Learner | None = None  # gives values, and learns them
    prm: Learner | None = None  # PRIME's process reward model, which learns from outcomes
    teacher: Learner | Teacher | None = None  # frozen, or an endpoint
    reward_model: Learner | None = None  # frozen; scores whole trajectories
    own: Mapping[str, Learner] = field(default_factory=dict)  # the policies that players have for themselves

    @property
    def policies(self) -> list[Learner]:
        """The run's policy, and those of players."""
        return [self.policy, *self.own.values()]

    def of(self, player: str | None) -> Models:
        """The models with a player's policy in place of the run's; None: the run's own."""
        return self if player is None else replace(self, policy=self.own[player], own={})


def learning(config: Config, models: Models) -> list[Learner]:
    """The models that learn, the run's policy first: what a checkpoint holds."""
    beside = (models.critic, models.prm, *models.own.values())
    return [models.policy, *(role for role in beside if role is not None and learns(config, role.role))]


def check_vocabularies(config: Config, policy_dir: str | Path) -> None:
    """Raise VocabularyError for the first role whose folder means something else by an id than the policy."""
    for role in roles_of(config):
        if role != "policy" and source_of(config, role):
            section = role if role != "prm" else "critic" if config.critic.path else "reference"
            check_folder(start_of(config, role, policy_dir), policy_dir, f"{section}.path")


async def start_models(
    config: Config,
    model_dir: str | Path,
    begin: str | Path,
    stack: AsyncExitStack,
    timeline: Timeline | None = None,
    bundles: PlacementGroup | None = None,
) -> Models:
    """Start every role, and the policies of players, side by side, from `begin` where no folder is named; each is closed with the stack, also if another fails.

    `bundles` are those of `shared_devices`, if the engine shares them too.
    """
    from agent_train.engine.teacher import Teacher
    from agent_train.learner.actor_group import Learner, shared_devices, shipping

    bundles = bundles or await shared_devices(config)
    ship = shipping(config)

    async def open_role(role: str, player: str | None = None) -> Learner:
        folder = Path(model_dir) if role == "policy" else start_of(config, role, begin)
        learner = await Learner.start(folder, config, role, bundles, ship, player)
        learner.timeline = timeline or learner.timeline
        stack.callback(learner.close)
        return learner

    async def open_endpoint() -> Teacher:
        teacher = await Teacher.connect(config, model_dir)
        stack.push_async_callback(teacher.close)
        return teacher

    async with side_by_side() as starting:
        parts: dict[str, Any] = {role: starting.create_task(open_role(role)) for role in roles_of(config)}
        own = {player: starting.create_task(open_role("policy", player)) for player in own_players(config)}
        if config.algorithm.advantage.name == "distill" and config.teacher.url is not None:
            parts["teacher"] = starting.create_task(open_endpoint())
    models = {role: task.result() for role, task in parts.items()}
    return Models(**models, own={player: task.result() for player, task in own.items()})


async def begin_as_policy(config: Config, models: Models, begin: str | Path) -> None:
    """After the warm start: save the policy to `begin`, and load from there the models for which the settings name no folder."""
    beside = (models.reference, models.critic, models.prm)
    following = [role for role in beside if role is not None and source_of(config, role.role) is None]
    if following:
        await models.policy.save(begin)
        await asyncio.gather(*(role.load(begin) for role in following))
