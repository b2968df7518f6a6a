"""The process groups of this rank: identity, global ranks, counters.

The recorder must not keep a destroyed group alive. So a `GroupState` has no reference to its group: it is found by the
group's id and dropped with the group.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic_ns
from typing import Any

import orjson
import torch.distributed as dist
from torch.distributed import distributed_c10d

from crossrank.comm import Group
from crossrank.errors import one_line
from crossrank.instrument.log import log
from crossrank.instrument.record.descriptor import GroupState
from crossrank.instrument.torch_private import has
from crossrank.instrument.unpatched import threading
from crossrank.recording import with_epoch

_FAILED = "COMM_ERROR"
"""Name of torch's `ErrorType` of a group whose communicator reported an error."""
_USUAL_TIMEOUT = 600.0
"""Seconds of the shortest timeout that torch gives a group by default: that of NCCL."""
_MOST_GONE = 256
"""Destroyed groups that a dump still describes."""


class GroupTable:
    """Finds the state of a process group, and creates it for a new group."""

    def __init__(self, on_new: Callable[[GroupState], None], *, timing: bool = False) -> None:
        """`timing`: make torch measure the durations of calls for its flight recorder."""
        self._states: dict[int, GroupState] = {}
        self._on_new = on_new
        self._timing = timing
        self._lock = threading.RLock()  # training and the writer's thread both look for new groups
        self._gone: deque[Group] = deque(maxlen=_MOST_GONE)
        self.epoch = 0
        """How often a default group of this size was initialized again."""
        self._size = 0
        self.by_id = self._states.get
        """Returns the state of the group with this id, or None: the fast look-up for each call."""

    def note_default(self, size: int) -> None:
        """Count a new default group. With another number of ranks, epochs count from 0: new processes may have joined.

        All ranks call this for every default group, so they count alike, also if some make no calls in it.
        """
        self.epoch = self.epoch + 1 if size == self._size else 0
        self._size = size

    def forget_destroyed(self) -> None:
        """Forget destroyed groups, which are of an earlier file."""
        self._gone.clear()

    def add(self, group: dist.ProcessGroup, epoch: int | None = None) -> GroupState:
        """Return the state of `group`, which is of this epoch or else of the present one. Create and announce it if the
        group is new."""
        with self._lock:
            key = id(group)
            known = self._states.get(key)
            if known is not None:
                return known
            state = self._states[key] = _read(group, self.epoch if epoch is None else epoch)
            weakref.finalize(group, _drop, key, self._states, self._gone).atexit = False
            if self._timing and has("timing"):
                _measure(group)
            self._on_new(state)
            return state

    def add_all(self, world: dist.ProcessGroup) -> None:
        """Add every group that torch knows, also those without a call.

        Adds none if `world` is no longer the default group: the new groups belong to later files.
        """
        epoch = self.epoch
        groups = list(distributed_c10d._world.pg_map) if has("process groups") else []
        # Check this after making the list: torch removes the default group first and adds it last.
        for group in groups if dist.group.WORLD is world else ():
            # torch adds a new group to one table before it adds the ranks to the other.
            if isinstance(group, dist.ProcessGroup) and group in distributed_c10d._world.pg_group_ranks:
                try:
                    self.add(group, epoch)
                except Exception as error:  # a subclass of another library may raise anything
                    log.debug("crossrank: cannot describe a process group: %s", one_line(error))

    def announce_all(self) -> None:
        """Announce all known groups again, for a new file."""
        for state in list(self._states.values()):
            self._on_new(state)

    def describe(self) -> list[Group]:
        """Return all known groups."""
        return [state.group for state in list(self._states.values())]

    def describe_with_gone(self) -> list[Group]:
        """Return the known groups and the latest ones that were destroyed, whose calls may still be in a dump."""
        return sorted([*self._gone, *self.describe()], key=lambda group: group.t)

    def shortest_timeout(self, *, of_limited: bool = True) -> float | None:
        """Return the shortest timeout of a group with more than one rank, in seconds; None if unknown. Without
        `of_limited`, leave out the groups that `limited` returns."""
        leave_out = () if of_limited else self.limited()
        states = (state for state in list(self._states.values()) if state.group.size > 1)
        timeouts = (state.timeout for state in states if with_epoch(state.group).pg not in leave_out)
        return min((timeout for timeout in timeouts if timeout), default=None)

    def limited(self) -> list[str]:
        """Return the names of the groups that got a shorter timeout than the default group: the script may continue
        after an error there. With NCCL a timeout ends the process."""
        default = self._states.get(id(dist.group.WORLD))
        most = min(_USUAL_TIMEOUT, (default.timeout if default is not None else None) or _USUAL_TIMEOUT)
        states = (state for state in list(self._states.values()) if "nccl" not in (state.group.backend or ""))
        return [with_epoch(state.group).pg for state in states if state.timeout is not None and state.timeout < most]

    def failed(self) -> list[str]:
        """Return the names of the groups whose communicator has failed, as the backend says: NCCL does."""
        groups = list(distributed_c10d._world.pg_map) if has("process groups") else []
        known = {group: self._states.get(id(group)) for group in groups}
        return [with_epoch(one.group).pg for group, one in known.items() if one is not None and _has_failed(group)]

    def unseen_kinds(self) -> list[str]:
        """Return descriptions of groups whose calls bypass the dispatcher: Python subclasses of ProcessGroup."""
        if not has("process groups"):
            return []
        return [
            f"process group {name!r} is a {type(group).__name__}, a Python class that bypasses the dispatcher"
            for group, name in list(distributed_c10d._world.pg_names.items())
            if type(group) is not dist.ProcessGroup and type(group).__module__ != "torch._C._distributed_c10d"
        ]


