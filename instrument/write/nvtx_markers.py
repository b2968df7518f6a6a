"""NVTX markers for Nsight Systems: one range around the launch of every call, in the domain `crossrank`.

The message is the JSON of the call without what changes from call to call, so a training loop has few distinct
messages; the payload is the record's id, and the record in the comms file holds the rest. NVTX keeps every
message for the life of the process, so past `MAX_MESSAGES` distinct ones or `MAX_KEPT` bytes of them (an MoE model
with new split sizes at each step) the sizes leave the message, and past twice that the user's line does too.

`TRACING_NVTX=classic` marks one JSON text per call instead, for scripts written for the older shim. Each of its
texts is distinct: with a tool attached that costs about 10 us and leaks about 1 kB per call.

Nsight Systems 2022.4 shows another text in place of one of 65,535 bytes or more, and what holds the ranks of a group
or the splits of an all_to_all grows with the job. A text that would be too long says the same in fewer bytes (ranks as
`rank_runs`, see `crossrank.rank_runs`), and leaves out lists as far as it must: `left_out` says how many entries each
of them had. The record in the comms file has all of it.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from importlib.metadata import version
from typing import Any

import msgspec
import orjson

import crossrank
from crossrank.comm import Group
from crossrank.errors import CrossrankError, one_line
from crossrank.instrument.config import Config
from crossrank.instrument.identity.topology import Topology
from crossrank.instrument.log import log
from crossrank.instrument.record.descriptor import Descriptor
from crossrank.rank_runs import to_runs

DOMAIN = "crossrank"
MAX_MESSAGES = 4096
MAX_KEPT = 4 << 20
MAX_BYTES = 60_000
"""UTF-8 bytes of a text."""
_MOST_NAME = 1000
"""Characters, from its end, that are kept of a name that makes the text too long."""
_CUT = "..."
# What stands in the message, as long as there is room: (sizes, user's line, share of the limits).
_DETAILS = ((True, True, 1), (False, True, 2))

_TOOL = "NVTX_INJECTION64_PATH"
"""The library of the tool that NVTX loads, unless it is `_NO_TOOL`."""
_NO_TOOL = "./."
_OLDEST = (0, 2, 15)
"""Version of the package from which on a range takes its payload in the same call, which keeps threads apart."""


def attach() -> NvtxMarkers | None:
    """The markers of this process; None where no tool takes them. That never changes: NVTX decides at its first use."""
    domain = _domain_of_process()
    return NvtxMarkers(domain) if domain is not None else None


class NvtxMarkers:
    """Emits ranges and markers in one domain."""

    def __init__(self, domain: Any) -> None:
        self._messages: set[str] = set()
        self._kept = 0
        self._domain = domain

    def mark(self, text: str) -> None:
        """An instant marker with a JSON text of its own."""
        self._domain.mark(message=shortened(text))

    def mark_identity(self, rank: int, world_size: int) -> None:
        """Name this rank inside the report, whatever its file is called."""
        identity = {"rank": rank, "world_size": world_size, "host": socket.gethostname()}
        self.mark(orjson.dumps({"crossrank": crossrank.__version__} | identity).decode())

    def mark_group(self, group: Group) -> None:
        self.mark(orjson.dumps({"group": group}, default=msgspec.to_builtins).decode())

    def begin(self, text: str) -> int:
        """Open a range that may end on another thread; returns the id that `end` takes."""
        return int(self._domain.start_range(self._domain.get_event_attributes(message=text)))

    def end(self, range_id: int) -> None:
        self._domain.end_range(range_id)

    def push(self, descriptor: Descriptor, record_id: int, topology: Topology) -> None:
        """Open the range of a call. Every push needs its `pop` on the same thread."""
        attributes = descriptor.marker
        if attributes is None:
            settled = topology.settled.is_set()
            attributes = self._domain.get_event_attributes(message=self.message(descriptor, topology))
            if settled:
                descriptor.marker = attributes
        self._domain.push_range(attributes, payload=record_id)

    def push_batch(self, pg: str, batch: int) -> None:
        """Open the range around the launch that ends a coalesced batch; its payload is the batch's id."""
        message = orjson.dumps({"op": "coalesced", "pg": pg}).decode()
        self._domain.push_range(self._domain.get_event_attributes(message=message), payload=batch)

    def pop(self) -> None:
        self._domain.pop_range()

    def message(self, descriptor: Descriptor, topology: Topology) -> str:
        """The text of a call, as detailed as there is room for."""
        locality = descriptor.locality(topology)
        for sizes, source, share in _DETAILS:
            message = shortened(descriptor.message(locality, sizes=sizes, source=source))
            if message in self._messages:
                return message
            if len(self._messages) < share * MAX_MESSAGES and self._kept + len(message) <= share * MAX_KEPT:
                self._messages.add(message)
                self._kept += len(message)
                return message
        return shortened(descriptor.message(locality, sizes=False, source=False))


