"""swe_bench: tests that a source release no longer has."""

import dataclasses

import pytest
from swe_bench_cases import LITE, instance

from agentgym_envs.swe_bench.instances import read_instances
from agentgym_envs.swe_bench.releases import without_absent


@pytest.mark.data
def test_they_do_not_count_where_the_image_is_rebuilt_from_it():
    found = next(one for one in read_instances(LITE) if one.id == "django__django-12184")
    gone = "test_reverse_value_error_propagates (urlpatterns.tests.ConversionExceptionTests)"
    assert set(found.pass_to_pass) - set(without_absent(found).pass_to_pass) == {gone}
    published = dataclasses.replace(found, sdist=None)
    assert without_absent(published) == published


@pytest.mark.data
def test_few_instances_have_such_tests():
    every = read_instances(LITE)
    gone = [len(one.pass_to_pass) - len(without_absent(one).pass_to_pass) for one in every]
    assert (sum(gone), sum(count > 0 for count in gone)) == (28, 5)


def test_other_instances_stay_as_they_are():
    assert without_absent(instance()) == instance()
