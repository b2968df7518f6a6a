"""A diagnosis as one HTML page that works from disk: the template `page.html` beside this module, filled in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2

from crossrank.text import printable, rank_ranges
from crossrank.tools.analysis.diagnosis.explain import next_step, number_text
from crossrank.tools.analysis.diagnosis.findings import KINDS, LACKS_EVIDENCE, Diagnosis, Finding, group_text

_TEMPLATE = Path(__file__).with_name("page.html")
_MOST_ROWS = 200


def page(diagnosis: Diagnosis) -> str:
    """The whole page."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters.update(ranks=_ranks, group=_group, call=_call, next_step=next_step, safe_text=printable)
    template = environment.from_string(_TEMPLATE.read_text())
    return template.render(diagnosis=diagnosis, kinds=KINDS, cells=_cells(diagnosis), limit=_MOST_ROWS) + "\n"


def _group(pg: Sequence[str]) -> str:
    return printable(group_text(pg))


def _ranks(ranks: Sequence[int]) -> str:
    return rank_ranges(ranks) or "?"


def _call(finding: Finding) -> str:
    return printable(f"{finding.op} {number_text(finding)}".strip()) or "no call in particular"


def _cells(diagnosis: Diagnosis) -> list[tuple[int, str, str]]:
    """(rank, class, title) for every rank of the job."""
    lacking = {rank for one in diagnosis.findings if one.kind in LACKS_EVIDENCE for rank in one.culprit_ranks}
    waiting: dict[int, str] = {}
    for one in [*diagnosis.findings, *diagnosis.consequences]:
        for rank in one.waiting_ranks:
            waiting.setdefault(rank, f"waits in {_call(one)} of {group_text(one.pg)}")
    suspects = set(diagnosis.suspect_ranks)
    known = {*diagnosis.ranks, *suspects, *waiting}
    cells = []
    for rank in sorted(known | set(range(diagnosis.world_size))):
        if rank in lacking:
            cells.append((rank, "is-none", f"rank {rank}: no usable dump"))
        elif rank in suspects:
            cells.append((rank, "is-culprit", f"rank {rank}: culprit"))
        elif rank in waiting:
            cells.append((rank, "is-waiting", f"rank {rank} {waiting[rank]}"))
        else:
            cells.append((rank, "", f"rank {rank}"))
    return cells
