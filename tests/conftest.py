"""What all tests share: which of them this machine cannot run, and why.

`data` needs the folder that AGENTGYM_DATA names, `docker` a Docker Engine with our python image, `bubblewrap` a machine that
can start such a sandbox, `sandbox` either of the two, `browser` a Chromium and playwright, `machines` network namespaces.
Where AGENTGYM_NEED_SANDBOXES is set, as in CI, a missing back end is an error instead, and so are missing browsers and machines
where AGENTGYM_NEED_BROWSER and AGENTGYM_NEED_MACHINES are.
Tests that take minutes over all there is take a sample, the same each time; with AGENTGYM_TEST_ALL set they take all.
Slow tests whose turn comes after AGENTGYM_SLOW_UNTIL, in seconds since 1970, are skipped: CI ends in time on a slow machine, too.
"""

import contextlib
import gc
import os
import random
import sys
import time
from functools import cache

import pytest

from agentgym.processes.child_process import restore_default_signals


def pytest_configure():
    """Ctrl-C and SIGHUP are tested: what the shell or `nohup` made of them must not matter."""
    restore_default_signals()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        # Tests share the cores: threads of torch that wait for each other's turn would spin for most of the time.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    gc.disable()  # until all tests and what they import are there


def pytest_collection_finish():
    """Thousands of tests and all that they import stay: no later collection looks through them again."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items):
    for item in items:
        for marker, missing in MISSING.items():
            if marker in item.keywords and (reason := missing()):
                needed = NEEDED_BY.get(marker, "AGENTGYM_NEED_SANDBOXES")
                if needed and os.environ.get(needed):
                    raise pytest.UsageError(f"tests marked {marker} cannot be run: {reason}")
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_setup(item):
    until = os.environ.get("AGENTGYM_SLOW_UNTIL")
    if until and "slow" in item.keywords and time.time() > float(until):
        pytest.skip("this machine is slow: the time for slow tests, AGENTGYM_SLOW_UNTIL, is over")


def no_data():
    return None if os.environ.get("AGENTGYM_DATA") else "AGENTGYM_DATA is not set: the real data is not at hand"


@cache
def no_docker():
    from agentgym.sandbox import SandboxError
    from agentgym.sandbox.backends import engine
    from agentgym.sandbox.images import build as images

    try:
        reason = engine.unavailable()
        if reason is None and engine.way_of(engine.client(), images.docker_tag("python")) is None:
            reason = "the Docker Engine has no python image: run `agentgym sandbox build`"
    except SandboxError as error:
        reason = str(error)
    return reason


@cache
def no_bubblewrap():
    from agentgym.sandbox.backends.bubblewrap import usable

    return usable() or None


@cache
def no_sandbox():
    from agentgym.sandbox import SandboxError, choose

    try:
        choose()
    except SandboxError as error:
        return str(error)
    return None


def no_browser():
    from browser import missing

    return missing()


@cache
def no_machines():
    from machines import missing

    return missing()


MISSING = {
    "data": no_data,
    "docker": no_docker,
    "bubblewrap": no_bubblewrap,
    "sandbox": no_sandbox,
    "browser": no_browser,
    "machines": no_machines,
}


@pytest.fixture(scope="module", autouse=True)
def ray_ends_with_its_file():
    """Ends the Ray that a file of tests left in this process: a call of Ray's where none runs starts one, as in `test_engine_faults`."""
    yield
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.shutdown()


@pytest.fixture(scope="session")
def uncut():
    """Whether nothing is to be cut short."""
    return bool(os.environ.get("AGENTGYM_TEST_ALL"))


@pytest.fixture(scope="session")
def sample(uncut):
    """Draws so many of some tasks, the same each time; all of them where AGENTGYM_TEST_ALL is set."""

    def draw(tasks, most):
        tasks = list(tasks)
        return tasks if uncut or len(tasks) <= most else random.Random(0).sample(tasks, most)

    return draw


@pytest.fixture(scope="session")
def shared_address():
    """The variables with which a run joins the Ray that tests share."""
    from shared_ray import new_address

    return new_address()


@pytest.fixture(scope="session")
def forks():
    """Starts commands of Python that need not import everything once more."""
    from preloaded import preloaded

    with preloaded(os.environ) as started:
        yield started


@pytest.fixture(scope="session")
def in_shared_ray(shared_address, forks):
    """The environment of a run that need not start and end its own Ray."""
    from shared_ray import shared_ray

    with shared_ray(shared_address, forks):
        yield shared_address


@pytest.fixture(scope="session")
def workers_as_forks(forks, tmp_path_factory):
    """A context in which this process starts a Ray of its own, whose workers are forks."""
    from shared_ray import python_that_forks

    python = str(python_that_forks(tmp_path_factory.mktemp("ray"), forks))

    @contextlib.contextmanager
    def started():
        with pytest.MonkeyPatch.context() as changed:
            changed.setattr(sys, "executable", python)
            changed.setenv("OMP_NUM_THREADS", "1")  # as the process that forks has it
            yield

    return started


# The variables of the environment that make what is missing an error; sandboxes' where nothing is said.
NEEDED_BY = {"data": "", "browser": "AGENTGYM_NEED_BROWSER", "machines": "AGENTGYM_NEED_MACHINES"}
