"""A job in a notebook: what `crossrank.load` gives of every kind of input."""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import polars as pl
import pytest

import crossrank
from crossrank.errors import CrossrankError
from crossrank.recording import CommsFile
from crossrank.tools.api import LoadedJob
from crossrank.tools.output.frames import rank_frames
from crossrank.tools.tables import KEYS, TABLES
from crossrank.tools.traces.rank_trace import HostWaits
from tests.unit.graph.linking.public_traces import needs_traces, public
from tests.unit.job.ranks import Rank
from tests.unit.traces.nsight.exports import write_exports

SEEDS = Path(__file__).parents[1] / "fuzz" / "seeds"
ATTRIBUTES = ("calls", "collectives", "transfers", "arrivals", "steps", "groups", "ranks", "waits", "durations")
HAVE_KEYS = ("calls", "durations", "waits")
"""Tables of one rank that have the columns `KEYS` beside their own once ranks are matched."""


def columns_of(table: str) -> dict[str, Any]:
    keys = {name: one.dtype for name, one in KEYS.items()} if table in HAVE_KEYS else {}
    return TABLES[table].schema | keys


@pytest.fixture(scope="module")
def job() -> LoadedJob:
    return crossrank.load(SEEDS / "recording")


def test_every_table_has_its_documented_columns(job: LoadedJob) -> None:
    for name in ATTRIBUTES:
        assert job.table(name).schema == columns_of(name), name
    assert job.overlap().frame.schema == TABLES["overlap"].schema
    assert job.stragglers().frame.schema == TABLES["stragglers"].schema


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_frame_has_at_most_a_dozen_columns_of_its_table(job: LoadedJob, name: str) -> None:
    frame = getattr(job, name)

    assert len(frame.columns) <= 12
    assert frame.equals(job.table(name).select(frame.columns))


def test_calls_match_the_comms_files(job: LoadedJob) -> None:
    for rank in (0, 1):
        records = list(CommsFile(str(SEEDS / f"recording/rank-{rank}.comms.jsonl.zst")).records())
        own = job.table("calls").filter(rank=rank)
        assert own["call"].to_list() == [one.id for one in records]
        assert own["op"].to_list() == [one.op for one in records]
        assert own["bytes"].to_list() == [one.bytes for one in records]
        assert own["number"].to_list() == [one.seq or one.p2p_seq for one in records]
        assert own["batch"].to_list() == [one.batch for one in records]
        assert own["source"].to_list() == [one.source for one in records]
        assert own["members"].unique().to_list() == ["0-1"]


def test_each_collective_joins_calls_by_number_and_group(job: LoadedJob) -> None:
    key = ["pg", "members", "number", "op"]
    calls = job.table("calls").filter(~pl.col("op").is_in(["send", "recv"]))
    counted = calls.group_by(key).agg(calls=pl.len(), durations=pl.col("duration_ns").count(), size=pl.max("bytes"))
    joined = job.table("collectives").join(counted, on=key, how="full", validate="1:1", coalesce=True)
    assert joined.select((pl.col("calls") == pl.col("expected")).all()).item()
    assert joined.select((pl.col("durations") == pl.col("ranks")).all()).item()
    assert joined.select((pl.col("size") == pl.col("bytes")).all()).item()
    timed = joined.drop_nulls("algbw_gb_per_s")
    assert timed.select((pl.col("bytes") / pl.col("time_ns") == pl.col("algbw_gb_per_s")).all()).item()


def test_durations_and_steps_end_after_their_start(job: LoadedJob) -> None:
    for table in (job.durations, job.steps.drop_nulls("duration_ns")):
        assert len(table) > 0
        assert (table["ended_ns"] - table["began_ns"] == table["duration_ns"]).all()
        assert (table["duration_ns"] >= 0).all()


def test_each_wait_has_its_call() -> None:
    trace = Rank(0).call(100, 500, source="a.py:1").call(600, 700, "all_gather", source=None).times
    times = array("q", [5, 6, 7]), array("q", [9, 9, 9])
    trace.host_waits = HostWaits(array("q", [1, 0, -1]), *times, array("B", [0, 2, 1]))
    columns = ("call", "op", "source", "waited_in", "began_ns", "duration_ns")
    assert rank_frames.waits(trace, rank_frames.calls(trace)).select(columns).rows() == [
        (1, "all_gather", None, "wait", 5, 4),
        (0, "all_reduce", "a.py:1", "launch", 6, 3),
        (None, None, None, "wait_tensor", 7, 2),
    ]


