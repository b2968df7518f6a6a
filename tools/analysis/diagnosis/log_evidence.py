"""The evidence that logs of a job's launcher give: ranks for the search of causes, and what lines say directly.

A log shows what a rank printed. It does not show peers, data types and roots of calls, nor a rank that prints nothing.
So a rank without a line is named only if it is one of few that others wait for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from crossrank.rank_runs import ranks_in
from crossrank.text import plural
from crossrank.tools.analysis.diagnosis.findings import Finding, error_text, rank_text
from crossrank.tools.analysis.diagnosis.job_state import JobState
from crossrank.tools.analysis.diagnosis.wait_for_graph import WaitForGraph
from crossrank.tools.traces.ending import may_be_of_communication
from crossrank.tools.traces.logs import formats
from crossrank.tools.traces.logs.prefixes import Origin
from crossrank.tools.traces.logs.ranks import own_failure, ranks_of, ranks_of_hosts, spacing_of, summary_of, traces_of
from crossrank.tools.traces.logs.read import Attempt, Fact, JobLog
from crossrank.tools.traces.logs.tracebacks import Traceback
from crossrank.tools.traces.rank_trace import RankTrace

if TYPE_CHECKING:
    from crossrank.tools.analysis.diagnosis.evidence import Evidence

_Value = TypeVar("_Value")
_WITHOUT_A_LINE = 0.25
"""Share of a group's members up to which several without a line are named: the logs of a node may be missing."""
_WITHOUT_WAITS = ("network_failed", "log_error")
_MOST_OF_NODE = 64
"""Ranks of a node."""
_MANY = 2
"""Ranks that have lost a connection from which on the one that says nothing is named."""
_COMMUNICATES = re.compile(r"(?:\A|[/\\])torch[/\\]distributed[/\\]")
_WAITS_FOR_GPU = re.compile(r"(?:\A|[/\\])torch[/\\](?:autograd|cuda)[/\\]")
"""Files of the innermost functions in which a rank waits for the backward pass, or for the work of its GPU."""
_STACKS = 3
"""Ranks whose stacks have to be known."""
_QUOTED_CULPRITS, _QUOTED_WAITING = 3, 2
"""Ranks whose lines a finding quotes."""


def add_logs(evidence: Evidence, log: JobLog) -> None:
    """Add what the logs of a job say to its evidence."""
    known = {one.rank: one for one in evidence.ranks}
    evidence.logs_only, evidence.log_is_cut = not known, log.is_cut
    for trace in traces_of(log.last):
        if (other := known.get(trace.rank)) is None:
            evidence.ranks.append(trace)
        else:
            _complete(other, trace)
            evidence.notes += _contradictions(other, trace)
    sizes = [fact.number("expected") for fact in log.last.facts if fact.kind == formats.CLIENTS]
    evidence.world_size = evidence.world_size or max(sizes, default=None)
    evidence.told += _told(log.last, [one.rank or 0 for one in evidence.ranks], is_cut=log.is_cut)
    evidence.notes += log.problems
    evidence.notes += list(_notes(log))


def _complete(trace: RankTrace, log: RankTrace) -> None:
    """Add to a rank's dump, or its recording, what the log says of its end."""
    trace.log_lines, trace.host = log.log_lines, trace.host or log.host
    if trace.ending.error is None:
        ending, of_log = trace.ending, log.ending
        ending.error, ending.traceback, ending.causes = of_log.error, of_log.traceback, of_log.causes


def _contradictions(trace: RankTrace, log: RankTrace) -> Iterator[str]:
    """Yield where a rank's log says that it finished more calls of a group than its dump, or recording, has."""
    last: dict[str, int] = {}
    for group, number in zip(trace.calls.group, trace.calls.number, strict=True):
        name = trace.groups[group].group.pg
        last[name] = max(last.get(name, 0), number)
    for index, progress in log.dump.progress.items():
        name, completed = log.groups[index].group.pg, progress.last_completed_collective
        if last.get(name, completed) < completed:
            yield (
                f"rank {trace.rank}: its log says that it finished call {completed} of group {name}, and {trace.path} "
                f"has {last[name]} as its last one; they may be of two runs of the job"
            )


