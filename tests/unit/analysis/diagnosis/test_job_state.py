"""How far each rank came, and what is over everywhere, whatever a rank's own dump shows of it."""

from __future__ import annotations

from typing import Any

import pytest

from crossrank.tools.traces.flight.dump import Progress
from crossrank.tools.traces.rank_trace import COMPLETED, RETIRED, SCHEDULED, RankGroup, RankTrace
from tests.unit.analysis.diagnosis.ranks import call, group, job, rank, world

OPEN = SCHEDULED
SECOND = 10**9


def calls(*states: int, first: int = 1, op: str = "all_reduce", **facts: Any) -> list[Any]:
    """Collectives with numbers from `first` on."""
    return [call(op, number, state, **facts) for number, state in enumerate(states, first)]


AT_4 = {0: Progress(4, 3)}
UNUSED = {0: Progress()}


@pytest.mark.parametrize(
    ("made", "dump", "facts", "expected"),
    [
        ([1, 2, 3], {}, {}, 3),
        ([3], {"collectives_seen": {0: 5}, "progress": AT_4}, {}, 5),
        ([], {"progress": AT_4}, {}, 4),
        ([], {"progress": UNUSED, "wrapped": True}, {}, 0),
        ([], {"progress": AT_4, "with_p2p": {0}}, {}, 0),
        ([], {"progress": AT_4, "with_p2p": {0}, "wrapped": True, "all_joined": True}, {}, None),
        ([], {"progress": AT_4, "wrapped": True}, {"backend": "gloo"}, None),
        ([], {"wrapped": True, "all_joined": True}, {}, 0),
        ([], {"wrapped": True}, {}, None),
        ([], {"active_only": True}, {}, None),
        ([], {}, {}, 0),
        ([], {}, {"filtered": True}, None),
        ([2], {}, {"filtered": True}, 2),
        ([], {}, {"groups": ()}, 0),
        ([], {"wrapped": True}, {"groups": ()}, None),
    ],
)
def test_enqueued_is_the_last_collective_a_rank_called(
    made: list[int], dump: dict[str, Any], facts: dict[str, Any], expected: int | None
) -> None:
    inside = (group("0", 0, 1, desc="default_pg", locality="intra_node"),)
    one = rank(0, *(call(number=number) for number in made), dump=dump, **{"groups": inside} | facts)
    found = job(one, rank(1, groups=inside))
    assert found.enqueued(found.groups[0], 0) == expected
    assert found.enqueued(found.groups[0], 7) is None


@pytest.mark.parametrize(
    ("states", "first", "dump", "backend", "expected"),
    [
        ([COMPLETED, COMPLETED, OPEN], 1, {}, "nccl", 2),
        ([COMPLETED, RETIRED], 1, {}, "nccl", 1),
        ([OPEN], 4, {}, "nccl", 0),
        ([OPEN], 4, {"active_only": True}, "nccl", 3),
        ([], 1, {"active_only": True}, "nccl", 0),
        ([COMPLETED], 1, {"progress": AT_4}, "nccl", 3),
        ([COMPLETED], 5, {"progress": AT_4}, "nccl", 5),
        ([COMPLETED], 1, {"progress": AT_4, "with_p2p": {0}}, "nccl", 1),
        ([COMPLETED], 1, {"progress": AT_4}, "gloo", 1),
        ([OPEN], 4, {"active_only": True}, "gloo", 0),
    ],
)
def test_completed_is_the_last_collective_a_rank_saw_end(
    states: list[int], first: int, dump: dict[str, Any], backend: str, expected: int
) -> None:
    found = job(rank(0, *calls(*states, first=first), dump=dump, backend=backend))
    assert found.completed(found.groups[0], 0) == expected


