"""NVTX markers as a real tool receives them: a small injection library, compiled here and loaded by NVTX."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from crossrank.comm import CommRecord
from crossrank.instrument.write.nvtx_markers import MAX_MESSAGES
from crossrank.tools.analysis.bandwidth import bandwidth
from crossrank.tools.job.collectives import match_collectives
from crossrank.tools.job.job import Job
from crossrank.tools.job.sources import find, read
from crossrank.tools.parallel import Fleet
from crossrank.tools.traces.nsight.read import IN_OLD, IN_OURS
from tests.integration import jobs
from tests.integration.traces import records_of
from tests.unit.traces.nsight.exports import ExportFile


@dataclass(frozen=True)
class Marker:
    kind: str
    domain: str
    payload: int
    message: str

    @property
    def json(self) -> Any:
        return json.loads(self.message)


Compiled = Callable[..., Path]
"""An injection library, compiled with definitions."""

RANK = """
import os, threading
import torch, torch.distributed as dist
import crossrank
dist.init_process_group("gloo")
rank = dist.get_rank()
def settle():  # markers are sent before it is known which calls leave a node; from here on it is
    from crossrank.instrument import api
    assert api._current.facts.topology.settled.wait(30)
"""


@dataclass(frozen=True)
class Tool:
    """A tool that writes down what ranks send it, and the folder of a test."""

    folder: Path
    library: Path
    ranks: int = 2
    variables: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, ranks: int = 2, **variables: str) -> Tool:
        return Tool(self.folder, self.library, ranks, variables)

    def run(self, body: str) -> str:
        """Run ranks, and return what they printed."""
        source = f"{RANK}{textwrap.dedent(body).strip()}\ncrossrank.disable()\ndist.destroy_process_group()\n"
        variables = {
            "NVTX_INJECTION64_PATH": str(self.library),
            "NVTX_CAPTURE_OUT": str(self.folder / "markers"),
            "TRACING_DIR": "recording",
        }
        return jobs.Scripts(self.folder)(**variables, **self.variables).ranks(source, self.ranks).stdout

    def captured(self) -> list[list[Marker]]:
        """The markers of every process that emitted one with an identity, in the order of the ranks."""
        found: list[list[Marker]] = []
        for path in self.folder.glob("markers.*"):
            lines = (line.split("\t", 3) for line in path.read_text().splitlines())
            found.append([Marker(kind, domain, int(payload), message) for kind, domain, payload, message in lines])
        return sorted(found, key=lambda markers: int(next(m.json["rank"] for m in markers if m.kind == "mark")))

    def calls(self, rank: int) -> list[CommRecord]:
        return records_of(self.folder / "recording", rank)


def warnings_with(folder: Path, tool: str | Path | None, **variables: str) -> list[str]:
    """What a rank says that marks a call while it is enabled, and once more when it is enabled again."""
    variables |= {} if tool is None else {"NVTX_INJECTION64_PATH": str(tool)}
    result = jobs.Scripts(folder)(TRACING_DIR="recording", **variables).python("""
        for _ in range(2):
            with crossrank.enable():
                dist.all_reduce(torch.ones(4))
        """)
    return [line for line in result.stderr.splitlines() if "NVTX" in line]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    compiler = os.environ.get("CC") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the NVTX injection library with")
    files = importlib.metadata.files("nvidia-nvtx") or []
    header = next(file for file in files if file.name == "nvToolsExt.h" and file.parent.name == "nvtx3")
    source, include = Path(__file__).with_name("nvtx_capture.c"), Path(str(header.locate())).parent.parent
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-Wno-unused-function", f"-I{include}", str(source)]

    @cache
    def compiled(*definitions: str) -> Path:
        library = tmp_path_factory.mktemp("nvtx") / "libcapture.so"
        subprocess.run([compiler, *options, *definitions, "-o", str(library)], check=True)
        return library

    return compiled


@pytest.fixture
def nvtx(compiled: Compiled, tmp_path: Path) -> Tool:
    return Tool(tmp_path, compiled())


@pytest.fixture
def older_nvtx(compiled: Compiled, tmp_path: Path) -> Tool:
    """A tool for which the package's own domain is a stand-in, as it is under Nsight Systems up to 2023."""
    return Tool(tmp_path, compiled("-DOLDER_THAN_THE_PACKAGE"))


