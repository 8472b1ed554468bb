"""Images of instances: published ones made ready (`published.py`), and those rebuilt from source releases of the package index.

A rebuilt image has four layers: `sandboxes/swe`; an environment, which the instances of a range of versions share; a source
release at /testbed; and what turns it into the instance. `image_of` writes the folders that say so; `build` makes the images.
"""

import json
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agentgym.datasets import locate
from agentgym.sandbox.api import SandboxError
from agentgym.sandbox.images import build as images
from agentgym.sandbox.images import interpreters, layers
from agentgym.sandbox.images.instances import InstanceImage
from agentgym_envs.swe_bench import published, repository
from agentgym_envs.swe_bench.instance import Instance
from agentgym_envs.swe_bench.instances import read_instances
from agentgym_envs.swe_bench.recipes import Recipe, recipe_of

FORMAT = 2  # of what `repository.py` makes; another number makes every image anew
JOBS = 2


def image_of(instance: Instance, tests: bool = False) -> str:
    """The folder of an instance's image, which `build` makes; `tests`: with hidden tests that its published image holds.

    ValueError: the instance has no image, and none can be rebuilt.
    """
    recipe = recipe_of(instance)
    if recipe is not None:
        return str(_folder_of(instance, recipe))
    if instance.image:
        files = published.files(instance, instance.image, tests)
        return str(_written(_file_name(instance.id), {**files, layers.MADE_BY: _command(instance.id)}))
    remedy = 'give the record an "image", the reference of a Docker image with the repository at /testbed'
    raise ValueError(f"instance {instance.id}: no image is known for {instance.repo} {instance.version}: {remedy}")


def build(
    instances: Iterable[Instance],
    *,
    docker: bool | None = None,
    force: bool = False,
    rootfs: bool = True,
    jobs: int = JOBS,
    say: Callable[[str], None] = lambda text: None,
) -> list[InstanceImage]:
    """Build the images that are missing, in the order of the instances; one that fails is told, and the others go on.

    `rootfs`: as for `images.build`, for published images.
    """

    def one(instance: Instance) -> InstanceImage:
        try:
            made = _build(instance, docker, force, rootfs, lambda text: say(f"{instance.id}: {text}"))
        except (SandboxError, ValueError) as error:
            say(f"{instance.id}: {error}")
            return InstanceImage(instance.id, error=str(error))
        say(f"{instance.id}: {f'made in {made.seconds:.1f} s' if made.fresh else 'already there'}")
        return InstanceImage(instance.id, made)

    with ThreadPoolExecutor(max(jobs, 1)) as threads:
        return list(threads.map(one, instances))


def build_file(
    file: str,
    only: Iterable[str],
    docker: bool | None,
    force: bool,
    rootfs: bool,
    jobs: int,
    say: Callable[[str], None],
) -> list[InstanceImage]:
    """`build` for the instances of a file, here or in the data folder, or of a data set, or `only` some by their ids.

    ValueError, OSError: a wrong one.
    """
    here = Path(file).expanduser().is_file()
    found = {instance.id: instance for instance in read_instances(file if here else locate(file) or file)}
    if unknown := [id for id in only if id not in found]:
        raise ValueError(f"{file} has no instance {unknown[0]!r}; it has {len(found)}, such as {min(found)}")
    chosen = [found[id] for id in (only or found)]
    return build(chosen, docker=docker, force=force, rootfs=rootfs, jobs=jobs, say=say)


def _build(
    instance: Instance, docker: bool | None, force: bool, rootfs: bool, say: Callable[[str], None]
) -> images.Built:
    recipe = recipe_of(instance)
    if recipe is None or instance.sdist is None:
        [*_, made] = [
            images.build(image, docker=docker, force=force, say=say, rootfs=rootfs)
            for image in dict.fromkeys(image_of(instance, tests) for tests in (True, False))
        ]
        return made
    sdist, cache = instance.sdist, _cache() / "releases"
    release = str(_release_of(sdist, recipe))

    def fill_release(root: Path) -> None:
        repository.make_release(sdist, recipe, cache, root)

    def fill(root: Path) -> None:
        below = images.rootfs(release)
        if below is None:
            raise SandboxError(f"{release} was removed while {instance.id} was being built")
        repository.make_instance(instance, cache, below, root)

    images.build(release, docker=docker, say=say, fill=fill_release)
    return images.build(str(_folder_of(instance, recipe)), docker=docker, force=force, say=say, fill=fill)


def _cache() -> Path:
    return images.cache_folder().parent / "swe_bench"


def _folder_of(instance: Instance, recipe: Recipe) -> Path:
    """The folder of the instance's layer: all that it is made of, so that another patch gives another image."""
    patches = {"format": FORMAT, "patch": instance.patch, "test_patch": instance.test_patch}
    return _layer(instance.id, _release_of(instance.sdist or "", recipe), patches, instance.id)


def _release_of(sdist: str, recipe: Recipe) -> Path:
    files = {layers.BASE: "swe", interpreters.FILE: recipe.python, "requirements.txt": recipe.requirements}
    environment = _written(recipe.name, files)
    made_of: dict[str, object] = {"format": FORMAT, "sdist": sdist, "source": recipe.source}
    made_of |= {"programs": dict(recipe.programs)} if recipe.programs else {}
    made_of |= {"edits": dict(recipe.edits)} if recipe.edits else {}
    return _layer(f"swe-{sdist}", environment, made_of, "ID")


def _layer(name: str, base: Path, made_of: dict[str, object], id: str) -> Path:
    files = {
        layers.BASE: f"../../{base.parent.name}/{base.name}",
        layers.MADE_BY: _command(id),
        "made-of.json": json.dumps(made_of, indent=1),
    }
    return _written(name, files)


def _command(id: str) -> str:
    return f"agentgym sandbox build swe --instances FILE --only {id}"


def _file_name(id: str) -> str:
    return re.sub(r"[^\w.-]", "-", id)


def _written(name: str, files: dict[str, str]) -> Path:
    """A folder of these files, in one that is named by their content; written unless it is there."""
    return images.written_folder(files, lambda digest: _cache() / "images" / digest / name)
