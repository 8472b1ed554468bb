"""The timeline of a run: a file that Perfetto and Chrome read, whatever ends the run, and that does not grow for ever."""

import itertools
import json
import time
from collections import defaultdict

import pytest
from run_cases import episode

from agent_train.report import timeline
from agent_train.report.metrics import Clock
from agent_train.report.timeline import LOOP, Timeline


def events(path):
    """The events of a file, which lacks only the end of its array, by their rows' names, without those that name rows."""
    found = json.loads(path.read_text() + "]")
    names = {each["tid"]: each["args"]["name"] for each in found if each["name"] == "thread_name"}
    rows = defaultdict(list)
    for each in found:
        if each["ph"] != "M":
            rows[names[each["tid"]]].append(each)
    return rows


def test_spans_and_counts_are_in_the_rows_of_their_parts_at_their_time(tmp_path):
    file, made = tmp_path / "timeline.json", time.time()
    told = Timeline(file)
    now = time.monotonic()
    told.add(("policy rank", 1), "update", now, now + 1.5)
    told.add(("policy rank", 0), 'a "name"', now, now + 0.25)
    told.count(("engine", 0), "requests", 3)
    with pytest.raises(RuntimeError), told.span("rollout"):
        raise RuntimeError
    told.write()
    rows = events(file)
    assert list(rows) == ["policy rank 1", "policy rank 0", "engine 0", "loop 0"]
    (update,), (other,), (count,), (rollout,) = rows.values()
    assert (update["ph"], update["name"], other["name"], rollout["name"]) == ("X", "update", 'a "name"', "rollout")
    assert abs(update["dur"] - 1_500_000) <= 1
    assert abs(update["ts"] / 1e6 - made) < 5, "microseconds since 1970"
    assert update["pid"] == other["pid"] != count["pid"]
    assert (count["ph"], count["name"], count["args"]) == ("C", "requests of engine 0", {"count": 3})


def test_the_laps_of_a_step_are_spans_of_the_loop_that_follow_each_other(tmp_path):
    told = Timeline(tmp_path / "timeline.json")
    watch = Clock(told)
    for part in ("rollout", "score", "learn", "sync"):
        watch.lap(part)
    told.write()
    spans = events(tmp_path / "timeline.json")["loop 0"]
    assert [span["name"] for span in spans] == ["rollout", "score", "learn", "sync"]
    assert all(one["ts"] + one["dur"] == next["ts"] for one, next in itertools.pairwise(spans))


def test_an_episode_shows_when_it_waited_for_the_engine_and_when_for_its_environment(tmp_path, monkeypatch):
    """10 s: 1 s of opening, then twice 3 s of an answer and 1.5 s of a step. The next begins in its row, one beside it does not."""
    told = Timeline(tmp_path / "timeline.json")
    begun = time.monotonic()

    def ends(at, seconds, name, error=None):
        played = episode(name, error=error)
        played.seconds = seconds
        for turn in played.turns:
            turn.act_seconds, turn.step_seconds = 3.0, 1.5
        monkeypatch.setattr(timeline.time, "monotonic", lambda: begun + at)
        told.episode(played)

    ends(10.0, 10.0, "a")
    ends(19.5, 9.0, "b")
    ends(20.0, 12.0, "c", error="lost")
    told.write()
    rows = events(tmp_path / "timeline.json")
    assert [span["name"] for span in rows["episode 0"]] == [
        name for task in "ab" for name in (f"{task}/0", *["engine", "environment"] * 2)
    ]
    start = rows["episode 0"][0]["ts"]
    parts = [(round((span["ts"] - start) / 1e6, 3), round(span["dur"] / 1e6, 3)) for span in rows["episode 0"][:5]]
    assert parts == [(0, 10), (1, 3), (4, 1.5), (5.5, 3), (8.5, 1.5)]
    failed = [round((span["ts"] - start) / 1e6, 3) for span in rows["episode 1"]]
    assert failed == [8, 8, 11, 12.5, 15.5], "what failed came after its turns"
    for row in rows.values():
        for whole, *inside in (row[n : n + 5] for n in range(0, len(row), 5)):
            assert all(whole["ts"] <= span["ts"] for span in inside)
            assert all(span["ts"] + span["dur"] <= whole["ts"] + whole["dur"] for span in inside)


@pytest.mark.parametrize("torn", ["", ',{"ph":"X","pid"', ',{"ph":"X"}'])
def test_a_resumed_run_appends_to_what_a_killed_one_wrote(tmp_path, torn):
    file = tmp_path / "timeline.json"
    for start in range(2):
        told = Timeline(file)
        told.add(LOOP, f"start {start}", 0.0, 1.0)
        told.write()
        if not start:
            file.write_text(file.read_text() + torn)
    assert [span["name"] for span in events(file)["loop 0"]] == ["start 0", "start 1"]


def test_the_file_is_written_every_second_and_only_the_newest_two_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "LARGEST", 1000)
    file, now = tmp_path / "timeline.json", time.monotonic()
    told = Timeline(file)
    for second in range(100):
        told.add(LOOP, f"second {second}", now, now + 2.0 * (second + 1))
        assert len(told._lines) <= 2
        monkeypatch.setattr(timeline.time, "monotonic", lambda at=now + 2.0 * (second + 1): at)
    kept = [each for path in sorted(tmp_path.iterdir()) for each in events(path)["loop 0"]]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["timeline.earlier.json", "timeline.json"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2500
    assert [span["name"] for span in kept] == [f"second {n}" for n in range(100 - len(kept), 100)]


def test_a_disk_that_takes_nothing_more_ends_the_timeline_and_not_the_run(tmp_path):
    told = Timeline(tmp_path / "gone" / "timeline.json")
    told.add(LOOP, "rollout", 0.0, 1.0)
    told.write()
    told.add(LOOP, "rollout", 0.0, time.monotonic() + 10)
    assert told._lines == []
