"""What is kept of a group's calls is bounded in their number and in what they hold."""

from __future__ import annotations

from typing import Any

import pytest

from crossrank.instrument.record.descriptor import MAX_DESCRIPTORS, MAX_NUMBERS, Descriptor, DescriptorCache


def _descriptor(key: tuple[Any, ...]) -> Descriptor:
    nothing: Any = None
    return Descriptor(nothing, nothing, nothing, key, None)


@pytest.mark.parametrize("splits", [1, 64, 1024, 16_384, 2 * MAX_NUMBERS])
def test_calls_with_always_new_splits_take_bounded_memory(splits: int) -> None:
    cache = DescriptorCache()
    same = (7,) * splits
    for number in range(MAX_DESCRIPTORS + 50):
        descriptor = _descriptor((number, same))
        cache.keep(number, descriptor)
        assert cache[number] is descriptor
        assert len(cache) <= MAX_DESCRIPTORS
        # One call that is larger than everything else may be is kept alone.
        assert len(cache) * (splits + 2) <= max(MAX_NUMBERS, splits + 2)


def test_calls_within_the_limit_stay() -> None:
    cache = DescriptorCache()
    for number in range(MAX_DESCRIPTORS):
        cache.keep(number, _descriptor((number, (4, 4), (4, 4))))
    assert len(cache) == MAX_DESCRIPTORS


def test_a_repeated_call_outlives_calls_made_once() -> None:
    cache = DescriptorCache()
    repeated = _descriptor(("repeated",))
    cache.keep("repeated", repeated)
    for number in range(5 * MAX_DESCRIPTORS):
        cache.keep(number, _descriptor((number,)))
        assert (cache.get("repeated") or cache.recall("repeated")) is repeated
    assert cache.get(0) is cache.recall(0) is None
