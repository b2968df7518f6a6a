"""`crossrank probe`, and `python -m crossrank probe` under a launcher: finds the slow rank, host or link."""

from __future__ import annotations

import argparse
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from crossrank.atomic_file import whole_file
from crossrank.machine import network_cards
from crossrank.replay import replay_options
from crossrank.replay.command import make_folders, on_ranks, read_plan, resized, run_plan, settings_of
from crossrank.replay.plan.probe import Machine, make_probe
from crossrank.replay.results.replay_report import indented
from crossrank.replay.run.failure_report import Failed
from crossrank.text import amount, plural

if TYPE_CHECKING:
    from crossrank.replay.run.processes import Lead

RESULT = "probe.json"


class ProbeCommand:
    """Find the slow rank, host or link. Measures two message sizes of a recording on small groups of ranks, many at the
    same time. Starts one process per rank on this machine, or runs under torchrun, srun or mpirun:
    `torchrun … -m crossrank probe TRACE`. Exit code 1: a rank, host or link takes --tolerance times as long as
    similar ones, or a rank failed."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        replay_options.add_arguments(parser, replay_options.PROBE)

    def run(self, arguments: argparse.Namespace) -> int:
        replay_options.check(arguments)
        return on_ranks(arguments, [], lambda lead: _probe(arguments, lead))


def _probe(given: argparse.Namespace, lead: Lead | None) -> int:
    from crossrank.replay.results.probe_report import judge, print_probe

    recorded = read_plan(given)
    if given.backend is not None:
        from crossrank.replay.run.worker import check_backend_name

        check_backend_name(given.backend)
    if lead is not None:
        machines = lead.machines()
    else:
        machines = [Machine(socket.gethostname(), network_cards())] * (given.nproc or recorded.world_size)
    probe = make_probe(resized(recorded, given), given.groups, machines)
    if given.dry_run:
        facts = {"groups": len(probe.groups), "rounds": probe.rounds, "sizes": probe.sizes}
        sizes = " and ".join(map(amount, probe.sizes))
        text = f"{plural(len(probe.groups), 'group')} in {plural(probe.rounds, 'round')} for each size: {sizes}\n"
        sys.stdout.write(indented(facts).decode() if given.json else text)
        return 0
    settings = settings_of(probe.plan, given, lead)
    make_folders(given, given.output)
    try:
        results = run_plan(probe.plan, settings, {}, lead)
    except Failed:
        if lead is not None:
            from crossrank.replay.run.worker import leave

            leave(1)
        return 1
    report = judge(probe, results, machines, settings.backend, given.tolerance)
    if given.json:
        sys.stdout.write(indented(report).decode())
    else:
        print_probe(report)
    if given.output is not None:
        path = Path(given.output, RESULT)
        with whole_file(path) as temporary:
            temporary.write_bytes(indented(report))
        print(f"wrote {path}", file=sys.stderr if given.json else sys.stdout)
    if lead is not None:
        lead.end()
    return int(bool(report.slow_ranks or report.links))
