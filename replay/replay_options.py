"""The options of `crossrank replay`, with the names that PARAM's users know beside ours."""

from __future__ import annotations

import argparse

from crossrank.comm import MOST_RANKS
from crossrank.errors import CrossrankError
from crossrank.replay.plan.compute.index_ranges import INDICES
from crossrank.replay.plan.probe import PROBES
from crossrank.replay.plan.replay_inputs import KINDS
from crossrank.replay.plan.transform import OVERLAPS
from crossrank.replay.run.pacing import parse_pace
from crossrank.tools.commands.options import add_shared, iterations

BLOCKS = ("source", "step")
_FILL = ("check", "save_data", "compare_data")
"""Options that --compute does not go with."""
_NOT_CAPTURED = ("blocking", "record", "profile", "compute", "probe")
_NOT_PROBED = ("compute", "sweep", "check", "save_data", "compare_data", "blocking", "save_plan", "by", "batch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", nargs="?", help="a recording, a folder of traces of all ranks, one file, or a plan")
    what = parser.add_argument_group("what is read")
    what.add_argument("--trace-path", metavar="PATH", help="the trace, as PARAM's users write it")
    what.add_argument(
        "--trace-type", choices=sorted(KINDS), help="the kind of files to read (default: which says most)"
    )
    meaning = "of a recording only these iterations, STOP not among them"
    what.add_argument("--steps", type=iterations, metavar="START:STOP", help=meaning)
    what.add_argument(
        "--partial", action="store_true", help="leave out, counted, what is damaged or has no match on other ranks"
    )
    what.add_argument("--strict", action="store_true", help="exit 1 when anything recorded is not replayed")
    what.add_argument(
        "--one-trace", "--use-one-trace", action="store_true", help="let one rank's file stand for all ranks"
    )
    what.add_argument("--world-size", type=int, metavar="N", help="ranks of the recorded job, where no file says it")
    add_shared(parser)
    what.add_argument(
        "--compute",
        action="store_true",
        help="replay the computation of a window too: every operation at its place, communication between them",
    )
    what.add_argument(
        "--window", type=int, metavar="N", help="the window to replay with --compute (default: the first)"
    )
    what.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="import MODULE first: it makes operations that torch lacks (--compute; may be given several times)",
    )
    what.add_argument(
        "--indices",
        choices=INDICES,
        default="uniform",
        help="how indices into embedding tables are spread over the rows, where the trace has none (--compute)",
    )
    change = parser.add_argument_group("what if")
    change.add_argument(
        "--nproc",
        "--num-ranks",  # torchrun takes the first for one of its own, cut short, and refuses it as ambiguous
        type=int,
        metavar="N",
        help="replay with N ranks (default: as many as recorded, or as a launcher started; torchrun lets only "
        "--num-ranks through)",
    )
    change.add_argument("--scale-bytes", type=float, default=1.0, metavar="F", help="messages F times as large")
    change.add_argument("--dtype", metavar="TYPE", help="all elements of this type: bfloat16, float32, …")
    change.add_argument(
        "--ops", "--allow-ops", "--allow-list", metavar="LIST", help="only these operations: all_reduce,all_gather"
    )
    change.add_argument("--drop", metavar="LIST", help="without these operations: how fast would it be?")
    change.add_argument(
        "--bucket-mb", type=float, metavar="F", help="DDP's gradients in buckets of F MiB, merged or split"
    )
    change.add_argument(
        "--overlap", choices=OVERLAPS, help="none: every communication is waited for at once (default: recorded)"
    )
    change.add_argument(
        "--blocking",
        "-b",
        action="store_true",
        default=None,
        help="every call is waited for at once, with a barrier of its group before and after each collective",
    )
    change.add_argument("--pgs", metavar="LIST", help="only calls on these groups, by name or description")
    change.add_argument("--max-calls", "--max-msg-cnt", type=int, metavar="N", help="the first N calls of each rank")
    change.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="NAME=V,V",
        help="replay for every value of an option or of an environment variable (scale-bytes=0.5,1,2 or "
        "NCCL_ALGO=Ring,Tree); several make all combinations; what is done already is not done again (-o)",
    )
    change.add_argument(
        "--probe",
        choices=PROBES,
        help="find the slow rank, host or link: recorded sizes on all pairs of ranks, on neighbours (ring), or on "
        "halves, quarters … of them (bisect); exit 1 where one is slower than --tolerance",
    )
    change.add_argument("--tolerance", type=float, metavar="F", help="F times as slow as others is slow (1.5; --probe)")
    run = parser.add_argument_group("how it runs")
    run.add_argument("--backend", help="nccl, gloo, … (default: nccl where there are GPUs, else gloo)")
    run.add_argument("--device", help="cpu or cuda")
    run.add_argument(
        "--pace",
        metavar="PACE",
        help="between calls: fast (default), recorded = leave the recorded gaps, compute = keep the device busy in "
        "them, or a factor on them (0.5); with --compute, of the host's own time between operations: recorded "
        "(default), fast or a factor",
    )
    run.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads of torch on the CPU, in each rank (default: as recorded with --compute, else 1)",
    )
    run.add_argument("--use-timestamp", dest="pace", action="store_const", const="recorded", help=argparse.SUPPRESS)
    run.add_argument("--warmup", "--warmup-iter", type=int, default=2, metavar="N", help="passes not measured (2)")
    run.add_argument("--repeat", "--num-replays", type=int, default=5, metavar="N", help="passes measured (5)")
    run.add_argument(
        "--graph",
        "--cudagraph",
        action="store_true",
        help="capture the calls of a pass, and launch them as a CUDA graph",
    )
    run.add_argument("--check", action="store_true", help="verify every result, in a pass of its own")
    run.add_argument("--save-data", metavar="DIR", help="save what every call gives, from inputs that are always alike")
    run.add_argument(
        "--compare-data", metavar="DIR", help="compare what every call gives with what --save-data saved: exit 1"
    )
    run.add_argument(
        "--rtol", type=float, metavar="F", help="relative tolerance for that (8 roundings of the type, at least 1e-4)"
    )
    run.add_argument("--atol", type=float, metavar="F", help="absolute tolerance for that (as --rtol)")
    run.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="end when a rank makes no progress for S s (120)"
    )
    run.add_argument("--record", metavar="DIR", help="record the measured passes with crossrank into DIR")
    run.add_argument(
        "--profile",
        "--enable-profiler",
        metavar="DIR",
        help="after the measured passes record two more into DIR, with execution traces and Kineto (a window)",
    )
    run.add_argument(
        "--init-method",
        metavar="URL",
        help="where the ranks meet: tcp://HOST:PORT or file:///PATH of a new file that all see, with "
        "?rank=R&world_size=N where no launcher says them; env:// = as the launcher says",
    )
    run.add_argument("--master-ip", metavar="HOST", help="where rank 0 is, where the launcher does not say it")
    run.add_argument("--master-port", type=int, metavar="PORT", help="its port (29500)")
    out = parser.add_argument_group("what is written")
    out.add_argument(
        "-o", "--output", "--output-path", metavar="DIR", help="write replay.json, .csv and .html into DIR"
    )
    out.add_argument(
        "--by",
        metavar="LIST",
        help="print times by source line, by iteration or both: source,step (replay.json and the page have them)",
    )
    out.add_argument(
        "--batch",
        "--colls-per-batch",
        type=int,
        metavar="N",
        help="print what N calls in a row take together, on each rank",
    )
    out.add_argument("--json", action="store_true", help="print the report as JSON")
    out.add_argument("--save-plan", metavar="FILE", help="write the plan, which can be replayed in place of the trace")
    out.add_argument("--dry-run", action="store_true", help="make and match the plan, and replay nothing")


