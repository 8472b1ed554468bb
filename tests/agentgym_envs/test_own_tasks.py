"""The tasks that the package ships: as many as README says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentgym.core.tasks import TaskSet

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
PUBLISHED = ("gsm8k", "gsm8k_tool", "gsm8k_python", "math_python", "code_mbpp", "code_humaneval", "sql", "search")


@pytest.fixture(autouse=True)
def no_data(monkeypatch):
    monkeypatch.setenv("AGENTGYM_DATA", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.filterwarnings("ignore:.*using the project's own")
def test_readme_says_how_many_tasks_there_are_without_published_data():
    sizes = {env: [len(TaskSet.load(env, split)) for split in ("train", "test")] for env in PUBLISHED}
    whole, test = [sum(pair) for pair in sizes.values()], [test for _, test in sizes.values()]
    found = re.search(r"have (\d+) to (\d+) of the project's own problems, (\d+) to (\d+) of", " ".join(README.split()))
    assert found is not None
    assert [int(number) for number in found.groups()] == [min(whole), max(whole), min(test), max(test)]


def test_readme_says_how_many_words_wordle_has():
    found = re.search(r"`wordle` has (\d+) train and (\d+) test words", README)
    assert found is not None
    assert [int(n) for n in found.groups()] == [len(TaskSet.load("wordle", split)) for split in ("train", "test")]
