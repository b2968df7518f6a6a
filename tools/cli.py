"""The `crossrank` command: a table of subcommands, each imported when it is called.

Exit codes: 0 = done and nothing wrong, 1 = done and a fault was found, 2 = the input could not be used.
A subcommand is a class; its docstring is its help text.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from difflib import get_close_matches
from importlib import import_module
from types import FrameType
from typing import NoReturn, Protocol

import crossrank
from crossrank.errors import CrossrankError, unforeseen
from crossrank.text import printable
from crossrank.tools import freed_memory
from crossrank.tools.output.console import Printable

COMMANDS = {
    "inspect": ("tools.commands.inspect:InspectCommand", "show what a recording contains, and what is missing"),
    "watch": (
        "tools.commands.watch:WatchCommand",
        "follow a running job: steps, bandwidth, ranks that are late or silent",
    ),
    "diagnose": (
        "tools.commands.diagnose:DiagnoseCommand",
        "find missing, mismatched or stuck ranks, root cause first",
    ),
    "bandwidth": ("tools.commands.bandwidth:BandwidthCommand", "time, algbw, busbw and waiting time per collective"),
    "timeline": ("tools.commands.timeline:TimelineCommand", "write all ranks to one Perfetto timeline, on one clock"),
    "report": ("tools.commands.report:ReportCommand", "write one HTML page with the results of all analyses"),
    "export": ("tools.commands.export:ExportCommand", "write the tables of a job as Parquet, CSV or Arrow files"),
    "link": ("tools.commands.link:LinkCommand", "join the traces of each rank into one graph of dependencies"),
    "convert": ("tools.commands.convert:ConvertCommand", "write Chakra traces and process groups for simulators"),
    "check": ("tools.commands.check:CheckCommand", "check that a simulator can read a Chakra trace"),
    "simulate": (
        "tools.commands.simulate:SimulateCommand",
        "predict the time of a window: as recorded, on another network, with more ranks",
    ),
    "replay": ("replay.command:ReplayCommand", "run the recorded communication again, without the model"),
    "probe": ("replay.probe:ProbeCommand", "find the slow rank, node or link, with the sizes of a recording"),
    "minimize": ("tools.commands.minimize:MinimizeCommand", "cut a few steps out of a recording, to share them"),
    "anonymize": ("tools.commands.anonymize:AnonymizeCommand", "remove the names from traces, to share them"),
    "build-recorder": (
        "instrument.compiled.command:BuildRecorderCommand",
        "compile the C++ recorder before a job needs it",
    ),
}
"""Name -> module of crossrank and its class, and one line for `crossrank --help`."""
_EXIT_CODES = "exit codes: 0 nothing is wrong, 1 a fault was found, 2 the input is not usable"
_WORDS = {
    "recording": "the folder TRACING_DIR, with the files of all ranks of a job",
    "comms file": "the calls of one rank: rank-N.comms.jsonl.zst",
    "dump": "the last calls of one rank, from torch's flight recorder",
    "window": "the steps that the profiler traced: TRACING_WINDOW=START:STOP",
}
"""Words of `crossrank --help` -> what they mean."""


class Command(Protocol):
    """What a subcommand provides."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    with _safe_streams():
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    try:
        with _ending_in_order():
            freed_memory.return_large_blocks()
            arguments = _parse(list(sys.argv[1:] if argv is None else argv))
            return int(arguments.run(arguments))
    except KeyboardInterrupt:
        return _end("interrupted", 130)
    except _Terminated:
        return _end("terminated", 143)
    except BrokenPipeError:
        # `crossrank inspect … | head` is no fault. Python would complain once more when it closes stdout.
        _silence_stdout()
        return 0
    except OSError as error:
        # Files name themselves in errors of ours: this is a terminal or a pipe, or a disk behind it that is full.
        _silence_stdout()
        return _end(f"cannot be written: {error.filename or 'stdout'} ({error.strerror or error})", 2)
    except Exception as error:  # an unforeseen error ends in one line, like any other
        return _end(str(error if isinstance(error, CrossrankError) else unforeseen(error)), 2)


def _end(text: str, code: int) -> int:
    print(f"crossrank: {printable(text)}", file=sys.stderr)
    return code


def _silence_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Terminated(BaseException):
    """SIGTERM: what is half done is taken back, as after Ctrl-C."""


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """Makes SIGTERM unwind the stack while the block runs, unless it already has a handler."""

    def terminate(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _safe_streams() -> Iterator[None]:
    """A closed stdout takes everything; what its encoding lacks is escaped rather than an error, and so is what would
    steer a terminal."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with redirect_stdout(Printable(sys.stdout)), redirect_stderr(Printable(sys.stderr)):
        yield


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line that suggests the nearest command or option."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (`{self.prog} --help` shows how to use it)\n")


def _suggest(word: str, names: Iterable[str]) -> str:
    near = get_close_matches(word, list(names), n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


def _parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of the subcommand, with its `run`."""
    overview = _Parser(
        prog="crossrank",
        description="Commands for recordings of distributed PyTorch jobs. To record one:\n"
        "  TRACING_DIR=DIR torchrun --nproc-per-node N -m crossrank.instrument SCRIPT\n"
        "Then: crossrank inspect DIR.",
        epilog="\n".join(["words:", *(f"  {word:<11} {text}" for word, text in _WORDS.items()), "", _EXIT_CODES]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    overview.add_argument("--version", action="version", version=f"crossrank {crossrank.__version__}")
    subparsers = overview.add_subparsers(dest="command", metavar="COMMAND", required=True)
    parser: argparse.ArgumentParser = overview
    for name, (place, summary) in COMMANDS.items():
        one = subparsers.add_parser(name, help=summary)
        if words[:1] == [name]:
            # Only the called command is imported, so that `crossrank --help` and each command start fast.
            parser = one
            module, _, class_name = place.partition(":")
            command: Command = getattr(import_module(f"crossrank.{module}"), class_name)()
            command.add_arguments(parser)
            parser.description, parser.epilog = command.__doc__, _EXIT_CODES
            parser.set_defaults(run=command.run)
    if not words:
        overview.print_help()
        sys.exit(0)
    if parser is overview and not words[0].startswith("-"):
        overview.error(f"{printable(words[0])} is not a command{_suggest(words[0], COMMANDS)}")
    arguments, unknown = overview.parse_known_args(words)
    if unknown:
        options = [option for action in parser._actions for option in action.option_strings]
        word = printable(unknown[0])
        if not word.startswith("-"):
            parser.error(f"one argument too many: {word}")
        parser.error(f"{word} is not an option{_suggest(word.partition('=')[0], options)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
