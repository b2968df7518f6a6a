"""Our flight-recorder dumps: what stands in them, and which one stays."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from crossrank.tools.readers.flight_dump import FlightDump, Moment, read_flight_dump
from tests.integration import jobs

RECORDING = "crossrank-recording"

SILENT = """
import time
crossrank.enable(hang_seconds=0.4)
dist.all_reduce(torch.ones(4))

def wait_for_somebody():
    while not os.path.exists("crossrank-recording/rank-0.flight.json.zst"):
        time.sleep(0.05)

wait_for_somebody()
"""


def dump_of(folder: Path) -> tuple[FlightDump, Moment]:
    dump = read_flight_dump(str(folder / RECORDING / "rank-0.flight.json.zst"))
    assert dump.moment is not None
    return dump, dump.moment


def test_what_was_written_of_a_hang_stays_when_the_process_ends_in_it(tmp_path: Path) -> None:
    result = jobs.python(tmp_path, SILENT + 'raise RuntimeError("timed out")\n')

    assert result.returncode == 1
    folder = tmp_path / RECORDING
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("crossrank: "))
    assert re.fullmatch(
        rf"crossrank: no communication for 0\.4\d* s \(rank 0\): what every rank did last is in {folder}\. "
        rf"If the job hangs, `crossrank diagnose {folder}` says who waits for whom",
        line,
    )
    dump, moment = dump_of(tmp_path)
    assert (moment.reason, moment.error, moment.rank, moment.world_size) == ("hang", None, 0, 1)
    assert dump.problems == []
    (main_thread,) = (stack for stack in moment.stacks if stack.thread == "MainThread")
    # It may be within `exists` at that moment.
    assert [frame.name for frame in main_thread.frames][-2:] == ["wait_for_somebody", "<module>"]


def test_when_communication_goes_on_after_a_hang_the_end_is_written(tmp_path: Path) -> None:
    jobs.python(tmp_path, SILENT + 'dist.all_reduce(torch.ones(4))\nraise RuntimeError("later")\n')

    dump, moment = dump_of(tmp_path)
    assert (moment.reason, moment.error) == ("exit", "RuntimeError: later")
    assert [entry.profiling_name for entry in dump.entries] == ["gloo:all_reduce", "gloo:all_reduce"]
    assert [(record.op, record.source) for record in moment.calls] == [
        ("all_reduce", f"train.py:{line}") for line in (9, 16)
    ]


@pytest.mark.parametrize("emit", ["ALL", "CROSSNODE"])
def test_a_dump_holds_the_last_calls_whatever_is_emitted(emit: str, tmp_path: Path) -> None:
    result = jobs.python(
        tmp_path,
        """
        crossrank.enable()
        for _ in range(600):
            dist.all_reduce(torch.ones(4))
        """,
        TRACING=emit,
    )

    assert result.returncode == 0
    dump, moment = dump_of(tmp_path)
    assert [record.seq for record in moment.calls] == list(range(89, 601))
    assert [(group.pg, group.desc, group.ranks) for group in moment.groups] == [("0", "default_pg", [0])]
    assert abs(moment.time_ns - moment.clock["wall"]) == 0
    assert dump.entries[-1].collective_seq_id == 600


def test_the_watch_for_hangs_can_be_switched_off(tmp_path: Path) -> None:
    result = jobs.python(
        tmp_path,
        """
        crossrank.enable(hang_seconds=0)
        dist.all_reduce(torch.ones(4))
        assert not [thread.name for thread in threading.enumerate() if "hang" in thread.name]
        """,
    )

    assert (result.returncode, result.stderr) == (0, "")
    bad = jobs.python(tmp_path, "crossrank.enable()", TRACING_HANG_SECONDS="soon")
    assert bad.stderr == (
        "crossrank: tracing is off: TRACING_HANG_SECONDS='soon' is no number of seconds; "
        "0 switches the watch for hangs off\n"
    )
