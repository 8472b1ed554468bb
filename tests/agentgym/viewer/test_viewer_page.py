"""The page in a real Chromium: runs, episodes, one episode, tokens, keys, themes, narrow windows. By clicking."""

import json
import re
from dataclasses import replace

import made_runs
import pytest
from browser import NARROW, elsewhere, overflow, serving

from agentgym.core.trajectory import write_jsonl
from agentgym.evaluate.compare import compare_runs
from agentgym.evaluate.run import results_in
from agentgym.storage.files import write_json

pytestmark = pytest.mark.browser


RUNS = {
    "games": (("frozen_lake", "expert"), ("frozen_lake", "random"), ("tic_tac_toe", "random")),
    "again": (("frozen_lake", "random"),),
    "expert": (("tic_tac_toe", "expert"),),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    elsewhere(make_runs, folder)
    return folder


def make_runs(folder):
    """Evaluations, one of them with a failed episode, and two training runs."""
    made_runs.write_training(folder / "train-lake")
    made_runs.write_training(folder / "train-other", steps=1)
    for name, cells in RUNS.items():
        run = made_runs.write_evaluation(folder / name, cells, n=4, k=2)
        write_json(run / "results.json", results_in(run).to_json())
    lost = made_runs.play("frozen_lake", made_runs.policy_maker("random"), 1, 1)[0]
    lost = replace(made_runs.failed(lost), task_id="lost", sample=9)
    write_jsonl(folder / "games" / "episodes" / "frozen_lake@random.jsonl", [lost])


@pytest.fixture(scope="module")
def served(folder):
    with serving(folder) as server:
        yield server


def rows(page):
    return page.locator(".vspace .vrow a").all_inner_texts()


def test_runs_are_listed_sorted_and_filtered(window, served):
    page = window(served.url)
    names = page.locator("td[data-name=name] a")
    names.first.wait_for()
    assert sorted(names.all_inner_texts()) == ["again", "expert", "games", "train-lake", "train-other"]
    page.get_by_role("button", name="Run").click()
    assert names.all_inner_texts() == ["again", "expert", "games", "train-lake", "train-other"]
    page.get_by_role("button", name="Run").click()
    assert names.all_inner_texts()[0] == "train-other"
    assert page.locator("th[aria-sort=descending]").inner_text().startswith("Run")
    page.get_by_label("Filter runs").fill("tic random")
    page.get_by_text("1 of 5 runs").wait_for()  # what a run plays is known once it has been read
    assert names.all_inner_texts() == ["games"]
    page.wait_for_url("**/#/runs?filter=tic+random")
    page.reload()
    page.get_by_text("1 of 5 runs").wait_for()
    assert names.all_inner_texts() == ["games"]


def test_a_run_shows_its_cells_with_intervals_and_leads_to_the_episodes_of_one(window, served, folder):
    page = window(served.url)
    page.get_by_role("link", name="games", exact=True).click()
    row = page.locator("tr", has=page.locator("td", has_text="tic_tac_toe"))
    row.wait_for()
    cell = json.loads((folder / "games" / "results.json").read_text())["cells"][2]
    assert f"{100 * cell['success']:.1f}%" in row.inner_text()
    assert f"{100 * cell['success_low']:.1f}–{100 * cell['success_high']:.1f}" in row.inner_text()
    assert page.locator("th", has_text="pass@k").count() == 1
    page.get_by_label("Details of").select_option("tic_tac_toe@random")
    assert "How episodes ended" in page.inner_text("main")
    row.get_by_role("link", name="tic_tac_toe").click()
    page.locator(".vrow a").first.wait_for()
    assert page.get_by_role("status").filter(has_text="8 of 25 episodes").count() == 1
    assert all(name.startswith("tic_tac_toe") for name in rows(page))


def test_episodes_are_filtered_and_sorted_and_the_address_keeps_it(window, served):
    page = window(f"{served.url}#/run/games/episodes")
    page.get_by_text("25 episodes").wait_for()
    page.get_by_label("Outcome").select_option("error")
    page.get_by_text("1 of 25 episodes").wait_for()
    assert "EndpointError" in page.locator(".vspace .vrow").inner_text()
    page.get_by_label("Outcome").select_option("")
    page.get_by_label("Sort by").select_option("turns")
    page.get_by_label("Order").select_option("desc")
    page.wait_for_url("**sort=turns&order=desc")
    turns = lambda: [int(t.split()[0]) for t in page.locator(".vspace .c-turns").all_inner_texts()]  # noqa: E731
    page.wait_for_function("() => document.querySelector('.vspace .c-turns')?.textContent.startsWith('10')")
    ordered = [t for _, t in sorted(zip(tops(page), turns(), strict=True))]
    assert ordered == sorted(ordered, reverse=True)
    assert len(set(ordered)) > 1
    page.get_by_text("More filters").click()
    page.get_by_label("Turns, at most").fill("4")
    page.get_by_label("Turns, at most").press("Tab")
    page.wait_for_url("**turns_max=4**")
    page.wait_for_function(
        "() => [...document.querySelectorAll('.vspace .c-turns')].every((c) => parseInt(c.textContent) <= 4)"
    )
    few = rows(page)
    page.reload()
    page.locator(".vrow a").first.wait_for()
    assert rows(page) == few
    assert page.get_by_label("Turns, at most").input_value() == "4"
    page.go_back()
    page.get_by_text("25 episodes").wait_for()
    assert page.get_by_label("Turns, at most").input_value() == ""
    assert page.get_by_label("Sort by").input_value() == "turns"


def test_the_heads_of_the_list_sort_it(window, served):
    page = window(f"{served.url}#/run/games/episodes")
    page.locator(".vspace a").first.wait_for()
    page.get_by_role("button", name="Turns", exact=True).click()
    page.wait_for_url("**sort=turns&order=desc")
    page.get_by_role("button", name="Turns", exact=True).click()
    page.wait_for_url("**sort=turns")
    assert page.locator("[aria-sort=ascending]").inner_text().startswith("Turns")
    assert page.get_by_label("Sort by").input_value() == "turns"
    page.get_by_role("button", name="Task", exact=True).click()
    page.wait_for_url("**sort=task")


def test_a_cause_of_errors_leads_to_its_episodes_before_results_are_written(window, served):
    page = window(f"{served.url}#/run/games")
    page.get_by_label("Details of").select_option("frozen_lake@random")
    page.get_by_role("link", name="act failed: EndpointError: answered 500").click()
    page.get_by_text("1 of 25 episodes").wait_for()
    assert page.locator("select[name=cause]").input_value() == "act failed: EndpointError: answered 500"
    assert [name.split()[0] for name in rows(page)] == ["lost"]


def test_a_load_that_was_ended_in_the_middle_of_its_answer_is_no_problem(window, served):
    """The view that asked is gone; what it would say would stand in the next one."""
    page = window(served.url)
    said = page.evaluate(
        """async () => {
          const end = new AbortController();
          window.fetch = async (_, { signal }) => new Response(new ReadableStream({ start(body) {
            body.enqueue(new TextEncoder().encode('{"half'));
            signal.addEventListener("abort", () => body.error(signal.reason));
            window.setTimeout(() => end.abort(), 10); } }));
          return agentgym.api.run("games", end.signal).then(() => "answered", (error) => error.name); }"""
    )
    assert said == "AbortError"


def tops(page):
    found = page.locator(".vspace .vrow").evaluate_all("(rows) => rows.map((r) => r.getBoundingClientRect().top)")
    return [round(top) for top in found]


def test_text_is_searched_and_what_matches_nothing_says_so(window, served):
    page = window(f"{served.url}#/run/games/episodes")
    page.get_by_role("searchbox", name="Text").fill("EndpointError")
    page.get_by_text("1 of 25 episodes").wait_for()
    page.get_by_role("searchbox", name="Text").fill("no model ever said this")
    page.get_by_text("No episode matches.").wait_for()
    page.get_by_role("link", name="Clear filters").click()
    page.get_by_text("25 episodes", exact=True).wait_for()  # "0 of 25 episodes" has these words, too
    page.locator(".vspace .vrow a").nth(20).wait_for()


def test_an_episode_is_shown_turn_by_turn_and_the_way_back_keeps_the_place(window, served):
    page = window(f"{served.url}#/run/games/episodes?cell=frozen_lake%40expert")
    page.locator(".vspace a", has_text="frozen_lake-test-1").first.click()
    page.get_by_role("heading", name="frozen_lake-test-1").wait_for()
    page.get_by_text("3 of 8").wait_for()
    turns = page.locator(".turn")
    assert "Answer with up, down, left or right" in turns.first.inner_text()
    assert turns.first.locator(".message").count() == 2
    assert "reward 1" in turns.nth(turns.count() - 2).inner_text()  # the last is what the environment said at the end
    turns.first.get_by_text("Info of the environment").click()
    assert '"success"' in turns.first.inner_text()
    bar = turns.first.locator(".times")
    assert bar.locator(".act").bounding_box()["width"] > 0
    assert bar.locator(".env").bounding_box()["width"] > 0
    page.get_by_role("link", name="Next episode").click()
    page.get_by_text("4 of 8").wait_for()
    assert "#1" in page.locator("h1").inner_text()
    page.go_back()
    page.get_by_text("3 of 8").wait_for()
    page.go_back()
    page.locator(".vrow.at").wait_for()
    assert "frozen_lake-test-1" in page.locator(".vrow.at").inner_text()


def test_tokens_have_their_probability_and_what_was_given_is_masked(window, served, folder):
    page = window(f"{served.url}#/run/train-lake/episodes?cell=eval-000001")
    page.locator(".vspace a").first.click()
    page.get_by_role("button", name="Show tokens").click()
    view = page.locator(".token-view").first
    stored = json.loads((folder / "train-lake/trajectories/eval-000001.jsonl").read_text().splitlines()[0])
    first = stored["turns"][0]
    tokens = first["tokens"]
    assert view.locator(".tok.given").count() == len(tokens["new_prompt_ids"])
    sampled = view.locator(".tok:not(.given)")
    assert sampled.count() == len(tokens["completion_ids"])
    assert "".join(sampled.all_inner_texts()) == first["reply"]["content"] + "<|end|>"
    sampled.first.hover()
    told = page.locator(".token-readout")
    assert "probability 25.0%" in told.inner_text()
    assert f"log-probability {tokens['logprobs'][0]:.4f}" in told.inner_text()
    assert f"id {tokens['completion_ids'][0]}" in told.inner_text()
    assert re.search(r"weights 1\b", told.inner_text())
    assert "trained on" in told.inner_text()
    assert sampled.first.evaluate("(t) => getComputedStyle(t).backgroundColor") != "rgba(0, 0, 0, 0)"
    view.locator(".tok.given").first.hover()
    assert "masked" in told.inner_text()
    view.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert f"id {tokens['new_prompt_ids'][2]}" in told.inner_text()
    page.keyboard.press("t")
    page.locator(".message").first.wait_for()


def test_sampled_tokens_that_are_not_trained_on_say_why(window, tmp_path):
    run = elsewhere(made_runs.write_training, tmp_path / "train", 1, 1, 1)
    file = run / "trajectories" / "eval-000001.jsonl"
    episode = json.loads(file.read_text())
    episode["turns"][0]["unusable"] = "top_p"
    file.write_text(json.dumps(episode) + "\n")
    with serving(tmp_path) as served:
        page = window(f"{served.url}#/run/train/episodes?cell=eval-000001")
        page.locator(".vspace a").first.click()
        page.get_by_role("button", name="Show tokens").click()
        page.locator(".token-view").first.locator(".tok:not(.given)").first.hover()
        assert "masked: top_p" in page.locator(".token-readout").inner_text()


def test_training_shows_curves_that_are_read_off_and_overlaid(window, served):
    page = window(f"{served.url}#/run/train-lake")
    chart = page.locator(".chart[data-key='eval.success']")
    chart.locator(".area").wait_for()
    assert chart.locator("circle.point").count() == 3
    box = chart.locator(".plot").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 14, box["y"] + 60)
    assert "step 2" in chart.locator(".readout").inner_text()
    chart.locator(".plot").focus()
    page.keyboard.press("ArrowLeft")
    assert "step 1" in chart.locator(".readout").inner_text()
    page.get_by_label("Add a chart").select_option("train.turns")
    page.locator(".chart[data-key='train.turns'] polyline").wait_for(state="attached")
    page.get_by_label("Add a run to the charts").select_option("train-other")
    page.locator(".chart[data-key='eval.success'] polyline").nth(1).wait_for(state="attached")
    assert "train-other" in page.locator(".legend").inner_text()
    page.reload()
    page.locator(".chart[data-key='eval.success'] polyline").nth(1).wait_for(state="attached")
    page.get_by_role("link", name="Remove train-other").click()
    page.wait_for_function("() => document.querySelectorAll('.chart[data-key=\"eval.success\"] polyline').length === 1")
    page.get_by_text("Configuration").click()
    assert "frozen_lake" in page.locator(".folds .code").first.inner_text()
    page.locator(".steps a").first.click()
    page.get_by_text("4 of 20 episodes").wait_for()


