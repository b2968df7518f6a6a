"""Fuzzing as long as one likes: `python -m tests.fuzz --seconds 600 --seed 7`."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

from tests.fuzz.run import Fuzzer
from tests.fuzz.targets import TARGETS, workspace


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Mutated files, every reader and command."
    )
    parser.add_argument("--seconds", type=float, default=30, help="how long (default: %(default)s)")
    parser.add_argument("--inputs", type=int, help="how many at most (default: as many as there is time for)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other inputs (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only readers and commands with TEXT in their name")
    parser.add_argument("--number", type=int, help="this input alone, as a finding names it")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the inputs that are findings there")
    arguments = parser.parse_args()
    targets = [target for target in TARGETS if arguments.only in f"{target.name} ({target.file})"]
    with tempfile.TemporaryDirectory(prefix="crossrank-fuzz-") as folder:
        workspace(Path(folder))
        tell = partial(print, file=sys.stderr, flush=True)
        fuzzer = Fuzzer(Path(folder), arguments.seed, targets, arguments.keep, tell)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background too
        with suppress(KeyboardInterrupt):  # the table of what was done so far
            if arguments.number is not None:
                for outcome in fuzzer.outcomes:
                    fuzzer.one(outcome, arguments.number)
            else:
                fuzzer.run(arguments.seconds, arguments.inputs)
    print(fuzzer.table())
    return 1 if any(outcome.findings for outcome in fuzzer.outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
