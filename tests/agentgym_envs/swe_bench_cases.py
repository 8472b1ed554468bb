"""What the tests of swe_bench share: an instance to vary, and SWE-bench's own package."""

from __future__ import annotations

import ast
import atexit
import contextlib
import importlib
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentgym.processes.isolate import close_workers
from agentgym.sandbox import SandboxError
from agentgym.sandbox.backends import docker, engine
from agentgym.sandbox.backends.bubblewrap import usable
from agentgym.sandbox.images import debian, interpreters
from agentgym_envs import register_all
from agentgym_envs.swe_bench import images
from agentgym_envs.swe_bench.instances import Instance, read_instances
from agentgym_envs.swe_bench.recipes import recipe_of

LITE = Path(os.environ.get("AGENTGYM_DATA", "/nowhere")) / "swe_bench" / "lite_from_sdist.jsonl"
MODIFIED = """\
diff --git a/src/one.py b/src/one.py
--- a/src/one.py
+++ b/src/one.py
@@ -1,2 +1,2 @@
 first
-second
+2nd
"""
TESTS = MODIFIED.replace("src/one.py", "tests/test_one.py")

# SWE-bench's function of each repository's log.
THEIRS = {
    "astropy/astropy": "parse_log_astropy",
    "django/django": "parse_log_django",
    "marshmallow-code/marshmallow": "parse_log_marshmallow",
    "matplotlib/matplotlib": "parse_log_matplotlib",
    "mwaskom/seaborn": "parse_log_seaborn",
    "pallets/flask": "parse_log_flask",
    "psf/requests": "parse_log_requests",
    "pvlib/pvlib-python": "parse_log_pvlib",
    "pydata/xarray": "parse_log_xarray",
    "pydicom/pydicom": "parse_log_pydicom",
    "pylint-dev/astroid": "parse_log_astroid",
    "pylint-dev/pylint": "parse_log_pylint",
    "pytest-dev/pytest": "parse_log_pytest",
    "pyvista/pyvista": "parse_log_pyvista",
    "scikit-learn/scikit-learn": "parse_log_scikit",
    "sphinx-doc/sphinx": "parse_log_sphinx",
    "sqlfluff/sqlfluff": "parse_log_sqlfluff",
    "sympy/sympy": "parse_log_sympy",
}


def instance(**changes: Any) -> Instance:
    given: dict[str, Any] = {
        "id": "pallets__flask-1",
        "repo": "pallets/flask",
        "base_commit": "0" * 40,
        "problem_statement": "It breaks.",
        "version": "2.3",
        "patch": MODIFIED,
        "test_patch": TESTS,
        "fail_to_pass": ("tests/test_one.py::test_fix",),
        "pass_to_pass": ("tests/test_one.py::test_old",),
    }
    return Instance(**{**given, **changes})


@cache
def agreement_benchmark() -> ModuleType:
    """`benchmarks/swe_agreement.py`."""
    register_all()
    file = Path(__file__).parents[2] / "benchmarks" / "swe_agreement.py"
    spec = importlib.util.spec_from_file_location("swe_agreement", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def swebench(module: str, major: int) -> ModuleType:
    """A module of SWE-bench's package of a major version, from the folder where `make setup` puts it; skips without.

    Its outer packages are empty here: what their `__init__` imports, such as Modal's client, is not installed.
    """
    with installed(major):
        return importlib.import_module(f"swebench.{module}")


@contextlib.contextmanager
def installed(major: int) -> Iterator[None]:
    """SWE-bench's package of a major version, as if it was installed, for worker processes too; skips without."""
    places = _places(major)
    sys.modules.update(_swebench_modules[major])
    sys.path[:0] = places
    if _workers_for != [major]:  # which have the path of when they began
        close_workers()
        _workers_for[:] = [major]
    try:
        yield
    finally:
        del sys.path[: len(places)]
        for name in [name for name in sys.modules if name.partition(".")[0] == "swebench"]:
            _swebench_modules[major][name] = sys.modules.pop(name)


@cache
def _places(major: int) -> list[str]:
    """Where Python finds it: its outer packages are empty, and then comes what `make setup` installs."""
    root, empty = Path(sys.prefix, "swebench", str(major)), tempfile.mkdtemp()
    if not root.is_dir():
        pytest.skip(f"needs swebench {major}: make setup")
    atexit.register(shutil.rmtree, empty)
    for name in ("swebench", "swebench/harness", "swebench/harness/test_spec"):
        Path(empty, name).mkdir()
        Path(empty, name, "__init__.py").write_text(f"__path__.append({str(root / name)!r})\n")
    return [empty, str(root)]


@cache
def swesmith_parser() -> Callable[[None, str], dict[str, str]]:
    """SWE-smith's parser of pytest's logs, cut out of its package, which imports what is not installed; skips without."""
    file = Path(sys.prefix, "swebench", "smith", "swesmith", "profiles", "python.py")
    if not file.is_file():
        pytest.skip("needs swesmith: make setup")
    profile = next(node for node in ast.parse(file.read_text()).body if getattr(node, "name", "") == "PythonProfile")
    body = [node for node in ast.iter_child_nodes(profile) if getattr(node, "name", "") == "log_parser"]
    names: dict[str, Any] = {"re": re, "TestStatus": swebench("harness.constants", 5).TestStatus}
    exec(compile(ast.Module(body, []), str(file), "exec"), names)  # type: ignore[arg-type]
    found: Callable[[None, str], dict[str, str]] = names["log_parser"]
    return found


_workers_for: list[int] = []
_swebench_modules: dict[int, dict[str, ModuleType]] = {4: {}, 5: {}}


def built(id: str) -> Instance:
    """An instance whose image is built, in the user's own cache: only the first time takes minutes. Else skips."""
    if not LITE.is_file():
        pytest.skip("there is no swe_bench/lite_from_sdist.jsonl in the data folder")
    if missing := debian.missing_tools():
        pytest.skip(f"{', '.join(missing)} not found")
    found = next(one for one in read_instances(LITE) if one.id == id)
    recipe = recipe_of(found)
    assert recipe is not None
    try:
        interpreters.find(recipe.python)
    except SandboxError as error:
        pytest.skip(str(error))
    (made,) = images.build([found])
    assert made.built is not None, made.error
    return found


def require(backend: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Skip where a back end has no writable root here."""
    if backend == "docker" and engine.unavailable():
        pytest.skip("no Docker Engine")
    if backend == "bubblewrap" and (os.getuid() or usable()):
        pytest.skip(usable() or "bubblewrap mounts layers for root only")
    monkeypatch.setenv(docker.UNLIMITED, "1")
    return backend
