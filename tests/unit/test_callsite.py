"""The API name and the user's line, from stacks built as torch builds them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType

import torch

from crossrank.instrument.callsite import CallSites

SITES = CallSites()
TORCH = torch.__path__[0]


def _calls(filename: str, name: str) -> CodeType:
    """Code of a function `name` in `filename` that calls the function it is given."""
    module = compile(f"def {name}(inner):\n    return inner()\n", filename, "exec")
    return next(constant for constant in module.co_consts if isinstance(constant, CodeType))


def _seen_through(*frames: tuple[str, str]) -> tuple[str | None, str | None]:
    """API and source of a kernel below these (file, function) frames, the innermost last."""

    def kernel() -> tuple[str | None, str | None]:
        frame: FrameType | None = sys._getframe(1)
        site, _ = SITES.find(frame, "ProcessGroup.allreduce")
        return site.api, site.source

    call: Callable[[], tuple[str | None, str | None]] = kernel
    for filename, name in reversed(frames):
        # A partial leaves no frame of its own between the functions.
        call = functools.partial(FunctionType(_calls(filename, name), {}), call)
    return call()


USER = ("/home/me/train.py", "train")
C10D = f"{TORCH}/distributed/distributed_c10d.py"


def test_the_outermost_function_of_the_api_is_what_was_called() -> None:
    assert _seen_through(USER, (C10D, "broadcast_object_list"), (C10D, "broadcast")) == (
        "broadcast_object_list",
        "/home/me/train.py:2",
    )


def test_library_frames_between_end_the_api_call() -> None:
    fsdp = (f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "foreach_all_gather")
    assert _seen_through(USER, (C10D, "barrier"), fsdp, (C10D, "all_gather_into_tensor")) == (
        "all_gather_into_tensor",
        "/home/me/train.py:2",
    )


def test_a_call_straight_from_the_users_line_is_a_method_of_the_group() -> None:
    site, _ = SITES.find(sys._getframe(0), "ProcessGroup.allreduce")
    assert site.api == "ProcessGroup.allreduce"
    assert site.source is not None
    assert site.source.startswith("tests/unit/test_callsite.py:")


def test_generated_code_is_passed_over() -> None:
    assert _seen_through(USER, ("/tmp/torchinductor_me/ab/cab.py", "call")) == (None, "/home/me/train.py:2")
    assert _seen_through(USER, ("<eval_with_key>.3", "forward")) == (None, "/home/me/train.py:2")


def test_a_notebook_cell_is_user_code() -> None:
    assert _seen_through(("<ipython-input-3>", "cell"), (C10D, "barrier")) == ("barrier", "<ipython-input-3>:2")


def test_the_same_place_is_one_site() -> None:
    first = [SITES.find(sys._getframe(0), "x")[0] for _ in range(2)]
    assert first[0] is first[1]
