"""The options of `crossrank replay` and `crossrank probe`, one row each, with PARAM's names as well."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from crossrank.comm import MOST_RANKS
from crossrank.errors import CrossrankError
from crossrank.replay.plan.compute.compute_plan import INDICES
from crossrank.replay.plan.probe import PROBES
from crossrank.replay.plan.replay_inputs import KINDS
from crossrank.replay.plan.transform import OVERLAPS
from crossrank.replay.run.pacing import parse_pace
from crossrank.tools.commands.options import add_shared, iterations

BLOCKS = ("source", "step")
REPLAY, PROBE = "replay", "probe"
_TYPES: dict[str, Callable[[str], Any]] = {
    "N": int,
    "PORT": int,
    "F": float,
    "S": float,
    "START:STOP": iterations,
}
"""Placeholder of a value in `--help` -> the function that parses it; all others are strings."""
_RANGES = {"N": (1, MOST_RANKS), "PORT": (1, 65535)}
"""The lowest and the highest value of an option without its own range."""


@dataclass(frozen=True)
class Option:
    """One option."""

    names: str
    """The first name is crossrank's, and names its value; the others are PARAM's, or a launcher's."""
    help: str
    metavar: str = ""
    """Placeholder of its value in `--help`; empty: a switch, or one of `choices`."""
    default: Any = None
    """For a switch it is False."""
    choices: Collection[str] = ()
    range: tuple[float, float] | None = None
    """The lowest and the highest value."""
    several: bool = False
    """It may be given several times."""
    dest: str = ""
    """The name of its value, if it differs from the option's."""
    needs: str = ""
    """The option that it requires."""
    not_with: Mapping[str, str] = field(default_factory=dict)
    """Another option -> why the two exclude each other."""

    @property
    def name(self) -> str:
        return self.dest or self.shown.removeprefix("--").replace("-", "_")

    @property
    def type(self) -> Callable[[str], Any]:
        return _TYPES.get(self.metavar, str)

    @property
    def unset(self) -> Any:
        """Return its value if it is not given."""
        return [] if self.several else False if self.is_switch else self.default

    @property
    def is_switch(self) -> bool:
        return not (self.metavar or self.choices)

    @property
    def shown(self) -> str:
        return self.names.split()[0]

    def is_given(self, arguments: argparse.Namespace) -> bool:
        return bool(getattr(arguments, self.name) != self.unset)

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        how: dict[str, Any] = {"help": self.help, "default": self.unset, "dest": self.name}
        if self.is_switch:
            how["action"] = "store_true"
        elif self.choices:
            how["choices"] = self.choices
        else:
            how |= {"metavar": self.metavar, "type": self.type, "action": "append" if self.several else "store"}
        group.add_argument(*self.names.split(), **how)


_ALONE = {"compute": "applies only to a replay of communication"}
_NO_GRAPH = {"graph": "has no effect with --graph"}
_NO_INIT_METHOD = {"init_method": "sets the meeting point of the ranks, as --init-method does"}

