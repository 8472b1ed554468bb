"""Limits of a whole run, and what is counted against them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.core.trajectory import Summary, Tokens, Trajectory, Turn
from agentgym.evaluate.budget import Budget, Spent, calls_of
from agentgym.policies.base import EndpointUsage, NullPolicy


class Counted:
    """Stands for a policy of which only the counts matter."""

    def __init__(self, prompt=0, completion=0, requests=0, retries=None, waited=0.0):
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "reasoning_tokens": completion}
        self.calls = EndpointUsage(requests=requests, retries=retries or {}, usage=usage, waited=waited)


def test_no_limit_is_never_reached():
    assert Budget().reached(Spent(episodes=10**9, tokens=10**12, cost=1e9), 1e9) is None
    assert Budget().to_json() == {"patience": 60.0}


@pytest.mark.parametrize(
    ("budget", "under", "over"),
    [
        (Budget(episodes=3), (Spent(episodes=2), 0.0), (Spent(episodes=3), 0.0)),
        (Budget(tokens=100), (Spent(tokens=99), 0.0), (Spent(tokens=100), 0.0)),
        (Budget(cost=0.5), (Spent(cost=0.49), 0.0), (Spent(cost=0.5), 0.0)),
        (Budget(seconds=9.0), (Spent(), 8.9), (Spent(), 9.0)),
    ],
)
def test_a_limit_is_reached_by_what_was_used(budget, under, over):
    assert budget.reached(*under) is None
    assert budget.reached(*over) in budget.to_json()


def test_running_episodes_and_their_tokens_count():
    running = [[Counted(10, 5), Counted(20, 5)], [NullPolicy()]]
    assert Budget(episodes=4).reached(Spent(episodes=1), 0.0, running) is None
    assert Budget(episodes=3).reached(Spent(episodes=1), 0.0, running) == "episodes"
    assert Budget(tokens=41).reached(Spent(), 0.0, running) is None
    assert Budget(tokens=40).reached(Spent(), 0.0, running) == "tokens"


@pytest.mark.parametrize("bad", [{"episodes": 0}, {"tokens": -1}, {"cost": 0.0}, {"seconds": float("nan")}])
def test_a_limit_that_cannot_be_is_refused(bad):
    with pytest.raises(ValueError, match=f"limit of {next(iter(bad))} must be positive"):
        Budget(**bad)


COUNTS = st.builds(
    Counted,
    st.integers(0, 1000),
    st.integers(0, 1000),
    st.integers(0, 9),
    st.dictionaries(st.sampled_from(["429", "500", "cut"]), st.integers(1, 9)),
)


@given(st.lists(COUNTS, min_size=1, max_size=5))
def test_the_calls_of_all_tries_are_added_and_none_is_changed(tries):
    before = [(dict(t.calls.usage), dict(t.calls.retries)) for t in tries]
    total = calls_of([*tries, NullPolicy()])
    assert total.requests == sum(t.calls.requests for t in tries)
    for name in ("prompt_tokens", "completion_tokens", "reasoning_tokens"):
        assert total.usage[name] == sum(t.calls.usage[name] for t in tries)
    assert sum(total.retries.values()) == sum(sum(t.calls.retries.values()) for t in tries)
    assert [(t.calls.usage, t.calls.retries) for t in tries] == before


def test_who_asks_no_endpoint_has_no_calls():
    assert calls_of([NullPolicy()]) is None


def stored(trajectory: Trajectory) -> Trajectory:
    return Trajectory.from_json(trajectory.to_json())


def test_exact_tokens_are_counted_where_an_endpoint_counted_none():
    exact = [Tokens([1, 2], [3], [-0.1], [0]), Tokens([1, 2, 3, 4], [5, 6], [-0.1, -0.2], [0, 0])]
    turns = [Turn([], {"role": "assistant", "content": "x"}, tokens=tokens) for tokens in exact]
    assert Spent.of(stored(Trajectory("a/0", "e", "a", turns=turns))).tokens == 9


def test_a_summary_between_two_turns_counts_as_they_do():
    said = {"role": "assistant", "content": "x"}
    turns = [Turn([], said, usage={"prompt_tokens": 7, "completion_tokens": 2})]
    summaries = [
        Summary(1, [], said, usage={"prompt_tokens": 9, "completion_tokens": 3}),
        Summary(1, [], said, tokens=Tokens([1, 2], [3], [-0.1], [0])),
    ]
    assert Spent.of(stored(Trajectory("a/0", "e", "a", turns=turns, summaries=summaries))).tokens == 24


def test_the_calls_of_an_episode_count_and_else_its_turns():
    turns = [Turn([], {"role": "assistant", "content": "x"}, usage={"prompt_tokens": 7, "completion_tokens": 2})]
    counted = vars(EndpointUsage(requests=3, retries={"429": 2}, usage={"prompt_tokens": 30, "completion_tokens": 4}))
    spent = Spent()
    for trajectory in (
        Trajectory("a/0", "e", "a", turns=turns, metadata={"calls": counted, "cost": 0.5}),
        Trajectory("a/1", "e", "a", turns=turns),
        Trajectory("a/2", "e", "a", end="error", error="x", metadata={"calls": counted}),
    ):
        spent += Spent.of(stored(trajectory))
    assert (spent.episodes, spent.tokens, spent.cost) == (3, 77, 0.5)
