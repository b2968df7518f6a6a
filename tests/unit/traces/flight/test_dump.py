"""Flight-recorder dumps are read from pickle and JSON alike, and a broken part costs that part alone."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crossrank.budget import Budget
from crossrank.tools.analysis.diagnosis.diagnose import diagnose
from crossrank.tools.analysis.diagnosis.evidence import find_candidates, read_evidence
from crossrank.tools.parallel import Fleet
from crossrank.tools.traces.flight.calls import read_flight
from crossrank.tools.traces.flight.dump import (
    FlightDump,
    Frame,
    NoDumpError,
    Progress,
    decode_flight_dump,
    read_flight_dump,
)
from tests.unit.analysis.diagnosis.simulated_jobs import SimulatedJob
from tests.unit.analysis.diagnosis.simulated_programs import training
from tests.unit.graph.linking.public_traces import needs_traces, public


@pytest.fixture(scope="module")
def job() -> SimulatedJob:
    made = SimulatedJob(*training(4, 3))
    made.run()
    return made


def decode(content: Any) -> FlightDump:
    return decode_flight_dump("rank_0", pickle.dumps(content, 2), [], Budget("rank_0"))


def test_pickle_and_json_give_the_same_dump(job: SimulatedJob, tmp_path: Path) -> None:
    job.write(tmp_path / "a", form="pickle", frames=False)
    job.write(tmp_path / "b", form="json")
    one, other = (read_flight_dump(str(tmp_path / name / "rank_1")) for name in "ab")
    assert (one.version, one.groups, one.status) == (other.version, other.groups, other.status)
    assert [entry.profiling_name for entry in one.entries] == [entry.profiling_name for entry in other.entries]
    assert one.entries[0].input_sizes == other.entries[0].input_sizes == ((524288,),)
    assert one.entries[0].process_group == other.entries[0].process_group == ("1", "mesh_tp")


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress, bytes])
def test_a_dump_may_be_compressed(job: SimulatedJob, tmp_path: Path, pack: Any) -> None:
    (tmp_path / "rank_2").write_bytes(pack(pickle.dumps(job.dump(2), 2)))
    assert len(read_flight_dump(str(tmp_path / "rank_2")).entries) == 12


def test_stack_frames_are_innermost_first_without_broken_frames(tmp_path: Path, job: SimulatedJob) -> None:
    content = job.dump(0)
    content["entries"][1]["frames"] = [{"name": "f", "filename": "a.py", "line": 3}, {"name": 1}, 7]
    content["entries"][2]["frames"] = "no frames"
    (tmp_path / "rank_0").write_bytes(pickle.dumps(content, 2))
    trace = read_flight(str(tmp_path / "rank_0"), 0)
    first, second, third = (trace.stacks[trace.calls.stack[row]] for row in range(3))
    assert (first[-1].filename, first[-1].line) == ("train.py", 110)
    assert (second, third) == ((Frame("f", "a.py", 3),), ())


def test_single_broken_entries_are_counted_and_the_others_kept(job: SimulatedJob) -> None:
    content = job.dump(0)
    content["entries"][3] = {"record_id": "three"}
    content["entries"][5]["input_sizes"] = [["many"]]
    dump = decode(content)
    assert list(dump.entries) == [one for row, one in enumerate(decode(job.dump(0)).entries) if row not in (3, 5)]
    assert dump.problems == [
        "2 of 12 entries are unusable (entry 3: ValidationError: Expected `int`, got `str` - at `$.record_id`) "
        "and were skipped"
    ]
    content = job.dump(0)
    content["entries"][3] = "none"
    dump = decode(content)
    assert (len(dump.entries), len(dump.problems)) == (11, 1)
    assert dump.problems[0].startswith("1 of 12 entries are unusable (entry 3: ")


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("pg_status", None, ""),
        ("pg_status", [1], "pg_status is not a dictionary and was skipped"),
        ("pg_config", {"0": 3}, "an entry of pg_config is unusable"),
        ("version", 7, "version is unusable"),
        ("entries", "many", "entries is not a list"),
    ],
)
def test_a_broken_part_affects_no_other_part(job: SimulatedJob, name: str, value: Any, problem: str) -> None:
    dump = decode(job.dump(0) | {name: value})
    assert "; ".join(dump.problems)[: len(problem)] == problem
    assert bool(dump.entries) == (name != "entries")
    assert bool(dump.status) == (name != "pg_status")


def test_json_status_numbers_are_read_from_strings() -> None:
    content = {"version": "2.10", "pg_status": {"0": dict.fromkeys(Progress.__struct_fields__, "17")}}
    assert decode(content).status == {0: Progress(17, 17)}


def test_nccl2_status_counts_all_calls_from_0_and_is_converted_to_collective_numbers() -> None:
    made = [(0, 1, 0), (0, 1, 1), (0, 2, 1), (3, 1, 0)]  # group, collectives and sends so far
    entries = [
        {"record_id": at, "pg_id": group, "op_id": at % 3, "collective_seq_id": seq, "p2p_seq_id": p2p}
        | {"profiling_name": "nccl2:send 0->1" if at == 1 else "nccl2:all_reduce"}
        for at, (group, seq, p2p) in enumerate(made)
    ]
    status = {"0": Progress(2, 1), "3": Progress(0, -1)}
    content = {"version": "2.10", "pg_status": msgspec.to_builtins(status), "entries": entries}
    assert decode(content).status == {0: Progress(2, 1), 3: Progress(1, -1)}


def test_fields_missing_in_a_dump_are_unknown() -> None:
    content = {"version": "2.10", "pg_status": {"0": {}}, "entries": [{"record_id": 0, "profiling_name": "x"}]}
    dump = decode(content | {"crossrank": {"rank": 1, "world_size": 1, "time_ns": 5}})  # which a pickle never has
    (one,) = dump.entries
    assert (one.pg_id, one.collective_seq_id, one.p2p_seq_id, one.time_created_ns) == (-1, 0, 0, 0)
    assert (dump.status, dump.moment, dump.groups) == ({0: Progress(-1, -1)}, None, [])


@pytest.mark.parametrize(("world_size", "is_valid"), [(0, False), (1, True), (1 << 20, True), ((1 << 20) + 1, False)])
def test_our_addition_to_a_dump_requires_a_valid_world_size(world_size: int, is_valid: bool) -> None:
    content = {"version": "2.10", "crossrank": {"rank": 0, "world_size": world_size, "time_ns": 5}}
    dump = decode_flight_dump("rank_0", json.dumps(content).encode(), [], Budget("rank_0"))
    assert ((dump.moment is not None), not dump.problems) == (is_valid, is_valid)


def test_calls_with_different_output_types_are_different_calls(job: SimulatedJob, tmp_path: Path) -> None:
    content = job.dump(0)
    first, second = (dict(content["entries"][0], record_id=number, collective_seq_id=number + 1) for number in (0, 1))
    second["output_dtypes"] = ["Double"]
    (tmp_path / "rank_0").write_bytes(pickle.dumps(content | {"entries": [first, second]}, 2))
    calls = list(read_flight(str(tmp_path / "rank_0"), 0).records())
    assert [call.out_dtype for call in calls] == [None, "float64"]


@pytest.mark.parametrize(
    "ranks", ["[0, 1, 1]", "__import__('os').getcwd()", "[0, 99999999999]", "[" + "1," * 3_000_000]
)
def test_a_list_of_ranks_is_parsed_and_never_evaluated(ranks: str) -> None:
    dump = decode({"version": "2.10", "pg_config": {"0": {"name": "0", "desc": "world", "ranks": ranks}}})
    assert [(group.pg, group.ranks) for group in dump.groups] == [("0", None)]
    assert dump.problems[0].startswith("the ranks of group '0' are unusable: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\x89PNG", "is not a flight-recorder dump: it is neither a pickle nor JSON"),
        (b'{"a": 1}', "is not a flight-recorder dump: it lacks version, pg_config and entries"),
        (b'{"version": ', "is not complete JSON"),
        (pickle.dumps({"version": "2.10"}, 2)[:-3], "the pickle is cut off"),
        (pickle.dumps([1, 2], 2), "is not a flight-recorder dump"),
        (b"\x80\x02cos\nsystem\n.", "is refused: the pickle has a pickle opcode that is not data"),
    ],
)
def test_a_file_that_is_not_a_dump_is_refused_with_its_path(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "rank_0").write_bytes(content)
    with pytest.raises(NoDumpError) as error:
        read_flight_dump(str(tmp_path / "rank_0"))
    assert str(error.value).startswith(f"{tmp_path}/rank_0: {message}")


def test_a_value_that_json_lacks_is_unknown_and_a_lost_entry_refuses_the_dump(
    job: SimulatedJob, tmp_path: Path
) -> None:
    """A call that a dump has lost would look like one that its rank has not made."""
    content = job.dump(0)
    content["entries"][1]["duration_ms"] = float("nan")
    path = tmp_path / "rank_0.json"
    path.write_text(json.dumps(content))
    trace = read_flight(str(path), 0)
    assert (len(trace), trace.calls.took[1]) == (len(content["entries"]), 0)
    path.write_bytes(json.dumps(content).replace('"profiling_name": "', '"profiling_name": "\xff', 1).encode("latin-1"))
    trace = read_flight(str(path), 0)
    assert len(trace) == len(content["entries"])
    assert trace.problems[0] == "values with 1 byte that is not UTF-8 are wrong"
    path.write_text(json.dumps(content).replace('"record_id": 1', '"record_id 1'))
    with pytest.raises(NoDumpError, match="is not complete JSON"):
        read_flight_dump(str(path))


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_a_small_file_does_not_fill_the_memory(pack: Any, tmp_path: Path) -> None:
    (tmp_path / "rank_0").write_bytes(pack(b"[" * (100 << 20)))
    with pytest.raises(
        NoDumpError, match=r"more than 67,108,864 bytes of content, far more than a real file of [0-9,]+ bytes"
    ) as error:
        read_flight_dump(str(tmp_path / "rank_0"))
    assert error.value.refused


@needs_traces
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=60)
@given(case=st.sampled_from(["clean", "gloo_missing", "gloo_missing_json", "missing_one"]), data=st.data())
def test_mutated_real_dumps_are_read_or_reported(case: str, data: st.DataObject, tmp_path: Path) -> None:
    for file in Path(public("flight"), case).glob("rank_*"):
        content = bytearray(file.read_bytes())
        if file.name == "rank_1":
            for _ in range(data.draw(st.integers(1, 6))):
                content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
            content = content[: data.draw(st.integers(1, len(content)))]
        (tmp_path / file.name).write_bytes(content)

    evidence = read_evidence(find_candidates([str(tmp_path)]), Fleet())
    found, _ = diagnose(evidence)

    assert json.loads(found.to_json())["verdict"] in ("ok", "error", "incomplete")
    assert 0 in found.ranks


MIXED = "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    ("op", "backend", "expected"),
    [
        ("send", "gloo", "gloo"),
        ("send", "cpu:gloo,cuda:gloo", "gloo"),
        ("all_reduce", "cpu:gloo,cuda:gloo", "gloo"),
        ("all_reduce", MIXED, MIXED),
    ],
)
def test_a_dump_without_entries_is_of_gloo_if_all_its_groups_are(
    op: str, backend: str, expected: str, tmp_path: Path
) -> None:
    """torch's recorder notes no sends and receives of gloo, or is off."""
    moment = {
        "calls": [{"id": 0, "t": 1, "op": op, "c10d": op, "pg": "0", "bytes": 4}],
        "rank": 0,
        "world_size": 2,
        "time_ns": 100,
        "clock": {"t": 0, "wall": 0},
        "groups": [{"pg": "0", "size": 2, "ranks": [0, 1], "backend": backend}],
    }
    path = tmp_path / "rank-0.flight.json"
    path.write_text(json.dumps({"version": "2.10", "entries": [], "crossrank": moment}))
    assert read_flight(str(path), 0).backend == expected
