"""Train and test tasks that share no content.

A seed alone does not keep splits apart: two seeds can make the same level. Here a hash of the level's content says to
which split the level belongs, and a seed's generator draws until it has a level of the split it was asked for. What is
hashed is the part of a level that play cannot change (the map, not where the player stands), so no position that a
policy meets in training is a position of a held-out level.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable

from agentgym.tasks import Task, TaskSet

SEEDS = {"train": range(100_000), "test": range(1_000_000, 1_001_000)}
HELD_OUT = 8  # one level in this many belongs to the test split
MAX_TRIES = 20_000


def split_of(content: str) -> str:
    """The split that content belongs to, "train" or "test": the same in every process and version of Python."""
    digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).digest()
    return "test" if int.from_bytes(digest[:8], "big") % HELD_OUT == 0 else "train"


def draw(
    seed: int,
    split: str,
    propose: Callable[[random.Random], str | None],
    fixed_part: Callable[[str], str],
    accept: Callable[[str], bool] = lambda level: True,
) -> str:
    """The level of a seed: the first proposal that belongs to `split` and is accepted.

    Args:
        seed: seeds the proposals.
        split: "train" or "test".
        propose: draws a level, or None where the draw came to nothing.
        fixed_part: what of a level is hashed; see the module.
        accept: the costly check, asked last.

    Raises:
        ValueError: no such level in `MAX_TRIES` proposals: the settings leave none.
    """
    rng = random.Random(seed)
    for _ in range(MAX_TRIES):
        level = propose(rng)
        if level is not None and split_of(fixed_part(level)) == split and accept(level):
            return level
    raise ValueError(
        f"seed {seed}: no {split} level in {MAX_TRIES} draws; choose easier settings (see the game's README)"
    )


def check_split(name: str, split: str, splits: Iterable[str] = SEEDS) -> None:
    """Refuse a split that an environment does not have.

    Raises:
        ValueError: no such split.
    """
    if split not in splits:
        raise ValueError(f"{name} has no split {split!r}; it has {', '.join(splits)}")


def seeds_of(split: str, game: str) -> range:
    """The seeds of a split.

    Raises:
        ValueError: no such split.
    """
    check_split(game, split)
    return SEEDS[split]


def generated_tasks(
    game: str, split: str, make_level: Callable[[int], str], rate: Callable[[str], int] | None = None
) -> TaskSet:
    """100,000 train or 1,000 test tasks; `metadata["level"]` holds what `make_level(seed)` drew, made when asked for.

    `metadata["difficulty"]` is what `rate(level)` says, where it is given.

    Raises:
        ValueError: no such split.
    """
    seeds = seeds_of(split, game)

    def make(seed: int) -> Task:
        level = make_level(seed)
        metadata = {"split": split, "level": level, **({} if rate is None else {"difficulty": rate(level)})}
        return Task(id=f"{game}-{split}-{seed - seeds.start}", seed=seed, metadata=metadata)

    return TaskSet.generate(make, seeds, name=f"{game}/{split}")


def level_of(task: Task, game: str) -> str:
    """The level that a task carries.

    Raises:
        ValueError: the task carries none.
    """
    level = task.metadata.get("level")
    if not isinstance(level, str) or not level:
        raise ValueError(f'{game}: task {task.id!r} has no level: give metadata={{"level": "..."}} as text')
    return level
