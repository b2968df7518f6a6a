"""Reads the linked trace of a window, if it is of the traces next to it."""

from __future__ import annotations

from crossrank.tools.graph.linking.link import content_hash, link
from crossrank.tools.graph.linking.linked_file import read_linked
from crossrank.tools.graph.linking.linked_trace import LinkedTrace
from crossrank.tools.graph.linking.window_files import RankInput


def read_current(given: RankInput) -> LinkedTrace:
    """Return the linked trace of a window. Its traces are linked in memory if it has none, or if its linked trace is of
    others: a new run may have written them next to the linked trace of an earlier one.

    Raises `CrossrankError` if its files cannot be used."""
    linked = None if given.linked is None else read_linked(given.linked)
    if linked is not None and (not given.et or _is_of(linked, given)):
        return linked
    made = link(given.et, given.kineto, given.comms, rank=given.rank)
    if linked is not None:
        made.report.doubts.append(
            f"{given.linked}: is left out, because it is of other traces than those next to it; run `crossrank link` "
            "again"
        )
    return made


def _is_of(linked: LinkedTrace, given: RankInput) -> bool:
    return {content_hash(given.et), content_hash(given.kineto)} <= {*linked.inputs.values()}
