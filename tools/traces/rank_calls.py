"""What one rank's file says it communicated: the form that every reader gives, to replay and timing alike."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from crossrank.comm import CommRecord, Group
from crossrank.tools.graph.linking.inputs import RankInput


@dataclass(frozen=True, kw_only=True)
class Input:
    """One file, with those beside it that say how long its calls took."""

    path: str
    rank: int | None
    window: int = 1
    linked: tuple[str, ...] = ()
    pairs: tuple[RankInput, ...] = ()
    """Windows that are not linked yet; linked here, in memory."""
    flight: str | None = None
    world_size: int | None = None
    steps: tuple[int, int] | None = None
    """Iterations from the first to before the second; None = all. Comms files alone know them."""


class RecordedCall(msgspec.Struct, kw_only=True, gc=False):
    """One call as it was recorded."""

    record: CommRecord
    wait_before: int | None = None
    """The rank waited for the call before it launched its call of this index (their number = at the end); None where
    the file does not say when."""
    blocking: bool | None = None
    """Whether the rank did not go on before the call was over; None where the file does not say."""
    took_ns: int | None = None
    """From the begin of the communication to its end."""
    began_ns: int | None = None
    """When it began, ns since 1970; None where only its duration is known."""
    returned_ns: int | None = None
    """When the launch had returned, on the clock of `record.t`; a wait for the end comes after it. None where the file
    does not say, and where the host does not follow what is communicated (on a GPU, but for barriers)."""


class RankCalls(msgspec.Struct, kw_only=True):
    """One rank."""

    path: str
    rank: int | None
    """What the file, or its name, says."""
    world_size: int | None = None
    calls: list[RecordedCall]
    """In the order in which the rank made them."""
    is_copy: bool = False
    """The file is of another rank, whose calls stand for this one's."""
    groups: list[Group]
    numbered: bool = True
    """Whether `seq` and `p2p_seq` are the same numbers on all ranks; else only the order can be compared."""
    p2p_by_pair: bool = False
    """Whether `p2p_seq` counts the calls between two ranks, as our records do, and not those of the group."""
    groups_by_use: bool = False
    """Its groups have no members (gloo's dumps): everyone who calls on a name is one."""
    starts_late: bool = False
    """The file is the end of what the rank did: a ring from which earlier calls fell out."""
    timed: bool = True
    """Whether `record.t` says when a call was made."""
    dropped: int = 0
    """Calls that the recorder itself could not keep."""
    skipped_calls: int = 0
    """Calls of steps that were not asked for."""
    skipped_bytes: int = 0
    left_out: int = 0
    """Calls inside a node that were counted and not recorded."""
    filtered: bool = False
    """Calls inside a node were not recorded (TRACING=CROSSNODE)."""
    waits_without_call: int = 0
    """Recorded waits for calls that began before the trace."""
    waits: int = 0
    """Recorded waits whose call is known."""
    span: tuple[int, int] | None = None
    """Between which moments the run was, ns since 1970; None where the file does not say."""
    offset: int = 0
    """To add to `record.t` to have ns since 1970."""
    clock: str = ""
    """Ranks with the same text have the same clock; empty where nothing is known of it."""
    node: str = ""
    steps: list[tuple[int, int]] = []
    """(iteration, when it began, ns since 1970)"""
    about: dict[str, str] = {}
    """Versions and settings, as the header has them."""
    matched: dict[str, tuple[int, int]] = {}
    """What linking matched, over the windows: what -> (matched, of how many)."""
    origins: dict[str, int] = {}
    """What gave the times -> calls: `kineto`, `flight`."""
    told_by: dict[str, int] = {}
    """How kernels found what call they are of -> kernels, in a trace of kernels alone."""
    problems: list[str] = []
    """What of the file could not be read."""
    notes: list[str] = []
