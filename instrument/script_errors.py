"""Distinguishes a failure of the recorder from an exception that the script raised inside it.

Python runs a script's signal handlers between any two bytecodes, also inside the recorder. An exception of such a
handler, such as a timeout by SIGALRM, must reach the script. A failure of the recorder must not.
"""

from __future__ import annotations

import contextlib
import os
import sysconfig
import traceback
from collections.abc import Iterator

import msgspec
import orjson
import torch
import zstandard

from crossrank.instrument.log import report

_HERE = os.path.dirname(os.path.abspath(__file__))
_OURS = tuple(
    path + os.sep
    for path in (
        os.path.dirname(_HERE),  # the package, with its link to this folder
        os.path.realpath(_HERE),
        *(os.path.dirname(os.path.abspath(module.__file__ or "")) for module in (torch, msgspec, orjson, zstandard)),
    )
)
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_SITE_PACKAGES = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)


class Failures:
    """The failures of the recorder in one session."""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    @contextlib.contextmanager
    def reported(self, consequence: str) -> Iterator[None]:
        """Log a failure of the block once, with its consequence for the recording, and continue."""
        try:
            yield
        except Exception as error:
            if raised_by_script(error):
                raise
            self.report(consequence, error)

    def report(self, consequence: str, error: Exception) -> None:
        """Log a failure once, with its consequence for the recording."""
        if consequence not in self._reported:
            self._reported.add(consequence)
            report(consequence, error)


def raised_by_script(error: BaseException) -> bool:
    """Return whether the traceback has a frame that belongs neither to the recorder nor to a library that it uses."""
    return not all(_is_known(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__))


def _is_known(path: str) -> bool:
    if path.startswith("<frozen"):
        return True
    if path.startswith(_STDLIB):
        return not any(part in path for part in _SITE_PACKAGES) or path.startswith(_OURS)
    # Cython names its files relative to where nvtx was built.
    return path.startswith((*_OURS, "nvtx/")) or any(name in path for name in ("/nvtx/", "/pynvml.py"))
