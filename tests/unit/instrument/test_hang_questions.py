"""A question of one rank is heard by all, over the store of the job or the folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from crossrank.instrument.hang.questions import Questions
from crossrank.instrument.store_requests import StoreRequests
from crossrank.recording import list_recording


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Questions, Questions]]:
    """Two ranks that share a store; each writes to a folder that the other does not see."""
    store = dist.HashStore()
    ranks = tuple(Questions(tmp_path, 2, lambda: store) for _ in range(2))
    for number, one in enumerate(ranks):
        one._path = tmp_path / str(number) / one._path.name
        one._path.parent.mkdir()
        one.start()
        assert until(one._is_alive)
    yield ranks[0], ranks[1]
    for one in ranks:
        one.stop()


def test_a_question_is_heard_once_over_the_store(two: tuple[Questions, Questions]) -> None:
    asks, hears = two
    assert not hears.hear()
    asks.ask()
    assert until(hears.hear)
    assert not hears.hear()
    assert asks.hear()


def test_ranks_without_a_store_hear_a_question_through_the_folder(tmp_path: Path) -> None:
    asks, hears = (Questions(tmp_path, 2, lambda: None) for _ in range(2))
    assert (hears.hear(), hears.asked_at()) == (False, 0)
    asks.ask()
    assert asks.hear()
    assert until(hears.hear)
    assert not hears.hear()
    assert hears.asked_at() > 0
    assert not list_recording(str(tmp_path)).unrecognized  # the question is no file of the job


def test_a_question_from_before_this_rank_began_is_not_heard(tmp_path: Path) -> None:
    Questions(tmp_path, 2, lambda: None).ask()
    assert not Questions(tmp_path, 2, lambda: None).hear()


def test_questions_that_start_when_the_recording_has_ended_ask_no_store(tmp_path: Path) -> None:
    """A thread in a request would end the process while the interpreter shuts down."""
    requests = StoreRequests()
    found: list[str] = []

    def find_store() -> None:
        found.append("asked")

    late = Questions(tmp_path, 2, find_store, requests=requests)
    requests.end()
    late._listen()
    late.ask()
    assert found == []


def test_the_end_waits_for_the_request_under_way() -> None:
    requests, begun, may_end = StoreRequests(), threading.Event(), threading.Event()
    order: list[str] = []

    def ask() -> None:
        with requests.one() as may_ask:
            begun.set()
            may_end.wait()
            order.append(f"asked {may_ask}")

    def end() -> None:
        requests.end()
        order.append("ended")

    asking, ending = threading.Thread(target=ask), threading.Thread(target=end)
    asking.start()
    begun.wait()
    ending.start()
    assert until(lambda: requests.ended)
    may_end.set()
    ending.join()
    asking.join()
    assert order == ["asked True", "ended"]
    with requests.one() as may_ask:
        assert not may_ask
