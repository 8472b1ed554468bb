"""search: exact match and F1 as SQuAD counts them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym_envs.search.env import exact_match, f1, normalised

TEXT = st.text(st.sampled_from(list("aA theTHEn.,'-é 1 \n\t")), max_size=30) | st.text(max_size=30)


class TestNormalised:
    @pytest.mark.parametrize(
        ("text", "plain"),
        [
            ("The Salt Ledger", "salt ledger"),
            ("a  raw\tonion.", "raw onion"),
            ("An otter", "otter"),
            ("9,400", "9400"),
            ("O'Neil-Smith", "oneilsmith"),
            ("theory of another", "theory of another"),
            ("Ünïcode — é", "ünïcode — é"),
            ("x—the—y", "x— —y"),
            ("the", ""),
            ("?!", ""),
        ],
    )
    def test_by_hand(self, text, plain):
        assert normalised(text) == plain

    @given(TEXT)
    def test_case_articles_ascii_punctuation_and_spaces_do_not_count(self, text):
        assert normalised(f"  The ({text.upper()}), a!?\n") == normalised(text.upper())
        assert normalised(normalised(text)) == normalised(text)


class TestF1:
    @pytest.mark.parametrize(
        ("answer", "gold", "expected"),
        [
            ("raw onion", "a raw onion", 1.0),
            ("a red onion", "a raw onion", 0.5),  # 1 of 2 words, 1 of 2 golds
            ("onion", "raw onion", 2 / 3),  # precision 1, recall 1/2
            ("the beach of Lirren", "Lirren", 0.5),  # precision 1/3, recall 1
            ("Lirren Lirren", "Lirren", 2 / 3),  # a word counts as often as both have it
            ("Lirren", "Vantry", 0.0),
            ("", "Lirren", 0.0),
            ("the", "Lirren", 0.0),
            ("the", "a", 1.0),  # nothing is left of either
        ],
    )
    def test_by_hand(self, answer, gold, expected):
        assert f1(answer, [gold]) == pytest.approx(expected, abs=1e-12)

    def test_the_best_gold_counts(self):
        assert f1("9 weeks", ["nine", "nine weeks", "9"]) == pytest.approx(2 / 3)
        assert exact_match("The 9.", ["nine", "9"]) == 1.0
        assert exact_match("eight", ["nine", "9"]) == 0.0
        assert (f1("nine", []), exact_match("nine", [])) == (0.0, 0.0)

    @pytest.mark.parametrize(
        ("answer", "gold", "expected"),
        [("Yes.", "yes", 1.0), ("yes no", "yes", 0.0), ("yes no", "no", 0.0), ("no", "no idea", 0.0), ("yes, he", "he", 2 / 3)],
    )  # fmt: skip
    def test_yes_and_no_are_not_answered_by_both(self, answer, gold, expected):
        assert f1(answer, [gold]) == pytest.approx(expected)

    @given(TEXT, TEXT)
    def test_it_is_symmetric_within_bounds_and_1_for_the_same(self, one, other):
        assert f1(one, [other]) == f1(other, [one])
        assert 0.0 <= f1(one, [other]) <= 1.0
        assert f1(one, [one]) == exact_match(one, [one]) == 1.0

    @given(TEXT, st.lists(TEXT, min_size=1, max_size=4))
    def test_an_exact_match_has_f1_1_and_one_more_gold_never_harms(self, answer, golds):
        assert f1(answer, golds) >= exact_match(answer, golds)
        assert f1(answer, golds) >= f1(answer, golds[:1])
        assert (f1(answer, golds) == 1.0) >= (exact_match(answer, golds) == 1.0)

    @given(st.lists(st.sampled_from(["red", "raw", "onion", "Onion!"]), max_size=6), st.randoms())
    def test_the_order_of_words_does_not_count_for_f1(self, words, rng):
        shuffled = rng.sample(words, len(words))
        assert f1(" ".join(shuffled), [" ".join(words)]) == 1.0