def test_two_ranks_send_one_range_per_call(nvtx: Tool) -> None:
    nvtx.run("""
        crossrank.enable(node="here")
        settle()
        dist.barrier()
        for _ in range(3):
            dist.all_reduce(torch.ones(4))
            dist.broadcast(torch.ones(2), 1)
        """)
    ranks = nvtx.captured()
    assert len(ranks) == 2
    for rank, markers in enumerate(ranks):
        assert {marker.domain for marker in markers} == {"crossrank"}
        marks = [marker.json for marker in markers if marker.kind == "mark"]
        assert (marks[0]["rank"], marks[0]["world_size"]) == (rank, 2)
        assert marks[1]["group"]["ranks"] == [0, 1]
        ranges = [marker for marker in markers if marker.kind in ("push", "pop")]
        assert [marker.kind for marker in ranges] == ["push", "pop"] * 7
        pushes = ranges[::2]
        records = {record.id: record for record in nvtx.calls(rank)}
        assert [marker.payload for marker in pushes] == list(range(7))
        for marker in pushes:
            record = records[marker.payload]
            assert (marker.json["op"], marker.json["source"]) == (record.op, record.source)
            assert marker.json.get("in", []) == record.inputs
        # Three distinct calls, registered once each whatever their number is.
        registered = [m.json for m in markers if m.kind == "register" and "op" in m.json]
        ops = ("barrier", "all_reduce", "broadcast")
        assert [(m["op"], m["locality"]) for m in registered] == [(op, "intra_node") for op in ops]


def test_a_tool_older_than_the_package_gets_the_ranges_of_every_thread(older_nvtx: Tool) -> None:
    older_nvtx.run("""
        import nvtx
        assert type(nvtx.get_domain('any')).__name__ == 'DummyDomain'
        crossrank.enable()
        def train():
            for _ in range(3):
                dist.all_reduce(torch.ones(4))
        train()
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        crossrank.disable()
        crossrank.enable()
        dist.barrier()
        """)
    for rank, markers in enumerate(older_nvtx.captured()):
        assert {marker.domain for marker in markers} == {"crossrank"}
        ranges = [marker for marker in markers if marker.kind in ("push", "pop")]
        assert [marker.kind for marker in ranges] == ["push", "pop"] * 7
        assert [(marker.json["op"], marker.payload) for marker in ranges[:12:2]] == [
            ("all_reduce", number) for number in range(6)
        ]
        assert ranges[-2].json["op"] == "barrier"
        # NVTX was asked once whether the tool takes ranges, however often the recording was enabled.
        assert [marker.kind for marker in markers if marker.kind in ("start", "end")] == ["start", "end"]
        assert sum("crossrank" in marker.message for marker in markers if marker.kind == "mark") == 2
        assert len(older_nvtx.calls(rank)) == 1


def test_a_tool_that_rejects_ranges_is_reported_once(tmp_path: Path, compiled: Compiled) -> None:
    deaf = compiled("-DOLDER_THAN_THE_PACKAGE", "-DTAKES_NOTHING")
    (line,) = warnings_with(tmp_path, deaf)
    assert f"an NVTX tool is attached (NVTX_INJECTION64_PATH={deaf}), but calls will not be marked" in line
    assert "--nvtx-domain-include" in line


def test_a_package_without_the_base_api_gives_one_warning(tmp_path: Path, older_nvtx: Tool) -> None:
    package = tmp_path / "nvtx"
    package.mkdir()
    (package / "__init__.py").write_text("class DummyDomain: ...\ndef get_domain(name):\n    return DummyDomain()\n")
    (line,) = warnings_with(tmp_path, older_nvtx.library, PYTHONPATH=str(tmp_path))
    assert "calls will not be marked: ModuleNotFoundError: No module named 'nvtx._lib'" in line


def test_a_package_that_mixes_threads_gives_one_warning(tmp_path: Path, nvtx: Tool) -> None:
    metadata = tmp_path / "nvtx-0.2.14.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: nvtx\nVersion: 0.2.14\n")
    (line,) = warnings_with(tmp_path, nvtx.library, PYTHONPATH=str(tmp_path))
    assert "calls will not be marked: nvtx 0.2.14 is too old: install nvtx>=0.2.15;" in line
    assert [record.op for record in nvtx.calls(0)] == ["all_reduce"]


@pytest.mark.parametrize("tool", [None, "./."], ids=["no tool", "NVTX's word for none"])
def test_no_warning_is_printed_without_a_tool(tmp_path: Path, tool: str | None) -> None:
    assert warnings_with(tmp_path, tool) == []


def test_a_name_with_quotes_is_still_json(nvtx: Tool) -> None:
    nvtx.run("""
        crossrank.enable()
        from crossrank.instrument import api
        markers = api._current.nvtx
        markers.push_batch('say "hi"\\\\', 0, 3)
        markers.pop()
        """)
    for markers in nvtx.captured():
        (batch,) = [marker for marker in markers if marker.kind == "push"]
        assert (batch.json, batch.payload) == ({"op": "coalesced", "pg": 'say "hi"\\'}, 3)


