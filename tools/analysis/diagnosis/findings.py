"""The kinds of findings, and the format of `diagnosis.json`.

`findings` are root causes, `consequences` are their effects, `advisory` has facts that are not faults.
`Diagnosis.verdict` says which verdicts there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from crossrank.text import percent, rank_ranges


class Kind(NamedTuple):
    """A kind of finding."""

    meaning: str
    next_step: str = ""
    """The next step for the user; `{culprits}` is replaced by their ranks."""
    without_gpu: str = ""
    """The next step on gloo, where no GPU is involved."""


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
        "ranks wait for each other in different calls: their orders differ, or one of them left a call out",
        "compare the calls before these: every rank must make the same ones, in the same order",
    ),
    "group_order": Kind(
        "ranks made their process groups in different orders",
        "call `new_group` for all groups in one order on every rank, also for groups without this rank",
    ),
    "thread_order": Kind(
        "several threads of a rank call on one group, and their order differs between ranks",
        "let one thread make all calls of a group, or give each thread a group of its own",
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
    "communicator_failed": Kind(
        "all ranks made the call, and the communicator has failed on some of them",
        "read the log of rank {culprits}, where torch and NCCL name the error; check its network and GPU "
        "(NCCL_DEBUG=INFO, link counters, dmesg, Xid)",
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
    "p2p_tag_mismatch": Kind(
        "a send and a receive that wait for each other have different tags",
        "compare tag= at both lines: the tags of a pair of ranks must come in the same order",
    ),
    "p2p_wait_cycle": Kind(
        "ranks wait for each other's sends and receives in a cycle",
        "check the peer of every send and receive; let one side send first, or use batch_isend_irecv",
    ),
    "raised": Kind(
        "a rank ended with an exception, and no call shows a wait for it",
        "read the log of rank {culprits}: the first exception caused the others",
    ),
    "holds_lock": Kind(
        "a rank waits in a call while it holds a file lock that other ranks wait for",
        "release the lock on rank {culprits} before this call, or make the call outside of it on every rank",
    ),
    "owes_data": Kind(
        "a rank waits in a call while other ranks wait for data from it, through a pipe or a socket",
        "send this data on rank {culprits} before this call, or do not wait for it",
    ),
    "no_progress": Kind(
        "no rank waits in a call, and some ranks do nothing",
        "check what these ranks are doing: their logs, their stacks (py-spy dump)",
    ),
    "dump_missing": Kind(
        "a rank left no dump",
        "rank {culprits} died or could not write its dump: check its log and its exit code",
    ),
    "no_entries": Kind(
        "the dump of a rank is empty",
        "rank {culprits} made no call, or its recorder was off (TORCH_FR_BUFFER_SIZE=0)",
    ),
    "log_missing": Kind(
        "the logs have no line of ranks that others wait for",
        "look for the logs of the other ranks, and what these ranks do (py-spy dump)",
    ),
    "never_joined": Kind(
        "ranks never came to the store of the job",
        "check that the launcher started rank {culprits}, with the same MASTER_ADDR and MASTER_PORT",
    ),
    "printed_verdict": Kind(
        "crossrank said in the job which rank the others wait for",
        "run `crossrank diagnose` on the recording that the line names",
    ),
    "log_error": Kind(
        "a line of the logs says what failed, and names no rank",
        "read the lines around it",
    ),
    "network_failed": Kind(
        "the network between two hosts failed",
        "check the link between these hosts: link counters, switch logs, NCCL_DEBUG=INFO",
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

LACKS_EVIDENCE = ("dump_missing", "log_missing", "no_entries", "not_recorded", "unreadable_dump", "refused_dump")
"""Kinds that mean missing evidence about a rank, not a fault of the rank."""


def rank_text(ranks: Iterable[int]) -> str:
    """Return ranks as text.

    >>> rank_text({3, 0, 1})
    'rank 0-1,3'
    """
    return f"rank {rank_ranges(list(ranks))}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as the subject of a sentence.

    >>> ranks_text({3}), ranks_text({0, 1, 3})
    ('rank 3', 'ranks 0-1,3')
    """
    those = sorted(ranks)
    return f"{'rank' if len(those) == 1 else 'ranks'} {rank_ranges(those)}"


