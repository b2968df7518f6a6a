"""The inputs of `convert` and `simulate`, and the options for another number of ranks."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from crossrank.errors import CrossrankError
from crossrank.recording import LINKED, is_folder
from crossrank.text import plural
from crossrank.tools.commands.options import complain
from crossrank.tools.graph.chakra.chakra_graph import Options
from crossrank.tools.graph.chakra.convert_ranks import ConvertedRank, Grown, convert_ranks, grow_ranks
from crossrank.tools.graph.chakra.mesh import KINDS
from crossrank.tools.graph.linking.window_files import Inputs, RankInput, find_inputs
from crossrank.tools.job.one_run import RankFacts, several_runs, span_of
from crossrank.tools.output.console import print_fact
from crossrank.tools.parallel import Fleet
from crossrank.tools.traces.discover import discover


def _count(text: str) -> int:
    if not (text.isdecimal() and len(text) < 8):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks")
    return int(text)


def _dimensions(text: str) -> dict[str, int]:
    """
    >>> _dimensions("dp=8,tp=4")
    {'dp': 8, 'tp': 4}
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([a-z]\w*)=(\d{1,7})\s*", part)
        if match is None or not int(match[2]) or match[1] in found:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of dimensions; write it as dp=8,tp=4")
        found[match[1]] = int(match[2])
    return found


def add_growing(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("for another number of ranks").add_argument
    add("--grow-to", type=_count, metavar="N", help="number of ranks of the larger or smaller job")
    meaning = "the dimension that changes its size (default dp: data parallelism)"
    add("--grow", metavar="DIMENSION", help=meaning)
    meaning = (
        f"dimensions of the recorded job, outermost first, such as dp=8,tp=4: {', '.join(KINDS)} (default: detected)"
    )
    add("--dims", type=_dimensions, metavar="LIST", help=meaning)


def find_traces(arguments: argparse.Namespace) -> Inputs:
    """Return the pairs of traces, or the linked traces, that the user names."""
    paths: list[str] = arguments.recording
    ranks: set[int] | None = arguments.ranks
    if linked := _linked(paths):
        inputs = Inputs(pairs=[pair for pair in linked if ranks is None or pair.rank in ranks], problems=[])
        if not inputs.pairs:
            raise CrossrankError(f"none of the {len(paths)} linked traces is of a rank in --ranks")
    elif len(paths) > 2:
        raise CrossrankError(f"{len(paths)} paths given; give one folder, the two files of one rank, or linked traces")
    else:
        inputs = find_inputs(paths, ranks)
    seen: dict[tuple[int | None, int], RankInput] = {}
    for pair in inputs.pairs:
        # Two inputs of one rank would write one file.
        other = seen.setdefault((pair.rank, pair.window), pair)
        if other is not pair:
            raise CrossrankError(
                f"{other.linked or other.et} and {pair.linked or pair.et} are both of rank {pair.rank}; "
                "give one of them"
            )
    return inputs


def _linked(paths: Sequence[str]) -> list[RankInput]:
    """Return the linked traces; empty if a path is a folder or another kind of file."""
    if any(is_folder(path) for path in paths):
        return []
    files = discover(paths)
    if any(file.kind != LINKED for file in files):
        return []
    for file in files:
        if file.rank is None:
            raise CrossrankError(f"{file.path}: has no rank in its name; rename it to rank-N.linked.json, .gz or .zst")
    return [RankInput(rank=file.rank, window=file.window, et="", kineto="", linked=file.path) for file in files]


def mixed_runs(results: Sequence[ConvertedRank]) -> list[str]:
    """Return the reasons why the converted ranks of a window cannot be from one run."""
    windows: dict[int, list[RankFacts]] = {}
    for one in results:
        begin_ns = one.converted.begin_ns
        span = span_of((begin_ns, begin_ns + one.converted.length_ns))
        windows.setdefault(one.window, []).append(RankFacts(one.name, one.converted.world_size, span))
    return [problem for ranks in windows.values() for problem in several_runs(ranks)]


def grow(inputs: Inputs, arguments: argparse.Namespace, options: Options, fleet: Fleet) -> Grown | None:
    """Return the job for the number of ranks in --grow-to; None without one.

    Raises `CrossrankError` if a rank cannot be read, or the work of a new rank is unknown."""
    if arguments.grow_to is None:
        for name in ("dims", "grow"):
            if getattr(arguments, name) is not None:
                raise CrossrankError(f"--{name} needs --grow-to N")
        return None
    if arguments.ranks is not None:
        raise CrossrankError("--grow-to copies the work of all recorded ranks; remove --ranks")
    recorded = convert_ranks(inputs.pairs, None, options, fleet)
    for one in recorded:
        if one.error is not None:
            raise CrossrankError(
                f"{one.name}: {one.error}; new ranks copy recorded ranks, so every rank must be readable"
            )
    growth = grow_ranks(recorded, arguments.dims, arguments.grow_to, arguments.grow or "dp")
    return Grown(growth=growth, recorded=recorded)


def growth_json(grown: Grown | None) -> dict[str, object] | None:
    if grown is None:
        return None
    growth = grown.growth
    return {
        "recorded": {one.name: {"size": one.size, "because": one.because} for one in growth.recorded.dimensions},
        "written": {one.name: one.size for one in growth.written.dimensions},
        "sizes": growth.rules(one.converted.communications for one in grown.recorded),
    }


def print_growth(grown: Grown) -> None:
    growth = grown.growth
    print()
    print_fact("ranks", str(grown))
    for one in growth.recorded.dimensions:
        what = KINDS.get(one.kind, "purpose unknown")
        print_fact("", f"{one.name:<12} {one.size:>6}  {what}; {one.because}")
    for text, count in growth.rules(one.converted.communications for one in grown.recorded).items():
        print_fact("", f"{plural(count, 'call')} {text}")


def complain_of_ranks(results: Sequence[ConvertedRank], least: float) -> bool:
    """Return whether every rank was converted completely and matched well enough, and report those that were not."""
    said_of: dict[str, list[str]] = {}
    for result in results:
        for text in filter(None, (result.error, *result.damage, *result.converted.warnings)):
            said_of.setdefault(text, []).append(result.name)
    complain(*(f"{', '.join(names[:4])}{', …' if len(names) > 4 else ''}: {text}" for text, names in said_of.items()))
    poor = [r for r in results if r.error is None and min(r.host_rate, r.activity_rate) < least]
    complain(*(f"{r.name}: matched less than --min-match; `crossrank link` shows what and why" for r in poor))
    return not poor and not any(result.error is not None or result.damage for result in results)
