"""An episode that ends in a patch, in a real Chromium: the patch as a coloured diff, what became of each test by name."""

from dataclasses import replace

import made_runs
import pytest
from browser import NARROW, elsewhere, overflow, serving

from agentgym.core.trajectory import write_jsonl

pytestmark = pytest.mark.browser
# The second line of its hunk removes "-- x" and looks like a head.
PATCH = """diff --git a/x.py b/x.py
--- a/x.py
+++ b/x.py
@@ -1,3 +1,2 @@ def f():
 kept
--- x
-second
+2nd <b>
"""
TESTS = {"fail_to_pass": {"test_fix (a.B)": "PASSED", "test_lost": None}, "pass_to_pass_failed": {"test_old": "FAILED"}}


def make_run(folder):
    run = made_runs.write_evaluation(folder / "run", [("frozen_lake", "expert")], n=1, k=1)
    first = made_runs.play("frozen_lake", made_runs.policy_maker("expert"), 1, 1)[0]

    def episode(name, **info):
        turns = [*first.turns[:-1], replace(first.turns[-1], info=info)]
        return replace(first, id=name, task_id=name, turns=turns)

    file = run / "episodes" / "frozen_lake@expert.jsonl"
    long = PATCH + "".join(f"diff --git a/{n} b/{n}\n--- a/{n}\n+++ b/{n}\n@@ -1 +1 @@\n-a\n+b\n" for n in range(2000))
    write_jsonl(file, [episode("fix", model_patch=PATCH, tests=TESTS), episode("nothing", model_patch="")])
    write_jsonl(file, [episode("long", model_patch=long), episode("odd", model_patch=7, tests=["x"]), episode("plain")])


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("patches")
    elsewhere(make_run, folder)
    with serving(folder) as server:
        yield server


@pytest.fixture
def opened(window, served):
    def open_episode(task):
        page = window(f"{served.url}#/run/run/episodes?task_has={task}")
        page.locator(".vspace a", has_text=task).click()
        page.locator(".message").first.wait_for()
        return page

    return open_episode


def test_a_patch_is_a_coloured_diff(opened):
    page = opened("fix")
    diff = page.locator(".patch .diff")
    assert diff.inner_text().rstrip("\n") == PATCH.rstrip("\n")
    assert diff.locator(".diff-file").all_inner_texts() == [line + "\n" for line in PATCH.splitlines()[:3]]
    assert [text.strip() for text in diff.locator(".diff-hunk").all_inner_texts()] == ["@@ -1,3 +1,2 @@ def f():"]
    assert [text.strip() for text in diff.locator(".diff-old").all_inner_texts()] == ["--- x", "-second"]
    assert [text.strip() for text in diff.locator(".diff-new").all_inner_texts()] == ["+2nd <b>"]
    page.set_viewport_size(NARROW)
    assert overflow(page) <= 0


def test_tests_have_their_status_by_name(opened):
    rows = opened("fix").locator(".patch tbody tr")
    assert [row.split("\t") for row in rows.all_inner_texts()] == [
        ["✓ PASSED", "test_fix (a.B)", "fail to pass"],
        ["✗ not in the log", "test_lost", "fail to pass"],
        ["✗ FAILED", "test_old", "pass to pass failed"],
    ]


def test_a_long_patch_is_folded(opened):
    page = opened("long")
    assert page.locator(".patch .diff-new").count() < 100
    page.locator(".patch .more").click()
    assert page.locator(".patch .diff-new").count() > 500
    assert page.locator(".patch .diff").inner_text().rstrip("\n").endswith("-a\n+b")


def test_an_empty_patch_is_told_and_other_episodes_have_no_such_part(opened):
    assert "It is empty." in opened("nothing").locator(".patch").inner_text()
    for name in ("odd", "plain"):
        assert opened(name).locator(".patch").count() == 0