def test_distinguishing_fields_come_first(nvtx: Tool) -> None:
    nvtx.run("crossrank.enable()\ndist.all_reduce(torch.ones(4))\n")
    for markers in nvtx.captured():
        (call,) = [marker for marker in markers if marker.kind == "push"]
        assert call.message.startswith('{"op":"all_reduce","pg":"0","bytes":16,"dtype":"float32","reduce":"sum"')


LINES_DIFFER = """
for number in range(calls):
    exec(compile('dist.all_reduce(torch.ones(4))', f'/{number}.py', 'exec'))
"""
SIZES_DIFFER = """
for size in range(1, calls + 1):
    dist.all_reduce(torch.empty(size))
"""


@pytest.mark.parametrize(
    ("loop", "kept", "more", "field"),
    [(LINES_DIFFER, 2 * MAX_MESSAGES, 300, "source"), (SIZES_DIFFER, MAX_MESSAGES, 500, "bytes")],
    ids=["lines", "sizes"],
)
def test_messages_stay_bounded_when_calls_differ(loop: str, kept: int, more: int, field: str, nvtx: Tool) -> None:
    calls = kept + more
    nvtx(ranks=1).run(f"calls = {calls}\ncrossrank.enable()\n{loop}")
    (markers,) = nvtx.captured()
    registered = [marker for marker in markers if marker.kind == "register" and "op" in marker.json]
    assert kept <= len(registered) <= kept + 2
    pushes = [marker for marker in markers if marker.kind == "push"]
    assert [marker.payload for marker in pushes] == list(range(calls))
    assert pushes[0].json[field] == {"source": "/0.py:1", "bytes": 4}[field]
    assert field not in pushes[-1].json
    assert pushes[-1].json["op"] == "all_reduce"


@pytest.mark.parametrize(("nodes", "marked"), [(1, []), (2, ["all_reduce"])])
def test_crossnode_marks_calls_across_nodes_and_records_all_calls(nodes: int, marked: list[str], nvtx: Tool) -> None:
    nvtx(NODES=str(nodes)).run("""
        crossrank.enable(tracing="CROSSNODE", node=f"node-{rank % int(os.environ['NODES'])}")
        settle()
        dist.all_reduce(torch.ones(4))
        group = dist.new_group([rank], use_local_synchronization=True)
        dist.barrier(group=group)
        """)
    for rank, markers in enumerate(nvtx.captured()):
        assert [marker.json["op"] for marker in markers if marker.kind == "push"] == marked
        assert [record.op for record in nvtx.calls(rank)] == ["all_reduce", "barrier"]


CLASSIC_FIELDS = [
    "name",
    "rank",
    "source_line",
    "message_size",
    "device",
    "timestamp",
    "gpu_serial",
    "vm_id",
    "group_ranks",
    "peer_rank",
    "root_rank",
    "correlation_id",
]


def test_classic_mode_sends_and_prints_the_older_shims_text(nvtx: Tool) -> None:
    printed = nvtx(TRACING_NVTX="classic", TORCH_DISTRIBUTED_TRACING_PRINT="1", VM_ID="vm-7").run("""
        crossrank.enable()
        dist.broadcast(torch.ones(4), 1)
        if rank == 0:
            dist.send(torch.ones(2), 1)
        else:
            dist.recv(torch.ones(2), 0)
        """)
    for rank, markers in enumerate(nvtx.captured()):
        texts = [marker.json for marker in markers if marker.kind == "mark" and "name" in marker.json]
        assert [marker for marker in markers if marker.kind == "push"] == []
        assert [list(text) for text in texts] == [CLASSIC_FIELDS, CLASSIC_FIELDS]
        broadcast, p2p = texts
        assert broadcast == broadcast | {
            "name": "broadcast",
            "rank": rank,
            "message_size": 16,
            "device": "cpu",
            "vm_id": "vm-7",
            "group_ranks": [0, 1],
            "peer_rank": None,
            "root_rank": 1,
            "correlation_id": 0,
        }
        assert broadcast["source_line"].endswith("train.py:11")
        assert (p2p["name"], p2p["peer_rank"]) == (("send", 1) if rank == 0 else ("recv", 0))
    # The leader of the group prints the broadcast, both sides print the P2P call.
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert sorted((line["name"], line["rank"]) for line in lines) == [("broadcast", 0), ("recv", 1), ("send", 0)]


