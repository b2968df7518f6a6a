"""`crossrank watch`: a job while it runs."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import msgspec

from crossrank.budget import BudgetError, read_small
from crossrank.errors import BROKEN, CrossrankError, one_line
from crossrank.recording import COMMS, OVER, RANK_FOLDER, SLOW, VERDICT, is_url, list_recording
from crossrank.tools.analysis.diagnosis.findings import Diagnosis
from crossrank.tools.analysis.live import LiveFile, Snapshot, snapshot
from crossrank.tools.commands.options import complain
from crossrank.tools.output.console import terminal
from crossrank.tools.output.watch import SILENT, Metrics, as_text, hang_text
from crossrank.tools.traces.growing import GrowingFile

_CLEAR = "\x1b[H\x1b[2J"
_MOST_LOOKS = 16
"""Maximum looks at a file per update, each at up to 64 MiB of content. The next update continues there."""


class WatchCommand:
    """Show a running job from its files in a shared folder: steps, calls and bytes per group, bandwidth (with
    TRACING_TIMING=1), exposed communication, the last rank of each group, and silent ranks. Ctrl-C ends it. Exit code
    1: ranks are missing or do not write, or the job hangs."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("recording", help="the recording: the folder TRACING_DIR")
        add("--once", action="store_true", help="print once, then exit")
        add("--json", action="store_true", help="print one line of JSON per update")
        add("--interval", type=_seconds, default=2.0, metavar="S", help="seconds between updates (default 2)")
        add("--top", type=int, default=16, metavar="N", help="number of groups and ranks to list (default 16)")
        metrics = parser.add_argument_group("Prometheus")
        add = metrics.add_argument
        add("--metrics", type=_port, metavar="PORT", help="serve metrics on this port; 0 selects a free one")
        meaning = "address to serve on (default 127.0.0.1: only this machine)"
        add("--host", default="127.0.0.1", metavar="ADDRESS", help=meaning)
        add("--textfile", metavar="FILE", help="write metrics to FILE at each update, for the node exporter")

    def run(self, arguments: argparse.Namespace) -> int:
        folder = arguments.recording
        if is_url(folder) or not os.path.isdir(folder):
            raise CrossrankError(
                f"{folder}: is not a folder; give a recording (the folder TRACING_DIR) on a local or shared file system"
            )
        job, metrics = _Job(folder), Metrics()
        _serve(arguments, metrics)
        try:
            while True:
                begun = time.monotonic()
                found = metrics.snapshot = job.look()
                _write(arguments, metrics)
                _print(arguments, found)
                if arguments.once:
                    complain(*job.problems.values(), most=8)
                    return int(_is_faulty(found))
                time.sleep(max(0.0, arguments.interval - (time.monotonic() - begun)))
        except KeyboardInterrupt:
            return int(metrics.snapshot is not None and _is_faulty(metrics.snapshot))


class _Job:
    """The files of a recording, read again at each update."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.problems: dict[str, str] = {}
        self._files: dict[int, tuple[GrowingFile, LiveFile]] = {}

    def look(self) -> Snapshot:
        """Read what is new, and return the state of the job. Raises `CrossrankError` if there is no comms file."""
        listing = list_recording(self.folder)
        found = listing.of_kind(COMMS)
        for path in (f"{self.folder}/{name}" for name in listing.folders if RANK_FOLDER.fullmatch(name)):
            try:
                found += list_recording(path).of_kind(COMMS)
                self.problems.pop(path, None)
            except CrossrankError as error:
                self.problems[path] = str(error)
        for file in found:
            if file.rank not in self._files:
                self._files[file.rank] = GrowingFile(file.path), LiveFile(len(found))
        if not self._files:
            raise CrossrankError(
                f"{self.folder}: no rank has started to record here; give a recording (the folder TRACING_DIR)"
            )
        for growing, rank in self._files.values():
            try:
                for _ in range(_MOST_LOOKS):
                    rank.take(growth := growing.look())
                    if not growth.goes_on:
                        break
                self.problems.pop(growing.path, None)
            except BudgetError as error:
                self.problems[growing.path] = str(error)
            except OSError as error:
                self.problems[growing.path] = f"{growing.path}: {one_line(error)}"
        contents = {rank: file.content for rank, (_, file) in self._files.items()}
        return snapshot(self.folder, contents, time.time(), self._hang())

    def _hang(self) -> str:
        """Return the verdict of the job, unless a rank made a call after it."""
        path = Path(self.folder, VERDICT)
        try:
            written = path.stat().st_mtime
            found = msgspec.json.decode(read_small(path), type=Diagnosis)
            self.problems.pop(str(path), None)
        except BudgetError as error:
            self.problems[str(path)] = str(error)
            return ""
        except (OSError, *BROKEN):
            return ""
        contents = [file.content for _, file in self._files.values() if file.content.calls]
        goes_on = any((one.wall(one.calls[-1].t) or 0) / 1e9 > written for one in contents)
        return "" if goes_on or found.verdict in (OVER, SLOW) else hang_text(found)


def _is_faulty(found: Snapshot) -> bool:
    unheard = any((one["unheard_s"] or 0) > SILENT for one in found.ranks)
    return bool(found.missing_ranks or found.hang or unheard)


def _print(arguments: argparse.Namespace, found: Snapshot) -> None:
    if arguments.json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    elif arguments.once or not sys.stdout.isatty():
        sys.stdout.write(as_text(found, arguments.top) + ("" if arguments.once else "\n"))
    else:
        terminal(sys.stdout).write(_CLEAR + as_text(found, arguments.top))
    sys.stdout.flush()


def _serve(arguments: argparse.Namespace, metrics: Metrics) -> None:
    """Serve metrics if --metrics is given."""
    if arguments.metrics is None:
        return
    try:
        from prometheus_client import start_http_server

        server, _ = start_http_server(arguments.metrics, arguments.host, metrics.registry())
    except ImportError as error:
        raise CrossrankError(
            f"--metrics needs prometheus-client ({error}); pip install 'crossrank[metrics]'"
        ) from error
    except OSError as error:
        where = f"{arguments.host}:{arguments.metrics}"
        raise CrossrankError(f"{where}: cannot listen there ({one_line(error)}); choose another port") from error
    print(f"metrics    http://{arguments.host}:{server.server_port}/metrics", file=sys.stderr)


def _write(arguments: argparse.Namespace, metrics: Metrics) -> None:
    """Write metrics to a file if --textfile is given."""
    if arguments.textfile is None:
        return
    try:
        from prometheus_client import write_to_textfile

        write_to_textfile(arguments.textfile, metrics.registry())
    except ImportError as error:
        raise CrossrankError(
            f"--textfile needs prometheus-client ({error}); pip install 'crossrank[metrics]'"
        ) from error


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 3600")
    return seconds


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)
