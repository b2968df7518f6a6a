"""Which node and which NVLink domain every rank is on, and so whether a call stays inside one.

Each rank that records publishes one small value under its own key in the job's default store and reads those
of the others when they are there. No collective takes part, nothing waits for a rank, and a rank that does not
record is simply unknown.

A node is told apart by the kernel's boot id, which containers on one host share and host names in pods do not;
where there is none, by the host name. `TRACING_NODE` overrides both.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from crossrank.comm import Locality
from crossrank.errors import one_line

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger("crossrank")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FIRST_PAUSE = 0.005
_LONGEST_PAUSE = 5.0
_GIVE_UP_AFTER = 120.0  # seconds; a rank that has not published by then is not recording


def boot_id() -> str | None:
    """The id that the kernel made at its start; None where the system has none."""
    try:
        return _BOOT_ID.read_text().strip() or None
    except OSError:
        return None


def node_of_this_machine() -> str:
    """What tells this machine from the others of the job."""
    return boot_id() or socket.gethostname()


class Topology:
    """Where the ranks are, filled in from the store while training goes on."""

    def __init__(self, rank: int, world_size: int, node: str, nvlink_domain: str | None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.node = node
        self.nvlink_domain = nvlink_domain
        self._nodes: dict[int, str] = {rank: node}
        self._domains: dict[int, str | None] = {rank: nvlink_domain}
        self._stopped = False
        self.settled = threading.Event()
        """Set when every rank is known, or when waiting for the rest was given up."""
        if world_size == 1:
            self.settled.set()

    def exchange(self, find_store: Callable[[], Store | None], epoch: int) -> None:
        """Publish this rank and collect the others until all are known. Runs on a thread of its own.

        `find_store` gives the job's store, or None once its process group is gone. The store is not held between
        two looks at it: it may host the job's rendezvous, which a next process group finds in the way.
        `epoch` counts the process groups of this job that were torn down and made again.
        """
        try:
            missing = self._poll(find_store, epoch, publish=True)
            pause, started, polls = _FIRST_PAUSE, time.monotonic(), 0
            while missing and not self._stopped and time.monotonic() - started < _GIVE_UP_AFTER:
                time.sleep(pause)
                if time.monotonic() - started > 0.2:
                    pause = min(pause * 1.5, _LONGEST_PAUSE)
                polls += 1
                # Who is there already is asked one by one only now and then.
                missing = self._poll(find_store, epoch, each=polls % 32 == 0)
            if missing and not self._stopped:
                log.info("crossrank: ranks %s do not record; calls with them have locality unknown", missing)
        except Exception as error:
            log.info("crossrank: the nodes of the other ranks are not known: %s", one_line(error))
        finally:
            self.settled.set()

    def _poll(
        self, find_store: Callable[[], Store | None], epoch: int, *, publish: bool = False, each: bool = False
    ) -> list[int]:
        """Read what is there and return the ranks that are still missing; none when the store is gone."""
        from torch.distributed import PrefixStore

        store = find_store()
        if store is None:
            return []
        shared = PrefixStore(f"crossrank/topology/{epoch}", store)
        if publish:
            shared.set(str(self.rank), json.dumps([self.node, self.nvlink_domain]))
        missing = [rank for rank in range(self.world_size) if rank not in self._nodes]
        present: list[int] = []
        if missing and shared.check([str(rank) for rank in missing]):
            present = missing
        elif each:
            present = [rank for rank in missing if shared.check([str(rank)])]
        for rank in present:
            node, domain = json.loads(shared.get(str(rank)))
            self._domains[rank] = domain
            self._nodes[rank] = str(node)
        return [rank for rank in missing if rank not in self._nodes]

    def stop(self) -> None:
        self._stopped = True

    def locality(self, ranks: Iterable[int] | None) -> Locality:
        """How far apart these global ranks are; `unknown` while one of them has not been heard of."""
        if ranks is None:
            return "unknown"
        members = list(ranks)
        nodes = {self._nodes.get(rank) for rank in members}
        if None in nodes:
            # Two known ranks on different nodes decide it, whatever the rest is, unless NVLink joins them.
            known = nodes - {None}
            return "cross_node" if len(known) > 1 and not any(self._domains.values()) else "unknown"
        if len(nodes) <= 1:
            return "intra_node"
        domains = {self._domains.get(rank) for rank in members}
        return "nvlink_domain" if len(domains) == 1 and None not in domains else "cross_node"
