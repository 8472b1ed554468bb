"""Messages in a real Chromium: Markdown, code and images as elements, answers beside each other, tracebacks. By clicking."""

import base64
import json
import struct
import zlib
from dataclasses import replace

import made_runs
import pytest
from browser import NARROW, elsewhere, overflow, serving

from agentgym.core.trajectory import Summary, Tokens, write_jsonl

pytestmark = pytest.mark.browser

MARKDOWN = """# The plan
Take **two** steps, *then* stop at `cell_4`; frozen_lake_x stays.

1. right
2. down
   - not up

| move | cell |
|---|--:|
| right | `1` |
| a|b | 2 |

```python
print("**not bold**")
# no heading
```
> said before

See [the rules](https://example.com/rules) and <b>this</b>.
"""
BOARD = "S F F\n- - -\n# @ #\n*   *"
TRACEBACK = (
    'Traceback (most recent call last):\n  File "my_env.py", line 12, in step\nZeroDivisionError: division by zero\n'
)


def png(width=600, height=900) -> str:
    """A picture as the address that holds it."""
    rows = b"".join(b"\0" + b"\x20\x80\xf0" * width for _ in range(height))
    chunk = lambda kind, data: (  # noqa: E731
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    )
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    image = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def in_turns(episode, rewards):
    """The episode as one of several players, each with a turn."""
    (turn,) = episode.turns
    turns = [replace(turn, player=name, info={"rewards": rewards}) for name in rewards]
    return replace(episode, turns=turns)


