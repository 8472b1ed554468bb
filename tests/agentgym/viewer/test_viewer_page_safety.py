"""What a model wrote is text, whatever it is; and an exported file works where there is no network."""

import json
import unicodedata
from dataclasses import replace
from pathlib import Path

import made_runs
import pytest
from browser import elsewhere, overflow, serving, watch

from agentgym.core.trajectory import write_jsonl

pytestmark = pytest.mark.browser

LONG = 200_000
TEXTS = {
    "image": '<img src=x onerror="alert(1)"><svg onload=alert(2)>',
    "script": "</script><script>alert(3)</script><!-- <![CDATA[ -->",
    "link": "[press](javascript:alert(4)) <a href='javascript:alert(5)'>here</a> http://example.com/x.png",
    "style": "</style><style>*{display:none}</style>{{constructor.constructor('alert(6)')()}}",
    "direction": "right \u202eto left\u202c \u2067isolated\u2069 zero\u200bwidth\ufeff שלום العربية",
    "control": "bell\x07 escape\x1b[31mred nul\x00 line\u2028separator lone \ud83d",
    "long": "x" * LONG,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    elsewhere(make_runs, folder)
    return folder


def make_runs(folder):
    """An evaluation with every hostile text in every place that holds text, and one whose names are hostile too."""
    run = made_runs.write_evaluation(folder / "run", [("frozen_lake", "random")], n=1, k=1)
    first = made_runs.play("frozen_lake", made_runs.policy_maker("random"), 1, 1)[0]
    first.turns = first.turns[:2]
    for name, text in TEXTS.items():
        evil = made_runs.hostile(first, text)
        write_jsonl(run / "episodes" / "frozen_lake@random.jsonl", [replace(evil, task_id=f"{name} {text[:200]}")])
    evil = made_runs.write_evaluation(folder / "<img src=x onerror=alert(7)>", [("frozen_lake", "expert")], n=1, k=1)
    manifest = json.loads((evil / "run.json").read_text())
    manifest["cells"][0]["agent"]["name"] = manifest["cells"][0]["name"] = manifest["name"] = TEXTS["script"]
    manifest["versions"] = {TEXTS["image"]: TEXTS["script"]}
    (evil / "run.json").write_text(json.dumps(manifest))
    made_runs.write_training(folder / "train", steps=1)


@pytest.fixture(scope="module")
def served(folder):
    with serving(folder) as server:
        yield server


@pytest.mark.parametrize("name", TEXTS)
def test_a_hostile_text_is_shown_and_does_nothing(window, served, name):
    page = window(f"{served.url}#/run/run/episodes?outcome=error")
    page.locator(".vspace a", has_text=name).first.click()
    page.locator(".message").first.wait_for()
    page.locator(".reasoning summary").first.click()
    page.get_by_text("Info of the environment").first.click()
    shown = page.locator(".message.user .text").first.inner_text()
    start = TEXTS[name][:20]
    marked = "".join(f"U+{ord(c):04X}" if unicodedata.category(c) in ("Cc", "Cf") else c for c in start)
    assert marked in shown
    if name == "long":
        page.get_by_role("button", name=f"Show all {LONG:,} characters").nth(1).click()
        page.wait_for_function(
            "(long) => [...document.querySelectorAll('.text')].some((e) => e.textContent.length === long)", arg=LONG
        )
    assert overflow(page) <= 0
    assert page.evaluate("document.querySelectorAll('main img, main script, main style, main iframe').length") == 0
    assert page.evaluate(
        "[...document.querySelectorAll('a')].every((a) => a.getAttribute('href')?.startsWith('#') ?? true)"
    )


def test_hostile_names_are_shown_in_lists_and_do_nothing(window, served):
    page = window(served.url)
    page.locator("td a", has_text="<img src=x onerror=alert(7)>").click()
    page.get_by_role("heading", name="<img src=x onerror=alert(7)>").wait_for()
    page.get_by_text("Versions and command").click()
    page.locator("td a.open").first.click()
    page.locator(".vspace a").first.click()
    page.locator(".turn").first.wait_for()
    assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0


def test_the_page_forbids_what_it_does_not_need(window, served):
    page = window(served.url, may_fail=True)
    page.locator("td a").first.wait_for()
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))"
    )
    page.evaluate(
        "document.body.insertAdjacentHTML('beforeend', '<p id=p style=\"color: red\" onclick=\"window.ran = 1\">x</p>')"
    )
    page.locator("#p").click()
    assert page.evaluate("[window.ran, getComputedStyle(document.getElementById('p')).color === 'rgb(255, 0, 0)']") == [
        None,
        False,
    ]


