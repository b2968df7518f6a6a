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


_ALONE = {"compute": "is about communication alone, with numbers of its own"}
_NO_GRAPH = {"graph": "acts between calls, of which a graph has none"}
_NO_INIT_METHOD = {"init_method": "says where the ranks meet, as --init-method does"}

READ = (
    Option("--trace-path", "the trace, as PARAM's users write it", "PATH"),
    Option(
        "--trace-type",
        "the kind of files to read (default: which says most)",
        choices=sorted(KINDS),
        not_with={"compute": "chooses the calls of one kind of file, and windows are read"},
    ),
    Option(
        "--steps",
        "of a recording only these iterations, STOP not among them",
        "START:STOP",
        not_with={"compute": "chooses calls of a comms file (--window chooses a window)"},
    ),
    Option("--partial", "leave out, counted, what is damaged or has no match on other ranks"),
    Option("--strict", "exit 1 when anything recorded is not replayed"),
    Option("--one-trace --use-one-trace", "let one rank's file stand for all ranks"),
    Option("--world-size", "ranks of the recorded job, where no file says it", "N"),
    Option(
        "--compute",
        "replay the computation of a window too: every operation at its place, communication between them",
        not_with=_NO_GRAPH,
    ),
    Option("--window", "the window to replay with --compute (default: the first)", "N", needs="compute"),
    Option(
        "--import",
        "import MODULE first: it makes operations that torch lacks (--compute; may be given several times)",
        "MODULE",
        several=True,
        dest="imports",
        needs="compute",
    ),
    Option(
        "--indices",
        "how indices into embedding tables are spread over the rows, where the trace has none (--compute)",
        default="uniform",
        choices=INDICES,
    ),
)
CHANGE = (
    # torchrun takes --nproc as an abbreviation of one of its options, and rejects it as ambiguous.
    Option(
        "--nproc --num-ranks",
        "replay with N ranks (default: as many as recorded, or as a launcher started; torchrun lets only --num-ranks "
        "through)",
        "N",
    ),
    Option("--scale-bytes", "messages F times as large", "F", default=1.0),
    Option("--dtype", "all elements of this type: bfloat16, float32, …", "TYPE"),
    Option("--ops --allow-ops --allow-list", "only these operations: all_reduce,all_gather", "LIST"),
    Option("--drop", "without these operations: how fast would it be?", "LIST"),
    Option("--bucket-mb", "DDP's gradients in buckets of F MiB, merged or split", "F"),
    Option("--overlap", "none: every communication is waited for at once (default: recorded)", choices=OVERLAPS),
    Option(
        "--blocking -b",
        "every call is waited for at once, with a barrier of its group before and after each collective",
        not_with=_NO_GRAPH,
    ),
    Option("--pgs", "only calls on these groups, by name or description", "LIST"),
    Option("--max-calls --max-msg-cnt", "the first N calls of each rank", "N"),
    Option(
        "--sweep",
        "replay for every value of an option or of an environment variable (scale-bytes=0.5,1,2 or "
        "NCCL_ALGO=Ring,Tree); several make all combinations; what is done already is not done again (-o)",
        "NAME=V,V",
        several=True,
    ),
)
RUN = (
    Option("--backend", "nccl, gloo, … (default: nccl where there are GPUs, else gloo)", "NAME"),
    Option("--device", "cpu or cuda", "NAME"),
    Option(
        "--pace",
        "between calls: fast (default), recorded = leave the recorded gaps, compute = keep the device busy in them, or "
        "a factor on them (0.5); with --compute, of the host's own time between operations: recorded (default), fast "
        "or a factor",
        "PACE",
    ),
    Option(
        "--threads",
        "threads of torch on the CPU, in each rank (default: as recorded with --compute, else 1)",
        "N",
    ),
    Option("--warmup --warmup-iter", "passes not measured (2)", "N", default=2, range=(0, MOST_RANKS)),
    Option("--repeat --num-replays", "passes measured (5)", "N", default=5),
    Option("--graph --cudagraph", "capture the calls of a pass, and launch them as a CUDA graph"),
    Option("--check", "verify every result, in a pass of its own", not_with=_ALONE),
    Option(
        "--save-data",
        "save what every call gives, from inputs that are always alike",
        "DIR",
        not_with=_ALONE | {"sweep": "would save every combination into one folder"},
    ),
    Option(
        "--compare-data", "compare what every call gives with what --save-data saved: exit 1", "DIR", not_with=_ALONE
    ),
    Option(
        "--rtol",
        "relative tolerance for that (8 roundings of the type, at least 1e-4)",
        "F",
        range=(0, 1e6),
        needs="compare-data",
    ),
    Option("--atol", "absolute tolerance for that (as --rtol)", "F", range=(0, 1e6), needs="compare-data"),
    Option("--timeout", "end when a rank makes no progress for S s (120)", "S", default=120.0, range=(1, 1e6)),
    Option("--record", "record the measured passes with crossrank into DIR", "DIR", not_with=_NO_GRAPH),
    Option(
        "--profile --enable-profiler",
        "after the measured passes record two more into DIR, with execution traces and Kineto (a window)",
        "DIR",
        not_with=_NO_GRAPH,
    ),
    Option(
        "--init-method",
        "where the ranks meet: tcp://HOST:PORT or file:///PATH of a new file that all see, with ?rank=R&world_size=N "
        "where no launcher says them; env:// = as the launcher says",
        "URL",
    ),
    Option("--master-ip", "where rank 0 is, where the launcher does not say it", "HOST", not_with=_NO_INIT_METHOD),
    Option("--master-port", "its port (29500)", "PORT", not_with=_NO_INIT_METHOD),
    Option("--tolerance", "what takes F times as long as others is slow (1.5)", "F", default=1.5, range=(1.01, 1e6)),
    Option(
        "--groups",
        "who communicates: all pairs of ranks (default), neighbours (ring), or quarters, eighths … of them (bisect)",
        default="pairs",
        choices=PROBES,
    ),
)
WRITE = (
    Option(
        "-o --output --output-path",
        "write replay.json, .csv and .html, or probe.json, into DIR",
        "DIR",
        dest="output",
    ),
    Option(
        "--by",
        "print times by source line, by iteration or both: source,step (replay.json and the page have them)",
        "LIST",
    ),
    Option("--batch --colls-per-batch", "print what N calls in a row take together, on each rank", "N"),
    Option("--json", "print the report as JSON"),
    Option("--save-plan", "write the plan, which can be replayed in place of the trace", "FILE"),
    Option("--dry-run", "make and match the plan, and replay nothing"),
)
_GROUPS = {"what is read": READ, "what if": CHANGE, "how it runs": RUN, "what is written": WRITE}
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
    parser.add_argument("trace", nargs="?", help="a recording, a folder of traces of all ranks, one file, or a plan")
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
        raise CrossrankError("name one trace: a recording, a folder of traces, a file or a plan")
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
            raise CrossrankError(f"{one.shown} is for --{one.needs}; add it, or leave {one.shown} out")
        for other, why in one.not_with.items():
            if OPTIONS[other].is_given(arguments):
                raise CrossrankError(f"{one.shown} {why}; leave out {OPTIONS[other].shown}")
    arguments.by = arguments.by.split(",") if isinstance(arguments.by, str) else arguments.by or []
    if unknown := [name for name in arguments.by if name not in BLOCKS]:
        raise CrossrankError(f"--by {unknown[0]!r} is neither {' nor '.join(BLOCKS)}")
    arguments.pace = arguments.pace or ("recorded" if arguments.compute else "fast")
    pace = parse_pace(arguments.pace)
    if arguments.graph and pace.scale:
        raise CrossrankError("--pace leaves gaps between calls, of which a graph has none; leave out --graph")
    if arguments.compute and pace.busy:
        raise CrossrankError("--pace compute stands in for computation, which --compute replays; leave one out")
