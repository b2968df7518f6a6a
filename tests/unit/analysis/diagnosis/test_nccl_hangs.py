"""Jobs that hung on PyTorch's own ProcessGroupNCCL: from crossrank's files, and from torch's dumps alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.analysis.diagnosis.verdicts import diagnosis_of
from tests.unit.graph.linking.public_traces import needs_traces, public


@needs_traces
@pytest.mark.parametrize(
    ("job", "files", "verdict", "suspects"),
    [
        # Every call blocks in its launch, where torch takes it for completed.
        ("sleep_forever.block", "rec", "error", [1]),
        ("sleep_forever.block", "torch", "error", [1]),
        ("recv_without_send.block", "rec", "error", [1]),
        ("recv_without_send.block", "torch", "error", [1]),
        # Three ranks wait for a communicator to be made, of which torch's dumps say nothing.
        ("comm_init.lazy", "rec", "error", [3]),
        ("comm_init.lazy", "torch", "incomplete", []),
        ("skip_allreduce.lazy", "rec", "error", [2]),
        ("skip_allreduce.lazy", "torch", "error", [2]),
        ("first_send.lazy", "rec", "error", [2]),
        ("healthy_ddp.lazy", "rec", "ok", []),
    ],
)
def test_a_hang_on_nccl_names_its_culprit_or_says_what_is_missing(
    job: str, files: str, verdict: str, suspects: list[int]
) -> None:
    found = diagnosis_of(Path(public("nccl_live"), job, files))
    assert (found.verdict, found.suspect_ranks) == (verdict, suspects)
