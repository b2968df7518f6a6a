"""Pickles that hold data alone are read like `pickle.loads` does; any other is refused before anything of it runs."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossrank.budget import Budget, BudgetError
from crossrank.tools.traces.flight import safe_pickle
from crossrank.tools.traces.flight.safe_pickle import RefusedPickleError, load_data

TEXT = st.text(max_size=8)
EMPTY = b"X\0\0\0\0"
LEAVES = st.none() | st.booleans() | st.integers(-(1 << 62), 1 << 62) | st.floats(allow_nan=False) | TEXT
DATA = st.recursive(
    LEAVES | st.tuples(TEXT, TEXT),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=30,
)


@given(DATA, st.sampled_from([2, 3, 4, 5]))
def test_data_is_read_as_pickle_reads_it(thing: Any, protocol: int) -> None:
    assert load_data(pickle.dumps(thing, protocol), Budget("dump")) == thing


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("length", [127, 128, 255, 256, 4096])
def test_the_name_and_the_description_of_a_group_may_be_long(length: int, protocol: int) -> None:
    dump = {"entries": [{"process_group": pair} for pair in (("0", "d" * length), ("n" * length, ""))] * 2}
    assert load_data(pickle.dumps(dump, protocol), Budget("dump")) == dump


@pytest.mark.parametrize("opcode", [b"U\x03", b"T\x03\0\0\0", b"X\x03\0\0\0"])
def test_strings_of_other_pickle_writers_are_read(opcode: bytes) -> None:
    assert load_data(b"\x80\x02" + opcode + b"abc.", Budget("dump")) == "abc"


class _Witness(pickle._Unpickler):
    """Unpickles in Python, and looks at every pair."""

    stack: list[Any]

    def load_pair(self) -> None:
        _DISPATCH[pickle.TUPLE2[0]](self)
        assert not any(type(part) is tuple for part in self.stack[-1])


_DISPATCH: dict[int, Any] = pickle._Unpickler.dispatch
_Witness.dispatch = _DISPATCH | {pickle.TUPLE2[0]: _Witness.load_pair}


FRAGMENTS = [
    *(b"h\x00", b"h\x01", b"X\1\0\0\0a", b"X\1\0\0\0aq\x01", b"\x86", b"\x86q\x01", b"h\x00h\x00\x86q\x01"),
    *(b"]", b")", b"](e", b"}uq\x01", b"(uq\x01", b"h\x01h\x01\x86"),
    *(b"q\x01", b"K\x86", b"Mhh", b"\x8a\x05h\x00h\x00\x86"),
]


@pytest.mark.parametrize("protocol", [2, 4])
def test_no_accepted_opcode_order_makes_a_tuple_of_tuples(protocol: int) -> None:
    read = 0
    put = b"q\x00" if protocol == 2 else b"\x94"
    fragments = [one if protocol == 2 else one.replace(b"q\x01", b"\x94") for one in FRAGMENTS]
    for four in itertools.product(fragments, repeat=4):
        content = b"\x80%cX\1\0\0\0a%sh\x00" % (protocol, put) + b"".join(four) + b"."
        with contextlib.suppress(RefusedPickleError):
            safe_pickle.check(content, len(content))
            read += 1
            with contextlib.suppress(IndexError, KeyError, pickle.UnpicklingError, TypeError, AttributeError):
                _Witness(io.BytesIO(content)).load()
    assert read > 5_000


class _RunsCode:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, ("touch /tmp/should-not-exist",)


def _nested(opcode: bytes, levels: int) -> bytes:
    return b"\x80\x02})" + opcode * levels + b"K\x01s."


def _doubled(levels: int, between: bytes = b"") -> bytes:
    """A key that is a tuple of two times the same tuple of two times the same tuple …, each with its memo index after
    what stands `between`."""
    content = b"\x80\x02X\x01\x00\x00\x00aq\x00h\x00h\x00\x86" + between + b"q\x01"
    for level in range(levels):
        content += b"h%ch%c\x86%sq%c" % (1 + level, 1 + level, between, 2 + level)
    return content + b"}h%cK\x01s." % (1 + levels)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(pickle.dumps({"entries": _RunsCode()}, 2), "opcode", id="reduce"),
        pytest.param(pickle.dumps({"entries": _RunsCode()}, 4), "opcode", id="stack-global"),
        pytest.param(b"\x80\x02cos\nsystem\n.", "opcode", id="global"),
        pytest.param(b"\x80\x02Pname\n.", "opcode", id="persistent-id"),
        pytest.param(b"\x80\x02\x82\x01.", "opcode", id="extension"),
        pytest.param(b"\x80\x02}q\x00}b.", "opcode", id="build"),
        pytest.param(b"\x80\x02p9999999999\n.", "opcode", id="memo-index-as-text"),
        pytest.param(b"\x80\x06N.", "has protocol 6; 2 to 5 are read", id="protocol"),
        pytest.param(b"\x80\x02" + EMPTY + b"\x86.", "tuple", id="pair-of-one"),
        pytest.param(b"\x80\x02]" + EMPTY + b"\x86.", "tuple", id="pair-with-a-list"),
        pytest.param(b"\x80\x04]" + EMPTY + b"\x86.", "tuple", id="pair-with-a-list-of-protocol-4"),
        pytest.param(b"\x80\x02\x8a\x01\x05" + EMPTY + b"\x86.", "tuple", id="pair-with-a-number"),
        pytest.param(b"\x80\x02" + EMPTY * 2 + b"\x86" + EMPTY + b"\x86.", "tuple", id="pair-with-a-pair"),
        pytest.param(_nested(b"\x85", 200_000), "opcode", id="deep-key"),
        pytest.param(_nested(b"X\x00\x00\x00\x00\x86", 200_000), "tuple", id="deep-key-of-pairs"),
        pytest.param(_nested(b"h\x00X\x00\x00\x00\x00\x86", 200_000), "not a valid", id="pairs-under-pairs"),
        pytest.param(
            b"\x80\x02}X\x01\x00\x00\x00aq\x00h\x00" + b"X\x00\x00\x00\x00\x86" * 200_000 + b"K\x01s.",
            "tuple",
            id="deep-key-that-begins-with-a-get",
        ),
        pytest.param(_nested(b")\x86", 200_000), "order", id="deep-key-of-empty-tuples"),
        pytest.param(_nested(b"h\x00\x86", 5), "order", id="pairs-as-key"),
        pytest.param(_doubled(60), "tuple", id="exponential-hash"),
        pytest.param(_doubled(60, b"q\xff"), "order", id="exponential-hash-by-a-second-index"),
        pytest.param(_doubled(60, b"(u"), "order", id="exponential-hash-behind-an-empty-update"),
        pytest.param(b"\x80\x02" + b"X\xff\xff\xff\xff" + b"a" * 99 + b".", "cut off", id="string-without-end"),
        pytest.param(b"\x80\x02\x8d" + b"\xff" * 8 + b"a.", "cut off", id="string-longer-than-any-memory"),
        pytest.param(b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7fa.", "opcode", id="bytes-without-end"),
    ],
)
def test_a_pickle_that_is_more_than_data_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(RefusedPickleError, match=reason):
        load_data(content, Budget("dump"))


@pytest.mark.parametrize("content", [b"]", b"X\x01\x00\x00\x00a", b"K\x07"])
def test_a_memo_index_allocates_nothing(content: bytes) -> None:
    with pytest.raises(RefusedPickleError, match=r"memo index|order"):
        load_data(b"\x80\x02" + content + b"r\xff\xff\xff\x7f.", Budget("dump"))


def test_a_memo_index_far_larger_than_the_file_is_refused() -> None:
    put = b"\x80\x02" + EMPTY + b"r%b."
    assert load_data(put % (13 + (1 << 16)).to_bytes(4, "little"), Budget("dump")) == ""
    with pytest.raises(RefusedPickleError, match="has the memo index 65550, more than a pickle of 13 bytes needs"):
        load_data(put % (14 + (1 << 16)).to_bytes(4, "little"), Budget("dump"))
    with pytest.raises(RefusedPickleError, match="order"):
        load_data(b"\x80\x02]r\0\0\2\0.", Budget("dump"))


def test_a_pickle_with_more_values_than_any_dump_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"more than [0-9,]+ values"):
        load_data(b"\x80\x02" + b"]" * 3_000_001 + b".", Budget("dump"))


@given(DATA, st.sampled_from([2, 4]), st.data())
def test_a_cut_off_pickle_does_not_count_as_hostile(thing: Any, protocol: int, data: Any) -> None:
    content = pickle.dumps({"version": "2.10", "entries": [thing]}, protocol)
    end = data.draw(st.integers(1, len(content) - 1))
    with pytest.raises(RefusedPickleError) as refusal:
        load_data(content[:end], Budget("dump"))
    assert refusal.value.cut_off


@given(DATA, st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=8))
def test_a_pickle_with_changed_bytes_is_read_or_refused(thing: Any, changes: list[tuple[int, int]]) -> None:
    content = bytearray(pickle.dumps({"version": "2.10", "entries": [thing, {"pg": ("0", "x")}]}, 2))
    for position, value in changes:
        content[position % len(content)] = value
    try:
        load_data(bytes(content), Budget("dump"))
    except RefusedPickleError:
        pass
