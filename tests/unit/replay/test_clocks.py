"""Clocks of several machines are compared once per machine, and a machine's own ranks share one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from crossrank.replay.run import rendezvous
from crossrank.replay.run.rendezvous import Rendezvous


@pytest.mark.parametrize("machines", [["a"], ["a", "a", "a"], ["a", "b"], ["a", "b", "b", "c", "a", "b"], ["", "", ""]])
def test_every_rank_gets_the_offset_of_its_machine(machines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    here = threading.local()
    monkeypatch.setattr(rendezvous, "boot_id", lambda: here.machine)
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))

    def measure(rank: int) -> rendezvous.Offset:
        here.machine = machines[rank]
        return rendezvous.measure_offset(Rendezvous(store, len(machines)), rank, "start")

    with ThreadPoolExecutor(len(machines)) as pool:
        found = list(pool.map(measure, range(len(machines))))
    for machine, (offset, error) in zip(machines, found, strict=True):
        if machine and machine == machines[0]:
            assert (offset, error) == (0, 0)
        else:
            # All threads read one clock, so what is found is wrong by no more than it says.
            assert abs(offset) <= error + 1
            assert machine == "" or (offset, error) == found[machines.index(machine)]
    assert found[0] == (0, 0)
