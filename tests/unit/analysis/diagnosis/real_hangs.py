"""Dumps of jobs that really hung, in every form in which the same evidence could have reached the tool.

A folder holds a dump per rank and `expected.json` with `suspect_ranks`.
"""

from __future__ import annotations

import json
import pickle
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from crossrank.tools.analysis.diagnosis.findings import LACKS_EVIDENCE, Diagnosis
from tests.unit.analysis.diagnosis.simulated_jobs import as_json

Dumps = dict[int, dict[str, Any]]
"""Rank -> its dump, as unpickling it gives it."""

_PEERS = re.compile(r"(?P<way>(?:send|recv)) (?P<one>\d+)(?P<arrow>->|<-)(?P<other>\d+)")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One form of the evidence of a hang."""

    name: str
    dumps: Dumps
    faulty: frozenset[int]
    """Ranks that must be named."""
    missing: frozenset[int] = frozenset()
    """Ranks whose dump is not there: they may be named as that and as nothing else."""
    file_name: Callable[[int], str] = field(default="_dump_{}".format)
    encode: Callable[[dict[str, Any]], bytes] = field(default=partial(pickle.dumps, protocol=2))

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for rank, dump in self.dumps.items():
            (folder / self.file_name(rank)).write_bytes(self.encode(dump))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was made of a variant."""

    verdict: str
    named: frozenset[int]
    """Ranks that are accused of something they did."""
    lacking: frozenset[int]
    """Ranks that are named for evidence that is not there."""
    suspects: frozenset[int]


def outcome(found: Diagnosis) -> Outcome:
    """Whom a diagnosis accuses."""
    ranks_of: dict[bool, set[int]] = {False: set(), True: set()}
    for finding in found.findings:
        ranks_of[finding.kind in LACKS_EVIDENCE].update(finding.culprit_ranks)
    return Outcome(
        verdict=found.verdict,
        named=frozenset(ranks_of[False]),
        lacking=frozenset(ranks_of[True]),
        suspects=frozenset(found.suspect_ranks),
    )


def read_hang(folder: Path) -> tuple[Dumps, frozenset[int]]:
    """(the dumps of a folder, its faulty ranks)"""
    dumps = {int(path.name.rpartition("_")[2]): pickle.loads(path.read_bytes()) for path in folder.glob("_dump_*")}
    return dumps, frozenset(json.loads((folder / "expected.json").read_text())["suspect_ranks"])


def variants(dumps: Dumps, faulty: frozenset[int]) -> Iterator[Variant]:
    """The same hang in every form."""
    yield Variant(name="as is", dumps=dumps, faulty=faulty)
    for rank in sorted(dumps):
        rest = {other: dump for other, dump in dumps.items() if other != rank}
        name = f"without the dump of rank {rank}"
        yield Variant(name=name, dumps=rest, faulty=faulty - {rank}, missing=frozenset({rank}))
    for seed in (1, 2, 3):
        ranks = sorted(dumps)
        new = dict(zip(ranks, random.Random(seed).sample(ranks, len(ranks)), strict=True))
        moved = {new[rank]: _renumbered(dump, new) for rank, dump in dumps.items()}
        yield Variant(name=f"ranks permuted ({seed})", dumps=moved, faulty=frozenset(new[rank] for rank in faulty))
    yield Variant(name="files renamed", dumps=dumps, faulty=faulty, file_name="trace.host7-rank{}.pkl".format)
    yield Variant(name="as JSON", dumps=dumps, faulty=faulty, file_name="trace_{}.json".format, encode=as_json)
    for per_node in (4, 8):
        for shift_s in (3, -3):
            shifted = {rank: _shifted(dump, rank // per_node * shift_s * 1_000_000_000) for rank, dump in dumps.items()}
            yield Variant(name=f"nodes of {per_node} {shift_s:+} s apart", dumps=shifted, faulty=faulty)
    without = {rank: dump | {"pg_status": {}} for rank, dump in dumps.items()}
    yield Variant(name="without pg_status", dumps=without, faulty=faulty)


def _renumbered(dump: dict[str, Any], new: dict[int, int]) -> dict[str, Any]:
    """The dump with every rank under its new number; a group's ranks rise, as torch keeps them."""
    members_of = {name: json.loads(config["ranks"]) for name, config in dump["pg_config"].items()}
    moved_of = {name: sorted(new[rank] for rank in ranks) for name, ranks in members_of.items()}

    def renamed(entry: dict[str, Any]) -> dict[str, Any]:
        name = entry["process_group"][0]

        def local(index: str) -> int:
            return moved_of[name].index(new[members_of[name][int(index)]])

        def peers(match: re.Match[str]) -> str:
            return f"{match['way']} {local(match['one'])}{match['arrow']}{local(match['other'])}"

        return entry | {"profiling_name": _PEERS.sub(peers, entry["profiling_name"])}

    configs = {name: config | {"ranks": str(moved_of[name])} for name, config in dump["pg_config"].items()}
    return dump | {"pg_config": configs, "entries": [renamed(entry) for entry in dump["entries"]]}


def _shifted(dump: dict[str, Any], by_ns: int) -> dict[str, Any]:
    """The dump of a rank whose clock is `by_ns` ahead."""
    times = ("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns")
    entries = [
        entry | {name: entry[name] + by_ns for name in times if entry.get(name)} for entry in dump.get("entries", [])
    ]
    return dump | {"entries": entries}
