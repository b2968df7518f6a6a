"""`crossrank build-kernel`."""

from __future__ import annotations

import argparse

from crossrank.instrument.compiled import build


class BuildKernelCommand:
    """Builds the kernel in C++ that records calls, for the torch and the Python that run this command.

    A job that finds none records in Python, at more cost per call, and has one built for the next job. An image that
    holds the kernel needs no compiler where it runs: run this while the image is made, with the HOME or XDG_CACHE_HOME
    that jobs have. It takes about 12 s and needs a C++ compiler; what failed before is tried again.

    Exit codes: 0 = the kernel is there, 2 = it cannot be built.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """None."""

    def run(self, arguments: argparse.Namespace) -> int:
        print(build.make(again=True))
        return 0
