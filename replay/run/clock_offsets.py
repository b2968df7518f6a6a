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
    machine = boot_id() or f"rank {rank}"
    if rank == 0:
        store.set(f"{when}/home", machine)
    at_home = store.get(f"{when}/home").decode() == machine
    leader = 0 if at_home else int(store.compare_set(f"{when}/leader/{machine}", "", str(rank)))
    if leader == rank and rank:
        store.set(f"{when}/machines/{store.add(f'{when}/machines', 1)}", str(rank))
    # Whoever counts last knows that all machines have been counted.
    if store.add(f"{when}/counted", 1) == rendezvous.world_size:
        store.set(f"{when}/all", "1")
    if rank == 0:
        store.get(f"{when}/all")
        for number in range(1, store.add(f"{when}/machines", 0) + 1):
            asker = f"{when}/{store.get(f'{when}/machines/{number}').decode()}"
            for trip in range(_ROUNDS):
                store.get(f"{asker}/ping/{trip}")
                store.set(f"{asker}/pong/{trip}", str(time.monotonic_ns()))
        store.set(f"{when}/offset/0", "0 0")
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
    if leader == 0:
        return 0, 0
    offset, error = map(int, store.get(f"{when}/offset/{leader}").split(b" "))
    return offset, error


def between(start: Offset, end: Offset) -> Offset:
    """The offset in the middle of two measurements, with half of what they are apart added to the error.

    >>> between((1000, 10), (1400, 20))
    (1200, 220)
    """
    return (start[0] + end[0]) // 2, max(start[1], end[1]) + abs(end[0] - start[0]) // 2
