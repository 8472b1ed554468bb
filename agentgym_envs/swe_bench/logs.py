"""Reads test logs: the status of each test by its name, as SWE-bench's own parsers find them.

`log_parser(repo)` gives the parser of a repository. Where SWE-bench's parsers take a word for a status although it is
none ("ERROR:", "ERRORS"), ours say ERROR.
"""

import re
from collections.abc import Callable

PASSED, FAILED, SKIPPED, ERROR, XFAIL = STATUSES = ("PASSED", "FAILED", "SKIPPED", "ERROR", "XFAIL")
START, END = ">>>>> Start Test Output", ">>>>> End Test Output"  # around what the tests print
Statuses = dict[str, str]
Parser = Callable[[str], Statuses]

_COLOR = re.compile(r"\[\d+m")
_CONTROL = dict.fromkeys(range(1, 32))
_ANSI = re.compile(r"\x1b\[[0-9;]*m|\r")
_SKIP_COUNT = re.compile(r"\[\d+\]")
_FAILED_PERCENT = re.compile(r"FAILED\s*\[.*?\]")
_SMITH_OTHERS = ("swesmith/hips__autograd.", "swesmith/paramiko__paramiko.", "swesmith/python__mypy.")  # other output
_VERBOSE = re.compile(r"(\S+)\s+(PASSED|FAILED|SKIPPED|ERROR|XFAIL)")


def log_parser(repo: str) -> Parser:
    """The parser of a repository's logs ("django/django"). Raises ValueError for one that has none here."""
    parser = _parser(repo)
    if parser is None:
        raise ValueError(f"there is no log parser for the repository {repo!r}: add it to {__name__}")
    return parser


def has_parser(repo: str) -> bool:
    return _parser(repo) is not None


def _parser(repo: str) -> Parser | None:
    smith = repo.startswith("swesmith/") and not repo.lower().startswith(_SMITH_OTHERS)
    return verbose_pytest if smith else _PARSERS.get(repo.lower())


def _status(word: str) -> str:
    return word if word in STATUSES else ERROR


def _is_skip_count(words: list[str]) -> bool:
    """True for "SKIPPED [3] path:line: reason", which names no test."""
    return words[0] == SKIPPED and _SKIP_COUNT.fullmatch(words[1]) is not None


def pytest(log: str, clean: Callable[[str], str] = str, rename: Callable[[str], str] = str) -> Statuses:
    """pytest's short summary: "PASSED path::test", "FAILED path::test - message"."""
    found = {}
    for line in map(clean, log.split("\n")):
        if line.startswith(STATUSES):
            words = (line.replace(" - ", " ") if line.startswith(FAILED) else line).split()
            if len(words) > 1 and not _is_skip_count(words):
                found[rename(words[1])] = _status(words[0])
    return found


def pytest_options(log: str) -> Statuses:
    """Of a parameter that is a path, only the file's name counts: it lies elsewhere on every machine."""

    def rename(name: str) -> str:
        test, _, rest = name.partition("[")
        value, closed, _ = rest.rpartition("]")
        if not closed:
            return name
        if value.startswith("/") and not value.startswith("//") and "*" not in value:
            value = f"/{value.rpartition('/')[2]}"
        return f"{test}[{value}]"

    return pytest(log, rename=rename)


