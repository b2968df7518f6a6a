"""A diagnosis on a page: one of its own, and sections of the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from crossrank.tools.analysis.diagnosis.findings import KINDS, LACKS_EVIDENCE, Diagnosis, Finding, group_text
from crossrank.tools.output.diagnosis.verdict import finding_call, stragglers_table

_MOST_CELLS = 1024
"""Ranks up to which each has a cell of its own."""


class Cell(NamedTuple):
    """A rank, the tone of its role, and what it does."""

    text: str
    tone: str
    title: str


def shown(diagnosis: Diagnosis, limit: int) -> dict[str, object]:
    """What the macro `diagnosis_sections` takes; of each list `limit` entries."""
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
        "following": following,
    }


def diagnosis_page(diagnosis: Diagnosis) -> str:
    """The whole diagnosis."""
    from crossrank.tools.output.page import render

    return render("diagnosis.html", shown=shown(diagnosis, limit=200))


def merge_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Neighbours of one role and title as one cell, where a job has more ranks than a page has room for."""
    merged: list[Cell] = []
    for cell in cells:
        last = merged[-1] if merged else None
        if len(cells) > _MOST_CELLS and last is not None and last[1:] == cell[1:]:
            merged[-1] = last._replace(text=f"{last.text.partition('-')[0]}-{cell.text}")
        else:
            merged.append(cell)
    return merged


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
