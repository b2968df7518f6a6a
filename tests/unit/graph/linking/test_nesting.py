"""What runs inside what, and how long by itself."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from crossrank.tools.graph.linking.nesting import nest
from crossrank.tools.traces.kineto import HostEvent, RuntimeCall


def event(start: int, end: int, external_id: int, *, name: str = "op", tid: int = 1) -> HostEvent:
    return HostEvent(name, 1, tid, start, end, None, external_id, -1, msgspec.Raw(b"{}"))


def call(start: int, end: int, *, tid: int = 1) -> RuntimeCall:
    return RuntimeCall("cudaLaunchKernel", 1, tid, start, end, 1)


def test_a_child_that_starts_with_its_parent_is_subtracted() -> None:
    nesting = nest([event(0, 10, 1), event(0, 4, 2)], [])
    assert (nesting.parent, nesting.exclusive_ns) == ([-1, 0], [6, 4])


def test_equal_ranges_nest_in_the_order_of_their_external_ids() -> None:
    nesting = nest([event(0, 10, 8), event(0, 10, 7)], [])
    assert (nesting.parent, nesting.exclusive_ns) == ([1, -1], [10, 0])


def test_siblings_that_overlap_by_rounding_are_not_subtracted_twice() -> None:
    nesting = nest([event(0, 10, 1), event(1, 5, 2), event(4, 9, 3), event(9, 10, 4)], [])
    assert nesting.parent == [-1, 0, 0, 0]
    assert nesting.exclusive_ns[0] == 10 - 9


def test_a_call_belongs_to_the_innermost_enclosing_event_on_its_thread() -> None:
    events = [event(0, 100, 1), event(10, 50, 2), event(20, 30, 3), event(0, 100, 4, tid=2)]
    calls = [call(22, 25), call(22, 31), call(60, 61), call(22, 25, tid=2)]
    outside = [call(101, 102), call(90, 101), call(5, 6, tid=3)]
    assert nest(events, [*calls, *outside]).around_call == [2, 1, 0, 3, -1, -1, -1]


def test_the_range_of_a_work_encloses_nothing() -> None:
    events = [event(0, 20, 1), event(5, 100, 2, name="gloo:all_reduce"), event(30, 40, 3), event(50, 60, 4)]
    nesting = nest(events, [call(31, 32), call(45, 46)])
    assert nesting.parent == [-1, -1, -1, -1]
    assert nesting.exclusive_ns == [20, 95, 10, 10]
    assert (nesting.around_call, nesting.overlaps) == ([2, -1], 0)


def test_a_range_that_outlives_its_enclosing_range_is_counted() -> None:
    nesting = nest([event(0, 20, 1), event(10, 30, 2)], [])
    assert (nesting.parent, nesting.overlaps) == ([-1, -1], 1)


def test_a_hundred_thousand_nested_events_are_handled() -> None:
    count = 100_000
    nesting = nest([event(i, 2 * count - i, i + 1) for i in range(count)], [call(count, count)])
    assert nesting.parent == [-1, *range(count - 1)]
    assert nesting.exclusive_ns[:2] == [2, 2]
    assert nesting.around_call == [count - 1]


def test_calls_outside_deeply_nested_events_are_handled() -> None:
    count = 50_000
    events = [event(i, 4 * count - i, i + 1) for i in range(count)]
    assert set(nest(events, [call(count + i, 5 * count) for i in range(count)]).around_call) == {-1}


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Properly nested ranges as (start, end, parent), the parent by position or -1."""
    ranges: list[tuple[int, int, int]] = []

    def grow(start: int, end: int, parent: int, depth: int) -> None:
        at = start
        while at < end and depth < 4 and draw(st.booleans()):
            begin = draw(st.integers(at, end))
            stop = draw(st.integers(begin, end))
            if stop == begin:
                return
            ranges.append((begin, stop, parent))
            grow(begin, stop, len(ranges) - 1, depth + 1)
            at = stop

    grow(0, 40, -1, 0)
    return ranges


@given(trees(), st.randoms(use_true_random=False))
def test_nesting_is_found_in_any_order_of_the_file(ranges: list[tuple[int, int, int]], random: object) -> None:
    order = list(range(len(ranges)))
    random.shuffle(order)  # type: ignore[attr-defined]
    events = [event(ranges[i][0], ranges[i][1], i + 1) for i in order]
    nesting = nest(events, [])
    for position, i in enumerate(order):
        start, end, parent = ranges[i]
        found = nesting.parent[position]
        assert (order[found] if found >= 0 else -1) == parent
        children = sum(stop - begin for begin, stop, above in ranges if above == i)
        assert nesting.exclusive_ns[position] == end - start - children