MARKDOWN = {
    "script": "**a** </script><script>alert(1)</script> ```<script>alert(2)</script>```",
    "onerror": '# Heading\n<img src=x onerror=alert(3)> ![x](x" onerror="alert(4))',
    "address": "**a** [x](javascript:alert(5)) ![x](javascript:alert(6)) [#](#/runs)",
    "html": "**a** ![x](data:text/html;base64,PHNjcmlwdD4=) [x](data:text/html,<script>alert(7)</script>)",
    "svg": "**a** ![x](data:image/svg+xml;base64,PHN2Zz4=) ![x](data:image/png,raw) ![x](http://example.com/x.png)",
    "hidden": "**a** right \u202eto left\u202c\n```\u202epython\nzero\u200bwidth\n```",
}
MARKED = "**x**\n"
SLOW = {
    "quotes": MARKED + ">" * 10_000 + " deep",
    "items": MARKED + "\n".join("  " * i + "- item" for i in range(1000)) + "\n" + " " * 10_000 + "- last",
    "brackets": MARKED + "[" * 10_000 + "x" + "](" * 10_000 + ")" * 10_000,
    "stars": MARKED + "**a *b " * 50_000 + "__c _d " * 50_000,
    "images": MARKED + "![a](data:image/png;base64,AAAA " * 10_000 + ")",
    "links": MARKED + "[a]( " * 50_000 + ")",
    "ticks": MARKED + "` `` ``` " * 50_000,
    "fence": MARKED + "```" + " " * 100_000 + "`\n" + "`" * 100_000 + "x`",
    "rule": MARKED + "|a|\n" + "|" + "-" * 100_000 + "x\n" + " " * 100_000 + "x|\n" + "|" + " " * 100_000 + "---x",
    "table": MARKED + "|a|b|\n|---|---|\n" + "|**c**|`d`|\n" * 50_000,
    "headings": MARKED + ("#" + " " * 1000 + "\n") * 300 + "# aa " * 50_000,
    "many": MARKED + "# aa\n\n" * 100_000,
}


def test_hostile_markdown_is_rendered_as_words(window, served):
    page = window(served.url)
    page.locator("td a").first.wait_for()
    for name, text in MARKDOWN.items():
        shown = page.evaluate(RENDERED, text)
        assert shown["looks"], name
        assert shown["elements"] == [], name
        assert "alert" not in text or "alert" in shown["text"], name
    assert "U+202E" in shown["text"]
    assert "U+200B" in shown["text"]
    assert page.evaluate("agentgym.isImage('data:image/png;base64,AAAA')")
    refused = [
        "http://x/y.png",
        "data:image/svg+xml;base64,AAAA",
        'data:image/png;base64,AA" x',
        "data:text/html;base64,AA",
    ]
    for address in refused:
        assert not page.evaluate("(address) => agentgym.isImage(address)", address)
        assert page.evaluate("(a) => { try { agentgym.h('img', {src: a}); return 0 } catch { return 1 } }", address)


RENDERED = """(text) => {
  const looks = agentgym.markdown.looks(text);
  const element = agentgym.markdown.render(text);
  document.querySelector("main").append(element);
  const found = [...element.querySelectorAll("a, script, img, iframe, svg, style, [onerror], [href]")].map((e) => e.tagName);
  const said = { looks, elements: found, text: element.textContent };
  element.remove();
  return said;
}"""
# A pattern that took quadratic time would take minutes; each text takes a fraction of a second.
MOST_MILLISECONDS = 10_000


def test_no_text_takes_long_to_render_or_nests_deep(window, served):
    page = window(served.url)
    page.locator("td a").first.wait_for()
    for name, text in SLOW.items():
        took, depth, count = page.evaluate(
            """(text) => {
              const begun = performance.now();
              agentgym.markdown.looks(text);
              const element = agentgym.markdown.render(text);
              const took = performance.now() - begun;
              const depth = (e) => 1 + Math.max(0, ...[...e.children].slice(0, 1000).map(depth));
              return [took, depth(element), element.querySelectorAll("*").length]; }""",
            text,
        )
        assert took < MOST_MILLISECONDS, (name, took)
        assert depth < 30, name
        assert count < 100_000, name


def test_five_megabytes_of_markdown_are_text_that_is_folded(window, served):
    page = window(served.url)
    page.locator("td a").first.wait_for()
    took, shown = page.evaluate(
        """(line) => {
          const text = line.repeat(5_000_000 / line.length);
          const begun = performance.now();
          const element = agentgym.message({ role: "assistant", content: text });
          return [performance.now() - begun, element.textContent.length]; }""",
        "**bold** and `code`\n",
    )
    assert took < MOST_MILLISECONDS
    assert shown < 5_000


@pytest.fixture(scope="module")
def exported(folder, tmp_path_factory):
    from agentgym.viewer.export import export
    from agentgym.viewer.run import Runs, roots_of

    path = tmp_path_factory.mktemp("export") / "runs.html"
    export(Runs(roots_of([folder])), path, episodes=50)
    return path


def test_an_exported_file_works_offline_with_the_same_clicks(chrome, exported: Path):
    context = chrome.new_context(offline=True)
    page = context.new_page()
    wrong = watch(page, "")
    page.goto(exported.as_uri())
    page.locator("td a", has_text="run").first.wait_for()
    assert page.get_by_text("Exported").count() == 1
    page.get_by_role("link", name="run", exact=True).click()
    page.get_by_role("link", name="frozen_lake").click()
    page.get_by_text("8 episodes").wait_for()
    page.get_by_label("Outcome").select_option("error")
    page.get_by_text("7 of 8 episodes").wait_for()
    page.get_by_role("searchbox", name="Text").fill("assistant")  # a role, and in no text
    page.get_by_text("0 of 8 episodes").wait_for()
    page.get_by_role("searchbox", name="Text").fill("שלום")
    page.get_by_text("1 of 8 episodes").wait_for()
    page.locator(".vspace a").first.click()
    page.get_by_text("This episode failed").wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("1 of 8 episodes").wait_for()
    page.get_by_role("link", name="agentgym").click()
    page.get_by_role("link", name="train", exact=True).click()
    page.locator(".chart .area").first.wait_for()
    page.get_by_role("link", name="Episodes").click()
    page.get_by_label("Sort by").select_option("turns")
    page.locator(".vspace a").first.click()
    page.get_by_role("button", name="Show tokens").click()
    page.locator(".tokens .tok:not(.given)").first.hover()
    assert "probability" in page.locator(".token-readout").inner_text()
    context.close()
    assert wrong == []
