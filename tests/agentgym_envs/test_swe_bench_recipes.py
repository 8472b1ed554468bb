"""Recipes of repositories besides Django: a rebuilt instance of each, whose gold patch resolves it and whose empty patch does not."""

import pytest
from swe_bench_cases import LITE, require

from agentgym.sandbox import SandboxError
from agentgym.sandbox.images import debian, interpreters
from agentgym_envs.swe_bench.grading import grade
from agentgym_envs.swe_bench.images import build
from agentgym_envs.swe_bench.instances import read_instances
from agentgym_envs.swe_bench.recipes import recipe_of

# Of each recipe one, with few tests.
IDS = (
    "pallets__flask-4992",
    "pytest-dev__pytest-7220",
    "pytest-dev__pytest-9359",
    "sympy__sympy-12481",
    "sympy__sympy-24152",
    "sphinx-doc__sphinx-7975",
    "sphinx-doc__sphinx-11445",
    "mwaskom__seaborn-3010",
)
OFTEN = {"pytest-dev__pytest-7220", "sympy__sympy-12481"}  # the others where all is tested
pytestmark = [pytest.mark.data, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def instances():
    if not LITE.is_file():
        pytest.skip("there is no swe_bench/lite_from_sdist.jsonl in the data folder")
    return {one.id: one for one in read_instances(LITE)}


def test_all_instances_have_a_recipe_but_those_whose_tests_need_a_network(instances):
    without = {one.repo for one in instances.values() if recipe_of(one) is None}
    assert without == {"psf/requests"}
    assert all(recipe_of(one).requirements for one in instances.values() if recipe_of(one))


def test_each_recipe_has_an_instance_here(instances):
    tested = {recipe_of(instances[id]).name for id in IDS}
    assert tested == {
        found.name for one in instances.values() if (found := recipe_of(one)) and "django" not in found.name
    }


@pytest.mark.bubblewrap
@pytest.mark.parametrize("id", IDS)
def test_the_gold_patch_resolves_it_and_nothing_does_not(instances, id, uncut, monkeypatch):
    if id not in OFTEN and not uncut:
        pytest.skip("AGENTGYM_TEST_ALL is not set")
    instance, backend = instances[id], require("bubblewrap", monkeypatch)
    if missing := debian.missing_tools():
        pytest.skip(f"{', '.join(missing)} not found")
    try:
        interpreters.find(recipe_of(instance).python)
    except SandboxError as error:
        pytest.skip(str(error))
    [made] = build([instance], docker=False)
    assert made.built is not None, made.error
    gold = grade(instance, instance.patch, sandbox=backend)
    assert gold.resolved, gold
    assert not grade(instance, "", sandbox=backend).resolved
