"""Grades a submission in a sandbox; the grader's modules, the tests and the code are passed as text.

A malicious submission can make its own grading fail, but nothing else: see `inside/grader.py`.
"""

import contextlib
import functools
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from agentgym import sandbox as sandboxes
from agentgym.sandbox import SandboxError, SandboxSpec
from agentgym.sandbox.api import MEGABYTE
from agentgym_envs.code.inside.values import NOT_STARTED
from agentgym_envs.code.problems import Problem

log = logging.getLogger(__name__)

SPEC = SandboxSpec(image="python")
MEMORY = 320 * MEGABYTE  # address space of a submission; a bare interpreter has about 30 MiB
LONGEST_CODE = 100_000  # characters
WAIT = 30.0  # seconds to acquire a sandbox, within a step

_PACKAGE = "agentgym_envs.code.inside"
_MODULES = ("values", "candidate", "link", "grader")  # each imports only those before it
_MARGIN = 10.0  # seconds to start on a busy machine, on top of the submission's time
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}


@dataclass(frozen=True)
class Report:
    """The result of grading.

    The verdict is "passed"; "wrong" (an assertion failed); "error" (the code does not load); "timeout"; "ended" (the
    submission killed a process of its grading); or "none" (no code).
    """

    verdict: str
    passed: int = 0  # assertions that held
    total: int = 1  # all assertions; those not reached count as failed
    error: str = ""  # why the code does not load, for the agent
    failures: Sequence[dict[str, str]] = ()  # the first failed assertions: `test`, and `what` was found instead
    output: str = ""  # what the code printed, cut at 4,000 bytes

    @property
    def success(self) -> bool:
        return self.verdict == "passed"


def grade(
    problem: Problem,
    code: str,
    tests: Sequence[str],
    *,
    backend: str | None = None,
    timeout: float = 5.0,
    budget: float = 10.0,
) -> Report:
    """Run code against some of a problem's tests, in its own sandbox.

    Grading leaves no state, so a failed sandbox is replaced once. If the second one fails too and the back end is up,
    the code is to blame; see `agentgym.core.agent_failure`.

    Args:
        code: the whole program, or the rest of `problem.prompt`.
        tests: statements, from `problem.public` or `problem.tests`.
        timeout: seconds that one call of the submission may take.
        budget: seconds for all of them.
    """
    if len(code) > LONGEST_CODE:
        return Report("error", total=len(tests), error=f"The code is longer than {LONGEST_CODE:,} characters.")
    request = {
        "prompt": problem.prompt,
        "code": code,
        "names": list(problem.names),
        "setup": problem.setup,
        "tests": list(tests),
        "timeout": timeout,
        "budget": budget,
    }
    command = ["python3", "-s", "-S", "-c", grader_program(), str(MEMORY)]
    for final in (False, True):
        with contextlib.closing(sandboxes.acquire(SPEC, backend=backend, timeout=WAIT)) as box:
            try:
                result = box.exec(command, stdin=json.dumps(request), timeout=budget + _MARGIN, env=_ENVIRONMENT)
                if not result.timed_out and result.exit_code in (126, 127, NOT_STARTED):
                    raise SandboxError(f"sandbox {box.id} cannot run the grader: {result.stderr.strip()[-500:]}")
            except SandboxError as error:
                if final:
                    raise
                log.warning("a sandbox failed while it graded, trying a fresh one: %s", error)
                continue
        if result.timed_out:
            return Report("timeout", total=len(tests), error="The tests were not done in time.")
        if result.exit_code == 0:
            return Report(**json.loads(result.stdout))
        # It was killed, by the submission or by lack of memory.
        log.info("the grader ended with %s: %s", result.exit_code, result.stderr[-2000:])
    return Report("ended", total=len(tests), error="The code ended the process that tests it.")


@functools.cache
def grader_program() -> str:
    folder = resources.files(_PACKAGE)
    sources = [(f"{_PACKAGE}.{name}", folder.joinpath(f"{name}.py").read_text(encoding="utf-8")) for name in _MODULES]
    return (
        "import sys, types\n"
        "sys.path[:] = [p for p in sys.path if p]\n"
        f"for name, source in {sources!r}:\n"
        "    module = sys.modules[name] = types.ModuleType(name)\n"
        "    exec(compile(source, name, 'exec'), module.__dict__)\n"
        "module.main()\n"
    )
