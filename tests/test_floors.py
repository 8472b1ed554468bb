"""Imports go down: from the trainer to environments to the toolkit, from each room to the rooms below it, and never in a circle.

Imports inside functions count. Those under TYPE_CHECKING count for floors, and not for circles: annotations are never imported.
"""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("agentgym", "agentgym_envs", "agent_train")  # each knows itself and those before it

# Rooms from the lowest floor up. A room knows its own floor and those below.
# `sandbox` and `service` share one: a remote sandbox is a client of a service, which serves sandboxes of its own machine.
# `evaluate` and `viewer` share one: a run writes the viewer's page, which reads what runs store.
FLOORS = (
    ("agentgym.hosts", "agentgym.storage"),
    ("agentgym.core",),
    ("agentgym.processes", "agentgym.datasets", "agentgym.tools", "agentgym.policies", "agentgym.scaffold"),
    ("agentgym.rewards",),
    ("agentgym.service.protocol",),
    ("agentgym.sandbox", "agentgym.service"),
    ("agentgym.gateway", "agentgym.rollout"),
    ("agentgym.agents",),
    ("agentgym.evaluate", "agentgym.viewer"),
    ("agentgym.checks", "agentgym.doctor"),
    ("agentgym.cli",),
    # Settings, and what all parts write into; what checks and composes settings looks at all below the trainer.
    (
        *("agent_train.config.schema", "agent_train.config.setting", "agent_train.config.extensions"),
        "agent_train.report.timeline",
    ),
    ("agent_train.algorithms", "agent_train.data"),
    ("agent_train.cluster", "agent_train.engine", "agent_train.learner", "agent_train.weights"),
    ("agent_train.config", "agent_train.report", "agent_train.rollout", "agent_train.trainer"),
    ("agent_train.plan",),
    ("agent_train.cli",),
)
MOST_LINES, LONGEST_FUNCTION = 500, 60


@functools.cache
def modules():
    """Module names and their files."""
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


@functools.cache
def tree(name):
    return ast.parse(modules()[name].read_text(encoding="utf-8"))


def known(name):
    """The module that an imported name is, or is in; None where it is none of ours."""
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name or None


def imported(node):
    if isinstance(node, ast.Import):
        return {known(alias.name) for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module:
        return {known(f"{node.module}.{alias.name}") for alias in node.names}
    return set()


def imports(name, *, types=True):
    """Modules that a module imports, anywhere in its text.

    Args:
        types: whether imports under TYPE_CHECKING count.
    """
    left, found = [tree(name)], set()
    while left:
        node = left.pop()
        if not types and isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            left += node.orelse
            continue
        found |= imported(node)
        left += ast.iter_child_nodes(node)
    return found - {name, None}


def floor_of(name):
    """The number of a module's floor, by the longest name of a room; None for a package's own `__init__` and `__main__`."""
    rooms = {room: number for number, floor in enumerate(FLOORS) for room in floor}
    parts = name.split(".")
    return next((rooms[room] for n in range(len(parts), 1, -1) if (room := ".".join(parts[:n])) in rooms), None)


def circle(edges):
    """Modules of one circle in their order; [] where there is none."""
    done, path = set(), []

    def search(name):
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        path.append(name)
        for other in sorted(edges[name]):
            if found := search(other):
                return found
        done.add(path.pop())
        return []

    return next((found for name in sorted(edges) if (found := search(name))), [])


def test_no_package_knows_those_above_it():
    order = {package: number for number, package in enumerate(PACKAGES)}
    wrong = [
        f"{name} imports {other}"
        for name in modules()
        for other in imports(name)
        if order[other.partition(".")[0]] > order[name.partition(".")[0]]
    ]
    assert not wrong


def test_every_room_is_on_a_floor():
    rooms = {name for name in modules() if name.count(".") == 1 and not name.startswith("agentgym_envs.")}
    assert [room for room in sorted(rooms) if floor_of(f"{room}.x") is None and not room.endswith("__main__")] == []


def test_no_room_knows_those_above_it():
    wrong = [
        f"{name} imports {other}"
        for name in modules()
        if (floor := floor_of(name)) is not None
        for other in imports(name)
        if (floor_of(other) or 0) > floor
    ]
    assert not wrong


def test_no_modules_import_each_other_in_a_circle():
    assert " -> ".join(circle({name: imports(name, types=False) for name in modules()})) == ""


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c", "b"]


@pytest.mark.parametrize("package", PACKAGES)
def test_files_and_functions_are_short(package):
    long = []
    for name, file in modules().items():
        if name.partition(".")[0] != package:
            continue
        if (lines := len(file.read_text(encoding="utf-8").splitlines())) > MOST_LINES:
            long.append(f"{name}: {lines} lines")
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                long += [f"{name}.{node.name}: {lines} lines"] * (lines > LONGEST_FUNCTION)
    assert long == []
