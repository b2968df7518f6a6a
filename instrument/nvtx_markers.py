"""NVTX markers for Nsight Systems: one range around the launch of every call, in the domain `crossrank`.

The message is the JSON of the call without what changes from call to call, so a training loop has few distinct
messages; the payload is the record's id, and the record in the comms file holds the rest. NVTX keeps every
message for the life of the process, so past `MAX_MESSAGES` distinct ones (an MoE model with new split sizes at
each step) the sizes leave the message.

`TRACING_NVTX=classic` marks one JSON text per call instead, for scripts written for the older shim. Each of its
texts is distinct: with a tool attached that costs about 10 us and leaks about 1 kB per call.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from crossrank.instrument.descriptors import Descriptor
from crossrank.instrument.topology import Topology

DOMAIN = "crossrank"
MAX_MESSAGES = 4096

_encoder = msgspec.json.Encoder()


class NvtxMarkers:
    """Emits ranges while a tool is attached. `attached` never changes: NVTX decides at its first use."""

    def __init__(self) -> None:
        self.attached = False
        self._messages: set[str] = set()
        try:
            import nvtx
        except ImportError:
            return
        domain = nvtx.get_domain(DOMAIN)
        # Without a tool the package hands out a stand-in whose attributes are None.
        self.attached = type(domain).__name__ == "Domain"
        self._domain: Any = domain

    def mark(self, text: str) -> None:
        """An instant marker with a text of its own."""
        self._domain.mark(message=text)

    def push(self, descriptor: Descriptor, record_id: int, topology: Topology) -> None:
        """Open the range of a call. Every push needs its `pop` on the same thread."""
        attributes = descriptor.marker
        if attributes is None:
            attributes = self._attributes(descriptor, topology)
        self._domain.push_range(attributes, payload=record_id)

    def push_batch(self, pg: str, batch: int) -> None:
        """Open the range around the launch that ends a coalesced batch; its payload is the batch's id."""
        attributes = self._domain.get_event_attributes(message=f'{{"op":"coalesced","pg":"{pg}"}}')
        self._domain.push_range(attributes, payload=batch)

    def pop(self) -> None:
        self._domain.pop_range()

    def _attributes(self, descriptor: Descriptor, topology: Topology) -> Any:
        settled = topology.settled.is_set()
        locality = descriptor.locality(topology)
        message = descriptor.message(locality, sizes=True)
        if message not in self._messages:
            if len(self._messages) < MAX_MESSAGES:
                self._messages.add(message)
            else:
                message = descriptor.message(locality, sizes=False)
        attributes = self._domain.get_event_attributes(message=message)
        if settled:
            descriptor.marker = attributes
        return attributes


def classic_text(
    descriptor: Descriptor, record_id: int, rank: int, device: str | None, gpu_serial: str | None, vm_id: str | None
) -> str:
    """The older shim's JSON of one call: its field names, ranks global, sizes in bytes, seconds since 1970."""
    return _encoder.encode(
        {
            "name": descriptor.site.api or descriptor.reader.op,
            "rank": rank,
            "source_line": descriptor.site.source,
            "message_size": descriptor.call.bytes,
            "device": device,
            "timestamp": time.time(),
            "gpu_serial": gpu_serial,
            "vm_id": vm_id,
            "group_ranks": descriptor.group.ranks,
            "peer_rank": descriptor.peer,
            "root_rank": descriptor.root,
            "correlation_id": record_id,
        }
    ).decode()
