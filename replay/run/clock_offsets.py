"""How far the monotonic clocks of the machines are apart.

Processes of one boot of one machine share the clock. Of every other machine one rank measures the distance to rank 0
by sending the time to and fro over the store: of several round trips the fastest counts, and half of it is the error.
It is measured before and after the passes, for clocks drift.
"""

from __future__ import annotations

import time

from crossrank.machine import boot_id
from crossrank.replay.run.rendezvous import Rendezvous

_ROUNDS = 16

Offset = tuple[int, int]
"""(ns to add to this rank's clock to have rank 0's, largest error in ns)"""


def measure_offset(rendezvous: Rendezvous, rank: int, when: str) -> Offset:
    """The offset of this rank's clock. All ranks call it together; `when` names the occasion."""
    store = rendezvous.store
    store.set(f"{when}/machine/{rank}", boot_id() or f"rank {rank}")
    if rank == 0:
        first: dict[bytes, int] = {}
        for other in range(rendezvous.world_size):
            leader = first.setdefault(store.get(f"{when}/machine/{other}"), other)
            store.set(f"{when}/leader/{other}", str(leader))
        for leader in list(first.values())[1:]:
            for trip in range(_ROUNDS):
                store.get(f"{when}/{leader}/ping/{trip}")
                store.set(f"{when}/{leader}/pong/{trip}", str(time.monotonic_ns()))
    leader = int(store.get(f"{when}/leader/{rank}"))
    if leader == 0:
        return 0, 0
    if leader == rank:
        trips = []
        for trip in range(_ROUNDS):
            sent = time.monotonic_ns()
            store.set(f"{when}/{rank}/ping/{trip}", "1")
            there = int(store.get(f"{when}/{rank}/pong/{trip}"))
            back = time.monotonic_ns()
            trips.append(((back - sent) // 2, there - (sent + back) // 2))
        error, offset = min(trips)
        store.set(f"{when}/offset/{rank}", f"{offset} {error}")
    offset, error = map(int, store.get(f"{when}/offset/{leader}").split(b" "))
    return offset, error


def between(start: Offset, end: Offset) -> Offset:
    """The offset in the middle of two measurements, with half of what they are apart added to the error.

    >>> between((1000, 10), (1400, 20))
    (1200, 220)
    """
    return (start[0] + end[0]) // 2, max(start[1], end[1]) + abs(end[0] - start[0]) // 2
