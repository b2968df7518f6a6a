"""Converts all ranks of a recording, writes the group file, and compares the communication of the ranks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path

import msgspec

from crossrank.atomic_file import join, whole_file
from crossrank.errors import CrossrankError
from crossrank.recording import LINKED, file_name, is_url
from crossrank.text import rank_ranges
from crossrank.tools.graph.chakra.chakra_graph import Comm, Options, merge
from crossrank.tools.graph.chakra.convert import Converted, convert
from crossrank.tools.graph.chakra.grow import CopiesOf, JobGrowth, plan_growth, used_groups
from crossrank.tools.graph.chakra.mesh import find_mesh
from crossrank.tools.graph.chakra.simulate import offsets
from crossrank.tools.graph.chakra.write import chakra_name, delay_start
from crossrank.tools.graph.linking.current import read_current
from crossrank.tools.graph.linking.linked_file import write_linked
from crossrank.tools.graph.linking.window_files import RankInput, RankOutput, writing
from crossrank.tools.parallel import Fleet, map_ranks

GROUPS = "comm_groups.json"
_NAME = re.compile(r"chakra(?:-w\d+)?\.(\d+)\.et")


@dataclass(kw_only=True)
class ConvertedRank(RankOutput):
    """The result of converting one rank."""

    size: int = 0
    """Bytes of the output."""
    converted: Converted = field(default_factory=Converted)
    damage: list[str] = field(default_factory=list)
    host_rate: float = 0.0
    activity_rate: float = 0.0


@dataclass(kw_only=True)
class Grown:
    """A recorded job that is written for another number of ranks."""

    growth: JobGrowth
    recorded: list[ConvertedRank]
    """The converted ranks of the recorded job, in the order of the inputs."""

    def __str__(self) -> str:
        recorded, written = self.growth.recorded, self.growth.written
        had, has = (mesh.dimensions[self.growth.place] for mesh in (recorded, written))
        change = f"{had.name} from {had.size:,} to {has.size:,}"
        return f"{recorded.size} ranks ({recorded}) as {written.size} ({written}): {change}"


def convert_ranks(
    inputs: Iterable[RankInput],
    folder: str | None,
    options: Options,
    fleet: Fleet,
    *,
    keep_linked: bool = False,
    keep_graph: bool = False,
    grown: Grown | None = None,
    dedupe: bool = False,
) -> list[ConvertedRank]:
    """Convert every rank and write the group file into `folder`, or write nothing if that is None.

    The result of a rank that fails has its error; the other ranks are converted all the same. With `grown`, write the
    ranks of that job instead of the recorded ones. If ranks contribute different amounts to an all_to_all, the lowered
    files are written a second time, with messages. This is only known once all ranks are converted."""
    given = list(inputs)
    copies: dict[tuple[int | None, int], CopiesOf] = {}
    if grown is not None:
        growth = grown.growth
        kept = [(pair, one) for pair, one in zip(given, grown.recorded, strict=True) if one.rank in growth.copies]
        given = [replace(pair, rank=one.rank) for pair, one in kept]
        late, _ = late_starts([one for _, one in kept])
        copies = {
            key: CopiesOf(growth=growth, folder=folder, window=key[1], late_ns=late_ns, dedupe=dedupe)
            for key, late_ns in late.items()
        }

    def convert_all(options: Options, keep_linked: bool) -> list[ConvertedRank]:
        return map_ranks(
            partial(
                _convert_rank,
                folder=folder,
                options=options,
                keep_linked=keep_linked,
                keep_graph=keep_graph,
                copies=copies,
            ),
            given,
            fleet,
            failed=lambda given, error: ConvertedRank(rank=given.rank, window=given.window, error=str(error)),
            what="reading" if folder is None else "converting",
        )

    results = convert_all(options, keep_linked)
    if options.lower and folder is not None and not copies and _have_different_amounts(results):
        results = convert_all(replace(options, messages=True), False)
    good = [result for result in results if result.error is None]
    if folder is not None and good:
        _write_groups(good, folder)
        if grown is None:
            _delay_starts(good)
    return results


def _have_different_amounts(results: Iterable[ConvertedRank]) -> bool:
    """Return whether the ranks of a group contribute different amounts to one of its all_to_alls."""
    amounts: dict[tuple[int, str], set[tuple[int, ...]]] = defaultdict(set)
    for result in results:
        of_groups: dict[str, list[int]] = defaultdict(list)
        for comm in result.converted.communications:
            if comm.record.op == "all_to_all":
                of_groups[comm.group.number].append(comm.record.bytes)
        for number, sizes in of_groups.items():
            amounts[result.window, number].add(tuple(sizes))
    return any(len(different) > 1 for different in amounts.values())


def _convert_rank(
    given: RankInput,
    folder: str | None,
    options: Options,
    keep_linked: bool,
    keep_graph: bool,
    copies: Mapping[tuple[int | None, int], CopiesOf],
) -> ConvertedRank:
    trace = read_current(given)
    rank = trace.rank if trace.rank is not None else 0
    if given.rank is not None and given.rank != rank:
        raise CrossrankError(
            f"{given.linked or given.et}: is of rank {rank} by its content; rename it to rank-{rank}.…"
        )
    path = None if folder is None else join(folder, chakra_name(rank, given.window))
    with writing(path or ""):
        if keep_linked and folder is not None:
            write_linked(trace, join(folder, file_name(LINKED, rank, given.window)))
        of_rank = copies.get((given.rank, given.window))
        converted = convert(trace, path, options, keep_graph=keep_graph, copies=of_rank)
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


def grow_ranks(recorded: Sequence[ConvertedRank], dims: Mapping[str, int] | None, ranks: int, name: str) -> JobGrowth:
    """Return how the job of the `recorded` ranks becomes a job of `ranks`, by growing the dimension `name`.

    Raise `CrossrankError` if ranks are missing, or if it is unknown what a new rank does."""
    ranks_of_groups = [rank for one in recorded for group in one.converted.groups for rank in group.ranks]
    sizes = [one.converted.world_size or 0 for one in recorded]
    world = max(1, *sizes, *(1 + rank for rank in (*ranks_of_groups, *(one.rank or 0 for one in recorded))))
    for window in sorted({one.window for one in recorded}):
        present = {one.rank for one in recorded if one.window == window}
        if missing := sorted(set(range(world)) - present):
            where = "" if window == 1 else f" in window {window}"
            raise CrossrankError(
                f"rank {rank_ranges(missing)} of {world} is missing{where}, and new ranks copy recorded ranks; "
                "give the traces of all"
            )
    calls: dict[int, list[Comm]] = defaultdict(list)
    for one in recorded:
        calls[one.rank or 0] += one.converted.communications
    used = used_groups({rank: [(comm.record, comm.group) for comm in found] for rank, found in calls.items()})
    return plan_growth(find_mesh(world, used, dims), used, ranks, name)


def _write_groups(results: Sequence[ConvertedRank], folder: str) -> None:
    """Write `comm_groups.json` of all converted ranks: `{"1": [0, 1], …}`, without the world."""
    groups = merge(result.converted.groups for result in results)
    path = join(folder, GROUPS)
    with writing(path), whole_file(path) as temporary:
        temporary.write_bytes(msgspec.json.encode(groups) + b"\n")


def late_starts(results: Sequence[ConvertedRank]) -> tuple[dict[tuple[int | None, int], int], list[int]]:
    """Return (rank and window -> delay of its start in ns, windows whose ranks start together for lack of clocks)."""
    late: dict[tuple[int | None, int], int] = {}
    windows_without_clocks = []
    for window in sorted({result.window for result in results}):
        ranks = [result for result in results if result.window == window]
        starts, by_clocks = offsets([(rank.converted.begin_ns, rank.converted.length_ns) for rank in ranks])
        if not by_clocks:
            windows_without_clocks.append(window)
        late.update(((rank.rank, window), late_ns) for rank, late_ns in zip(ranks, starts, strict=True))
    return late, windows_without_clocks


def older_files(folder: str, ranks: int) -> int:
    """Return the number of Chakra traces in a local folder of ranks that a job of `ranks` does not have."""
    names = [path.name for path in Path(folder).glob("chakra*.et")] if not is_url(folder) else []
    found = [match for name in names if (match := _NAME.fullmatch(name))]
    return sum(int(match[1]) >= ranks for match in found)


def _delay_starts(results: Sequence[ConvertedRank]) -> None:
    """Delay every rank to its start by its clock."""
    late, _ = late_starts(results)
    for result in results:
        if result.output is not None:
            with writing(result.output):
                delay_start(result.output, late[result.rank, result.window])


def disagreements(results: Sequence[ConvertedRank]) -> list[str]:
    """Return groups whose members made different sequences of collectives: group, rank, position and difference."""
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
