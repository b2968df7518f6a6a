"""Which files of a folder are read, and what flight-recorder dumps say of batches."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from crossrank.comm import MOST_RANKS
from crossrank.errors import CrossrankError
from crossrank.tools.cli import main
from crossrank.tools.graph.linking.window_files import RankInput
from crossrank.tools.job.collectives import match_collectives
from crossrank.tools.job.job import Job
from crossrank.tools.job.launches import launches
from crossrank.tools.job.read_rank import RankSources
from crossrank.tools.job.sources import Measurements, find, read, settle
from crossrank.tools.parallel import Fleet
from crossrank.tools.traces.discover import FoundFile
from crossrank.tools.traces.rank_trace import RankTrace
from tests.unit.graph.linking.test_link_command import rank_trace
from tests.unit.traces.flight_entries import flight_dump, flight_entry
from tests.unit.traces.nsight.exports import write_exports

WALL = 1_780_000_000_000_000_000
MS = 1_000_000


def entry(number: int, name: str, at_ms: float, took_ms: float | None, **facts: Any) -> dict[str, Any]:
    """An entry of NCCL's recorder; without `took_ms` a member of a batch, which has no times."""
    made = WALL + round(at_ms * MS)
    times: dict[str, Any] = {"time_created_ns": made, "state": "completed", "op_id": number}
    if took_ms is not None:
        times |= {"time_discovered_started_ns": made, "duration_ms": took_ms}
        times["time_discovered_completed_ns"] = made + round(took_ms * MS)
    sizes = {f"{side}put_sizes": [[1000]] for side in ("in", "out")}
    return flight_entry(number, name, **sizes | times | facts)


def dump(folder: Path, rank: int, entries: list[dict[str, Any]], *, ours: bool = False, **content: Any) -> None:
    if ours:
        content["crossrank"] = {"rank": rank, "world_size": 2, "time_ns": WALL, "clock": {"t": 0, "wall": WALL}}
    (folder / f"rank-{rank}.flight.json").write_text(json.dumps(flight_dump(entries, [0, 1]) | content))


def comms(folder: Path, rank: int, records: list[dict[str, Any]]) -> None:
    header = {"schema": "crossrank-comms 1", "rank": rank, "world_size": 2, "host": "h", "node": "n"}
    group = {"pg": "0", "size": 2, "ranks": [0, 1], "locality": "cross_node"}
    rest = {"c10d": "", "pg": "0", "bytes": 4000}
    lines = [{"header": header | {"clock": {"t": 0, "wall": WALL}}}, {"group": group}]
    lines += [{"id": record["id"]} | rest | record for record in records]
    (folder / f"rank-{rank}.comms.jsonl").write_text("\n".join(map(json.dumps, [*lines, {"end": {}}])) + "\n")


def took_ms(times: RankTrace) -> list[tuple[str, float]]:
    made = launches(Job.match([times]))
    took = (pl.col("ended_ns") - pl.col("began_ns")).fill_null(0) / MS
    return [(made.kinds[kind].op, ms) for kind, ms in made.calls.select("kind", took.round(3)).iter_rows()]


def test_a_batch_uses_one_entry_and_none_of_later_calls(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"id": n, "op": ("send", "recv")[n % 2], "peer": 1, "p2p_seq": 1 + n // 2, "batch": 0, "t": 100 * n}
        for n in range(4)
    ]
    entries = [entry(n, "send 0->1", 0.01 * n, None, p2p_seq_id=1, is_p2p=True) for n in range(4)]
    entries.append(entry(4, "coalesced", 0.05, 9.0, p2p_seq_id=1, input_sizes=[], output_sizes=[]))
    for n in range(1, 6):
        records.append({"id": 3 + n, "op": "all_reduce", "seq": n, "t": MS * n})
        entries.append(entry(4 + n, "all_reduce", n + 0.01, float(n), collective_seq_id=n))
    comms(tmp_path, 0, records)
    dump(tmp_path, 0, entries, ours=True)
    (times,) = read(find([str(tmp_path)]), Fleet())
    assert took_ms(times) == [("send/recv", 9.0), *(("all_reduce", float(n)) for n in range(1, 6))]
    assert not times.unattributed


