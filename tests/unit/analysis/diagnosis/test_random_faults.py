"""What is found in jobs with faults drawn at random stays as it is, until `random_faults.json` is written anew."""

from __future__ import annotations

import json

import pytest

from tests.unit.analysis.diagnosis.random_faults import ANSWERS, SEEDS, answer


@pytest.mark.parametrize("first", SEEDS[::50])
def test_answers_do_not_change(first: int) -> None:
    wanted = json.loads(ANSWERS.read_text())
    seeds = SEEDS[first : first + 50]
    assert {seed: answer(seed) for seed in seeds} == {seed: wanted[str(seed)] for seed in seeds}


def test_the_verdict_on_whole_dumps_shows_if_the_job_hangs() -> None:
    whole = {seed: one for seed, one in json.loads(ANSWERS.read_text()).items() if one["whole"]}
    assert len(whole) >= 30
    assert {seed: one["verdict"] != "ok" for seed, one in whole.items()} == {
        seed: bool(one["stuck"]) for seed, one in whole.items()
    }
