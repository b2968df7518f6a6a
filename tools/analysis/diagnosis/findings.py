"""What a diagnosis says: the kinds of findings, and the form of `diagnosis.json`.

`findings` are root causes, `consequences` what follows from them, `advisory` what is worth knowing and no fault.
`verdict` is `ok`, `error`, or `incomplete` where nothing is wrong but evidence that is not there.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

KINDS: dict[str, str] = {
    # root causes and consequences
    "missing_rank": "a rank has not made a collective that the others wait in",
    "extra_collective": "a rank has made a collective that the majority has not",
    "type_mismatch": "ranks made different operations as one collective",
    "size_mismatch": "ranks made a collective with different numbers of elements",
    "dtype_mismatch": "ranks made a collective with different types",
    "root_mismatch": "ranks made a collective with different roots",
    "reduce_op_mismatch": "ranks made a collective with different reductions",
    "opposite_order": "ranks entered groups in an order in which each waits for the other",
    "not_started": "all ranks made the collective, and on some it never began to run",
    "not_completed": "the collective is over on other ranks, and on some it does not end",
    "all_joined_not_completed": "all ranks joined the call and it does not end",
    "p2p_unmatched": "a send or receive that the other rank does not answer",
    "p2p_size_mismatch": "a send and its receive have different numbers of elements or types",
    "p2p_wait_cycle": "ranks wait for each other's sends and receives in a circle",
    "raised": "a rank ended with an exception, and no call shows who waits for whom",
    "dump_missing": "a rank left no dump",
    "no_entries": "a rank's dump holds neither calls nor progress",
    "unreadable_dump": "a rank's dump cannot be read",
    "refused_dump": "a rank's dump asks for more than data and was not opened",
    # advisory
    "in_progress": "a call that was under way when the dumps were taken",
    "straggler": "a rank that the others of a group often wait for",
}

LACKS_EVIDENCE = ("dump_missing", "no_entries", "unreadable_dump", "refused_dump")
"""Kinds that say that a rank cannot be judged, not that something is wrong with it."""


def group_text(pg: Sequence[str]) -> str:
    """A group for people, by its description and name.

    >>> group_text(["12", "mesh_tp"]), group_text(["", ""])
    ('mesh_tp [12]', 'a group without a name')
    """
    name, desc = pg
    text = f"{desc} [{name}]" if desc and desc != name else name
    return text or "a group without a name"


def call_text(op: str, seq: int | None) -> str:
    """A call for people, by its operation and sequence number."""
    return f"{op} #{seq}" if seq is not None else op


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where in its code a rank is."""

    rank: int
    role: str
    """`culprit` or `waiting`; `sender` or `receiver` where neither can be told."""
    what: str
    frames: list[str]
    """`function (file:line)`: those of the user's code, innermost first, then a few of the libraries that it is in."""


class Finding(msgspec.Struct, kw_only=True):
    """One thing that is wrong, or noteworthy."""

    kind: str
    pg: list[str]
    """Name and description of the process group."""
    pg_ranks: list[int]
    collective_seq_id: int | None = None
    p2p_seq_id: int | None = None
    op: str = ""
    culprit_ranks: list[int] = []
    waiting_ranks: list[int] = []
    text: str = ""
    """What happened, in a sentence."""
    exception: str | None = None
    """The exception that ended a culprit."""
    backend: str = ""
    """Of the calls of those that are stuck: `nccl`, `gloo`, …; empty where it is not known."""
    because_of: int | None = None
    """Of a consequence: the index of its root in `findings`."""
    places: list[Place] = []


class GroupStragglers(msgspec.Struct, kw_only=True):
    """Who arrives last on one group, and how long the others wait for it."""

    pg: list[str]
    pg_ranks: list[int]
    collectives: int
    """Those that could be compared: every member's call has a time."""
    last_rank: int
    last_share: float
    """Share of those collectives in which `last_rank` came last."""
    max_rank: int
    """The rank that came last where the others waited longest."""
    wait_ms: dict[str, float]
    """Time from the first arrival to the last: p50, p95, max and total over the collectives."""
    late_ms: dict[str, float]
    """Rank -> by how much it comes after the first, median."""


class Clocks(msgspec.Struct, kw_only=True):
    """How far the ranks' clocks could be brought together."""

    aligned: bool
    offset_ms: dict[str, float] = {}
    """Rank -> what was added to its times."""
    residual_ms: float = 0.0
    """By how much, at worst, a call still seems to have ended before another rank began it."""
    note: str = ""


class Diagnosis(msgspec.Struct, kw_only=True):
    """`diagnosis.json`."""

    verdict: str
    world_size: int
    ranks: list[int]
    """Those whose dumps were used."""
    suspect_ranks: list[int]
    """All culprits of the root findings."""
    findings: list[Finding]
    consequences: list[Finding]
    advisory: list[Finding]
    stragglers: list[GroupStragglers] = []
    clocks: Clocks | None = None
    skipped: list[str] = []
    """Files that were not used, and why."""
    notes: list[str] = []
    """What the verdict rests on that is not in the dumps, and what of them could not be read."""
    counts: dict[str, int] = {}
    """ranks, groups, collectives and calls that were compared."""

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"
