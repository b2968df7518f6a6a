"""Which rank diagnoses a job that hangs, and when."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crossrank.instrument.hang.response import _Silence


def turn(rank: int, places: dict[int, str] | None, folder: Path) -> float:
    """Seconds that a rank leaves to the others before it diagnoses; `places`: the nodes of the ranks that are known."""
    known = {other: (node, None) for other, node in (places or {}).items()}
    session: Any = SimpleNamespace(
        rank=rank,
        world_size=4,
        recorder=SimpleNamespace(calls=lambda: 0),
        topology=None if places is None else SimpleNamespace(places=known),
    )
    return _Silence(session, folder, 1.0)._turn()


@pytest.mark.parametrize(
    ("rank", "places", "seconds"),
    [
        (0, {0: "a", 1: "a"}, 0.0),
        (1, {0: "a", 1: "a"}, 1.0),
        (1, None, 1.0),
        (3, {0: "a", 1: "a", 2: "b", 3: "b"}, 9.0),
        (5, {0: "a", 2: "b", 3: "b", 4: "c", 5: "c"}, 10.0),
        (3, {2: "b", 3: "b"}, 1.0),  # it is not known where rank 0 is
        (99, {rank: str(rank) for rank in range(100)}, 38.0),
    ],
)
def test_rank_0_comes_first_then_its_node_then_the_others_in_order(
    rank: int, places: dict[int, str] | None, seconds: float, tmp_path: Path
) -> None:
    assert turn(rank, places, tmp_path) == seconds
