"""The API name and the user's line, from stacks built as torch builds them."""

from __future__ import annotations

import functools
import gc
import sys
import tracemalloc
import weakref
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType

import pytest
import torch

from crossrank.instrument.record import call_site
from crossrank.instrument.record.call_site import MAX_PATH, CallSites, Site

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


FSDP = f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py"
LINE = "/home/me/train.py:2"


@pytest.mark.parametrize(
    ("frames", "api", "source"),
    [
        pytest.param(
            [USER, (C10D, "broadcast_object_list"), (C10D, "broadcast")],
            "broadcast_object_list",
            LINE,
            id="the outermost function of the API",
        ),
        pytest.param(
            [USER, (C10D, "barrier"), (FSDP, "foreach_all_gather"), (C10D, "all_gather_into_tensor")],
            "all_gather_into_tensor",
            LINE,
            id="library frames between end the API call",
        ),
        pytest.param([USER, ("/tmp/torchinductor_me/ab/cab.py", "call")], None, LINE, id="what inductor made"),
        pytest.param([USER, ("<eval_with_key>.3", "forward")], None, LINE, id="what torch.fx made"),
        pytest.param(
            [("<ipython-input-3>", "cell"), (C10D, "barrier")], "barrier", "<ipython-input-3>:2", id="a notebook"
        ),
    ],
)
def test_a_site_has_the_function_and_source_line(frames: list[tuple[str, str]], api: str | None, source: str) -> None:
    assert _seen_through(*frames) == (api, source)


def test_a_direct_call_in_user_code_is_a_method_of_the_group() -> None:
    site, _ = SITES.find(sys._getframe(0), "ProcessGroup.allreduce")
    assert site.api == "ProcessGroup.allreduce"
    assert site.source is not None
    assert site.source.startswith("tests/unit/instrument/test_call_site.py:")


def test_the_same_place_is_one_site() -> None:
    first = [SITES.find(sys._getframe(0), "x")[0] for _ in range(2)]
    assert first[0] is first[1]


def _site_in(sites: CallSites, filename: str) -> tuple[Site, weakref.ref[CodeType]]:
    """The site of a call from code of that name, and the code itself, which nothing else keeps."""
    code = _calls(filename, "train")
    call = FunctionType(code, {})
    site, _ = call(lambda: sites.find(sys._getframe(1), "ProcessGroup.allreduce"))
    return site, weakref.ref(code)


def test_call_sites_do_not_keep_unused_code_alive() -> None:
    sites = CallSites()
    found = [_site_in(sites, f"/generated/{number}.py") for number in range(100)]
    assert [site.source for site, _ in found] == [f"/generated/{number}.py:2" for number in range(100)]
    gc.collect()
    assert [code() for _, code in found] == [None] * 100
    # The line that was worked out stays, and so does nothing that could be taken for another code's.
    assert found[7][0].source == "/generated/7.py:2"
    assert sites._codes.keys() == {id(code) for code in (entry.alive() for entry in sites._codes.values())}
    assert sites._count == 0


def test_a_site_keeps_its_code_until_its_line_is_computed() -> None:
    site, code = _site_in(CallSites(), "/generated/once.py")
    gc.collect()
    assert code() is not None
    assert site.source == "/generated/once.py:2"
    gc.collect()
    assert code() is None


def test_a_long_path_is_shortened_from_the_left() -> None:
    long = "/" + "x" * 3000 + "/models/train.py"
    source = _seen_through((long, "train"))[1]
    assert source is not None
    path, _, line = source.rpartition(":")
    assert (len(path), path[:4], path[-16:], line) == (MAX_PATH, "...x", "/models/train.py", "2")
    exact = "/" + "y" * (MAX_PATH - 1)
    assert _seen_through((exact, "train"))[1] == f"{exact}:2"


def test_call_sites_take_bounded_memory_for_any_number_and_path_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = 300
    monkeypatch.setattr(call_site, "MAX_SITES", most)
    sites = CallSites()
    codes = [_calls(f"/{number}{'x' * 3000}.py", "train") for number in range(4 * most)]
    tracemalloc.start()
    try:
        for code in codes:
            site, _ = FunctionType(code, {})(lambda: sites.find(sys._getframe(1), "ProcessGroup.allreduce"))
            assert site.source is not None
        kept = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, call_site.__file__)])
    finally:
        tracemalloc.stop()
    assert sum(trace.size for trace in kept.traces) < 2500 * most
