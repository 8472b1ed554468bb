"""An environment as a folder in OpenEnv's form, which `openenv build`, `validate` and `push` take.

The code of an environment is copied into the folder, unless an installed package has it: that becomes a requirement.
"""

import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata, resources
from pathlib import Path
from string import Template
from typing import Any

from agentgym import DISTRIBUTION, __version__
from agentgym.core.registration import EnvSpec, adapters
from agentgym.scaffold import SUFFIX, templates_in

OPENENV = "openenv>=0.10"
_OURS = ("agentgym", "agentgym_envs")
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")


def export_openenv(
    spec: EnvSpec, out: Path, kwargs: Mapping[str, Any] | None = None, wheels: Sequence[Path] = ()
) -> list[Path]:
    """Write the folder of an environment; returns its files, sorted.

    Args:
        out: the folder, new or empty.
        kwargs: arguments of the environment, over the spec's own.
        wheels: packages that no index has, copied into the folder for the container's build.

    Raises:
        FileExistsError: the folder is not empty.
        ValueError: the environment cannot be made in another process, or a wheel is not one.
        OSError: something cannot be read or written.
    """
    if out.is_dir() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty: choose another folder with --out")
    for wheel in wheels:
        if wheel.suffix != ".whl" or not wheel.is_file():
            raise ValueError(f"{wheel} is no wheel")
    requirements, source = requirements_of(spec)
    if source is not None and out.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"{out} is in {source}, which would be copied into itself: choose another folder with --out")
    values = _values(spec, dict(kwargs or {}), requirements)
    if source is not None:  # a copy of its code has no entry point, which would register it
        record = repr(json.dumps(spec.to_json()))
        values |= {"spec_import": "EnvSpec", "spec": f"EnvSpec.from_json(json.loads({record}))"}
    for template, path in templates_in(resources.files("agentgym.service.openenv") / "template"):
        target = out / path.removesuffix(SUFFIX)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(Template(template.read_text(encoding="utf-8")).substitute(values), encoding="utf-8")
    if source is not None:
        if (out / source.name).exists():
            raise ValueError(f"{source.name} would overwrite a file of the folder: rename the environment's module")
        if source.is_dir():
            shutil.copytree(source, out / source.name, ignore=_LEFT_OUT)
        else:
            shutil.copy2(source, out / source.name)
    for wheel in wheels:
        (out / "wheels").mkdir(exist_ok=True)
        shutil.copy2(wheel, out / "wheels")
    return sorted(file for file in out.rglob("*") if file.is_file())


def requirements_of(spec: EnvSpec) -> tuple[list[str], Path | None]:
    """The `pip install` requirements of an environment, and the file or folder of its code if no package has it."""
    record = spec.to_json()
    packages = [need.partition(":")[2] for need in spec.needs if not need.startswith("sandbox:")]
    prefix = spec.id.partition(":")[0]
    if prefix in adapters:
        packages.append(adapters[prefix].install)
    module = str(record["entry_point"]).partition(":")[0]
    top = module.partition(".")[0]
    extra = "[envs]" if top == "agentgym_envs" else ""
    base = [OPENENV, f"{DISTRIBUTION}{extra}=={__version__}"]
    if top in _OURS:
        return [*base, *dict.fromkeys(packages)], None
    spec.load()
    found = sys.modules[top]
    origin = Path(found.__file__ or next(iter(found.__path__)))
    source = origin.parent if origin.name == "__init__.py" else origin
    for name in metadata.packages_distributions().get(top, []):
        dist = metadata.distribution(name)
        if _from_index(dist):
            return [*base, f"{name}=={dist.version}", *dict.fromkeys(packages)], None
        needs = [need for need in dist.requires or [] if "extra ==" not in need]
        own = [need for need in needs if not re.match(rf"{DISTRIBUTION}\b", need)]
        return [*base, *dict.fromkeys([*own, *packages])], source
    return [*base, *dict.fromkeys(packages)], source


def lacks_agentgym(wheels: Sequence[Path]) -> bool:
    """True if the container's build would ask an index for an agentgym that was not installed from one."""
    if any(wheel.name.startswith(DISTRIBUTION.replace("-", "_") + "-") for wheel in wheels):
        return False
    try:
        return not _from_index(metadata.distribution(DISTRIBUTION))
    except metadata.PackageNotFoundError:  # a checkout on the path
        return True


def _from_index(dist: metadata.Distribution) -> bool:
    return dist.read_text("direct_url.json") is None


def _values(spec: EnvSpec, kwargs: dict[str, Any], requirements: Sequence[str]) -> dict[str, str]:
    words = [word for word in re.split(r"[^a-z0-9]+", spec.id.lower()) if word]
    name = "_".join(words) if words[0][0].isalpha() else "env_" + "_".join(words)
    sandboxes = [need.partition(":")[2] for need in spec.needs if need.startswith("sandbox:")]
    notes = "".join(
        f"\nIt runs code in the sandbox image `{image}`, so its container needs a Docker Engine (DOCKER_HOST) that has"
        " that image.\n"
        for image in sandboxes
    )
    description = spec.description or f"The environment {spec.id}."
    return {
        "id": spec.id,
        "name": name,
        "dashed": name.replace("_", "-"),
        "title": "".join(word.capitalize() for word in name.split("_")),
        "version": "0.1.0",
        "description": description,
        "description_json": json.dumps(description, ensure_ascii=False),
        "tags": json.dumps(list(spec.tags) or ["text"], ensure_ascii=False),
        "requirements": json.dumps(list(requirements), ensure_ascii=False),
        "kwargs_literal": repr(json.dumps(kwargs)),
        "spec_import": "spec",
        "spec": f'spec("{spec.id}")',
        "notes": notes,
    }
