"""The process groups of this rank: identity, true global ranks, counters.

A destroyed group must die although it was recorded, so a `GroupState` is found by the group's id and goes when
the group does; it holds no reference to it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import orjson
import torch.distributed as dist
from torch.distributed import distributed_c10d

from crossrank.comm import Group
from crossrank.errors import one_line
from crossrank.instrument.log import log
from crossrank.instrument.record.descriptor import GroupState
from crossrank.instrument.torch_private import has


class GroupTable:
    """Finds the state of a process group, and makes it when a group is first seen."""

    def __init__(self, on_new: Callable[[GroupState], None], *, timing: bool = False) -> None:
        """`timing`: have torch measure how long calls take, for its flight recorder."""
        self._states: dict[int, GroupState] = {}
        self._on_new = on_new
        self._timing = timing
        self._lock = threading.RLock()  # training and the writer's thread both look for new groups
        self.by_id = self._states.get
        """State of the group with this id, or None: the look-up of the hot path."""

    def add(self, group: dist.ProcessGroup) -> GroupState:
        """The state of `group`, made and announced if this is the first time."""
        with self._lock:
            key = id(group)
            known = self._states.get(key)
            if known is not None:
                return known
            state = self._states[key] = _read(group)
            weakref.finalize(group, self._states.pop, key, None).atexit = False
            if self._timing and has("timing"):
                _measure(group)
            self._on_new(state)
            return state

    def add_all(self, world: dist.ProcessGroup) -> None:
        """Take in every group that torch knows, also those that have not communicated yet.

        None where `world` is not the default one any more: the others belong to files that are yet to begin.
        """
        groups = list(distributed_c10d._world.pg_map) if has("process groups") else []
        # Asked after the list is made: torch takes the default one away before and adds it after the others.
        for group in groups if dist.group.WORLD is world else ():
            # A group that is just being made is in the one table before it is in the other, without its ranks.
            if isinstance(group, dist.ProcessGroup) and group in distributed_c10d._world.pg_group_ranks:
                try:
                    self.add(group)
                except Exception as error:  # a subclass from elsewhere may raise anything
                    log.debug("crossrank: cannot describe a process group: %s", one_line(error))

    def announce_all(self) -> None:
        """Announce what is known already once more: to a file that has just begun."""
        for state in list(self._states.values()):
            self._on_new(state)

    def describe(self) -> list[Group]:
        """Every group that is known now."""
        return [state.group for state in list(self._states.values())]

    def shortest_timeout(self) -> float | None:
        """The shortest timeout of a group of more than one rank, in seconds; None where none is known."""
        timeouts = (state.timeout for state in list(self._states.values()) if state.group.size > 1)
        return min((timeout for timeout in timeouts if timeout), default=None)

    def unseen_kinds(self) -> list[str]:
        """Groups whose calls do not pass the dispatcher: subclasses of ProcessGroup written in Python."""
        if not has("process groups"):
            return []
        return [
            f"process group {name!r} is a {type(group).__name__}, a Python class that bypasses the dispatcher"
            for group, name in list(distributed_c10d._world.pg_names.items())
            if type(group) is not dist.ProcessGroup and type(group).__module__ != "torch._C._distributed_c10d"
        ]


def _measure(group: dist.ProcessGroup) -> None:
    try:
        group._enable_collectives_timing()  # type: ignore[attr-defined]
    except RuntimeError as error:  # a backend that cannot
        log.debug("crossrank: torch does not measure the calls of a process group: %s", one_line(error))


def _read(group: dist.ProcessGroup) -> GroupState:
    size = group.size()
    ranks: list[int] | None
    try:
        ranks = list(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        # Made outside torch's registry. One that is as large as the job can only hold everybody.
        ranks = list(range(size)) if dist.is_initialized() and size == dist.get_world_size() else None
    try:
        backend = str(dist.get_backend_config(group))
    except (KeyError, ValueError, RuntimeError, AssertionError, TypeError):  # by version, of a group that torch forgot
        backend = group.name()
    return GroupState(
        group=Group(
            pg=group.group_name,
            size=size,
            ranks=ranks,
            desc=group.group_desc,
            backend=backend,
            eager=getattr(group, "bound_device_id", None) is not None,
        ),
        rank=group.rank(),
        timeout=_timeout_of(group),
    )


def _timeout_of(group: dist.ProcessGroup) -> float | None:
    """The shortest timeout of the group's backends in seconds."""
    if not has("timeouts"):
        return None
    found: list[float] = []
    for device in group._device_types:
        try:
            options = group._get_backend(device).options
            found.append(options._timeout.total_seconds())
        except Exception as error:  # a backend without options, or one that is loaded only when it is used
            log.debug("crossrank: a process group has no timeout: %s", one_line(error))
    return min(found, default=None)


def process_group_config() -> str:
    """The process groups of this rank as JSON, in the layout of torch's `## process_group:init ##` node.

    torch writes `"ranks": []` for a group of the whole world there; this gives every group its global ranks.
    """
    if not has("process groups"):
        return "[]"
    ranks_of = {
        str(name): list(dist.get_process_group_ranks(group))
        for group, name in list(distributed_c10d._world.pg_names.items())
    }
    groups = [
        dict(entry) | {"ranks": ranks_of.get(str(entry["pg_name"]), entry["ranks"])}
        for entry in distributed_c10d._world.pg_config_info
    ]
    return orjson.dumps(groups, default=int).decode()