def pytest_matplotlib(log: str) -> Statuses:
    return pytest(log, lambda line: line.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3"))


def _plain(line: str) -> str:
    return _COLOR.sub("", line).translate(_CONTROL)


def pytest_colored(log: str) -> Statuses:
    """Summary lines with whole names, spaces included, or older "path::test PASSED" lines; colours are dropped."""
    found = {}
    for line in map(_plain, log.split("\n")):
        if line.startswith(STATUSES):
            words = (line.split(" - ", 1)[0] if line.startswith(FAILED) else line).split()
            if len(words) > 1 and not _is_skip_count(words):
                found[" ".join(words[1:])] = _status(words[0])
        elif line.endswith(STATUSES):
            words = line.split()
            if len(words) > 1:
                found[" ".join(words[:-1])] = _status(words[-1])
    return found


def pytest_pydantic(log: str) -> Statuses:
    """SWE-Gym's: both forms, the name is one word, and "FAILED [ 10%]" loses its percentage."""
    found = {}
    for line in (_FAILED_PERCENT.sub(FAILED, _plain(line)) for line in log.split("\n")):
        words = (line.replace(" - ", " ") if line.startswith(FAILED) else line).split()
        if len(words) > 1 and line.startswith(STATUSES):
            found[words[1]] = _status(words[0])
        elif len(words) > 1 and line.endswith(STATUSES):
            found[words[0]] = _status(words[1])
    return found


def seaborn(log: str) -> Statuses:
    found = {}
    for line in log.split("\n"):
        words = line.split()
        if len(words) < 2:
            continue
        if line.startswith(FAILED):
            found[words[1]] = FAILED
        elif f" {PASSED} " in line:
            if words[1] == PASSED:
                found[words[0]] = PASSED
        elif line.startswith(PASSED):
            found[words[1]] = PASSED
    return found


# Output of the code under test may stand between a test's name and its "ok".
_DJANGO_BEGUN = re.compile(r"^(.*?)\s\.\.\.\sTesting against Django installed in ", re.MULTILINE)
_DJANGO_SILENCED = re.compile(r" silenced\)\.\nok$", re.MULTILINE)
_DJANGO_INTERRUPTED = (
    re.compile(r"^(.*?)\s\.\.\.\sInternal Server Error: /.*/\nok$", re.MULTILINE),
    re.compile(r"^(.*?)\s\.\.\.\sSystem check identified no issues \(0 silenced\)\nok$", re.MULTILINE),
)
DJANGO_VERSION = (
    "--version is equivalent to version"  # a line with this test's name says that it passed, whatever follows
)
_DJANGO_MIGRATION = "Applying sites.0002_alter_domain_unique...test_no_migrations"


def django(log: str) -> Statuses:
    """unittest's verbose lines: "test_x (app.tests.Case) ... ok", and the headings "FAIL: test_x (...)" below them."""
    found = {}
    begun: str | None = None
    for line in map(str.strip, log.split("\n")):
        if DJANGO_VERSION in line:
            found[DJANGO_VERSION] = PASSED
        if " ... " in line:
            begun = line.split(" ... ", 1)[0]
        if line.endswith((" ... ok", " ... OK", " ...  OK")):
            name = line[: line.rindex(" ... ")]
            found[name.partition("...")[2].lstrip() if name.startswith(_DJANGO_MIGRATION) else name] = PASSED
        if " ... skipped" in line:
            found[line.split(" ... skipped", 1)[0]] = SKIPPED
        for ending, heading, status in ((" ... FAIL", "FAIL:", FAILED), (" ... ERROR", "ERROR:", ERROR)):
            if line.endswith(ending):
                found[line.split(ending, 1)[0]] = status
            if line.startswith(heading) and len(words := line.split(maxsplit=2)) > 1:
                found[words[1]] = status
        if line.startswith("ok") and begun is not None:
            found[begun] = PASSED
    place = 0  # not one pattern: it would search the rest of the log for each beginning
    while (start := _DJANGO_BEGUN.search(log, place)) and (end := _DJANGO_SILENCED.search(log, start.end())):
        found[start[1]] = PASSED
        place = end.end()
    for pattern in _DJANGO_INTERRUPTED:
        found.update((match[1], PASSED) for match in pattern.finditer(log))
    return found


def sympy(log: str) -> Statuses:
    """bin/test's lines "test_x ok", and headings "____ sympy/x.py:test_x ____" of failures."""
    found = {}
    lines = log.split("\n")
    for line in lines:
        first, last = line.find(" "), line.rfind(" ")
        place = line.rfind(".py:", first + 1, last)
        if 0 <= first < place:
            found[line[first + 1 : last]] = FAILED
    for line in map(str.strip, lines):
        if line.startswith("test_"):
            for ending, status in ((" E", ERROR), (" F", FAILED), (" ok", PASSED)):
                if line.endswith(ending):
                    found[line.split(maxsplit=1)[0]] = status
    return found


def verbose_pytest(log: str) -> Statuses:
    """SWE-smith's: "path::test PASSED [ 10%]"."""
    return {match[1]: match[2] for line in log.split("\n") if (match := _VERBOSE.match(line))}


def r2e_summary(log: str) -> Statuses:
    """R2E-Gym's: pytest's short summary with names as "Class.test", without the file."""
    found = {}
    _, _, summary = _ANSI.sub("", log).partition("short test summary info")
    for line in summary.partition("short test summary info")[0].strip().split("\n"):
        for status in (PASSED, FAILED, ERROR):
            if status in line:
                found[r2e_name(".".join(line.split("::")[1:]))] = status
                break
    return found


def r2e_name(name: str) -> str:
    """A test's name as R2E-Gym compares it, without colours and without the message of a failure."""
    return _ANSI.sub("", name).split(" - ", 1)[0]


_PARSERS: dict[str, Parser] = {
    "django/django": django,
    "matplotlib/matplotlib": pytest_matplotlib,
    "mwaskom/seaborn": seaborn,
    "sympy/sympy": sympy,
    "pydantic/pydantic": pytest_pydantic,
    **dict.fromkeys(("psf/requests", "pydicom/pydicom", "pylint-dev/pylint"), pytest_options),
    **dict.fromkeys(("astropy/astropy", "scikit-learn/scikit-learn", "sphinx-doc/sphinx"), pytest_colored),
    **dict.fromkeys(
        (
            *("marshmallow-code/marshmallow", "pallets/flask", "pvlib/pvlib-python", "pydata/xarray"),
            *("pylint-dev/astroid", "pytest-dev/pytest", "pyvista/pyvista", "sqlfluff/sqlfluff"),
            # SWE-Gym
            *("python/mypy", "getmoto/moto", "conan-io/conan", "modin-project/modin", "project-monai/monai"),
            *("iterative/dvc", "dask/dask", "bokeh/bokeh", "pandas-dev/pandas", "facebookresearch/hydra"),
        ),
        pytest,
    ),
}
