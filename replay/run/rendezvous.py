"""The rendezvous of a replay's processes: a key-value store for plans, states and results.

The store is torch's TCPStore. Its host is the process that the user started (one machine), torchrun's agent, or rank 0.
Any process that can connect to it can change the replay. So if the ranks meet on the loopback interface, the store
listens only there; torch's own server would listen on every interface.

Each value has an HMAC. Its key comes from the process that started the ranks, or under a launcher from the variable
`CROSSRANK_REPLAY_KEY`. A value with a wrong HMAC ends the replay. Ranks keep their states here for reports of failures;
a state with a wrong HMAC is not shown. Without a key, every process can make a valid HMAC. So the store names no module
and no folder (`OwnOptions`), and a small value cannot expand to a huge one.
"""

from __future__ import annotations

import hmac
import socket
import time
from datetime import timedelta
from ipaddress import ip_address
from typing import Any, TypeVar

import msgspec
import zstandard
from torch.distributed import FileStore, PrefixStore, Store, TCPStore

from crossrank.budget import BYTES, Budget
from crossrank.errors import BROKEN, CrossrankError, one_line
from crossrank.machine import boot_id, network_cards
from crossrank.replay.plan.plan import Plan
from crossrank.replay.plan.probe import Machine
from crossrank.replay.plan.streams import choose_streams
from crossrank.replay.run.launcher import KEY, RankInfo
from crossrank.replay.run.messages import OwnOptions, RankResult, State, WorkItem
from crossrank.text import rank_ranges
from crossrank.tools.traces.replayed import Settings

ABORT = "abort"
_POLL_S = 0.05
_RANK0_WAIT_S = 1800.0
"""How long a rank waits for rank 0, which first reads the files of all ranks."""
FINISHED = "finished"

_HASH = "sha256"
_SEAL_BYTES = 32
_MOST_STATE_BYTES = 1 << 16
_CHUNK = 1 << 20
_ROUNDS = 16
"""Round trips for a comparison of clocks."""

Content = TypeVar("Content")
Offset = tuple[int, int]
"""(ns to add to this rank's clock to get rank 0's, largest error in ns)"""


class NoPlanError(Exception):
    """Rank 0 has reported why there is nothing to replay; the other ranks end silently."""


def host_store(place: RankInfo, timeout_s: float) -> Store:
    """Return the store; rank 0 hosts it. Raises `CrossrankError` if that fails."""
    hosting = place.rank == 0 and not place.agent_store and not place.file
    # Rank 0 hosts the store after it has read and matched everything, so the others wait longer.
    patience_s = timeout_s if place.rank == 0 else max(timeout_s, _RANK0_WAIT_S)
    try:
        if not hosting:
            store = connect(place, patience_s)
            if place.file and place.rank == 0 and store.add("replays", 1) > 1:
                raise CrossrankError(f"--init-method: {place.file} belongs to another replay; give a new file")
            return store
        return PrefixStore(place.attempt, listen(place.host, place.port, patience_s))
    except (RuntimeError, OSError) as error:
        text = one_line(error)
        if hosting and ("in use" in text.lower() or "EADDRINUSE" in text):
            raise CrossrankError(
                f"port {place.port} of {place.host} is in use; set MASTER_PORT (or --master-port) to a free one"
            ) from error
        if place.file:
            raise CrossrankError(
                f"--init-method: {place.file} cannot be used ({text}); give a new file that all ranks can write"
            ) from error
        raise CrossrankError(
            f"rank {place.rank} found no rank 0 at {place.host}:{place.port} within {patience_s:g} s; "
            "see what rank 0 says, or set MASTER_ADDR and MASTER_PORT"
        ) from error


def listen(host: str, port: int, timeout_s: float) -> TCPStore:
    """Return a store that this process hosts, at a free port if `port` is 0. If `host` is a loopback address or
    `localhost`, it listens only there. Otherwise it listens on all interfaces, since `host` may name none here. Raises
    `OSError` or `RuntimeError` if it cannot."""
    own: dict[str, Any] = {}
    if _is_loopback(host):
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family)
        port = listener.getsockname()[1]
        # torch 2.4's libuv accepts no listening socket.
        own = {"master_listen_fd": listener.detach(), "use_libuv": False}
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False, **own)


def _is_loopback(host: str) -> bool:
    # No look-up: /etc/hosts often has the machine's own name at 127.0.1.1, while others reach it by that name.
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def connect(place: RankInfo, timeout_s: float) -> Store:
    """Connect to the store that rank 0 hosts."""
    timeout = timedelta(seconds=timeout_s)
    if place.file:
        return PrefixStore(place.attempt, FileStore(place.file))
    store = TCPStore(place.host, place.port, is_master=False, timeout=timeout, wait_for_workers=False)
    return PrefixStore(place.attempt, store)


