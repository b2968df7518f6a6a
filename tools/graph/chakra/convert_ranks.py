"""Converts all ranks of a recording, writes the group file, and compares what the ranks communicate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest

import msgspec

from crossrank.atomic_file import join, whole_file
from crossrank.errors import CrossrankError
from crossrank.recording import LINKED, file_name
from crossrank.tools.graph.chakra.chakra_graph import Options
from crossrank.tools.graph.chakra.convert import Converted, convert
from crossrank.tools.graph.chakra.group_numbers import merge
from crossrank.tools.graph.chakra.simulate import offsets
from crossrank.tools.graph.chakra.write import delay_start
from crossrank.tools.graph.linking import link
from crossrank.tools.graph.linking.linked_file import read_linked, write_linked
from crossrank.tools.graph.linking.window_files import RankInput
from crossrank.tools.graph.rank_output import RankOutput, writing
from crossrank.tools.parallel import Fleet, map_ranks

GROUPS = "comm_groups.json"


@dataclass(kw_only=True)
class ConvertedRank(RankOutput):
    """What converting one rank gave."""

    size: int = 0
    """Bytes of the output."""
    converted: Converted = field(default_factory=Converted)
    damage: list[str] = field(default_factory=list)
    host_rate: float = 0.0
    activity_rate: float = 0.0


def chakra_name(rank: int, window: int) -> str:
    """Name of a rank's file; ASTRA-sim appends `.RANK.et` to a prefix that the user gives.

    >>> chakra_name(3, 1), chakra_name(3, 2)
    ('chakra.3.et', 'chakra-w2.3.et')
    """
    return f"chakra.{rank}.et" if window == 1 else f"chakra-w{window}.{rank}.et"


def convert_ranks(
    inputs: Iterable[RankInput],
    folder: str,
    options: Options,
    fleet: Fleet,
    done: Callable[[], None],
    *,
    keep_linked: bool = False,
    keep_graph: bool = False,
) -> list[ConvertedRank]:
    """Convert every rank; one that fails has its error in its result, and the others are converted all the same."""
    return map_ranks(
        partial(_convert_one, folder=folder, options=options, keep_linked=keep_linked, keep_graph=keep_graph),
        inputs,
        fleet,
        failed=lambda given, error: ConvertedRank(rank=given.rank, window=given.window, error=str(error)),
        done=done,
    )


def _convert_one(given: RankInput, folder: str, options: Options, keep_linked: bool, keep_graph: bool) -> ConvertedRank:
    if given.linked is not None:
        trace = read_linked(given.linked)
    else:
        trace = link(given.et, given.kineto, given.comms, rank=given.rank)
    rank = trace.rank if trace.rank is not None else 0
    if given.rank is not None and given.rank != rank:
        raise CrossrankError(f"{given.linked or given.et}: is of rank {rank} by its content; name it rank-{rank}.…")
    path = join(folder, chakra_name(rank, given.window))
    with writing(path):
        if keep_linked:
            write_linked(trace, join(folder, file_name(LINKED, rank, given.window)))
        converted = convert(trace, path, options, keep_graph=keep_graph)
    return ConvertedRank(
        rank=rank,
        window=given.window,
        output=path,
        size=converted.size,
        converted=converted,
        damage=trace.report.damage + trace.report.doubts,
        host_rate=trace.report.host_rate,
        activity_rate=trace.report.activity_rate,
    )


def write_groups(results: Sequence[ConvertedRank], folder: str) -> str:
    """Write `comm_groups.json` of all ranks that were converted: `{"1": [0, 1], …}`, without the world."""
    groups = merge(result.converted.groups for result in results)
    path = join(folder, GROUPS)
    with writing(path), whole_file(path) as temporary:
        temporary.write_bytes(msgspec.json.encode(groups) + b"\n")
    return path


def delay_starts(results: Sequence[ConvertedRank]) -> list[int]:
    """Let every rank begin when it began by its clock. Returns the windows whose ranks all begin together, because
    their clocks are further apart than the window is long."""
    apart = []
    for window in sorted({result.window for result in results}):
        ranks = [result for result in results if result.window == window]
        late, by_clocks = offsets([(rank.converted.begin_ns, rank.converted.length_ns) for rank in ranks])
        if not by_clocks:
            apart.append(window)
        for rank, late_ns in zip(ranks, late, strict=True):
            assert rank.output is not None
            with writing(rank.output):
                delay_start(rank.output, late_ns)
    return apart


def disagreements(results: Sequence[ConvertedRank]) -> list[str]:
    """Groups whose members made different sequences of collectives: group, rank, place and what differs."""
    sequences: dict[tuple[int, str], dict[int, list[str]]] = defaultdict(dict)
    members = {group.number: group.ranks for result in results for group in result.converted.groups}
    for result in results:
        for number, ranks in members.items():
            if result.rank in ranks:
                sequences[result.window, number][result.rank] = result.converted.collectives.get(number, [])
    found = []
    for (_, number), by_rank in sorted(sequences.items()):
        reference = min(by_rank)
        for rank, calls in sorted(by_rank.items()):
            pairs = enumerate(zip_longest(calls, by_rank[reference], fillvalue="nothing"), start=1)
            found += [
                f"group {number}: collective {place} is {ours} on rank {rank} and {theirs} on rank {reference}"
                for place, (ours, theirs) in pairs
                if ours != theirs
            ][:1]
    return found
