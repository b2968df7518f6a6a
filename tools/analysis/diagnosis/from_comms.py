"""A comms file as evidence: the calls of one rank with their peers and roots, but without their state.

What had become of a call follows from what the rank did afterwards. A rank that ended its recording itself was done
with all; elsewhere its last call may be the one that it hangs in. A send or receive that did not block (`isend`, a
batch) is left open: whether it was answered shows when it is matched with the other rank's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from crossrank.comm import MOST_RANKS, CommRecord, crosses_nodes, is_p2p
from crossrank.recording import CommsFile
from crossrank.tools.analysis.diagnosis.evidence import (
    CUT_SHORT,
    RETIRED,
    SCHEDULED,
    GroupClaim,
    RankEvidence,
    Signature,
    Table,
    signature_of_record,
)
from crossrank.tools.analysis.diagnosis.findings import call_text, group_text
from crossrank.tools.traces.flight_recorder import Frame, Raised

_MOST = 1 << 62
SAME_TIME = 50_000_000
"""ns between torch's and our note of one call: the launch lies between them."""
_BLOCKING_P2P = {"send", "recv"}
_UNRECORDED = {"monitored_barrier_"}
"""Collectives of gloo that torch's recorder neither notes nor counts."""


def evidence_from_comms(path: str, rank: int | None) -> RankEvidence:
    """What the comms file of `rank` says; of the rank that it says itself where None is given, -1 if it does not."""
    comms = CommsFile(path, rank)
    records = list(comms.records())
    header = comms.header
    if rank is None:
        rank = header.rank if header is not None else -1
    evidence = RankEvidence(rank=rank, path=path, source="comms", numbered_pairs=True, problems=comms.damage.problems)
    evidence.ended = comms.end is not None
    if comms.end is not None:
        reason = comms.end.get("reason")
        evidence.reason = reason if isinstance(reason, str) else ""
        evidence.take_exceptions(_exceptions(comms.end.get("exceptions")))
    offset = 0
    if header is not None:
        evidence.host = header.host
        evidence.world_size = header.world_size if 0 < header.world_size <= MOST_RANKS else None
        evidence.version = header.schema
        evidence.filtered = header.leaves_out_calls
        offset = header.clock.get("wall", 0) - header.clock.get("t", 0)
        # The file says up to when it lacks nothing; those of earlier versions end with a call.
        clock = max((clock.get("t", 0) for clock in comms.clocks), default=0)
        is_cut = comms.end is None or evidence.reason in CUT_SHORT
        if records and clock > records[-1].t and is_cut and clock + offset < _MOST:
            evidence.taken_at = clock + offset
    for group in comms.groups:
        if evidence.filtered and not crosses_nodes(group.locality):
            evidence.inside_node.add(group.pg)
        evidence.groups.append(GroupClaim(group.pg, group.desc, None if group.ranks is None else tuple(group.ranks)))
        evidence.backend = evidence.backend or group.backend
    _add(evidence, records, offset)
    return evidence


def _exceptions(said: object) -> list[Raised]:
    try:
        return msgspec.convert(said or [], list[Raised], strict=False)
    except (msgspec.MsgspecError, ValueError):
        return []


