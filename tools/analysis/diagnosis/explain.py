"""A diagnosis as text for people: what happened, who, where in the code, and what to look at next."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from crossrank.text import printable, rank_ranges
from crossrank.tools.analysis.diagnosis.findings import KINDS, Diagnosis, Finding, Place, group_text
from crossrank.tools.output.console import print_table

_ROWS = 12
_FRAMES = 16

NEXT_STEPS: dict[str, str] = {
    "missing_rank": "look at what rank {culprits} does instead: its log, its stack (py-spy dump), its GPU (dmesg, Xid)",
    "extra_collective": "look for a call that only rank {culprits} reaches: `if rank == …`, an exception that was "
    "handled, a loop with one more turn",
    "type_mismatch": "look for a branch that makes rank {culprits} call something else",
    "size_mismatch": "compare shapes at that line: uneven batches, a last batch, padding",
    "dtype_mismatch": "compare types at that line: autocast, a checkpoint loaded in another precision",
    "root_mismatch": "compare src= or dst= at that line; they are global ranks",
    "reduce_op_mismatch": "compare op= at that line",
    "opposite_order": "make every rank enter these groups in one order, or put the calls on one stream",
    "not_started": "look at rank {culprits}: its GPU is busy with, or stuck in, what it was given before",
    "not_completed": "look at the GPU and the driver of rank {culprits} (dmesg, Xid, nvidia-smi -q)",
    "all_joined_not_completed": "a fault of the fabric or the library: NCCL_DEBUG=INFO, link counters, switch logs. "
    "TORCH_NCCL_ENABLE_TIMING=1 would show which rank began",
    "p2p_unmatched": "look for the send or receive that rank {culprits} did not make, or made in another order",
    "p2p_size_mismatch": "compare the shapes that both ends of the pipeline agree on",
    "p2p_wait_cycle": "see that every send goes to the rank that receives it; else let one side send first, or use "
    "batch_isend_irecv",
    "raised": "look at the log of rank {culprits}: the first exception is the cause of the others",
    "dump_missing": "rank {culprits} died or could not write: look at its log and its exit code",
    "no_entries": "rank {culprits} made no call, or its recorder was off (TORCH_FR_BUFFER_SIZE=0)",
    "unreadable_dump": "take the dump of rank {culprits} again, or read its log",
    "refused_dump": "find out who wrote the dump of rank {culprits}: a genuine one holds data alone",
}

WITHOUT_GPU: dict[str, str] = {
    "missing_rank": "look at what rank {culprits} does instead: its log, its stack (py-spy dump)",
    "not_completed": "look at what rank {culprits} does: its log, its stack (py-spy dump), its network",
    "all_joined_not_completed": "look at the logs of these ranks, and at the network between them",
    "not_started": "look at what rank {culprits} does: its log, its stack (py-spy dump)",
}
"""Where nothing says that a GPU is at fault: on gloo."""

AFTER_EXCEPTION = "look at the log of rank {culprits}: the exception there is the cause"

_VERDICTS = {
    "ok": "no fault found",
    "error": "a fault was found",
    "incomplete": "ranks without a usable dump; the others show no other fault",
}


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Which ranks and groups, by name or description, are shown; None = all."""

    ranks: Collection[int] | None = None
    groups: Collection[str] | None = None

    def takes(self, pg: Sequence[str], ranks: Collection[int]) -> bool:
        """Whether something that is about a group and these ranks is shown."""
        return (self.ranks is None or not set(self.ranks).isdisjoint(ranks)) and (
            self.groups is None or not set(self.groups).isdisjoint(pg)
        )

    def takes_finding(self, finding: Finding) -> bool:
        ranks = {*finding.culprit_ranks, *finding.waiting_ranks, *(place.rank for place in finding.places)}
        return self.takes(finding.pg, ranks)

    @property
    def text(self) -> str:
        ranks = [f"rank {rank_ranges(sorted(self.ranks))}"] if self.ranks is not None else []
        return " and ".join(ranks + ([f"group {', '.join(self.groups)}"] if self.groups is not None else []))


