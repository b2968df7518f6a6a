"""Finds the node and NVLink domain of every rank, and from them the locality of a call.

Each recording rank publishes one small value under its own key in the job's default store. The first such rank is the
collector: it publishes all values as one, which every rank reads. This takes three requests per rank if all publish
within the first pause, and one more per later look; each pause is longer than the one before. It uses no collective
and waits for no rank. A rank that does not record is unknown.

A node is identified by the kernel's boot id, which containers on one node share, while host names of pods differ.
Without a boot id, the host name is used. `TRACING_NODE` overrides both.
"""

from __future__ import annotations

import base64
import hashlib
import socket
import zlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from crossrank.comm import Locality
from crossrank.errors import one_line
from crossrank.instrument import threads
from crossrank.instrument.log import log
from crossrank.instrument.store_requests import StoreRequests
from crossrank.instrument.unpatched import threading, time
from crossrank.machine import boot_id
from crossrank.rank_runs import Run, from_runs, to_runs
from crossrank.text import rank_ranges

if TYPE_CHECKING:
    from torch.distributed import Store

_FIRST_PAUSE = 0.005
_PAUSE_PER_RANK = 1e-4
"""Seconds: together, all ranks ask the store at most 10,000 times per second."""
_FEW_RANKS = 256
_COLLECTOR_PAUSE = 0.002
_COLLECTOR_PAUSE_PER_RANK = 1e-5
_STANDSTILL = 5.0
"""Seconds without a new rank after which the collector publishes the known ranks."""
_PATIENCE = 10.0
"""Seconds without news from the collector after which another rank becomes the collector."""
_GIVE_UP_AFTER = 120.0
"""Seconds after which a rank that has not published counts as not recording."""
_NOTHING = "-"

# (result of `_short` for the node, NVLink domain)
Place = tuple[str, str | None]
# a place and its ranks as runs: the value that every rank reads grows with the nodes, not the ranks
Inhabited = tuple[Place, list[Run]]


def node_of_this_machine() -> str:
    """Return an identifier of this node within the job."""
    return boot_id() or socket.gethostname()


