"""Tensors of a trace are told apart though torch gives their numbers again."""

from __future__ import annotations

from typing import Any

import pytest

from crossrank.replay.plan.compute.index_ranges import IndexRanges
from crossrank.replay.plan.compute.read_window import _overlap
from crossrank.replay.plan.compute.tensors import BoundTensors, StandInError, Tensors
from crossrank.tools.traces.execution_trace import IO


def tensor(identity: int, storage: int, elements: int, offset: int = 0) -> list[Any]:
    return [identity, storage, offset, elements, 4, "cpu"]


def side(*tensors: list[Any]) -> IO:
    return IO(
        values=list(tensors),
        shapes=[[one[3]] for one in tensors],
        types=["Tensor(float)"] * len(tensors),
        strides=[[1]] * len(tensors),
    )


def bind(tensors: Tensors, takes: list[Any], gives: list[Any], at: int = 0) -> BoundTensors:
    return tensors.bind(at, side(*takes), side(*gives))


def test_existing_tensors_share_memory_by_storage_and_offset() -> None:
    tensors = Tensors()
    first = bind(tensors, [tensor(1, 10, 4)], []).used[0]
    second = bind(tensors, [tensor(2, 10, 2, offset=6)], []).used[0]
    assert tensors.slots[first].block == tensors.slots[second].block == 0
    assert tensors.slots[second].offset == 6
    assert [one.bytes for one in tensors.finished_blocks()] == [8 * 4]


def test_a_number_refers_to_its_latest_tensor() -> None:
    tensors = Tensors()
    (first,) = bind(tensors, [], [tensor(5, 50, 3)]).made
    assert bind(tensors, [tensor(5, 50, 3)], []).used == [first]
    (second,) = bind(tensors, [], [tensor(5, 50, 3)]).made
    assert bind(tensors, [tensor(5, 50, 3)], []).used == [second] != [first]
    assert tensors.storage_of[first] is not tensors.storage_of[second]


def test_a_view_of_an_input_shares_its_memory_and_a_result_in_place_is_the_input() -> None:
    tensors = Tensors()
    bound = bind(tensors, [tensor(1, 10, 8)], [tensor(2, 10, 4, offset=4)])
    assert tensors.storage_of[bound.made[0]] is tensors.storage_of[bound.used[0]]
    in_place = bind(tensors, [tensor(1, 10, 8)], [tensor(1, 10, 8)])
    assert in_place.made == []
    assert in_place.results == [None]


def test_a_tensor_of_unknown_origin_is_a_view_if_inside_a_known_tensor() -> None:
    tensors = Tensors()
    (whole,) = bind(tensors, [], [tensor(1, 10, 8)]).made
    bound = bind(tensors, [tensor(2, 10, 4, offset=4)], [])
    assert bound.views == [(bound.used[0], whole)]
    beyond = bind(tensors, [tensor(3, 10, 40)], [])  # other memory at the same place
    assert beyond.views == []
    assert tensors.slots[beyond.used[0]].block == 0


@pytest.mark.parametrize(
    ("value", "kind", "said"),
    [
        ([7, 0, 0, 0, 0, ""], "Tensor(float)", "has no storage of its own"),
        ([1, 2, 0, 4, 1, "cpu"], "Tensor(c10::quint8)", "tensors of type c10::quint8 cannot be made"),
        ([1, 2, -3, 4, 4, "cpu"], "Tensor(float)", "impossible numbers"),
        ([1, 2], "Tensor(float)", "impossible numbers"),
        (1, "GenericList[Int,Int]", "a list is longer than the trace keeps"),
        ({}, "Dict", "an argument of type Dict cannot be made"),
    ],
)
def test_unsupported_values_give_a_reason(value: Any, kind: str, said: str) -> None:
    with pytest.raises(StandInError, match=said):
        Tensors().bind(0, IO(values=[value], shapes=[[4]], types=[kind], strides=[[1]]), IO())