def print_diagnosis(diagnosis: Diagnosis, chosen: Filter | None = None) -> None:
    """Print what `chosen` takes: a finding with all that follows from it, where it or any of that is taken."""
    chosen = chosen or Filter()
    counts = diagnosis.counts
    print(f"verdict    {diagnosis.verdict}: {_VERDICTS[diagnosis.verdict]}")
    print(f"ranks      {len(diagnosis.ranks)} of {diagnosis.world_size} read ({rank_ranges(diagnosis.ranks)})")
    print(f"compared   {counts['collectives']:,} collectives, {counts['calls']:,} calls on {counts['groups']} group(s)")
    if diagnosis.suspect_ranks:
        print(f"suspects   rank {rank_ranges(diagnosis.suspect_ranks)}")
    shown = {index for index, finding in enumerate(diagnosis.findings) if chosen.takes_finding(finding)}
    shown |= {
        one.because_of for one in diagnosis.consequences if one.because_of is not None and chosen.takes_finding(one)
    }
    for index in sorted(shown):
        _print_root(index, diagnosis.findings[index], diagnosis)
    if len(shown) < len(diagnosis.findings):
        print(f"\n{len(diagnosis.findings) - len(shown)} finding(s) are not about {printable(chosen.text)}")
    for finding in list(filter(chosen.takes_finding, diagnosis.advisory))[:_ROWS]:
        print(f"\nnote       {finding.kind} on {_group(finding)}: {printable(finding.text)}")
    stragglers = [row for row in diagnosis.stragglers if chosen.takes(row.pg, row.pg_ranks)]
    if stragglers:
        rows = stragglers[:_ROWS]
        print_table(
            "Who comes last, by when the CPUs made the calls",
            (
                "group",
                "ranks",
                "#collectives",
                "last most often",
                "#of them",
                "#wait p50",
                "#p95",
                "#total",
                "#max",
                "by",
            ),
            [
                (
                    group_text(row.pg),
                    rank_ranges(row.pg_ranks),
                    row.collectives,
                    f"rank {row.last_rank}",
                    f"{row.last_share:.0%}",
                    *(_milliseconds(row.wait_ms[key]) for key in ("p50", "p95", "total", "max")),
                    f"rank {row.max_rank}",
                )
                for row in rows
            ],
        )
        if len(stragglers) > _ROWS:
            print(f"  … and {len(stragglers) - _ROWS} more: --json has all")
        if diagnosis.clocks is not None:
            clocks = diagnosis.clocks
            residual = f"; at worst {clocks.residual_ms:.3g} ms contradict" if clocks.residual_ms else ""
            print(f"  wait: from the first rank's call to the last's. {clocks.note}{residual}")
    for note in diagnosis.notes[:_ROWS]:
        print(f"\nnote       {printable(note)}")
    if len(diagnosis.notes) > _ROWS:
        print(f"\n… and {len(diagnosis.notes) - _ROWS} more notes: --json has all")


def _print_root(index: int, finding: Finding, diagnosis: Diagnosis) -> None:
    print(f"\n{index + 1}. {finding.kind}: {KINDS[finding.kind]}")
    for name, text in _facts(finding):
        print(f"   {name:<12} {printable(text)}")
    print(f"   {'next':<12} {next_step(finding)}")
    _print_places(finding.places)
    follow = [one for one in diagnosis.consequences if one.because_of == index]
    if follow:
        waiting = sorted({rank for one in follow for rank in one.waiting_ranks})
        print(f"   {'follows':<12} {len(follow)} more call(s) in which rank {rank_ranges(waiting)} wait because of it:")
        for one in follow[:_ROWS]:
            print(
                f"   {'':<12} rank {rank_ranges(one.waiting_ranks)} in {_call(one)} of {_group(one)}, "
                f"for rank {rank_ranges(one.culprit_ranks) or '?'}"
            )
        if len(follow) > _ROWS:
            print(f"   {'':<12} … and {len(follow) - _ROWS} more: --json has all")


def _facts(finding: Finding) -> Iterator[tuple[str, str]]:
    yield "call", f"{_call(finding) or 'none in particular'} of group {_group(finding)}"
    if finding.culprit_ranks:
        yield "culprit", f"rank {rank_ranges(finding.culprit_ranks)}"
    elif finding.kind not in ("raised", "all_joined_not_completed", "p2p_size_mismatch", "p2p_wait_cycle"):
        yield "culprit", "nobody: there is no majority to say who is the odd one"
    if finding.waiting_ranks:
        yield "waiting", f"rank {rank_ranges(finding.waiting_ranks)}"
    if finding.text:
        yield "what", finding.text


def next_step(finding: Finding) -> str:
    """What a person does next about a finding."""
    culprits = rank_ranges(finding.culprit_ranks or finding.waiting_ranks) or "in question"
    step = NEXT_STEPS.get(finding.kind, "")
    if finding.exception is not None and finding.kind in WITHOUT_GPU:
        step = AFTER_EXCEPTION
    elif "nccl" not in finding.backend:
        step = WITHOUT_GPU.get(finding.kind, step)
    return step.format(culprits=culprits)


def _print_places(places: Sequence[Place]) -> None:
    """Stacks side by side where the terminal is wide enough, below each other otherwise."""
    if not places:
        return
    width = shutil.get_terminal_size((160, 24)).columns if sys.stdout.isatty() else 160
    columns = [[f"rank {place.rank}, {place.role}: {place.what}", *place.frames[:_FRAMES]] for place in places]
    columns = [[printable(line) for line in column] for column in columns]
    half = (width - 3) // 2 - 2
    if len(columns) == 2 and max(map(len, columns[0])) <= half:
        left = max(map(len, columns[0]))
        for one, other in zip_longest(*columns, fillvalue=""):
            print(f"   {one:<{left}}   {other}".rstrip())
        return
    for column in columns:
        print(f"   {column[0]}")
        for line in column[1:]:
            print(f"     {line}")


def _call(finding: Finding) -> str:
    return printable(f"{finding.op} {number_text(finding)}".strip())


def _group(finding: Finding) -> str:
    return f"{printable(group_text(finding.pg))} (rank {rank_ranges(finding.pg_ranks)})"


def number_text(finding: Finding) -> str:
    """The sequence number of its call, `#4` or `p2p #4`."""
    if finding.collective_seq_id is not None:
        return f"#{finding.collective_seq_id}"
    return f"p2p #{finding.p2p_seq_id}" if finding.p2p_seq_id is not None else ""


def _milliseconds(value: float) -> str:
    return f"{value:,.3g} ms" if value < 1000 else f"{value / 1000:,.3g} s"
