"""Every hook of a session: installed in this order, uninstalled in the reverse one.

`uninstall` is the opposite of `install` and may be called twice; what another library has put in place of ours
since stays. Two changes are not undone: functions that `fork` calls, and kernels in torch's dispatcher. Both do nothing
while no session records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from crossrank.instrument.hooks import (
    default_group,
    dispatcher,
    exits,
    optimizer,
    profiler,
    signals,
    spawn,
)
from crossrank.instrument.script_errors import Failures


class Hooked(
    default_group.Grouped, dispatcher.Dispatched, optimizer.Stepping, profiler.Windowed, signals.Signalled, Protocol
):
    """What the hooks see of a session, each its own part."""


class Installable(Protocol):
    """A module with two functions."""

    def install(self, session: Hooked, /) -> None: ...

    def uninstall(self) -> None: ...


@dataclass(frozen=True)
class Hook:
    """One part of torch or Python that is changed while a session records."""

    module: Installable
    lost: str | None = None
    """What is lost where it cannot be installed; None where nothing can be recorded then."""
    in_child: Callable[[], None] | None = None
    """What a forked child does in place of `uninstall`."""


HOOKS = (
    Hook(dispatcher),
    Hook(default_group, lost="groups that are made again count as the earlier ones"),
    Hook(optimizer, lost="optimizer steps or backward passes are not seen, and steps may be miscounted"),
    Hook(profiler, lost="a profiler of your own must not run during a window"),
    Hook(spawn, in_child=lambda: None),  # what a forked child starts is followed as well
    Hook(exits),
    Hook(signals, in_child=signals.leave_to_parent),
)


def install(session: Hooked) -> None:
    """Install all. Raises, with nothing installed, where one fails without which nothing can be recorded."""
    try:
        for hook in HOOKS:
            if hook.lost is None:
                hook.module.install(session)
            else:
                with session.failures.reported(hook.lost):
                    hook.module.install(session)
    except BaseException:
        uninstall(session.failures)
        raise


def uninstall(failures: Failures) -> None:
    """Uninstall all, also where one of them fails."""
    for hook in reversed(HOOKS):
        with failures.reported("a change to torch or Python is left in place, and does nothing"):
            hook.module.uninstall()


def leave_to_parent() -> None:
    """In a forked child: uninstall what belongs to it, and leave the rest to the parent."""
    for hook in reversed(HOOKS):
        (hook.in_child or hook.module.uninstall)()