READ = (
    Option("--trace-path", "the same as the argument; PARAM's benchmarks call it so", "PATH"),
    Option(
        "--trace-type",
        "the kind of files to read (default: the best one found)",
        choices=sorted(KINDS),
        not_with={"compute": "selects calls of one kind of file, but --compute reads windows"},
    ),
    Option(
        "--steps",
        "replay only the steps START to STOP-1 of a recording",
        "START:STOP",
        not_with={"compute": "selects calls of a comms file (--window selects a window)"},
    ),
    Option("--partial", "skip and count calls that are damaged or have no match on other ranks"),
    Option("--strict", "exit with 1 if a recorded call is not replayed"),
    Option("--one-trace --use-one-trace", "use the file of one rank for all ranks"),
    Option("--world-size", "number of ranks of the recorded job, if no file has it", "N"),
    Option(
        "--compute",
        "also replay the computation of a window, with its communication in place",
        not_with=_NO_GRAPH,
    ),
    Option("--window", "the window to replay with --compute (default: the first one)", "N", needs="compute"),
    Option(
        "--import",
        "import MODULE first, which defines operations that torch lacks (--compute; can be repeated)",
        "MODULE",
        several=True,
        dest="imports",
        needs="compute",
    ),
    Option(
        "--indices",
        "distribution of indices into embedding tables, if the trace has none (--compute)",
        default="uniform",
        choices=INDICES,
    ),
)
CHANGE = (
    # torchrun takes --nproc as an abbreviation of one of its options, and rejects it as ambiguous.
    Option(
        "--nproc --num-ranks",
        "replay with N ranks (default: the recorded number, or the number that the launcher started). Under torchrun, "
        "write --num-ranks: torchrun takes --nproc for its own option",
        "N",
    ),
    Option("--scale-bytes", "multiply message sizes by F", "F", default=1.0),
    Option("--dtype", "use this type for all elements: bfloat16, float32, …", "TYPE"),
    Option("--ops --allow-ops --allow-list", "replay only these operations: all_reduce,all_gather", "LIST"),
    Option("--drop", "replay without these operations", "LIST"),
    Option("--bucket-mb", "merge or split DDP's gradients into buckets of F MiB", "F"),
    Option("--overlap", "none: wait for each call before the next one (default: recorded)", choices=OVERLAPS),
    Option(
        "--blocking -b",
        "wait for each call before the next one, with a barrier of its group before and after each collective",
        not_with=_NO_GRAPH,
    ),
    Option("--pgs", "replay only calls on these groups (name or description)", "LIST"),
    Option("--max-calls --max-msg-cnt", "replay only the first N calls of each rank", "N"),
    Option(
        "--sweep",
        "replay once per value of an option or environment variable (scale-bytes=0.5,1,2 or NCCL_ALGO=Ring,Tree); "
        "several sweeps replay all combinations; with -o, an interrupted sweep continues",
        "NAME=V,V",
        several=True,
    ),
)
RUN = (
    Option("--backend", "nccl, gloo, … (default: nccl with GPUs, otherwise gloo)", "NAME"),
    Option("--device", "cpu or cuda (default: cuda if there is a GPU, except with gloo)", "NAME"),
    Option(
        "--pace",
        "time between calls: fast (none, the default), recorded, compute (as recorded, with the device kept busy), or "
        "a factor of the recorded gaps. With the option --compute, gaps are those between operations of the host, and "
        "the default is recorded",
        "PACE",
    ),
    Option(
        "--threads",
        "CPU threads of torch per rank (default 1; with replay --compute, as recorded)",
        "N",
    ),
    Option(
        "--warmup --warmup-iter",
        "number of passes before the measured ones (default 2)",
        "N",
        default=2,
        range=(0, MOST_RANKS),
    ),
    Option("--repeat --num-replays", "number of measured passes (default 5)", "N", default=5),
    Option("--graph --cudagraph", "capture the calls of a pass and launch them as a CUDA graph"),
    Option("--check", "check every result, in a separate pass", not_with=_ALONE),
    Option(
        "--save-data",
        "save the results of every call, with the same inputs each time",
        "DIR",
        not_with=_ALONE | {"sweep": "would save all combinations to one folder"},
    ),
    Option(
        "--compare-data",
        "compare results with those of --save-data; exit with 1 if they differ",
        "DIR",
        not_with=_ALONE,
    ),
    Option(
        "--rtol",
        "relative tolerance of --compare-data (default: 8 x eps of the type, at least 1e-4)",
        "F",
        range=(0, 1e6),
        needs="compare-data",
    ),
    Option(
        "--atol", "absolute tolerance of --compare-data (default: as --rtol)", "F", range=(0, 1e6), needs="compare-data"
    ),
    Option(
        "--timeout", "stop if a rank makes no progress for S seconds (default 120)", "S", default=120.0, range=(1, 1e6)
    ),
    Option("--record", "record the measured passes with crossrank to DIR", "DIR", not_with=_NO_GRAPH),
    Option(
        "--profile --enable-profiler",
        "record two more passes to DIR, with execution traces and Kineto traces (a window)",
        "DIR",
        not_with=_NO_GRAPH,
    ),
    Option(
        "--init-method",
        "meeting point of the ranks: tcp://HOST:PORT or file:///PATH (a new file that all ranks see); without a "
        "launcher, append ?rank=R&world_size=N. env:// uses the variables of the launcher",
        "URL",
    ),
    Option("--master-ip", "host of rank 0, if the launcher does not set it", "HOST", not_with=_NO_INIT_METHOD),
    Option("--master-port", "port of rank 0 (default 29500)", "PORT", not_with=_NO_INIT_METHOD),
    Option(
        "--tolerance",
        "report groups that take F times as long as similar groups (default 1.5)",
        "F",
        default=1.5,
        range=(1.01, 1e6),
    ),
    Option(
        "--groups",
        "groups to measure. pairs: every two ranks (default). ring: neighbors. bisect: all ranks in 4 groups, then in "
        "8, and so on",
        default="pairs",
        choices=PROBES,
    ),
)
WRITE = (
    Option(
        "-o --output --output-path",
        "write the results as files to DIR",
        "DIR",
        dest="output",
    ),
    Option(
        "--by",
        "print times per source line, per step or both: source,step (with -o, replay.json and replay.html have both)",
        "LIST",
    ),
    Option("--batch --colls-per-batch", "time N calls in a row together, on each rank", "N"),
    Option("--json", "print the report as JSON"),
    Option("--save-plan", "write the plan, which you can replay instead of the trace", "FILE"),
    Option("--dry-run", "show what would run, but start no process"),
)
_GROUPS = {"input": READ, "changes": CHANGE, "execution": RUN, "output": WRITE}
OPTIONS = {one.name: one for options in _GROUPS.values() for one in options}
"""Every option, by the name of its value."""


