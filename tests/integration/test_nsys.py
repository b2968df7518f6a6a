"""Real jobs under a real Nsight Systems: as many ranges in the export as calls in the recording.

Needs `nsys` on the PATH, or its path in NSYS; no GPU. Ranges go through the nvtx package's own domain under versions
that know its extensions of NVTX, and through the base API under older ones (2023.4 and before).
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from crossrank.instrument.write.nvtx_markers import MAX_BYTES
from tests.integration import jobs
from tests.integration.commands import Commands
from tests.integration.traces import records_of

MARK, RANGE, DOMAIN = 34, 59, 75  # eventType
JOB = """
import threading
import torch, torch.distributed as dist
import crossrank
dist.init_process_group("gloo")
rank = dist.get_rank()
crossrank.enable()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
pair = dist.new_group([0, 1], group_desc='the "pair"')

def train(steps):
    for _ in range(steps):
        model(torch.ones(2, 8)).sum().backward()
        dist.all_reduce(torch.ones(100), group=pair)

train(4)
thread = threading.Thread(target=train, args=(3,))
thread.start()
thread.join()
there = torch.ones(4), torch.empty(4)
for work in dist.batch_isend_irecv([dist.P2POp(op, one, 1 - rank) for op, one in zip((dist.isend, dist.irecv), there)]):
    work.wait()
dist.all_gather([torch.empty(6), torch.empty(6)], torch.ones(6))
dist.all_to_all_single(torch.empty(4), torch.ones(4), [1 + 2 * rank, 3 - 2 * rank], [1 + 2 * rank, 3 - 2 * rank])
dist.barrier()
crossrank.disable()
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Event:
    process: int
    kind: int
    payload: int | None
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