class Topology:
    """The places of the ranks, read from the store during training.

    Keys in the store: `published` counts the ranks that have published their place, each under its number. The key
    `places` has all places that the collector knows. The key `collector K` counts the ranks that want to be the
    collector after K others.
    """

    def __init__(self, rank: int, world_size: int, node: str, domain: str | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.node = node
        self.places = {rank: (_short(node), domain)}
        """The places of the known ranks."""
        self.settled = threading.Event()
        """Set when every rank is known, or the wait for the others has ended."""
        if world_size == 1:
            self.settled.set()
        self._stopped = False
        self._requests = StoreRequests()
        self._collects = False
        self._collectors = 0
        self._published = 0
        self._lacks = False
        """Whether some rank had not published at the last look of the collector."""
        self._heard = 0.0
        """Time of the last news from the collector, or of this rank as the collector."""
        self._known = _NOTHING.encode()

    def start(self, find_store: Callable[[], Store | None], epoch: int, domain: Callable[[], str | None]) -> None:
        """Start `exchange` on a thread."""
        if threads.start("topology", lambda: self.exchange(find_store, epoch, domain)) is None:
            self.settled.set()

    def exchange(
        self, find_store: Callable[[], Store | None], epoch: int, domain: Callable[[], str | None] | None = None
    ) -> None:
        """Publish this rank and read the others until all are known. Runs on its own thread.

        `find_store` returns the job's store, or None once its process group is destroyed. No reference to the store is
        kept between two looks: the store may host the job's rendezvous, and would block the next process group. The
        number `epoch` counts the process groups of this job that were destroyed and created again. `domain` returns the
        NVLink domain of this rank if it is unknown; it may be slow.
        """

        def with_store(work: Callable[[Store], None]) -> None:
            from torch.distributed import PrefixStore

            with self._requests.one() as may_ask:
                store = find_store() if may_ask else None
                if store is None:
                    self._stopped = True
                    return
                work(PrefixStore(f"crossrank/topology/{epoch}", store))

        try:
            if domain is not None:
                self.places[self.rank] = (_short(self.node), domain())
            with_store(self.publish)
            pause, started = max(_FIRST_PAUSE, self.world_size * _PAUSE_PER_RANK), time.monotonic()
            while self.missing() and not self._stopped and time.monotonic() - started < _GIVE_UP_AFTER:
                if self._collects:
                    time.sleep(max(_COLLECTOR_PAUSE, self.world_size * _COLLECTOR_PAUSE_PER_RANK))
                else:
                    time.sleep(pause)
                    pause *= 2 if self.world_size <= _FEW_RANKS else 4
                with_store(self.collect)
            if not self._stopped and (silent := self.missing()):
                log.info(
                    "crossrank: ranks %s do not record; calls with them have locality unknown", rank_ranges(silent)
                )
        except Exception as error:
            log.info("crossrank: the nodes of the other ranks are unknown: %s", one_line(error))
        finally:
            self.settled.set()

    def missing(self) -> list[int]:
        """Return the unknown ranks."""
        return [rank for rank in range(self.world_size) if rank not in self.places]

    def stop(self, *, wait: bool = False) -> None:
        """Stop asking the store. With `wait`, wait a few seconds for a pending answer."""
        self._stopped = True
        self._requests.end(wait=wait)

    def locality(self, ranks: Iterable[int] | None) -> Locality:
        """Return the locality of these global ranks; `unknown` while one of them is unknown."""
        if ranks is None:
            return "unknown"
        members = {self.places.get(rank) for rank in ranks}
        known = [place for place in members if place is not None]
        crosses = len({node for node, _ in known}) > 1
        if None in members:
            # Two known ranks on different nodes decide it, unless NVLink may join them.
            has_nvlink = any(domain for _, domain in list(self.places.values()))
            return "cross_node" if crosses and not has_nvlink else "unknown"
        if not crosses:
            return "intra_node"
        domains = {domain for _, domain in known}
        return "nvlink_domain" if len(domains) == 1 and None not in domains else "cross_node"

    def publish(self, store: Store) -> None:
        store.set(str(self.rank), msgspec.json.encode(self.places[self.rank]).decode())
        self._collects = store.add("published", 1) == 1
        self._heard = time.monotonic()

    def collect(self, store: Store) -> None:
        """Read the new places once."""
        if self._collects:
            self._gather(store)
            return
        known = store.compare_set("places", _NOTHING, _NOTHING)  # reads the value without waiting for it
        if known != self._known:
            self._known, self._heard = known, time.monotonic()
            for place, runs in _unpack(known):
                self.places.update(dict.fromkeys(from_runs(runs) or (), place))
        elif time.monotonic() - self._heard > _PATIENCE:  # the collector may be gone
            self._collectors += 1
            self._collects = store.add(f"collector {self._collectors}", 1) == 1
            self._heard = time.monotonic()

    def _gather(self, store: Store) -> None:
        """Read the other ranks once all have published, or none is new for a while. Publish the known places."""
        published = store.add("published", 0)
        if published != self._published:
            self._published, self._heard = published, time.monotonic()
        if (published < self.world_size or self._lacks) and time.monotonic() - self._heard < _STANDSTILL:
            return
        self._heard = time.monotonic()
        missing, known = self.missing(), len(self.places)
        self._lacks = not self._read(store, missing)
        if self._lacks:
            # A rank does not record, or has published twice: look for each rank separately.
            self._read(store, [rank for rank in missing if store.check([str(rank)])])
        if len(self.places) == known > 1:
            return
        ranks_of: dict[Place, list[int]] = {}
        for rank, place in sorted(self.places.items()):
            ranks_of.setdefault(place, []).append(rank)
        store.set("places", _pack([(place, to_runs(ranks)) for place, ranks in ranks_of.items()]))

    def _read(self, store: Store, ranks: list[int]) -> bool:
        """Read the places of these ranks if all have published: the store would wait for a missing key."""
        keys = [str(rank) for rank in ranks]
        if not keys or not store.check(keys):
            return False
        places = zip(ranks, store.multi_get(keys), strict=True)
        self.places.update({rank: msgspec.json.decode(place, type=Place) for rank, place in places})
        return True


def _short(node: str) -> str:
    """Return a short hash of a node: every rank reads all of them."""
    return hashlib.sha256(node.encode(errors="replace")).hexdigest()[:12]


def _pack(inhabited: list[Inhabited]) -> str:
    return base64.b85encode(zlib.compress(msgspec.json.encode(inhabited))).decode()


def _unpack(packed: bytes) -> list[Inhabited]:
    return msgspec.json.decode(zlib.decompress(base64.b85decode(packed)), type=list[Inhabited])
