"""`crossrank replay`, and `python -m crossrank.replay` under a launcher, with the same options and output."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from crossrank.atomic_file import make_folder
from crossrank.errors import CrossrankError
from crossrank.recording import COMMS, is_url
from crossrank.replay import replay_options, sweep
from crossrank.replay.plan import replay_inputs, transform
from crossrank.replay.plan.buckets import with_buckets
from crossrank.replay.plan.build_plan import build, settle
from crossrank.replay.plan.compute.compute_plan import coverage_of
from crossrank.replay.plan.plan import Plan, RankPlan, load_plan, save_plan
from crossrank.replay.plan.streams import describe_streams
from crossrank.replay.results.replay_report import (
    indented,
    make_report,
    plan_json,
    print_plan,
    rank_bytes,
    write_report,
)
from crossrank.replay.run.failure_report import Failed, print_states
from crossrank.replay.run.launcher import KEY, RankInfo, detect_launcher, parse_init_method
from crossrank.replay.run.messages import OwnOptions, RankResult
from crossrank.replay.run.pacing import parse_pace
from crossrank.replay.sweep import Combination
from crossrank.text import amount
from crossrank.tools.commands.options import complain, fleet_of
from crossrank.tools.traces.discover import PLAN, look
from crossrank.tools.traces.replayed import ReplayReport, Settings

if TYPE_CHECKING:
    from crossrank.replay.run.processes import Lead

_MAX_GAP_S = 86_400.0
_MAX_LOCAL_RANKS = 256
"""The most processes that one node starts; a launcher can start more."""


class ReplayCommand:
    """Replay and measure the communication of a recording, a trace or a plan with torch.distributed, without the model.
    Starts one process per rank on this machine, or runs under torchrun, srun or mpirun:
    `torchrun … -m crossrank.replay TRACE`. Exit code 1: a rank failed, a result is wrong, or a call was skipped
    and --strict is given."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        replay_options.add_arguments(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        replay_options.check(arguments)
        if arguments.compute or arguments.profile:  # the profiler would log on every rank
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        combinations = sweep.parse_sweeps(arguments.sweep) or [Combination({}, {})]
        return on_ranks(arguments, combinations, lambda lead: _run_combinations(arguments, combinations, lead))


def on_ranks(arguments: argparse.Namespace, combinations: list[Combination], work: Callable[[Lead | None], int]) -> int:
    """Run `work` on this node, or under a launcher on rank 0, which the other ranks serve. Return the exit code."""
    host, port, variables, file = parse_init_method(arguments.init_method)
    place = detect_launcher(
        {**os.environ, **variables}, arguments.master_ip or host, arguments.master_port or port, file
    )
    if place is None and (host or file):
        raise CrossrankError(
            f"--init-method {arguments.init_method}: rank and number of ranks are unknown; add "
            "?rank=R&world_size=N, or start it with torchrun, srun or mpirun"
        )
    if place is not None and place.world_size == 1:
        place = None
    if place is None or arguments.dry_run:
        return work(None) if place is None or place.rank == 0 else 0
    _check_launched(arguments, combinations, place)
    from crossrank.replay.run.processes import Lead, serve

    if place.rank > 0:
        return serve(place, arguments.timeout, OwnOptions.of(arguments))
    if not place.key:
        meeting = f"write {place.file}" if place.file else f"connect to {place.host}:{place.port}"
        complain(f"{KEY} is not set: other processes that can {meeting} can change this replay; set it on all ranks")
    lead = Lead(place, arguments.timeout)
    try:
        return work(lead)
    except CrossrankError as error:
        complain(str(error))  # before the others end: a launcher ends all ranks when one ends
        lead.refuse()
        return 2


def _check_launched(arguments: argparse.Namespace, combinations: list[Combination], place: RankInfo) -> None:
    if arguments.nproc is not None and arguments.nproc != place.world_size:
        raise CrossrankError(
            f"--nproc {arguments.nproc}, but {place.launcher} started {place.world_size} ranks; remove --nproc"
        )
    swept = {name for one in combinations for name in one.variables}
    if swept or any("nproc" in one.options for one in combinations):
        raise CrossrankError(
            f"--sweep {', '.join(sorted(swept or {'nproc'}))}: {place.launcher} set the variables and the number of "
            "ranks when it started the processes; start one replay per value"
        )


