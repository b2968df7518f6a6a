"""`python -m crossrank` is the `crossrank` command."""

import sys

from crossrank.tools.cli import main

sys.exit(main())