def _told(attempt: Attempt, ranks: Sequence[int], *, is_cut: bool) -> Iterator[Finding]:
    """Yield what lines say without a call, the most certain first: a verdict that crossrank printed in the job, ranks
    that never came to the store, or that others waited for, and errors."""
    of_ends = (_elsewhere,) if is_cut else (_elsewhere, _only_silent)
    for told in (
        _printed_verdict,
        _node_failed,
        _never_joined,
        _not_in_communicator,
        _at_fault,
        _compared,
        _other_version,
        _differs,
        _own_failure,
        _awaited,
        *of_ends,
        _in_pairs,
    ):
        if finding := told(attempt, ranks):
            yield finding
            return
    network = _of_kind(attempt.facts, formats.NETWORK)
    if network:
        ends = ", ".join(dict.fromkeys(fact.values["host"] for fact in network))
        yield _finding("network_failed", ranks, f"the network (NET/IB) lost its connection to {ends}", network)
    said = [fact for fact in attempt.facts if fact.kind in (formats.SAID, formats.XID)]
    if said:
        yield _finding("log_error", ranks, said[0].values["why"], said)
    errors = [one for one in attempt.tracebacks if one.ended_process and one.origin == Origin()]
    if errors and not said:
        texts = Counter(error_text(one.error) for one in errors)
        text = "; ".join(f"{error} ({plural(count, 'time')})" for error, count in texts.most_common(3))
        yield _finding("log_error", ranks, f"{text}; the logs do not show which ranks raised it", [errors[0]])


def _of_kind(facts: Sequence[Fact], kind: str) -> list[Fact]:
    return [fact for fact in facts if fact.kind == kind]


def _printed_verdict(attempt: Attempt, ranks: Sequence[int]) -> Finding | None:
    """Return the last verdict that crossrank printed in the job, unless it withdrew it."""
    verdict, culprits = None, list[int]()
    for fact in attempt.facts:
        if fact.kind in (formats.VERDICT, formats.WITHDRAWN):
            verdict, culprits = (fact if fact.kind == formats.VERDICT else None), []
        elif fact.kind == formats.VERDICT_CULPRIT and verdict is not None and not culprits:
            culprits = _valid_ranks(fact.values["ranks"])
    if verdict is None:
        return None
    text = f"crossrank said in the job: {verdict.values['why']}; `crossrank diagnose` of its recording says more"
    return _finding("printed_verdict", ranks, text, [verdict], culprits)


def _valid_ranks(text: str) -> list[int]:
    with suppress(ValueError):  # a line of the script may begin like one of crossrank
        return sorted(ranks_in(text))
    return []


def _never_joined(attempt: Attempt, ranks: Sequence[int]) -> Finding | None:
    for fact in _of_kind(attempt.facts, formats.CLIENTS):
        joined, expected = fact.number("joined"), fact.number("expected")
        # A rank that is on its way prints lines, but none of torch.
        known = {rank for rank, one in ranks_of(attempt).items() if one.lines()}
        of_own = (formats.PRINTED_RANK, formats.PROCESS_RANK)
        printed = {one.number("rank") for one in attempt.facts if one.kind in of_own}
        never = (sorted(set(range(expected)).difference(those)) for those in (ranks, known, printed))
        culprits = next((those for those in never if len(those) == expected - joined), [])
        who = f": {rank_text(culprits)} never came" if culprits else ""
        text = f"{joined} of {expected} ranks joined the store of the job{who}"
        return _finding("never_joined", range(expected), text, [fact], culprits)
    return None


