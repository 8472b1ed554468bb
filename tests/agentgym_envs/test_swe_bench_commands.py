"""swe_bench: which command tests an instance, and that SWE-bench's own table says the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from swe_bench_cases import LITE, TESTS, instance, swebench

from agentgym_envs.swe_bench.commands import arguments_of, build_command_of, command_of
from agentgym_envs.swe_bench.instance import Instance
from agentgym_envs.swe_bench.instances import read_instances


def of_files(*files: str) -> str:
    return "".join(TESTS.replace("tests/test_one.py", file) for file in files)


def test_pytest_gets_the_files_of_the_test_patch():
    assert command_of(instance()) == "pytest -rA tests/test_one.py"


def test_django_s_runner_gets_modules():
    case = instance(
        repo="django/django", version="3.0", test_patch=of_files("tests/admin/tests.py", "tests/a/b/models.py")
    )
    runner = "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1"
    assert command_of(case) == f"{runner} admin.tests a.b.models"


def test_data_files_are_no_arguments():
    assert arguments_of(instance(test_patch=of_files("tests/a.json", "tests/b.csv", "tests/c.py", "d.toml"))) == (
        "tests/c.py",
    )


def test_names_are_quoted():
    assert command_of(instance(test_patch=of_files("tests/a b;c.py"))) == "pytest -rA 'tests/a b;c.py'"


def test_some_versions_have_their_own_command():
    assert (
        command_of(instance(repo="django/django", version="1.9", test_patch="")) == "./tests/runtests.py --verbosity 2"
    )
    assert command_of(instance(repo="astropy/astropy", version="1.3", test_patch="")).endswith("--tb=no")


def test_mypy_s_tests_are_cases_by_name():
    patch = (
        of_files("test-data/unit/check.test")
        .replace("+2nd", "+[case testOne]")
        .replace(" first", " [case testTwo-xfail]")
    )
    command = command_of(instance(repo="python/mypy", version="1.4", test_patch=patch))
    assert command == "pytest -n0 -rA -k 'testTwo-xfail or testOne'"
    assert command_of(instance(repo="python/mypy", version="1.8")) == "pytest -rA"


def test_swe_smith_runs_the_files_of_the_tests_to_fix():
    case = instance(repo="swesmith/a__b.12", test_patch="", fail_to_pass=("t/a.py::x", "t/a.py::y", "t/b.py::z"))
    assert command_of(case) == "pytest --disable-warnings --color=no --tb=no --verbose t/a.py t/b.py"


def test_an_instance_s_own_command_wins():
    assert command_of(instance(test_command="make check")) == "make check"


def test_a_gold_patch_of_compiled_sources_needs_a_build():
    """Published images are not built again: each right patch would fail."""
    patch = of_files("sklearn/tree/_tree.pyx")
    case = Instance("i", "scikit-learn/scikit-learn", "0" * 40, "p", version="1.3", patch=patch)
    with pytest.raises(
        ValueError, match=r"instance i: its gold patch changes sklearn/tree/_tree.pyx, which is compiled"
    ):
        build_command_of(case)
    assert build_command_of(replace(case, build_command="make")) == "make"
    assert build_command_of(replace(case, patch=of_files("sklearn/tree/_classes.py"))) == ""


def test_an_unknown_repository_is_named_with_a_remedy():
    with pytest.raises(
        ValueError,
        match=r"pallets__flask-1: 'a/b' is not in .*pip install 'swebench.*or give the record a \"test_command\"",
    ):
        command_of(instance(repo="a/b"))


def test_swe_bench_has_the_same_command_of_every_python_repository_and_version():
    table = swebench("harness.constants.python", 4).MAP_REPO_VERSION_TO_SPECS_PY
    compared = 0
    for repo, versions in table.items():
        for version, spec in versions.items():
            if repo == "swe-bench/humaneval" or "test_cmd" not in spec:  # dbt-core has none
                continue
            assert command_of(instance(repo=repo, version=version, test_patch="")) == spec["test_cmd"]
            compared += 1
    assert compared > 250


@pytest.mark.skipif(not LITE.is_file(), reason="needs AGENTGYM_DATA with swe_bench/lite_from_sdist.jsonl")
@pytest.mark.data
def test_swe_bench_gives_real_instances_the_same_arguments():
    module = swebench("harness.test_spec.python", 4)
    for case in read_instances(LITE):
        theirs = module.get_test_directives({"repo": case.repo, "test_patch": case.test_patch})
        assert list(arguments_of(case)) == theirs
