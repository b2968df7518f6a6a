"""torch's flight recorder is switched on where nobody has said otherwise."""

from __future__ import annotations

import os

import pytest
import torch

from crossrank.instrument.hang.torch_recorder import calls_kept, switch_on

NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


@pytest.mark.parametrize(
    ("version", "given", "expected"),
    [
        ("2.13.0+cu130", {}, {NAMES[0]: "2000"}),
        ("2.10.0+cu128", {}, {NAMES[0]: "2000"}),
        ("2.8.0+cu128", {}, {NAMES[1]: "2000"}),
        ("2.10.0+cu128", {NAMES[0]: "0"}, {NAMES[0]: "0"}),
        ("2.10.0+cu128", {NAMES[1]: "300"}, {NAMES[1]: "300"}),
    ],
)
def test_torch_keeps_its_last_calls_unless_the_user_sets_a_number(
    version: str, given: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch, "__version__", version)
    switch_on()
    assert {name: os.environ[name] for name in NAMES if name in os.environ} == expected
    assert calls_kept() == int(next(iter(expected.values())))