def test_members_of_a_coalesced_launch_share_its_time(tmp_path: Path) -> None:
    entries = [
        entry(0, "all_gather", 0, 1.0, collective_seq_id=1),
        entry(1, "_allgather_base", 2, None, collective_seq_id=2),
        entry(2, "_allgather_base", 2.1, None, collective_seq_id=2),
        entry(3, "ALLGATHER_coalesced", 2.2, 5.0, collective_seq_id=2, input_sizes=[], output_sizes=[]),
        entry(4, "_allgather_base", 9, None, collective_seq_id=3),  # still waits for its launch
    ]
    dump(tmp_path, 0, entries)
    (times,) = read(find([str(tmp_path)]), Fleet())
    assert took_ms(times) == [("all_gather", 1.0), ("all_gather", 5.0), ("all_gather", 0.0)]
    made = launches(Job.match([times]))
    assert [made.kinds[kind].calls for kind in made.calls["kind"].to_list()] == [1, 2, 1]
    assert made.calls["number"].to_list() == [1, 2, 3]


def test_sends_numbered_by_group_are_matched_by_pair(tmp_path: Path) -> None:
    # Rank 0 sends to 2, 1, 1: torch numbers them 1, 2, 3; rank 1 receives 1 and 2.
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
    sends = [
        entry(n, f"send 0->{to}", 10 * n, 1.0 + n, p2p_seq_id=1 + n, is_p2p=True) for n, to in enumerate((2, 1, 1))
    ]
    receives = [entry(n, "recv 1<-0", 10 * n, 2.0 + n, p2p_seq_id=1 + n, is_p2p=True) for n in range(2)]
    for rank, entries in ((0, sends), (1, receives)):
        dump(tmp_path, rank, entries, pg_config=config)
    found = match_collectives(Job.match(read(find([str(tmp_path)]), Fleet())))
    pairs = {}
    for collective in range(len(found.collectives)):
        rows = found.calls.filter(collective=collective)
        pairs[collective] = sorted(((rows["ended_ns"] - rows["began_ns"]) / MS).to_list())
    assert sorted(pairs.values()) == [[1.0], [2.0, 2.0], [3.0, 3.0]]


def comms_of(**facts: Any) -> RankSources:
    return RankSources(kind="comms", path="comms-0.1", rank=0, **facts)


def alone(kind: str, rank: int | None = 0, window: int = 1, **facts: Any) -> RankSources:
    return RankSources(kind=kind, path=f"{kind}-{rank}.{window}", rank=rank, **facts)


def file(kind: str, rank: int | None = 0, window: int = 1, **facts: Any) -> FoundFile:
    return FoundFile(path=f"{kind}-{rank}.{window}", kind=kind, rank=rank, window=window, **facts)


def report(path: str) -> FoundFile:
    return FoundFile(path=path, kind="report", rank=None)


def pair(rank: int | None, window: int, comms: str | None = None, linked: str | None = None) -> RankInput:
    traces = {"et": f"et-{rank}.{window}", "kineto": f"kineto-{rank}.{window}"}
    return RankInput(rank=rank, window=window, comms=comms, linked=linked, **traces)


BOTH = [file("et"), file("kineto")]
EVERY = [*BOTH, file("comms"), file("flight"), file("linked", window=2), file("et", window=2), file("kineto", window=2)]
LINKED_ALONE = RankInput(rank=0, window=1, et="", kineto="", linked="linked-0.1")
PAIRS = pair(0, 1, "comms-0.1"), pair(0, 2, "comms-0.1", "linked-0.2")
EXPORTED = RankSources(kind="nsight", path="nsight-0.1", rank=0, comms=((0, "comms-0.1"), (2, "comms-2.1")))
RUN_EXPORT = "run: nsys export --type sqlite --output nsight-1.sqlite nsight-1.nsys-rep"
LATER = "kineto-0.2: is a later window of rank 0 without a comms file; give this file alone"


