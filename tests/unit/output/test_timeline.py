"""A timeline, decoded with Perfetto's own definitions, shows what the ranks did."""

from __future__ import annotations

from collections import defaultdict
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from crossrank.errors import CrossrankError
from crossrank.tools.job.collectives import match_collectives
from crossrank.tools.job.job import Job
from crossrank.tools.output.timeline.build import Flows, slots, write_timeline
from crossrank.tools.output.timeline.perfetto import Events, PerfettoWriter
from tests.unit.job.ranks import EPOCH, Rank


class Decoded:
    """A native trace as its reader builds it: tracks by path, with their events and counters."""

    def __init__(self, content: bytes) -> None:
        trace = pb.Trace.FromString(content)
        self.names: dict[int, str] = {}
        self.parents: dict[int, int] = {}
        self.events: dict[str, list[tuple[str, int, int | None, dict[str, int], list[int]]]] = defaultdict(list)
        self.counters: dict[str, list[tuple[int, float]]] = defaultdict(list)
        self.epoch = 0
        tables: dict[int, Any] = {}
        open_events: dict[int, list[int]] = defaultdict(list)
        packets = list(trace.packet)
        for packet in packets:
            if packet.HasField("track_descriptor"):
                track = packet.track_descriptor
                self.names[track.uuid], self.parents[track.uuid] = track.name, track.parent_uuid
            if packet.HasField("clock_snapshot"):
                clocks = {clock.clock_id: clock.timestamp for clock in packet.clock_snapshot.clocks}
                self.epoch = clocks[1] - clocks[6]
        # Its reader sorts by time and keeps the order of the file for equal times.
        for packet in sorted(packets, key=lambda packet: packet.timestamp):
            sequence = packet.trusted_packet_sequence_id
            if packet.sequence_flags & 1:
                event_names = {one.iid: one.name for one in packet.interned_data.event_names}
                arguments = {one.iid: one.name for one in packet.interned_data.debug_annotation_names}
                tables[sequence] = event_names, arguments, packet.trace_packet_defaults.track_event_defaults.track_uuid
            if not packet.HasField("track_event"):
                continue
            event_names, arguments, uuid = tables[sequence]
            event, where = packet.track_event, self.path(uuid)
            rows = self.events[where]
            if event.type == event.TYPE_COUNTER:
                self.counters[where].append((packet.timestamp, event.double_counter_value))
            elif event.type == event.TYPE_SLICE_END:
                index = open_events[uuid].pop()
                assert not open_events[uuid], "slices of a track do not overlap"
                name, start, _, values, flows = rows[index]
                rows[index] = name, start, packet.timestamp, values, flows
            else:
                assert packet.sequence_flags & 2
                values = {arguments[one.name_iid]: one.int_value for one in event.debug_annotations}
                rows.append((event_names[event.name_iid], packet.timestamp, None, values, list(event.flow_ids)))
                if event.type == event.TYPE_SLICE_BEGIN:
                    open_events[uuid].append(len(rows) - 1)
        assert not any(open_events.values()), "every slice ends"

    def path(self, uuid: int) -> str:
        parent = self.parents[uuid]
        return f"{self.path(parent)}/{self.names[uuid]}" if parent else self.names[uuid]


def timeline(*ranks: Rank, flows: Flows = "first-last") -> Decoded:
    times = [rank.times for rank in ranks]
    file = BytesIO()
    write_timeline(match_collectives(Job.match(times)), file, flows=flows)
    return Decoded(file.getvalue())


def two_ranks() -> tuple[Rank, Rank]:
    first, second = Rank(0), Rank(1)
    first.call(100, 500).call(600, 700, "all_gather", bytes=2_000_000)
    second.call(400, 500).call(600, 700, "all_gather", bytes=2_000_000)
    first.times.steps, second.times.steps = [(1, EPOCH + 300_000)], [(1, EPOCH + 350_000)]
    first.times.records_steps = second.times.records_steps = True
    return first, second


def test_a_rank_has_tracks_for_calls_device_and_steps() -> None:
    trace = timeline(*two_ranks())
    # Time 0 is rank 0's first call, 5 us before its kernel.
    assert trace.epoch == EPOCH + 95_000
    assert {path: [event[:4] for event in rows] for path, rows in trace.events.items() if rows} == {
        "rank 0/steps": [("step 0", 0, 205_000, {}), ("step 1", 205_000, 605_000, {})],
        "rank 0/calls": [
            ("all_reduce 1 MB · 0", 0, None, {"number": 1, "id": 0}),
            ("all_gather 2 MB · 0", 500_000, None, {"number": 2, "id": 1}),
        ],
        "rank 0/device": [
            ("all_reduce 1 MB · 0", 5_000, 405_000, {"number": 1}),
            ("all_gather 2 MB · 0", 505_000, 605_000, {"number": 2}),
        ],
        "rank 1/steps": [("step 0", 0, 255_000, {}), ("step 1", 255_000, 605_000, {})],
        "rank 1/calls": [
            ("all_reduce 1 MB · 0", 300_000, None, {"number": 1, "id": 0}),
            ("all_gather 2 MB · 0", 500_000, None, {"number": 2, "id": 1}),
        ],
        "rank 1/device": [
            ("all_reduce 1 MB · 0", 305_000, 405_000, {"number": 1}),
            ("all_gather 2 MB · 0", 505_000, 605_000, {"number": 2}),
        ],
    }


