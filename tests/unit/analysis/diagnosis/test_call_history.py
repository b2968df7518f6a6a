"""What a rank usually does shows which of its calls is out of turn."""

from __future__ import annotations

import pytest

from crossrank.tools.analysis.diagnosis.call_history import (
    breaks_its_sizes,
    breaks_its_tags,
    changes_peer,
    has_skipped,
    is_new,
    is_usual,
)
from crossrank.tools.analysis.diagnosis.job_state import JobState
from tests.unit.analysis.diagnosis.ranks import call, group, job, rank, world

KINDS = {
    "a": call(),
    "b": call(pg="1"),
    "c": call("broadcast"),
    "d": call("barrier"),
    "A": call(source="other.py:1"),
    "s": call("send", peer=1),
    "t": call("send", peer=2),
}
"""A letter stands for one kind of call: on group 0 but for b."""


def made(letters: str) -> JobState:
    return job(rank(0, *map(KINDS.__getitem__, letters), groups=(world(3), group("1", 0, 1, 2))))


@pytest.mark.parametrize(
    ("letters", "usual", "new"),
    [
        ("a", False, False),
        ("aa", False, False),
        ("aaa", True, False),
        ("abab", True, False),
        ("abac", False, True),
        ("abaa", False, False),
        ("abcad", False, True),
        ("abacab", True, False),
        ("abacac", True, False),
        ("dabcacdab", True, False),  # what followed where most before it was the same
        ("dabcacdac", False, False),
        ("abcd", False, False),
        ("asat", False, True),
    ],
)
def test_a_call_is_usual_after_the_same_history_and_new_if_never_made(letters: str, usual: bool, new: bool) -> None:
    found, last = made(letters + "d"), len(letters) - 1
    assert (is_usual(found, 0, last), is_new(found, 0, last)) == (usual, new)


@pytest.mark.parametrize(
    ("letters", "group_of_it", "peers", "skipped"),
    [
        ("abcabcac", 1, (), True),
        ("abcabcac", 0, (), False),
        ("abcabcac", 1, (1,), False),
        ("abcabcab", 1, (), False),
        ("abcabcad", 1, (), False),
        ("abc", 1, (), False),
        ("ascascac", 0, (1, 2), True),
        ("ascascac", 0, (2,), False),
        ("ascascac", 0, (), False),
        ("ascascac", 1, (1,), False),
        ("ascatcac", 0, (1,), False),
        ("ascatcac", 0, (1, 2), True),
    ],
)
def test_a_call_is_skipped_if_another_known_call_took_its_turn(
    letters: str, group_of_it: int, peers: tuple[int, ...], skipped: bool
) -> None:
    found = made(letters + "d")
    assert has_skipped(found, 0, found.groups[group_of_it], len(letters) - 1, peers) == skipped


@pytest.mark.parametrize(("op", "skipped"), [("send", True), ("recv", False)])
def test_a_receive_is_not_skipped_if_a_send_to_the_rank_was_due(op: str, skipped: bool) -> None:
    found = made("ascascacd")
    assert has_skipped(found, 0, found.groups[0], 7, (1,), op) == skipped


@pytest.mark.parametrize(
    ("peers", "line", "changed"),
    [
        ((1, 1, 1, 2), "ring.py:9", True),
        ((1, 1, 2), "ring.py:9", False),  # too few to tell
        ((1, 2, 1, 2, 3), "ring.py:9", False),  # a line with another peer each time
        ((1, 1, 1, 1), "ring.py:9", False),
        ((1, 1, 1, 2), None, False),
    ],
)
def test_a_line_that_always_had_one_peer_has_another_one(
    peers: tuple[int, ...], line: str | None, changed: bool
) -> None:
    sends = [call("send", number=number, peer=peer, source=line) for number, peer in enumerate(peers, 1)]
    found = job(rank(0, *sends, groups=(world(4),)))
    assert changes_peer(found, 0, len(peers) - 1) == changed


@pytest.mark.parametrize(
    ("tags", "breaks"),
    [
        ([0, 1, 2, 3, 4, 5], False),
        ([0, 1, 2, 3, 4, 50], True),
        ([0, 1, 10, 11, 20, 21, 30, 31], False),
        ([0, 1, 10, 11, 20, 21, 30, 35], True),
        ([0, 1, 2, 9], None),  # too few to have an order
        ([3, 1, 4, 1, 5, 9, 2], None),
    ],
)
def test_a_tag_breaks_the_order_of_those_before_it(tags: list[int], breaks: bool | None) -> None:
    sends = (call("send", number, peer=1, tag=tag) for number, tag in enumerate(tags, 1))
    assert breaks_its_tags(job(rank(0, *sends)), 0, len(tags) - 1) is breaks


@pytest.mark.parametrize(
    ("sizes", "breaks"),
    [([64] * 6, False), ([64] * 5 + [60], True), ([8, 64] * 4, False), ([8, 64] * 4 + [64], True), ([8, 3, 9], None)],
)
def test_a_size_breaks_the_order_of_those_before_it(sizes: list[int], breaks: bool | None) -> None:
    sends = (call("send", number, peer=1, bytes=size) for number, size in enumerate(sizes, 1))
    assert breaks_its_sizes(job(rank(0, *sends)), 0, len(sizes) - 1) is breaks