def test_answers_match_the_commands_and_have_figures(job: LoadedJob) -> None:
    bandwidth = job.bandwidth(by=["op"])
    collectives = job.table("collectives").drop_nulls("time_ns").group_by("op").agg(pl.col("time_ns").sum() / 1000)
    transfers = job.table("transfers").drop_nulls("time_ns")["time_ns"].sum() / 1000
    totals = dict(bandwidth.frame.select("op", "time_us_total").iter_rows())
    for op, us in collectives.iter_rows():
        assert totals.pop(op) == pytest.approx(us, abs=0.01)
    assert sum(totals.values()) == pytest.approx(transfers, abs=0.01)
    overlap = job.overlap().frame
    parts = pl.sum_horizontal("computation_ns", "exposed_ns", "profiler_ns", "memory_ns", "idle_ns")
    assert overlap.select((parts == pl.col("duration_ns")).all()).item()
    assert job.diagnose().text == "ok"
    for answer in (bandwidth, job.overlap(), job.stragglers(), job.diagnose()):
        figure = answer.plot()
        assert isinstance(figure, go.Figure)
        assert len(answer.to_pandas()) == len(answer)
        assert answer._repr_html_()
    names = {"computation", "exposed communication", "waiting for other profilers to start", "copies", "idle"}
    assert {trace.name for trace in job.overlap().plot().data} == names


def test_graph_links_unlinked_traces(job: LoadedJob) -> None:
    graph = job.graph(1)
    assert graph.rank == 1
    assert {one.record.id for one in graph.communications} <= set(job.table("calls").filter(rank=1)["call"])


def test_an_unavailable_answer_is_empty_and_gives_the_reason(job: LoadedJob) -> None:
    graph = job.graph(1, window=7)
    assert (graph.host, graph.activities, graph.communications) == ([], [], [])
    assert repr(graph) == graph.text
    assert graph.text == (
        "no graph: rank 1 has no execution trace with a Kineto trace of window 7; record one with "
        "TRACING_WINDOW=START:STOP"
    )
    dumps = crossrank.load(SEEDS / "flight")
    assert len(dumps.overlap()) == 0
    assert dumps.overlap().text == "no overlap: the recording has no window; record one with TRACING_WINDOW=START:STOP"
    assert dumps.overlap().plot()


@needs_traces
def test_a_bandwidth_table_always_has_all_columns() -> None:
    untimed, timed = crossrank.load(public("flight_real")).bandwidth(), crossrank.load(public("dlrm_8gpu")).bandwidth()
    assert len(untimed) == 0
    assert untimed.frame.schema == timed.frame.schema
    assert (timed.frame.schema["op"], timed.frame.schema["busbw_gb_per_s_p50"]) == (pl.String(), pl.Float64())
    assert untimed.plot()


@needs_traces
def test_one_trace_without_comms_files_has_no_diagnosis_or_stragglers() -> None:
    alone = crossrank.load(public("nccl_2gpu"))
    assert len(alone.diagnose()) == 0
    assert alone.diagnose().text == ("no diagnosis: there is no usable comms file or flight-recorder dump")
    assert alone.diagnose().plot()
    assert alone.stragglers().frame.select("collectives", "last", "waited_for_ns").rows() == [(0, None, None)]
    assert alone.stragglers().text.startswith("no stragglers: ranks cannot be compared")
    assert alone.stragglers().plot()


@needs_traces
@pytest.mark.parametrize(
    "trace",
    [
        *("dlrm_8gpu", "nccl_2gpu", "kineto_mi300", "kineto_deepep", "nsight_h100"),
        *("flight/clean", "flight/gloo_clean", "flight/p2p_single_clean", "flight_real/gpu_error", "compare/control"),
        "nccl_live/healthy_ddp.lazy/rec",
    ],
)
def test_one_key_joins_the_tables_of_any_input(trace: str) -> None:
    job = crossrank.load(public(trace))
    made = pl.concat([one.select("collective", "group") for one in (job.table("collectives"), job.table("transfers"))])
    assert made["collective"].is_unique().all()
    joined = job.table("calls").join(made, on="collective", how="left", validate="m:1")
    assert joined["group"].to_list() == joined["group_right"].to_list()
    assert joined["group"].null_count() == 0
    assert len(job.table("calls").join(job.groups, on="group", validate="m:1")) == len(job.table("calls"))
    assert job.waits["collective"].null_count() == 0
    assert set(job.arrivals["collective"]) == set(made["collective"])
    assert len(job.table("calls").join(job.arrivals, on=["rank", "call"], validate="1:1")) == len(job.arrivals)


