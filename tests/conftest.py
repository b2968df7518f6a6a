from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration import jobs
from tests.integration.world import World


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[World]:
    world = World(2)
    yield world
    world.close()


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test sees no tracing variable of the shell that runs it."""
    for name in list(os.environ):
        if name.startswith(("TRACING", "TORCH_DISTRIBUTED_TRACING")):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _no_process_outlives_its_test() -> Iterator[None]:
    yield
    jobs.end_started()


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Where `World.run` records to when its folder is `tmp_path`."""
    return tmp_path / "recording"
