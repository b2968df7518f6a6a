"""torch's own flight recorder of NCCL calls: turned on if possible, with a warning if it stays off.

torch reads the number of calls to keep when the first NCCL group is created. By default, some versions, such as 2.10,
keep none.
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
"""First version of torch that reads the new name and warns about the old one."""
_DEFAULT_CALLS = 2000


def switch_on() -> None:
    """Make torch keep its last calls, unless the user has set a number. No effect once an NCCL group exists."""
    if SIZE not in os.environ and _OLD_SIZE not in os.environ:
        major, minor = torch.__version__.split(".")[:2]
        is_old = (int(major), int(minor)) < _KNOWS_NEW_NAME
        os.environ[_OLD_SIZE if is_old else SIZE] = str(_DEFAULT_CALLS)


def calls_kept() -> int:
    """Return how many calls torch keeps according to the variables."""
    given = next((os.environ[name] for name in (SIZE, _OLD_SIZE) if name in os.environ), "")
    try:
        return max(int(given), 0)
    except ValueError:
        return _DEFAULT_CALLS


class RecorderCheck:
    """Checks once whether torch keeps NCCL calls, and logs a warning if it does not."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._first: int | None = None
        self._is_done = False

    def note_first_call(self, backend: str) -> None:
        """Note the first call of a group. If the group has gloo too, it may be a call of gloo."""
        if backend in ("nccl", "cuda:nccl") and self._first is None:
            self._first = self._recorder.calls()

    def look(self) -> None:
        """Check, once later calls show that the first NCCL call has reached torch's recorder."""
        if self._is_done or self._first is None or self._recorder.calls() < self._first + 2:
            return
        self._is_done = True
        dump = nccl_dump()
        # A dump without calls queries no event, which would break the capture of a CUDA graph.
        if dump is not None and not orjson.loads(dump(False, False)).get("pg_status"):
            log.warning(
                "crossrank: torch's flight recorder keeps no calls, so a dump of a hang holds crossrank's alone; call "
                "enable() before init_process_group, or set %s=%d",
                SIZE,
                _DEFAULT_CALLS,
            )
