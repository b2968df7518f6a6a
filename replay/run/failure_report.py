"""Reports where every rank of a replay is if one dies, fails or hangs."""

from __future__ import annotations

import re

from crossrank.replay.plan.plan import Plan, number_of
from crossrank.replay.run.messages import State
from crossrank.text import rank_ranges
from crossrank.tools.analysis.diagnosis.findings import call_text
from crossrank.tools.output.console import print_table

ENDED = ("killed", "exited", "lost contact", "made no progress")
"""Errors that begin so have no other rank as their cause."""
_MAX_LENGTH = 110


def short(error: str) -> str:
    """Shorten an error to part of a line: cut file names and frames of the backend.

    >>> short("RuntimeError: [/src/pair.cc:537] Read error [127.0.0.1]:5: Connection reset by peer. More")
    'RuntimeError: Read error [127.0.0.1]:5: Connection reset by peer'
    """
    text = re.sub(r"\[/\S+\] ", "", error).split(". ")[0]
    return text if len(text) <= _MAX_LENGTH else text[:_MAX_LENGTH] + "…"


class Failed(Exception):
    """A rank died, failed or hung. The replay has no result."""

    def __init__(self, states: dict[int, State]) -> None:
        super().__init__("the replay did not finish")
        self.states = states

    def summary(self) -> str:
        """Return which ranks ended it, and how."""
        causes: dict[str, list[int]] = {}
        for rank, state in self.states.items():
            if state.error:
                causes.setdefault(short(state.error), []).append(rank)
        first = {error: ranks for error, ranks in causes.items() if error.startswith(ENDED)}
        texts = [f"rank {rank_ranges(ranks)} {error}" for error, ranks in (first or causes).items()]
        if first and len(causes) > len(first):
            others = [rank for error, ranks in causes.items() if error not in first for rank in ranks]
            texts.append(f"rank {rank_ranges(others)} lost the others")
        return "; ".join(texts[:4]) or "no rank reported a reason"


def print_states(states: dict[int, State], plan: Plan) -> None:
    """Print one line per rank: its phase, its call, and what ended it."""
    rows = []
    for rank in plan.ranks:
        state = states.get(rank.rank, State(phase="never seen"))
        where = "between calls"
        if 0 <= state.call < len(rank.calls):
            record = rank.calls[state.call].record
            peer = f" with rank {record.peer}" if record.peer is not None else ""
            what = call_text(record.op + peer, number_of(record))
            where = f"call {state.call} of {len(rank.calls)}: {what} on {record.pg} (id {record.id})"
        rows.append((rank.rank, state.phase, where, short(state.error) or "was waiting for other ranks"))
    title = "Last reported position of each rank (reported twice a second)"
    print_table(title, ("#rank", "doing", "call", "what ended it"), rows)
