"""Real traces of NCCL: times that were read off the raw kernels by other means."""

from __future__ import annotations

import json
from typing import Any

import pytest

from crossrank.tools.cli import main
from tests.unit.linking.public_traces import needs_traces, public

pytestmark = needs_traces


def bandwidth_of(name: str, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    main(["bandwidth", public(name), "--json", "--jobs", "1", *words])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_eight_ranks_on_clocks_of_their_own_agree_to_some_us(capsys: pytest.CaptureFixture[str]) -> None:
    found = bandwidth_of("dlrm_8gpu", capsys)
    assert (found["calls"], found["timed_calls"], found["collectives"], found["unattributed"]) == (64, 64, 8, {})
    assert found["clocks"]["count"] == 8
    # Their kernels wait up to 6 ms for each other, and end within some us once the clocks are brought together.
    assert found["clocks"]["residual_us"]["max"] < 10
    all_reduces = [row for row in found["rows"] if row["op"] == "all_reduce"]
    # The shortest of the eight kernels of each, and 7/4 of S over that.
    figures = [(row["bytes"], row["time_us"]["p50"], round(row["busbw_gb_per_s"]["p50"], 1)) for row in all_reduces]
    assert sorted(figures) == [(448, 20.0, 0.0), (907_840, 69.0, 23.0), (1_576_964, 86.0, 32.1)]
    assert all(row["upper_bounds"] == 0 for row in found["rows"])


def test_one_of_two_ranks_gives_upper_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    found = bandwidth_of("nccl_2gpu", capsys, "--by", "op")
    assert found["missing_ranks"] == [1]
    assert {row["op"]: (row["collectives"], row["upper_bounds"]) for row in found["rows"]} == {
        "all_reduce": (15, 15),
        "broadcast": (6, 6),
    }
    assert all(row["waiting_us"] is None for row in found["rows"])


def test_dumps_with_timing_give_durations_without_clocks(capsys: pytest.CaptureFixture[str]) -> None:
    found = bandwidth_of("flight/clean", capsys)
    assert (found["sources"], found["calls"], found["timed_calls"]) == ({"flight": 4}, 80, 80)
    assert found["clocks"]["note"] == "4 clocks, and nothing tells when collectives ended: they are not compared"