def _at_fault(attempt: Attempt, ranks: Sequence[int]) -> Finding | None:
    faulty = [one for one in _of_kind(attempt.facts, formats.FAULTY) if one.quote.path not in attempt.passed]
    if not faulty:
        return None
    why = faulty[0].values["why"]
    same = [fact for fact in faulty if fact.values["why"] == why]
    those = sorted({int(rank) for fact in same for rank in fact.values["ranks"].split(", ")})
    return _finding("missing_rank", {*ranks, *those}, f"{rank_text(those)} {why}", same, those)


def _compared(attempt: Attempt, ranks: Sequence[int]) -> Finding | None:
    """Return the ranks in another call than most, of those that `TORCH_DISTRIBUTED_DEBUG=DETAIL` compared. They may
    differ in the number of the call alone."""
    lines = [one for one in _of_kind(attempt.facts, formats.MISMATCH) if "other_op" in one.values]
    calls: dict[int, tuple[str | None, ...]] = {}
    for fact in lines:
        for name, prefix in (("rank", ""), ("other", "other_")):
            call = tuple(fact.values.get(f"{prefix}{one}") for one in ("op", "seq", "shape", "dtype"))
            calls.setdefault(fact.number(name), call)
    if not calls:
        return None
    odd, usual, many = _unlike_most(calls)
    if many * 2 <= len({*ranks, *calls}):
        return None
    (op, number, *_), (usual_op, usual_number, *_) = calls[odd[0]], usual
    text = f"{rank_text(odd)} made {op} #{number}, and most ranks made {usual_op} #{usual_number}"
    return _finding("type_mismatch", {*ranks, *calls}, text, lines, odd, proof="mismatch")


def _unlike_most(of_ranks: Mapping[int, _Value]) -> tuple[list[int], _Value, int]:
    """Return (ranks with another value than the usual one, the usual value, how many ranks have it)."""
    usual, many = Counter(of_ranks.values()).most_common(1)[0]
    return sorted(rank for rank, value in of_ranks.items() if value != usual), usual, many


def _other_version(attempt: Attempt, ranks: Sequence[int]) -> Finding | None:
    """Return the ranks with another version of NCCL than most."""
    versions: dict[int, str] = {}
    for fact in (lines := _of_kind(attempt.facts, formats.VERSION)):
        versions |= {fact.number("rank"): fact.values["version"], fact.number("other"): fact.values["other_version"]}
    if len(set(versions.values())) < 2:
        return None
    odd, usual, many = _unlike_most(versions)
    text = f"{rank_text(odd)} has NCCL version {versions[odd[0]]}, and other ranks have {usual}"
    return _finding("log_error", versions, text, lines, odd if many > len(odd) else [])


def _differs(attempt: Attempt, ranks: Sequence[int]) -> Finding | None:
    """Return the ranks whose model differs from that of another rank; this one, if most ranks say so."""
    lines = _of_kind(attempt.facts, formats.DIFFERS)
    if not lines:
        return None
    odd, others = {one.number("rank") for one in lines}, {one.number("other") for one in lines}
    text = f"{rank_text(odd)} has another model than {rank_text(others)}"
    culprits = sorted(others if len(odd) * 2 > len({*ranks, *odd, *others}) else odd)
    return _finding("log_error", {*ranks, *odd, *others}, text, lines, culprits)


def _own_failure(attempt: Attempt, ranks: Sequence[int]) -> Finding | None:
    """Return the few ranks that failed by themselves. The log may not show that others waited for them."""
    ends = ranks_of(attempt)
    failed = {rank: why for rank, one in ends.items() if (why := own_failure(one)) is not None}
    if not failed or len(failed) * 2 > len(ends):
        return None
    text = "; ".join(f"{rank_text([rank])} failed: {error_text(why)}" for rank, why in sorted(failed.items()))
    found = _finding("raised", ends, text, [], sorted(failed), proof="gone")
    found.lines = [line for rank in sorted(failed)[:3] for line in ends[rank].lines()[-1:]]
    return found


