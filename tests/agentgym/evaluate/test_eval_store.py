"""The folder of a run: nothing that was stored is lost, whatever happens to the process that writes it."""

import errno
import json
import os
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.core.registration import EnvSpec
from agentgym.core.trajectory import Trajectory, Turn
from agentgym.evaluate import store as store_module
from agentgym.evaluate.agents import built_in, chat
from agentgym.evaluate.plan import Cell
from agentgym.evaluate.store import Store, StoreError, effective, open_store, read_cell, read_run, scan
from agentgym.storage.files import write_json
from agentgym.storage.jsonl import mend

ENV = EnvSpec("e", "some.module:Env")
EXPERT = built_in("expert")
CELL = Cell(ENV, EXPERT, n=5, k=2)


def opened(path, *cells, tasks=5, mark="m", served=None, **more):
    known = {"tasks": tasks, "first_task": mark, "served": served or {}}
    plan = [{**cell.to_json(), **known} for cell in cells or (CELL,)]
    return open_store(path, plan, settings={}, **more)


def episode(task="a", sample=0, failed=False, text="x", tokens=0):
    turns = [Turn([], {"role": "assistant", "content": text}, reward=1.0)]
    end = {"end": "error", "error": "e: OSError"} if failed else {}
    calls = {"calls": {"usage": {"prompt_tokens": tokens}}, "cost": tokens / 1000} if tokens else {}
    return Trajectory(f"{task}/{sample}", "e", task, sample, turns=turns, metadata=calls, **end)


def stored(path):
    return path / "episodes" / "e@expert.jsonl"


LINES = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 1), st.booleans(), st.text(max_size=5)), min_size=1, max_size=12
)


@settings(max_examples=60, deadline=None)
@given(lines=LINES, share=st.floats(0, 1))
def test_a_cut_at_any_byte_costs_the_last_line_at_most(tmp_path_factory, lines, share):
    path = tmp_path_factory.mktemp("run")
    with opened(path) as store:
        for task, sample, failed, text in lines:
            store.append(CELL, episode(task, sample, failed, text))
    content = stored(path).read_bytes()
    cut = content[: round(share * len(content))]
    stored(path).write_bytes(cut)
    # A line that lacks only its end is whole.
    ends = [len(b"".join(content.splitlines(True)[: n + 1])) - 1 for n in range(len(lines))]
    whole = sum(end <= len(cut) for end in ends)
    with opened(path) as store:
        store.append(CELL, episode("new"))
    kept = [*lines[:whole], ("new", 0, False, "x")]
    written = [json.loads(line) for line in stored(path).read_bytes().splitlines()]
    assert [(r["task_id"], r["sample"], r["end"] == "error") for r in written] == [line[:3] for line in kept]
    expected = {}
    for task, sample, failed, text in kept:
        if (task, sample) not in expected or expected[task, sample][0] or not failed:
            expected[task, sample] = (failed, text)
    found = {key: (t.failed, t.turns[0].reply["content"]) for key, t in read_cell(stored(path)).items()}
    assert found == expected
    summary = scan(stored(path))
    assert summary.done == {key for key, (failed, _) in expected.items() if not failed}
    assert summary.failed == {key for key, (failed, _) in expected.items() if failed}
    assert summary.spent.episodes == len(kept)


@pytest.mark.parametrize("size", [1, 65_535, 65_536, 65_537, 200_000])
@pytest.mark.parametrize("before", [b"", b'{"whole": 1}\n'])
def test_a_cut_line_of_any_length_is_mended(tmp_path, size, before):
    path = tmp_path / "x.jsonl"
    path.write_bytes(before + b'{"' + b"x" * size)
    mend(path)
    assert path.read_bytes() == before
    path.write_bytes(before + b'"' + b"x" * size + b'"')
    mend(path)
    assert path.read_bytes() == before + b'"' + b"x" * size + b'"\n'
    mend(path)
    assert path.read_bytes().endswith(b'"\n')


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    with opened(tmp_path / "r") as store:
        store.append(CELL, episode("a"))
        store.append(CELL, episode("b"))
    stored(tmp_path / "r").write_bytes(stored(tmp_path / "r").read_bytes().replace(b'{"id": "a/0"', b"\0\0\0"))
    with pytest.raises(ValueError, match=r"e@expert.jsonl:1: not an episode .* remove this line"):
        scan(stored(tmp_path / "r"))


def test_what_is_not_there_yet_is_empty(tmp_path):
    assert list(effective(tmp_path / "none.jsonl")) == []
    assert scan(tmp_path / "none.jsonl").spent.episodes == 0