def _run_combinations(arguments: argparse.Namespace, combinations: list[Combination], lead: Lead | None) -> int:
    """Read the trace and replay every combination: all work except that of the other ranks under a launcher."""
    recorded = read_plan(arguments)
    swept = bool(arguments.sweep)
    saves_results = swept and arguments.output is not None
    digest = hashlib.sha256(msgspec.json.encode(recorded)).hexdigest() if saves_results else ""
    outcomes: list[tuple[Combination, ReplayReport | str]] = []
    codes = [0]
    for number, one in enumerate(combinations):
        given = sweep.with_values(arguments, one.options)
        given.save_plan = arguments.save_plan if number == 0 else None
        folder = Path(arguments.output, one.name) if saves_results else None
        stamp = sweep.stamp(given, one, digest)
        report: ReplayReport | str | None = sweep.finished(folder, stamp) if folder is not None else None
        if report is not None:
            print(f"{one.name}: skipped, because {folder} already has its result", file=sys.stderr)
        else:
            try:
                code, report = _replay_once(recorded, given, one.variables, folder, lead)
                if folder is not None and report is not None:
                    (folder / sweep.STAMP).write_text(stamp)
            except CrossrankError as error:
                if not swept or lead is not None:
                    raise
                complain(f"{one.name}: {error}")
                code, report = 2, str(error)
            except Failed as failed:
                if lead is not None:
                    from crossrank.replay.run.worker import leave

                    leave(1)
                code, report = 1, failed.summary()
            codes.append(code)
        if report is not None:
            outcomes.append((one, report))
    if lead is not None:
        lead.end()
    if outcomes and swept and arguments.json:
        sys.stdout.write(sweep.sweep_json(outcomes).decode())
    elif outcomes and swept:
        sweep.print_sweep(outcomes)
    return max(codes)


def _replay_once(
    recorded: Plan, given: argparse.Namespace, variables: dict[str, str], folder: Path | None, lead: Lead | None
) -> tuple[int, ReplayReport | None]:
    """Run, print and write one replay; return (exit code, report). A dry run has no report."""
    if given.backend is not None:
        from crossrank.replay.run.worker import check_backend_name

        check_backend_name(given.backend)
    plan = _change_plan(recorded, given, lead.place.world_size if lead is not None else None)
    if given.compute:
        from crossrank.replay.run.allowed_operations import leave_out_refused

        leave_out_refused(plan, given.imports)
    if given.save_plan is not None:
        save_plan(plan, given.save_plan)
    if given.dry_run:
        if given.json:
            sys.stdout.write(plan_json(plan).decode())
        else:
            print_plan(plan)
        whole = plan.coverage().complete and coverage_of(plan.recorded_computation()).complete
        return int(given.strict and not whole), None
    settings = settings_of(plan, given, lead)
    plan = transform.for_backend(plan, settings.backend)
    plan.notes += describe_streams(plan, settings.device)
    target = str(folder) if folder is not None else given.output
    make_folders(given, target)
    if given.compare_data is not None:
        from crossrank.replay.results.saved_data import check_saved

        check_saved(plan, given.compare_data)
    if not given.json:
        print_plan(plan)
    results = run_plan(plan, settings, variables, lead)
    report, times = make_report(plan, settings, results, what_if=_describe_changes(given), variables=variables)
    if given.json and not given.sweep:
        sys.stdout.write(indented(report).decode())
    elif not given.json:
        from crossrank.tools.output.replay import print_report

        print_report(report, given.by)
    if target is not None:
        paths = write_report(target, report, plan, times)
        print(f"wrote {', '.join(paths)}", file=sys.stderr if given.json else sys.stdout)
    wrong = bool(report.check is not None and report.check.failures)
    wrong |= report.data is not None and (report.data.different > 0 or not report.data.tensors)
    whole = report.coverage.complete and (report.step is None or report.step.coverage.complete)
    return int(wrong or (given.strict and not whole)), report


