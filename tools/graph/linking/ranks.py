"""Links all ranks of a recording and compares them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from crossrank.atomic_file import join
from crossrank.comm import is_p2p
from crossrank.errors import CrossrankError
from crossrank.recording import LINKED, file_name
from crossrank.tools.graph.linking.communications import named_by_address
from crossrank.tools.graph.linking.graph import LinkedTrace, MatchReport
from crossrank.tools.graph.linking.inputs import RankInput
from crossrank.tools.graph.linking.link import link
from crossrank.tools.graph.linking.linked_file import Compression, write_linked
from crossrank.tools.graph.rank_output import RankOutput, writing
from crossrank.tools.parallel import Fleet, map_ranks

EXTENSIONS: dict[Compression, str] = {"zst": ".zst", "gz": ".gz", "none": ""}


@dataclass(frozen=True, kw_only=True)
class Task:
    """One rank and window to link."""

    input: RankInput
    folder: str
    compression: Compression


@dataclass(frozen=True)
class GroupKey:
    """What makes groups of two ranks the same: their members, and their name unless that is an address."""

    pg: str
    ranks: tuple[int, ...]


@dataclass(kw_only=True)
class RankResult(RankOutput):
    """What linking one rank and window gave."""

    nodes: int = 0
    report: MatchReport = field(default_factory=MatchReport)
    collectives: dict[GroupKey, int] = field(default_factory=dict)
    p2p: dict[GroupKey, int] = field(default_factory=dict)


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


def link_ranks(tasks: Iterable[Task], fleet: Fleet, done: Callable[[], None]) -> list[RankResult]:
    """Link every rank; one that fails has its error in its result, and the others are linked all the same."""
    return map_ranks(_link_one, tasks, fleet, failed=_failed, done=done)


def _failed(task: Task, error: CrossrankError) -> RankResult:
    return RankResult(rank=task.input.rank, window=task.input.window, error=str(error))


def _link_one(task: Task) -> RankResult:
    given = task.input
    trace = link(given.et, given.kineto, given.comms, rank=given.rank)
    if given.rank is not None and trace.kineto_rank not in (None, given.rank):
        trace.report.doubts.append(f"rank {given.rank} by its name, {trace.kineto_rank} by what the Kineto trace says")
    rank = trace.rank if given.rank is None else given.rank
    name = file_name(LINKED, rank or 0, given.window).removesuffix(".zst") + EXTENSIONS[task.compression]
    path = join(task.folder, name)
    with writing(path):
        write_linked(trace, path, task.compression)
    result = RankResult(
        rank=rank,
        window=given.window,
        output=path,
        nodes=len(trace.host) + len(trace.activities),
        report=trace.report,
    )
    _count_groups(trace, result)
    return result


def _count_groups(trace: LinkedTrace, result: RankResult) -> None:
    for communication in trace.communications:
        record, group = communication.record, communication.group
        ranks = tuple(group.ranks) if group and group.ranks else ()
        key = GroupKey("" if named_by_address(record.pg) else record.pg, ranks)
        counts = result.p2p if is_p2p(record) else result.collectives
        counts[key] = counts.get(key, 0) + 1


def compare_groups(results: Sequence[RankResult]) -> list[GroupRow]:
    """How many collectives every rank made on every group it belongs to."""
    keys: dict[tuple[int, GroupKey], set[int]] = defaultdict(set)
    linked = {(result.rank, result.window): result for result in results if result.error is None}
    for (rank, window), result in linked.items():
        for key in {*result.collectives, *result.p2p}:
            if rank is not None:
                keys[window, key].add(rank)
    rows = []
    for (window, key), seen in sorted(keys.items(), key=lambda item: (item[0][0], item[0][1].pg, item[0][1].ranks)):
        members = key.ranks or tuple(sorted(seen))
        present = [rank for rank in members if (rank, window) in linked]
        rows.append(
            GroupRow(
                pg=key.pg,
                ranks=key.ranks,
                window=window,
                collectives={rank: linked[rank, window].collectives.get(key, 0) for rank in present},
                p2p=sum(linked[rank, window].p2p.get(key, 0) for rank in present),
            )
        )
    return rows
