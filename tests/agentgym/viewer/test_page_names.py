"""`report.html` in a browser; names of environments stand in one piece there and in the viewer, however narrow it is."""

import made_runs
import pytest
from browser import NARROW, WIDE, elsewhere, overflow, serving

from agentgym.evaluate.run import results_in
from agentgym.storage.files import write_json
from agentgym.viewer.export import write_report

pytestmark = pytest.mark.browser

# Lines on which the texts of elements stand.
LINES = """(elements) => elements.map((element) => {
  const range = document.createRange();
  range.selectNodeContents(element);
  return new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size; })"""
CELLS = (("frozen_lake", "random"), ("tic_tac_toe", "expert"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "run"
    elsewhere(made_runs.write_evaluation, run, CELLS, 2, 2)
    results = results_in(run)
    write_json(run / "results.json", results.to_json())
    write_report(run, "evaluation")
    return run


@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
def test_names_are_not_broken(window, run, viewport):
    with serving(run.parent) as served:
        for address in (f"{served.url}#/run/run", (run / "report.html").as_uri()):
            page = window(address, viewport=viewport)
            names = page.locator("td a.open", has_text="_")
            names.first.wait_for()
            assert names.evaluate_all(LINES) == [1] * names.count()
            assert names.count() == 2
            assert overflow(page) <= 0


def test_a_report_opens_at_its_run(window, run):
    page = window((run / "report.html").as_uri())
    page.locator("h2", has_text="Details of").wait_for()
    text = page.inner_text("main")
    for words in ("How episodes ended", "Time", "Versions and command", "7 of 8 episodes are in this file"):
        assert words in text
    page.get_by_role("link", name="All 8 episodes").click()
    page.locator("a.open").first.click()
    page.locator("section.turn").first.wait_for()


def test_the_report_of_a_training_run_has_its_numbers_and_curves(window, tmp_path):
    folder = elsewhere(made_runs.write_training, tmp_path / "lake")
    page = window(write_report(folder, "training").as_uri())
    page.locator(".chart[data-key='eval.success'] polyline").wait_for(state="attached")
    text = page.inner_text("main")
    for words in ("Held-out success, start", "Held-out success, best", "Training episodes", "Held-out evaluations"):
        assert words in text