def settings_of(plan: Plan, given: argparse.Namespace, lead: Lead | None) -> Settings:
    from crossrank.replay.run.worker import check_backend

    backend, device = check_backend(given.backend, given.device, None if lead is not None else plan.world_size)
    if given.graph and (device, backend) != ("cuda", "nccl"):
        raise CrossrankError(f"--graph needs nccl on a GPU, and this replay uses {backend} on {device}; remove --graph")
    slack_ns = max(_longest_pause_ns(rank, parse_pace(given.pace).scale) for rank in plan.ranks)
    recorded = [rank.compute.threads for rank in plan.ranks if rank.compute is not None]
    values = {name: getattr(given, name) for name in Settings.__struct_fields__ if hasattr(given, name)}
    values |= {"backend": backend, "device": device, "imports": tuple(given.imports)}
    values |= {"threads": given.threads or max(recorded, default=1)}
    return Settings(**values, repeats=given.repeat, timeout_s=given.timeout, slack_s=slack_ns / 1e9)


def run_plan(plan: Plan, settings: Settings, variables: Mapping[str, str], lead: Lead | None) -> list[RankResult]:
    """Run `plan` on all ranks. Reports a `Failed` and raises it again."""
    try:
        return lead.run(plan, settings) if lead is not None else _run_here(plan, settings, variables)
    except Failed as failed:
        complain(f"{failed}: {failed.summary()}")
        print_states(failed.states, plan)
        raise


def _longest_pause_ns(rank: RankPlan, scale: float) -> float:
    """Return how long the other ranks may wait for the gaps and the computation of this rank."""
    if rank.compute is None:
        return sum(call.gap_ns for call in rank.calls) * scale
    return sum(one.gap_ns * scale + one.took_ns for one in rank.compute.operations)


def read_plan(arguments: argparse.Namespace) -> Plan:
    """Return the plan as recorded, without changes."""
    path: str = arguments.trace
    is_file = os.path.isfile(path)
    if is_file and look(path).kind == PLAN:
        for name in ("steps", "partial", "one_trace", "world_size", "trace_type", "window"):
            if getattr(arguments, name):
                option = f"--{name.replace('_', '-')}"
                raise CrossrankError(f"{option} applies to traces, and {path} is a plan; remove {option}")
        plan = load_plan(path)
        computes = any(rank.compute is not None for rank in plan.ranks)
        if computes != arguments.compute:
            step = "add --compute" if computes else "remove --compute, or save a plan of a window with it"
            raise CrossrankError(f"{path}: is a plan with{'' if computes else 'out'} computation; {step}")
        return plan
    if arguments.compute:
        return _read_with_computation(arguments)
    runs = not arguments.dry_run or bool(arguments.sweep) or arguments.save_plan is not None
    times = runs or bool(parse_pace(arguments.pace).scale)
    found = replay_inputs.find(path, arguments.trace_type, times=times)
    steps: tuple[int, int] | None = arguments.steps
    if steps is not None and found.kind != COMMS:
        raise CrossrankError(
            f"--steps applies to recordings, whose comms files have steps; {path} has "
            f"{replay_inputs.KINDS[found.kind]}; remove --steps"
        )
    size = sum(os.path.getsize(one.path) for one in found.inputs if os.path.exists(one.path))
    ranks = replay_inputs.read(found, fleet_of(arguments, size), steps=steps, one_trace=arguments.one_trace)
    plan = build(ranks, path, found.kind, **_reading_options(arguments))
    plan.notes += found.skipped
    return plan