def test_all_that_was_used_counts_failed_lines_too(tmp_path):
    with opened(tmp_path / "r") as store:
        store.append(CELL, episode("a", failed=True, tokens=10))
        store.append(CELL, episode("a", tokens=30))
        store.append(CELL, episode("b"))
    spent = scan(stored(tmp_path / "r")).spent
    assert (spent.episodes, spent.tokens, spent.cost) == (3, 40, pytest.approx(0.04))


# ---- the folder


def test_a_run_grows_by_cells_tasks_and_samples(tmp_path):
    with opened(tmp_path / "r", command=["agentgym", "eval"], prices={"m": {"input": 1.0}}):
        record = read_run(tmp_path / "r")
    assert (record["kind"], record["format"], record["name"]) == ("evaluation", 1, "r")
    assert record["command"] == ["agentgym", "eval"]
    assert record["prices"] == {"m": {"input": 1.0}}
    [cell] = record["cells"]
    assert (cell["tasks"], cell["file"]) == (5, "episodes/e@expert.jsonl")
    more = [Cell(ENV, EXPERT, n=3, k=4), Cell(ENV, built_in("null"), n=None)]
    with opened(tmp_path / "r", *more, tasks=9):
        grown, new = read_run(tmp_path / "r")["cells"]
    assert (grown["n"], grown["k"], grown["tasks"]) == (5, 4, 9)
    assert (new["name"], new["n"]) == ("e@null", None)
    assert read_run(tmp_path / "r")["created"] == record["created"]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Cell(ENV, EXPERT, seed=1), "seed was 0, is now 1"),
        (Cell(ENV, EXPERT, max_turns=3), "max_turns was null, is now 3"),
        (Cell(ENV, built_in("expert", 0.5)), "mistakes was null, is now 0.5"),
        (Cell(EnvSpec("e", "some.module:Env", kwargs={"size": 4}), EXPERT), "env kwargs size was null, is now 4"),
        (Cell(EnvSpec("e", "some.module:Other"), EXPERT), 'entry_point was "some.module:Env"'),
        (Cell(ENV, built_in("null", name="expert")), 'agent kind was "expert", is now "null"'),
    ],
)
def test_what_changes_the_measurement_is_refused_by_name(tmp_path, other, words):
    with opened(tmp_path / "r"):
        pass
    with pytest.raises(ValueError, match="with other settings") as refused:
        opened(tmp_path / "r", other)
    assert words in str(refused.value)
    with opened(tmp_path / "r"):  # nothing has changed, and nobody holds the lock
        assert [cell["name"] for cell in read_run(tmp_path / "r")["cells"]] == ["e@expert"]


@pytest.mark.parametrize("name", ["timeout", "retries", "stream", "base_url"])
def test_an_argument_of_the_environment_is_measured_whatever_its_name(tmp_path, name):
    first, second = (Cell(EnvSpec("e", "some.module:Env", kwargs={name: value}), EXPERT) for value in (1, 2))
    with opened(tmp_path / "r", first):
        pass
    with pytest.raises(ValueError, match=f"env kwargs {name} was 1, is now 2"):
        opened(tmp_path / "r", second)


def test_other_data_under_the_same_name_is_refused(tmp_path):
    with opened(tmp_path / "r"):
        pass
    with pytest.raises(ValueError, match="the data has changed"):
        opened(tmp_path / "r", mark="other")


SERVED = {"kwargs": {"size": 4}, "split": {"name": "e/test", "size": 9, "source": "/data"}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kwargs": {"size": 5}}, "the server's kwargs size was 4, is now 5"),
        ({"kwargs": {"size": 4, "holes": 1}}, "the server's kwargs holes was null, is now 1"),
        ({"split": {**SERVED["split"], "size": 8}}, "the server's split size was 9, is now 8"),
    ],
)
def test_what_a_server_makes_otherwise_is_refused_by_name(tmp_path, change, words):
    with opened(tmp_path / "r", served=SERVED):
        pass
    with pytest.raises(ValueError, match=words):
        opened(tmp_path / "r", served={**SERVED, **change})


def test_where_a_server_has_its_data_and_what_it_does_not_tell_is_no_difference(tmp_path):
    moved = {**SERVED, "split": {**SERVED["split"], "source": "/elsewhere"}}
    for told in (None, SERVED, moved, {}):  # from a folder of an older program on
        with opened(tmp_path / "r", served=told):
            pass
    [cell] = read_run(tmp_path / "r")["cells"]
    assert cell["served"] == moved


def test_how_an_endpoint_is_asked_may_change(tmp_path):
    with opened(tmp_path / "r", Cell(ENV, chat("m", "http://a/v1", timeout=3, extra={"a": (1,)}))):
        pass
    with opened(tmp_path / "r", Cell(ENV, chat("m", "http://b/v1", retries=9, extra={"a": (1,)}))):
        pass
    with pytest.raises(ValueError, match="temperature was null, is now 1"):
        opened(tmp_path / "r", Cell(ENV, chat("m", "http://a/v1", temperature=1, extra={"a": (1,)})))


