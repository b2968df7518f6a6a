"""The facts about the recording of this process, which every part of a session uses.

The `Protocol` of a part lists what the part uses of the session: these facts, and a few methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from crossrank.instrument.config import Config
from crossrank.instrument.identity.topology import Topology
from crossrank.instrument.script_errors import Failures


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Settings, rank and topology. Replaced as a whole when the process group is created again."""

    config: Config
    rank: int = -1
    """-1 until there is a process group."""
    world_size: int = 0
    topology: Topology | None = None


class Recording(Protocol):
    """The part of a session that every other part uses."""

    facts: Facts
    failures: Failures

    @property
    def closing(self) -> bool:
        """Whether a thread is closing or has closed the session. A signal handler may interrupt it at any moment."""