def test_counters_sum_over_calls_in_flight() -> None:
    trace = timeline(*two_ranks())
    assert dict(trace.counters) == {
        "job/bytes in flight": [(5_000, 1e6), (405_000, 0), (505_000, 2e6), (605_000, 0)],
        "job/busbw": [(305_000, 10.0), (405_000, 0), (505_000, 10.0), (605_000, 0)],
    }


def arrows(trace: Decoded) -> dict[int, list[str]]:
    found = defaultdict(list)
    for path, rows in trace.events.items():
        for name, _, _, _, flows in rows:
            for flow in flows:
                found[flow].append(f"{path} {name.split()[0]}")
    return dict(found)


def test_arrows_go_from_the_first_to_the_last_rank_or_through_all() -> None:
    ranks = [Rank(rank, 3).call(arrival, 500) for rank, arrival in enumerate((150, 200, 120))]
    assert arrows(timeline(*ranks)) == {1: ["rank 2/device all_reduce", "rank 1/device all_reduce"]}
    assert len(*arrows(timeline(*ranks, flows="all")).values()) == 3
    assert arrows(timeline(*ranks, flows="none")) == {}


def test_calls_without_device_times_have_the_arrows() -> None:
    ranks = [Rank(0), Rank(1)]
    for rank in ranks:
        rank.call(0, 0)
        rank.times.calls.called[0] = EPOCH + 1000 * (rank.times.rank or 0)
    trace = timeline(*ranks)
    assert arrows(trace) == {1: ["rank 0/calls all_reduce", "rank 1/calls all_reduce"]}
    assert not trace.counters


def test_overlapping_device_events_have_separate_tracks() -> None:
    rank = Rank(0, 1).call(100, 500).call(200, 300).call(500, 600)
    trace = timeline(rank)
    assert [event[1:3] for event in trace.events["rank 0/device"]] == [(5_000, 405_000), (405_000, 505_000)]
    assert [event[1:3] for event in trace.events["rank 0/device 2"]] == [(105_000, 205_000)]


def test_a_recording_without_any_time_is_refused() -> None:
    rank = Rank(0, 1).call(0, 0)
    rank.times.calls.called[0] = 0
    with pytest.raises(CrossrankError, match="rank-0: no communication has a time"):
        timeline(rank)


def test_a_rank_whose_calls_have_no_times_has_its_steps() -> None:
    first, second = Rank(0).call(100, 500), Rank(1).call(0, 0)
    second.times.calls.called[0] = 0
    second.times.steps = [(1, EPOCH + 100_000), (2, EPOCH + 300_000)]
    second.times.records_steps = True
    trace = timeline(first, second)
    assert [event[:3] for event in trace.events["rank 1/steps"]] == [
        ("step 0", 0, 5_000),
        ("step 1", 5_000, 205_000),
        ("step 2", 205_000, 205_000),
    ]


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 2**45), st.integers(0, 3), st.booleans(), st.integers(0, 2**40)),
        min_size=1,
        max_size=30,
    )
)
def test_events_are_read_back_unchanged(rows: list[Any]) -> None:
    names = [f"name {i}" for i in range(6)]
    start, end, moment = [], [], 0
    for _, length, pause, _, _ in rows:
        moment += pause
        start.append(moment)
        moment += length >> 6  # events may touch: an end at the begin of the next
        end.append(moment)
    events = Events(
        names=names,
        name=np.array([row[0] for row in rows]),
        start=np.array(start),
        end=np.array(end),
        arguments={"number": np.array([row[4] for row in rows])},
        flow=np.array([9 * row[3] for row in rows]),
    )
    file = BytesIO()
    writer = PerfettoWriter(file, EPOCH)
    writer.events(writer.track("track"), events)
    assert Decoded(file.getvalue()).events["track"] == [
        (names[row[0]], start[i], end[i], {"number": row[4]}, [9] if row[3] else []) for i, row in enumerate(rows)
    ]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=30))
def test_lanes_never_overlap_and_are_as_few_as_possible(spans: list[tuple[int, int]]) -> None:
    spans.sort()
    start, end = (np.array([a for a, _ in spans]), np.array([a + b for a, b in spans]))
    slot = slots(start, end)
    for number in set(slot.tolist()):
        mine = slot == number
        assert (start[mine][1:] >= end[mine][:-1]).all()
    at_a_time = max((int(((start <= at) & (end > at)).sum()) for at in start.tolist()), default=0)
    assert len(set(slot.tolist())) <= max(at_a_time, 1)
