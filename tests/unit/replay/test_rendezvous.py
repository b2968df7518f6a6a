"""Where the ranks of a replay meet."""

from __future__ import annotations

import socket

import pytest

from crossrank.replay.run.launcher import RankInfo
from crossrank.replay.run.rendezvous import connect, host_store, listen

_ELSEWHERE = "127.0.0.2"
"""An address of this machine that a server at 127.0.0.1 does not have, and one on all interfaces has."""


def answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_store_on_the_loopback_interface_listens_there_alone(host: str) -> None:
    store = listen(host, 0, 5)
    assert answers(host, store.port)
    assert not answers(_ELSEWHERE, store.port)


def test_a_store_for_other_machines_listens_where_they_find_it() -> None:
    store = listen("0.0.0.0", 0, 5)
    assert answers("127.0.0.1", store.port)
    assert answers(_ELSEWHERE, store.port)


def test_rank_0_of_a_launcher_on_one_machine_hosts_its_store_there_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    place = RankInfo(rank=0, world_size=2, local_rank=0, launcher="plain variables", host="127.0.0.1", port=port)
    store = host_store(place, 5)
    connect(place, 5).set("a", "b")
    assert store.get("a") == b"b"
    assert not answers(_ELSEWHERE, port)