@pytest.mark.parametrize(
    ("files", "asked", "expected"),
    [
        (
            EVERY,
            {},
            Measurements([comms_of(windows=PAIRS, flight="flight-0.1")]),
        ),
        (
            EVERY,
            {"source": "kineto"},
            Measurements([comms_of(windows=PAIRS)]),
        ),
        (EVERY, {"source": "flight"}, Measurements([comms_of(flight="flight-0.1")])),
        (EVERY, {"source": "comms"}, Measurements([comms_of()])),
        ([*BOTH, file("flight")], {}, Measurements([alone("kineto", windows=(pair(0, 1),))])),
        ([*BOTH, file("linked")], {}, Measurements([alone("linked", windows=(pair(0, 1, linked="linked-0.1"),))])),
        ([file("linked"), file("et")], {}, Measurements([alone("linked", windows=(LINKED_ALONE,))])),
        ([*BOTH, file("kineto", window=2)], {}, Measurements([alone("kineto", windows=(pair(0, 1),))], [LATER])),
        ([file("kineto", window=2)], {}, Measurements([alone("kineto", window=2)], [LATER])),
        ([file("flight"), file("et")], {}, Measurements([alone("flight")])),
        ([file("flight", None)], {}, Measurements([alone("flight", None)])),
        ([file("flight", 1), file("flight")], {"ranks": {0, 2}}, Measurements([alone("flight")])),
        ([file("flight"), file("flight", MOST_RANKS)], {}, Measurements([alone("flight")])),
        (
            [
                file("nsight"), file("comms"), file("comms", 2), file("flight", None),
                report("nsight-0.nsys-rep"), report("nsight-1.nsys-rep"),
            ],
            {},
            Measurements([EXPORTED], [f"nsight-1.nsys-rep: is a report, not an export; {RUN_EXPORT}"], [], {0, 2}),
        ),
        (
            [file("flight"), file("kineto", 1, problem="is cut"), file("kineto", 2, problem="is far", left_out=True)],
            {},
            Measurements([alone("flight")], ["kineto-1.1: is cut"], ["kineto-2.1: is far"]),
        ),
        (
            [file("flight"), file("plan"), file("plan", 1), file("plan", 2, problem="is empty")],
            {},
            Measurements(
                [alone("flight")],
                ["plan-2.1: is empty", "plan-0.1: is a plan of crossrank replay, which has no communication times"],
            ),
        ),
    ],
)  # fmt: skip
def test_the_most_informative_files_of_a_rank_are_read(
    files: list[FoundFile], asked: dict[str, Any], expected: Measurements
) -> None:
    assert find(["plan-0.1", "plan-2.1", "nsight-0.1"], files=files, **asked) == expected


@pytest.mark.parametrize(
    ("files", "source", "message"),
    [
        ([file("et")], None, "a, b: has no communication measurements; give a recording, a folder of"),
        ([file("et", problem="bad")], "flight", "measurements for --source flight \\(et-0.1: bad\\); give a rec"),
        ([file("flight"), report("r.qdrep")], "nsight", "^r.qdrep: is a report, not an export; run: "),
        ([report("r.qdrep")], "flight", "^r.qdrep: is a report, not an export; run: "),
        ([file("flight")], "nsight", "has no Nsight export"),
        ([file("flight"), replace(file("flight"), path="x/b")], None, "^flight-0.1 and x/b are both of rank 0;"),
        ([file("flight", None), replace(file("flight", None), path="b")], None, "are both without a rank in their n"),
    ],
)  # fmt: skip
def test_an_invalid_choice_is_refused(files: list[FoundFile], source: str | None, message: str) -> None:
    with pytest.raises(CrossrankError, match=message):
        find(["a", "b"], None, source, files)


