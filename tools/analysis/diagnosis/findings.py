"""What a diagnosis says: the kinds of findings, and the form of `diagnosis.json`.

`findings` are root causes, `consequences` what follows from them, `advisory` what is worth knowing and no fault.
`verdict` is `ok`, `error`, or `incomplete` where nothing is wrong but evidence that is not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from crossrank.text import rank_ranges


class Kind(NamedTuple):
    """A kind of finding."""

    meaning: str
    next_step: str = ""
    """What a person looks at next, with `{culprits}` for their ranks."""
    without_gpu: str = ""
    """The same where nothing says that a GPU is at fault: on gloo."""


KINDS: dict[str, Kind] = {
    # root causes and consequences
    "missing_rank": Kind(
        "a rank has not made a collective, and other ranks wait in it",
        "check what rank {culprits} is doing: its log, its stack (py-spy dump), its GPU (dmesg, Xid)",
        "check what rank {culprits} is doing: its log, its stack (py-spy dump)",
    ),
    "extra_collective": Kind(
        "a rank made a collective that the majority of ranks did not make",
        "look for a call that only rank {culprits} makes: behind `if rank == …`, after a handled exception, in a "
        "loop with one more iteration",
    ),
    "type_mismatch": Kind(
        "ranks made different operations at the same place in the sequence",
        "look for a branch in which rank {culprits} calls a different operation",
    ),
    "size_mismatch": Kind(
        "ranks made a collective with different numbers of elements",
        "compare the shapes at the source line: uneven batches, the last batch, padding",
    ),
    "dtype_mismatch": Kind(
        "ranks made a collective with different data types",
        "compare the data types at the source line: autocast, a checkpoint in another precision",
    ),
    "root_mismatch": Kind(
        "ranks made a collective with different roots",
        "compare src= or dst= at the source line; they are global ranks",
    ),
    "reduce_op_mismatch": Kind("ranks made a collective with different reductions", "compare op= at the source line"),
    "opposite_order": Kind(
        "ranks made their calls in different orders, so that each waits for the other",
        "make these calls in the same order on every rank",
    ),
    "not_started": Kind(
        "all ranks made the collective, but on some GPUs it never started",
        "check the GPU of rank {culprits}: it is still busy with earlier work, or stuck in it",
        "check what rank {culprits} is doing: its log, its stack (py-spy dump)",
    ),
    "not_completed": Kind(
        "the collective finished on some ranks, and does not finish on others",
        "check the GPU and the driver of rank {culprits} (dmesg, Xid, nvidia-smi -q)",
        "check what rank {culprits} is doing: its log, its stack (py-spy dump), its network",
    ),
    "all_joined_not_completed": Kind(
        "all ranks made the call, and it does not finish",
        "run again with TRACING_TIMING=1, which shows a GPU that is stuck in earlier work; check the network and "
        "NCCL: NCCL_DEBUG=INFO, link counters, switch logs",
        "check the logs of these ranks, and the network between them",
    ),
    "p2p_unmatched": Kind(
        "a send or receive without a match on the other rank",
        "compare the sends and receives of rank {culprits} with those of their peers: one is missing, or in another "
        "order",
    ),
    "p2p_size_mismatch": Kind(
        "a send and its receive have different numbers of elements or types",
        "compare the shapes and data types at both ends",
    ),
    "p2p_wait_cycle": Kind(
        "ranks wait for each other's sends and receives in a cycle",
        "check the peer of every send and receive; let one side send first, or use batch_isend_irecv",
    ),
    "raised": Kind(
        "a rank ended with an exception, and no call shows a wait for it",
        "read the log of rank {culprits}: the first exception caused the others",
    ),
    "dump_missing": Kind(
        "a rank left no dump",
        "rank {culprits} died or could not write its dump: check its log and its exit code",
    ),
    "no_entries": Kind(
        "the dump of a rank is empty",
        "rank {culprits} made no call, or its recorder was off (TORCH_FR_BUFFER_SIZE=0)",
    ),
    "not_recorded": Kind(
        "ranks may wait for others, but the dumps cannot show it",
        "take the stacks of all ranks (py-spy dump), or record the job with crossrank and torch's flight recorder, "
        "which show stacks and finished calls",
    ),
    "unreadable_dump": Kind(
        "the dump of a rank cannot be read", "copy the dump of rank {culprits} again, or read its log"
    ),
    "refused_dump": Kind(
        "the dump of a rank contains code, so crossrank did not open it",
        "find out who wrote the dump of rank {culprits}: a real dump contains only data",
    ),
    # advisory
    "in_progress": Kind("a call that was running when the dumps were written"),
    "straggler": Kind("a rank that often arrives last in a group"),
}

LACKS_EVIDENCE = ("dump_missing", "no_entries", "not_recorded", "unreadable_dump", "refused_dump")
"""Kinds that mean missing evidence about a rank, not a fault of it."""


def rank_text(ranks: Iterable[int]) -> str:
    """Ranks for people.

    >>> rank_text({3, 0, 1})
    'rank 0-1,3'
    """
    return f"rank {rank_ranges(list(ranks))}"


def error_text(error: str | None) -> str:
    """An exception in a sentence: its first line, empty without one.

    What CUDA and NCCL add to theirs is advice about debugging.

    >>> error_text("AcceleratorError: CUDA error: out of memory\\nCompile with `TORCH_USE_CUDA_DSA`")
    'AcceleratorError: CUDA error: out of memory'
    """
    return (error or "").strip().partition("\n")[0]


def ranks_by(values: Mapping[int, str]) -> dict[str, list[int]]:
    """The ranks that have one value, by their values."""
    found: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        found.setdefault(value, []).append(rank)
    return found


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
    """`culprit` or `waiting`; where it is not known which, `sender` or `receiver`, or `member` of a collective."""
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
    moving_ranks: list[int] = []
    """Culprits whose main thread moved while the others waited: slow, or in a loop without end."""
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


class ClockAlignment(msgspec.Struct, kw_only=True):
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
    """The culprits of the root findings, but for ranks without evidence where others are accused."""
    findings: list[Finding]
    consequences: list[Finding]
    advisory: list[Finding]
    stragglers: list[GroupStragglers] = []
    clocks: ClockAlignment | None = None
    skipped: list[str] = []
    """Files that were not used, and why."""
    notes: list[str] = []
    """What the verdict rests on that is not in the dumps, and what of them could not be read."""
    counts: dict[str, int] = {}
    """ranks, groups, collectives and calls that were compared."""

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"