def error_text(error: str | None) -> str:
    """Return the first line of an exception; empty without one. CUDA and NCCL add debugging advice after it.

    >>> error_text("AcceleratorError: CUDA error: out of memory\\nCompile with `TORCH_USE_CUDA_DSA`")
    'AcceleratorError: CUDA error: out of memory'
    """
    return (error or "").strip().partition("\n")[0]


def ranks_by(values: Mapping[int, str]) -> dict[str, list[int]]:
    """Return value -> ranks with this value."""
    found: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        found.setdefault(value, []).append(rank)
    return found


def group_text(pg: Sequence[str]) -> str:
    """Return description and name of a group as text.

    >>> group_text(["12", "mesh_tp"]), group_text(["", "mesh_tp"]), group_text(["", ""])
    ('mesh_tp [12]', 'mesh_tp', 'a group without a name')
    """
    name, desc = pg
    text = f"{desc} [{name}]" if desc and name and desc != name else name or desc
    return text or "a group without a name"


def call_text(op: str, seq: int | None) -> str:
    """Return operation and sequence number of a call as text."""
    return f"{op} #{seq}" if seq is not None else op


PROOFS = {
    "deadlock": "ranks wait, and every rank that could release them waits for them",
    "mismatch": "ranks made calls that cannot be one, at the same place of the group's order",
    "gone": "ranks wait for one that has ended, or on a communicator that has failed",
    "late": "ranks wait for one that has not come, and may still come",
    "not_known": "ranks wait, and it is not known what the others do",
}
"""What is known of the ranks that wait, the strongest first."""


NEXT_STEPS = {
    "runs": "rank {ranks} may come by itself; if it does not, look at the line that it runs",
    "idle": "look at the line where rank {ranks} is blocked: a sleep, a lock, a file system, a server or an input",
    "stopped": "find out what stopped rank {ranks}; `kill -CONT` with its process number continues it",
    "native": "rank {ranks} may come by itself; the C code that its line calls does not release the interpreter's lock",
    "gone": "read the log and the exit code of rank {ranks}, and the line where it left; after a signal, the kernel's "
    "log (dmesg) shows whether the kernel killed it",
}
"""State of a late rank -> the next step for the user. Other states have that of the kind of the finding."""

LEFT_OUT = "look for a branch, or a handled exception, that makes rank {ranks} leave this call out"
"""The next step if a rank waits elsewhere, and its lines are shown."""


class LateRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that others wait for, and what it does."""

    rank: int
    state: str
    """`runs`, `idle`, `stopped`, `native`, `gone` or `silent`."""
    text: str
    """What it does, after `which`."""
    cpu: float | None = None
    """Share of a CPU that its thread, or what this waits for, uses; None if unknown."""
    place: str = ""
    """The user's line that it is in, if that is known."""
    host: str = ""


def late_text(late: Sequence[LateRank], which: str = ", which") -> str:
    """Return ranks and what they do; empty without ranks. With an empty `which`, it is a sentence.

    >>> late_text([LateRank(rank=rank, state="runs", text="runs in f", cpu=cpu) for rank, cpu in ((1, 0.5), (2, 1))])
    'ranks 1-2, which run in f, with 50.0 % to 100.0 % of a CPU'
    """
    texts = []
    for text in dict.fromkeys(one.text for one in late):
        those = [one for one in late if one.text == text]
        shares = list(dict.fromkeys(percent(one.cpu) for one in sorted(those, key=_cpu_of) if one.cpu is not None))
        cpu = f", with {' to '.join(dict.fromkeys((shares[0], shares[-1])))} of a CPU" if shares else ""
        verb = text if len(those) == 1 else _plural_of(text)
        texts.append(f"{ranks_text(one.rank for one in those)}{which} {verb}{cpu}")
    return "; ".join(texts)


def _cpu_of(one: LateRank) -> float:
    return one.cpu or 0.0