def _split_names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ONLY_PROBE = _split_names("tolerance groups")
_BOTH = _split_names(
    "trace_path trace_type steps partial one_trace world_size nproc scale_bytes dtype ops drop pgs max_calls backend "
    "device threads warmup repeat timeout record init_method master_ip master_port output json dry_run"
)
"""Options of both commands. `crossrank replay` has all except `_ONLY_PROBE`."""
SWEPT_CHANGES = _split_names("nproc scale_bytes dtype ops drop bucket_mb overlap pgs max_calls threads")
"""`--sweep` may set them, also to `recorded`, which means without the option: they change what was recorded."""
SWEPT = SWEPT_CHANGES | _split_names("indices backend pace")
NO_EFFECT = _split_names("strict sweep output by json save_plan dry_run")
"""No result depends on them."""


def add_arguments(parser: argparse.ArgumentParser, mode: str = REPLAY) -> None:
    """Add the options of the command; all others get their unset values."""
    parser.add_argument(
        "trace",
        nargs="?",
        help="a recording, a folder with the traces of all ranks, one file, or a plan (written by --save-plan)",
    )
    names = _BOTH | _ONLY_PROBE if mode == PROBE else OPTIONS.keys() - _ONLY_PROBE
    for title, options in _GROUPS.items():
        group = parser.add_argument_group(title)
        for one in options:
            if one.name in names:
                one.add_to(group)
    parser.set_defaults(**{one.name: one.unset for one in OPTIONS.values() if one.name not in names})
    if mode == REPLAY:
        hidden = argparse.SUPPRESS
        parser.add_argument("--use-timestamp", dest="pace", action="store_const", const="recorded", help=hidden)
    add_shared(parser)


def check(arguments: argparse.Namespace) -> None:
    """Raise `CrossrankError` for invalid values, and store the trace under one name."""
    path = arguments.trace or arguments.trace_path
    if path is None or (arguments.trace and arguments.trace_path):
        raise CrossrankError("give one trace: a recording, a folder of traces, a file or a plan")
    arguments.trace, arguments.trace_path = path, None
    for one in OPTIONS.values():
        value = getattr(arguments, one.name)
        limits = one.range or _RANGES.get(one.metavar)
        if limits is not None and value is not None and not limits[0] <= value <= limits[1]:
            raise CrossrankError(f"{one.shown} {value} is not a number from {limits[0]} to {limits[1]:,.0f}")
        if not one.is_given(arguments):
            continue
        if one.choices and value not in one.choices:
            raise CrossrankError(f"{one.shown} {value!r} is not one of {', '.join(one.choices)}")
        if one.needs and not getattr(arguments, one.needs.replace("-", "_")):
            raise CrossrankError(f"{one.shown} needs --{one.needs}")
        for other, why in one.not_with.items():
            if OPTIONS[other].is_given(arguments):
                raise CrossrankError(f"{one.shown} {why}; remove {OPTIONS[other].shown}")
    arguments.by = arguments.by.split(",") if isinstance(arguments.by, str) else arguments.by or []
    if unknown := [name for name in arguments.by if name not in BLOCKS]:
        raise CrossrankError(f"--by {unknown[0]!r} is neither {' nor '.join(BLOCKS)}")
    arguments.pace = arguments.pace or ("recorded" if arguments.compute else "fast")
    pace = parse_pace(arguments.pace)
    if arguments.graph and pace.scale:
        raise CrossrankError("--pace has no effect with --graph; remove --graph")
    if arguments.compute and pace.busy:
        raise CrossrankError("--pace compute replaces computation, which --compute replays; remove one of them")