class Rendezvous:
    """The store, with the keys that a replay uses in it."""

    def __init__(self, store: Store, world_size: int, turn: int = 0, *, key: bytes = b"") -> None:
        """`turn` numbers the replays that share a store. Only processes with the same `key` can put valid values
        there."""
        self.store = PrefixStore(f"crossrank/{turn}", store)
        self.world_size = world_size
        self._turn = turn
        self._key = key

    def send_plan(self, plan: Plan, settings: Settings) -> None:
        """Send every rank its part."""
        streams = choose_streams(plan, settings.device)
        fits_host = any(one.compute is not None and one.compute.own_ns is not None for one in plan.ranks)
        for rank in plan.ranks:
            item = WorkItem(
                settings=OwnOptions().put_into(settings),
                groups=plan.groups,
                calls=rank.calls,
                compute=rank.compute,
                streams=streams,
                fits_host=fits_host,
                world_size=plan.world_size,
            )
            self.put(f"work/{rank.rank}", item)

    def send_end(self) -> None:
        """Send every rank except 0 that there is no more work."""
        for rank in range(1, self.world_size):
            self.put(f"work/{rank}", WorkItem(ends=True))

    def work_item(self, rank: int) -> WorkItem:
        """Wait for the work of `rank` while rank 0 is alive, and return it. Raises `NoPlanError` if there is none."""
        self.wait_for(f"work/{rank}")
        return self._get(f"work/{rank}", WorkItem)

    def wait_for(self, key: str) -> None:
        """Wait until `key` is there, without a time limit. Raises `NoPlanError` when all ranks have to end."""
        while not self.store.check([key]):
            if self.aborted():
                raise NoPlanError
            time.sleep(_POLL_S)

    def tell_machine(self, rank: int) -> None:
        """Publish the host of `rank`, which is this process."""
        self.put(f"machine/{rank}", Machine(socket.gethostname(), network_cards()))

    def machines(self, patience_s: float) -> list[Machine]:
        """Return the host of every rank. Raises `CrossrankError` if some are missing after `patience_s`."""
        keys = [f"machine/{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + patience_s
        while missing := [rank for rank, key in enumerate(keys) if not self.store.check([key])]:
            if time.monotonic() > deadline:
                raise CrossrankError(f"ranks {rank_ranges(missing)} did not join within {patience_s:g} s (--timeout)")
            time.sleep(_POLL_S)
        return [self._get(key, Machine) for key in keys]

    def states(self) -> dict[int, State]:
        """Return the last state of every rank that has reported one."""
        found = {}
        for rank in range(self.world_size):
            if self.store.check([f"state/{rank}"]):
                try:
                    found[rank] = self._get(f"state/{rank}", State, most=_MOST_STATE_BYTES)
                except CrossrankError:
                    found[rank] = State(phase="unknown", error="another process replaced its state in the store")
        return found

    def results(self) -> list[RankResult]:
        """Wait for the results of all ranks, and return them."""
        return [self._get(f"result/{rank}", RankResult) for rank in range(self.world_size)]

    def has_all_results(self) -> bool:
        return self.store.check([f"result/{rank}" for rank in range(self.world_size)])

    def abort(self) -> None:
        """Ask all ranks to report their state and to end."""
        self.store.set(ABORT, "1")

    def aborted(self) -> bool:
        return self.store.check([ABORT])

    def put(self, key: str, value: object) -> None:
        content = zstandard.compress(msgspec.msgpack.encode(value))
        self.store.set(key, self._seal(key, content) + content)  # type: ignore[arg-type]

    def _get(self, key: str, content: type[Content], *, most: int | None = None) -> Content:
        """Return the value of `key`, which has `most` bytes (None: as many as a file of its size may have). Raises
        `CrossrankError` if no rank of this replay put it there."""
        found = self.store.get(key)
        seal, packed = found[:_SEAL_BYTES], found[_SEAL_BYTES:]
        is_ours = hmac.compare_digest(seal, self._seal(key, packed))
        try:
            if is_ours:
                return msgspec.msgpack.decode(_unpack(packed, most), type=content)
        except (*BROKEN, zstandard.ZstdError, CrossrankError):
            is_ours = False  # without a key, every process can seal
        raise CrossrankError(
            f"the store of this replay holds a {key!r} that none of its ranks put there, or ranks have different "
            f"keys; give all of them one {KEY}, and start again"
        )

    def _seal(self, key: str, content: bytes) -> bytes:
        return hmac.digest(self._key, f"{self._turn}/{key}/".encode() + content, _HASH)


def _unpack(packed: bytes, most: int | None) -> bytes:
    """Return the uncompressed content. Raises `CrossrankError` if it has more than `most` bytes, or far more than real
    content of its size."""
    budget, parts, size = Budget("the store", len(packed)), [], 0
    with zstandard.ZstdDecompressor().stream_reader(packed) as reader:
        while part := reader.read(_CHUNK):
            budget.spend(BYTES, len(part))
            size += len(part)
            if most is not None and size > most:
                raise CrossrankError(f"the store: a value has more than {most:,} bytes")
            parts.append(part)
    return b"".join(parts)


def measure_offset(rendezvous: Rendezvous, rank: int, when: str) -> Offset:
    """Return the offset of this rank's monotonic clock to rank 0's. All ranks call it together; `when` names the
    occasion.

    Processes of one boot of a machine share its clock. On every other machine, one rank measures the offset with round
    trips over the store: the fastest one counts, and half of its duration is the error.
    """
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
            remote_time = int(store.get(f"{when}/{rank}/pong/{trip}"))
            received = time.monotonic_ns()
            trips.append(((received - sent) // 2, remote_time - (sent + received) // 2))
        error, offset = min(trips)
        store.set(f"{when}/offset/{rank}", f"{offset} {error}")
    offset, error = map(int, store.get(f"{when}/offset/{leader}").split(b" "))
    return offset, error


def between(start: Offset, end: Offset) -> Offset:
    """Return the mean of two offsets; the error grows by half of their difference, because clocks drift.

    >>> between((1000, 10), (1400, 20))
    (1200, 220)
    """
    return (start[0] + end[0]) // 2, max(start[1], end[1]) + abs(end[0] - start[0]) // 2
