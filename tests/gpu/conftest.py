"""What the tests share: how ranks share the machine, one recording of a training job, and the results."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
from filelock import FileLock  # torch needs it too

from tests.gpu import machine
from tests.gpu.machine import CUDA, DEVICE, STAND_IN, Done, Way
from tests.gpu.results import FOLDER, Summary, keep_log

T = TypeVar("T")
SUMMARY = Summary()
_ORDER = ("ways", "recording", "windows", "hangs", "replay", "graphs", "overhead", "identity")
"""Modules, those of most worth first: what the deadline cuts off is at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    own = [one for one in items if Path(__file__).parent in one.path.parents]
    if not DEVICE:
        reason = "not asked for: `make gpu` runs it on a machine with a GPU, `make gpu-cpu` with gloo"
        for one in own:
            one.add_marker(pytest.mark.skip(reason=reason))
    elif own:
        items.sort(key=lambda one: _ORDER.index(one.path.stem.removeprefix("test_")) if one in own else -1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what the machine cannot do, or what the time that is left is too short for."""
    needs = item.get_closest_marker("needs")
    if not DEVICE or needs is None:
        return
    if needs.kwargs.get("cuda") and not CUDA:
        pytest.skip("needs CUDA")
    if needs.kwargs.get("real") and STAND_IN:
        pytest.skip("needs a GPU that computes, and the speed of one")
    seconds = needs.kwargs.get("seconds", 10)
    if machine.seconds_left() < seconds:
        pytest.skip(f"{machine.seconds_left():.0f} s are left of the deadline, it needs {seconds}")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if DEVICE and (report.when == "call" or report.outcome != "passed"):
        said = "" if report.outcome == "passed" else str(report.longrepr)[-1500:]
        SUMMARY.note(item.name, outcome=report.outcome, seconds=round(report.duration, 1), said=said)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if DEVICE:
        for line in (*SUMMARY.table(), f"results in {FOLDER}"):
            terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def _log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    yield
    keep_log(request.node.name, tmp_path)


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Any:
    """Puts facts into the summary: `note(seconds=3.2)`."""
    return lambda **facts: SUMMARY.note(request.node.name, **facts)


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], T]) -> T:
    """Return what `make` returns for a new folder. It runs once for all workers of pytest."""
    shared = factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else factory.getbasetemp()
    made = shared / f"{name}.pickle"
    with FileLock(f"{made}.lock"):
        if not made.exists():
            made.write_bytes(pickle.dumps(make(factory.mktemp(name))))
        content: T = pickle.loads(made.read_bytes())
    return content


class Ways(NamedTuple):
    """How jobs ran that were started in each way."""

    found: Way
    tried: dict[str, Done]
    refused: Done | None
    """Two ranks that NCCL is told nothing about."""


@pytest.fixture(scope="session")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Ways:
    """Which way lets two ranks share the machine."""
    return once(tmp_path_factory, "ways", _try_ways) if CUDA else Ways(machine.GLOO, {}, None)


def _try_ways(folder: Path) -> Ways:
    done = machine.run_job("hello", folder / "own-hosts", machine.OWN_HOSTS, 75, fails=True)
    refused = machine.run_job("hello", folder / "as-they-are", machine.AS_THEY_ARE, 40, fails=True)
    keep_log("ways", folder)
    return Ways(machine.OWN_HOSTS if done.code == 0 else machine.ONE_RANK, {"own hosts": done}, refused)


@pytest.fixture
def way(ways: Ways, request: pytest.FixtureRequest) -> Way:
    """How the ranks of the test share the machine; the test is skipped where it needs more ranks than that allows."""
    needs = request.node.get_closest_marker("needs")
    ranks = needs.kwargs.get("ranks", 1) if needs is not None else 1
    if ranks > ways.found.ranks:
        pytest.skip(f"needs {ranks} ranks, and NCCL has one here")
    return ways.found


class Recorded(NamedTuple):
    """The training job, recorded."""

    folder: Path
    recording: Path
    done: Done


@pytest.fixture(scope="session")
def recorded(ways: Ways, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    def record(folder: Path) -> Recorded:
        done = machine.run_job("training", folder, ways.found, 150, fails=True)
        keep_log("training", folder)
        return Recorded(folder, folder / "recording", done)

    return once(tmp_path_factory, "training", record)
