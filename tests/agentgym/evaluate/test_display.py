"""What is seen while an evaluation runs: a picture on a terminal, lines elsewhere."""

import io
import time

import pytest
from numbers_cases import calls, cell, trajectory
from rich.console import Console

from agentgym.evaluate.display import FINISHED_SHOWN, LINE_SECONDS, LiveDisplay


class Clock:
    """Time that passes when it is told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def seen(display, width=80):
    out = io.StringIO()
    Console(file=out, width=width).print(display.picture())
    return out.getvalue()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def log():
    return io.StringIO()


@pytest.fixture
def display(clock, log):
    return LiveDisplay(Console(file=log, width=80), clock)


def test_the_picture_tells_progress_score_errors_tokens_requests_retries_cost_and_time_left(display, clock):
    display.started(cell(), 40, 0)
    for i in range(9):
        clock.now += 1.0
        asked = calls(3, 1_000, 100, **{"429": 1, "cut": 1})
        display.ended(cell(), trajectory(str(i), reward=float(i < 6), calls=asked, cost=0.01))
    clock.now += 1.0
    display.ended(
        cell(), trajectory("9", error="e, task '9', turn 1: act failed: no answer within 60 s", calls=calls(2))
    )
    text = seen(display)
    assert "e@m" in text
    assert "10/40" in text
    assert "30 s left" in text
    assert "success 66.7% (33.9-88.6)" in text
    assert "reward 0.667" in text
    assert "1 error" in text
    assert "last error: act failed: no answer within 60 s" in text
    assert "10k tokens, 990/s" in text
    assert "29 requests" in text
    assert "18 retries (429 x 9, cut x 9)" in text
    assert "$0.09" in text


def test_of_a_cell_that_was_all_played_before_a_log_says_no_more(log, clock):
    display = LiveDisplay(Console(file=log, width=80), clock)
    display.started(cell(), 1, 1)
    display.finished(cell())
    assert log.getvalue() == "e@m: 1 episode, all played before\ne@m: 1/1, 0.0 s\n"


def test_before_the_first_episode_there_is_no_score_and_no_guess(display, clock):
    display.started(cell(), 40, 0)
    clock.now += 3.0
    text = seen(display)
    assert "no episode has ended yet" in text
    assert "3.0 s" in text
    assert "left" not in text


def test_what_an_earlier_start_played_counts_as_done_and_not_in_the_score(display, clock):
    display.started(cell(), 40, 30)
    clock.now += 2.0
    display.ended(cell(), trajectory("x", reward=1.0))
    text = seen(display)
    assert "31/40" in text
    assert "18 s left" in text
    assert "30 from before not in it" in text


def test_cells_that_are_over_are_one_line_each_and_the_oldest_are_only_counted(display, clock):
    for i in range(FINISHED_SHOWN + 3):
        one = cell(f"env{i}")
        display.started(one, 1, 0)
        display.ended(one, trajectory("a", reward=1.0))
        display.finished(one)
    display.started(cell("now"), 5, 0)
    lines = seen(display, 120).splitlines()
    assert lines[0] == "3 cells before these"
    assert lines[1].startswith("env3@m: 1/1, success 100.0%")
    assert lines[-2].startswith("now@m")


def test_time_and_pace_of_a_cell_stop_with_it(display, clock):
    display.started(cell(), 2, 0)
    for i in range(2):
        clock.now += 5.0
        display.ended(cell(), trajectory(str(i), calls=calls(1, 90, 10)))
    display.finished(cell())
    before = seen(display)
    clock.now += 500.0
    assert seen(display) == before
    assert "20/s" in seen(display, 150)
    assert "10 s" in seen(display, 150)


def test_off_a_terminal_there_is_a_line_now_and_then_and_one_at_the_end(display, clock, log):
    with display:
        display.started(cell(), 100, 20)
        for i in range(40):
            clock.now += 1.0
            display.ended(cell(), trajectory(str(i), reward=1.0))
        display.finished(cell())
    lines = log.getvalue().splitlines()
    assert lines[0] == "e@m: 100 episodes, 20 of them played before"
    assert len(lines) == 1 + 40 // LINE_SECONDS + 1
    assert lines[1].startswith("e@m: 30/100, success 100.0%")
    assert lines[1].endswith("70 s left")
    assert lines[-1].startswith("e@m: 60/100")
    assert "\x1b" not in log.getvalue()


def test_on_a_terminal_the_picture_comes_and_goes_and_leaves_nothing_behind(clock):
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True)
    with LiveDisplay(console, clock) as display:
        display.started(cell(), 2, 0)
        display.ended(cell(), trajectory("a", reward=1.0))
        time.sleep(0.6)
    text = out.getvalue()
    assert "1/2" in text
    assert text.rstrip().endswith("\x1b[2K")
    assert "\x1b[?25h" in text, "the cursor is shown again"


def test_the_display_is_taken_down_when_the_run_breaks(clock):
    out = io.StringIO()
    with pytest.raises(KeyboardInterrupt), LiveDisplay(Console(file=out, force_terminal=True), clock):
        raise KeyboardInterrupt
    assert "\x1b[?25h" in out.getvalue()


def test_nothing_that_a_model_or_an_author_wrote_moves_the_cursor(display):
    display.started(cell("\x1b[2J"), 2, 0)
    display.ended(
        cell("\x1b[2J"), trajectory("a", error="e: \x1b]0;title\x07 [bold]\nx", calls=calls(1, **{"\x1b": 1}))
    )
    text = seen(display)
    assert not {c for c in text if not c.isprintable()} - {"\n"}
    assert "[bold]" in text


@pytest.mark.parametrize("width", [30, 80, 300])
def test_a_picture_is_as_wide_as_the_terminal(display, width):
    long = cell("e" * 100, "m" * 100)
    display.started(long, 10**6, 0)
    display.ended(long, trajectory("a", error="e: " + "no " * 200))
    display.ended(long, trajectory("b", calls=calls(10**6, 10**9, 10**9, **{"429": 10**6}), cost=1e5))
    assert max(map(len, seen(display, width).splitlines())) <= width