def test_uninitialised_tensors_and_generators_become_none() -> None:
    values: list[Any] = ["<Generator>", "<None>", [0, 0, 0, 0, 0, ""]]
    kinds = ["Generator", "None", "Tensor(nullptr (uninitialized))"]
    bound = Tensors().bind(0, IO(values=values, shapes=[[]] * 3, types=kinds, strides=[[]] * 3), IO())
    assert bound.arguments == [None, None, None]


@pytest.mark.parametrize(
    ("recorded", "known"),
    [
        ('{"0": [3, 3]}', (3, 3)),
        ('{"0": [-2, 7], "1": [0, 9]}', (-2, 7)),  # of an operation with one tensor
        ('{"0": [7, 3]}', (0, None)),
        (f'{{"0": [0, {1 << 40}]}}', (0, None)),
        (f'{{"0": [{-1 << 40}, -1]}}', (0, None)),
    ],
)
def test_a_valid_recorded_range_of_integers_is_used(recorded: str, known: tuple[int, int | None]) -> None:
    tensors = Tensors()
    bound = bind(tensors, [tensor(1, 10, 8)], [])
    IndexRanges().note("aten::embedding", bound, tensors, recorded)
    storage = tensors.storage_of[bound.used[0]]
    assert (storage.low, storage.high) == known


def test_several_recorded_ranges_of_a_tensor_are_joined() -> None:
    tensors, ranges = Tensors(), IndexRanges()
    for recorded in ('{"0": [3, 5]}', '{"0": [-2, 4]}', '{"0": [0, 1]}'):
        bound = bind(tensors, [tensor(1, 10, 8)], [])
        ranges.note("aten::add", bound, tensors, recorded)
    storage = tensors.storage_of[bound.used[0]]
    assert (storage.low, storage.high, storage.is_index) == (-2, 5, False)


@pytest.mark.parametrize(
    ("dimension", "highest"), [(0, 7), (1, 2), (-1, 2), (-2, 7), (2, 0), (-3, 0), ("<Generator>", 0)]
)
def test_an_index_is_below_the_size_of_its_dimension(dimension: int | str, highest: int) -> None:
    tensors = Tensors()
    kinds = ["Tensor(float)", "Int" if isinstance(dimension, int) else "Generator", "Tensor(long int)"]
    values = [tensor(1, 10, 24), dimension, [2, 11, 0, 4, 8, "cpu"]]
    inputs = IO(values=values, shapes=[[8, 3], [], [4]], types=kinds, strides=[[3, 1], [], [1]])
    bound = tensors.bind(0, inputs, IO())
    IndexRanges().note("aten::index_select", bound, tensors, "")
    storage = tensors.storage_of[bound.used[1]]
    assert (storage.low, storage.high, storage.is_index) == (0, highest, True)


@pytest.mark.parametrize(
    ("shape", "strides", "size"), [([], [], 4), ([0], [1], 0), ([3], [1], 12), ([2, 3], [5, 1], 32)]
)
def test_the_memory_of_a_tensor_reaches_to_its_last_element(shape: list[int], strides: list[int], size: int) -> None:
    tensors = Tensors()
    inputs = IO(values=[tensor(1, 10, 9)], shapes=[shape], types=["Tensor(float)"], strides=[strides])
    tensors.bind(0, inputs, IO())
    assert [one.bytes for one in tensors.finished_blocks()] == [size]


@pytest.mark.parametrize(
    ("other", "overlaps"),
    [
        ((1, 10, 20), True),
        ((1, 0, 11), True),
        ((1, 19, 30), True),
        ((1, 12, 13), True),
        ((1, 0, 10), False),
        ((1, 20, 30), False),
        ((2, 10, 20), False),
    ],
)
def test_extents_overlap_if_they_share_a_byte(other: tuple[int, int, int], overlaps: bool) -> None:
    assert _overlap([(3, 0, 99), (1, 10, 20)], [(4, 0, 99), other]) == overlaps
