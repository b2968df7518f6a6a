"""Dumps of simulated jobs with what crossrank adds to them: when and why they were taken, and how their rank ended."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.unit.analysis.diagnosis.simulated_jobs import SimulatedJob, as_json

SECOND = 1_000_000_000
CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:21141."
"""What gloo raises on a rank because another one has ended."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """How and when the dump of a rank was taken."""

    reason: str = "hang"
    after: float = 3.0
    """Seconds from the rank's last call to the dump."""
    error: str | None = None
    host: str = "node0"
    world_size: int | None = None
    """None: the size of the job."""
    stacks: tuple[tuple[str, tuple[tuple[str, str, int], ...]], ...] = ()
    """(thread, its frames as (function, file, line))"""
    thread: str = "MainThread"
    """The one that `error` ended."""
    causes: tuple[str, ...] = ()
    """Texts of the exceptions that `error` was raised from."""
    traceback: tuple[tuple[str, str, int], ...] = ()
    source: str | None = None
    """`file:line` of the calls, as the record beside the dump has it."""
    failed_groups: tuple[str, ...] = ()
    timed_out: bool = False
    """gloo has retired the call that did not end."""


def write_moments(job: SimulatedJob, folder: Path, moments: dict[int, Moment]) -> None:
    """Run `job` to where nothing moves and write the dumps of the ranks in `moments`."""
    job.run()
    folder.mkdir(parents=True, exist_ok=True)
    for rank, moment in moments.items():
        dump = job.dump(rank)
        entries = dump["entries"]
        if moment.timed_out and entries:
            entries[-1]["retired"] = True
        last = entries[-1]["time_created_ns"] if entries else job.first_ns
        raised: dict[str, Any] = {"thread": moment.thread, "error": moment.error, "causes": list(moment.causes)}
        raised["frames"] = _frames(moment.traceback)
        about = {"rank": rank, "world_size": moment.world_size or job.world_size, "host": moment.host}
        said: dict[str, Any] = about | {
            "failed_groups": list(moment.failed_groups),
            "reason": moment.reason,
            "error": moment.error,
            "time_ns": last + int(moment.after * SECOND),
            "clock": {"t": 0, "wall": 0},
            "groups": job.described(rank),
            "calls": [_record(entry, moment.source) for entry in entries] if moment.source else [],
            "stacks": [{"thread": thread, "frames": _frames(frames)} for thread, frames in moment.stacks],
            "exceptions": [raised] if moment.error else [],
        }
        content = json.loads(as_json(dump)) | {"crossrank": said}
        (folder / f"rank-{rank}.flight.json").write_text(json.dumps(content))


def _record(entry: dict[str, Any], source: str) -> dict[str, Any]:
    op = entry["profiling_name"].partition(":")[2]
    names = {"op": op, "c10d": op, "api": op, "pg": entry["process_group"][0], "source": source}
    numbers = {"id": entry["record_id"], "t": entry["time_created_ns"], "seq": entry["collective_seq_id"], "bytes": 4}
    return numbers | names


def _frames(frames: tuple[tuple[str, str, int], ...]) -> list[dict[str, Any]]:
    return [{"name": name, "filename": filename, "line": line} for name, filename, line in frames]
