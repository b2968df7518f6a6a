"""Writes the answers anew: `python -m tests.golden`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.golden.answers import TRACES, answers, as_text, golden_file
from tests.unit.graph.linking.public_traces import public

for trace in TRACES:
    with tempfile.TemporaryDirectory() as folder:
        golden_file(trace).write_text(as_text(answers(Path(public(trace)), Path(folder))))
    print(golden_file(trace))
