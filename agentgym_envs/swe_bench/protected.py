"""The files of a repository that judge a patch, which it may not change: tests, their runners and settings.

Changes of theirs are dropped from a patch before it is applied. What the gold patch itself changes may be changed.
"""

import re
import sys
from collections.abc import Collection, Iterable

from agentgym_envs.swe_bench.instance import Instance
from agentgym_envs.swe_bench.patches import FileChange, touched_files
from agentgym_envs.swe_bench.upstream import needs_swebench

FOLDERS = frozenset(
    {"test", "tests", "testing", "r2e_tests", ".venv", "__tests__", "__mocks__", "__snapshots__", "node_modules"}
)
FILES = frozenset(
    {
        *("conftest.py", "sitecustomize.py", "usercustomize.py", "noxfile.py", "runtests.py", "run_tests.sh"),
        *("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml"),
        *(".gitattributes", ".coveragerc", "package.json", "jasmine.json", ".taprc", ".rspec", "spec_helper.rb"),
        *("phpunit.xml", "phpunit.xml.dist"),
    }
)
_PATHS = frozenset({"bin/test"})  # sympy's runner
_ENDINGS = (".pth", "_test.py", ".egg-link", "_test.go", "_test.rb", "_spec.rb", "_test.rs")
# Names of other languages than Python: of JavaScript's tests and test runners, of JUnit's and PHPUnit's classes.
_OTHERS = re.compile(
    r"(?i:.+\.(test|tests|spec|specs)\.[cm]?[jt]sx?|(jest|vitest|karma|ava|playwright|cypress)\.(config|conf|setup)\..+"
    r"|vitest\.workspace\..+|\.mocharc(\..+)?|setuptests\.[jt]sx?)|.+Tests?\.(java|kt|php)"
)
_SPECS = re.compile(r"(?i:(.*/)?specs?/.+\.(rb|[cm]?[jt]sx?))")  # a folder "spec" with code; Python's is no tests
_METADATA = (".egg-info", ".dist-info")  # their entry points are plugins of pytest
_SOURCES = frozenset({"src", "lib"})  # may be on the path of imports, as the repository's root is


def is_protected(path: str) -> bool:
    """True if the name of a file, from the repository's root, says that it is of the tests or sets how they run."""
    *folders, name = (part.casefold() for part in path.split("/"))
    if FOLDERS & {*folders, name} or any(folder.endswith(_METADATA) for folder in folders):
        return True
    return (
        name in FILES
        or path in _PATHS
        or name.endswith((*_ENDINGS, *_METADATA))
        or (name.startswith("test_") and name.endswith(".py"))
        or _OTHERS.fullmatch(path.rpartition("/")[2]) is not None
        or _SPECS.fullmatch(path) is not None
    )


def shadows(path: str, importable: Collection[str], known: Collection[str]) -> bool:
    """True if a new file of this name would be imported in place of a module of Python or of an installed package.

    Args:
        importable: names of modules that are installed.
        known: names in the repository's root, `src` and `lib`, without endings: what is below one is the repository's own.
    """
    parts = path.split("/")
    places = (0, 1) if parts[0] in _SOURCES and len(parts) > 1 else (0,)
    names = {part.partition(".")[0] if part == parts[-1] else part for part in (parts[n] for n in places)} - {*known}
    return not names.isdisjoint(importable) or not names.isdisjoint(sys.stdlib_module_names)


def dropped(
    instance: Instance, changes: Iterable[FileChange], importable: Collection[str] = (), known: Collection[str] = ()
) -> tuple[str, ...]:
    """The files of a patch whose changes are not applied; `importable` and `known` as in `shadows`."""
    python = not needs_swebench(instance)
    of_tests, of_gold = set(touched_files(instance.test_patch)), set(touched_files(instance.patch))
    found = []
    for change in changes:
        added = change.new if change.kind in ("new", "renamed", "copied") else None
        for path in change.paths:
            judging = is_protected(path) or (python and path == added and shadows(path, importable, known))
            if path in of_tests or (judging and path not in of_gold):
                found.append(path)
    return tuple(dict.fromkeys(found))