def _reading_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options for reading all kinds of files."""
    return {name: getattr(arguments, name) for name in ("one_trace", "world_size", "partial")}


def _read_with_computation(arguments: argparse.Namespace) -> Plan:
    from crossrank.replay.plan.compute.windows import find_windows, read_windows

    found = find_windows(arguments.trace, arguments.window, one_trace=arguments.one_trace)
    paths = (path for one in found.inputs for path in (one.et, one.linked) if path and os.path.exists(path))
    fleet = fleet_of(arguments, sum(map(os.path.getsize, paths)))
    return read_windows(found, arguments.trace, fleet, **_reading_options(arguments))


_CHANGES: dict[str, Callable[[Plan, Any], Plan]] = {
    "drop": lambda plan, names: transform.without_operations(plan, names.split(",")),
    "ops": lambda plan, names: transform.only_operations(plan, names.split(",")),
    "pgs": lambda plan, names: transform.only_groups(plan, names.split(",")),
    "max_calls": transform.first_calls,
    "dtype": transform.with_dtype,
    "bucket_mb": with_buckets,
    "scale_bytes": transform.scale_bytes,
    "overlap": transform.with_overlap,
    "blocking": lambda plan, _: transform.with_overlap(plan, "none"),
}
"""Options that change what is replayed, in the order in which they apply."""
_CHANGE_OPTIONS = ("nproc", *_CHANGES)


def _describe_changes(given: argparse.Namespace) -> dict[str, str]:
    """Return the given options that change what is replayed."""
    values = {name: getattr(given, name) for name in _CHANGE_OPTIONS}
    values["blocking"] = given.blocking and "yes"
    return {
        f"--{name.replace('_', '-')}": f"{value:g}" if isinstance(value, float) else str(value)
        for name, value in values.items()
        if value and (name, value) not in (("scale_bytes", 1), ("overlap", "recorded"))
    }


def resized(recorded: Plan, given: argparse.Namespace) -> Plan:
    """Return a copy of the plan with the requested calls and sizes."""
    plan = msgspec.json.decode(msgspec.json.encode(recorded), type=Plan)
    for name, change in _CHANGES.items():
        value = getattr(given, name)
        if value != replay_options.OPTIONS[name].unset:
            plan = change(plan, value)
    return plan


def _change_plan(recorded: Plan, given: argparse.Namespace, launched: int | None) -> Plan:
    """Return the plan with all requested changes, settled."""
    plan = resized(recorded, given)
    ranks = given.nproc or launched or plan.world_size
    if launched is None and ranks > _MAX_LOCAL_RANKS and (ranks != plan.world_size or not given.dry_run):
        raise CrossrankError(
            f"{ranks} ranks are too many for one machine (at most {_MAX_LOCAL_RANKS}); start them with torchrun, srun "
            "or mpirun, or choose fewer with --nproc"
        )
    if ranks != plan.world_size:
        plan = transform.resize(plan, ranks)
    gaps = [call.gap_ns for rank in plan.ranks for call in rank.calls]
    if not gaps and not given.compute:
        reasons = ", ".join(f"{count} call(s) {reason}" for reason, count in plan.coverage().reasons.items())
        raise CrossrankError(f"{plan.source}: no call is left to replay ({reasons})")
    scale = parse_pace(given.pace).scale
    longest = 0.0 if given.compute else max(gaps) * scale / 1e9
    if longest > _MAX_GAP_S:
        raise CrossrankError(
            f"--pace {given.pace}: a gap would be {longest:.3g} s long; choose a number below 1, or --pace fast"
        )
    if scale and not any(gaps) and not given.compute:
        raise CrossrankError(
            f"--pace {given.pace}: {plan.source} has no times, so no gaps; replay a recording, Kineto traces or linked "
            "traces"
        )
    settle(plan, partial=given.partial)
    return plan


def make_folders(given: argparse.Namespace, target: str | None) -> None:
    """Make the folders of the results before the replay starts."""
    for option, path in (("--record", given.record), ("--profile", given.profile)):
        if path is not None and os.path.realpath(path) == os.path.realpath(given.trace):
            raise CrossrankError(f"{option} {path}: is the recording to replay; choose another folder")
    if given.profile is not None and given.record == given.profile:
        raise CrossrankError(f"--record and --profile {given.profile}: are two recordings; give two folders")
    for option, path in (("--save-data", given.save_data), ("--compare-data", given.compare_data)):
        if path is not None and is_url(path):
            raise CrossrankError(f"{option} {path}: is not a folder that all ranks see; choose one")
    given_data = [os.path.realpath(path) for path in (given.save_data, given.compare_data) if path is not None]
    if len(given_data) != len(set(given_data)):
        raise CrossrankError(f"--save-data and --compare-data {given.save_data}: are one folder; give two")
    for path in (target, given.record, given.profile, given.save_data):
        if path is None or is_url(path):
            continue
        make_folder(path)
        if not os.access(path, os.W_OK):
            raise CrossrankError(f"{path}: cannot be written; choose another folder")


def _run_here(plan: Plan, settings: Settings, variables: Mapping[str, str]) -> list[RankResult]:
    needed = sum(map(rank_bytes, plan.ranks))
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if settings.device == "cpu" and needed > free:
        raise CrossrankError(
            f"{plan.world_size} ranks need {amount(needed)} of memory for their tensors, and {amount(free)} are free; "
            "make messages smaller with --scale-bytes, or choose fewer calls or ranks"
        )
    from crossrank.replay.run.processes import run_local

    return run_local(plan, settings, variables)
