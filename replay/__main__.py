"""`torchrun … -m crossrank.replay TRACE`: `crossrank replay` for launchers that start a module."""

from __future__ import annotations

import sys

from crossrank.tools.cli import main

if __name__ == "__main__":
    sys.exit(main(["replay", *sys.argv[1:]]))