def test_training_shows_the_gap_of_each_lag_as_a_line(window, served):
    page = window(f"{served.url}#/run/train-lake")
    chart = page.locator(".chart[data-key='train.update.gap_by_lag.*.mean']")
    chart.wait_for()
    assert chart.locator(".readout").inner_text().split("\n") == ["last", "lag 0 0", "lag 1 0.001"]
    assert page.locator(".chart[data-key='train.update.gap_by_lag.*.ess'] .readout").inner_text().count("100") == 2
    assert page.locator(".chart[data-key='train.update.gap_by_lag.*.k1']").count() == 0, "nothing but zeros"
    page.get_by_label("Add a run to the charts").select_option("train-other")
    chart.locator(".readout", has_text="train-other, lag 0").wait_for()


def test_two_runs_are_compared_and_their_episodes_stand_side_by_side(window, served, folder):
    page = window(served.url)
    page.get_by_label("compare again").check()
    assert "Pick another" in page.inner_text("main")
    page.get_by_label("compare games").check()
    page.get_by_role("link", name="Compare these two").click()
    page.get_by_role("heading", name="again and games").wait_for()
    found = compare_runs(folder / "again", folder / "games").to_json()
    success = page.locator(".compared tr", has_text="success").first.inner_text()
    difference = found["cells"][0]["measures"]["success"]
    assert f"{100 * abs(difference['mean']):.1f} points" in success
    assert f"{difference['wins']} won" in success
    assert "Only in games: frozen_lake@expert, tic_tac_toe@random" in page.inner_text("main")
    page.get_by_role("link", name="Swap").click()
    page.get_by_role("heading", name="games and again").wait_for()