def gloo(number: int, *made: Any, **facts: Any) -> RankTrace:
    return rank(number, *made, backend="gloo", **facts)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([rank(0, *calls(COMPLETED, COMPLETED)), rank(1, *calls(OPEN, OPEN))], 2),
        ([rank(0, *calls(COMPLETED, op="broadcast")), rank(1)], 0),
        ([rank(0, *calls(COMPLETED), *calls(COMPLETED, first=2, op="broadcast")), rank(1)], 1),
        ([rank(0, dump={"progress": AT_4}), rank(1)], 3),
        ([gloo(0, *calls(RETIRED, RETIRED)), gloo(1, *calls(RETIRED))], 1),
        ([gloo(0, *calls(RETIRED, OPEN)), gloo(1, *calls(OPEN, OPEN))], 1),
        ([gloo(0, *calls(RETIRED)), gloo(1, dump={"wrapped": True})], 0),
        ([gloo(0, *calls(RETIRED), groups=(world(3),)), gloo(1, *calls(RETIRED), groups=(world(3),))], 0),
        ([rank(one, *calls(OPEN, OPEN), source="comms") for one in (0, 1)], 2),
        ([rank(0, *calls(OPEN), source="comms"), rank(1, *calls(OPEN))], 0),
        ([rank(0, groups=(group("1", 1),))], 0),
    ],
)
def test_a_call_is_finished_if_one_rank_saw_its_end_or_all_left_it(ranks: list[RankTrace], expected: int) -> None:
    assert job(*ranks).over[0] == expected


@pytest.mark.parametrize(
    ("stale", "rows", "blind"),
    [
        (rank(1, *calls(OPEN, OPEN, OPEN)), [0, 1, 2], 2),
        (rank(1, *calls(COMPLETED, OPEN, OPEN)), [1, 2], 0),
        (rank(1, *calls(OPEN, OPEN, OPEN, OPEN)), [0, 1, 2], 2),
        (rank(1, call("send", 1, OPEN, peer=0), *calls(OPEN, OPEN, OPEN)), [1, 2, 3], 3),
        (rank(1, *calls(OPEN, OPEN, OPEN), source="comms"), [], 0),
        (gloo(1, *calls(OPEN, OPEN, OPEN)), [], 0),
        (rank(1, *calls(OPEN, OPEN, OPEN, called=2), ending={"taken_at": 3 * SECOND + 3}), [0, 1, 2], 2),
        (rank(1, *calls(OPEN, OPEN, OPEN, called=2), ending={"taken_at": 3 * SECOND + 2}), [], 0),
    ],
)
def test_a_rank_has_unnoticed_ends_long_before_its_dump(stale: RankTrace, rows: list[int], blind: int) -> None:
    found = job(rank(0, *calls(COMPLETED, COMPLETED, COMPLETED)), stale)
    assert (found.unnoticed, found.blind_until(1)) == ({1: rows} if rows else {}, blind)
    assert (found.blind_until(0), found.moment(0, 0)) == (0, 0)
    found.clock_offset[0] = 7
    assert found.moment(0, 0) == 7


def test_a_dump_without_calls_skips_finished_calls_like_the_others() -> None:
    five: dict[str, Any] = {"groups": (world(5),)}
    ranks = [
        rank(0, dump={"active_only": True}, **five),
        rank(1, *calls(OPEN), dump={"wrapped": True}, **five),
        rank(2, *calls(COMPLETED), dump={"wrapped": True}, **five),
        rank(3, *calls(OPEN), dump={"wrapped": True}, source="comms", **five),
        rank(4, dump={"wrapped": True}, groups=()),
    ]

    found = [(one.dump.active_only, one.dump.wrapped) for one in job(*ranks).ranks.values()]
    assert found == [(True, False)] * 2 + [(False, True)] * 3
    (alone,) = job(rank(0, *calls(OPEN), dump={"wrapped": True})).ranks.values()
    assert (alone.dump.active_only, alone.dump.wrapped) == (False, True)


def test_a_gloo_only_rank_shares_the_groups_of_ranks_with_two_backends() -> None:
    both, alone = rank(0), gloo(1)
    both.groups.append(RankGroup(world(2), "gloo"))
    assert [(one.apart, sorted(one.local_index)) for one in job(both, alone).groups] == [("", [0]), ("gloo", [0, 1])]
    assert [one.apart for one in job(rank(0), gloo(1)).groups] == [""]


@pytest.mark.parametrize(("hosts_wait", "still_open"), [(True, [1]), (False, [0, 1])])
def test_a_rank_is_past_a_call_of_nccl_if_hosts_wait_for_calls_and_its_wait_has_ended(
    hosts_wait: bool, still_open: list[int]
) -> None:
    sends = [call("send", number, RETIRED, number, peer=1) for number in (1, 2)]
    facts: dict[str, Any] = {"backend": "nccl", "groups": (group("0", 0, 1, backend="nccl"),)}
    sender = rank(0, *sends, dump={"ends_frozen": True, "hosts_wait": hosts_wait}, **facts)
    sender.waited = {0}
    assert job(sender, rank(1, **facts)).open_rows[0] == still_open
