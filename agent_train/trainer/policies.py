"""The policies of a run that learn, each with the engine that plays it: most runs have one, and `env.players.NAME=own` adds one."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agent_train.config.schema import Config
from agent_train.engine.base import Engine
from agent_train.learner.actor_group import Learner
from agent_train.learner.role_start import Models
from agent_train.learner.roles import sends_adapters
from agent_train.trainer.run_folder import RunFolder
from agent_train.weights.sync import sync, sync_adapter, sync_files


@dataclass(frozen=True)
class LearningPolicy:
    """The learner of a policy, and the engine that is given its weights."""

    config: Config
    learner: Learner
    engine: Engine
    folder: Path  # of what the engine reads
    changing: asyncio.Lock  # held while weights of the run's policies change or are sent

    async def send(self, version: int) -> int:
        """Move the weights into the engine as a version: a vLLM engine gets adapters alone. See `weights.sync`."""
        if sends_adapters(self.config):
            return await sync_adapter(self.learner, self.engine, self.folder / "adapters", version)
        if self.config.engine.weights != "collective":
            return await sync_files(self.learner, self.engine, self.folder / "weights", version)
        return await sync(self.learner, self.engine, version)

    async def watch(self) -> None:
        """Send the present weights to the engine whenever it has replaced a part of itself, until cancelled."""
        while True:
            await self.engine.stale()
            async with self.changing:
                if self.engine.lacks_weights:  # else a step has sent newer ones
                    await self.send(self.engine.version)


def learning_policies(
    config: Config, folder: RunFolder, models: Models, engine: Engine, own: Mapping[str, Engine]
) -> list[LearningPolicy]:
    """The run's policy, which `engine` plays, and those that players have for themselves, with their engines."""
    changing = asyncio.Lock()
    found = [LearningPolicy(config, models.policy, engine, folder.path, changing)]
    for player, playing in own.items():
        found.append(LearningPolicy(config, models.own[player], playing, folder.of_player(player), changing))
    return found
