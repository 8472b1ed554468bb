"""SWE-bench's own package, for repositories that our tables lack: those of SWE-bench Multimodal and Multilingual.

It is `swebench` on PyPI, and imported when an instance needs it. Version 4 knows commands and log parsers by repository. Version 5
has log parsers alone, by the name in a record's `log_parser`; its records have a script, of which `script_of` takes the commands.
"""

import importlib
import re
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from agentgym.processes.isolate import IsolatedCallError, WorkerDied, call_isolated
from agentgym_envs.swe_bench.instance import Instance
from agentgym_envs.swe_bench.logs import END, ERROR, PASSED, START, STATUSES, Parser, Statuses, has_parser

PARSE_SECONDS = 60.0
_HEAD = "set -uxo pipefail"  # some parsers look for the commands themselves in the log
_HEREDOC = re.compile(r"git apply .*<<\s*['\"]?(\w+)")
# The last lines of a runner that has run some test: SWE-bench's version 5.
_RAN = re.compile(
    r"Executed [1-9]\d* of \d+|TOTAL: [1-9]\d* (?:SUCCESS|FAILED)|(?<!\d)[1-9]\d* (?:passing|specs?, \d+ failures?)"
    r"|Tests:\s+[1-9]\d*|Test Suites:\s+(?:\d+ \w+, )*[1-9]\d* total|^# tests [1-9]\d*|': ok$",
    re.MULTILINE,
)


class LogUnreadableError(ValueError):
    """A log that SWE-bench's parser cannot read: its code raises, or takes longer than `PARSE_SECONDS`."""


def needs_swebench(instance: Instance) -> bool:
    """True if SWE-bench's own package reads an instance's log."""
    return instance.expected is None and not has_parser(instance.repo)


def parser_of(instance: Instance) -> Parser:
    """SWE-bench's parser of an instance's log. Raises ValueError if there is no package, or none in it."""
    package = _module(instance, "log_parsers")
    by_name: dict[str, Any] = getattr(package, "PARSER_REGISTRY", {})  # version 5
    by_repo: dict[str, Any] = getattr(package, "MAP_REPO_TO_PARSER", {})  # version 4
    found = by_name.get(instance.log_parser) or by_repo.get(_spelling(by_repo, instance.repo))
    if found is None:
        named = f" and no {instance.log_parser!r}" if instance.log_parser else ""
        remedy = 'version 4 knows repositories, version 5 the name in a record\'s "log_parser"'
        raise ValueError(_lacks(instance, f"log parser{named}", remedy))
    about = SimpleNamespace(instance_id=instance.id, repo=instance.repo, version=instance.version)

    def parse(log: str) -> Statuses:
        return {name: status if status in STATUSES else ERROR for name, status in found(log, about).items()}

    return parse


def reader_of(instance: Instance) -> Parser:
    """The parser of a whole log. Where that names failed tests alone, the others have passed, if it shows that tests ran.

    It runs in a process of its own: on a log that a patch made for that, some parsers take hours.
    """
    parser_of(instance)
    passed = dict.fromkeys((*instance.fail_to_pass, *instance.pass_to_pass), PASSED) if fails_only(instance) else {}

    def read(log: str) -> Statuses:
        found: Statuses = isolated(_statuses, instance, log)
        return passed | found if found or _RAN.search(log) else found

    return read


def isolated(function: Callable[..., Any], instance: Instance, log: str, *more: Any) -> Any:
    """The result of a function that uses an instance's parser, in another process. Raises LogUnreadableError."""
    try:
        return call_isolated(function, instance, log, *more, timeout=PARSE_SECONDS)
    except (IsolatedCallError, WorkerDied, TimeoutError) as error:
        said = str(error).splitlines()[0]
        raise LogUnreadableError(f"SWE-bench's parser cannot read the log: {said:.200}") from error


def _statuses(instance: Instance, log: str) -> Statuses:
    return parser_of(instance)(log)


def line_parser_of(instance: Instance) -> Parser:
    """The parser for one line of a log: what it cannot read says nothing."""
    parse = parser_of(instance)

    def parse_line(line: str) -> Statuses:
        try:
            return parse(line)
        except Exception:  # of code that is not ours, on a text that a patch may have printed
            return {}

    return parse_line


def fails_only(instance: Instance) -> bool:
    """True if an instance's log names failed tests only."""
    if instance.eval_type:
        return instance.eval_type == "fail_only"
    repos: set[str] = _module(instance, "constants").FAIL_ONLY_REPOS
    return instance.repo.lower() in {repo.lower() for repo in repos}


def commands_of(instance: Instance) -> tuple[str, str]:
    """The shell commands that build an instance's repository, "" if none do, and that test it, by SWE-bench's table.

    Raises ValueError if there is no package, or no command in it.
    """
    table: dict[str, Any] = getattr(_module(instance, "constants"), "MAP_REPO_VERSION_TO_SPECS", {})
    repo = _spelling(table, instance.repo)
    spec = table.get(repo, {}).get(instance.version)
    if spec is None:
        remedy = (
            "version 4 has a table of them" if not table else f"it knows {', '.join(table.get(repo, {})) or 'none'}"
        )
        raise ValueError(_lacks(instance, f"test command of version {instance.version!r}", remedy))
    make = _module(instance, "test_spec.create_scripts").make_eval_script_list
    record = {"instance_id": instance.id, "repo": repo, "version": instance.version, "test_patch": instance.test_patch}
    lines: list[str] = make(record, spec, "", "", instance.base_commit, instance.test_patch)
    applied = next(number for number, line in enumerate(lines) if line.startswith("git apply"))
    build, test = _between(lines, applied)
    if not test:
        raise ValueError(_lacks(instance, "test command", "none of its test patch's files is known to it"))
    return build, test


def script_of(text: str) -> tuple[str, str]:
    """The same of the script in a record of version 5; "" and "" if it has no markers."""
    lines = text.split("\n")
    if not all(any(mark in line for line in lines) for mark in (START, END)):
        return "", ""
    applied = _index(lines, START) - 1  # without a test patch, nothing is built
    for number, line in enumerate(lines):
        if (here := _HEREDOC.match(line)) and here[1] in lines[number + 1 :]:
            applied = lines.index(here[1], number + 1)
            break
    return _between(lines, applied)


def _between(lines: Sequence[str], applied: int) -> tuple[str, str]:
    start, end = _index(lines, START), _index(lines, END)
    return _script(lines[applied + 1 : start]), _script(lines[start + 1 : end])


def _index(lines: Sequence[str], mark: str) -> int:
    """The line of the first start, or of the last end."""
    found = [number for number, line in enumerate(lines) if mark in line]
    return found[0] if mark == START else found[-1]


def _script(lines: Sequence[str]) -> str:
    return "\n".join((_HEAD, *lines)) if any(map(str.strip, lines)) else ""


def _spelling(names: dict[str, Any], repo: str) -> str:
    return next((name for name in names if name.lower() == repo.lower()), repo)


def _module(instance: Instance, name: str) -> ModuleType:
    try:
        return importlib.import_module(f"swebench.harness.{name}")
    except ImportError as error:
        remedy = "pip install 'swebench>=4.1,<6'"
        raise ValueError(_needs(instance, f"SWE-bench's own package, which is not here ({error}): {remedy}")) from error


def _lacks(instance: Instance, what: str, remedy: str) -> str:
    return _needs(instance, f"SWE-bench's own package, but the one that is installed has no {what}: {remedy}")


def _needs(instance: Instance, what: str) -> str:
    return f"instance {instance.id}: {instance.repo!r} is not in agentgym's tables and needs {what}"
