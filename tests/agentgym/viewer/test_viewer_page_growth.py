"""Runs that grow while the page is open, runs of 50,000 episodes, and a server that goes away."""

import json
import re
import threading

import made_runs
import pytest
from browser import SECONDS, elsewhere, many, serving, writer

from agentgym.storage.files import write_text

pytestmark = pytest.mark.browser

COUNT = 50_000


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """An evaluation of 12 really played episodes: what the growing run and the large one are made of."""
    folder = tmp_path_factory.mktemp("played")
    elsewhere(made_runs.write_evaluation, folder / "run", (("frozen_lake", "expert"),), 6, 2)
    return folder / "run"


def fresh(played, run):
    """A run that has the same plan and no episode yet."""
    (run / "episodes").mkdir(parents=True)
    (run / "run.json").write_text((played / "run.json").read_text())
    return run, played / "episodes" / "frozen_lake@expert.jsonl"


def test_a_run_that_is_still_being_read_says_so_and_shows_no_score(window, played, tmp_path, monkeypatch):
    """A slow disk, played by a reader that stops after its first lines until it may go on."""
    lines = (played / "episodes" / "frozen_lake@expert.jsonl").read_text().splitlines()
    many(tmp_path / "large", 300, json.loads((played / "run.json").read_text()), lines)
    go_on = threading.Event()

    def read_slowly(files):
        for file in files:
            steps = iter([True, False])
            file.update(lambda steps=steps: next(steps))
            go_on.wait(SECONDS)
            file.update()

    monkeypatch.setattr("agentgym.viewer.run.read_all", read_slowly)
    with serving(tmp_path) as served:
        page = window(served.url)
        reading = page.locator("td[data-name=headline]", has_text=re.compile(r"reading \d+%"))
        reading.wait_for()
        page.get_by_role("link", name="large").click()
        page.get_by_text("The episodes are still being read: reading").wait_for()
        assert re.search(r"reading \d+%", page.locator(".facts").first.inner_text())
        assert re.search(r"reading \d+%", page.locator("td[data-name=success]").inner_text())
        assert "100.0%" not in page.inner_text("main")
        go_on.set()
        page.locator("td[data-name=success]", has_text="100.0%").first.wait_for()
        assert "100.0%" in page.locator(".facts").first.inner_text()
        page.goto(served.url)
        page.locator("td[data-name=headline]", has_text="100.0%").wait_for()
        assert page.get_by_text("reading").count() == 0


def test_a_run_grows_on_the_open_page_and_the_place_is_kept(window, played, tmp_path):
    run, source = fresh(played, tmp_path / "growing")
    with serving(tmp_path) as served, writer(run, source) as more:
        more()
        page = window(f"{served.url}#/run/growing")
        page.get_by_text("live · 1 episode").wait_for()
        assert "1 of 12" in page.locator("td", has_text="of 12").inner_text()
        page.locator("td a.open").first.focus()
        more()
        page.locator("td", has_text="2 of 12").wait_for()
        page.get_by_text("live · 2 episodes").wait_for()
        assert page.evaluate("document.activeElement.textContent") == "frozen_lake"
        page.goto(f"{served.url}#/run/growing/episodes")
        page.locator(".vspace .vrow").nth(1).wait_for()
        page.keyboard.press("j")
        for _ in range(4):
            more()
        page.locator(".vspace .vrow").nth(5).wait_for()
        page.get_by_text("6 episodes", exact=True).wait_for()
        page.wait_for_function("() => document.activeElement.closest('.vrow')?.getAttribute('aria-rowindex') === '2'")
        page.goto(f"{served.url}#/runs")
        page.get_by_text("live", exact=True).wait_for()
        page.get_by_label("compare growing").focus()
        more()
        page.locator("td[data-name=episodes]", has_text="7").wait_for()
        assert page.evaluate("document.activeElement.dataset.run") == "growing"
    with serving(tmp_path) as served:
        page = window(served.url)
        page.locator("td a").first.wait_for()
        assert page.get_by_text("live", exact=True).count() == 0


def test_curves_grow_with_their_run(window, tmp_path):
    run = elsewhere(made_runs.write_training, tmp_path / "train", 1, 1, 1)
    with serving(tmp_path) as served:
        page = window(f"{served.url}#/run/train")
        points = page.locator(".chart[data-key='eval.success'] circle.point")
        points.nth(1).wait_for()
        lines = (run / "metrics.jsonl").read_text().splitlines()
        with (run / "metrics.jsonl").open("a") as out:
            out.write(json.dumps({**json.loads(lines[-1]), "step": 2}) + "\n")
        points.nth(2).wait_for()
        assert points.count() == 3
        (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")  # it goes back to a checkpoint
        points.nth(2).wait_for(state="detached")
        assert points.count() == 2
        again = {**json.loads(lines[-1]), "success": 0.125}  # and to another one, with as many records as before
        write_text(run / "metrics.jsonl", "\n".join([*lines[:-1], json.dumps(again)]) + "\n")
        page.get_by_label("ends at 12.5%").wait_for()


def test_fifty_thousand_episodes_open_and_scroll_to_the_end(window, played, tmp_path):
    lines = sorted((played / "episodes" / "frozen_lake@expert.jsonl").read_text().splitlines(), key=len)[:4]
    many(tmp_path / "large", COUNT, json.loads((played / "run.json").read_text()), lines)
    with serving(tmp_path) as served:
        page = window(f"{served.url}#/run/large/episodes")
        page.locator(".vspace a", has_text="task-00000").wait_for()
        page.get_by_text("50,000 episodes", exact=True).wait_for(timeout=120_000)
        assert page.locator(".vspace .vrow").count() < 100
        page.locator(".vscroll").hover()
        page.mouse.wheel(0, 34 * 20_000)
        page.locator(".vspace a", has_text="task-20000").wait_for()
        page.locator(".vscroll").evaluate("(list) => { list.scrollTop = list.scrollHeight; }")
        last = page.locator(".vspace a", has_text="task-49999")
        last.wait_for()
        assert page.locator(".vspace .vrow").count() < 100
        last.click()
        page.get_by_text("50,000 of 50,000").wait_for()
        page.go_back()
        page.locator(".vspace .vrow.at", has_text="task-49999").wait_for()
        page.get_by_label("Sort by").select_option("task")
        page.get_by_label("Order").select_option("desc")
        page.locator(".vspace [aria-rowindex='2'] a", has_text="task-49999").wait_for()
        frames = page.evaluate(SCROLL)
        assert frames > 5


# Scrolls through the whole list in a second and counts the frames that were drawn.
SCROLL = """() => new Promise((done) => {
  const list = document.querySelector(".vscroll"); const began = performance.now(); let frames = 0;
  const next = () => { const share = (performance.now() - began) / 1000; frames += 1;
    list.scrollTop = share * list.scrollHeight; share < 1 ? requestAnimationFrame(next) : done(frames); };
  requestAnimationFrame(next); })"""


def test_a_dead_server_is_said_and_its_return_noticed(window, played, tmp_path):
    fresh(played, tmp_path / "run")
    with serving(tmp_path) as served:
        page = window(f"{served.url}#/run/run", may_fail=True)
        page.locator("td a.open").first.wait_for()
        served.stop()
        page.get_by_text("reconnecting…").wait_for()
        page.get_by_role("link", name="frozen_lake").click()
        page.get_by_role("alert").filter(has_text="Start agentgym view again").first.wait_for()
        assert page.get_by_text("The server does not answer.").count() == 2
        served.start()
        page.get_by_text("No episodes yet.").wait_for()
        assert page.locator("#banner").is_hidden()
