"""The numbers of a cell, from trajectories."""

import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbers_cases import calls, trajectory
from numbers_cases import result as cell

from agentgym.core.trajectory import Tokens
from agentgym.evaluate import CellResult, Results
from agentgym.evaluate.results import HISTOGRAM_BINS, numbers_of


def test_failed_episodes_are_errors_and_not_zeros():
    failed = trajectory("b", 1, error="e, task 'b', turn 1: step failed after 0.1 s: OSError: disk")
    also = trajectory("c", 1, error="e, task 'c', turn 2: step failed after 3.2 s: OSError: disk")
    played = [trajectory("a", 0, 1.0), trajectory("a", 1, 0.0), trajectory("b", 0, 1.0)]
    found = cell([*played, failed, also], samples=2)
    assert (found.tasks, found.episodes, found.errors, found.planned) == (3, 3, 2, 5)
    assert found.reward == found.success == pytest.approx(2 / 3)
    assert found.pass_at == {1: pytest.approx(0.75), 2: 1.0}
    assert found.pass_hat == {1: pytest.approx(0.75), 2: 0.0}
    assert found.error_texts == {"step failed: OSError: disk": 2}
    assert found.ends == {"terminated": 3, "error": 2}


def test_beside_the_means_stand_those_with_every_error_as_the_environments_least_reward():
    played = [trajectory("a", 0, 1.0), trajectory("a", 1, 0.0), trajectory("b", 0, 1.0)]
    failed = [trajectory("b", 1, error="e: no", tags="x"), trajectory("c", error="e: no", floor=-1.0)]
    found = cell([*played, *failed], samples=2)
    assert (found.reward, found.reward_with_errors) == (pytest.approx(2 / 3), pytest.approx((2 + 0 - 1) / 5))
    assert (found.success, found.success_with_errors) == (pytest.approx(2 / 3), pytest.approx(2 / 5))
    assert found.by_tag["x"].success_with_errors == 0.0
    assert cell(played).success_with_errors is None, "only where there are errors"
    assert CellResult.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_an_agent_failure_is_played_counted_by_its_cause_and_in_every_mean():
    broken = trajectory("b")
    broken.turns[-1].info["agent_failure"] = "sandbox_lost"
    found = cell([trajectory("a", reward=1.0), broken])
    assert (found.episodes, found.errors, found.agent_failures) == (2, 0, {"sandbox_lost": 1})
    assert found.reward == found.success == 0.5
    assert found.pass_at == {1: 0.5}


@pytest.mark.parametrize("episodes", [[], [trajectory("a", error="e: gone")]])
def test_where_nothing_was_played_there_are_no_means(episodes):
    found = cell(episodes)
    assert found.episodes == 0
    assert {found.reward, found.success, found.success_low, found.reward_low, found.turns, found.rewards} == {None}
    assert (found.pass_at, found.pass_hat) == ({}, {})
    json.dumps(found.to_json())


@pytest.mark.parametrize(("tags", "names"), [("easy", ["easy"]), (5, ["5"]), (["b", 1], ["1", "b"]), (None, [])])
def test_what_stands_as_tags_is_one_or_a_list_of_them(tags, names):
    assert list(cell([trajectory("a", tags=tags)]).by_tag) == names


def test_the_reward_of_one_task_has_a_mean_and_no_interval():
    found = cell([trajectory("a", i, float(i)) for i in range(4)], samples=4)
    assert (found.reward, found.reward_low, found.reward_high) == (1.5, None, None)
    assert found.success_low is not None


def test_tokens_are_those_of_all_tries_where_calls_were_counted():
    counted = trajectory(
        "a",
        usage={"prompt_tokens": 30, "completion_tokens": 5},
        turns=2,
        calls=calls(5, 90, 10, waited=3.0, **{"429": 2, "cut": 1}),
        cost=0.5,
    )
    failed = trajectory("b", error="e: no", calls=calls(2, 7, 0, waited=1.0, **{"429": 1}), cost=0.25)
    found = cell([counted, failed])
    assert found.tokens == {"prompt_tokens": 97, "completion_tokens": 10}, "those of failed episodes too"
    assert found.tokens_per_episode == {"prompt_tokens": 90.0, "completion_tokens": 10.0}
    assert (found.requests, found.retries, found.waited, found.cost) == (7, {"429": 3, "cut": 1}, 4.0, 0.75)


def test_tokens_come_from_turns_where_no_calls_were_counted_and_from_exact_tokens_where_no_usage_was():
    told = trajectory("a", usage={"prompt_tokens": 30, "completion_tokens": 5}, turns=2)
    exact = trajectory("b")
    exact.turns[0].tokens = Tokens([1, 2, 3], [4, 5], [0.0, 0.0], [0, 0])
    assert cell([told, exact]).tokens == {"prompt_tokens": 63, "completion_tokens": 12}
    assert cell([trajectory("c")]).tokens == {}
    assert cell([told, trajectory("c")]).tokens_per_episode["prompt_tokens"] == 60.0


