"""The `crossrank` command: a table of subcommands, each imported when it is called.

Exit codes: 0 = done and nothing wrong, 1 = done and a fault was found, 2 = the input could not be used.
A subcommand is a class; its docstring is its help text.
"""

from __future__ import annotations

import argparse
import ctypes
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from types import FrameType
from typing import Protocol

import crossrank
from crossrank.errors import CrossrankError, unforeseen
from crossrank.text import printable
from crossrank.tools.output.console import Printable

COMMANDS = {
    "inspect": ("tools.commands.inspect:InspectCommand", "what is in a recording, and what is missing"),
    "watch": (
        "tools.commands.watch:WatchCommand",
        "a job while it runs: steps, bandwidth, who is late or silent",
    ),
    "convert": ("tools.commands.convert:ConvertCommand", "Chakra traces per rank and a group file, for simulators"),
    "simulate": (
        "tools.commands.simulate:SimulateCommand",
        "how long a window takes, and why: as measured, on another network, on more ranks",
    ),
    "check": ("tools.commands.check:CheckCommand", "does a Chakra trace keep the contract of ASTRA-sim's feeders"),
    "link": ("tools.commands.link:LinkCommand", "one linked trace per rank: times, GPU, communication, dependencies"),
    "bandwidth": ("tools.commands.bandwidth:BandwidthCommand", "time, algbw, busbw and waiting per collective"),
    "timeline": ("tools.commands.timeline:TimelineCommand", "all ranks on one Perfetto timeline, on one clock"),
    "report": ("tools.commands.report:ReportCommand", "one HTML page of all of it, to hand around"),
    "export": ("tools.commands.export:ExportCommand", "the tables of a job as Parquet, CSV or Arrow files"),
    "diagnose": ("tools.commands.diagnose:DiagnoseCommand", "who is missing, mismatched or stuck; root cause first"),
    "minimize": ("tools.commands.minimize:MinimizeCommand", "a few iterations of a long recording, to hand on"),
    "anonymize": ("tools.commands.anonymize:AnonymizeCommand", "traces without the names in them, to hand on"),
    "replay": (
        "replay.command:ReplayCommand",
        "the communication again, without the model, measured against the recording",
    ),
    "probe": ("replay.probe:ProbeCommand", "the slow rank, host or link, with the sizes of a recording"),
    "build-kernel": (
        "instrument.compiled.command:BuildKernelCommand",
        "the kernel in C++ that records calls, built before a job needs it",
    ),
}
"""Name -> module of crossrank and its class, and one line for the overview."""

_M_MMAP_THRESHOLD = -3
"""malloc.h: blocks of that size and more are mapped by themselves, and unmapped when they are freed."""


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
            _return_freed_memory()
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
    except Exception as error:  # a file that nobody thought of ends in one line, like any other
        return _end(str(error if isinstance(error, CrossrankError) else unforeseen(error)), 2)


def _return_freed_memory() -> None:
    """Have freed columns go back to the system at once: glibc, and polars' own allocator, would each keep for itself
    what the other is asked for next. Of a million calls that is a third of the peak, at no cost in time."""
    os.environ.setdefault("_RJEM_MALLOC_CONF", "dirty_decay_ms:0,muzzy_decay_ms:0")  # read when polars is imported
    with suppress(AttributeError, OSError, TypeError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def _end(text: str, code: int) -> int:
    print(f"crossrank: {printable(text)}", file=sys.stderr)
    return code


def _silence_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Terminated(BaseException):
    """SIGTERM: what is half done is taken back, as after Ctrl-C."""


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """Makes SIGTERM unwind the stack while the block runs, where nobody handles it otherwise."""

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


def _parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of the subcommand, with its `run`."""
    overview = argparse.ArgumentParser(
        prog="crossrank",
        description="Answers from recordings of distributed PyTorch jobs.",
        epilog="exit codes: 0 nothing wrong, 1 a fault was found, 2 the input could not be used",
    )
    overview.add_argument("--version", action="version", version=f"crossrank {crossrank.__version__}")
    subparsers = overview.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (place, summary) in COMMANDS.items():
        # Only the one that is called is imported: `crossrank --help` and each command start fast.
        parser = subparsers.add_parser(name, help=summary)
        if words[:1] == [name]:
            module, _, class_name = place.partition(":")
            command: Command = getattr(import_module(f"crossrank.{module}"), class_name)()
            command.add_arguments(parser)
            parser.description = command.__doc__
            parser.set_defaults(run=command.run)
    return overview.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
