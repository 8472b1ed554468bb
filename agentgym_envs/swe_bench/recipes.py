"""Recipes to rebuild instances from a source release: the Python, the packages, and where their own is imported from."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources

from agentgym_envs.swe_bench.instance import Instance


@dataclass(frozen=True)
class Recipe:
    """An environment that instances of a repository share.

    Args:
        name: of the environment's image.
        python: version of the interpreter ("3.9"), which the building machine must have.
        packages: name of a file in `requirements/`, without its ending.
        source: folder of the repository from which its package is imported ("src"); "" for the repository itself.
        programs: the test command's programs that releases lack, by their paths in the repository.
        edits: what is replaced in files of the release, by their paths: the text and that in its place.
    """

    name: str
    python: str
    packages: str
    source: str = ""
    programs: Mapping[str, str] = field(default_factory=dict, hash=False)
    edits: Mapping[str, tuple[str, str]] = field(default_factory=dict, hash=False)

    @property
    def requirements(self) -> str:
        """Packages with exact versions, one a line."""
        return (resources.files("agentgym_envs.swe_bench") / "requirements" / f"{self.packages}.txt").read_text()


def _recipe(name: str, python: str, source: str = "") -> Recipe:
    return Recipe(f"swe-{name}-py{python.replace('.', '')}", python, f"{name}-{python}", source)


# What `bin/test -C --verbose FILES` does in sympy's repository, except that the cache stays on: without it, some releases cannot
# import their own units.
_SYMPY_TEST = """#!/usr/bin/env python
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import sympy

files = [word for word in sys.argv[1:] if not word.startswith("-")]
sys.exit(not sympy.test(*files, verbose="--verbose" in sys.argv))
"""
_SYMPY_PROGRAMS = {"bin/test": _SYMPY_TEST}
# SWE-bench's own edit: else the log names no test that passed.
_TOX = {"tox.ini": ("pytest", "pytest -rA")}
# By the instances' versions, up to and with which a recipe holds. The Python is SWE-bench's where names of tests depend on it:
# since 3.8, unittest also prints docstrings that begin on their second line.
_RECIPES: dict[str, tuple[tuple[tuple[int, ...], Recipe], ...]] = {
    "django/django": (
        ((3, 2), _recipe("django", "3.6")),
        ((4, 2), _recipe("django", "3.9")),
        ((5, 0), _recipe("django", "3.11")),
    ),
    "mwaskom/seaborn": (((0, 14), _recipe("seaborn", "3.9")),),
    "pallets/flask": (((2, 3), _recipe("flask", "3.11", "src")),),
    "pytest-dev/pytest": (((6, 1), _recipe("pytest-5", "3.9", "src")), ((8, 0), _recipe("pytest-7", "3.9", "src"))),
    "sphinx-doc/sphinx": (
        ((4, 4), replace(_recipe("sphinx-3", "3.9"), edits=_TOX)),
        ((7, 4), replace(_recipe("sphinx-7", "3.9"), edits=_TOX)),
    ),
    "sympy/sympy": (
        ((1, 4), replace(_recipe("sympy", "3.6"), programs=_SYMPY_PROGRAMS)),
        ((1, 12), replace(_recipe("sympy", "3.9"), programs=_SYMPY_PROGRAMS)),
    ),
}


def recipe_of(instance: Instance) -> Recipe | None:
    """The recipe by an instance's repository and version; None if there is none, or no source release is known."""
    if instance.sdist is None or not all(part.isdecimal() for part in instance.version.split(".")):
        return None
    version = tuple(int(part) for part in instance.version.split("."))
    recipes = _RECIPES.get(instance.repo.lower(), ())
    return next((recipe for last, recipe in recipes if version <= last), None)
