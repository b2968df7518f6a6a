"""How far the monotonic clocks of the machines are apart.

Processes of one boot of one machine share the clock. Of every other machine one rank measures the distance to rank 0
by sending the time to and fro over the store: of several round trips the fastest counts, and half of it is the error.
"""

from __future__ import annotations

import time
from pathlib import Path

from crossrank.replay.meeting import Meeting

_ROUNDS = 16


def boot_id() -> str:
    """What tells this boot of this machine from every other."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def measure_offset(meeting: Meeting, rank: int) -> tuple[int, int]:
    """(ns to add to this rank's clock to have rank 0's, largest error in ns). All ranks call it together."""
    store = meeting.store
    store.set(f"boot/{rank}", boot_id() or f"rank {rank}")
    boots = [store.get(f"boot/{other}") for other in range(meeting.world_size)]
    leaders = {boot: boots.index(boot) for boot in boots}
    leader = leaders[boots[rank]]
    if rank == 0:
        for other in sorted(leaders.values()):
            if other:
                for number in range(_ROUNDS):
                    store.get(f"ping/{other}/{number}")
                    store.set(f"pong/{other}/{number}", str(time.monotonic_ns()))
        return 0, 0
    if leader == 0:
        return 0, 0
    if rank != leader:
        offset, error = store.get(f"offset/{leader}").split(b" ")
        return int(offset), int(error)
    best: tuple[int, int] | None = None
    for number in range(_ROUNDS):
        sent = time.monotonic_ns()
        store.set(f"ping/{rank}/{number}", "1")
        there = int(store.get(f"pong/{rank}/{number}"))
        back = time.monotonic_ns()
        found = ((back - sent) // 2, there - (sent + back) // 2)
        best = found if best is None or found < best else best
    assert best is not None
    store.set(f"offset/{rank}", f"{best[1]} {best[0]}")
    return best[1], best[0]
