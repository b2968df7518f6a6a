"""Pickles that hold data alone are read like `pickle.loads` does; any other is refused before anything of it runs."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossrank.budget import Budget, BudgetError
from crossrank.tools.traces import safe_pickle
from crossrank.tools.traces.safe_pickle import RefusedError, load_data

SEEDS = Path(__file__).parents[2] / "fuzz/seeds"
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
    dump = {"version": "2.10", "entries": [{"process_group": ("0", "default_pg"), "time": 1 << 60, "thing": thing}]}
    content = pickle.dumps(dump, 2)

    if b"\x8a\x01" not in content:  # numbers of an odd number of bytes, which torch does not write
        assert safe_pickle._is_as_torch_writes(content)


def test_dumps_of_torch_go_the_fast_way() -> None:
    for rank in range(2):
        assert safe_pickle._is_as_torch_writes((SEEDS / f"flight/rank_{rank}").read_bytes())


class _Witness(safe_pickle._Careful):
    def _check_tuple(self) -> None:
        assert not any(type(part) is tuple for part in self.stack[-1])


FRAGMENTS = [
    *(b"h\x00", b"h\x01", b"X\1\0\0\0a", b"X\1\0\0\0aq\x01", b"\x86", b"\x86q\x01", b"h\x00h\x00\x86q\x01"),
    *(b"]", b")", b"](e", b"}uq\x01", b"(uq\x01", b"h\x01h\x01\x86"),
    *(b"q\x01", b"K\x86", b"Mhh", b"\x8a\x05h\x00h\x00\x86"),
]


def test_no_order_of_opcodes_that_goes_the_fast_way_makes_a_tuple_of_tuples() -> None:
    fast = 0
    for fragments in itertools.product(FRAGMENTS, repeat=4):
        content = b"\x80\x02X\1\0\0\0aq\x00h\x00" + b"".join(fragments) + b"."
        if safe_pickle._is_as_torch_writes(content):
            fast += 1
            with contextlib.suppress(IndexError, KeyError, pickle.UnpicklingError, TypeError):
                _Witness(io.BytesIO(content)).load()
    assert fast > 10_000


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
        pytest.param(_nested(b"\x85", 200_000), "opcode", id="deep-key"),
        pytest.param(_nested(b"X\x00\x00\x00\x00\x86", 200_000), "tuple", id="deep-key-of-pairs"),
        pytest.param(_nested(b"h\x00X\x00\x00\x00\x00\x86", 200_000), "no sound", id="pairs-under-pairs"),
        pytest.param(
            b"\x80\x02}X\x01\x00\x00\x00aq\x00h\x00" + b"X\x00\x00\x00\x00\x86" * 200_000 + b"K\x01s.",
            "tuple",
            id="deep-key-that-begins-with-a-get",
        ),
        pytest.param(_nested(b")\x86", 200_000), "tuple", id="deep-key-of-empty-tuples"),
        pytest.param(_nested(b"h\x00\x86", 5), "is no sound pickle", id="pairs-as-key"),
        pytest.param(_doubled(60), "tuple", id="exponential-hash"),
        pytest.param(_doubled(60, b"q\xff"), "tuple", id="exponential-hash-by-a-second-index"),
        pytest.param(_doubled(60, b"(u"), "tuple", id="exponential-hash-behind-an-empty-update"),
        pytest.param(b"\x80\x02" + b"X\xff\xff\xff\xff" + b"a" * 99 + b".", "cut off", id="string-without-end"),
        pytest.param(b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7fa.", "opcode", id="bytes-without-end"),
    ],
)
def test_a_pickle_that_is_more_than_data_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(RefusedError, match=reason):
        load_data(content, Budget("dump"))


@pytest.mark.parametrize(
    ("content", "printed"),
    [
        pytest.param(b"]r\xff\xff\xff\x7f", "[]", id="container"),
        pytest.param(b"X\x01\x00\x00\x00ar\xff\xff\xff\x7f", "'a'", id="string"),
        pytest.param(b"K\x07r\xff\xff\xff\x7f", "7", id="number"),
    ],
)
def test_a_memo_index_allocates_nothing(content: bytes, printed: str) -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "from crossrank.budget import Budget; from crossrank.tools.traces.safe_pickle import load_data\n"
        rf"print(load_data(b'\x80\x02' + {content!r} + b'.', Budget('dump')).__repr__())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"{printed}\n"


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


@given(DATA, st.sampled_from([2, 4]), st.data())
def test_a_pickle_that_is_cut_off_is_not_taken_for_a_hostile_one(thing: Any, protocol: int, data: Any) -> None:
    content = pickle.dumps({"version": "2.10", "entries": [thing]}, protocol)
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