def make_run(folder):
    run = made_runs.write_evaluation(folder / "run", [("frozen_lake", "expert")], n=1, k=1)
    first = made_runs.play("frozen_lake", made_runs.policy_maker("expert"), 1, 1)[0]

    def episode(name, shown, said, **changes):
        turn = replace(first.turns[0], observation=shown, reply={"role": "assistant", "content": said})
        turn = replace(turn, info=changes.pop("info", {}), finish_reason=changes.pop("finish_reason", None))
        return replace(first, id=name, task_id=name, turns=[turn], final_observation=[], **changes)

    picture = {"type": "image_url", "image_url": {"url": png()}}
    elsewhere_ = {"type": "image_url", "image_url": {"url": "https://example.com/x.png"}}
    svg = {"type": "image_url", "image_url": "data:image/svg+xml;base64,PHN2Zy8+"}
    shown = [{"role": "user", "content": [{"type": "text", "text": BOARD}, picture, elsewhere_, svg]}]
    asked, said = {"role": "user", "content": "Write a summary."}, {"role": "assistant", "content": "I went left."}
    tokens = Tokens([1], [2, 3, 4], [-0.1] * 3, [0] * 3)
    summary = Summary(1, [asked], said, tokens, finish_reason="stop")
    write_jsonl(
        run / "episodes" / "frozen_lake@expert.jsonl",
        [
            episode("plan-1", shown, MARKDOWN, metadata={"expected": ["Paris"]}, info={"answer": "London"}),
            episode(
                "plan-2",
                [],
                f"![a square]({png(8, 8)})\n\n\nIt is\nLyon",
                metadata={"expected": 7},
                finish_reason="length",
            ),
            episode("other", [], "x", end="error", error="env: step failed", metadata={"traceback": TRACEBACK}),
            episode("held", [], "", finish_reason="content_filter"),
            episode("long", [], "x", end="context", summaries=[summary]),
            in_turns(episode("match", [], "x"), {"white": 1.0, "black": -0.5}),
        ],
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("messages")
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


def test_an_episode_is_found_by_its_task_and_the_address_keeps_it(window, served):
    page = window(f"{served.url}#/run/run/episodes?sort=task&order=desc")
    page.get_by_text("7 episodes").wait_for()
    page.get_by_label("Task", exact=True).fill("PLAN")
    page.get_by_text("2 of 7 episodes").wait_for()
    page.wait_for_url("**task_has=PLAN&sort=task&order=desc")
    page.reload()
    page.get_by_text("2 of 7 episodes").wait_for()
    assert page.get_by_label("Task", exact=True).input_value() == "PLAN"
    assert page.locator(".vspace a").all_inner_texts() == ["plan-2", "plan-1"]


@pytest.mark.parametrize(
    ("reason", "found"), [("length", ["plan-2"]), ("content_filter", ["held"]), ("context", ["long"])]
)
def test_episodes_are_found_by_the_finish_reason_of_an_answer(window, served, reason, found):
    page = window(f"{served.url}#/run/run/episodes")
    page.get_by_text("7 episodes").wait_for()
    page.get_by_text("More filters").click()
    page.get_by_label("Finish reason").select_option(reason)
    page.get_by_text("1 of 7 episodes").wait_for()
    page.wait_for_url(f"**finish={reason}")
    assert page.locator(".vspace a").all_inner_texts() == found


def test_expected_and_given_answers_stand_beside_each_other(window, served):
    page = window(f"{served.url}#/run/run/episodes?task_has=plan")
    page.locator(".vspace .c-given").first.wait_for()
    assert page.locator(".vspace .c-expected").all_inner_texts() == ["Paris", "7"]
    assert page.locator(".vspace .c-given").all_inner_texts() == ["London", "Lyon"]
    page.locator(".vspace a").first.click()
    facts = page.locator(".facts").first
    facts.get_by_text("Expected answer").wait_for()
    assert "Paris" in facts.inner_text()
    assert "London" in facts.inner_text()
    page.goto(f"{served.url}#/run/run/episodes?task_has=other")
    page.reload()
    page.locator(".vspace a").first.wait_for()
    assert not page.locator(".vspace .c-expected").first.is_visible(), "no episode of this list has an answer"


def test_a_summary_is_shown_where_it_was_made_and_is_found_and_counted(window, served, opened):
    page = opened("long")
    assert page.locator(".turn h2").all_inner_texts() == ["Turn 1", "Summary"]
    shown = page.locator(".turn.summary")
    assert "the context was full, and the policy went on with this" in shown.inner_text()
    assert "I went left." in shown.locator(".message.assistant").inner_text()
    shown.get_by_text("The request").click()
    shown.get_by_text("Write a summary.").wait_for()
    facts = page.locator(".facts").inner_text()
    assert "context: it was full" in facts
    assert "Summaries" in facts
    page.get_by_role("button", name="Show tokens").click()
    assert page.locator(".turn.summary .tok:not(.given)").count() == 3
    found = window(f"{served.url}#/run/run/episodes?text=went")
    found.get_by_text("1 of 7 episodes").wait_for()
    assert found.locator(".vspace a").all_inner_texts() == ["long"]


def test_markdown_is_rendered_and_can_be_read_as_it_was_written(opened):
    page = opened("plan-1")
    said = page.locator(".message.assistant")
    assert said.locator("h3").inner_text() == "The plan"
    assert said.locator("strong").all_inner_texts() == ["two"]
    assert said.locator("em").all_inner_texts() == ["then"]
    assert said.locator("p code").all_inner_texts() == ["cell_4"]
    assert said.locator("li").all_inner_texts() == ["right", "down", "not up"]
    assert said.locator("tr").all_inner_texts() == ["move\tcell", "right\t1", "a\tb | 2"]
    assert said.locator("pre").inner_text() == 'print("**not bold**")\n# no heading'
    assert said.locator(".md-code .chip").inner_text() == "python"
    assert said.locator("blockquote").inner_text() == "said before"
    assert "the rules (https://example.com/rules) and <b>this</b>" in said.inner_text()
    assert said.locator("a").count() == 0, "an address is shown and leads nowhere"
    said.get_by_role("button", name="Text", exact=True).click()
    assert said.locator(".text").inner_text().strip() == MARKDOWN.strip()
    said.get_by_role("button", name="Rendered").click()
    assert said.locator("h3").count() == 1
    page.set_viewport_size(NARROW)
    assert overflow(page) <= 0


def test_what_is_no_markdown_stays_text_and_images_that_are_data_are_shown(opened):
    page = opened("plan-1")
    shown = page.locator(".message.user")
    assert shown.locator(".text").first.inner_text() == BOARD
    assert shown.get_by_role("button", name="Text", exact=True).count() == 0
    picture = shown.locator("img")
    assert picture.count() == 1, "neither one that lies elsewhere, nor one that may hold a script"
    picture.evaluate("(image) => image.decode()")
    box = picture.bounding_box()
    assert 100 < box["height"] <= 480
    assert box["width"] <= 640
    assert "https://example.com/x.png" in shown.inner_text()
    assert "svg+xml" in shown.inner_text()


def test_an_image_in_markdown_is_shown(opened):
    image = opened("plan-2").get_by_alt_text("a square")
    assert image.evaluate("async (image) => { await image.decode(); return image.naturalWidth; }") == 8


def test_a_failure_has_its_traceback_and_the_stored_record_has_nothing_else(opened):
    page = opened("other")
    failure = page.get_by_role("note")
    assert "line 12, in step" not in failure.inner_text()
    failure.get_by_text("Traceback", exact=True).click()
    assert 'File "my_env.py", line 12, in step' in failure.inner_text()
    fold = page.locator(".folds details", has_text="All of it, as stored")
    fold.locator("summary").click()
    fold.locator(".code").wait_for()
    assert "() =>" not in fold.inner_text()
    assert fold.inner_text().count('"task_id"') == 1
    fold.locator("summary").click()
    fold.locator("summary").click()
    assert json.loads(fold.locator(".code").inner_text())["task_id"] == "other"


def test_players_are_named_at_their_turns_and_have_their_rewards_also_in_the_results(opened, window, served):
    page = opened("match")
    assert page.locator(".turn .player").all_inner_texts() == ["white", "black"]
    facts = page.locator(".fact", has_text="Reward of")
    assert [text.split("\n") for text in facts.all_inner_texts()] == [
        ["Reward of white", "2"],
        ["Reward of black", "-1"],
    ]
    page = window(f"{served.url}#/run/run")
    card = page.locator(".card", has_text="Mean reward by player")
    card.wait_for()
    assert card.locator(".fact").count() == 2