def _awaited(attempt: Attempt, ranks: Sequence[int]) -> Finding | None:
    """Return who keeps others waiting, of ranks that wait for one another: the one that waits for none.

    Numbers within a group are those of the job only where a rank prints its own, or where all that print theirs are
    equally spaced.
    """
    waits = _of_kind(attempt.facts, formats.AWAITED)
    placed = [(fact, fact.origin.rank) for fact in waits if "member" in fact.values]
    first, step = spacing_of({fact.number("member"): rank for fact, rank in placed if rank is not None}) or (0, 1)
    waits = [
        fact
        for fact in waits
        if "member" not in fact.values or fact.origin.rank == first + step * fact.number("member")
    ]
    waiting = {fact.origin.rank for fact in waits} - {None}
    awaited = {first + step * fact.number("other") for fact in waits} - waiting
    if len(awaited) != 1 or (not waiting and len({fact.values["other"] for fact in waits}) > 1):
        return None
    text = f"{rank_text(awaited)} {waits[0].values['why']}"
    return _finding("missing_rank", {*ranks, *awaited}, text, waits, sorted(awaited))


def _only_silent(attempt: Attempt, ranks: Sequence[int]) -> Finding | None:
    """Return the only rank that says nothing of its end, if all others have lost a connection, or have timed out."""
    ends = ranks_of(attempt)
    lost = {rank for rank, one in ends.items() if one.raised is not None and may_be_of_communication(one.raised.error)}
    ended = {rank for rank, one in ends.items() if one.raised is not None or one.killed is not None}
    # The line of a timeout may be cut; the status that the watchdog prints after it says so too.
    watched = (formats.TIMEOUT, formats.STATUS)
    timed_out = {rank for rank, one in ends.items() if any(fact.kind in watched for fact in one.facts)}
    everyone = set(range(max({*ranks, *ends}, default=-1) + 1))
    stopped, how = (timed_out, "timed out") if timed_out else (lost, "lost a connection")
    silent = everyone - ended - timed_out
    if len(silent) != 1 or len(stopped) < _MANY or (not timed_out and ended != lost) or stopped | silent != everyone:
        return None
    text = f"{rank_text(stopped)} {how}, and {rank_text(silent)} says nothing of its end"
    tracebacks = [one for one in attempt.tracebacks if one.origin.rank in stopped]
    proof = "late" if timed_out else "gone"
    return _finding("missing_rank", everyone, text, tracebacks, sorted(silent), proof=proof)


def _in_pairs(attempt: Attempt, ranks: Sequence[int]) -> Finding | None:
    """Return the ranks that timed out in sends and receives, whose lines have no peers. If all but one of at least
    three have the same number of elements, this one is named."""
    lines = [one for one in _of_kind(attempt.facts, formats.TIMEOUT) if one.origin.rank is not None]
    of_pairs = [one for one in lines if one.values["op"] in ("SEND", "RECV") and "numel_in" in one.values]
    sizes = {one.origin.rank or 0: one.values["numel_in"] for one in of_pairs}
    if len(sizes) < len(lines) or not lines:
        return None
    odd, usual, many = _unlike_most(sizes)
    text = f"{rank_text(sizes)} timed out in sends and receives; the lines do not have their peers"
    if len(odd) != 1 or many < len(lines) - 1 or many < 3:
        return _finding("p2p_unmatched", ranks, text, lines, proof="not_known")
    text += f"; {rank_text(odd)} has {sizes[odd[0]]} elements, and the others have {usual}"
    return _finding("p2p_unmatched", ranks, text, lines, odd, proof="mismatch")


