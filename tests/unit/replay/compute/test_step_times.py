"""What a comms file knows of steps: how long they took, and how long of it they waited."""

from __future__ import annotations

import json
from pathlib import Path

from crossrank.replay.plan.compute.step_times import StepTimes, step_times

MS = 1_000_000


def times(folder: Path, sizes: list[int], waits: list[tuple[str, int, int]] = []) -> StepTimes:  # noqa: B006
    """Of steps of 10 ms, each with one call of that many bytes, and a window over the second; `waits` are (where it
    waited_in, begin, ms)."""
    header = {"schema": "crossrank-comms 1", "rank": 0, "world_size": 2, "host": "h", "node": "n"}
    lines: list[object] = [{"header": header | {"clock": {"t": 0, "wall": 0}}}]
    lines.append({"group": {"pg": "0", "size": 2, "ranks": [0, 1]}})
    for step, size in enumerate(sizes):
        lines.append({"step": {"t": 10 * MS * step, "step": step}})
        call = {"id": step, "op": "all_reduce", "c10d": "allreduce_", "pg": "0", "bytes": size, "step": step}
        lines.append(call | {"t": 10 * MS * step + 1, "seq": step})
    lines.append({"step": {"t": 10 * MS * len(sizes), "step": len(sizes)}})
    lines += [{"window": {"edge": edge, "window": 1, "step": 1, "t": 0}} for edge in ("open", "closed")]
    lines += [{"wait": {"t": t * MS, "took": took * MS, "thread": 1, "in": where}} for where, t, took in waits]
    path = folder / "rank-0.comms.jsonl"
    path.write_text("\n".join(map(json.dumps, [*lines, {"end": {}}])) + "\n")
    return step_times(str(path), 0, 1)


def test_steps_with_equal_bytes_are_compared_without_their_waits(tmp_path: Path) -> None:
    waits = [("wait", 42, 3), ("wait_tensor", 46, 1), ("launch", 47, 2), ("wait", 51, 5)]
    found = times(tmp_path, [4, 4, 4, 4, 4, 8], waits)
    assert found.profiled_ns == [10 * MS]
    # The steps beside the window are touched by the profiler, and the last moved more.
    assert (found.unprofiled_ns, found.own_ns, found.others) == ([10 * MS] * 2, [10 * MS, 6 * MS], 1)
    assert not found.has_other_sizes


def test_steps_with_equal_operations_count_if_none_has_equal_bytes(tmp_path: Path) -> None:
    found = times(tmp_path, [1, 2, 3, 4, 5], [("wait", 31, 2)])
    assert (found.unprofiled_ns, found.own_ns, found.others) == ([10 * MS] * 2, [8 * MS, 10 * MS], 0)
    assert found.has_other_sizes
