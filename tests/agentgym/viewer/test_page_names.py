"""Names of environments stand in one piece, in `report.html` and in the viewer, however narrow their tables are."""

import made_runs
import pytest
from browser import NARROW, WIDE, elsewhere, overflow, serving

from agentgym.evaluate.report import write_report
from agentgym.evaluate.run import results_in
from agentgym.storage.files import write_json

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
    write_report(run, results)
    return run


@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
def test_names_are_not_broken_in_the_report(window, run, viewport):
    page = window((run / "report.html").as_uri(), viewport=viewport)
    names = page.locator("section td.name")
    shown = names.all_inner_texts()
    assert {"frozen_lake", "tic_tac_toe", "random", "expert"} <= set(shown)
    lines = dict(zip(shown, names.evaluate_all(LINES), strict=True))
    assert {name: lines[name] for env_agent in CELLS for name in env_agent} == dict.fromkeys(
        lines.keys() & set(sum(CELLS, ())), 1
    )
    assert overflow(page) <= 0


@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
def test_names_are_not_broken_in_the_viewer(window, run, viewport):
    with serving(run.parent) as served:
        page = window(f"{served.url}#/run/run", viewport=viewport)
        names = page.locator("td a.open", has_text="_")
        names.first.wait_for()
        assert names.evaluate_all(LINES) == [1] * names.count()
        assert names.count() == 2
