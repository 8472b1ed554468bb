"""Rebuilt instances of each recipe: grades are what they should be, and those of SWE-bench's package on the same logs."""

import pytest
from swe_bench_cases import LITE, agreement_benchmark, built, require, swebench

from agentgym_envs.swe_bench.instances import read_instances
from agentgym_envs.swe_bench.recipes import recipe_of

# Of two releases, which other tests build too.
OFTEN = {"django__django-10914": "bubblewrap", "django__django-10924": "docker", "pallets__flask-4992": "docker"}
# Where all is tested: more of these, and of each other recipe one, with few tests.
SELDOM = {
    "django__django-11133": "bubblewrap",
    "django__django-11583": "bubblewrap",
    "pallets__flask-5063": "docker",
    "django__django-13447": "bubblewrap",
    "django__django-16527": "bubblewrap",
    "pytest-dev__pytest-7220": "bubblewrap",
    "pytest-dev__pytest-9359": "bubblewrap",
    "sympy__sympy-12481": "bubblewrap",
    "sympy__sympy-24152": "bubblewrap",
    "sphinx-doc__sphinx-7975": "bubblewrap",
    "sphinx-doc__sphinx-11445": "bubblewrap",
    "mwaskom__seaborn-3010": "bubblewrap",
}
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
    tested = {recipe_of(instances[id]).name for id in (*OFTEN, *SELDOM)}
    assert tested == {found.name for one in instances.values() if (found := recipe_of(one))}


@pytest.mark.sandbox
@pytest.mark.parametrize(("id", "backend"), (OFTEN | SELDOM).items())
def test_all_grades_are_right_and_those_of_swe_bench(id, backend, uncut, monkeypatch):
    if id not in OFTEN and not uncut:
        pytest.skip("AGENTGYM_TEST_ALL is not set")
    require(backend, monkeypatch)
    agreement = agreement_benchmark()
    found = agreement.measured(swebench("harness.grading", 5), built(id), LITE, backend)
    assert found["errors"] == {}
    assert {name: found[name]["resolved"] for name in agreement.WANTED} == agreement.WANTED
    for name in ("gold", "empty", "tests only"):
        assert (found[name]["swebench"], found[name]["same_tests"]) == (found[name]["resolved"], True), name
