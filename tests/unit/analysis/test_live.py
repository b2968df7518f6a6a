"""What a look at a running job says, of lines that its ranks have written."""

from __future__ import annotations

import json
from typing import Any

import polars as pl
import pytest

from crossrank.tools.analysis.diagnosis.findings import Diagnosis, Finding
from crossrank.tools.analysis.live import LiveFile, Snapshot, snapshot
from crossrank.tools.output.watch import as_text, hang_text, tables
from crossrank.tools.tables import ANSWERS
from crossrank.tools.traces.growing import Growth

MS = 1_000_000
SECOND = 1000 * MS
WALL = 1_780_000_000 * SECOND


def header(rank: int, node: str = "n") -> dict[str, Any]:
    about = {"schema": "crossrank-comms 1", "rank": rank, "world_size": 2, "host": node, "node": node}
    return {"header": about | {"clock": {"t": 0, "wall": WALL}}}


UNKNOWN_LAST = (
    "the last rank of 1 group is unknown: clocks of several nodes are not aligned; record with TRACING_TIMING=1, which "
    "measures durations"
)
GROUP = {"group": {"pg": "0", "size": 2, "ranks": [0, 1], "desc": "default_pg"}}


def call(number: int, ms: float, **more: object) -> dict[str, Any]:
    about = {"id": number, "op": "all_reduce", "c10d": "allreduce_", "pg": "0", "bytes": 1_000_000, "seq": number}
    return about | {"t": round(ms * MS)} | more


def clock(ms: float) -> dict[str, Any]:
    return {"clock": {"t": round(ms * MS), "wall": WALL + round(ms * MS)}}


def growth(*lines: dict[str, Any], recent: tuple[dict[str, Any], ...] = ()) -> Growth:
    def text(found: tuple[dict[str, Any], ...]) -> bytes:
        return b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in found)

    return Growth(settled=text(lines), recent=text(recent))


def rank(number: int, *lines: dict[str, Any], node: str = "n") -> LiveFile:
    file = LiveFile(2)
    file.take(growth(header(number, node), GROUP, *lines))
    return file


def look(*files: LiveFile, at_ms: float, hang: str = "") -> Snapshot:
    contents = {one.header.rank: one for one in (file.content for file in files) if one.header is not None}
    return snapshot("run", contents, WALL / 1e9 + at_ms / 1e3, hang)


def test_groups_have_totals_rates_and_a_last_rank() -> None:
    took, slow = ([{"ran": {"id": number, "t": 0, "took": ms * MS}} for number in (1, 2, 3)] for ms in (2, 4))
    found = look(
        rank(0, call(1, 0), call(2, 500), call(3, 1000), *slow),
        rank(1, call(1, 3), call(2, 505), call(3, 999), *took),
        at_ms=1000,
    )
    rates: dict[str, Any] = {"calls_per_s": 6.0, "bytes_per_s": 6_000_000, "busbw_gb_per_s": 0.5}
    last: dict[str, Any] = {"last_rank": 1, "last_share": 0.6667, "late_ms": 3.0}
    totals = {"pg": "0", "desc": "default_pg", "size": 2, "calls": 6, "bytes": 6_000_000}
    assert found.groups == [totals | rates | last]
    for name, rows in (("live_groups", found.groups), ("live_ranks", found.ranks)):
        table = ANSWERS[name]
        assert table.rows(pl.DataFrame(rows, table.schema)) == rows


def on_two_nodes(**ran: object) -> Snapshot:
    """Rank 1 is 2 ms late in each of three calls, and its clock is 30 ms ahead."""
    numbers = (1, 2, 3)

    def durations(ms: int) -> list[dict[str, Any]]:
        return [{"ran": {"id": number, "t": 0, "took": ms * MS} | ran} for number in numbers if ran]

    return look(
        rank(0, *(call(number, 100 * number) for number in numbers), *durations(5)),
        rank(1, *(call(number, 100 * number + 32) for number in numbers), *durations(3), node="m"),
        at_ms=400,
    )


def test_durations_show_the_last_rank_where_clocks_differ() -> None:
    (group,) = on_two_nodes(on_device=True).groups
    assert (group["last_rank"], group["last_share"], group["late_ms"]) == (1, 1.0, 2.0)


def test_the_last_rank_is_unknown_if_clocks_differ_and_nothing_is_timed() -> None:
    found = on_two_nodes()
    (group,) = found.groups
    assert (group["last_rank"], group["last_share"], group["late_ms"]) == (None, None, None)
    assert found.notes == [UNKNOWN_LAST]


@pytest.mark.parametrize("on_device", [True, False])
def test_on_one_host_a_device_compares_durations_and_a_host_its_calls(on_device: bool) -> None:
    def durations(ms: int) -> dict[str, Any]:
        return {"ran": {"id": 1, "t": 0, "took": ms * MS, "on_device": on_device}}

    (group,) = look(rank(0, call(1, 100), durations(9)), rank(1, call(1, 107), durations(5)), at_ms=200).groups
    assert (group["last_rank"], group["late_ms"]) == (1, 4.0 if on_device else 7.0)


def test_the_rate_of_a_single_call_is_unknown() -> None:
    found = look(rank(0, call(1, 0)), rank(1, call(1, 3)), at_ms=1000)
    (group,) = found.groups
    assert (group["calls"], group["calls_per_s"], group["bytes_per_s"]) == (2, None, None)
    (_, groups), _ = tables(found, 10)
    assert [groups.rows[0][groups.columns.index(f"#{name}")] for name in ("calls/s", "bytes/s")] == ["-", "-"]


