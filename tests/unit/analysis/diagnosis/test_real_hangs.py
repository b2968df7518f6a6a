"""Jobs that really hung are diagnosed alike in whatever form their files arrive, and with any dump missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossrank.tools.cli import main
from tests.unit.analysis.diagnosis.real_hangs import Variant, outcome, read_hang, variants
from tests.unit.analysis.diagnosis.verdicts import diagnosis_of
from tests.unit.graph.linking.public_traces import needs_traces, public

VARIANTS = [
    "as is",
    *(f"without the dump of rank {rank}" for rank in range(16)),
    *(f"ranks permuted ({seed})" for seed in (1, 2, 3)),
    "files renamed",
    "as JSON",
    *(f"nodes of {ranks} {shift} s apart" for ranks in (4, 8) for shift in ("+3", "-3")),
    "without pg_status",
]


@pytest.fixture(scope="module")
def forms() -> dict[str, Variant]:
    folder = Path(public("flight_real"), "gpu_error")
    return {variant.name: variant for variant in variants(*read_hang(folder))}


@needs_traces
@pytest.mark.parametrize("name", VARIANTS)
def test_exactly_the_faulty_ranks_of_a_real_hang_are_named(
    name: str, forms: dict[str, Variant], tmp_path: Path
) -> None:
    variant = forms[name]
    variant.write(tmp_path)
    found = outcome(diagnosis_of(tmp_path))
    assert (found.verdict, found.named, found.lacking) == ("error", variant.faulty, variant.missing)
    assert found.suspects == variant.faulty  # a rank whose dump is missing is none while others explain the hang


@needs_traces
def test_every_variant_of_the_real_hang_is_tested(forms: dict[str, Variant]) -> None:
    assert list(forms) == VARIANTS


H200 = Path(__file__).parents[3] / "fixtures" / "h200"


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
def test_the_culprit_or_missing_data_of_an_nccl_hang_is_named(
    job: str, files: str, verdict: str, suspects: list[int], tmp_path: Path
) -> None:
    recording = Path(public("nccl_live"), job, files)
    assert main(["anonymize", str(recording), "-o", str(tmp_path / "anonymous")]) == 0
    for folder in (recording, tmp_path / "anonymous"):
        found = diagnosis_of(folder)
        assert (found.verdict, found.suspect_ranks) == (verdict, suspects)


@pytest.mark.parametrize(
    ("recording", "kind", "op", "suspects", "waiting"),
    [
        # Every host is in the first call of its group or pair when the hang is noticed: NCCL connects the ranks.
        ("hang-communicator", "all_joined_not_completed", "all_reduce", [], [0, 1, 2, 3]),
        ("hang-connection", "all_joined_not_completed", "send", [], [0, 1]),
        # Rank 0 runs its model once more than the others, whose calls end with what it calls then.
        ("hang-other-operations", "type_mismatch", "reduce_scatter", [0], []),
    ],
)
def test_h200_hangs_have_one_cause(recording: str, kind: str, op: str, suspects: list[int], waiting: list[int]) -> None:
    found = diagnosis_of(H200 / recording)
    (cause,) = found.findings
    assert (cause.kind, cause.op, cause.culprit_ranks, cause.waiting_ranks) == (kind, op, suspects, waiting)
