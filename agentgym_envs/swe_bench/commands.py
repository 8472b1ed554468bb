"""The command that tests an instance, by its repository and version, with the files of its test patch as arguments.

The table is SWE-bench's (its package before version 5) and SWE-Gym's. Instances of other repositories name their own, or
SWE-bench's package knows it.
"""

import re
import shlex

from agentgym_envs.swe_bench import upstream
from agentgym_envs.swe_bench.instance import Instance
from agentgym_envs.swe_bench.patches import touched_files
from agentgym_envs.swe_bench.recipes import recipe_of

_PYTEST = "pytest -rA"
_DJANGO = "./tests/runtests.py --verbosity 2"
_SYMPY = "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose"
_SWE_SMITH = "pytest --disable-warnings --color=no --tb=no --verbose"
_COMMANDS = {
    "django/django": f"{_DJANGO} --settings=test_sqlite --parallel 1",
    "mwaskom/seaborn": "pytest --no-header -rA",
    "sphinx-doc/sphinx": "tox --current-env -epy39 -v --",
    "sympy/sympy": _SYMPY,
    **dict.fromkeys(
        (
            *("astropy/astropy", "marshmallow-code/marshmallow", "matplotlib/matplotlib", "pallets/flask"),
            *("psf/requests", "pvlib/pvlib-python", "pydata/xarray", "pydicom/pydicom", "pylint-dev/astroid"),
            *("pylint-dev/pylint", "pytest-dev/pytest", "pyvista/pyvista", "scikit-learn/scikit-learn"),
            *("sqlfluff/sqlfluff", "iterative/dvc", "project-monai/monai"),
        ),
        _PYTEST,
    ),
    # SWE-Gym
    **dict.fromkeys(("conan-io/conan", "getmoto/moto", "modin-project/modin"), "pytest -n0 -rA"),
    **dict.fromkeys(("facebookresearch/hydra", "pandas-dev/pandas"), "pytest -rA --tb=long"),
    "bokeh/bokeh": "pytest -rA -n0",
    "dask/dask": "pytest -n0 -rA  --color=no",
    "pydantic/pydantic": "pytest -rA --tb=short -vv -o console_output_style=classic --no-header",
    "python/mypy": "pytest -n0 -rA -k",
}
_CLASSIC = "pytest -rA -vv -o console_output_style=classic --tb=no"
_EXCEPTIONS = {
    ("django/django", "1.9"): _DJANGO,
    **{("astropy/astropy", version): _CLASSIC for version in ("0.1", "0.2", "0.3", "0.4", "1.1", "1.2", "1.3")},
    **{("python/mypy", version): "pytest -rA -k" for version in ("1.7", "1.8", "1.9", "1.10", "1.11")},
}
_CHANGED = re.compile(r"^diff --git a/.* b/(.*)$", re.MULTILINE)
_MYPY_CASE = re.compile(r"\[case ([^\]]+)\]")
# "csv" without its dot, as in SWE-bench.
_NO_TESTS = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")


_COMPILED = (".pyx", ".pxd", ".c", ".cc", ".cpp", ".h", ".hpp")


def command_of(instance: Instance) -> str:
    """The shell command that runs an instance's tests, in the repository's root, with the test patch applied.

    Raises ValueError for a repository that neither the table nor SWE-bench's package has, if the instance names no command.
    """
    if instance.test_command is not None:
        return instance.test_command
    if instance.repo.startswith("swesmith/"):
        return " ".join([_SWE_SMITH, *map(shlex.quote, arguments_of(instance))])
    repo = instance.repo.lower()
    command = _EXCEPTIONS.get((repo, instance.version), _COMMANDS.get(repo))
    if command is None:
        try:
            return upstream.commands_of(instance)[1]
        except ValueError as error:
            raise ValueError(f'{error}, or give the record a "test_command"') from error
    if repo == "python/mypy":  # its tests are cases in data files, found by their names
        cases = _MYPY_CASE.findall(instance.test_patch)
        return f"{command} {shlex.quote(' or '.join(cases))}" if cases else command.removesuffix(" -k")
    return " ".join([command, *map(shlex.quote, arguments_of(instance))])


def build_command_of(instance: Instance) -> str:
    """The shell command that builds the patched repository before its tests; "" if nothing is to be built.

    Raises ValueError as `command_of` does, and where the gold patch changes compiled sources that nothing would build again.
    """
    published = instance.repo.lower() in _COMMANDS and instance.expected is None and recipe_of(instance) is None
    compiled = [path for path in touched_files(instance.patch) if path.endswith(_COMPILED)]
    if published and compiled and not instance.build_command:
        what = f"instance {instance.id}: its gold patch changes {compiled[0]}, which is compiled"
        raise ValueError(f'{what}, and nothing builds it again: give the record a "build_command", or leave it out')
    given = instance.test_command is not None or not upstream.needs_swebench(instance)
    return instance.build_command if given else upstream.commands_of(instance)[0]


def arguments_of(instance: Instance) -> tuple[str, ...]:
    """The test files of an instance as arguments of its test command; Django's runner takes modules."""
    if instance.repo.startswith("swesmith/"):
        return tuple(dict.fromkeys(test.partition("::")[0] for test in instance.fail_to_pass))
    files = [path for path in _CHANGED.findall(instance.test_patch) if not path.endswith(_NO_TESTS)]
    if instance.repo.lower() != "django/django":
        return tuple(files)
    return tuple(path.removesuffix(".py").removeprefix("tests/").replace("/", ".") for path in files)
