"""NVTX markers for Nsight Systems: one range around the launch of every call, in the domain `crossrank`.

The message is the JSON of the call without the fields that change from call to call, so a training loop has few
distinct messages. The payload is the id of the record, and the record in the comms file has the other fields. NVTX
keeps every message as long as the process lives. So after `MAX_MESSAGES` distinct messages or `MAX_KEPT` bytes (an MoE
model with new split sizes at each step), messages have no sizes. After twice that, they have no source line either.

`TRACING_NVTX=classic` writes one JSON text per call instead, for scripts of the older shim. Each text is distinct: with
a tool attached this costs about 10 us and leaks about 1 kB per call.

Nsight Systems 2022.4 shows another text instead of one of 65,535 bytes or more. The ranks of a group and the splits of
an all_to_all grow with the job. A longer text has the ranks as `rank_runs` (see `crossrank.rank_runs`) and skips lists
where necessary: `left_out` has the number of entries of each. The record in the comms file has all of them.
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
"""Longest text, in UTF-8 bytes."""
_MOST_NAME = 1000
"""Characters kept from the end of a name that makes the text too long."""
_CUT = "..."
# Content of the message, while there is room: (sizes, source line, multiple of the limits).
_DETAILS = ((True, True, 1), (False, True, 2))

_TOOL = "NVTX_INJECTION64_PATH"
"""Variable with the library of the tool that NVTX loads, unless it is `_NO_TOOL`."""
_NO_TOOL = "./."
_OLDEST = (0, 2, 15)
"""First version of the package in which a range takes its payload in the same call, as threads need it."""


def attach() -> NvtxMarkers | None:
    """Return the markers of this process; None if no tool accepts them. NVTX decides this at its first use."""
    domain = _domain_of_process()
    return NvtxMarkers(domain) if domain is not None else None


class NvtxMarkers:
    """Emits ranges and markers in one domain."""

    def __init__(self, domain: Any) -> None:
        self._messages: set[str] = set()
        self._kept = 0
        self._domain = domain

    def mark(self, text: str) -> None:
        """Write an instant marker with a JSON text."""
        self._domain.mark(message=shortened(text))

    def mark_identity(self, rank: int, world_size: int) -> None:
        """Write the identity of this rank into the report."""
        identity = {"rank": rank, "world_size": world_size, "host": socket.gethostname()}
        self.mark(orjson.dumps({"crossrank": crossrank.__version__} | identity).decode())

    def mark_group(self, group: Group) -> None:
        self.mark(orjson.dumps({"group": group}, default=msgspec.to_builtins).decode())

    def begin(self, text: str) -> int:
        """Open a range that may end on another thread; return the id for `end`."""
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

    def push_batch(self, pg: str, epoch: int, batch: int) -> None:
        """Open the range around the launch of a coalesced batch; its payload is the id of the batch."""
        message = orjson.dumps({"op": "coalesced", "pg": pg} | ({"epoch": epoch} if epoch else {})).decode()
        self._domain.push_range(self._domain.get_event_attributes(message=message), payload=batch)

    def pop(self) -> None:
        self._domain.pop_range()

    def message(self, descriptor: Descriptor, topology: Topology) -> str:
        """Return the text of a call, as detailed as the limits allow."""
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


@functools.cache  # keep it: NVTX destroys a domain with its object
def _domain_of_process() -> Any:
    """Return the domain of this process; None if no tool accepts its ranges. Log why if one is attached."""
    tool = os.environ.get(_TOOL)
    attached = bool(tool) and tool != _NO_TOOL
    reason = "it accepts no ranges of this domain; if nsys filters domains, add crossrank to --nvtx-domain-include"
    try:
        import nvtx

        domain = nvtx.get_domain(DOMAIN)
        # The package returns a dummy that drops everything if no tool is attached, or if the tool is older than the
        # package's extensions of NVTX (Nsight Systems up to 2023).
        real = type(domain).__name__ == "Domain"
        attached = attached or real
        if attached:
            found = version("nvtx")
            if tuple(int(part) for part in found.split(".")[:3] if part.isdecimal()) < _OLDEST:
                raise CrossrankError(f"nvtx {found} is too old: install nvtx>={'.'.join(map(str, _OLDEST))}")
            domain = domain if real else _base_domain(nvtx)
            if real or _takes_ranges(domain):
                return domain
    except Exception as error:  # versions of the package lack different names
        reason = one_line(error)
    if attached:
        log.warning(
            "crossrank: an NVTX tool is attached (%s=%s), but calls will not be marked: %s; TRACING_NVTX=0 hides "
            "this line",
            _TOOL,
            tool,
            reason,
        )
    return None


def _base_domain(nvtx: Any) -> Any:
    """Return a working domain although the package considers it disabled.

    Its ranges use NVTX's base API, which every tool has, and no extension.
    """
    from nvtx._lib.lib import DomainHandle

    domain = object.__new__(nvtx.Domain)
    domain.handle = DomainHandle(DOMAIN)
    domain.__init__(DOMAIN)
    return domain


def _takes_ranges(domain: Any) -> bool:
    """Return whether a tool accepts ranges of the domain. If none does, NVTX returns the range id 0."""
    range_id = domain.start_range(domain.get_event_attributes(message="crossrank.enable"))
    domain.end_range(range_id)
    return bool(range_id)


def classic_text(descriptor: Descriptor, record_id: int, rank: int, device: str | None, config: Config) -> str:
    """Return the older shim's JSON of one call: its field names, global ranks, bytes, seconds since 1970."""
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
    """Return the JSON of a marker, or a shorter one of the same call or group if it exceeds `MAX_BYTES`."""
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