def test_cells_whose_names_make_one_file_name_get_two(tmp_path):
    cells = [Cell(EnvSpec(id, "some.module:Env"), EXPERT) for id in ("a/b", "a:b", "A-b", "x" * 300)]
    with opened(tmp_path / "r", *cells) as store:
        for cell in cells:
            store.append(cell, episode())
        files = [store.file_of(cell) for cell in cells]
    assert [file.name for file in files[:3]] == ["a-b@expert.jsonl", "a-b@expert-2.jsonl", "A-b@expert-3.jsonl"]
    assert all(len(read_cell(file)) == 1 for file in files)


def test_two_cells_of_one_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match="two cells are named 'e@expert'"):
        opened(tmp_path / "r", CELL, CELL)


def test_folders_of_other_things_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds other things \(notes.txt\)"):
        opened(tmp_path)
    (tmp_path / "run.json").write_text('{"kind": "training", "format": 1}')
    with pytest.raises(ValueError, match="kind 'training'"):
        opened(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match="does not describe an evaluation"):
        opened(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lock", "notes.txt", "run.json"]


@pytest.mark.parametrize("cells", [None, 3, ["e"], [{"file": "x"}]])
def test_a_plan_whose_cells_were_edited_into_nonsense_is_told(tmp_path, cells):
    with opened(tmp_path / "r"):
        pass
    file = tmp_path / "r" / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "cells": cells}))
    with pytest.raises(ValueError, match=r"run\.json does not describe an evaluation"):
        read_run(tmp_path / "r")


def test_a_start_that_died_before_it_wrote_anything_can_be_repeated(tmp_path):
    (tmp_path / "lock").write_text("process 1\n")
    (tmp_path / ".run.json.1.tmp").write_text("{")
    with opened(tmp_path) as store:
        assert isinstance(store, Store)


@pytest.mark.parametrize("step", ["write_json", "mkdir"])
def test_a_start_that_died_in_the_middle_of_its_first_steps_can_be_repeated(step, tmp_path, monkeypatch):
    """A disk that is full stands for a kill: it leaves the same."""

    def full(path, *args, **kwargs):
        if path != tmp_path:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store_module if step == "write_json" else type(tmp_path), step, full)
        with pytest.raises(OSError, match="No space left"):
            opened(tmp_path)
    with opened(tmp_path):
        assert (tmp_path / "episodes").is_dir()


HOLDER = """
import sys, time
from pathlib import Path
from agentgym.evaluate.store import open_store
store = open_store(Path(sys.argv[1]), [], settings={})
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_process_is_told_and_a_killed_one_holds_nothing(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "r")], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=rf"written by another process \(process {holder.pid}\)"):
            opened(tmp_path / "r")
    finally:
        holder.kill()
        holder.wait()
    with opened(tmp_path / "r"):
        pass


FULL = textwrap.dedent(
    """
    import resource, sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    from test_eval_store import CELL, episode, opened
    from agentgym.evaluate.store import StoreError
    with opened(Path(sys.argv[2])) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))
        try:
            for number in range(1_000):
                store.append(CELL, episode(str(number), text="y" * 300))
        except StoreError as error:
            print(number, error)
    """
)


def test_a_full_disk_says_so_and_keeps_what_was_stored(tmp_path):
    """No file of the process may be longer than 5,000 bytes: the kernel then writes a part of a line, as a full disk does."""
    here = os.path.dirname(__file__)
    done = subprocess.run(
        [sys.executable, "-c", FULL, here, str(tmp_path / "r")], capture_output=True, text=True, timeout=60, check=True
    )
    number, _, message = done.stdout.partition(" ")
    assert "cannot store an episode: File too large; earlier episodes are safe" in message
    content = stored(tmp_path / "r").read_bytes()
    assert content.endswith(b"\n")
    assert len(read_cell(stored(tmp_path / "r"))) == int(number) > 3


def test_a_file_that_cannot_be_written_leaves_nothing_half_behind(tmp_path):
    (tmp_path / "results.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_json(tmp_path / "results.json", {})
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_a_disk_that_takes_nothing_is_a_store_error(tmp_path, monkeypatch):
    def full(descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with opened(tmp_path / "r") as store:
        store.append(CELL, episode("a"))
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(StoreError, match="No space left on device"):
            store.append(CELL, episode("b"))
        monkeypatch.undo()
        store.append(CELL, episode("c"))
    assert [key[0] for key in read_cell(stored(tmp_path / "r"))] == ["a", "c"]
