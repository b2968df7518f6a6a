from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import pytest

from tests import touched
from tests.integration import fork_server, jobs
from tests.integration.commands import Commands
from tests.integration.world import TwoRanks, World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    world = World(2)
    yield world
    world.close()


@pytest.fixture
def two_ranks(world: World, tmp_path: Path) -> TwoRanks:
    return TwoRanks(world, tmp_path)


_OF_THE_RECORDER = (
    "exit",
    "flight",
    "interception",
    "iterations",
    "nvtx",
    "record",
    "session",
    "waits",
    "window",
)
"""Modules in tests/integration of which every test runs with both kernels."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.register(touched)


def pytest_configure(config: pytest.Config) -> None:
    """Kernels are built beside the tests, once, and not within the time that one of them has.

    So is the server that the processes of tests are forked from.
    """
    cache = config.rootpath / ".pytest_cache" / "kernels"
    cache.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(cache)
    if hasattr(config, "workerinput"):
        return
    fork_server.start_server()
    sources = sorted((config.rootpath / "instrument" / "compiled").iterdir())
    facts = [sys.version, version("torch"), *(str(path.stat().st_mtime_ns) for path in sources if path.is_file())]
    done = cache / sha256("".join(facts).encode()).hexdigest()[:16]
    if not done.exists():  # the tests say what is wrong with it
        strict = os.environ | {"CXX": f"{os.environ.get('CXX', 'c++')} -Werror"}
        subprocess.run([sys.executable, "-m", "crossrank", "build-recorder"], check=False, env=strict)
        done.touch()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__ in {f"tests.integration.test_{name}" for name in _OF_THE_RECORDER}:
        metafunc.fixturenames.append("recorder_kernel")
        metafunc.parametrize("recorder_kernel", ("compiled", "python"))


@pytest.fixture
def recorder_kernel() -> str:
    return "auto"


@pytest.fixture(autouse=True)
def _clean_environment(recorder_kernel: str) -> Iterator[None]:
    """A test sees no tracing variable of the shell that runs it, but for the kernel that it is about."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("TRACING", "TORCH_DISTRIBUTED_TRACING")):
                patch.delenv(name)
        patch.setenv("TRACING_RECORDER", recorder_kernel)
        yield


@pytest.fixture(autouse=True)
def _no_process_outlives_its_test() -> Iterator[None]:
    yield
    jobs.end_started()


@pytest.fixture
def scripts(tmp_path: Path) -> jobs.Scripts:
    return jobs.Scripts(tmp_path)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Commands:
    return Commands(capsys, tmp_path)
