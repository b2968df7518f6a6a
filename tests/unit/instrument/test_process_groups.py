"""The process groups of a rank, and the epochs of its default group."""

from __future__ import annotations

from crossrank.instrument.identity.process_groups import GroupTable


def test_epochs_count_default_groups_of_one_size() -> None:
    groups = GroupTable(lambda _: None)
    epochs = []
    for size in (4, 4, 4, 2, 2, 4):
        groups.note_default(size)
        epochs.append(groups.epoch)
    assert epochs == [0, 1, 2, 0, 1, 0]
