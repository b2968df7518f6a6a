"""The functions that a training script calls if the recorder cannot be imported. Training continues unrecorded."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

_has_warned = False


def names(error: Exception) -> SimpleNamespace:
    """Return the functions of `crossrank.instrument.api`. `enable` warns once that `error` prevents the recording."""

    def enable(**_: object) -> Any:
        global _has_warned
        if not _has_warned:
            _has_warned = True
            import logging  # torch imports it; a process that never calls this does not need it

            logging.getLogger("crossrank").warning(
                "crossrank: tracing is off: it cannot be imported (%s); install it again with its "
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
    """The handle of a recording that did not start."""

    active = False

    def __enter__(self) -> _Off:
        return self

    def __exit__(self, *_: object) -> None:
        pass