def check(arguments: argparse.Namespace) -> None:
    """Refuse invalid values, and give both names of the trace one meaning."""
    path = arguments.trace or arguments.trace_path
    if path is None or (arguments.trace and arguments.trace_path):
        raise CrossrankError("name one trace: a recording, a folder of traces, a file or a plan")
    arguments.trace, arguments.trace_path = path, None
    if arguments.init_method and (arguments.master_ip or arguments.master_port):
        raise CrossrankError("--init-method says where the ranks meet; leave out --master-ip and --master-port")
    for name, lowest in (
        ("warmup", 0),
        ("repeat", 1),
        ("nproc", 1),
        ("world_size", 1),
        ("max_calls", 1),
        ("window", 1),
        ("threads", 1),
        ("batch", 1),
    ):
        value = getattr(arguments, name)
        if value is not None and not lowest <= value <= MOST_RANKS:
            raise CrossrankError(f"--{name.replace('_', '-')} {value} is below {lowest} or beyond reason")
    if not 1 <= arguments.timeout <= 1e6:
        raise CrossrankError(f"--timeout {arguments.timeout:g} is not a number of seconds from 1 on")
    if arguments.master_port is not None and not 0 < arguments.master_port < 1 << 16:
        raise CrossrankError(f"--master-port {arguments.master_port} is not a port from 1 to 65535")
    arguments.pace = arguments.pace or ("recorded" if arguments.compute else "fast")
    pace = parse_pace(arguments.pace)
    for name, value, other, chosen in (
        ("window", arguments.window, "compute", arguments.compute),
        ("import", arguments.imports, "compute", arguments.compute),
        ("tolerance", arguments.tolerance, "probe", arguments.probe),
        ("rtol", arguments.rtol, "compare-data", arguments.compare_data),
        ("atol", arguments.atol, "compare-data", arguments.compare_data),
    ):
        if value and not chosen:
            raise CrossrankError(f"--{name} is for --{other}; add it, or leave --{name} out")
    if arguments.save_data and arguments.sweep:
        raise CrossrankError("--save-data would save every combination of --sweep into one folder; leave one out")
    if arguments.probe and (beside := next((one for one in _NOT_PROBED if getattr(arguments, one)), None)):
        raise CrossrankError(f"--{beside.replace('_', '-')} does not go with --probe; leave one out")
    if arguments.tolerance is not None and not 1 < arguments.tolerance < float("inf"):
        raise CrossrankError(f"--tolerance {arguments.tolerance:g} is not above 1")
    arguments.by = arguments.by.split(",") if isinstance(arguments.by, str) else arguments.by or []
    if unknown := [name for name in arguments.by if name not in BLOCKS]:
        raise CrossrankError(f"--by {unknown[0]!r} is neither {' nor '.join(BLOCKS)}")
    for tolerance in ("rtol", "atol"):
        if getattr(arguments, tolerance) is not None and not 0 <= getattr(arguments, tolerance) < float("inf"):
            raise CrossrankError(f"--{tolerance} {getattr(arguments, tolerance):g} is no tolerance from 0 on")
    if arguments.compute and (filling := next((one for one in _FILL if getattr(arguments, one)), None)):
        option = f"--{filling.replace('_', '-')}"
        raise CrossrankError(f"{option} is about communication alone, with numbers of its own; leave out --compute")
    if arguments.graph and (between := next((one for one in _NOT_CAPTURED if getattr(arguments, one)), None)):
        raise CrossrankError(f"--{between} acts between calls, of which a graph has none; leave out --graph")
    if arguments.graph and pace.scale:
        raise CrossrankError("--pace leaves gaps between calls, of which a graph has none; leave out --graph")
    if arguments.compute and pace.busy:
        raise CrossrankError("--pace compute stands in for computation, which --compute replays; leave one out")