def complete(evidence: RankEvidence, comms: RankEvidence) -> None:
    """Add to a dump what the rank's comms file beside it knows: the members of groups, and gloo's P2P calls."""
    ranks_of = {group.name: group.ranks for group in comms.groups}
    evidence.groups = [
        group if group.ranks is not None else msgspec.structs.replace(group, ranks=ranks_of.get(group.name))
        for group in evidence.groups
    ]
    evidence.host = evidence.host or comms.host
    evidence.world_size = evidence.world_size or comms.world_size
    if evidence.error is None:
        evidence.error, evidence.traceback, evidence.causes = comms.error, comms.traceback, comms.causes
    evidence.of_threads = evidence.of_threads or comms.of_threads
    has_p2p = any(signature.is_p2p for signature in evidence.signatures)
    rows = [row for row, number in enumerate(comms.calls.signature) if _is_unknown(comms.signatures[number], has_p2p)]
    if not rows:
        return
    indices = {(group.name, group.apart): index for index, group in enumerate(evidence.groups)}
    signatures, stacks = Table(*evidence.signatures), Table(*evidence.stacks)
    source = comms.calls
    counts: Counter[tuple[str, str]] = Counter()
    for row in rows:
        group, signature = comms.groups[source.group[row]], comms.signatures[source.signature[row]]
        if not signature.is_p2p:
            group = msgspec.structs.replace(group, apart=signature.name)
        key = group.name, group.apart
        counts[key] += 1
        if key not in indices:
            indices[key] = len(evidence.groups)
            evidence.groups.append(group)
        if row in comms.unawaited:
            evidence.unawaited.add(len(evidence.calls))
        evidence.calls.append(
            group=indices[key],
            seq=source.seq[row] if signature.is_p2p else counts[key],
            signature=signatures.number(signature),
            state=source.state[row],
            created=source.created[row],
            stack=stacks.number(comms.stacks[source.stack[row]]),
            record=source.record[row],
        )
    evidence.signatures, evidence.stacks = signatures.rows, stacks.rows
    evidence.numbered_pairs = evidence.numbered_pairs or not has_p2p
    _sort_by_time(evidence)


def _is_unknown(signature: Signature, has_p2p: bool) -> bool:
    """Whether torch's recorder does not note such a call of gloo."""
    return signature.name in _UNRECORDED or (signature.is_p2p and not has_p2p)


def add_roots(evidence: RankEvidence, records: Sequence[CommRecord], offset: int) -> None:
    """Add what torch's recorder does not note of a collective to the calls of a dump: root, reduction, source line.

    torch counts from the start of the process, the records from `enable()`: both are laid side by side at the last
    call of a group, which must be the same operation at the same time.
    """
    calls = evidence.calls
    by_seq: dict[tuple[str, int], int] = {}
    last: dict[str, int] = {}
    for row, (group, seq) in enumerate(zip(calls.group, calls.seq, strict=True)):
        if not evidence.signatures[calls.signature[row]].is_p2p and not evidence.groups[group].apart:
            name = evidence.groups[group].name
            by_seq[name, seq] = row
            last[name] = row
    collectives = [record for record in records if record.seq is not None]
    for record in {record.pg: record for record in collectives}.values():
        row = last.get(record.pg, -1)
        if row < 0 or record.seq is None:
            continue
        op = evidence.signatures[calls.signature[row]].op
        # gloo makes a reduce_scatter of an all_reduce, and torch's recorder notes what gloo makes
        same = op == record.op or (op, record.op) == ("all_reduce", "reduce_scatter")
        if same and abs(calls.created[row] - record.t - offset) < SAME_TIME:
            evidence.recorded_from[record.pg] = calls.seq[row] - record.seq
    signatures, stacks = Table(*evidence.signatures), Table(*evidence.stacks)
    for record in collectives:
        before = evidence.recorded_from.get(record.pg)
        if before is None or record.seq is None:
            continue
        row = by_seq.get((record.pg, record.seq + before), -1)
        if row < 0:
            continue
        known = signatures.rows[calls.signature[row]]
        whole = msgspec.structs.replace(known, root=record.root, reduce=record.reduce)
        calls.signature[row] = signatures.number(whole)
        if not calls.stack[row]:
            calls.stack[row] = stacks.number(stack_of_record(record))
    evidence.signatures, evidence.stacks = signatures.rows, stacks.rows


