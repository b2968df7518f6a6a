"""What is known of the recording of this process: the ground on which the parts of a session are built.

A part sees of the session what its own `Protocol` names: these facts, and the few ports that it uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from crossrank.instrument.config import Config
from crossrank.instrument.identity.topology import Topology
from crossrank.instrument.script_errors import Failures


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Replaced as a whole when the process group is created anew."""

    config: Config
    rank: int = -1
    """-1 until there is a process group."""
    world_size: int = 0
    topology: Topology | None = None


class Recording(Protocol):
    """What every part sees of a session."""

    facts: Facts
    failures: Failures

    @property
    def closing(self) -> bool:
        """Whether a thread has begun to close, or has done so. A signal handler may interrupt it at any moment."""
