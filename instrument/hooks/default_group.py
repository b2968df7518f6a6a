"""Begins the files when the process initializes its default process group, so that a rank which has made no call yet
answers for itself. Counts how often it does: torch then uses names of groups again.

torch sets the default group by one function of its module, however a script imported `init_process_group`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import distributed_c10d

from crossrank.instrument.facts import Recording
from crossrank.instrument.hooks.patches import Patches
from crossrank.instrument.identity.process_groups import GroupTable
from crossrank.instrument.torch_private import has


class Grouped(Recording, Protocol):
    """A session that knows the process groups."""

    groups: GroupTable

    def begin_files(self) -> None:
        """Begin the files of the process group that exists now, unless they are begun."""


_patches = Patches()


def install(session: Grouped) -> None:
    if not has("default group"):
        return
    original, note = distributed_c10d._update_default_pg, session.groups.note_default
    if dist.is_initialized():
        note(dist.get_world_size())

    def update(pg: Any) -> Any:
        given = original(pg)
        if pg is not None:
            with suppress(Exception):  # an object of another library may raise anything
                note(pg.size())
            with session.failures.reported("the recording begins at the first communication"):
                session.begin_files()
        return given

    _patches.replace(distributed_c10d, "_update_default_pg", update)


def uninstall() -> None:
    _patches.undo()
