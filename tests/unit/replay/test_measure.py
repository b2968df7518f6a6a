"""What follows from the times of all ranks: waiting, the collective itself, bandwidths, distance to the recording."""

from __future__ import annotations

import csv

import pytest

from crossrank.replay.plan.plan import NOT_IN_STEPS, LeftOut, Plan
from crossrank.replay.results.measure import compare, end_to_end_ns, measure, table
from crossrank.replay.results.replay_report import make_report, to_csv, write_report
from crossrank.replay.run.messages import RankResult
from crossrank.tools.output.replay import print_report
from crossrank.tools.traces.replayed import CheckResult, Percentiles, Settings, read_report
from tests.unit.replay.plans import irecv, isend, plan_of, record, recv
from tests.unit.replay.ranks import result


def job() -> tuple[Plan, list[RankResult]]:
    """Two ranks with one all_reduce of 4,000 bytes; rank 1's clock is 1 s behind, and it comes 300 ns late."""
    call = record("all_reduce", inputs=[[1000]], outputs=[[1000]], bytes=4000)
    plan = plan_of([call], [call])
    late = 1_000_000_000
    return plan, [
        result(0, [(1000, 1100, 2300)], [(5000, 5100, 6000)]),
        result(1, [(1300 - late, 1350 - late, 2200 - late)], [(5000 - late, 5050 - late, 6000 - late)], offset=late),
    ]


def test_times_share_one_clock_and_waits_are_separate() -> None:
    plan, results = job()
    measured = measure(plan, results).select("rank", "pass", "completion", "waiting", "issue", "time")
    assert measured.rows() == [
        (0, 0, 1300, 300, 100, 1000),
        (0, 1, 1000, 0, 100, 1000),
        (1, 0, 900, 0, 50, 1000),
        (1, 1, 1000, 0, 50, 1000),
    ]
    assert end_to_end_ns(results) == [1300, 1000]
    assert end_to_end_ns(results[:1]) == [1300, 1000]


def test_bandwidths_follow_nccl_tests() -> None:
    plan, results = job()
    (row,) = table(measure(plan, results))
    assert row.algbw_gb_per_s == Percentiles(p50=4.0, p95=4.0, p99=4.0)
    assert row.busbw_gb_per_s == Percentiles(p50=4.0, p95=4.0, p99=4.0)  # 2 (n - 1) / n = 1 for two ranks
    assert (row.calls, row.bytes, row.size_from, row.size_to) == (1, 4000, 1025, 4096)
    assert row.time_us == Percentiles(p50=1.0, p95=1.0, p99=1.0)


def test_a_send_and_its_receive_are_one_row() -> None:
    plan = plan_of([isend(1)], [recv(0)])
    measured = measure(plan, [result(0, [(0, 10, 100)]), result(1, [(20, 30, 140)])])
    rows = table(measured)
    assert [(row.op, row.calls, row.bytes, row.time_us.p50) for row in rows] == [("send/recv", 1, 16, 0.12)]
    assert rows[0].algbw_gb_per_s == Percentiles(p50=16 / 120, p95=16 / 120, p99=16 / 120)
    plan = plan_of(*[[isend(1 - rank, batch=0), irecv(1 - rank, batch=0)] for rank in (0, 1)])
    (row,) = table(measure(plan, [result(rank, [(0, 10, 100)] * 2) for rank in (0, 1)]))
    assert (row.op, row.calls, row.bytes, row.algbw_gb_per_s) == ("send/recv, batched", 2, 32, None)


def two_calls(*second: int) -> tuple[Plan, list[RankResult]]:
    """Two ranks with two all_reduces of 4,000 bytes; `second` has the time of the second one in each pass."""
    call = record("all_reduce", inputs=[[1000]], outputs=[[1000]], bytes=4000)
    plan = plan_of([call, call], [call, call])
    passes = [[(1000, 1100, 2000), (3000, 3100, 3000 + took)] for took in second]
    return plan, [result(rank, *passes) for rank in (0, 1)]


def test_a_time_of_zero_is_unknown_and_has_no_bandwidth() -> None:
    plan, results = two_calls(0, 0)
    (row,) = table(measure(plan, results))
    assert row.algbw_gb_per_s == Percentiles(p50=4.0, p95=4.0, p99=4.0)
    assert row.unknown_times == 2
    for one in results:  # both calls took no time
        for passed in one.passes:
            passed.completed = passed.began
    (row,) = table(measure(plan, results))
    assert (row.algbw_gb_per_s, row.busbw_gb_per_s, row.unknown_times) == (None, None, 4)


def test_a_time_below_the_resolution_of_a_gpu_is_unknown() -> None:
    plan, results = two_calls(499, 500)
    (row,) = table(measure(plan, results))
    assert row.unknown_times == 0
    for one in results:
        one.device = "NVIDIA H100"
    (row,) = table(measure(plan, results))
    assert row.unknown_times == 1
    assert row.algbw_gb_per_s is not None
    assert row.algbw_gb_per_s.p99 <= row.algbw_gb_per_s.p50 <= 4000 / 500


