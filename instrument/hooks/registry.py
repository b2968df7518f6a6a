"""Every hook of a session: installed in this order, uninstalled in the reverse one.

`uninstall` is the exact opposite of `install` and may be called twice; what somebody else has put in place of ours
since stays. One change to Python cannot be undone: `fork` registers functions that do nothing while no session records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from crossrank.instrument.hooks import (
    backward,
    coalescing,
    dispatcher,
    excepthook,
    exits,
    optimizer,
    profiler,
    signals,
    spawn,
    terminate,
)

if TYPE_CHECKING:
    from crossrank.instrument.session import Session


@dataclass(frozen=True, kw_only=True)
class Hook:
    """One part of torch or Python that is changed while a session records."""

    name: str
    install: Callable[[Session], None]
    uninstall: Callable[[], None]
    in_child: Callable[[], None] | None = None
    """What a forked child does in place of `uninstall`."""
    lost: str | None = None
    """What is lost where it cannot be installed; None where nothing can be recorded then."""


HOOKS = (
    Hook(
        name="dispatcher",
        install=dispatcher.install,
        uninstall=dispatcher.uninstall,
        in_child=dispatcher.leave_to_next_install,
    ),
    Hook(name="coalescing", install=coalescing.install, uninstall=coalescing.uninstall),
    Hook(name="optimizer", install=optimizer.install, uninstall=optimizer.uninstall),
    Hook(
        name="backward",
        install=backward.install,
        uninstall=backward.uninstall,
        lost="every optimizer step counts as one after a backward pass",
    ),
    Hook(
        name="profiler",
        install=profiler.install,
        uninstall=profiler.uninstall,
        lost="a profiler of yours must not run during a window",
    ),
    Hook(name="spawn", install=spawn.install, uninstall=spawn.uninstall, in_child=lambda: None),
    Hook(name="exits", install=exits.install, uninstall=exits.uninstall),
    Hook(name="terminate", install=terminate.install, uninstall=terminate.uninstall),
    Hook(name="excepthook", install=excepthook.install, uninstall=excepthook.uninstall),
    Hook(name="signals", install=signals.install, uninstall=signals.uninstall, in_child=signals.leave_to_parent),
)


def install(session: Session) -> None:
    """Install all. Raises, with nothing installed, where one fails without which nothing can be recorded."""
    try:
        for hook in HOOKS:
            if hook.lost is None:
                hook.install(session)
            else:
                with session.failures.reported(hook.lost):
                    hook.install(session)
    except BaseException:
        uninstall()
        raise


def uninstall() -> None:
    for hook in reversed(HOOKS):
        hook.uninstall()


def leave_to_parent() -> None:
    """In a forked child: take away what can be, and leave to the parent what is the parent's."""
    for hook in reversed(HOOKS):
        (hook.in_child or hook.uninstall)()