def _plural_of(text: str) -> str:
    """Return what several ranks do, from what one of them does: its first word is a verb."""
    verb, blank, rest = text.partition(" ")
    return _PLURALS.get(verb, verb.removesuffix("s")) + blank + rest.replace(" and makes ", " and make ")


_PLURALS = {"is": "are", "has": "have", "does": "do"}


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a rank in its code."""

    rank: int
    role: str
    """`culprit` or `waiting`; if unknown, `sender`, `receiver`, or `member` of a collective."""
    what: str
    frames: list[str]
    """`function (file:line)`: the user's frames, innermost first, then a few of the libraries that they called."""


class Finding(msgspec.Struct, kw_only=True):
    """One fault, or one fact worth knowing."""

    kind: str
    pg: list[str]
    """Name and description of the process group."""
    pg_ranks: list[int]
    collective_seq_id: int | None = None
    p2p_seq_id: int | None = None
    op: str = ""
    culprit_ranks: list[int] = []
    waiting_ranks: list[int] = []
    awaited_ranks: list[int] = []
    """In a consequence, the ranks that `waiting_ranks` wait for. These may only wait themselves."""
    proof: str = ""
    """A key of `PROOFS`: what is known of the waiting ranks."""
    late_ranks: list[LateRank] = []
    """What the culprits do that have not made the call."""
    text: str = ""
    """What happened, in a sentence."""
    exception: str | None = None
    """The exception that ended a culprit."""
    backend: str = ""
    """Backend of the stuck calls: `nccl`, `gloo`, …; empty if unknown."""
    because_of: int | None = None
    """For a consequence, the index of its root in `findings`."""
    places: list[Place] = []
    lines: list[str] = []
    """Lines of logs that show it, as `file:line: text`."""


class GroupStragglers(msgspec.Struct, kw_only=True):
    """The last ranks of one group, and how long the others wait for them."""

    pg: list[str]
    pg_ranks: list[int]
    collectives: int
    """Number of compared collectives: the call of every member has a time."""
    last_rank: int
    last_share: float
    """Share of these collectives in which `last_rank` was last."""
    max_rank: int
    """The last rank of the collective with the longest wait."""
    wait_ms: dict[str, float]
    """Time from the first arrival to the last: p50, p95, max and total over the collectives."""
    late_ms: dict[str, float]
    """Rank -> median time from the first arrival to its own."""


class ClockAlignment(msgspec.Struct, kw_only=True):
    """How the ranks' clocks were aligned."""

    aligned: bool
    offset_ms: dict[str, float] = {}
    """Rank -> offset that was added to its times."""
    within_ms: float | None = None
    """How far an added offset may be from the truth: half the distance of its bounds. None if no offset was added, or
    a bound is missing."""
    residual_ms: float | None = None
    """Remaining error: the longest time by which a call seems to end before another rank starts it. None if the clocks
    are not aligned."""
    note: str = ""


class Diagnosis(msgspec.Struct, kw_only=True):
    """`diagnosis.json`."""

    verdict: str
    """`ok`: no rank waits. `slow`: ranks wait for one that runs. `incomplete`: evidence is missing. `error`: anything
    else."""
    proof: str = ""
    """The strongest proof of a finding; empty without a finding."""
    summary: str = ""
    """Who waits for whom, in a sentence; empty if no rank waits."""
    world_size: int
    ranks: list[int]
    """Ranks whose dumps were used."""
    suspect_ranks: list[int]
    """Culprits of the root findings. Ranks without evidence are included only if there are no others."""
    hosts: dict[str, str] = {}
    """Rank of `suspect_ranks` -> its host, if that is known."""
    findings: list[Finding]
    consequences: list[Finding]
    advisory: list[Finding]
    stragglers: list[GroupStragglers] = []
    clocks: ClockAlignment | None = None
    skipped: list[str] = []
    """Files that were not used, with the reason."""
    notes: list[str] = []
    """Assumptions of the verdict, and what could not be read."""
    counts: dict[str, int] = {}
    """Numbers of compared ranks, groups, collectives and calls."""

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"
