"""What a terminal is told of results: it fits, leaves out what says nothing, and is safe to print."""

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbers_cases import calls, result, trajectory
from rich.console import Console

from agentgym.evaluate import Results, table_of
from agentgym.evaluate.tables import (
    count,
    cut,
    duration,
    half_width,
    money,
    number,
    one_line,
    part_tables,
    percent,
    percent_range,
    results_table,
)


def printed(table, width=80, terminal=False):
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=terminal, color_system="truecolor" if terminal else None).print(table)
    return out.getvalue()


def full_cell(env="reasoning_gym:number_sorting", agent="Qwen/Qwen2.5-Coder-0.5B-Instruct-AWQ", k=4):
    """A cell of which there is something to tell in every column."""
    episodes = [
        trajectory(
            str(i), s, float((i + s) % 3 > 0), calls=calls(3, 1_200, 88), cost=0.012, tags=["t"], difficulty=i % 3
        )
        for i in range(30)
        for s in range(k)
    ]
    failed = trajectory(
        "30", error="e, task '30', turn 1: act failed after 2.0 s: EndpointError: busy", calls=calls(), cost=0.0
    )
    return result([*episodes, failed], env, agent, samples=k, seconds=754.0)


def test_a_full_table_fits_eighty_columns_and_says_everything():
    lines = printed(table_of([full_cell()])).splitlines()
    assert max(map(len, lines)) <= 80
    first, second = lines[3].split(), lines[4].split()
    assert first[1:] == ["120", "1", "66.7%", "0.667", "66.1%", "100.0%", "1.0", "144k", "$1.44", "13", "min"]
    assert second[1:] == ["57.8-74.5", "±0.045", "0.661", "0.0%", "11k"]
    assert lines[1].split() == ["@agent", "n", "err", "95%", "±95%", "reward", "pass^4", "turns", "out", "cost", "time"]


def test_agent_failures_stand_under_the_table_by_their_cause():
    broken = [trajectory(str(i)) for i in range(3)]
    for episode in broken:
        episode.turns[-1].info["agent_failure"] = "sandbox_lost"
    lines = printed(results_table(Results("run", [result([trajectory("a", reward=1.0), *broken])]))).splitlines()
    assert lines[-2:] == ["agent failures (played, at the environment's least reward)", "3 x sandbox_lost"]


def test_names_lose_their_middle_and_keep_both_ends():
    text = printed(table_of([full_cell()]))
    assert "reas" in text
    assert "sorting" in text
    assert "@Qw" in text
    assert "AWQ" in text
    assert "…" in text
    assert "@Qwen/Qwen2.5-Coder-0.5B-Instruct-AWQ" in printed(table_of([full_cell()]), width=140)


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_table_is_never_wider_than_the_terminal_down_to_a_narrow_one(width):
    cells = [full_cell(), full_cell("a" * 100, "b" * 100, k=16)]
    lines = printed(table_of(cells), width).splitlines()
    assert max(map(len, lines)) <= width
    assert sum("66.7%" in line for line in lines) == 2
    assert " n err" in lines[1], "columns are left out rather than cut"


def test_columns_that_say_nothing_are_left_out():
    text = printed(table_of([result([trajectory("a", reward=1.0)])]))
    assert "success" in text
    for absent in ("pass", "cost", "tok in", "time"):
        assert absent not in text


def test_a_cell_where_nothing_was_played_has_dashes_and_no_zeros():
    cells = [result([trajectory("a", error="e: no")]), result([trajectory("a")])]
    row = printed(table_of(cells)).splitlines()[3]
    assert row.split() == ["e", "0", "1", "-", "-", "-"]


def test_k_stands_in_the_rows_where_cells_have_different_ones():
    text = printed(table_of([full_cell(k=2), full_cell(k=4)]))
    assert "pass@k" in text
    assert "@2 " in text
    assert "^4 " in text