def _drop(key: int, states: dict[int, GroupState], gone: deque[Group]) -> None:
    """Forget a group that is destroyed; does not refer to the table, which would keep the session."""
    state = states.pop(key, None)
    if state is not None:
        gone.append(state.group)


def _measure(group: dist.ProcessGroup) -> None:
    try:
        group._enable_collectives_timing()  # type: ignore[attr-defined]
    except RuntimeError as error:  # a backend that cannot
        log.debug("crossrank: torch does not measure the calls of a process group: %s", one_line(error))


def _read(group: dist.ProcessGroup, epoch: int) -> GroupState:
    size = group.size()
    ranks: list[int] | None
    try:
        ranks = list(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        # Created outside torch's registry. A group as large as the job has all ranks.
        ranks = list(range(size)) if dist.is_initialized() and size == dist.get_world_size() else None
    try:
        backend = str(dist.get_backend_config(group))
    except (KeyError, ValueError, RuntimeError, AssertionError, TypeError):  # torch has dropped it
        backend = group.name()
    return GroupState(
        group=Group(
            pg=group.group_name,
            size=size,
            ranks=ranks,
            desc=group.group_desc,
            backend=backend,
            eager=getattr(group, "bound_device_id", None) is not None,
            epoch=epoch,
            t=monotonic_ns(),
        ),
        rank=group.rank(),
        timeout=_timeout_of(group),
    )


def _timeout_of(group: dist.ProcessGroup) -> float | None:
    """Return the shortest timeout of the group's backends in seconds; None if unknown."""
    found: list[float] = []
    for backend in _backends_of(group):
        try:
            found.append(backend.options._timeout.total_seconds())
        except Exception as error:  # a backend without options
            log.debug("crossrank: a process group has no timeout: %s", one_line(error))
    return min(found, default=None)


def _has_failed(group: dist.ProcessGroup) -> bool:
    """Return whether a communicator of a group has failed. Timeouts, and errors of other ranks, do not count."""
    for backend in _backends_of(group):
        try:
            if backend.get_error().name == _FAILED:
                return True
        except Exception as error:  # a backend that does not say
            log.debug("crossrank: a process group does not say whether it has failed: %s", one_line(error))
    return False


def _backends_of(group: dist.ProcessGroup) -> Iterator[Any]:
    """Yield the backends of a group, one per type of device."""
    for device in group._device_types if has("backends") else ():
        try:
            yield group._get_backend(device)
        except Exception as error:  # one that is not loaded yet
            log.debug("crossrank: a backend of a process group is unknown: %s", one_line(error))


def process_group_config() -> str:
    """Return the process groups of this rank as JSON, in the layout of torch's `## process_group:init ##` node.

    torch writes `"ranks": []` for a group of all ranks; this writes the global ranks of every group.
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