def test_exports_exclude_other_files_and_report_them(tmp_path: Path) -> None:
    write_exports(tmp_path, ranks=1, world=2)
    for rank in (0, 1):
        rank_trace(rank).write(tmp_path, rank)
    found = find([str(tmp_path)])
    assert [one.source for one in read(found, Fleet())] == ["nsight"]
    assert found.skipped == [
        "rank 1: has no Nsight export, and crossrank does not mix exports with other files; "
        "--source kineto, flight or comms reads the other files"
    ]
    assert [one.timed_by for one in read(find([str(tmp_path)], source="kineto"), Fleet())] == ["kineto", "kineto"]


@pytest.mark.parametrize("content", [b"", b"nothing of the kind"])
def test_skipped_files_named_like_exports_are_reported(tmp_path: Path, content: bytes) -> None:
    write_exports(tmp_path, ranks=1)
    (tmp_path / "rank_1.sqlite").write_bytes(content)
    found: Measurements = find([str(tmp_path)])
    assert [one.rank for one in read(found, Fleet())] == [0]
    (told,) = found.skipped
    assert told.startswith(f"{tmp_path}/rank_1.sqlite: is ")


def called_at(rank: int | None, *moments: int, **facts: Any) -> RankTrace:
    trace = RankTrace(rank=rank, path=f"file-{rank}", source="comms", **facts)
    for moment in moments:
        trace.calls.append(group=0, signature=0, number=1, id=0, called=moment, began=moment and moment + MS)
    return trace


def test_the_ranks_of_a_run_come_in_order_with_their_problems() -> None:
    found = Measurements([], ["first"], ["left out\udc80"], {0, 1, 7, 8})
    ranks = [
        called_at(rank, WALL, world_size=size) for rank, size in ((2, 0), (MOST_RANKS, 3), (1, MOST_RANKS), (0, None))
    ]
    settled = settle([ranks], found)
    assert [one.rank for one in settled] == [0, 1, 2]
    assert found.skipped == [
        "first",
        f"file-{MOST_RANKS}: rank {MOST_RANKS} is invalid; record it again",
        "rank 7-8: has no Nsight export, and crossrank does not mix exports with other files; "
        "--source kineto, flight or comms reads the other files",
    ]
    assert [one.world_size for one in settled] == [None, MOST_RANKS, None]
    assert [one.notes for one in settled] == [[], [], ["file-2: has an invalid world size, 0", "left out\\udc80"]]
    (alone,) = settle([[called_at(None)]], Measurements([]))
    assert alone.rank == 0


MINUTE = 60_000 * MS


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([called_at(0, WALL, WALL + 5 * MS), called_at(1, WALL + MINUTE + 6 * MS)], None),
        (
            [
                called_at(1, WALL + MINUTE + 7 * MS),
                called_at(0, WALL, WALL + 5 * MS),
                called_at(2, WALL, WALL + MINUTE),
            ],
            "different runs: file-0 ends 60 s before file-1 starts; ",
        ),
        ([called_at(0, 5), called_at(1, WALL)], None),
        ([called_at(0, world_size=2), called_at(1, world_size=4)], "file-0 of 2 ranks, file-1 of 4 ranks; give"),
        ([called_at(0), called_at(None)], "^file-None: its rank is neither in its name nor in its content"),
        ([called_at(0), called_at(0)], "^file-0 and file-0 are both of rank 0"),
        ([], "^first; second; third$"),
        ([called_at(-1)], "^first; second; third$"),
    ],
)
def test_ranks_of_several_runs_are_refused(ranks: list[RankTrace], message: str | None) -> None:
    found = Measurements([], ["first", "second", "third", "fourth"])
    with nullcontext() if message is None else pytest.raises(CrossrankError, match=message):
        settle([ranks], found)


def test_a_report_uses_the_dump_if_the_comms_file_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        dump(tmp_path, rank, [entry(0, "all_reduce", 0, 1, collective_seq_id=1)], ours=True)
        comms(tmp_path, rank, [{"id": 0, "seq": 1, "t": 0, "op": "all_reduce"}])
    (tmp_path / "rank-0.comms.jsonl").write_text('{"no": "header"}\n')
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "page.html"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["diagnosis"]["ranks"] == [0, 1]
    assert any("rank-0.comms.jsonl" in text for text in found["skipped"])
