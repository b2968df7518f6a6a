"""`crossrank timeline`: all ranks on one Perfetto timeline."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import msgspec

from crossrank.atomic_file import gzip_writer, join, whole_file
from crossrank.errors import CrossrankError
from crossrank.text import amount, printable
from crossrank.tools.commands.measured import add_measured_arguments, read_measured
from crossrank.tools.commands.options import folder_of
from crossrank.tools.job.sources import CHOICES
from crossrank.tools.output.timeline.build import Written, write_timeline
from crossrank.tools.output.timeline.chrome import ChromeWriter
from crossrank.tools.output.timeline.perfetto import PerfettoWriter
from crossrank.tools.output.timeline.tracks import WriterFactory

FORMATS: dict[str, tuple[WriterFactory, str]] = {
    "perfetto": (PerfettoWriter, "timeline.pftrace"),
    "chrome": (ChromeWriter, "timeline.json"),
}
_NOTES = 8


class Timeline:
    """Lay all ranks on one timeline, on one clock, for ui.perfetto.dev: a track per rank for its calls, one for its
    communication on the device, steps, arrows from the first to the last arriver of each collective, and counters of
    bytes in flight and bus bandwidth. From recordings, Nsight exports, Kineto traces and flight-recorder dumps; calls
    without times of the device stand where the host made them. Exit code 1: ranks are missing, or a file could not be
    used."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_measured_arguments(parser, CHOICES)
        parser.add_argument(
            "-o",
            "--output",
            metavar="FILE",
            help="where to (default: timeline.pftrace or timeline.json in the folder of the input); .gz compresses",
        )
        parser.add_argument(
            "--format",
            choices=sorted(FORMATS),
            default="perfetto",
            help="perfetto (default), or chrome: the older JSON",
        )
        parser.add_argument(
            "--flows",
            choices=("first-last", "all", "none"),
            default="first-last",
            help="arrows between the ranks of a collective: first to last arriver (default), through all, or none",
        )
        parser.add_argument("--json", action="store_true", help="print what was written as JSON")

    def run(self, arguments: argparse.Namespace) -> int:
        paths: list[str] = arguments.path
        factory, name = FORMATS[arguments.format]
        output = arguments.output or join(folder_of(paths[0]), name)
        measured = read_measured(arguments)
        together = measured.together
        try:
            with whole_file(output) as temporary:
                written = write_timeline(measured.ranks, together, temporary, factory, flows=arguments.flows)
                if output.endswith(".gz"):
                    _compress(temporary)
                size = temporary.stat().st_size
        except OSError as error:
            raise CrossrankError(f"{output}: cannot be written ({error.strerror}); name another with -o") from error
        if arguments.json:
            said = {"output": output, "bytes": size, **msgspec.to_builtins(written)}
            said |= {
                "clocks": msgspec.to_builtins(together.clocks),
                "notes": measured.notes,
                "skipped": measured.skipped,
            }
            sys.stdout.write(msgspec.json.format(msgspec.json.encode(said), indent=2).decode() + "\n")
        else:
            _print(output, size, written, together.clocks.note, together.clocks.residual_us, arguments.format)
            for note in measured.notes[:_NOTES]:
                print(f"note       {printable(note)}")
        return measured.complain()


def _compress(path: Path) -> None:
    """gzip a file in place, without name and time, so that its bytes depend on the content alone."""
    packed = path.with_name(path.name + ".packed")
    try:
        with (
            path.open("rb") as plain,
            packed.open("xb") as target,
            gzip_writer(target) as stream,
        ):
            shutil.copyfileobj(plain, stream, 1 << 20)
        os.replace(packed, path)
    finally:
        packed.unlink(missing_ok=True)


def _print(
    output: str, size: int, written: Written, clocks: str, residual: dict[str, float] | None, given_format: str
) -> None:
    print(f"timeline   {printable(output)}, {amount(size)}")
    print(
        f"holds      {written.ranks} rank(s), {written.calls:,} calls, {written.activities:,} times on devices, "
        f"{written.arrows:,} arrows, {written.steps:,} steps, {written.duration_ms:,.1f} ms"
    )
    print(f"clocks     {clocks}", end="")
    print(f"; ends of a collective differ by {residual['p50']:,.1f} us (p50)" if residual else "")
    where = "ui.perfetto.dev" if given_format == "perfetto" else "ui.perfetto.dev or chrome://tracing"
    print(f"open it in {where}")