def test_a_task_that_changed_leads_to_both_episodes(window, served, folder):
    page = window(f"{served.url}#/compare?a=expert&b=games")
    page.locator("td a.open").first.wait_for()
    task = page.locator("td a.open").first.inner_text()
    page.locator("td a.open").first.click()
    page.locator(".side .column").nth(1).wait_for()
    assert page.locator("h1").inner_text() == task
    assert page.locator(".side .column h2.name").all_inner_texts() == ["expert", "games"]
    page.get_by_role("link", name="1", exact=True).click()
    page.get_by_text("sample 1").first.wait_for()
    assert page.get_by_text("sample 1").count() == 2
    page.keyboard.press("Escape")
    page.get_by_role("heading", name="expert and games").wait_for()


def test_a_run_that_is_gone_cannot_be_compared_and_the_page_says_why(window, served):
    page = window(f"{served.url}#/compare?a=nothing&b=games", may_fail=True)
    page.get_by_role("alert").filter(has_text="nothing").wait_for()


def test_a_walk_with_the_keyboard_only(window, served):
    page = window(served.url)
    page.locator("td a.open").first.wait_for()
    press = page.keyboard.press
    press("/")
    page.keyboard.type("games")
    press("Escape")
    press("j")
    assert page.evaluate("document.activeElement.textContent") == "games"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    press("Enter")
    page.get_by_role("heading", name="games").wait_for()
    press("j")
    press("j")
    press("Enter")
    page.get_by_text("9 of 25 episodes").wait_for()
    press("j")
    press("ArrowDown")
    press("k")
    press("j")
    page.wait_for_function("() => document.activeElement.closest('.vrow')?.getAttribute('aria-rowindex') === '3'")
    press("Enter")
    page.get_by_text("2 of 9").wait_for()
    press("n")
    page.get_by_text("3 of 9").wait_for()
    press("p")
    page.get_by_text("2 of 9").wait_for()
    press("j")
    press("j")
    page.wait_for_function("() => document.querySelector('#turn-2').getBoundingClientRect().top < 120")
    press("?")
    page.get_by_role("dialog").wait_for()
    press("Escape")
    assert page.get_by_role("dialog").count() == 0
    press("Backspace")
    page.get_by_text("9 of 25 episodes").wait_for()
    press("Escape")
    page.get_by_role("heading", name="games").wait_for()
    press("Escape")
    page.get_by_role("heading", name="Runs").wait_for()


