"""A diagnosis as a page of its own, and as sections of the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from crossrank.tools.analysis.diagnosis.findings import KINDS, LACKS_EVIDENCE, Diagnosis, Finding, group_text
from crossrank.tools.output.diagnosis.verdict import WAITS, finding_call, stragglers_table

_MOST_CELLS = 1024
"""Largest job with one cell per rank."""


class Cell(NamedTuple):
    """A rank or a range of ranks, its color, and its state."""

    text: str
    tone: str
    title: str


def shown(diagnosis: Diagnosis, limit: int) -> dict[str, object]:
    """Return the arguments of the macro `diagnosis_sections`, with `limit` entries per list."""
    following: list[list[Finding]] = [[] for _ in diagnosis.findings]
    for one in diagnosis.consequences:
        if one.because_of is not None:
            following[one.because_of].append(one)
    return {
        "diagnosis": diagnosis,
        "limit": limit,
        "kinds": KINDS,
        "tone": {"ok": "good", "error": "bad"}.get(diagnosis.verdict, "none"),
        "cells": merge_cells(list(_cells(diagnosis))),
        "stragglers": stragglers_table(diagnosis.stragglers, limit),
        "waits": WAITS,
        "following": following,
    }


def diagnosis_page(diagnosis: Diagnosis) -> str:
    """Return the page."""
    from crossrank.tools.output.page import render

    return render("diagnosis.html", shown=shown(diagnosis, limit=200))


def merge_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Merge neighbors with the same role and title, if the job has more ranks than the page can show."""
    merged: list[Cell] = []
    for cell in cells:
        last = merged[-1] if merged else None
        if len(cells) > _MOST_CELLS and last is not None and last[1:] == cell[1:]:
            merged[-1] = last._replace(text=f"{last.text.partition('-')[0]}-{cell.text}")
        else:
            merged.append(cell)
    return merged


def _cells(diagnosis: Diagnosis) -> Iterator[Cell]:
    """Yield one cell per rank of the job."""
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