def _not_in_communicator(attempt: Attempt, ranks: Sequence[int]) -> Finding | None:
    """Return the few ranks that have not begun to make a communicator of NCCL, if all others wait in it."""
    made: dict[tuple[str, int], dict[int, Fact]] = {}
    for fact in (lines := _of_kind(attempt.facts, formats.COMMUNICATOR)):
        if fact.values["state"] == "START":
            made.setdefault((fact.values.get("comm", ""), fact.number("size")), {})[fact.number("member")] = fact
    ended = {fact.values.get("comm", "") for fact in lines if fact.values["state"] == "COMPLETE"}
    largest = max((size for _, size in made), default=0)
    for (comm, size), begun in made.items():
        lacking = set(range(size)).difference(begun)
        if comm in ended or not lacking or len(lacking) > max(1, size * _WITHOUT_A_LINE):
            continue
        known = {member: rank for member, one in begun.items() if (rank := one.origin.rank) is not None}
        first, step = spacing_of(known) or ((0, 1) if size == largest else (-1, 0))
        culprits = sorted(first + step * member for member in lacking) if step else []
        who = f"member {', '.join(map(str, sorted(lacking)))} of {size}"
        text = f"{who} has not begun to make NCCL's communicator {comm}: all others wait for it"
        return _finding("missing_rank", {*ranks, *culprits}, text, [*begun.values()], culprits)
    return None


def _node_failed(attempt: Attempt, ranks: Sequence[int]) -> Finding | None:
    """Return the ranks of a node that failed, as far as their lines have its host, or its number among the nodes."""
    failed = _of_kind(attempt.facts, formats.NODE_FAILED)
    if not failed:
        return None
    host = failed[0].values.get("host", failed[0].origin.host)
    killed = _of_kind(attempt.facts, formats.TASK_KILLED)
    nodes = _nodes_of(host, killed) if attempt.labels_are_nodes else ()
    those = {rank for rank, one in ranks_of(attempt).items() if one.host == host}
    those |= ranks_of_hosts(attempt).get(host, set())
    those |= {rank for node in nodes for rank in _ranks_of_node(attempt, node)}
    culprits = sorted(those) if len(those) * 2 <= max({*ranks, *those}, default=0) + 1 else []
    return _finding("log_error", {*ranks, *culprits}, f"node {host} failed", failed, culprits)


def _nodes_of(host: str, killed: Sequence[Fact]) -> set[int]:
    """Return the number of a node among those whose launchers ended; if it has no line, the only one that lacks one."""
    numbers = {one.number("rank"): one.values.get("host") for one in killed}
    own = {number for number, of in numbers.items() if of == host}
    lacking = {*range(max(numbers, default=-1) + 1)} - numbers.keys()
    return own or (lacking if len(lacking) == 1 else set())


