"""Half a minute of mutated files: each is read or refused in one line, within its budget of time and memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.run import Fuzzer
from tests.fuzz.targets import workspace

pytestmark = pytest.mark.touches("crossrank", "tools", "replay", traced=False)


@pytest.mark.parametrize("seed", [1, 2])
def test_every_reader_and_command_takes_whatever_is_in_a_file(tmp_path: Path, seed: int) -> None:
    workspace(tmp_path)
    fuzzer = Fuzzer(tmp_path, seed)

    fuzzer.run(seconds=12)

    assert not [str(finding) for outcome in fuzzer.outcomes for finding in outcome.findings]
    assert fuzzer.outcomes[0].counts.total() > 0


def test_an_input_depends_on_its_number_and_the_seed_alone(tmp_path: Path) -> None:
    runs = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        workspace(tmp_path / name)
        fuzzer = Fuzzer(tmp_path / name, 3)
        fuzzer.run(seconds=60, inputs=40)
        runs.append([dict(outcome.counts) for outcome in fuzzer.outcomes])

    assert runs[0] == runs[1]


def test_every_reader_and_command_takes_the_file_that_is_not_mutated(tmp_path: Path) -> None:
    workspace(tmp_path)
    fuzzer = Fuzzer(tmp_path)

    ended = {
        f"{target.name} ({target.file})": fuzzer.given(target, (tmp_path / target.file).read_bytes())
        for target in fuzzer.targets
    }

    assert {name: how for name, how in ended.items() if how not in (("read", ""), ("0", ""), ("1", ""))} == {}