@needs_traces
@pytest.mark.parametrize(
    ("trace", "unknown"),
    [
        *(("dlrm_8gpu", 64), ("nccl_2gpu", 0), ("kineto_mi300", 5), ("kineto_deepep", 36), ("nsight_h100", 64)),
        *(("compare/control", 60), ("flight/clean", 0), ("flight/gloo_clean", 0)),
    ],
)
def test_an_unknown_size_is_null_and_not_0(trace: str, unknown: int) -> None:
    job = crossrank.load(public(trace))
    assert job.table("calls")["bytes"].null_count() == unknown
    assert set(job.table("calls").filter(bytes=0)["op"]) <= {"barrier"}
    sums = job.table("calls").group_by("group").agg(pl.sum("bytes"), unknown=pl.col("bytes").null_count())
    of_groups = job.groups.filter(pl.col("calls") > 0).join(sums, on="group", validate="1:1")
    for row in of_groups.iter_rows(named=True):
        assert row["bytes"] == (None if row["unknown"] else row["bytes_right"])


@needs_traces
def test_a_group_with_unknown_members_has_no_size() -> None:
    """A trace of rank 0 of 64, of which the kernels alone say that it communicated."""
    assert crossrank.load(public("kineto_deepep")).groups.select("members", "size").rows() == [(None, None)]


@needs_traces
def test_one_pivot_gives_a_heat_map_of_lateness() -> None:
    arrivals = crossrank.load(public("dlrm_8gpu")).arrivals
    late = arrivals.pivot("collective", index="rank", values="late_ns")
    assert late.shape == (8, 9)
    assert late.sort("rank")["4"].to_list() == [61_000, 0, 109_000, 16_000, 212_000, 211_000, 94_000, 221_000]
    sums = arrivals.drop_nulls().with_columns(sum=pl.col("late_ns") + pl.col("waiting_ns"))
    assert sums.group_by("collective").agg(pl.n_unique("sum"))["sum"].unique().to_list() == [1]


def test_files_are_read_when_a_table_is_first_used() -> None:
    job = crossrank.load(os.fspath(SEEDS / "recording"), ranks=range(1))
    assert "not read yet" in repr(job)
    assert job.ranks["rank"].to_list() == [0]
    assert "read        1 rank," in repr(job)
    assert "ranks       0\n" in repr(job)


def test_frames_convert_to_arrow_and_pandas(job: LoadedJob) -> None:
    import pyarrow

    assert pyarrow.table(job.bandwidth()).num_rows == len(job.bandwidth())
    assert job.calls.to_pandas()["op"].tolist() == job.calls["op"].to_list()


def test_dumps_and_exports_of_nsight_systems_give_the_same_tables(tmp_path: Path) -> None:
    dumps = crossrank.load(SEEDS / "flight")
    assert dumps.table("calls").schema == columns_of("calls")
    assert set(dumps.table("calls")["timed_by"].drop_nulls()) <= {"flight"}
    assert dumps.diagnose().text == "incomplete"  # a part of a larger job
    write_exports(tmp_path, 3)
    exports = crossrank.load([str(path) for path in sorted(tmp_path.glob("*.sqlite"))])
    assert exports.durations["timed_by"].unique().to_list() == ["nsight"]
    assert exports.table("collectives")["busbw_gb_per_s"].max() is not None
    assert exports.diagnose().text.startswith("no diagnosis: there is no usable comms file")


@needs_traces
def test_kineto_traces_give_the_same_tables() -> None:
    job = crossrank.load([public(f"dlrm_8gpu/rank-{rank}.kineto.json.gz") for rank in range(8)])
    assert (len(job.table("calls")), len(job.table("collectives"))) == (64, 8)
    assert job.overlap().frame["waits_for"].mode().item() == 7
    assert job.stragglers().frame.sort("waited_for_ns")["rank"].to_list()[-1] == 7


@pytest.mark.parametrize(
    ("attempt", "said"),
    [
        (lambda: crossrank.load("nowhere"), "nowhere"),
        (lambda: crossrank.load(SEEDS / "recording", ranks=[5]), "has none of the ranks"),
        (lambda: crossrank.load(SEEDS / "recording").bandwidth(by=["colour"]), "'colour' is not one of op, group"),
    ],
)
def test_an_invalid_request_gives_one_line(attempt: object, said: str) -> None:
    assert callable(attempt)
    with pytest.raises(CrossrankError, match=said):
        attempt()


@needs_traces
def test_each_answer_has_a_sentence_and_notes_have_the_ranks_that_they_are_about() -> None:
    job = crossrank.load(public("dlrm_8gpu"))
    assert job.bandwidth().text.startswith("8 timed collectives and transfers took 0.227 ms; all_reduce of group ")
    assert job.stragglers().text.startswith(
        "others waited most for rank 7: 1.621 ms (waits at the same time count once); it was last in 4 of the 7 "
    )
    shares = (
        "6.6 % computation, 16.1 % exposed communication, 20.5 % waiting for other profilers to start, 0.1 % copies, "
        "56.6 % idle"
    )
    assert job.overlap().text == f"of 8 traced steps or windows: {shares}"
    skipped = "64 GPU activities launched before the Kineto trace are skipped (each of 2 ranks: 1,3)"
    assert skipped in job.notes
