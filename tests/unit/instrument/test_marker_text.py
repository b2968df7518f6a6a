"""Texts of markers stay short, and the reader of exports understands what is left of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossrank.instrument.write.nvtx_markers import MAX_BYTES, shortened
from crossrank.rank_runs import from_runs, to_runs
from crossrank.tools.traces.nsight.markers import CALL, GROUP, meaning_of
from crossrank.tools.traces.nsight.read import read_export
from crossrank.tools.traces.nsight.rows import LEFT_OUT
from tests.unit.traces.nsight.exports import ExportFile

MANY = 16_384


def text_of(fields: dict[str, Any]) -> str:
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False)


def group_text(ranks: list[int], desc: str = "mesh") -> str:
    return text_of({"group": {"pg": "7", "size": len(ranks), "ranks": ranks, "desc": desc, "backend": "nccl"}})


def call_text(**more: Any) -> str:
    fields = {"op": "all_to_all", "pg": "0", "bytes": 4_000_000, "dtype": "float32", "c10d": "alltoall_base_"}
    return text_of(fields | more | {"locality": "cross_node"})


def classic_text(ranks: list[int]) -> str:
    return text_of({"name": "all_reduce", "rank": 3, "message_size": 16, "group_ranks": ranks, "correlation_id": 5})


def shuffled(count: int) -> list[int]:
    return random.Random(7).sample(range(count), count)


MESHES = {
    "world": list(range(MANY)),
    "every eighth": list(range(3, 8 * MANY, 8)),
    "blocks of eight": [64 * block + place for block in range(MANY // 8) for place in range(8)],
    "backwards": list(range(MANY - 1, -1, -1)),
}


@pytest.mark.parametrize("ranks", MESHES.values(), ids=MESHES)
def test_a_group_of_any_mesh_keeps_all_its_ranks(ranks: list[int]) -> None:
    text = shortened(group_text(ranks))
    assert len(text) <= MAX_BYTES
    meaning = meaning_of(text)
    assert meaning is not None
    assert meaning.group is not None
    assert (meaning.what, meaning.group.pg, meaning.group.size) == (GROUP, "7", MANY)
    assert meaning.group.ranks == ranks
    assert not meaning.left_out


def test_an_unordered_group_keeps_its_size_and_counts_omitted_ranks() -> None:
    text = shortened(group_text(shuffled(MANY)))
    assert json.loads(text)["group"]["left_out"] == {"ranks": MANY}
    meaning = meaning_of(text)
    assert meaning is not None
    assert meaning.group is not None
    assert (meaning.group.size, meaning.group.ranks, meaning.left_out) == (MANY, None, True)


def test_a_description_of_any_length_is_cut_from_the_left() -> None:
    text = shortened(group_text([0, 1], desc="é" * MAX_BYTES + "end"))
    assert len(text.encode()) <= MAX_BYTES
    group = json.loads(text)["group"]
    assert (group["desc"][:4], group["desc"][-4:], group["rank_runs"]) == ("...é", "éend", [[0, 2, 1]])


def test_too_long_splits_are_counted_and_the_sizes_stay() -> None:
    uneven = [1 + rank % 997 for rank in range(MANY)]
    shape = [[sum(uneven), 64]]
    text = shortened(call_text(**{"in": shape, "out": shape, "in_split": uneven, "out_split": uneven[::-1]}))
    assert len(text) <= MAX_BYTES
    assert text.startswith('{"op":"all_to_all","pg":"0","bytes":4000000,"dtype":"float32"')
    assert "in_split" in json.loads(text)["left_out"]
    meaning = meaning_of(text)
    assert meaning is not None
    assert meaning.record is not None
    assert (meaning.what, meaning.record.bytes, meaning.record.inputs) == (CALL, 4_000_000, shape)
    assert (meaning.sizeless, meaning.left_out) == (False, True)


@pytest.mark.parametrize(
    ("ranks", "named"), [(list(range(5, MANY + 5)), f"5-{MANY + 4}"), (shuffled(MANY), "16384 ranks")]
)
def test_a_text_of_the_older_shim_for_many_ranks_stays_readable(ranks: list[int], named: str) -> None:
    text = shortened(classic_text(ranks))
    assert len(text) <= MAX_BYTES
    meaning = meaning_of(text)
    assert meaning is not None
    assert meaning.record is not None
    assert (meaning.record.op, meaning.record.bytes, meaning.record.pg) == ("all_reduce", 16, named)


def test_calls_without_splits_are_counted_if_no_recording_has_them(tmp_path: Path) -> None:
    export = ExportFile()
    process = export.process(70)
    process.identity(0)
    process.marker(1000, 1100, 1, op="all_to_all", left_out={"in_split": MANY})
    process.kernel(1050, 1500, 1900, name="ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)")
    process.event(34, 1, None, shortened(group_text(shuffled(MANY))))
    (times,) = read_export(str(export.write(tmp_path / "a.sqlite")), None, {})
    assert times.unattributed == {LEFT_OUT: 1}
    assert [note.partition(": ")[2] for note in times.notes] == [
        "1 group(s) have more members than fit into a marker; the recording has them"
    ]


@given(st.lists(st.integers(0, (1 << 20) - 1), max_size=60, unique=True))
def test_runs_keep_all_ranks_in_order(ranks: list[int]) -> None:
    assert from_runs(to_runs(ranks)) == ranks


@pytest.mark.parametrize("runs", [[(0, 1 << 40, 1)], [(0, 0, 1)], [(5, 3, -4)], [(0, 2, 1 << 30)]])
def test_invalid_runs_give_no_ranks(runs: list[tuple[int, int, int]]) -> None:
    assert from_runs(runs) is None


@given(
    st.dictionaries(
        st.sampled_from(["in", "out", "in_split", "out_split", "source", "api", "pg"]),
        st.one_of(
            st.integers(0, 90_000).map(lambda count: "s" * count), st.integers(0, 30_000).map(lambda count: [7] * count)
        ),
    )
)
def test_every_text_fits_the_limit_of_tools(more: dict[str, Any]) -> None:
    text = call_text(**more)
    short = shortened(text)
    assert len(short.encode()) <= MAX_BYTES
    assert (short == text) == (len(text.encode()) <= MAX_BYTES)
    assert json.loads(short)["op"] == "all_to_all"
