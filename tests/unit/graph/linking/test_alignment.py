"""Aligning two sequences of names without ids."""

from __future__ import annotations

import time
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from crossrank.tools.graph.linking.name_alignment import OpSequence, align


def plain(names: str) -> OpSequence:
    """One name per letter, no sequence numbers."""
    return OpSequence(list(names), [-1] * len(names))


def test_a_sequence_that_stands_whole_in_the_other_is_found() -> None:
    assert align(plain("bcd"), plain("abcde")).pairs == [(0, 1), (1, 2), (2, 3)]
    assert align(plain("abcde"), plain("bcd")).pairs == [(1, 0), (2, 1), (3, 2)]
    assert align(plain("aba"), plain("abbaba")).pairs == [(0, 3), (1, 4), (2, 5)]
    assert align(plain("aaabaaa"), plain("aaaabaaaa")).pairs == [(i, i + 1) for i in range(7)]


def test_extra_and_missing_events_at_both_ends_and_inside_stay_unmatched() -> None:
    alignment = align(plain("xxabcdefg"), plain("abcQdegzz"))
    assert alignment.pairs == [(2, 0), (3, 1), (4, 2), (5, 4), (6, 5), (8, 6)]


def test_the_longest_chain_of_unique_names_in_the_same_order_is_kept() -> None:
    assert align(plain("abcd"), plain("xadbc")).pairs == [(0, 1), (1, 3), (2, 4)]
    assert align(plain("daef"), plain("gedxfa")).pairs == [(2, 1), (3, 4)]
    assert align(plain("abz"), plain("zab")).pairs == [(0, 1), (1, 2)]
    assert align(plain("zab"), plain("abz")).pairs == [(1, 0), (2, 1)]


def test_sequence_numbers_find_the_iteration() -> None:
    iteration = ["linear", "relu", "linear"]
    device = OpSequence(iteration * 4, [number for i in range(4) for number in (10 * i, -1, 10 * i + 1)])
    alignment = align(OpSequence(iteration, [20, -1, 21]), device)
    assert (alignment.pairs, alignment.places) == ([(0, 6), (1, 7), (2, 8)], 1)


def test_without_numbers_the_first_of_several_places_is_taken_and_their_count_told() -> None:
    alignment = align(plain("abc"), plain("abcabcabc"))
    assert (alignment.pairs, alignment.places) == ([(0, 0), (1, 1), (2, 2)], 3)


def test_numbers_of_another_iteration_give_way_to_names() -> None:
    host = OpSequence(list("abcd"), [1, 2, 3, 4])
    device = OpSequence(list("abcd"), [41, 42, 43, 44])
    assert align(host, device).pairs == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_sequences_without_a_common_name_do_not_match() -> None:
    assert align(plain("abc"), plain("xyz")).pairs == []
    assert align(plain(""), plain("xyz")).pairs == []


def test_a_repetition_with_an_extra_event_in_every_period_is_matched() -> None:
    host, device = plain("abcd" * 1000), plain("abxcd" * 1000)
    pairs = [(4 * period + at, 5 * period + at + (at > 1)) for period in range(1000) for at in range(4)]
    assert align(host, device).pairs == pairs
    assert align(device, host).pairs == [(j, i) for i, j in pairs]


def test_a_long_repetition_with_a_gap_is_still_fast() -> None:
    period = "abcdefgh" * 5000
    started = time.process_time()
    alignment = align(plain(period), plain(period[:20001] + "Z" + period[20001:30000]))
    assert time.process_time() - started < 5
    assert len(alignment.pairs) >= 20000


names = st.lists(st.sampled_from("abcd"), max_size=40)


@given(names, names, st.data())
def test_pairs_ascend_on_both_sides_and_agree_in_their_names(a: list[str], b: list[str], data: st.DataObject) -> None:
    numbers = st.integers(-1, 5)
    host = OpSequence(a, [data.draw(numbers) for _ in a])
    device = OpSequence(b, [data.draw(numbers) for _ in b])
    pairs = align(host, device).pairs
    assert all(a[i] == b[j] for i, j in pairs)
    assert all(i < k and j < m for (i, j), (k, m) in pairwise(pairs))


@given(
    st.lists(st.text("abc", min_size=1, max_size=2), min_size=1, max_size=60), st.integers(0, 20), st.integers(0, 20)
)
def test_a_thread_with_numbers_is_matched_whole_wherever_the_other_side_begins(
    names: list[str], before: int, after: int
) -> None:
    numbers = list(range(len(names)))
    device = OpSequence(["a"] * before + names + ["a"] * after, [-1] * before + numbers + [-1] * after)
    assert align(OpSequence(names, numbers), device).pairs == [(i, i + before) for i in range(len(names))]


@given(st.permutations(range(30)), st.sets(st.integers(0, 29), max_size=10), st.sets(st.integers(0, 29), max_size=10))
def test_what_both_sides_have_once_in_the_same_order_is_matched(
    order: list[int], lost_here: set[int], lost_there: set[int]
) -> None:
    here = [str(name) for name in order if name not in lost_here]
    there = [str(name) for name in order if name not in lost_there]
    pairs = align(OpSequence(here, [-1] * len(here)), OpSequence(there, [-1] * len(there))).pairs
    assert {here[i] for i, _ in pairs} == set(here) & set(there)