def count_as_torch_does(comms: RankEvidence, others: Sequence[RankEvidence]) -> None:
    """Make a comms file comparable with the other ranks' dumps: its collectives get the numbers that torch gave them
    there, by what those dumps know of both."""
    comms.signatures = [msgspec.structs.replace(one, comparable=one.is_p2p) for one in comms.signatures]
    for index, group in enumerate(comms.groups):
        before = Counter(other.recorded_from[group.name] for other in others if group.name in other.recorded_from)
        if not before:
            continue
        shift = max(before, key=lambda count: (before[count], -count))
        for row, of_group in enumerate(comms.calls.group):
            if of_group == index and not comms.signatures[comms.calls.signature[row]].is_p2p:
                comms.calls.seq[row] += shift


def last_words(comms: RankEvidence) -> str:
    """The last call in a comms file, for a rank that left nothing else."""
    row = len(comms.calls) - 1
    if row < 0:
        return "its comms file holds no call"
    op = comms.signatures[comms.calls.signature[row]].op
    group = comms.groups[comms.calls.group[row]]
    frames = comms.stacks[comms.calls.stack[row]]
    where = f" at {frames[0].filename}:{frames[0].line}" if frames else ""
    name = group_text([group.name, group.desc])
    return f"the last call in its comms file is {call_text(op, comms.calls.seq[row])} on {name}{where}"


def add_p2p(evidence: RankEvidence, records: Sequence[CommRecord], offset: int) -> None:
    """Add the sends and receives among `records` to the calls of a dump that has none, by their times."""
    if any(is_p2p(record) for record in records):
        evidence.numbered_pairs = True
        _add(evidence, records, offset, p2p_only=True)
        _sort_by_time(evidence)


def _sort_by_time(evidence: RankEvidence) -> None:
    calls = evidence.calls
    order = sorted(range(len(calls)), key=lambda row: (calls.created[row], row))
    evidence.unawaited = {new for new, old in enumerate(order) if old in evidence.unawaited}
    evidence.calls = calls.in_order(order)


def _add(evidence: RankEvidence, records: Sequence[CommRecord], offset: int, *, p2p_only: bool = False) -> None:
    """`offset` turns the monotonic times of the records into ns since 1970."""
    indices = {group.name: index for index, group in enumerate(evidence.groups)}
    signatures, stacks = Table(*evidence.signatures), Table(*evidence.stacks)
    last = records[-1].id if records else -1
    unusable = 0
    for record in records:
        p2p = is_p2p(record)
        if p2p_only and not p2p:
            continue
        seq = record.p2p_seq if p2p else record.seq
        numbers = (record.id, record.t + offset, seq or 0, record.peer or 0, record.root or 0)
        if seq is None or not all(-_MOST < number < _MOST for number in numbers):
            unusable += 1
            continue
        group = indices.get(record.pg)
        if group is None:
            group = indices[record.pg] = len(evidence.groups)
            evidence.groups.append(GroupClaim(record.pg, "", None))
        unawaited = p2p and record.api not in _BLOCKING_P2P
        if unawaited:
            evidence.unawaited.add(len(evidence.calls))
        is_cut = not evidence.ended or evidence.reason in CUT_SHORT
        open_at_end = is_cut and (unawaited or record.id == last)
        evidence.calls.append(
            group=group,
            seq=seq,
            signature=signatures.number(signature_of_record(record)),
            state=SCHEDULED if open_at_end else RETIRED,
            created=record.t + offset,
            stack=stacks.number(stack_of_record(record)),
            record=record.id,
        )
    evidence.signatures, evidence.stacks = signatures.rows, stacks.rows
    if unusable:
        evidence.problems.append(f"{unusable} of {len(records)} calls have no number, or one beyond reason")


def stack_of_record(record: CommRecord) -> tuple[Frame, ...]:
    """The one frame that a record names, as a stack."""
    if record.source is None:
        return ()
    name, _, line = record.source.rpartition(":")
    return (
        Frame(
            name=record.api or "(C++)",
            filename=name,
            line=int(line) if line.isascii() and line.isdigit() and len(line) < 10 else 0,
        ),
    )
