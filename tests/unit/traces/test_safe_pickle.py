"""Pickles that hold data alone are read like `pickle.loads` does; any other is refused before anything of it runs."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossrank.budget import Budget, BudgetError
from crossrank.tools.traces import safe_pickle
from crossrank.tools.traces.safe_pickle import RefusedError, load_data

TEXT = st.text(max_size=8)
LEAVES = st.none() | st.booleans() | st.integers(-(1 << 62), 1 << 62) | st.floats(allow_nan=False) | TEXT
DATA = st.recursive(
    LEAVES | st.tuples(TEXT, TEXT),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=30,
)


@given(DATA, st.sampled_from([2, 3, 4, 5]))
def test_data_is_read_as_pickle_reads_it(thing: Any, protocol: int) -> None:
    assert load_data(pickle.dumps(thing, protocol), Budget("dump")) == thing


@given(DATA)
def test_what_torch_writes_is_read_by_the_fast_way(thing: Any) -> None:
    dump = {"version": "2.10", "entries": [{"process_group": ("0", "default_pg"), "thing": thing}]}

    safe_pickle._look_through(pickle.dumps(dump, 2))


class _RunsCode:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, ("touch /tmp/should-not-exist",)


def _nested(opcode: bytes, levels: int) -> bytes:
    return b"\x80\x02})" + opcode * levels + b"K\x01s."


def _doubled(levels: int) -> bytes:
    """A key that is a tuple of two times the same tuple of two times the same tuple …"""
    content = b"\x80\x02}X\x01\x00\x00\x00aq\x00h\x00h\x00\x86q\x01"
    for level in range(levels):
        content += b"h%ch%c\x86q%c" % (1 + level, 1 + level, 2 + level)
    return content + b"K\x01s."


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(pickle.dumps({"entries": _RunsCode()}, 2), "opcode", id="reduce"),
        pytest.param(pickle.dumps({"entries": _RunsCode()}, 4), "opcode", id="stack-global"),
        pytest.param(b"\x80\x02cos\nsystem\n.", "opcode", id="global"),
        pytest.param(b"\x80\x02Pname\n.", "opcode", id="persistent-id"),
        pytest.param(b"\x80\x02\x82\x01.", "opcode", id="extension"),
        pytest.param(b"\x80\x02}q\x00}b.", "opcode", id="build"),
        pytest.param(_nested(b"\x85", 200_000), "opcode", id="deep-key"),
        pytest.param(_nested(b"h\x00\x86", 5), "is no sound pickle|is no whole pickle", id="pairs-as-key"),
        pytest.param(_doubled(60), "tuple", id="exponential-hash"),
        pytest.param(b"\x80\x02]r\xff\xff\xff\x7f.", "numbers its parts up to 2147483647", id="memo-bomb"),
        pytest.param(b"\x80\x02\x8a\x10" + b"\x01" * 16 + b".", "number of 16 bytes", id="long-number"),
        pytest.param(b"\x80\x04}K\x01K\x02s.", "key that is no string", id="key"),
    ],
)
def test_a_pickle_that_is_more_than_data_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(RefusedError, match=reason):
        load_data(content, Budget("dump"))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        pytest.param(b"\x80\x02" + b"]" * 3_000_001 + b".", "values", id="containers"),
        pytest.param(b"\x80\x04" + b"K\x01" * (4 << 20) + b"\x94.", "a pickle that torch did not write", id="slow"),
    ],
)
def test_a_pickle_that_is_larger_than_any_dump_is_refused(content: bytes, what: str) -> None:
    with pytest.raises(BudgetError, match=f"more than [0-9,]+ .*{what}"):
        load_data(content, Budget("dump"))


@given(DATA, st.data())
def test_a_pickle_that_is_cut_off_is_told_apart_from_a_hostile_one(thing: Any, data: st.DataObject) -> None:
    content = pickle.dumps({"version": "2.10", "entries": [thing]}, 2)
    end = data.draw(st.integers(1, len(content) - 1))

    with pytest.raises(RefusedError) as refusal:
        load_data(content[:end], Budget("dump"))

    assert refusal.value.cut_off


@given(DATA, st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=8))
def test_a_pickle_with_changed_bytes_is_read_or_refused(thing: Any, changes: list[tuple[int, int]]) -> None:
    content = bytearray(pickle.dumps({"version": "2.10", "entries": [thing, {"pg": ("0", "x")}]}, 2))
    for position, value in changes:
        content[position % len(content)] = value
    try:
        load_data(bytes(content), Budget("dump"))
    except RefusedError:
        pass