def test_errors_are_told_by_cause_and_what_was_not_played():
    found = result(
        [trajectory("a", error="e: act failed: busy"), trajectory("b", error="e: act failed: busy")], planned=5
    )
    text = printed(results_table(Results("r", [found], stopped="cost")))
    assert "stopped: cost; 3 of 5 episodes were not played" in text
    assert "2 x act failed: busy" in text
    whole = printed(results_table(Results("r", [result([trajectory("a")])])))
    assert "not played" not in whole
    assert "errors" not in whole


def test_a_split_with_fewer_tasks_than_were_asked_for_is_told():
    def told(asked, samples=1):
        played = [trajectory(task, sample) for task in "abc" for sample in range(samples)]
        return printed(results_table(Results("r", [result(played, samples=samples, asked=asked)])))

    for samples in (1, 4):
        assert "e: 3 of 100 tasks asked: the split has no more" in told(100, samples)
    assert "asked" not in told(3) + told(None)


def test_parts_are_shown_when_they_are_asked_for():
    results = Results("r", [full_cell(), result([trajectory("a")])])
    assert "difficulty" not in printed(results_table(results))
    text = printed(results_table(results, parts=True))
    assert "difficulty" in text
    assert "tag" in text
    assert max(map(len, text.splitlines())) <= 80
    assert printed(part_tables(results.cells[1])).strip() == ""


def test_nothing_that_a_model_or_an_author_wrote_moves_the_cursor_or_is_taken_for_markup():
    nasty = "e: \x1b[2J\x07 [bold red]oh[/] \r\n\tno \u202e"
    found = result([trajectory("a", error=nasty, tags=["[red]\x1b"])], env="\x1b[1m[i]e", agent="m\nn")
    text = printed(results_table(Results("r", [found], stopped="\x1b"), parts=True))
    assert not {c for c in text if not c.isprintable()} - {"\n"}
    assert "[bold red]oh[/]" in text
    assert "[red]" in text
    assert "[i]e" in text


def test_no_colours_where_nobody_sees_them():
    results = Results("r", [full_cell()], stopped="cost")
    assert "\x1b" not in printed(results_table(results))
    assert "\x1b" in printed(results_table(results), terminal=True)


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (percent, None, "-"),
        (percent, 0.875, "87.5%"),
        (number, None, "-"),
        (number, 0.0, "0"),
        (number, 12.345, "12.3"),
        (number, 1234.5, "1,234"),
        (number, -2.1e9, "-2.1e+09"),
        (count, 0, "0"),
        (count, 999, "999"),
        (count, 999.6, "1.0k"),
        (count, 12_345, "12k"),
        (count, 999_999, "1.0M"),
        (count, 4.2e9, "4.2G"),
        (count, None, "-"),
        (money, None, "-"),
        (money, 0.0, "$0.00"),
        (money, 0.00312, "$0.0031"),
        (money, 12.5, "$12.50"),
        (money, 1234.5, "$1,234"),
        (duration, None, "-"),
        (duration, 4.21, "4.2 s"),
        (duration, 75, "75 s"),
        (duration, 754, "13 min"),
        (duration, 9_000, "2.5 h"),
        (duration, 200_000, "2.3 d"),
    ],
)
def test_numbers_are_short(function, value, text):
    assert function(value) == text


def test_intervals_are_short():
    assert percent_range(0.8214, 0.913) == "82.1-91.3"
    assert percent_range(None, None) == "-"
    assert half_width(0.1, 0.3) == "±0.1"
    assert half_width(None, None) == half_width(1.0, 1.0) == ""


@settings(deadline=None, max_examples=60)
@given(st.text(), st.integers(0, 40))
def test_a_cut_name_is_as_long_as_allowed(text, width):
    assert len(cut(text, width)) <= width or len(text) <= width
    assert cut(text, len(text)) == text


@settings(deadline=None, max_examples=60)
@given(st.floats(0, 1e14))
def test_counts_take_at_most_five_letters(value):
    assert len(count(value)) <= 5


@settings(deadline=None, max_examples=60)
@given(st.text())
def test_one_line_is_one_printable_line(text):
    assert one_line(text).isprintable()
