"""Finds the public API name and the source line of a call in the frames above a dispatcher kernel.

The walk reads no source, and each code object is classified once, so it costs one dictionary look-up per frame. A
`Site` keeps the code object and the bytecode offset. The line number costs more than the walk, so it is computed when
the record is written; then the site drops the code object. Generated code is forgotten when the program drops it.

There are three kinds of frames, from the kernel outwards:

* the communication API: `torch.distributed`'s own functions, the functional collectives,
  `torch.distributed.nn.functional`. The API name is the outermost function of an unbroken run of such frames:
  `broadcast_object_list`, not the two `broadcast`s inside it;
* other frames of torch and crossrank, which are skipped;
* all others: the first such frame is the source line.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import ClassVar

import torch
import typing_extensions

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_DISTRIBUTED = _TORCH + "distributed" + os.sep
_OURS = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep,
)
# Files whose functions are the communication API, and the prefix of their names in `api`.
_API_FILES = {
    _DISTRIBUTED + "distributed_c10d.py": "",
    _DISTRIBUTED + "_functional_collectives.py": "functional.",
    _DISTRIBUTED + os.path.join("nn", "functional.py"): "nn.functional.",
}
# Frames that may be inside one API call: decorators, context managers, autograd functions.
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_TRANSPARENT_FILES = frozenset(
    (
        _DISTRIBUTED + "c10d_logger.py",
        _TORCH + os.path.join("autograd", "function.py"),
        _TORCH + os.path.join("utils", "_contextlib.py"),
        _TORCH + "_ops.py",
        _STDLIB + "contextlib.py",
        # torch marks deprecated names with it: a function of this file calls `all_gather_into_tensor`.
        os.path.abspath(typing_extensions.__file__),
    )
)
# Skipped: torch, crossrank, code that runs the user's script, and generated code that torch calls. `python -c` and
# notebooks run user code under names such as <string>, <stdin> and <ipython-…>.
_PASSED_FILES = (
    _TORCH,
    *_OURS,
    _STDLIB + "runpy.py",
    _STDLIB + "threading.py",
    _STDLIB + "multiprocessing" + os.sep,
    "<frozen ",
    "<eval_with_key>",
    "<torch_package_",
)
_INDUCTOR = ("torchinductor_", os.sep + "inductor" + os.sep)  # its output

USER, API, TRANSPARENT, PASSED, PART_OF_API = range(5)
"""Kinds of frames. PART_OF_API is a method or nested function of the API, which is not an API name."""

MAX_SITES = 16_384
MAX_PATH = 1000
"""Longest path in `Site.source`, in characters; a longer one is cut from the left and begins with `CUT`."""
CUT = "..."


@dataclass(eq=False, slots=True)
class Site:
    """A source line of the user's code that makes calls, with the API name."""

    working_folder: ClassVar[str]
    """Working folder of the process at the start of the recording."""

    api: str | None
    _code: CodeType | None
    _lasti: int
    _source: str | None = None

    @property
    def source(self) -> str | None:
        """`file.py:line` of the user's frame, relative to `working_folder` if it is inside.

        None if no Python frame outside torch made the call.
        """
        code = self._code  # another thread may drop it meanwhile
        if code is not None:
            path, lasti = code.co_filename.removeprefix(self.working_folder), self._lasti
            shown = path if len(path) <= MAX_PATH else CUT + path[len(CUT) - MAX_PATH :]
            lines = (line for start, end, line in code.co_lines() if start <= lasti < end and line is not None)
            self._source = f"{shown}:{next(lines, code.co_firstlineno)}"
            self._code = None
        return self._source


@dataclass(eq=False, slots=True)
class _Code:
    """The kind of a code object. `alive` calls back when the object dies, because another may then get its id."""

    alive: weakref.ref[CodeType]
    kind: int
    name: str | None
    sites: dict[tuple[int, str | None], Site] = field(default_factory=dict)


class CallSites:
    """Finds the `Site` of the current call on this thread."""

    def __init__(
        self, on_forget: Callable[[int], object] | None = None, on_clear: Callable[[], object] | None = None
    ) -> None:
        """`on_forget` is called with the id of a code object that has died, `on_clear` when all are forgotten."""
        Site.working_folder = os.getcwd() + os.sep
        self._on_forget, self._on_clear = on_forget, on_clear
        self._codes: dict[int, _Code] = {}
        self._native: dict[str | None, Site] = {}
        self._count = 0

    def find(self, frame: FrameType | None, direct_api: str) -> tuple[Site, FrameType | None]:
        """Return the site of a kernel called by `frame`, and the frame of the outermost API function, if any.

        `direct_api` is the API name if user code calls the kernel directly: a ProcessGroup method.
        """
        codes = self._codes
        api: str | None = None
        api_frame: FrameType | None = None
        direct = True  # no frame of torch between the kernel and the user: a method of ProcessGroup was called
        running = True  # still inside the unbroken run of API frames
        while frame is not None:
            code = frame.f_code
            entry = codes.get(id(code))
            if entry is None:
                entry = self._classify(code)
            kind = entry.kind
            if kind == USER:
                key = (frame.f_lasti, direct_api if direct else api)
                site = entry.sites.get(key)
                if site is None:
                    site = self._add(entry.sites, key, Site(key[1], code, key[0]))
                return site, api_frame
            if kind == API and running:
                api = entry.name
                api_frame = frame
            elif kind == PASSED and api is not None:
                running = False
            direct = False
            frame = frame.f_back
        site = self._native.get(api)
        if site is None:
            site = self._native[api] = Site(api, None, -1)
        return site, api_frame

    def _add(self, sites: dict[tuple[int, str | None], Site], key: tuple[int, str | None], site: Site) -> Site:
        # Generated code may have any number of call sites; limit the memory.
        if self._count >= MAX_SITES:
            self._codes.clear()
            self._count = 0
            if self._on_clear is not None:
                self._on_clear()
        self._count += 1
        sites[key] = site
        return site

    def kind_of(self, code: CodeType) -> int:
        """Return the kind of the frames of `code`: `USER`, `API`, …"""
        return (self._codes.get(id(code)) or self._classify(code)).kind

    def _classify(self, code: CodeType) -> _Code:
        key = id(code)
        entry = self._codes[key] = _Code(weakref.ref(code, lambda _: self._forget(key)), *_kind_of(code))
        return entry

    def _forget(self, key: int) -> None:
        entry = self._codes.pop(key, None)
        if entry is not None:
            self._count -= len(entry.sites)
            if self._on_forget is not None:
                self._on_forget(key)


def _kind_of(code: CodeType) -> tuple[int, str | None]:
    path = code.co_filename
    if path in _API_FILES:
        # A method (an autograd Function's forward) or a nested function is part of an API call, not its name.
        module = sys.modules.get("torch." + path[len(_TORCH) : -len(".py")].replace(os.sep, "."))
        is_function = module is not None and hasattr(module, code.co_name)
        return (API, _API_FILES[path] + code.co_name) if is_function else (PART_OF_API, None)
    if path in _TRANSPARENT_FILES:
        return TRANSPARENT, None
    is_passed = path.startswith(_PASSED_FILES) or any(part in path for part in _INDUCTOR)
    return (PASSED if is_passed else USER), None
