"""A real hang is diagnosed alike in whatever form its dumps arrive, and with any one of them missing."""

from __future__ import annotations

from pathlib import Path

import pytest

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
def test_every_faulty_rank_of_a_real_hang_is_named_and_no_other(
    name: str, forms: dict[str, Variant], tmp_path: Path
) -> None:
    variant = forms[name]
    variant.write(tmp_path)

    found = outcome(diagnosis_of(tmp_path))

    assert (found.verdict, found.named, found.lacking) == ("error", variant.faulty, variant.missing)
    assert found.suspects == variant.faulty  # a rank whose dump is missing is none while others explain the hang


@needs_traces
def test_no_form_of_the_real_hang_is_left_out(forms: dict[str, Variant]) -> None:
    assert list(forms) == VARIANTS