def test_unknown_prices_are_no_price_and_not_nothing():
    assert cell([trajectory("a")]).cost is None
    assert cell([trajectory("a", cost=0.0)]).cost == 0.0
    assert cell([trajectory("a", cost=None), trajectory("b", cost=0.25)]).cost == 0.25


def test_an_environment_that_reports_success_is_believed():
    found = cell(
        [trajectory("a", reward=0.5, metrics={"success": 0.0}), trajectory("b", reward=0.0, metrics={"success": 1.0})]
    )
    assert (found.success, found.reward, found.pass_at) == (0.5, 0.25, {1: 0.5})


def test_parts_by_tag_have_their_own_means_and_intervals():
    episodes = [
        trajectory("a", reward=1.0, tags=["algebra", "short"]),
        trajectory("b", reward=0.0, tags=["algebra", "algebra"]),
        trajectory("c", error="e: no", tags=["algebra"]),
        trajectory("d", reward=1.0, tags="geometry"),
        trajectory("e", reward=0.0),
    ]
    parts = cell(episodes).by_tag
    assert list(parts) == ["algebra", "geometry", "short"]
    algebra = parts["algebra"]
    assert (algebra.tasks, algebra.episodes, algebra.errors, algebra.success) == (3, 2, 1, 0.5)
    assert 0 < algebra.success_low < 0.5 < algebra.success_high < 1
    assert (parts["geometry"].success, parts["geometry"].reward_low) == (1.0, None)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["hard", "easy", "medium"], ["easy", "medium", "hard"]),
        ([10, 2, 1], ["1", "2", "10"]),
        ([2.5, 1], ["1", "2.5"]),
        (["b", "Hard", 3, "a"], ["3", "Hard", "a", "b"]),
        (list(range(20)), ["0 to 3", "4 to 7", "8 to 11", "12 to 15", "16 to 19"]),
        ([None], []),
    ],
)
def test_difficulties_go_from_easy_to_hard_and_many_numbers_into_ranges(given, names):
    parts = cell([trajectory(str(i), difficulty=value) for i, value in enumerate(given)]).by_difficulty
    assert list(parts) == names


def test_a_difficulty_of_another_kind_is_its_text():
    assert list(cell([trajectory("a", difficulty=[3, "x"])]).by_difficulty) == ["[3, 'x']"]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=40))
def test_every_reward_is_in_the_histogram(rewards):
    found = cell([trajectory(str(i), reward=r) for i, r in enumerate(rewards)]).rewards
    assert sum(found["counts"]) == len(rewards)
    assert (found["low"], found["high"]) == (min(rewards), max(rewards))
    assert len(found["counts"]) in (1, HISTOGRAM_BINS)


def test_the_ends_of_the_histogram_are_in_its_first_and_last_range():
    counts = cell([trajectory(str(i), reward=r) for i, r in enumerate([0.0, 1.0, 1.0])]).rewards["counts"]
    assert counts == [1, *[0] * (HISTOGRAM_BINS - 2), 2]


def test_the_result_survives_json():
    episodes = [
        trajectory(str(i), s, float(i % 2), tags=["t"], difficulty=i, cost=0.1) for i in range(4) for s in range(2)
    ]
    found = cell(episodes, samples=2, planned=10, seconds=3.0)
    assert CellResult.from_json(json.loads(json.dumps(found.to_json()))) == found
    whole = Results("run", [found], stopped="cost", seconds=4.0)
    assert Results.from_json(json.loads(json.dumps(whole.to_json()))) == whole
    with pytest.raises(ValueError, match="format 7"):
        Results.from_json({**whole.to_json(), "format": 7})


@pytest.mark.parametrize(
    ("split", "agent", "name"), [("test", "m", "e@m"), ("train", "m", "e/train@m"), ("test", "", "e")]
)
def test_a_cell_is_named_as_in_the_plan(split, agent, name):
    assert cell([], split=split, agent=agent).name == name


def test_fifty_thousand_episodes_from_a_stream_leave_only_numbers():
    text = "a long reply " * 2_000

    def stream():
        for i in range(2_000):
            one = trajectory(str(i // 4), i % 4, float(i % 3 == 0), tags=["t"], usage={"prompt_tokens": 9})
            one.turns[0].reply = {"role": "assistant", "content": text + str(i)}
            yield one

    tracemalloc.start()
    found = cell(stream(), samples=4)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.episodes == 2_000
    assert peak / 2_000 < 2_000, "bytes an episode: less than a tenth of its text"


def test_numbers_may_be_kept_as_episodes_end():
    episodes = [trajectory(str(i), reward=float(i)) for i in range(3)]
    assert cell([numbers_of(t) for t in episodes]) == cell(episodes)