def test_a_group_made_again_is_a_row_of_its_own() -> None:
    again = {"group": GROUP["group"] | {"epoch": 1}}
    lines = call(1, 0), call(2, 1), call(1, 2, epoch=1)
    found = look(rank(0, again, *lines), rank(1, again, *lines), at_ms=10)
    assert [(row["pg"], row["calls"]) for row in found.groups] == [("0", 4), ("0 (no. 2)", 2)]


@pytest.mark.parametrize("number_of_calls", [64, 200, 3000])
def test_the_bandwidth_does_not_depend_on_the_order_of_operations(number_of_calls: int) -> None:
    """Of many calls some are looked at; every second one would be barriers alone here."""
    numbers = range(1, number_of_calls + 1)
    lines = [call(number, number, op="all_reduce" if number % 2 else "barrier") for number in numbers]
    took = [{"ran": {"id": number, "t": 0, "took": 2 * MS}} for number in numbers]
    found = look(rank(0, *lines, *took), rank(1, *lines, *took), at_ms=number_of_calls)
    assert found.groups[0]["busbw_gb_per_s"] == 0.5


def test_ranks_have_a_step_its_duration_exposed_share_and_silence() -> None:
    steps = [{"step": {"step": number, "t": number * 100 * MS}} for number in (1, 2, 3, 4)]
    waits = [{"wait": {"t": t * MS, "took": 50 * MS, "thread": 1}} for t in (100, 200, 300, 320)]
    one = rank(0, *steps, *waits, call(1, 390), clock(400))
    other = rank(1, *steps[:3], call(1, 200), {"end": {"reason": "SIGTERM"}}, node="m")
    found = look(one, other, at_ms=2400)
    assert found.step == [3, 4]
    assert found.step_ms == 100.0
    first, second = found.ranks
    assert (first["step"], first["step_ms"], first["silent_s"], first["unheard_s"], first["ended"]) == (
        4,
        100.0,
        2.0,
        2.0,
        None,
    )
    assert first["exposed_share"] == pytest.approx((50 + 50 + 70) / 300, abs=1e-4)
    assert (second["step"], second["silent_s"], second["unheard_s"], second["ended"]) == (3, None, None, "SIGTERM")
    assert second["exposed_share"] is None
    assert found.notes == [UNKNOWN_LAST]


def test_unsettled_records_count_once() -> None:
    file = rank(0)
    for _ in range(3):
        file.take(growth(recent=(call(1, 0), call(2, 10), clock(20))))
        assert (file.content.count["0"], file.content.bytes["0"]) == (2, 2_000_000)
    file.take(growth(call(1, 0), recent=(call(2, 10), call(3, 15), clock(20))))
    assert (file.content.count["0"], file.content.bytes["0"]) == (3, 3_000_000)
    assert [one.seq for one in file.content.calls] == [1, 2, 3]


def test_old_calls_count_but_are_not_recent() -> None:
    file = rank(0, call(1, 0), call(2, 5_000), call(3, 14_000), clock(14_500))
    assert [one.seq for one in file.content.calls] == [2, 3]
    assert (file.content.count["0"], file.content.bytes["0"]) == (3, 3_000_000)


def test_a_restarted_file_replaces_the_old_content() -> None:
    file = rank(0, call(1, 0))
    again = growth(header(0), GROUP, call(1, 50))
    again.begins_anew = True
    file.take(again)
    assert (file.content.count["0"], file.content.bytes["0"]) == (1, 1_000_000)


def test_broken_lines_are_counted_and_skipped() -> None:
    file = LiveFile(2)
    good = growth(header(0), GROUP, call(1, 0)).settled
    file.take(Growth(settled=good + b'{"id":"x"}\n{"id":2,\n' + growth(call(3, 1)).settled))
    assert (file.content.count["0"], file.content.bytes["0"]) == (2, 2_000_000)
    assert look(file, at_ms=0).notes == ["2 lines of the files could not be read"]


def test_the_text_names_missing_silent_or_hung_ranks() -> None:
    hang = "missing_rank: 1 rank wait in all_reduce #1 for rank 1"
    text = as_text(look(rank(0, call(1, 0), clock(10)), at_ms=20_000, hang=hang), 16)
    assert "ranks      1 of 2, rank 1 without a file; 1 no data" in text
    assert f"hang       {hang}" in text
    assert "20.0 s ago  no data for 20 s" in text
    assert "all_reduce" in text


def test_the_most_conspicuous_of_many_ranks_are_shown() -> None:
    files = [rank(number, {"step": {"step": 7 - (number == 33), "t": 10}}, clock(20)) for number in range(50)]
    text = as_text(look(*files, at_ms=30), 3)
    assert "Most conspicuous of 50" in text
    assert [line.split()[0] for line in text.splitlines()[-3:]] == ["0", "1", "33"]


def test_a_verdict_names_the_call_and_the_culprit_in_one_line() -> None:
    def verdict(**finding: Any) -> Diagnosis:
        found = Finding(kind="p2p_unmatched", pg=["0", "default_pg"], pg_ranks=[0, 1], **finding)
        about: dict[str, Any] = {"suspect_ranks": [], "consequences": [], "advisory": []}
        return Diagnosis(verdict="error", world_size=2, ranks=[0, 1], findings=[found], **about)

    stuck = {"op": "send", "p2p_seq_id": 4, "waiting_ranks": [0]}
    assert hang_text(verdict(**stuck, culprit_ranks=[1])) == "p2p_unmatched: 1 rank wait in send p2p #4 for rank 1"
    assert hang_text(verdict(**stuck)) == "p2p_unmatched: 1 rank wait in send p2p #4 for nobody in particular"
    assert hang_text(verdict(op="send", p2p_seq_id=4)) == ""
