"""Which recorded launch an entry of torch's flight recorder measures."""

from __future__ import annotations

from typing import NamedTuple

from crossrank.measured_launches import RecordedLaunch, RecordedLaunches


class Noted(NamedTuple):
    profiling_name: str
    time_created_ns: int
    pg: str = "0"


def launched(*launches: tuple[int, str, bool]) -> RecordedLaunches[str]:
    found = RecordedLaunches[str]()
    for began, op, is_batch in launches:
        found.add("0", RecordedLaunch(began=began, op=op, is_batch=is_batch, calls=[f"{op} at {began}"]))
    return found


def taken(launches: RecordedLaunches[str], *entries: Noted) -> list[list[str] | None]:
    return [None if (one := launches.take(entry.pg, *entry[:2])) is None else one.calls for entry in entries]


def test_an_entry_measures_the_last_earlier_launch_of_its_group() -> None:
    launches = launched((10, "all_reduce", False), (20, "all_reduce", False), (30, "broadcast", False))
    entries = [Noted("nccl:all_reduce", 5), Noted("nccl:all_reduce", 29), Noted("nccl:broadcast", 31, "1")]
    assert taken(launches, *entries) == [None, ["all_reduce at 20"], None]
    assert taken(launches, Noted("nccl:broadcast", 30)) == [["broadcast at 30"]]


def test_a_launch_is_measured_once_and_by_its_own_operation() -> None:
    launches = launched((10, "barrier", False), (20, "all_reduce", False))
    entries = [Noted("nccl:all_reduce_barrier", 11), Noted("nccl:_broadcast_oop", 21), Noted("nccl:all_reduce", 22)]
    assert taken(launches, *entries) == [["barrier at 10"], None, ["all_reduce at 20"]]
    assert taken(launches, Noted("nccl:all_reduce", 23)) == [None]  # a call that was not recorded


def test_the_closing_entry_measures_a_batch_or_uneven_gather() -> None:
    launches = launched((10, "send", True), (20, "all_gather", False))
    entries = [Noted("nccl:send 0->1", 11), Noted("nccl:recv 0<-1", 12), Noted("nccl:coalesced", 13)]
    entries += [Noted("nccl:_broadcast_oop", 21), Noted("nccl:ALLGATHER_coalesced", 22)]
    assert taken(launches, *entries) == [None, None, ["send at 10"], None, ["all_gather at 20"]]


def test_unmeasured_launches_are_forgotten() -> None:
    launches = launched(*((at, "all_reduce", False) for at in (10, 20, 30)))
    launches.keep_last(1)
    assert taken(launches, Noted("nccl:all_reduce", 21), Noted("nccl:all_reduce", 31)) == [None, ["all_reduce at 30"]]