@functools.cache  # never given back: NVTX destroys a domain with its object
def _domain_of_process() -> Any:
    """The domain of this process; None where no tool takes its ranges, which is logged if one is attached."""
    tool = os.environ.get(_TOOL)
    attached = bool(tool) and tool != _NO_TOOL
    reason = "it accepts no ranges of this domain; if nsys filters domains, add crossrank to --nvtx-domain-include"
    try:
        import nvtx

        domain = nvtx.get_domain(DOMAIN)
        # Where no tool is attached, and where one is that is older than the package's extensions of NVTX (Nsight
        # Systems up to 2023), the package hands out a stand-in that drops everything.
        real = type(domain).__name__ == "Domain"
        attached = attached or real
        if attached:
            found = version("nvtx")
            if tuple(int(part) for part in found.split(".")[:3] if part.isdecimal()) < _OLDEST:
                raise CrossrankError(f"nvtx {found} is too old: install nvtx>={'.'.join(map(str, _OLDEST))}")
            domain = domain if real else _base_domain(nvtx)
            if real or _takes_ranges(domain):
                return domain
    except Exception as error:  # whatever a version of the package lacks
        reason = one_line(error)
    if attached:
        log.warning(
            "crossrank: an NVTX tool is attached (%s=%s), but calls will not be marked: %s; TRACING_NVTX=0 mutes this",
            _TOOL,
            tool,
            reason,
        )
    return None


def _base_domain(nvtx: Any) -> Any:
    """A domain of the package that is used although the package holds it to be disabled.

    Its ranges need no extension: they go through NVTX's base API, which every tool has.
    """
    from nvtx._lib.lib import DomainHandle

    domain = object.__new__(nvtx.Domain)
    domain.handle = DomainHandle(DOMAIN)
    domain.__init__(DOMAIN)
    return domain


def _takes_ranges(domain: Any) -> bool:
    """Whether a tool accepts ranges of the domain: NVTX gives a range that none accepts the id 0."""
    range_id = domain.start_range(domain.get_event_attributes(message="crossrank.enable"))
    domain.end_range(range_id)
    return bool(range_id)


def classic_text(descriptor: Descriptor, record_id: int, rank: int, device: str | None, config: Config) -> str:
    """The older shim's JSON of one call: its field names, ranks global, sizes in bytes, seconds since 1970."""
    return orjson.dumps(
        {
            "name": descriptor.site.api or descriptor.reader.op,
            "rank": rank,
            "source_line": descriptor.site.source,
            "message_size": descriptor.call.bytes,
            "device": device,
            "timestamp": time.time(),
            "gpu_serial": config.gpu_serial,
            "vm_id": config.vm_id,
            "group_ranks": descriptor.state.group.ranks,
            "peer_rank": descriptor.peer,
            "root_rank": descriptor.root,
            "correlation_id": record_id,
        }
    ).decode()


def shortened(text: str) -> str:
    """The JSON of a marker, or if it has more than `MAX_BYTES` a shorter one of the same call or group."""
    if len(text) * 4 <= MAX_BYTES or len(text.encode()) <= MAX_BYTES:
        return text
    fields: dict[str, Any] = orjson.loads(text)
    part = fields.get("group", fields)
    for name in ("ranks", "group_ranks"):
        if part.get(name):
            part["rank_runs"] = to_runs(part.pop(name))
    while len(orjson.dumps(fields)) > MAX_BYTES:
        longest = max(part, key=lambda name: len(orjson.dumps(part[name])))
        value = part[longest]
        if isinstance(value, str):
            part[longest] = _CUT + value[-_MOST_NAME:]
        else:
            del part[longest]
            name, entries = ("ranks", sum(run[1] for run in value)) if longest == "rank_runs" else (longest, len(value))
            part.setdefault("left_out", {})[name] = entries
    return orjson.dumps(fields).decode()
