"""The end of every `optimizer.step()`, by torch's own hook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from crossrank.instrument.session import Session

_handles: list[RemovableHandle] = []


def install(session: Session) -> None:
    _handles.append(register_optimizer_step_post_hook(session.iterations.on_optimizer_step))


def uninstall() -> None:
    while _handles:
        _handles.pop().remove()