@dataclass(frozen=True)
class Nsys:
    """An installation of Nsight Systems."""

    path: str

    def profile(self, report: Path | str) -> list[str]:
        """The beginning of a command line whose rest is profiled."""
        options = ["--trace=nvtx", "--sample=none", "--cpuctxsw=none", "--kill=none", "--wait=all"]
        return [self.path, "profile", *options, f"--output={report}", "--force-overwrite=true"]

    def export(self, report: Path, *more: str) -> Path:
        """The SQLite export beside a report, which `profile` names without its suffix."""
        made = report.with_name(f"{report.name}.nsys-rep")
        assert made.exists(), f"nsys made no {made.name} but {sorted(one.name for one in report.parent.iterdir())}"
        export = report.with_name(f"{report.name}.sqlite")
        options = ["--type", "sqlite", "--force-overwrite", "true", "--output", str(export), *more]
        result = subprocess.run(
            [self.path, "export", *options, str(made)], capture_output=True, text=True, timeout=120, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return export


@pytest.fixture(scope="session")
def nsys() -> Nsys:
    named = os.environ.get("NSYS")
    found = shutil.which(named or "nsys")
    if found is None:
        if named:
            pytest.fail(f"NSYS={named} is no program")
        pytest.skip("no Nsight Systems: nsys is not on the PATH, and NSYS does not name it")
    return Nsys(found)


def events(export: Path) -> Iterator[Event]:
    """Marks and ranges of our domain, in their order."""
    with closing(sqlite3.connect(export)) as connection:
        rows = connection.execute(
            "SELECT n.globalTid >> 24, n.eventType, n.int64Value, COALESCE(s.value, n.text) FROM NVTX_EVENTS n "
            "LEFT JOIN StringIds s ON s.id = n.textId JOIN (SELECT DISTINCT domainId, globalTid >> 24 AS process FROM "
            f"NVTX_EVENTS WHERE eventType = {DOMAIN} AND text = 'crossrank') d "
            "ON d.domainId = n.domainId AND d.process = n.globalTid >> 24 "
            f"WHERE n.eventType IN ({MARK}, {RANGE}) ORDER BY n.start"
        )
        yield from (Event(*row) for row in rows)


def profile_each_rank(nsys: Nsys, folder: Path, **variables: str) -> dict[int, Path]:
    """A recording in `folder/recording`, and the export of each rank."""
    script = jobs.write_script(folder, JOB)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    profiled = [*nsys.profile(folder / "rank_%q{RANK}"), sys.executable, str(script)]
    result = jobs.run([*torchrun, *profiled], folder, TRACING_DIR=str(folder / "recording"), **variables)
    assert result.returncode == 0, result.stderr
    assert "crossrank:" not in result.stderr
    return {rank: nsys.export(folder / f"rank_{rank}") for rank in (0, 1)}


@pytest.mark.parametrize("kind", ["1", "classic"])
def test_every_rank_under_nsys_has_a_marker_per_record(tmp_path: Path, nsys: Nsys, kind: str) -> None:
    exports = profile_each_rank(nsys, tmp_path, TRACING_NVTX=kind)
    for rank, export in exports.items():
        found = list(events(export))
        assert len({event.process for event in found}) == 1
        marks = [event.json for event in found if event.kind == MARK]
        assert marks[0]["rank"] == rank
        assert [mark["group"]["desc"] for mark in marks if "group" in mark] == ["default_pg", 'the "pair"']
        records = records_of(tmp_path / "recording", rank)
        if kind == "classic":
            calls = [mark for mark in marks if "name" in mark]
            ours = [(call["correlation_id"], call["name"], call["message_size"]) for call in calls]
            theirs = [(record.id, record.api or record.op, record.bytes) for record in records]
        else:
            ranges = [event for event in found if event.kind == RANGE]
            calls = [event.json for event in ranges]
            ours = [(event.payload, event.json["op"], event.json["bytes"]) for event in ranges]
            theirs = [(record.id, record.op, record.bytes) for record in records]
        assert Counter(ours) == Counter(theirs)
        assert len(records) >= 20


def test_one_nsys_around_torchrun_has_the_ranges_of_every_rank(tmp_path: Path, nsys: Nsys) -> None:
    script = jobs.write_script(tmp_path, JOB)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    result = jobs.run([*nsys.profile(tmp_path / "node"), *torchrun], tmp_path, TRACING_DIR=str(tmp_path / "recording"))
    assert result.returncode == 0, result.stderr
    found = list(events(nsys.export(tmp_path / "node")))
    rank_of = {event.process: event.json["rank"] for event in found if event.kind == MARK and "rank" in event.json}
    assert sorted(rank_of.values()) == [0, 1]
    for process, rank in rank_of.items():
        ours = [(one.payload, one.json["op"]) for one in found if one.kind == RANGE and one.process == process]
        assert sorted(ours) == [(record.id, record.op) for record in records_of(tmp_path / "recording", rank)]


def test_exports_without_kernels_give_a_timeline_and_a_report_and_no_bandwidth(nsys: Nsys, command: Commands) -> None:
    exports = profile_each_rank(nsys, command.folder)
    recording = str(command.folder / "recording")
    paths = [str(shutil.copy(export, command.folder / "recording")) for export in exports.values()]
    assert "no recording's: rank_0.sqlite, rank_1.sqlite" in command("inspect", recording)
    calls = [len(records_of(command.folder / "recording", rank)) for rank in (0, 1)]
    told = [
        f"{path}: {count} calls have markers, but the export has no communication kernel with times"
        for path, count in zip(paths, calls, strict=True)
    ]
    batched = 2 * 2 - 2  # a batch of two is one launch on each rank, which the recording knows and a marker does not
    for words, launches in (([recording], sum(calls) - batched), (paths, sum(calls))):
        found = command.json("timeline", *words, "-o", command.folder / "t.pftrace")
        assert (found["ranks"], found["calls"], found["activities"]) == (2, launches, 0)
        assert [note[: len(text)] for note, text in zip(found["notes"], told, strict=False)] == told
        assert command.json("report", *words, "-o", command.folder / "r.html")["calls"] == sum(calls)
        said = command.said("bandwidth", *words)
        assert all(text in said for text in told)
        assert "with --source kineto" in said
        assert "Traceback" not in said


def test_normalised_and_plain_times_are_equal(tmp_path: Path, nsys: Nsys, command: Commands) -> None:
    if "--ts-normalize" not in subprocess.run([nsys.path, "export", "--help"], capture_output=True, text=True).stdout:
        pytest.skip("this Nsight Systems normalises no times")
    script = jobs.write_script(tmp_path, f"{jobs.ONE_RANK}\ncrossrank.enable()\ndist.barrier()\ncrossrank.disable()\n")
    jobs.run([*nsys.profile(tmp_path / "rank_0"), sys.executable, str(script)], tmp_path)
    began = []
    for option in ([], ["--ts-normalize", "true"]):
        export = str(nsys.export(tmp_path / "rank_0", *option))
        began.append(command.json("timeline", export, "-o", tmp_path / "t.pftrace")["epoch_ns"])
    assert began[0] == began[1] > 1_700_000_000_000_000_000


def test_a_window_drives_the_capture_without_cuda(tmp_path: Path, nsys: Nsys) -> None:
    script = jobs.write_script(
        tmp_path,
        f"""{jobs.ONE_RANK}
crossrank.enable(window="2:4")
for _ in range(6):
    dist.all_reduce(torch.ones(3))
    crossrank.step()
crossrank.disable()
""",
    )
    capture = ["--capture-range=nvtx", "--nvtx-capture=window@crossrank", "--capture-range-end=stop"]
    result = jobs.run(
        [*nsys.profile(tmp_path / "window"), *capture, sys.executable, str(script)],
        tmp_path,
        TRACING_DIR=str(tmp_path / "recording"),
        TRACING_NSYS="1",
    )
    assert result.returncode == 0, result.stderr
    marked = [event.payload for event in events(nsys.export(tmp_path / "window")) if event.kind == RANGE]
    assert marked == [one.id for one in records_of(tmp_path / "recording", 0) if 2 <= one.step < 4]
    assert len(marked) == 2


def test_texts_of_the_maximum_size_are_complete(tmp_path: Path, nsys: Nsys) -> None:
    script = jobs.write_script(
        tmp_path,
        "import json\n"
        "from crossrank.instrument.write.nvtx_markers import MAX_BYTES, shortened\n"
        "from crossrank.instrument.write.nvtx_markers import attach\n"
        "markers = attach()\n"
        "assert markers is not None\n"
        "def group(desc, ranks):\n"
        "    return json.dumps({'group': {'pg': '1', 'size': len(ranks), 'ranks': ranks, 'desc': desc}})\n"
        "markers.mark(group('x' * (MAX_BYTES - len(group('', []))), []))\n"
        "markers.mark(group('mesh', list(range(0, 8 * 16384, 8))))\n"
        "markers.mark(group('none', [rank * rank % 65537 for rank in range(16384)]))\n",
    )
    result = jobs.run([*nsys.profile(tmp_path / "texts"), sys.executable, str(script)], tmp_path)
    assert result.returncode == 0, result.stderr
    whole, mesh, none = list(events(nsys.export(tmp_path / "texts")))
    assert len(whole.text) == MAX_BYTES
    assert set(whole.json["group"]["desc"]) == {"x"}
    assert mesh.json["group"]["rank_runs"] == [[0, 16384, 8]]
    assert none.json["group"]["left_out"] == {"ranks": 16384}


def test_a_filter_that_excludes_our_domain_is_reported(tmp_path: Path, nsys: Nsys) -> None:
    script = jobs.write_script(tmp_path, f"{jobs.ONE_RANK}\ncrossrank.enable()\ndist.barrier()\ncrossrank.disable()\n")
    words = [*nsys.profile(tmp_path / "filtered"), "--nvtx-domain-exclude=crossrank", sys.executable, str(script)]
    result = jobs.run(words, tmp_path, TRACING_DIR=str(tmp_path / "recording"))
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("crossrank:")]
    assert "calls will not be marked" in line
    assert [record.op for record in records_of(tmp_path / "recording", 0)] == ["barrier"]