def export_of(markers: list[Marker], rank: int, folder: Path, *, only_window: bool = False) -> Path:
    """An export as nsys would make it of these very markers: every range that has no other inside launches a kernel,
    which on rank 1 begins 7 us later and takes 10 us from there on both."""
    export = ExportFile()
    process = export.process(90 + rank)
    at = 0
    opened: list[tuple[int, Marker]] = []
    if only_window:
        first = max(i for i, marker in enumerate(markers) if marker.kind == "mark" and "crossrank" in marker.json)
        markers = markers[first:]
    for marker in markers:
        at += 100_000
        if marker.kind == "mark":
            process.event(34, at, None, marker.message)
        elif marker.kind == "push":
            opened.append((at, marker))
        elif marker.kind == "pop":
            start, push = opened.pop()
            process.event(59, start, at, push.message, payload=push.payload)
            process.kernel(start + 50, at + 7000 * rank, at + 17_000)
    return export.write(folder / f"rank_{rank}.sqlite")


def test_real_markers_are_joined_with_kernels_and_with_the_records(tmp_path: Path, nvtx: Tool) -> None:
    nvtx.run("""
        crossrank.enable(node=f"node-{rank}")
        settle()
        pair = dist.new_group([0, 1], group_desc='pair')
        dist.all_reduce(torch.ones(250_000))
        with crossrank.window():
            dist.all_reduce(torch.ones(250_000), group=pair)
            dist.all_gather_into_tensor(torch.empty(500_000), torch.ones(250_000))
            dist.all_reduce(torch.ones(250_000), group=pair)
        """)
    recording = tmp_path / "recording"
    ranks = nvtx.captured()
    for rank, markers in enumerate(ranks):
        export_of(markers, rank, recording)
    found = find([str(recording)])
    times = read(found, Fleet())
    result = bandwidth(match_collectives(Job.match(times)))
    assert result.sources == {"nsight": 2}
    assert result.attributed == {IN_OURS: result.timed_calls}
    assert result.unattributed == {}
    rows = {(row["op"], row["desc"]): row for row in result.rows}
    # 2 MB gathered by two ranks in the 10 us from the last arrival: half of it crosses.
    gather = rows["all_gather", "default_pg"]
    assert (gather["bytes"], gather["time_us"]["p50"], gather["waiting_us"]) == (
        2_000_000,
        10.0,
        {"p50": 3.5, "p95": 6.65, "max": 7.0, "total": 7.0},
    )
    assert gather["busbw_gb_per_s"] is not None
    assert gather["busbw_gb_per_s"]["p50"] == 100.0
    assert (rows["all_reduce", "pair"]["collectives"], rows["all_reduce", "pair"]["locality"]) == (2, "cross_node")
    assert result.clocks.count == 2

    # The capture of the window alone has all that is needed, without the comms files as well.
    alone = tmp_path / "alone"
    alone.mkdir()
    for rank, markers in enumerate(ranks):
        export_of(markers, rank, alone, only_window=True)
    times = read(find([str(alone)]), Fleet())
    assert [one.rank for one in times] == [0, 1]
    result = bandwidth(match_collectives(Job.match(times)))
    in_window = {
        (row["op"], row["desc"], row["ranks"]): row["collectives"] for row in result.rows if row["op"] != "barrier"
    }
    assert in_window == {("all_reduce", "pair", 2): 2, ("all_gather", "default_pg", 2): 1}
    assert [row["bytes"] for row in result.rows if row["op"] == "all_gather"] == [2_000_000]


def test_the_older_shims_texts_are_joined_as_well(tmp_path: Path, nvtx: Tool) -> None:
    nvtx(TRACING_NVTX="classic").run("""
        crossrank.enable()
        for _ in range(3):
            dist.all_reduce(torch.ones(250_000))
        """)
    for rank, markers in enumerate(nvtx.captured()):
        export = ExportFile()
        process = export.process(90 + rank)
        for number, marker in enumerate(markers):
            if marker.kind != "mark":
                continue
            process.event(34, 1000 * number, None, marker.message)
            if "name" in marker.json:
                process.kernel(1000 * number + 100, 1000 * number + 500, 1000 * number + 600)
        export.write(tmp_path / f"rank_{rank}.sqlite")
    times = read(find([str(tmp_path / f"rank_{rank}.sqlite") for rank in (0, 1)]), Fleet())
    result = bandwidth(match_collectives(Job.match(times)))
    assert result.attributed == {IN_OLD: 6}
    (row,) = result.rows
    assert (row["op"], row["pg"], row["ranks"], row["bytes"]) == ("all_reduce", "0-1", 2, 3_000_000)