def test_unknown_times_are_printed_and_have_empty_cells(capsys: pytest.CaptureFixture[str]) -> None:
    plan, results = two_calls(0, 0)
    settings = Settings(backend="gloo", device="cpu", repeats=2)
    report, measured = make_report(plan, settings, results, what_if={}, variables={})
    print_report(report)
    line = "  all_reduce: 2 times of all passes are too short to measure, and have no bandwidth"
    assert line in capsys.readouterr().out.splitlines()
    rows = csv.DictReader(to_csv(plan, measured).splitlines())
    assert [row["time_us_p50"] for row in rows] == ["1.0", "", "1.0", ""]


def test_a_call_without_a_known_time_is_not_compared() -> None:
    plan, results = two_calls(0, 0)
    for rank in plan.ranks:
        for call in rank.calls:
            call.took_ns = 2000
    found = compare(plan, measure(plan, results), results)
    assert (found.calls, found.without_time) == (2, 2)
    assert [(row.calls, row.ratio, row.collective_replayed_us) for row in found.rows] == [(2, 0.5, 1.0)]


def test_a_barrier_has_no_bandwidth() -> None:
    plan = plan_of([record("barrier")], [record("barrier")])
    measured = measure(plan, [result(0, [(0, 1, 9)]), result(1, [(0, 1, 9)])])
    (row,) = table(measured)
    assert row.algbw_gb_per_s is row.busbw_gb_per_s is None


def test_a_replay_is_compared_with_its_recording() -> None:
    plan, results = job()
    plan.ranks[0].calls[0].took_ns = 2300  # waited 1,500 for rank 1
    plan.ranks[1].calls[0].took_ns = 800
    found = compare(plan, measure(plan, results), results)
    assert (found.calls, found.without_time) == (2, 0)
    (row,) = found.rows
    assert (row.recorded_us, row.replayed_us) == (1.55, 1.05)
    assert row.error_p50 == pytest.approx((0.5 + (950 - 800) / 800) / 2)
    assert (row.collective_recorded_us, row.collective_replayed_us, row.collective_error_p50) == (0.8, 1.0, 0.25)


def test_a_call_without_a_recorded_time_is_counted() -> None:
    plan, results = job()
    plan.ranks[1].calls[0].took_ns = 800
    found = compare(plan, measure(plan, results), results)
    assert (found.calls, found.without_time) == (1, 1)
    assert found.rows[0].collective_recorded_us is None


def test_the_recorded_total_time_is_known_only_if_all_of_it_is_replayed() -> None:
    calls = [record("all_reduce"), record("broadcast", root=0)]
    plan = plan_of(calls, calls)
    for rank, took in zip(plan.ranks, ((7000, None), (100, 4000)), strict=True):
        for call, ns in zip(rank.calls, took, strict=True):
            call.took_ns = ns
    results = [result(rank, [(0, 10, 500), (1600, 1610, 2500 + rank)]) for rank in (0, 1)]

    def spans() -> tuple[float | None, float]:
        found = compare(plan, measure(plan, results), results)
        return found.recorded_end_to_end_us, found.replayed_end_to_end_us

    found = compare(plan, measure(plan, results), results)
    assert (found.calls, found.without_time) == (3, 1)
    assert {row.op: row.collective_recorded_us for row in found.rows} == {"all_reduce": 0.1, "broadcast": None}
    assert spans() == (7.0, 2.501)
    plan.ranks[0].left_out = {NOT_IN_STEPS: LeftOut(calls=1)}
    assert spans() == (7.0, 2.501)
    plan.ranks[0].left_out["another"] = LeftOut(calls=1)
    assert spans() == (None, 2.501)
    plan.ranks[0].left_out, plan.damage = {}, ["a line"]
    assert spans() == (None, 2.501)


def test_the_table_of_calls_has_one_line_per_call_and_rank() -> None:
    plan, results = job()
    results[0].cpu_s, results[1].check = 6e-6, CheckResult(tensors=3, failures=[])
    settings = Settings(backend="gloo", device="cpu", repeats=2)
    report, measured = make_report(plan, settings, results, what_if={}, variables={})
    assert (report.comparison, report.check) == (None, CheckResult(tensors=3, failures=[]))
    assert (report.cpu_us_per_call, report.hosts) == (1.5, {"host": 2})
    assert to_csv(plan, measured).splitlines() == [
        "rank,call,op,pg,seq,peer,bytes,dtype,source,issue_us_p50,completion_us_p50,completion_us_p95,waiting_us_p50,"
        "time_us_p50,has_rate,recorded_us,relative_error",
        "0,0,all_reduce,0,1,,4000,float32,,0.1,1.15,1.285,0.15,1.0,1,,",
        "1,0,all_reduce,0,1,,4000,float32,,0.05,0.95,0.995,0.0,1.0,1,,",
    ]


def test_results_are_written_to_a_url_too() -> None:
    plan, results = job()
    report, measured = make_report(plan, Settings(backend="gloo", device="cpu"), results, what_if={}, variables={})
    paths = write_report("memory://replayed", report, plan, measured)
    assert paths == [f"memory://replayed/replay.{kind}" for kind in ("json", "csv", "html")]
    assert read_report("memory://replayed").rows == report.rows