def test_light_and_dark_follow_the_system_until_the_reader_chooses(window, served):
    page = window(served.url, color_scheme="dark")
    ground = lambda: page.evaluate("getComputedStyle(document.body).backgroundColor")  # noqa: E731
    assert ground() == "rgb(20, 22, 26)"
    page.emulate_media(color_scheme="light")
    assert ground() == "rgb(255, 255, 255)"
    button = page.get_by_role("button", name="Theme")
    button.click()
    button.click()
    assert ground() == "rgb(20, 22, 26)"
    page.reload()
    assert ground() == "rgb(20, 22, 26)"
    page.keyboard.press("d")
    assert ground() == "rgb(255, 255, 255)"


PLACES = {
    "runs": "",
    "run games": "#/run/games",
    "run train": "#/run/train-lake?with=train-other",
    "episodes": "#/run/games/episodes",
    "episode": "#/run/games/episode/frozen_lake%40random%3A0",
    "episode tokens": "#/run/train-lake/episode/eval-000000%3A0?view=tokens",
    "compare": "#/compare?a=games&b=again",
}


def test_a_narrow_window_needs_no_sideways_scrolling(window, served):
    page = window(served.url, viewport=NARROW)
    wide = {}
    for place, address in PLACES.items():
        page.goto(served.url + address)
        page.locator(f"main.view-{place.split()[0]}").wait_for()
        page.locator("main .scroll, main .vspace .vrow, main .chart, main .turn").first.wait_for()
        wide[place] = overflow(page)
    assert wide == dict.fromkeys(PLACES, 0)


def test_controls_have_names_and_nothing_moves_for_those_who_ask_for_it(window, served):
    page = window(f"{served.url}#/run/games/episodes", reduced_motion="reduce")
    page.locator(".vrow a").first.wait_for()
    page.get_by_text("More filters").click()
    nameless = page.evaluate(
        """[...document.querySelectorAll("button, a[href], input, select")].filter((e) =>
          !(e.getAttribute("aria-label") || e.textContent.trim() || (e.labels && e.labels.length))).map((e) => e.outerHTML)"""
    )
    assert nameless == []
    moving = "[...document.querySelectorAll('*')].filter((e) => getComputedStyle(e).animationName !== 'none').length"
    assert page.evaluate(moving) == 0


def test_an_address_that_leads_nowhere_says_so(window, served):
    page = window(f"{served.url}#/run/nothing", may_fail=True)
    page.get_by_role("alert").filter(has_text="nothing").wait_for()
    page.goto(f"{served.url}#/what/is/this")
    page.get_by_text("There is nothing at this address.").wait_for()


def test_an_empty_folder_says_what_to_type(window, tmp_path):
    with serving(tmp_path) as served:
        page = window(served.url)
        page.get_by_text("agentgym eval").wait_for()
