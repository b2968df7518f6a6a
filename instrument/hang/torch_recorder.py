"""torch's own flight recorder of NCCL's calls: switched on where that is still possible, and a line where it is off.

torch reads how many calls it keeps when the first NCCL group is made. Some versions, 2.10 among them, keep none unless
they are told.
"""

from __future__ import annotations

import os

import orjson
import torch

from crossrank.instrument.log import log
from crossrank.instrument.record.recorder import Recorder
from crossrank.instrument.torch_dumps import nccl_dump

SIZE, _OLD_SIZE = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
_KNOWS_NEW_NAME = (2, 9)
"""The version of torch that reads the new name; from there on it warns of the old one."""
_DEFAULT_CALLS = 2000


def switch_on() -> None:
    """Have torch keep its last calls, unless the user has said how many. Too late where an NCCL group exists."""
    if SIZE not in os.environ and _OLD_SIZE not in os.environ:
        major, minor = torch.__version__.split(".")[:2]
        is_old = (int(major), int(minor)) < _KNOWS_NEW_NAME
        os.environ[_OLD_SIZE if is_old else SIZE] = str(_DEFAULT_CALLS)


def calls_kept() -> int:
    """How many calls torch keeps, by the variables."""
    given = next((os.environ[name] for name in (SIZE, _OLD_SIZE) if name in os.environ), "")
    try:
        return max(int(given), 0)
    except ValueError:
        return _DEFAULT_CALLS


class RecorderCheck:
    """Looks once whether torch keeps the calls with NCCL, and says so in one line if it does not."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._first: int | None = None
        self._is_done = False

    def note_first_call(self, backend: str) -> None:
        """A group makes its first call. On one that has gloo too it may be gloo's."""
        if backend in ("nccl", "cuda:nccl") and self._first is None:
            self._first = self._recorder.calls()

    def look(self) -> None:
        """Look, where later calls show that the first one with NCCL has come as far as torch's recorder."""
        if self._is_done or self._first is None or self._recorder.calls() < self._first + 2:
            return
        self._is_done = True
        dump = nccl_dump()
        # Without the calls no event is asked for, which a CUDA graph that is captured would not survive.
        if dump is not None and not orjson.loads(dump(False, False)).get("pg_status"):
            log.warning(
                "crossrank: torch's flight recorder keeps no calls, so a dump of a hang holds crossrank's alone; call "
                "enable() before init_process_group, or set %s=%d",
                SIZE,
                _DEFAULT_CALLS,
            )
