"""What a training script calls where the recorder cannot be imported: nothing is recorded, and training goes on."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

_said = False


def names(error: Exception) -> SimpleNamespace:
    """The functions of `crossrank.instrument.api`, of which `enable` says once that `error` keeps it from recording."""

    def enable(**_: object) -> Any:
        global _said
        if not _said:
            _said = True
            import logging  # torch has it; a process that never calls this does without

            logging.getLogger("crossrank").warning(
                "crossrank: tracing is off: it cannot be imported (%s); see to that, or install it anew with its "
                "requirements (pip install --force-reinstall crossrank)",
                error,
            )
        return _Off()

    return SimpleNamespace(
        enable=enable,
        disable=lambda: None,
        enabled=lambda: False,
        step=lambda: None,
        window=contextlib.nullcontext,
        expect_pause=lambda seconds=0: contextlib.nullcontext(),
    )


class _Off:
    """The handle of a recording that did not begin."""

    active = False

    def __enter__(self) -> _Off:
        return self

    def __exit__(self, *_: object) -> None:
        pass
