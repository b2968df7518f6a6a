"""Writes the answers anew: `python -m tests.golden`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.golden.answers import SMALL, TRACES, answers, answers_on_a_copy, as_text, golden_file
from tests.unit.graph.linking.public_traces import public

for name in SMALL:
    with tempfile.TemporaryDirectory() as folder:
        golden_file(f"small-{name}").write_text(as_text(answers_on_a_copy(name, Path(folder))))
for trace in TRACES if Path(public(TRACES[0])).is_dir() else ():
    with tempfile.TemporaryDirectory() as folder:
        golden_file(trace).write_text(as_text(answers(Path(public(trace)), Path(folder))))
