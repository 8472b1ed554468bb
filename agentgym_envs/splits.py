"""Train and test splits that share no content.

Two seeds can make the same level, so a hash of a level's content decides its split, and a seed's generator draws until
it finds a level of that split. The hash covers only what play cannot change (the map, not the player's position), so no
state met in training belongs to a held-out level.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterable
from importlib import resources
from typing import Any

from agentgym.core.tasks import Task, TaskSet

SEEDS = {"train": range(100_000), "test": range(1_000_000, 1_001_000)}
HELD_OUT = 8  # one level in this many belongs to the test split
IsTaken = Callable[[str], bool]
MAX_TRIES = 20_000
MAX_REPEATS = 200  # draws of taken levels after which the split counts as complete


def split_of(content: str) -> str:
    """ "train" or "test", by a hash of the content; the same in every process and Python version."""
    digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).digest()
    return "test" if int.from_bytes(digest[:8], "big") % HELD_OUT == 0 else "train"


def never(level: str) -> bool:
    return False


def draw(
    seed: int,
    split: str,
    propose: Callable[[random.Random], str | None],
    content: Callable[[str], str],
    accept: Callable[[str], bool] = lambda level: True,
    is_taken: IsTaken = never,
) -> str:
    """The level of a seed: the first proposal of `split` that is not taken and is accepted.

    Args:
        propose: draws a level, or None if the draw failed.
        content: the part of a level that is hashed; see the module.
        accept: the expensive check, called last.
        is_taken: says if the split already has this level. A taken one is returned after `MAX_REPEATS` draws of such,
            or after `MAX_TRIES` draws: a split may have more tasks than there are small levels.
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
    if split not in splits:
        raise ValueError(f"{name} has no split {split!r}; it has {', '.join(splits)}")


def generated_tasks(
    game: str,
    split: str,
    propose: Callable[[random.Random], str | None],
    content: Callable[[str], str],
    accept: Callable[[str], bool] = lambda level: True,
    identity: Callable[[str], str] | None = None,
    describe: Callable[[str], tuple[Any, dict[str, Any]]] = lambda level: (None, {"level": level}),
) -> TaskSet:
    """100,000 train or 1,000 test tasks, generated on access by `draw`.

    Test levels are distinct, so a test task depends on all earlier ones, which are generated first. `identity` maps
    equal levels (for example mirrored ones) to the same text; `describe` gives a task's answer and metadata.
    """
    check_split(game, split)
    seeds = SEEDS[split]

    def made(seed: int, is_taken: IsTaken = never) -> str:
        return draw(seed, split, propose, content, accept, is_taken)

    level_of_seed = without_repeats(seeds, made, identity or content) if split == "test" else made

    def make(seed: int) -> Task:
        answer, about = describe(level_of_seed(seed))
        return Task(
            f"{game}-{split}-{seed - seeds.start}", answer=answer, seed=seed, metadata={"split": split, **about}
        )

    return TaskSet.generate(make, seeds, name=f"{game}/{split}")


def without_repeats(
    seeds: range, make: Callable[[int, IsTaken], str], identity: Callable[[str], str]
) -> Callable[[int], str]:
    """A function from seed to level that returns distinct levels (by `identity`) while there are any left."""
    known: dict[int, tuple[str, str]] = {}

    def level(seed: int) -> str:
        # No lock: concurrent threads make the same level, and task sets must stay picklable.
        if seed not in known:
            taken: set[str] = set()
            for earlier in range(seeds.start, seed + 1):
                if earlier not in known:
                    all_known = len(taken) < earlier - seeds.start  # a level has repeated: there are no others
                    found = make(earlier, never if all_known else lambda level: identity(level) in taken)
                    known[earlier] = found, identity(found)
                taken.add(known[earlier][1])
        return known[seed][0]

    return level


def level_of(task: Task, game: str) -> str:
    level = task.metadata.get("level")
    if not isinstance(level, str) or not level:
        raise ValueError(f'{game}: task {task.id!r} has no level: give metadata={{"level": "..."}} as text')
    return level


def own_records(package: str, file: str) -> list[dict[str, Any]]:
    text = resources.files(package).joinpath(file).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def own_tasks(
    package: str, file: str, split: str, make: Callable[[dict[str, Any], str], Task], *, name: str, source: str
) -> TaskSet:
    """The tasks of a split in a JSON Lines file beside the environments, with the ids "own-train-0", "own-train-1" and so on; `make` gets a record and the id."""
    records = [record for record in own_records(package, file) if record["split"] == split]
    if not records:
        raise ValueError(f"{source} have no split {split!r}; they have train, test")
    tasks = [make(record, f"own-{split}-{place}") for place, record in enumerate(records)]
    return TaskSet(tasks, name=f"{name}/{split}", source=source)
