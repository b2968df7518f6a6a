"""`crossrank build-recorder`."""

from __future__ import annotations

import argparse
import json

from crossrank.instrument.compiled import build


class BuildRecorderCommand:
    """Compile the C++ recorder for the torch and the Python that run this command. Takes about 12 s, longer on a busy
    machine, and needs a C++ compiler. The limit is an hour.

    If you do not run this command, a job records in Python, which costs more per call, and compiles the recorder for
    the next job. Run this while you build an image, with the HOME or XDG_CACHE_HOME of your jobs. The image then needs
    no compiler.

    Exit code 2: the recorder cannot be compiled.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print the path of the recorder as JSON")

    def run(self, arguments: argparse.Namespace) -> int:
        path = build.make(again=True, patience=build.PATIENCE_OF_COMMAND)
        print(json.dumps({"recorder": str(path)}) if arguments.json else path)
        return 0
