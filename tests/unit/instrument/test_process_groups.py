"""The process groups of a rank, and the epochs of its default group."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from crossrank.instrument.identity.process_groups import GroupTable


def test_epochs_count_default_groups_of_one_size() -> None:
    groups = GroupTable(lambda _: None)
    epochs = []
    for size in (4, 4, 4, 2, 2, 4):
        groups.note_default(size)
        epochs.append(groups.epoch)
    assert epochs == [0, 1, 2, 0, 1, 0]


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=100))
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_a_group_is_limited_whose_timeout_is_shorter_than_that_of_the_default_group() -> None:
    for seconds in (None, 9, 99, 100, 2000):
        dist.new_group(timeout=None if seconds is None else timedelta(seconds=seconds))
    groups, world = GroupTable(lambda _: None), dist.group.WORLD
    assert world is not None
    groups.add_all(world)
    assert groups.limited() == ["2", "3"]
