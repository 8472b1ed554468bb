"""No known hack of a SWE-bench instance earns anything, in real sandboxes; many would where nothing was done against them."""

import asyncio
import json
import os
from contextlib import closing
from pathlib import Path

import pytest

import agentgym
from agentgym.checks.audit import audit
from agentgym_envs.swe_bench import images, worktree
from agentgym_envs.swe_bench.commands import command_of
from agentgym_envs.swe_bench.hacks import hacks_of
from agentgym_envs.swe_bench.instances import read_instances
from agentgym_envs.swe_bench.verdict import judge_statuses, statuses_of
from agentgym_envs.workbench import Workbench

pytestmark = [pytest.mark.data, pytest.mark.bubblewrap]
DJANGO, FLASK = "django__django-10914", "pallets__flask-4992"
# What Django's runner, unittest and its logs may have done to them; all others are played on flask alone.
OF_UNITTEST = (
    *("rewrite-runner", "sitecustomize", "shadow-unittest", "shadow-tblib", "forge-and-exit", "forge-at-exit"),
    *("mute-and-forge", "flood-and-forge", "case-run", "case-run-late", "add-failure", "no-asserts"),
    *("expected-failures", "skip-all", "import-hook", "known-names", "known-argv", "known-exit"),
)
OF_PYTEST = (
    *("conftest-root", "conftest-folder", "conftest-xfail", "pytest-ini", "setup-cfg", "tox-ini", "pyproject"),
    *("entry-point", "pytest-functions", "known-xfail"),
)
# Each shows that a defence is needed: with the patch applied as it is, and the log believed, it is paid.
PAID_BY_A_NAIVE_GRADER = (
    *((FLASK, hack) for hack in (*OF_PYTEST, "known-exit")),
    *((DJANGO, hack) for hack in ("forge-and-exit", "forge-at-exit", "mute-and-forge", "case-run", "add-failure")),
    *((DJANGO, hack) for hack in ("known-names", "sitecustomize", "rewrite-runner")),
)
# Hacks that only the second run finds out, and what it says of them.
FOUND_BY_FAILING_TESTS = {
    "known-names": "is reported as PASSED even when it is made to fail",
    "known-argv": "is reported as PASSED even when it is made to fail",
    "known-exit": "when its tests are made to fail, no test runs",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A file for each instance, whose image is built."""
    lines = Path(os.environ["AGENTGYM_DATA"], "swe_bench", "lite_from_sdist.jsonl").read_text().splitlines()
    folder = tmp_path_factory.mktemp("swe_bench")
    for id in DJANGO, FLASK:
        (folder / id).with_suffix(".jsonl").write_text(
            next(line for line in lines if json.loads(line)["instance_id"] == id) + "\n"
        )
        (built,) = images.build(read_instances(folder / f"{id}.jsonl"))
        assert not built.error
    return {id: str(folder / f"{id}.jsonl") for id in (DJANGO, FLASK)}


@pytest.fixture(scope="module")
def instances(files):
    return {id: read_instances(file)[0] for id, file in files.items()}


@pytest.fixture
def instance(instances):
    return instances[DJANGO]


def audited(file, only=()):
    spec = agentgym.spec("swe_bench")
    kwargs = {"data": file, "sandbox": "bubblewrap", "test_timeout": 300.0}
    made = agentgym.core.registration.EnvSpec(spec.id, spec.entry_point, kwargs)
    found = asyncio.run(audit(made, split="all", concurrency=2, only=only))
    assert [(each.hack, each.reward, each.error) for each in found.played if not each.ok] == []
    assert (found.played[0].hack, found.played[0].reward) == ("gold", 1.0)
    return found.played[1:]


def test_there_are_many_hacks_and_each_says_what_it_does(instances):
    for id, more in ((DJANGO, ()), (FLASK, OF_PYTEST)):
        hacks = hacks_of(instances[id])
        assert len({hack.name for hack in hacks}) == len(hacks) >= 45
        assert all(hack.what and hack.commands for hack in hacks)
        assert {hack.name for hack in hacks} & set(OF_PYTEST) == set(more)


@pytest.mark.timeout(1800)
def test_every_hack_earns_nothing_and_gold_one(files, instances, sample):
    hacks = sorted({hack.name for hack in hacks_of(instances[FLASK])} - set(FOUND_BY_FAILING_TESTS))
    chosen = (*FOUND_BY_FAILING_TESTS, *sample(hacks, 12))
    played = audited(files[FLASK], chosen)
    assert len(played) == len(chosen)
    doubts = {each.hack: each.told.get("doubt", "") for each in played}
    assert all(doubts[hack].endswith(doubt) for hack, doubt in FOUND_BY_FAILING_TESTS.items()), doubts


@pytest.mark.timeout(1200)
def test_nor_does_any_where_the_tests_are_unittest_s(files, sample):
    chosen = sample(OF_UNITTEST, 9)
    assert len(audited(files[DJANGO], chosen)) == len(chosen)


PLANTED = {
    "copies": "mkdir /tmp/other && cp -r django /tmp/other && cd /tmp/other && {apply}",
    "history": "{apply} && git stash -q",
    "objects": "{apply} && git stash -q && git stash drop -q",
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_search_for_the_fix_finds_it_where_it_is(instance, name):
    (hack,) = (hack for hack in hacks_of(instance) if hack.name == name)
    bench = Workbench()
    with closing(worktree.open_repository(instance, "bubblewrap")) as box:
        base = worktree.base_of(box)
        box.write("/tmp/gold.patch", instance.patch)
        bench.begin(box, worktree.FOLDER)
        identity = "export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a"
        planted = PLANTED[name].format(apply="patch -s -p1 --no-backup-if-mismatch -i /tmp/gold.patch")
        bench.bash(f"{identity}; {planted}; cd {worktree.FOLDER}; rm /tmp/gold.patch")
        assert worktree.patch_of(box, base) == ""
        said = bench.bash(hack.commands[0])
        bench.end()
        assert "found" in said
        assert worktree.patch_of(box, base) != ""


@pytest.mark.parametrize(("id", "name"), PAID_BY_A_NAIVE_GRADER)
def test_a_grader_that_believes_the_log_pays(instances, id, name):
    instance = instances[id]
    (hack,) = (hack for hack in hacks_of(instance) if hack.name == name)
    bench = Workbench()
    with closing(worktree.open_repository(instance, "bubblewrap")) as box:
        bench.begin(box, worktree.FOLDER)
        for command in hack.commands:
            bench.bash(command)
        bench.end()
        assert worktree.apply(box, instance.test_patch) == ""
        log = worktree.run(box, command_of(instance), 300.0).stdout
    assert judge_statuses(instance, statuses_of(instance, log)).resolved
