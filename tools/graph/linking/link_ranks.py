"""Links all ranks of a recording and compares them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from crossrank.atomic_file import join
from crossrank.comm import is_p2p
from crossrank.recording import LINKED, file_name
from crossrank.tools.graph.linking.link import link
from crossrank.tools.graph.linking.linked_file import Compression, write_linked
from crossrank.tools.graph.linking.linked_trace import LinkedTrace, MatchReport
from crossrank.tools.graph.linking.window_files import RankInput, RankOutput, writing
from crossrank.tools.parallel import Fleet, map_ranks
from crossrank.tools.traces.param_comms import named_by_address

EXTENSIONS: dict[Compression, str] = {"zst": ".zst", "gz": ".gz", "none": ""}
GroupKey = tuple[str, tuple[int, ...]]
"""What makes groups of two ranks the same: their name, unless that is an address, and their members."""


@dataclass(kw_only=True)
class LinkedRank(RankOutput):
    """What linking one rank and window gave."""

    nodes: int = 0
    report: MatchReport = field(default_factory=MatchReport)
    collectives: Counter[GroupKey] = field(default_factory=Counter)
    p2p: Counter[GroupKey] = field(default_factory=Counter)


@dataclass(frozen=True, kw_only=True)
class GroupRow:
    """One process group over all ranks that were linked."""

    pg: str
    ranks: tuple[int, ...]
    window: int
    collectives: dict[int, int]
    """Rank -> collectives in this window."""
    p2p: int
    """Sends and receives of all ranks."""

    @property
    def disagrees(self) -> bool:
        return len(set(self.collectives.values())) > 1


def link_ranks(inputs: Iterable[RankInput], folder: str, compression: Compression, fleet: Fleet) -> list[LinkedRank]:
    """Link every rank; one that fails has its error in its result, and the others are linked all the same."""
    link_one = partial(_link_one, folder=folder, compression=compression)
    return map_ranks(
        link_one,
        inputs,
        fleet,
        failed=lambda given, error: LinkedRank(rank=given.rank, window=given.window, error=str(error)),
        what="linking",
    )


def _link_one(given: RankInput, folder: str, compression: Compression) -> LinkedRank:
    trace = link(given.et, given.kineto, given.comms, rank=given.rank)
    if given.rank is not None and trace.kineto_rank not in (None, given.rank):
        trace.report.doubts.append(f"rank {given.rank} by its name, {trace.kineto_rank} by what the Kineto trace says")
    name = file_name(LINKED, trace.rank or 0, given.window).removesuffix(".zst") + EXTENSIONS[compression]
    path = join(folder, name)
    with writing(path):
        write_linked(trace, path, compression)
    return LinkedRank(
        rank=trace.rank,
        window=given.window,
        output=path,
        nodes=len(trace.host) + len(trace.activities),
        report=trace.report,
        collectives=_calls_by_group(trace, p2p=False),
        p2p=_calls_by_group(trace, p2p=True),
    )


def _calls_by_group(trace: LinkedTrace, *, p2p: bool) -> Counter[GroupKey]:
    return Counter(
        ("" if named_by_address(c.record.pg) else c.record.pg, tuple(c.group.ranks or ()) if c.group else ())
        for c in trace.communications
        if is_p2p(c.record) == p2p
    )


def compare_groups(results: Sequence[LinkedRank]) -> list[GroupRow]:
    """How many collectives every rank made on every group it belongs to."""
    users: dict[tuple[int, GroupKey], set[int]] = defaultdict(set)
    linked = {(result.rank, result.window): result for result in results if result.error is None}
    for (rank, window), result in linked.items():
        for key in {*result.collectives, *result.p2p}:
            if rank is not None:
                users[window, key].add(rank)
    rows = []
    for (window, key), seen in sorted(users.items()):
        pg, ranks = key
        members = {rank: linked[rank, window] for rank in ranks or sorted(seen) if (rank, window) in linked}
        rows.append(
            GroupRow(
                pg=pg,
                ranks=ranks,
                window=window,
                collectives={rank: result.collectives[key] for rank, result in members.items()},
                p2p=sum(result.p2p[key] for result in members.values()),
            )
        )
    return rows
