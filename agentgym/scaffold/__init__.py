"""A new environment as an installable package, from the templates beside this file.

A template is a file as it will be, with `.tmpl` after its name, for an environment called my_env with the class MyEnv in a
distribution my-env. `common/` goes into every package, one of the other folders besides.
"""

import keyword
import re
import sys
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

KINDS = ("plain", "tools", "sandbox")
LONGEST = 32  # letters of a name: longer ones would break the templates' lines
SUFFIX = ".tmpl"
_IMPORTED = {"Any", "Env", "Sandbox", "SandboxSpec", "Task", "TaskSet", "ToolError", "ToolSet"}  # by the templates


def scaffold(name: str, parent: Path, kind: str = "plain") -> tuple[Path, list[Path]]:
    """Make a whole package in the new folder `parent/name`; returns the folder and its files.

    Raises ValueError if the name or kind is invalid, FileExistsError if the folder exists.
    """
    check_name(name)
    if kind not in KINDS:
        raise ValueError(f"kind is {', '.join(KINDS)}, not {kind!r}")
    root = parent / name
    if root.exists():
        raise FileExistsError(f"{root} is there already: choose another name, or another folder with --dir")
    files = []
    templates = resources.files("agentgym.scaffold") / "templates"
    for folder in ("common", kind):
        for template, path in templates_in(templates / folder):
            target = root / _named(path.removesuffix(SUFFIX), name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_named(template.read_text(encoding="utf-8"), name), encoding="utf-8")
            files.append(target)
    return root, sorted(files)


def check_name(name: str) -> None:
    from agentgym.core.registration import registry

    if not re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", name) or "__" in name or len(name) > LONGEST:
        near = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_0123456789")[:LONGEST]
        hint = f", such as {near}" if len(near) > 1 and near != name else ", such as my_env"
        rule = f"write at most {LONGEST} small letters, digits and _"
        raise ValueError(f"{name!r} is no name for a package: {rule}{hint}")
    if keyword.iskeyword(name) or keyword.issoftkeyword(name):
        raise ValueError(f"{name!r} is a word of Python's: choose another, such as {name}_env")
    if name in sys.stdlib_module_names or name in ("agentgym", "agentgym_envs", "agent_train", "tests"):
        raise ValueError(f"{name!r} would hide the module of that name: choose another, such as {name}_env")
    if _title(name) in _IMPORTED:
        hidden = f"its class would hide {_title(name)}, which the environment imports"
        raise ValueError(f"{name!r} is no name for a package: {hidden}: choose another, such as {name}_env")
    if name in registry:
        taken = f"there is an environment {name!r} already ({registry[name].entry_point})"
        raise ValueError(f"{taken}: choose another name")


def templates_in(folder: Traversable, below: str = "") -> list[tuple[Traversable, str]]:
    found = []
    for item in folder.iterdir():
        if item.is_dir():
            found += templates_in(item, f"{below}{item.name}/")
        elif item.name.endswith(SUFFIX):
            found.append((item, below + item.name))
    return found


def _title(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _named(text: str, name: str) -> str:
    return text.replace("my_env", name).replace("MyEnv", _title(name)).replace("my-env", name.replace("_", "-"))
