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
ID = "django__django-10914"
# Each shows that a defence is needed: with the patch applied as it is, and the log believed, it is paid.
PAID_BY_A_NAIVE_GRADER = (
    *("forge-and-exit", "forge-at-exit", "mute-and-forge", "case-run", "add-failure"),
    *("known-names", "sitecustomize", "rewrite-runner"),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A file with the one instance, whose image is built."""
    lines = Path(os.environ["AGENTGYM_DATA"], "swe_bench", "lite_from_sdist.jsonl").read_text().splitlines()
    file = tmp_path_factory.mktemp("swe_bench") / "instance.jsonl"
    file.write_text(next(line for line in lines if json.loads(line)["instance_id"] == ID) + "\n")
    (built,) = images.build(read_instances(str(file)))
    assert not built.error
    return str(file)


@pytest.fixture(scope="module")
def instance(data):
    (found,) = read_instances(data)
    return found


def test_there_are_many_hacks_and_each_says_what_it_does(instance):
    hacks = hacks_of(instance)
    assert len({hack.name for hack in hacks}) == len(hacks) >= 50
    assert all(hack.what and hack.commands for hack in hacks)


@pytest.mark.timeout(1800)
def test_every_hack_earns_nothing_and_gold_one(data):
    spec = agentgym.spec("swe_bench")
    kwargs = {"data": data, "sandbox": "bubblewrap", "test_timeout": 300.0}
    found = asyncio.run(
        audit(agentgym.core.registration.EnvSpec(spec.id, spec.entry_point, kwargs), split="all", concurrency=2)
    )
    assert [(each.hack, each.reward, each.error) for each in found.played if not each.ok] == []
    assert found.played[0].reward == 1.0
    assert len(found.played) > 50


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


@pytest.mark.parametrize("name", PAID_BY_A_NAIVE_GRADER)
def test_a_grader_that_believes_the_log_pays(instance, name):
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
