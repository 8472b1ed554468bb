"""Players that are played by the policy of an earlier step of the run: `env.players.NAME=past`.

The weights of those steps are in the run's folder, and a second engine holds one of them: in a step the one that `opponent_of`
draws, in an evaluation the first, so that evaluations can be compared.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from agent_train.algorithms.ratings import FIRST, NOW, PlayersMetrics, after_games, draw, kept_steps, score_of
from agent_train.config.schema import PAST, Config
from agent_train.engine.base import Engine
from agent_train.learner.actor_group import Learner
from agent_train.trainer.checkpoint import CheckpointError, Progress
from agent_train.trainer.run_folder import RunFolder, step_of
from agent_train.trainer.schedule import derive_seed
from agent_train.weights.sync import load_saved
from agentgym.core.trajectory import Trajectory
from agentgym.storage.files import read_object, write_json


def past_players(config: Config) -> list[str]:
    return [player for player, agent in config.env.players.items() if agent == PAST]


def ratings_of(progress: Progress) -> Mapping[str, float]:
    return progress.ratings or {NOW: FIRST, "0": FIRST}


def opponent_of(config: Config, progress: Progress) -> int:
    """The step whose policy the next step meets. It follows from the seed, the step and the ratings."""
    steps = kept_steps(progress.step, config.env.past_every, config.env.past_keep)
    return draw(ratings_of(progress), steps, derive_seed(config.trainer.seed, "opponent", progress.step))


def rated(
    config: Config, progress: Progress, played: Sequence[Trajectory]
) -> tuple[dict[str, float], PlayersMetrics | None]:
    """The ratings after a step that began with `progress`, and its metrics; none where no player is of the past."""
    past, env = past_players(config), config.env
    if not past:
        return {}, None
    ratings, met = dict(ratings_of(progress)), str(opponent_of(config, progress))
    games = [(t.rewards, [player for player in t.rewards if player not in env.players]) for t in played if not t.failed]
    scores = [score_of(rewards, past, learning) for rewards, learning in games if learning]
    ratings[NOW], ratings[met] = after_games(ratings[NOW], ratings[met], scores)
    mean = sum(scores) / len(scores) if scores else None
    metrics = PlayersMetrics(ratings[NOW], int(met), ratings[met], mean)
    step = progress.step + 1
    if step % env.past_every == 0:
        ratings[str(step)] = ratings[NOW]
    kept = [NOW, *map(str, kept_steps(step, env.past_every, env.past_keep))]
    return {name: ratings[name] for name in kept}, metrics


@dataclass
class Past:
    """The weights of earlier steps, and the engine that holds one of them."""

    config: Config
    run: RunFolder
    engine: Engine
    _held: int | None = None
    _loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _met: asyncio.Event = field(default_factory=asyncio.Event)

    async def keep(self, policy: Learner, step: int) -> None:
        """Save the weights of a step, if it is one whose policy may be met; then those go that no checkpoint needs any more."""
        every, keep = self.config.env.past_every, self.config.env.past_keep
        if step % every:
            return
        sums = await policy.save_weights(self.run.past_weights(step), whole=True)
        write_json(self.run.past_weights(step).with_suffix(".json"), sums)
        saved = self.run.saved_checkpoints()[-self.config.trainer.keep_checkpoints :]
        if saved and len(needed := kept_steps(step_of(saved[0]), every, keep)) > 1:
            self.run.forget_past_weights(needed[1])

    async def meet(self, step: int) -> None:
        """Give the engine the weights of a step. Raises CheckpointError if they are gone, and as `load_saved`."""
        async with self._loading:
            await self._load(step)
            self._met.set()

    async def _load(self, step: int) -> None:
        if step == self._held and not self.engine.lacks_weights:
            return
        folder = self.run.past_weights(step)
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} is gone, the weights that a player of env.players is played by: remove the checkpoints that "
                "need it to go back further"
            )
        sums = read_object(folder.with_suffix(".json"))
        await load_saved(self.engine, folder, step, sums)
        self._held = step

    async def watch(self) -> None:
        """Give the engine its weights again whenever it has replaced a part of itself, until cancelled."""
        await self._met.wait()
        while True:
            await self.engine.stale()
            async with self._loading:
                await self._load(cast("int", self._held))  # whoever waited here first may have loaded others
