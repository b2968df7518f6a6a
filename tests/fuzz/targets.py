"""What is fuzzed: a file, how it is mutated, and the reader or command that gets it.

The files are real ones (`seeds/`: a recording of two gloo ranks, two dumps of a hung job, a Kineto trace of a GPU) and
those that the product makes of them when a workspace is set up.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from crossrank.recording import COMMS, EXECUTION_TRACE, KINETO, LINKED, CommsFile
from crossrank.replay.plan.compute.read_window import read_window
from crossrank.replay.plan.plan import load_plan
from crossrank.tools.cli import main
from crossrank.tools.graph.chakra.feeder_contract import check
from crossrank.tools.graph.linking.communication_trace import read_communication_trace
from crossrank.tools.graph.linking.linked_file import read_linked
from crossrank.tools.graph.linking.window_files import RankInput
from crossrank.tools.job.from_replay import read_replay
from crossrank.tools.job.read_rank import READERS, RankSources
from crossrank.tools.traces.execution_trace import read_execution_trace
from crossrank.tools.traces.flight.dump import read_flight_dump
from crossrank.tools.traces.kineto import read_kineto
from crossrank.tools.traces.nsight.read import read_export
from tests.fuzz import mutate
from tests.fuzz.mutate import Mutation
from tests.unit.traces.nsight.exports import write_exports

_SEEDS = Path(__file__).parent / "seeds"


@dataclass(frozen=True)
class Target:
    """One row of the table: `name` of the reader, or the words of a command."""

    name: str
    file: str
    """In the workspace."""
    mutation: Mutation
    read: Callable[[str], object] | None = None
    """Gets the path of the mutated file. None for a command, which gets the words of the name."""
    weight: int = 1
    """Share of the inputs; a command costs ten times as much as a reader."""
    is_packed: bool = True
    """Whether the file may be plain, gzip and zstd."""


def workspace(folder: Path) -> None:
    """Put the files of all targets into an empty folder."""
    shutil.copytree(_SEEDS, folder, dirs_exist_ok=True)
    (folder / "nsight").mkdir()
    write_exports(folder / "nsight")
    gpu = folder / "gpu/event_sync.kineto.json.gz"
    gpu.write_bytes(gzip.compress(_with_communication(json.loads(gzip.decompress(gpu.read_bytes())))))
    comms = _unzstd((folder / "recording/rank-0.comms.jsonl.zst").read_bytes())
    (folder / "member.zip").write_bytes(mutate.zip_of(comms))
    refs = {"rank-0.comms.jsonl": comms.decode(), "other": ["recording/rank-0.comms.jsonl", 0, 99]}
    (folder / "member.json").write_text(json.dumps({"version": 1, "refs": refs}))
    for words in (
        f"link --jobs 1 {folder}/recording -o {folder}/linked --compress none",
        f"convert --jobs 1 {folder}/recording -o {folder}/chakra",
    ):
        with contextlib.redirect_stdout(io.StringIO()):
            code = main(words.split())
        if code:
            raise RuntimeError(f"crossrank {words}: exit code {code}")
    for path in list(folder.rglob("*")):  # mutated plain, and packed afterwards
        if path.suffix in (".zst", ".gz"):
            data = path.read_bytes()
            unpacked = gzip.decompress(data) if path.suffix == ".gz" else _unzstd(data)
            path.unlink()
            path.with_name(path.stem).write_bytes(unpacked)


def _with_communication(trace: dict[str, Any]) -> bytes:
    """A Kineto trace of a GPU with kernels of NCCL."""
    start = max(event["ts"] for event in trace["traceEvents"] if "ts" in event)
    trace["distributedInfo"] = {"backend": "nccl", "rank": 0, "world_size": 2, "pg_config": [
        {"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl", "pg_size": 2, "ranks": [0, 1]},
    ]}  # fmt: skip
    for number in range(4):
        said = {"Collective name": "allreduce", "In msg nelems": 1024, "Out msg nelems": 1024, "Group size": 2,
                "dtype": "Float", "Process Group Name": "0", "Process Group Description": "default_pg",
                "Process Group Ranks": "[0, 1]", "Seq": number + 1}  # fmt: skip
        where = {"device": 0, "context": 1, "stream": 20, "correlation": 9_000 + number}
        trace["traceEvents"].append(
            {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", "pid": 0, "tid": 20,
             "ts": start + 100.5 * number, "dur": 50.25, "args": where | said}
        )  # fmt: skip
    return json.dumps(trace).encode()


def _unzstd(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()


def _given(path: str) -> RankSources:
    return RankSources(kind="", path=path, rank=0)


def _nodes(path: str) -> list[object]:
    return list(check(path).faults)


def _window(path: str) -> object:
    folder = Path(path).parents[1] / "recording"
    kineto, comms = str(folder / "rank-0.kineto.json"), str(folder / "rank-0.comms.jsonl")
    return read_window(RankInput(rank=0, window=1, et=path, kineto=kineto, comms=comms))


_COMMS, _ET, _KINETO = "recording/rank-0.comms.jsonl", "recording/rank-0.et.json", "recording/rank-0.kineto.json"
_DUMP, _PICKLE, _LINKED = "recording/rank-0.flight.json", "flight/rank_0", "linked/rank-0.linked.json"
_GPU, _CHAKRA, _EXPORT, _PLAN = "gpu/event_sync.kineto.json", "chakra/chakra.0.et", "nsight/rank_0.sqlite", "plan.json"
_BY_FILE: dict[str, Mutation] = {
    _COMMS: mutate.json_lines,
    _PICKLE: mutate.pickle_opcodes,
    _CHAKRA: mutate.protobuf_fields,
    _EXPORT: mutate.sqlite_tables,
    "replay/replay.csv": mutate.csv_cells,
}


def _command(words: str, file: str, weight: int = 1) -> Target:
    return Target(words, file, _BY_FILE.get(file, mutate.json_tree), None, weight, file not in (_EXPORT,))


def _reader(name: str, file: str, read: Callable[[str], object], weight: int = 30) -> Target:
    return Target(name, file, _BY_FILE.get(file, mutate.json_tree), read, weight, file not in (_EXPORT,))


TARGETS = (
    _reader("comms file", _COMMS, lambda path: sum(1 for _ in CommsFile(path).records()), 60),
    _reader("execution trace", _ET, read_execution_trace, 12),
    _reader("communication trace", _ET, read_communication_trace, 12),
    _reader("Kineto trace", _KINETO, read_kineto),
    _reader("Kineto trace of a GPU", _GPU, read_kineto),
    _reader("flight dump, JSON", _DUMP, read_flight_dump, 60),
    _reader("flight dump, pickle", _PICKLE, read_flight_dump, 60),
    _reader("linked trace", _LINKED, read_linked, 12),
    _reader("Nsight export", _EXPORT, lambda path: read_export(path, 0, {}), 24),
    _reader("Chakra trace", _CHAKRA, _nodes, 24),
    _reader("replay.json", "replay/replay.json", lambda path: read_replay(str(Path(path).parent)), 60),
    _reader("replay.csv", "replay/replay.csv", lambda path: read_replay(str(Path(path).parent)), 60),
    _reader("plan", _PLAN, load_plan, 60),
    _reader("calls of a comms file", _COMMS, lambda path: READERS[COMMS](_given(path)), 60),
    _reader("calls of an execution trace", _ET, lambda path: READERS[EXECUTION_TRACE](_given(path)), 12),
    _reader("calls of a Kineto trace", _KINETO, lambda path: READERS[KINETO](_given(path))),
    _reader("calls of a linked trace", _LINKED, lambda path: READERS[LINKED](_given(path)), 12),
    _command("inspect recording", _COMMS, 3),
    _command("inspect recording --json", _COMMS),
    _command("inspect chakra/chakra.0.et", _CHAKRA),
    _command("link recording -o out", _ET),
    _command("link recording -o out", _KINETO),
    _command("link recording -o out", _COMMS),
    _command("convert recording -o out", _ET),
    _command("convert recording -o out", _KINETO),
    _command("simulate recording --network fitted", _COMMS),
    _command("simulate recording --leave-one-out", _KINETO),
    _command("minimize recording --steps 1:2 -o out", _COMMS),
    _command("anonymize recording -o out --verify", _COMMS),
    _command("anonymize recording -o out", _ET),
    _command("anonymize recording -o out --coarse", _KINETO),
    _command("anonymize recording -o out", _DUMP),
    _command("anonymize flight -o out", _PICKLE),
    _command("anonymize linked -o out", _LINKED),
    _command("anonymize nsight -o out", _EXPORT),
    _command("check chakra/chakra.0.et chakra/chakra.1.et", _CHAKRA, 3),
    _command("check chakra/chakra.0.et", "chakra/comm_groups.json", 2),
    _command("diagnose recording --html out.html --database out.sqlite -o out.json", _DUMP, 3),
    _command("diagnose recording", _COMMS, 2),
    _command("diagnose flight --print-entries", _PICKLE, 3),
    _command("bandwidth recording", _COMMS),
    _command("bandwidth recording", _KINETO),
    _command("bandwidth gpu", _GPU, 2),
    _command("bandwidth linked --json", _LINKED),
    _command("bandwidth nsight", _EXPORT, 2),
    _command("bandwidth replay -o out.json", "replay/replay.csv", 2),
    _command("bandwidth replay", "replay/replay.json", 2),
    _command("bandwidth flight", _PICKLE, 2),
    _command("timeline recording -o out.pftrace", _COMMS, 2),
    _command("timeline nsight recording -o out.pftrace.gz", _EXPORT),
    _command("timeline linked -o out.pftrace", _LINKED),
    _command("timeline recording -o out.pftrace", _DUMP),
    _command("export recording -o out", _COMMS, 2),
    _command("export recording -o out --format csv", _KINETO),
    _command("export gpu -o out --format arrow", _GPU),
    _command("export flight -o out", _PICKLE, 2),
    _command("export nsight -o out --format csv", _EXPORT),
    _command("report recording -o out.html", _COMMS),
    _command("report recording -o out.html", _DUMP),
    _command("report nsight -o out.html", _EXPORT),
    _command("report recording --replay replay -o out.html", "replay/replay.json"),
    _command("replay recording --dry-run", _COMMS, 2),
    _command("replay recording --dry-run --trace-type et", _ET),
    _reader("window with its computation", _ET, _window, 8),
    _command("replay recording --dry-run --compute", _ET),
    _command("replay recording --dry-run --compute", _COMMS),
    _command("replay linked --dry-run --compute", _LINKED),
    _command("replay gpu --dry-run --one-trace", _GPU),
    _command("replay flight/rank_0 --dry-run --one-trace", _PICKLE),
    _command("replay linked --dry-run", _LINKED),
    _command("replay plan.json --dry-run", _PLAN, 3),
    Target("inspect zip://::WORKSPACE/member.zip", "member.zip", mutate.zipped, weight=2, is_packed=False),
    Target(
        "inspect reference://rank-0.comms.jsonl::WORKSPACE/member.json",
        "member.json",
        mutate.json_tree,
        is_packed=False,
    ),
)
