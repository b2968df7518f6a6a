"""Where the ranks of a replay meet, and the clocks that they have there."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from crossrank.replay.run import rendezvous
from crossrank.replay.run.launcher import RankInfo
from crossrank.replay.run.rendezvous import Rendezvous, connect, host_store, listen

_ELSEWHERE = "127.0.0.2"
"""An address of this machine that a server at 127.0.0.1 does not have, and one on all interfaces has."""


def answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_store_on_the_loopback_interface_listens_only_there(host: str) -> None:
    store = listen(host, 0, 5)
    assert answers(host, store.port)
    assert not answers(_ELSEWHERE, store.port)


def test_a_store_for_other_machines_listens_on_all_interfaces() -> None:
    store = listen("0.0.0.0", 0, 5)
    assert answers("127.0.0.1", store.port)
    assert answers(_ELSEWHERE, store.port)


def test_rank_0_on_one_machine_hosts_its_store_on_loopback_only() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    place = RankInfo(rank=0, world_size=2, local_rank=0, launcher="plain variables", host="127.0.0.1", port=port)
    store = host_store(place, 5)
    connect(place, 5).set("a", "b")
    assert store.get("a") == b"b"
    assert not answers(_ELSEWHERE, port)


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
