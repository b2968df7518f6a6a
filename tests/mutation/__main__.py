"""Samples mutations of the offline code and counts how many the unit tests notice: `python -m tests.mutation`.

The tests that run a line are found once with coverage.py; a mutation of the line runs those alone, in a copy of the
tree; of a constant or default, which no test runs by itself, the tests of its file. One that no test runs is not
noticed; one that makes a test hang is. `equivalent.txt` lists mutations that change nothing that can be seen, with the
reason.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from coverage.numbits import numbits_to_nums

from tests.mutation.sites import Site, sites

ROOT = Path(__file__).parents[2]
FOLDERS = ("tools/traces", "tools/job", "tools/graph", "tools/analysis", "replay/plan", "replay/results")
TESTS = (
    "tests/unit/traces",
    "tests/unit/job",
    "tests/unit/graph",
    "tests/unit/analysis",
    "tests/unit/replay",
    "tests/unit/test_inspect.py",
    "tests/golden",
)
_EQUIVALENT = Path(__file__).with_name("equivalent.txt")
_FEW_LINES, _MANY_LINES = 45, 15
"""How many tests of a line are run first: of those that run the fewest lines, and of those that run the most."""
_AT_IMPORT = 0
"""Stands for the lines of a file that run when it is imported, of which every test of the file is one."""
_PATIENCE_S = 300

Tests = dict[tuple[str, int], list[str]]
"""(file, line) -> the tests that run it."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="a part of the paths to take mutations from")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="the folders of tests that are to notice")
    arguments = parser.parse_args()
    equivalent = {line.split("  ", 1)[0] for line in _EQUIVALENT.read_text().splitlines() if line}
    every = [
        site
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "_pb2" not in path.name and arguments.only in str(path)
        for site in sites(str(path.relative_to(ROOT)), path.read_text())
    ]
    chosen = random.Random(arguments.seed).sample(every, min(arguments.samples, len(every)))
    with tempfile.TemporaryDirectory(prefix="crossrank-mutation-") as folder:
        tests = _tests_by_line(Path(folder), arguments.tests, arguments.jobs)
        with ThreadPoolExecutor(arguments.jobs) as pool:
            copies = [Path(folder) / str(number) for number in range(len(chosen))]
            noticed = []
            for site, one in zip(chosen, pool.map(partial(_is_noticed, tests), chosen, copies), strict=True):
                noticed.append(one or _text(site) in equivalent)
                if not noticed[-1]:
                    print(f"not noticed  {site.path}:{site.line}  {_text(site).partition(': ')[2]}", flush=True)
    _report(chosen, noticed)


def _text(site: Site) -> str:
    """A mutation as `equivalent.txt` names it, whatever line it stands on."""
    line = (ROOT / site.path).read_text().splitlines()[site.line - 1].strip()
    return f"{site.path}: {line} [{site.old}→{site.new}]"


def _tests_by_line(folder: Path, tests: Sequence[str], jobs: int) -> Tests:
    """Run all of `tests` once, and note which lines each of them runs."""
    data = folder / "coverage"
    words = [sys.executable, "-m", "pytest", "-q", "-n", str(jobs), "-p", "no:cacheprovider"]
    environment = _environment(ROOT) | {"COVERAGE_FILE": str(data)}
    subprocess.run(
        [*words, "--cov=.", "--cov-context=test", "--cov-report=", *tests],
        cwd=ROOT,
        env=environment,
        check=True,
        stdout=sys.stderr,
    )
    found: Tests = {}
    with sqlite3.connect(data) as connection:
        rows = connection.execute(
            "SELECT file.path, context.context, line_bits.numbits FROM line_bits "
            "JOIN file ON file.id = line_bits.file_id JOIN context ON context.id = line_bits.context_id "
            "WHERE context.context != ''"
        )
        lines_of: Counter[str] = Counter()
        for path, context, numbits in rows:
            name, test = str(Path(path).resolve().relative_to(ROOT)), context.partition("|")[0]
            lines = numbits_to_nums(numbits)
            lines_of[test] += len(lines)
            for line in (*lines, _AT_IMPORT):
                found.setdefault((name, line), []).append(test)
    # A test that runs little says most about the lines that it runs.
    return {place: sorted(set(of_line), key=lambda test: (lines_of[test], test)) for place, of_line in found.items()}


def _is_noticed(tests: Tests, site: Site, copy: Path) -> bool:
    """Whether a test fails with the mutation."""
    lines = (site.line, site.statement, _AT_IMPORT)
    of_line = next((tests[site.path, line] for line in lines if (site.path, line) in tests), [])
    first = list(dict.fromkeys((*of_line[:_FEW_LINES], *of_line[-_MANY_LINES:])))
    if not first:
        return False
    ignored = shutil.ignore_patterns(".venv", ".git", "__pycache__", ".*_cache", "demo*")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    (copy / ".pytest_cache").symlink_to(ROOT / ".pytest_cache")  # has the compiled recorder
    mutated = copy / site.path
    mutated.write_text(site.apply(mutated.read_text()))
    try:
        return any(_fails(copy, chosen) for chosen in (first, of_line[_FEW_LINES:-_MANY_LINES]) if chosen)
    finally:
        shutil.rmtree(copy)


def _fails(copy: Path, tests: Sequence[str]) -> bool:
    """Whether one of the tests fails, or they hang."""
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            words, cwd=copy, env=_environment(copy), capture_output=True, timeout=_PATIENCE_S, check=False
        )
        return done.returncode != 0
    except subprocess.TimeoutExpired:
        return True


def _environment(root: Path) -> dict[str, str]:
    return dict(os.environ) | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}


def _report(chosen: Sequence[Site], noticed: Sequence[bool]) -> None:
    for folder in (*FOLDERS, ""):
        of_folder = [one for site, one in zip(chosen, noticed, strict=True) if site.path.startswith(folder)]
        if of_folder:
            share = sum(of_folder) / len(of_folder)
            print(f"{folder or 'all':<16} {sum(of_folder):>4} of {len(of_folder):>4} noticed, {share:.0%}")


if __name__ == "__main__":
    main()
