"""A diagnosis as text: what happened, the culprits, the source lines, and the next step."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from crossrank.text import milliseconds, percent, plural, printable, rank_ranges
from crossrank.tools.analysis.diagnosis.findings import (
    KINDS,
    LEFT_OUT,
    NEXT_STEPS,
    PROOFS,
    Diagnosis,
    Finding,
    GroupStragglers,
    Place,
    call_text,
    group_text,
    rank_text,
    ranks_by,
)
from crossrank.tools.analysis.diagnosis.main_threads import is_library
from crossrank.tools.output.console import Table, print_fact, print_notes, table_of

_ROWS = 12
_FRAMES = 16
_AFTER_EXCEPTION = "read the log of rank {culprits}: its exception is the cause"
_WITHOUT_CULPRIT = (
    "raised",
    "not_recorded",
    "no_progress",
    "all_joined_not_completed",
    "communicator_failed",
    "thread_order",
    "p2p_size_mismatch",
    "p2p_wait_cycle",
    "log_error",
    "network_failed",
    "never_joined",
    "printed_verdict",
)
"""Kinds of findings that need no culprit."""
WAITS = (
    "from the first rank's call to the last rank's, as the dumps have them, else the recording; over all recorded "
    "collectives of groups with at least 5"
)
"""What the waits in the table of stragglers are."""
_VERDICTS = {
    "ok": "no fault found",
    "error": "a fault was found",
    "slow": "ranks wait for one that runs",
    "incomplete": "evidence is missing; the rest shows no fault",
}
_OF_WAITS = {
    ("error", "late"): "ranks wait; it is not proven that they wait for ever",
    ("incomplete", "not_known"): "ranks wait, and evidence is missing that shows whether they can go on",
}
"""Verdict and proof -> what to say instead, if ranks wait."""


@dataclass(frozen=True, kw_only=True)
class Filter:
    """The ranks and the groups (by name or description) to show; None = all."""

    ranks: Collection[int] | None = None
    groups: Collection[str] | None = None

    def takes(self, pg: Sequence[str], ranks: Collection[int]) -> bool:
        """Return whether to show a fact about a group and these ranks."""
        return (self.ranks is None or not set(self.ranks).isdisjoint(ranks)) and (
            self.groups is None or not set(self.groups).isdisjoint(pg)
        )

    def takes_finding(self, finding: Finding) -> bool:
        ranks = {*finding.culprit_ranks, *finding.waiting_ranks, *(place.rank for place in finding.places)}
        return self.takes(finding.pg, ranks)


# --- shared by the console and the page ------------------------------------------------------------------------------


def facts(finding: Finding) -> Iterator[tuple[str, str]]:
    """Yield (name, value): the call, the culprits, the waiting ranks, what happened, its proof, the next step."""
    if finding.op or any(finding.pg):
        yield "call", f"{finding_call(finding)} of group {finding_group(finding)}"
    if finding.culprit_ranks:
        yield "culprit", rank_text(finding.culprit_ranks)
    elif finding.late_ranks:
        yield (
            "culprit",
            f"unknown: {rank_text(one.rank for one in finding.late_ranks)} is late, or the others are wrong",
        )
    elif finding.kind not in _WITHOUT_CULPRIT:
        yield "culprit", "unknown: the ranks differ, and there is no majority"
    if finding.waiting_ranks:
        yield "waiting", rank_text(finding.waiting_ranks)
    if finding.text:
        yield "what", finding.text
    if finding.proof in PROOFS:
        yield "proof", f"{finding.proof}: {PROOFS[finding.proof]}"
    yield "next", next_step(finding)


def _verdict_text(diagnosis: Diagnosis) -> str:
    waits = any(one.waiting_ranks for one in diagnosis.findings)
    return (waits and _OF_WAITS.get((diagnosis.verdict, diagnosis.proof))) or _VERDICTS[diagnosis.verdict]


def next_step(finding: Finding) -> str:
    """Return the next step for a finding."""
    states = {one.state for one in finding.late_ranks}
    if finding.exception is None and len(states) == 1 and (step := NEXT_STEPS.get(next(iter(states)), "")):
        return step.format(ranks=rank_ranges([one.rank for one in finding.late_ranks]))
    kind = KINDS[finding.kind]
    step = kind.next_step
    if finding.kind == "missing_rank" and finding.culprit_ranks and finding.exception is None:
        if finding.proof == "gone":
            return NEXT_STEPS["gone"].format(ranks=rank_ranges(finding.culprit_ranks))
        if finding.proof in ("mismatch", "deadlock") and any(one.role == "culprit" for one in finding.places):
            return LEFT_OUT.format(ranks=rank_ranges(finding.culprit_ranks))
    if kind.without_gpu and finding.exception is not None:
        step = _AFTER_EXCEPTION
    elif kind.without_gpu and "nccl" not in finding.backend:
        step = kind.without_gpu
    return step.format(culprits=rank_ranges(finding.culprit_ranks or finding.waiting_ranks) or "in question")


def finding_call(finding: Finding) -> str:
    """Return the call of a finding, such as `all_reduce #4` or `send p2p #4`."""
    if finding.collective_seq_id is None and finding.p2p_seq_id is not None:
        return f"{finding.op} p2p #{finding.p2p_seq_id}".strip()
    return call_text(finding.op, finding.collective_seq_id).strip() or "none in particular"


def finding_group(finding: Finding) -> str:
    return f"{group_text(finding.pg)} (rank {rank_ranges(finding.pg_ranks)})"


def compared_text(diagnosis: Diagnosis) -> str:
    counts = diagnosis.counts
    collectives = plural(counts["collectives"], "collective")
    return f"{plural(counts['calls'], 'call')} on {plural(counts['groups'], 'group')} ({collectives})"


def clocks_text(diagnosis: Diagnosis) -> str:
    """Return how exact the waits in the table of stragglers are."""
    if diagnosis.clocks is None:
        return "unknown"
    residual = diagnosis.clocks.residual_ms
    return diagnosis.clocks.note + (
        f"; calls seem to end up to {milliseconds(residual)} before another rank starts them" if residual else ""
    )


def stragglers_table(rows: Sequence[GroupStragglers], limit: int) -> Table:
    return table_of(
        rows,
        (
            ("group", lambda row: group_text(row.pg)),
            ("ranks", lambda row: rank_ranges(row.pg_ranks)),
            ("#collectives", lambda row: row.collectives),
            ("most often last", lambda row: f"rank {row.last_rank} in {percent(row.last_share)}"),
            ("#wait\np50", lambda row: milliseconds(row.wait_ms["p50"])),
            ("#wait\np95", lambda row: milliseconds(row.wait_ms["p95"])),
            ("#wait\nmax", lambda row: milliseconds(row.wait_ms["max"])),
            ("last rank\nat max", lambda row: f"rank {row.max_rank}"),
            ("#wait\ntotal", lambda row: milliseconds(row.wait_ms["total"])),
        ),
        limit=limit,
    )


# --- the console -----------------------------------------------------------------------------------------------------


def print_diagnosis(diagnosis: Diagnosis, chosen: Filter | None = None) -> None:
    """Print the findings that `chosen` selects directly or by a consequence, with all their consequences."""
    chosen = chosen or Filter()
    print_fact("verdict", f"{diagnosis.verdict}: {_verdict_text(diagnosis)}")
    if diagnosis.suspect_ranks:
        print_fact("culprit", _with_hosts(diagnosis))
    shown = {index for index, finding in enumerate(diagnosis.findings) if chosen.takes_finding(finding)}
    shown |= {
        one.because_of for one in diagnosis.consequences if one.because_of is not None and chosen.takes_finding(one)
    }
    for index in sorted(shown):
        _print_root(index, diagnosis.findings[index], diagnosis)
    if len(shown) < len(diagnosis.findings):
        hidden = plural(len(diagnosis.findings) - len(shown), "finding")
        print(f"\nnot shown: {hidden} about other ranks or groups")
    for finding in list(filter(chosen.takes_finding, diagnosis.advisory))[:_ROWS]:
        print()
        print_fact("note", f"{finding.kind} on {finding_group(finding)}: {finding.text}")
    stragglers = [row for row in diagnosis.stragglers if chosen.takes(row.pg, row.pg_ranks)]
    if stragglers:
        stragglers_table(stragglers, _ROWS).print("Last ranks to arrive")
    print_notes(diagnosis.notes, _ROWS)
    print()
    print_fact("read", f"{len(diagnosis.ranks)} of {diagnosis.world_size} ranks ({rank_ranges(diagnosis.ranks)})")
    print_fact("compared", compared_text(diagnosis))
    if stragglers:
        print_fact("waits", WAITS)
        print_fact("clocks", clocks_text(diagnosis))


def _with_hosts(diagnosis: Diagnosis) -> str:
    """Return the culprits, each with its host if that is known."""
    hosts = {rank: diagnosis.hosts.get(str(rank), "") for rank in diagnosis.suspect_ranks}
    names = (f"rank {rank_ranges(ranks)}{f' on {host}' if host else ''}" for host, ranks in ranks_by(hosts).items())
    return printable(", ".join(names))


def _print_root(index: int, finding: Finding, diagnosis: Diagnosis) -> None:
    print(f"\n{index + 1}. {finding.kind}: {KINDS[finding.kind].meaning}")
    for name, text in facts(finding):
        print(f"   {name:<12} {printable(text)}")
    _print_places(finding.places)
    for line in finding.lines:
        print(f"   {'line':<12} {printable(line)}")
    follow = [one for one in diagnosis.consequences if one.because_of == index]
    if follow:
        waiting = rank_text({rank for one in follow for rank in one.waiting_ranks})
        print(f"   {'follows':<12} {plural(len(follow), 'more call')} in which {waiting} waits as a result:")
    for one in follow[:_ROWS]:
        awaited = rank_ranges(one.awaited_ranks or one.culprit_ranks) or "?"
        print(
            f"   {'':<12} rank {rank_ranges(one.waiting_ranks)} in {printable(finding_call(one))} of "
            f"{printable(finding_group(one))}, waiting for rank {awaited}"
        )
    if len(follow) > _ROWS:
        print(f"   {'':<12} … and {len(follow) - _ROWS} more (--json shows all)")


def frame_lines(place: Place) -> list[str]:
    """Return the frames of the user's code, then those of libraries below a title."""
    first = next((number for number, frame in enumerate(place.frames) if is_library(frame)), 0)
    return [*place.frames[:first], *(["inside libraries:"] if first else []), *place.frames[first:]]


def _print_places(places: Sequence[Place]) -> None:
    """Print stacks side by side if the terminal is wide enough."""
    width = shutil.get_terminal_size((160, 24)).columns if sys.stdout.isatty() else 160
    columns = [[f"rank {place.rank}, {place.role}: {place.what}", *frame_lines(place)[:_FRAMES]] for place in places]
    columns = [list(map(printable, column)) for column in columns]
    left = max(map(len, columns[0])) if len(columns) == 2 else width
    if left <= (width - 3) // 2 - 2:
        for one, other in zip_longest(*columns, fillvalue=""):
            print(f"   {one:<{left}}   {other}".rstrip())
    else:
        for title, *frames in columns:
            print(f"   {title}", *frames, sep="\n     ")
