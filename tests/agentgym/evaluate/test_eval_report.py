"""The page about an evaluation: whole, safe, and with everything that was found."""

import re
from html.parser import HTMLParser

import pytest
from numbers_cases import calls, cell, result, trajectory

from agentgym.core.trajectory import write_jsonl
from agentgym.evaluate import Results
from agentgym.evaluate.report import write_report
from agentgym.storage.files import write_json
from agentgym.viewer.charts import Estimate, Frame, Palette, interval_chart
from agentgym.viewer.page import OF_EACH_KIND, examples

EVIL = "<script>alert('x')</script><img src=x onerror=alert(1)>\"'&\ud800"
SHOWN = EVIL.replace("\ud800", "?")
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Reads a page as a browser would: what opens and closes, what it refers to, its words."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words, self.references = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def a_run(path, word="left", tags=("corner", "edge")):
    """The folder and the results of two cells: one played four times with everything counted, one that failed in part."""
    first = [
        trajectory(
            f"{word}{i}",
            s,
            float((i + s) % 3 > 0),
            said=word,
            turns=2,
            calls=calls(3, 1_000, 100, **{"429": 1}),
            cost=0.02,
            tags=[tags[i % 2]],
            difficulty=i % 4,
        )
        for i in range(8)
        for s in range(4)
    ]
    second = [trajectory("a", reward=1.0, env="f"), trajectory("b", env="f", error=f"f, task 'b', turn 1: {word}")]
    plan = [(cell("e", "m", k=4), first), (cell("f", "m"), second)]
    (path / "episodes").mkdir(parents=True)
    cells, results = [], []
    for one, episodes in plan:
        write_jsonl(path / "episodes" / one.file_name, episodes)
        cells.append({**one.to_json(), "tasks": 8, "file": f"episodes/{one.file_name}"})
        results.append(result(episodes, one.env.id, samples=one.k, planned=len(episodes) + 2, seconds=3.0))
    record = {"kind": "evaluation", "format": 1, "name": path.name, "cells": cells, "command": ["agentgym", word]}
    write_json(
        path / "run.json", {**record, "versions": {"agentgym": "9.9"}, "settings": {"retries": 7}, "prices": None}
    )
    return path, Results(path.name, results, stopped="cost", seconds=6.0)


@pytest.fixture
def page(tmp_path):
    return Page(write_report(*a_run(tmp_path / "run")).read_text(encoding="utf-8"))


def test_the_page_is_well_formed_and_asks_no_other_host(tmp_path):
    text = write_report(*a_run(tmp_path / "run")).read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert page.references == []
    assert "script" not in page.tags
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert "width=device-width" in text


def test_the_page_shows_what_was_found(page):
    words = " ".join(page.words)
    for fact in (
        "agentgym evaluation",
        "Stopped: cost. 4 episodes were not played.",
        "34",
        "65.6%",
        "@4 100.0%",
        "^4 0.0%",
        "32k",
        "$0.64",
        "By tag",
        "corner",
        "By difficulty",
        "Episodes by reward",
        "How episodes ended",
        "Errors by cause",
        "Requests sent again, by cause",
        "429",
        "agentgym left",
        "9.9",
        '"retries": 7',
        "Success, with 95% intervals clustered by task",
        "One of k succeeds, all of k succeed",
        "Success by tag",
    ):
        assert fact in words, fact


def test_some_episodes_of_every_kind_can_be_read(tmp_path):
    text = write_report(*a_run(tmp_path / "run")).read_text(encoding="utf-8")
    badges = re.findall(r'<span class="badge \w+">(\w+)</span>', text)
    assert badges == ["success"] * OF_EACH_KIND + ["failure"] * OF_EACH_KIND + ["success", "error"]
    assert "f, task &#x27;b&#x27;, turn 1: left" in text


def test_what_models_and_authors_wrote_is_shown_and_never_run(tmp_path):
    run, results = a_run(tmp_path / "run", EVIL, tags=(EVIL, "x"))
    page = Page(write_report(run, results).read_text(encoding="utf-8"))
    assert page.open == []
    assert not {"script", "img"} & set(page.tags)
    assert SHOWN in "".join(page.words)


def test_a_run_in_which_nothing_was_played_has_a_page_too(tmp_path):
    (tmp_path / "run").mkdir()
    one = cell()
    record = {
        "kind": "evaluation",
        "format": 1,
        "name": "run",
        "cells": [{**one.to_json(), "file": "episodes/none.jsonl"}],
    }
    write_json(tmp_path / "run" / "run.json", record)
    page = Page(write_report(tmp_path / "run", Results("run", [result([], planned=4)])).read_text(encoding="utf-8"))
    assert "4 episodes were not played." in " ".join(page.words)


def test_examples_are_the_first_of_each_kind_and_no_more_is_read_than_they_take():
    def stream():
        for i in range(100):
            yield trajectory(str(i), reward=float(i % 3 == 0), error="e: x" if i % 3 == 1 else None)
        raise AssertionError("read to the end")

    assert [t.task_id for t in examples(stream())] == ["0", "3", "6", "2", "5", "8", "1", "4", "7"]


def test_an_interval_chart_has_a_row_for_each_number_and_its_interval():
    palette = Palette(("#111111",), text="#000000", grid="#eeeeee")
    estimates = [
        Estimate("a" * 200, 0.5, 0.25, 0.75),
        Estimate("<b>", 1.0),
        Estimate("lost", float("nan"), 0.0, 1.0),
    ]
    frame = Frame("t", width=500, percent=True, y_range=(0, 1))
    svg = interval_chart(estimates, frame, palette)
    assert svg.count("<circle") == 2
    assert svg.count('stroke-width="5"') == 1
    assert f"<title>{'a' * 200}: 50% (25% to 75%)</title>" in svg
    assert "&lt;b&gt;" in svg
    left, right = (float(x) for x in re.search(r'd="M([\d.]+),[\d.]+H([\d.]+)" stroke="#111111"', svg).groups())
    dot = float(re.search(r'<circle cx="([\d.]+)"', svg)[1])
    assert dot == pytest.approx((left + right) / 2, abs=0.1)
    assert Page(svg).open == []
    assert max(len(name) for name in re.findall(r'text-anchor="end"[^>]*>([^<]*)<', svg)) <= 30
    assert "<circle" not in interval_chart([], frame, palette)
