"""A diagnosis on a page: one of its own, and the section of the report."""

from __future__ import annotations

from collections.abc import Iterator

from crossrank.text import plural, rank_ranges
from crossrank.tools.analysis.diagnosis.findings import KINDS, LACKS_EVIDENCE, Diagnosis, Finding, group_text
from crossrank.tools.output.console import table_of
from crossrank.tools.output.diagnosis.text import (
    clocks_text,
    compared_text,
    facts,
    finding_call,
    finding_group,
    stragglers_table,
)
from crossrank.tools.output.page import (
    Block,
    Cell,
    Cells,
    Columns,
    Details,
    Fact,
    Facts,
    Heading,
    Page,
    Points,
    Section,
    Stack,
    Text,
    merge_cells,
)

VERDICT_TONES = {"ok": "good", "error": "bad", "incomplete": "none"}
_ROLE_TONES = {"culprit": "bad", "waiting": "warn"}
_LEGEND = (("bad", "culprit"), ("warn", "waits"), ("none", "no usable dump"), ("neither", "neither"))


def diagnosis_page(diagnosis: Diagnosis) -> Page:
    """The whole diagnosis."""
    subtitle = f"{len(diagnosis.ranks)} of {diagnosis.world_size} ranks read; {compared_text(diagnosis)} compared."
    if diagnosis.suspect_ranks:
        subtitle += f" Suspects: rank {rank_ranges(diagnosis.suspect_ranks)}."
    return Page(
        title=f"{diagnosis.verdict}: diagnosis of {diagnosis.world_size} ranks",
        heading=f"Verdict: {diagnosis.verdict}",
        tone=VERDICT_TONES[diagnosis.verdict],
        subtitle=subtitle,
        sections=diagnosis_sections(diagnosis, limit=200),
    )


def diagnosis_sections(diagnosis: Diagnosis, limit: int) -> list[Section]:
    """Ranks, findings, stragglers and notes; of each list `limit` entries."""
    count = len(diagnosis.findings)
    findings = [block for index in range(min(count, limit)) for block in _finding(diagnosis, index, limit)]
    if count > limit:
        findings.append(Text(f"… and {count - limit:,} more: crossrank diagnose --json has all", "soft"))
    findings += [Text(f"{one.kind} on {finding_group(one)}: {one.text}") for one in diagnosis.advisory[:limit]]
    sections = [Section("Diagnosis", findings or [Text("No fault was found.", "good")], id="diagnosis")]
    cells = list(_cells(diagnosis))
    if any(cell.tone for cell in cells):
        sections.insert(0, Section("Ranks", [Cells(merge_cells(cells), _LEGEND)]))
    if diagnosis.stragglers:
        table = stragglers_table(diagnosis.stragglers, limit)
        sections.append(Section("Who comes last", [table, Text(clocks_text(diagnosis), "soft")]))
    notes = [*diagnosis.skipped, *diagnosis.notes][:limit]
    return sections + ([Section("Notes", [Points([Text(note) for note in notes])])] if notes else [])


def _finding(diagnosis: Diagnosis, index: int, limit: int) -> Iterator[Block]:
    finding = diagnosis.findings[index]
    yield Heading(f"{index + 1}. {finding.kind}: {KINDS[finding.kind].meaning}", "bad")
    yield Facts([Fact(name, value) for name, value in facts(finding)])
    if finding.places:
        yield Columns(
            [
                Stack(f"rank {one.rank}, {one.role}", _ROLE_TONES.get(one.role, ""), one.what, one.frames)
                for one in finding.places
            ]
        )
    following = [one for one in diagnosis.consequences if one.because_of == index]
    if following:
        table = table_of(
            following,
            (
                ("call", finding_call),
                ("group", lambda one: group_text(one.pg)),
                ("ranks that wait", lambda one: rank_ranges(one.waiting_ranks) or "?"),
                ("for rank", lambda one: rank_ranges(one.culprit_ranks) or "?"),
            ),
            limit=limit,
        )
        yield Details(f"{plural(len(following), 'more call')} in which ranks wait because of it", [table])


def _cells(diagnosis: Diagnosis) -> Iterator[Cell]:
    """One for every rank of the job."""
    lacking = {rank for one in diagnosis.findings if one.kind in LACKS_EVIDENCE for rank in one.culprit_ranks}
    waits: dict[int, Finding] = {}
    for one in [*diagnosis.findings, *diagnosis.consequences]:
        for rank in one.waiting_ranks:
            waits.setdefault(rank, one)
    suspects = set(diagnosis.suspect_ranks)
    for rank in sorted({*diagnosis.ranks, *suspects, *waits, *range(diagnosis.world_size)}):
        if rank in lacking:
            yield Cell(str(rank), "none", "no usable dump")
        elif rank in suspects:
            yield Cell(str(rank), "bad", "culprit")
        elif rank in waits:
            yield Cell(str(rank), "warn", f"waits in {finding_call(waits[rank])} of {group_text(waits[rank].pg)}")
        else:
            yield Cell(str(rank), "", "")
