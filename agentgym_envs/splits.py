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

from agentgym.core.tasks import Task, TaskSet

SEEDS = {"train": range(100_000), "test": range(1_000_000, 1_001_000)}
HELD_OUT = 8  # one level in this many belongs to the test split
IsTaken = Callable[[str], bool]
MAX_TRIES = 20_000
MAX_REPEATS = 200  # draws of levels that the split has already, after which it is taken to have all


def split_of(content: str) -> str:
    """The split that content belongs to, "train" or "test": the same in every process and version of Python."""
    digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).digest()
    return "test" if int.from_bytes(digest[:8], "big") % HELD_OUT == 0 else "train"


def never(level: str) -> bool:
    """No level is taken."""
    return False


def draw(
    seed: int,
    split: str,
    propose: Callable[[random.Random], str | None],
    content: Callable[[str], str],
    accept: Callable[[str], bool] = lambda level: True,
    is_taken: IsTaken = never,
) -> str:
    """The level of a seed: the first proposal that belongs to `split`, is not taken, and is accepted.

    Args:
        seed: seeds the proposals.
        split: "train" or "test".
        propose: draws a level, or None where the draw came to nothing.
        content: what of a level is hashed; see the module.
        accept: the costly check, asked last.
        is_taken: whether the split has such a level already. One is given again where `MAX_REPEATS` draws or all of
            `MAX_TRIES` find no other: small levels may be fewer than the tasks of a split.

    Raises:
        ValueError: no such level in `MAX_TRIES` proposals: the settings leave none.
    """
    rng = random.Random(seed)
    repeats, again = 0, None
    for _ in range(MAX_TRIES):
        level = propose(rng)
        if level is None or split_of(content(level)) != split:
            continue
        if not is_taken(level):
            if accept(level):
                return level
            continue
        repeats += 1
        if again is None and accept(level):
            again = level
        if repeats >= MAX_REPEATS and again is not None:
            break
    if again is not None:
        return again
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
    game: str,
    split: str,
    make_level: Callable[[int, IsTaken], str],
    identity: Callable[[str], str],
    rate: Callable[[str], int] | None = None,
) -> TaskSet:
    """100,000 train or 1,000 test tasks, each made when it is asked for; `metadata["level"]` holds the level.

    No test level comes twice, so that of a task depends on those before it, which are made first.

    Args:
        game: for ids and names.
        split: "train" or "test".
        make_level: the level of a seed, given `is_taken` of `draw`.
        identity: what two levels have in common that are the same, turned or mirrored, say.
        rate: what `metadata["difficulty"]` says of a level; default: there is none.

    Raises:
        ValueError: no such split.
    """
    seeds = seeds_of(split, game)
    made = without_repeats(seeds, make_level, identity) if split == "test" else lambda seed: make_level(seed, never)

    def make(seed: int) -> Task:
        level = made(seed)
        metadata = {"split": split, "level": level, **({} if rate is None else {"difficulty": rate(level)})}
        return Task(id=f"{game}-{split}-{seed - seeds.start}", seed=seed, metadata=metadata)

    return TaskSet.generate(make, seeds, name=f"{game}/{split}")


def without_repeats(
    seeds: range, make: Callable[[int, IsTaken], str], identity: Callable[[str], str]
) -> Callable[[int], str]:
    """A function from a seed to its level, in which no two seeds have the same level by `identity`, while there are others."""
    known: dict[int, tuple[str, str]] = {}

    def level(seed: int) -> str:
        # No lock: threads that make a level at once make the same one, and sets of tasks can be sent to other processes.
        if seed not in known:
            taken: set[str] = set()
            for earlier in range(seeds.start, seed + 1):
                if earlier not in known:
                    all_known = len(taken) < earlier - seeds.start  # one has come twice: do not look for others again
                    found = make(earlier, never if all_known else lambda level: identity(level) in taken)
                    known[earlier] = found, identity(found)
                taken.add(known[earlier][1])
        return known[seed][0]

    return level


def level_of(task: Task, game: str) -> str:
    """The level that a task carries.

    Raises:
        ValueError: the task carries none.
    """
    level = task.metadata.get("level")
    if not isinstance(level, str) or not level:
        raise ValueError(f'{game}: task {task.id!r} has no level: give metadata={{"level": "..."}} as text')
    return level
