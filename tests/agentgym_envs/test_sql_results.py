"""The comparison of results: multisets of rows, columns in any order, numbers by value, ties and cut ties."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym_envs.sql.gold import Segment, same_result

INF = float("inf")


def same(gold, found, ordered=False):
    """One row after another where the order counts, else all rows in one segment."""
    segments = [Segment([row], 1) for row in gold] if ordered else [Segment(gold, len(gold))]
    return same_result(segments, found, len(gold[0]) if gold else 1, ordered)


class TestRows:
    def test_they_may_come_in_any_order_unless_it_counts(self):
        assert same([(1,), (2,)], [(2,), (1,)])
        assert not same([(1,), (2,)], [(2,), (1,)], ordered=True)
        assert same([(1,), (2,)], [(1,), (2,)], ordered=True)

    def test_duplicates_count(self):
        assert not same([(1,), (1,), (2,)], [(1,), (2,), (2,)])
        assert not same([(1,), (1,)], [(1,)])
        assert not same([(1,)], [(1,), (1,)])

    def test_none_at_all_are_equal_to_none(self):
        assert same([], [])
        assert not same([(1,)], [])
        assert not same([], [(1,)])

    def test_rows_of_another_width_are_other_rows(self):
        assert not same([(1, 2)], [(1,)])
        assert not same([(1,)], [(1, 2)])


class TestColumns:
    def test_they_may_come_in_any_order(self):
        assert same([(1, "a", None), (2, "b", 0.5)], [(0.5, 2, "b"), (None, 1, "a")])

    def test_cells_of_a_row_stay_together(self):
        assert not same([(1, "a"), (2, "b")], [(1, "b"), (2, "a")])

    def test_columns_with_the_same_values_are_told_apart_by_their_rows(self):
        gold = [(1, 2, 1), (2, 1, 1), (1, 1, 2)]
        assert same(gold, [(b, c, a) for a, b, c in gold])
        assert not same(gold, [(1, 2, 1), (1, 2, 1), (2, 1, 1)])

    def test_one_column_cannot_stand_for_two(self):
        assert not same([(1, 1, 2)], [(1, 2, 2)])

    def test_many_columns_and_rows_are_quick(self):
        rng = random.Random(3)
        gold = [tuple(rng.randrange(3) for _ in range(40)) for _ in range(1000)]
        places = rng.sample(range(40), 40)
        shuffled = [tuple(row[place] for place in places) for row in rng.sample(gold, len(gold))]
        start = time.monotonic()
        assert same(gold, shuffled)
        changed = [*shuffled[:-1], tuple(1 - min(cell, 1) for cell in shuffled[-1])]
        assert not same(gold, changed)
        assert time.monotonic() - start < 30

    def test_a_hopeless_search_ends(self):
        """Every column holds as many ones as any other, so only whole rows tell that there is no match."""
        size = 14
        gold = [tuple(int(a == b) for b in range(size)) for a in range(size)] * 2
        found = [
            tuple(int(b in (a, (a + 1) % size)) for b in range(size)) if a % 2 else (0,) * size for a in range(size)
        ]
        start = time.monotonic()
        assert not same(gold, found * 2)
        assert time.monotonic() - start < 30


class TestValues:
    @pytest.mark.parametrize(
        ("one", "two"),
        [
            (3, 3.0),
            (0.1 + 0.2, 0.3),
            (1e9 + 0.5, 1e9 + 1.0),
            (1e-12, 0),
            (0.0, -0.0),
            (INF, INF),
            (2**62, 2**62),
            (b"\x00", b"\x00"),
            ("ä", "ä"),
        ],
    )
    def test_equal(self, one, two):
        assert same([(one,)], [(two,)])
        assert same([(two,)], [(one,)])

    @pytest.mark.parametrize(
        ("one", "two"),
        [
            (None, 0),
            (None, ""),
            (None, "NULL"),
            (3, "3"),
            (3, 3.001),
            (0.33, 1 / 3),
            (2**62, 2**62 + 1),
            (10**9, 10**9 + 1),
            (INF, -INF),
            (INF, 1e308),
            ("a", "A"),
            ("a", "a "),
            ("a", b"a"),
            ("b'a'", b"a"),
            (1, -1),
        ],
    )
    def test_different(self, one, two):
        assert not same([(one,)], [(two,)])
        assert not same([(two,)], [(one,)])

    def test_whole_numbers_differ_beside_others_too(self):
        assert not same([(10**9,), (0.5,)], [(10**9 + 1,), (0.5,)])
        assert not same([(1e9,), (0.5,)], [(1e9 + 1,), (0.5,)])
        assert same([(10**9,), (0.5,)], [(1e9 + 0.25,), (0.5,)])

    def test_null_equals_null_in_its_own_place_only(self):
        assert same([(None, 1), (2, None)], [(2, None), (None, 1)])
        assert not same([(None, 1), (None, 2)], [(None, 1), (2, None)])

    def test_almost_equal_numbers_are_not_sorted_apart(self):
        """Rounded or sorted first, the two rows would be paired the wrong way."""
        gold = [(1.0, "a"), (1.0 + 1e-12, "b")]
        assert same(gold, [(1.0 + 1e-12, "a"), (1.0, "b")])


class TestTies:
    def segments(self, *groups):
        return [Segment([(cell,) for cell in cells], take) for cells, take in groups]

    def same(self, segments, cells, ordered):
        return same_result(segments, [(cell,) for cell in cells], 1, ordered)

    def test_tied_rows_may_change_places_and_no_others(self):
        gold = self.segments(("a", 1), ("bc", 2), ("d", 1))
        assert self.same(gold, "abcd", True)
        assert self.same(gold, "acbd", True)
        assert not self.same(gold, "bacd", True)
        assert not self.same(gold, "abdc", True)
        assert self.same(gold, "dcba", False)

    @pytest.mark.parametrize("ordered", [True, False])
    def test_of_ties_that_a_limit_cuts_any_will_do(self, ordered):
        gold = self.segments(("a", 1), ("bcd", 2))
        for cells in ("abc", "adb", "acd"):
            assert self.same(gold, cells, ordered)
        for cells in ("abb", "bcd", "aab", "abx", "ab"):
            assert not self.same(gold, cells, ordered)
        assert self.same(gold, "cba", False)
        assert not self.same(gold, "cba", True)

    def test_ties_that_an_offset_cuts_too(self):
        gold = self.segments(("ab", 1), ("c", 1), ("bde", 2))
        for cells in ("acbd", "bcde", "bcbe"):
            assert self.same(gold, cells, True)
            assert self.same(gold, cells[::-1], False)
        for cells in ("abce", "cabd"):
            assert not self.same(gold, cells, True)
            assert self.same(gold, cells, False)
        for cells in ("abde", "accd", "acdd", "xcde", "cdex"):
            assert not self.same(gold, cells, True)
            assert not self.same(gold, cells, False)

    def test_rows_of_both_ends_are_dealt_as_needed(self):
        gold = self.segments(("ab", 1), ("bc", 1))
        assert self.same(gold, "bb", False)
        assert self.same(gold, "ac", False)
        assert not self.same(gold, "aa", False)
        assert not self.same(gold, "cc", False)
        assert not self.same(gold, "xb", False)
        assert not self.same(self.segments(("aab", 1), ("bc", 1)), "aa", False)


# ---- anything

VALUES = st.one_of(
    st.none(),
    st.integers(-3, 3),
    st.integers(-(2**62), 2**62),
    st.sampled_from([0.5, 1.0, 1 / 3, 2.5]),
    st.sampled_from(["", "a", "b", "1"]),
    st.binary(max_size=1),
)


@st.composite
def tables(draw):
    columns = draw(st.integers(1, 5))
    return draw(st.lists(st.tuples(*[VALUES] * columns), min_size=1, max_size=12))


@given(tables(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_permuted_rows_and_columns_are_the_same_result(rows, rng):
    places = rng.sample(range(len(rows[0])), len(rows[0]))
    permuted = [tuple(row[place] for place in places) for row in rng.sample(rows, len(rows))]
    assert same(rows, permuted)


@given(tables(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_in_order_permuted_columns_are_the_same_result_and_moved_rows_are_not(rows, rng):
    places = rng.sample(range(len(rows[0])), len(rows[0]))
    permuted = [tuple(row[place] for place in places) for row in rows]
    assert same(rows, permuted, ordered=True)
    numbered = [(*row, f"row {number}") for number, row in enumerate(rows)]
    if len(rows) > 1:
        assert same(numbered, numbered[::-1])
        assert not same(numbered, numbered[::-1], ordered=True)


@given(tables(), st.data())
@settings(deadline=None)
def test_a_changed_cell_makes_another_result(rows, data):
    place, column = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.integers(0, len(rows[0]) - 1))
    changed = [list(row) for row in rows]
    changed[place][column] = "nowhere else"
    assert not same(rows, [tuple(row) for row in changed])


@given(tables(), st.data())
@settings(deadline=None)
def test_one_row_more_or_less_makes_another_result(rows, data):
    row = data.draw(st.sampled_from(rows))
    assert not same(rows, [*rows, row])
    less = [*rows]
    less.remove(row)
    assert not same(rows, less)


@given(tables())
@settings(deadline=None)
def test_a_duplicate_in_place_of_another_row_makes_another_result(rows):
    first, *rest = rows
    marked = [(*first, "x"), *[(*row, "y") for row in rest], (*first, "z")]
    assert same(marked, marked[::-1])
    assert not same(marked, [*marked[:-1], marked[0]])


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8), st.floats(-4e-7, 4e-7))
@settings(deadline=None)
def test_a_relative_error_below_the_tolerance_does_not_count(numbers, error):
    off = [(number * (1 + error), place) for place, number in enumerate(numbers)]
    assert same([(number, place) for place, number in enumerate(numbers)], off)
