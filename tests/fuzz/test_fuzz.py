"""Half a minute of mutated files: each is read or refused in one line, within its budget of time and memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import mutate
from tests.fuzz.run import Fuzzer
from tests.fuzz.targets import TARGETS, workspace

pytestmark = pytest.mark.touches("crossrank", "tools", "replay", traced=False)


@pytest.mark.parametrize("seed", [1, 2])
def test_every_reader_and_command_handles_any_file_content(tmp_path: Path, seed: int) -> None:
    workspace(tmp_path)
    fuzzer = Fuzzer(tmp_path, seed)

    fuzzer.run(seconds=12)

    assert not [str(finding) for outcome in fuzzer.outcomes for finding in outcome.findings]
    assert fuzzer.outcomes[0].counts.total() > 0


def test_an_input_depends_only_on_its_number_and_the_seed(tmp_path: Path) -> None:
    runs = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        workspace(tmp_path / name)
        fuzzer = Fuzzer(tmp_path / name, 3)
        fuzzer.run(seconds=60, inputs=40)
        runs.append([dict(outcome.counts) for outcome in fuzzer.outcomes])

    assert runs[0] == runs[1]


def test_every_reader_and_command_accepts_the_unmutated_file(tmp_path: Path) -> None:
    workspace(tmp_path)
    fuzzer = Fuzzer(tmp_path)

    ended = {
        f"{target.name} ({target.file})": fuzzer.given(target, (tmp_path / target.file).read_bytes())
        for target in fuzzer.targets
    }

    assert {name: how for name, how in ended.items() if how not in (("read", ""), ("0", ""), ("1", ""))} == {}


@pytest.mark.parametrize("number", [(1 << 62) - 1, 1 << 64, -(1 << 63) - 1])
def test_every_reader_handles_numbers_of_any_size_in_any_field(number: int, tmp_path: Path) -> None:
    workspace(tmp_path)
    fuzzer = Fuzzer(tmp_path)
    readers = [target for target in TARGETS if target.read and target.mutation in (mutate.json_tree, mutate.json_lines)]

    ended = {
        f"{target.name}: {name}": fuzzer.given(target, content)[1]
        for target in readers
        for name, content in mutate.with_number((tmp_path / target.file).read_bytes(), number)
    }

    assert len(ended) > 300
    assert {field: problem for field, problem in ended.items() if problem} == {}
