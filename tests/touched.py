"""Which tests a change can touch, where pytest-testmon cannot see it: hooks for `make test` and `make quick`.

testmon traces what a test runs in its own process, but not in the processes that the test starts. So a test in
tests/integration depends on the whole recorder too. A test with `@pytest.mark.touches("tools", …)` depends on every
file of those folders; with `traced=False` on nothing else: it runs all that is there, which takes long to trace.

To trace a test takes half as long again. So `make test` traces only those of which what they run is not noted yet, or
has changed since.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from coverage import Coverage

ROOT = Path(__file__).parents[1]
_STARTS_PROCESSES = ROOT / "tests" / "integration"
_RECORDER = ("crossrank", "instrument")
_BROAD_S = 8.0
"""Of the seconds to take, those for tests that any change touches."""
_LEFT_OUT = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--at-most", type=float, metavar="S", help="leave out the longest tests, to take S seconds")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "touches(*folders, traced=True): any change in them may touch the test")
    config.stash[_LEFT_OUT] = Counter()


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test whose notes hold is not traced. Runs within testmon's own hook, which begins to trace."""
    with _not_traced() if _is_noted(item.nodeid, item.config) else nullcontext():
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Keep the notes that hold. Runs around testmon's own hook, which puts those of a batch of tests in a report."""
    report = yield
    lines = getattr(report, "nodes_files_lines", {})
    for name in [name for name in lines if _is_noted(name, item.config)]:
        del lines[name]
    return report


def _is_noted(test: str, config: pytest.Config) -> bool:
    """Whether what a test runs is noted, and has not changed since, and the test passed."""
    data = _notes(config)
    return data is not None and test in data.stable_test_names and test not in data.failing_tests


def _notes(config: pytest.Config) -> Any:
    """testmon's notes, or None where it does not run; what else traces, such as `--cov`, goes on undisturbed."""
    return getattr(config, "testmon_data", None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    with _not_traced() if _is_untraced(item) and _notes(item.config) else nullcontext():
        yield


@contextmanager
def _not_traced() -> Iterator[None]:
    tracer = Coverage.current()
    if tracer is not None:
        tracer.stop()
    try:
        yield
    finally:
        if tracer is not None and Coverage.current() is not tracer:  # testmon starts it again where a batch ends
            tracer.start()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    yield
    tracer = Coverage.current()
    folders = {folder for mark in item.iter_markers("touches") for folder in mark.args}
    if item.path.is_relative_to(_STARTS_PROCESSES):
        folders.update(_RECORDER)
    if tracer is not None and folders and _notes(item.config):
        data = tracer.get_data()
        data.set_context(item.nodeid)
        data.add_lines({file: lines for folder in folders for file, lines in _lines_of(folder).items()})


@cache
def _lines_of(folder: str) -> dict[str, list[int]]:
    """File -> a line of each of its functions and one outside of them, which stand for all of its lines."""
    pattern = "*.py" if folder == "crossrank" else "**/*.py"  # the links in it lead to the other folders
    return {str(path): list(_first_lines(path)) for path in sorted((ROOT / folder).glob(pattern))}


def _first_lines(path: Path) -> Iterator[int]:
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module) and node.body:
            yield node.body[0].lineno


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    as_collected = list(items)
    yield
    seconds: float | None = config.getoption("--at-most")
    if seconds is None:
        # testmon sorts them by their time, and what takes longest would run alone at the end.
        selected = set(items)
        items[:] = [item for item in as_collected if item in selected]
        return
    known: dict[str, Any] = config.testmon_data.all_tests  # type: ignore[attr-defined]
    took = {item: (known.get(item.nodeid) or {}).get("duration") or 0.0 for item in items}
    processes = int(getattr(config, "workerinput", {}).get("workercount", 1))
    kept = {item for item, total in _adding_up(items, took) if total <= seconds * processes}
    kept -= {item for item, total in _adding_up(filter(_is_untraced, items), took) if total > _BROAD_S * processes}
    left_out = [item for item in items if item not in kept]
    items[:] = [item for item in items if item in kept]
    config.hook.pytest_deselected(items=left_out)
    _note_left_out(config, Counter(item.nodeid.partition("::")[0] for item in left_out))


def _adding_up(items: Iterable[pytest.Item], took: dict[pytest.Item, float]) -> Iterator[tuple[pytest.Item, float]]:
    """The items, those that take least time first, and the seconds up to the end of each."""
    ordered = sorted(items, key=lambda item: (took[item], item.nodeid))
    return zip(ordered, accumulate(took[item] for item in ordered), strict=True)


def _is_untraced(item: pytest.Item) -> bool:
    return any(mark.kwargs.get("traced") is False for mark in item.iter_markers("touches"))


def _note_left_out(config: pytest.Config, files: Counter[str]) -> None:
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_out"] = dict(files)
    config.stash[_LEFT_OUT] = files


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[_LEFT_OUT] = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.section("time of each folder")
    for folder, seconds in _time_by_folder(terminalreporter.stats.values()).items():
        terminalreporter.write_line(f"{seconds:8.1f}s {folder}")
    files = config.stash[_LEFT_OUT]
    if files:
        names = ", ".join(f"{Path(file).stem} ({count})" for file, count in files.most_common(8))
        rest = f" and {len(files) - 8} more files" if len(files) > 8 else ""
        line = f"{files.total()} tests that the change may touch did not run; make test runs them: {names}{rest}"
        terminalreporter.section("left out")
        terminalreporter.write_line(line)


def _time_by_folder(reports: Iterable[Iterable[Any]]) -> dict[str, float]:
    """Seconds of the tests under each folder of `tests`, in all processes together, the longest first."""
    took: dict[str, float] = defaultdict(float)
    for report in (one for some in reports for one in some if isinstance(one, pytest.TestReport)):
        took["/".join(Path(report.nodeid.partition("::")[0]).parts[:2])] += report.duration
    return dict(sorted(took.items(), key=lambda folder: -folder[1]))
