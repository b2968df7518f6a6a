"""Which node and which NVLink domain every rank is on, and so whether a call stays inside one.

Each rank that records publishes one small value under its own key in the job's default store. The first to do so
collects the others' and publishes all of them under one key, which everybody reads: a few requests per rank, however
many ranks there are. No collective takes part, nothing waits for a rank, and a rank that does not record is simply
unknown.

A node is identified by the kernel's boot id, which containers on one host share and host names in pods do not;
where there is none, by the host name. `TRACING_NODE` overrides both.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from crossrank.comm import Locality
from crossrank.errors import one_line
from crossrank.instrument import threads
from crossrank.instrument.log import log
from crossrank.machine import boot_id
from crossrank.rank_runs import Run, from_runs, to_runs

if TYPE_CHECKING:
    from torch.distributed import Store

_FIRST_PAUSE = 0.005
_PAUSE_PER_RANK = 2e-5
"""Seconds: all ranks together look at the store 50,000 times a second at most."""
_LONGEST_PAUSE = 5.0
_GIVE_UP_AFTER = 120.0  # seconds; a rank that has not published by then is not recording
_STANDSTILL = 16
"""Looks without a new rank after which the collector publishes those that it knows."""
_PATIENCE = 24
"""Looks without news of the collector after which a rank looks for itself."""

# node, NVLink domain
Place = tuple[str, str | None]
# a place and the ranks there as runs: what everybody reads has the size of the nodes, not of the ranks
Inhabited = tuple[Place, list[Run]]


def node_of_this_machine() -> str:
    """An identifier of this machine within the job."""
    return boot_id() or socket.gethostname()


class Topology:
    """Where the ranks are, filled in from the store while training goes on.

    Keys in the store: `published` counts the ranks that have published, each its place under its number; `known` counts
    the ranks in `places`, which the collector writes.
    """

    def __init__(self, rank: int, world_size: int, place: Place) -> None:
        self.rank = rank
        self.world_size = world_size
        self.places = {rank: place}
        """Where the ranks are that are known."""
        self.settled = threading.Event()
        """Set when every rank is known, or when waiting for the rest was given up."""
        if world_size == 1:
            self.settled.set()
        self._stopped = False
        self._collects = False
        self._published = 0
        self._known = 0
        self._looks = 0

    def start(self, find_store: Callable[[], Store | None], epoch: int, domain: Callable[[], str | None]) -> None:
        """Begin to `exchange` on a thread."""
        if threads.start("topology", lambda: self.exchange(find_store, epoch, domain)) is None:
            self.settled.set()

    def exchange(
        self, find_store: Callable[[], Store | None], epoch: int, domain: Callable[[], str | None] | None = None
    ) -> None:
        """Publish this rank and learn of the others until all are known. Runs on a thread of its own.

        `find_store` gives the job's store, or None once its process group is gone. The store is not held between
        two looks at it: it may host the job's rendezvous, which a next process group finds in the way.
        `epoch` counts the process groups of this job that were torn down and made again. `domain` gives this
        rank's NVLink domain where that is not known yet, and may take its time.
        """

        def with_store(work: Callable[[Store], None]) -> None:
            from torch.distributed import PrefixStore

            if (store := find_store()) is not None:
                work(PrefixStore(f"crossrank/topology/{epoch}", store))
            else:
                self.stop()

        try:
            if domain is not None:
                self.places[self.rank] = (self.places[self.rank][0], domain())
            with_store(self.publish)
            pause, started = max(_FIRST_PAUSE, self.world_size * _PAUSE_PER_RANK), time.monotonic()
            while self.missing() and not self._stopped and time.monotonic() - started < _GIVE_UP_AFTER:
                time.sleep(pause)
                if time.monotonic() - started > 0.2:
                    pause = min(pause * 1.5, _LONGEST_PAUSE)
                with_store(self.collect)
            if not self._stopped and (silent := self.missing()):
                log.info("crossrank: ranks %s do not record; calls with them have locality unknown", silent)
        except Exception as error:
            log.info("crossrank: the nodes of the other ranks are unknown: %s", one_line(error))
        finally:
            self.settled.set()

    def missing(self) -> list[int]:
        """The ranks that are not known yet."""
        return [rank for rank in range(self.world_size) if rank not in self.places]

    def stop(self) -> None:
        self._stopped = True

    def locality(self, ranks: Iterable[int] | None) -> Locality:
        """How far apart these global ranks are; `unknown` while one of them is not known yet."""
        if ranks is None:
            return "unknown"
        members = {self.places.get(rank) for rank in ranks}
        known = [place for place in members if place is not None]
        crosses = len({node for node, _ in known}) > 1
        if None in members:
            # Two known ranks on different nodes decide it, whatever the rest is, unless NVLink joins them.
            has_nvlink = any(domain for _, domain in list(self.places.values()))
            return "cross_node" if crosses and not has_nvlink else "unknown"
        if not crosses:
            return "intra_node"
        domains = {domain for _, domain in known}
        return "nvlink_domain" if len(domains) == 1 and None not in domains else "cross_node"

    def publish(self, store: Store) -> None:
        store.set(str(self.rank), msgspec.json.encode(self.places[self.rank]).decode())
        self._collects = store.add("published", 1) == 1

    def collect(self, store: Store) -> None:
        """One look at what is new."""
        if self._collects:
            self._gather(store)
        elif (known := store.add("known", 0)) > self._known:
            self._known, self._looks = known, 0
            for place, runs in msgspec.json.decode(store.get("places"), type=list[Inhabited]):
                self.places.update(dict.fromkeys(from_runs(runs) or (), place))
        else:
            self._looks += 1
            if self._looks % _PATIENCE == 0:  # the collector may be gone
                self._read(store, self.missing())

    def _gather(self, store: Store) -> None:
        """Read the others once all have published, or no more come, and publish what is known."""
        published = store.add("published", 0)
        self._looks = self._looks + 1 if published == self._published else 0
        self._published = published
        if published < self.world_size and self._looks != _STANDSTILL:
            return
        missing = self.missing()
        if not self._read(store, missing):
            # A rank does not record, or has published twice: each is looked for on its own.
            self._read(store, [rank for rank in missing if store.check([str(rank)])])
        ranks_of: dict[Place, list[int]] = {}
        for rank, place in sorted(self.places.items()):
            ranks_of.setdefault(place, []).append(rank)
        inhabited = [(place, to_runs(ranks)) for place, ranks in ranks_of.items()]
        store.set("places", msgspec.json.encode(inhabited).decode())
        known = len(self.places)
        if known > self._known:
            store.add("known", known - self._known)
            self._known = known

    def _read(self, store: Store, ranks: list[int]) -> bool:
        """Read where these ranks are if all have published: the store would wait for a key that is not there."""
        keys = [str(rank) for rank in ranks]
        if not keys or not store.check(keys):
            return False
        places = zip(ranks, store.multi_get(keys), strict=True)
        self.places.update({rank: msgspec.json.decode(place, type=Place) for rank, place in places})
        return True