def _ranks_of_node(attempt: Attempt, node: int) -> Collection[int]:
    """Return the ranks behind a label that is the number of a node. If its lines have none, but only one number of
    ranks on each node gives all others their nodes, these are known."""
    if node in attempt.labelled:
        return attempt.labelled[node]
    pairs = [(other, rank) for other, ranks in attempt.labelled.items() for rank in ranks]
    sizes = [size for size in range(1, _MOST_OF_NODE + 1) if all(rank // size == other for other, rank in pairs)]
    return range(node * sizes[0], (node + 1) * sizes[0]) if len(sizes) == 1 else ()


def _elsewhere(attempt: Attempt, ranks: Sequence[int]) -> Finding | None:
    """Return the ranks that waited for no other one when the user interrupted the job, or looked at the stacks of its
    processes, if most others did."""
    stopped = {
        one.origin.rank: (one.frames, one)
        for one in attempt.tracebacks
        if one.origin.rank is not None and one.error.startswith("KeyboardInterrupt")
    }
    stacks = _stacks(attempt)
    are_stacks = len(stacks) >= _STACKS
    shown = stacks if are_stacks else stopped
    waiting = {
        rank
        for rank, (frames, _) in shown.items()
        if any(_COMMUNICATES.search(file) for _, file, _ in frames)
        or any(_WAITS_FOR_GPU.search(file) for _, file, _ in frames[:1])
    }
    elsewhere = sorted(shown.keys() - waiting)
    if not elsewhere or len(elsewhere) * 2 >= len(shown) or (not are_stacks and shown.keys() != {*ranks}):
        return None
    where = {f"{name} ({file}:{line})" for rank in elsewhere for name, file, line in shown[rank][0][:1]}
    when = "the user looked at its stacks" if are_stacks else "the user ended the job"
    text = (
        f"when {when}, {rank_text(waiting)} waited in torch, and {rank_text(elsewhere)} did not, in "
        f"{', '.join(sorted(where))}"
    )
    lines = [shown[one][1] for one in elsewhere]
    return _finding("missing_rank", {*ranks, *shown}, text, lines, elsewhere)


def _stacks(attempt: Attempt) -> dict[int, tuple[tuple[tuple[str, str, int], ...], Fact]]:
    """Return the stack of each rank's main thread, innermost frame first, and the line that begins it."""
    found = {}
    for one in _of_kind(attempt.facts, formats.STACK):
        process = one.values.get("process", "")
        rank = attempt.processes.get(process, one.origin.rank)
        if rank is not None and one.frames and (process or one.frames[-1][0] == "<module>"):
            found[rank] = tuple(one.frames), one
    return found


def _finding(
    kind: str,
    ranks: Iterable[int],
    text: str,
    facts: Sequence[Fact | Traceback],
    culprits: Sequence[int] = (),
    proof: str = "",
) -> Finding:
    lines = [str(fact.quote) for fact in facts[:3]]
    waiting = [] if kind in _WITHOUT_WAITS else sorted(set(ranks).difference(culprits))
    return Finding(
        kind=kind,
        pg=["", ""],
        pg_ranks=sorted(ranks),
        text=text,
        culprit_ranks=list(culprits),
        waiting_ranks=waiting,
        proof=proof or ("gone" if kind in _WITHOUT_WAITS else "late"),
        lines=lines,
    )


def _notes(log: JobLog) -> Iterator[str]:
    """Yield what the logs could not tell."""
    for number, attempt in enumerate(log.attempts[:-1]):
        errors = [f"rank {one.origin.rank}: {error_text(one.error)}" for one in attempt.tracebacks[:1]]
        yield f"attempt {number} of the job was restarted" + (f"; it ended with {errors[0]}" if errors else "")
    if outside := _of_kind(log.last.facts, formats.OUTSIDE):
        yield f"the job was ended from outside: {outside[0].values['why']} ({outside[0].quote.path})"
    if failures := summary_of(log.last.facts):
        rank, _, code, _ = failures[0]
        why = "this proves nothing, because another rank may be the reason"
        yield f"torchrun saw rank {rank} end first, with exit code {code}; {why}"
    if log.last.unplaced:
        yield f"{plural(log.last.unplaced, 'line')} of the logs could not be given to a rank"


def without_a_line(graph: WaitForGraph, lacking: Mapping[int, str]) -> dict[int, str]:
    """Return the ranks without evidence that are few of those that make a call: the others wait for them."""
    few: set[int] = set()
    for op in graph.ops:
        absent = op.absent.intersection(lacking)
        if len(absent) <= max(1, len(op.group.ranks) * _WITHOUT_A_LINE):
            few |= absent
    return {rank: kind for rank, kind in lacking.items() if rank in few}


def lines_of(job: JobState, finding: Finding) -> list[str]:
    """Return the lines of logs that show a finding: the first of its culprits, and of two ranks that wait."""
    found: list[str] = []
    for ranks, most in ((finding.culprit_ranks[:_QUOTED_CULPRITS], 2), (finding.waiting_ranks[:_QUOTED_WAITING], 2)):
        for rank in ranks:
            found += job.ranks[rank].log_lines[:most] if rank in job.ranks else []
    return found
