"""Whether a rank left by its own doing, by that of others, or because others had left."""

from __future__ import annotations

import pytest

from crossrank.tools.traces.ending import RECORDER, Ending
from crossrank.tools.traces.flight.dump import Frame, Raised

GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:1234"
OTHER = "RuntimeError: connection reset by database"
IN_TORCH = (
    Frame(name="_hook", filename=f"/x{RECORDER}a.py", line=1),
    Frame(name="f", filename="/torch/_tensor.py", line=2),
)
ELSEWHERE = (Frame(name="query", filename="/site-packages/db.py", line=1), *IN_TORCH)
GONE, FINAL, TERMINATED = "is_gone", "is_final", "was_terminated"
RAISED, FAILED, LEFT = "has_raised", "has_failed", "has_left"


@pytest.mark.parametrize(
    ("ending", "are"),
    [
        (Ending(), set()),
        (Ending(reason="window"), set()),
        (Ending(reason="disable"), set()),
        (Ending(reason="hang"), {FINAL}),
        (Ending(reason="exit"), {GONE, FINAL, LEFT}),
        (Ending(reason="SIGABRT"), {GONE, FINAL}),
        (Ending(reason="SIGTERM"), {GONE, FINAL, TERMINATED}),
        (Ending(reason="SIGINT", error="KeyboardInterrupt"), {GONE, FINAL, TERMINATED}),
        (Ending(reason="SIGTERM", error="ValueError: x"), {GONE, FINAL, RAISED, LEFT}),
        (Ending(error="ValueError: timed out"), {GONE, FINAL, RAISED, LEFT}),
        (Ending(reason="exit", error=GLOO, traceback=ELSEWHERE), {GONE, FINAL, FAILED}),
        (Ending(reason="exit", error="ValueError: x", causes=("y", GLOO)), {GONE, FINAL, FAILED}),
        (Ending(error=OTHER), {GONE, FINAL, FAILED}),
        (Ending(error=OTHER, traceback=IN_TORCH), {GONE, FINAL, FAILED}),
        (Ending(error=OTHER, traceback=ELSEWHERE), {GONE, FINAL, RAISED, LEFT}),
        (Ending(error="RuntimeError: shapes differ", traceback=IN_TORCH), {GONE, FINAL, RAISED, LEFT}),
    ],
)
def test_the_end_of_a_rank_is_classified(ending: Ending, are: set[str]) -> None:
    assert {name for name in (GONE, FINAL, TERMINATED, RAISED, FAILED, LEFT) if getattr(ending, name)} == are


def test_exceptions_of_other_threads_end_no_process() -> None:
    main, other = Raised(thread="MainThread", error="a", causes=["b"]), Raised(thread="loader", error="c")
    ending = Ending()
    ending.take_exceptions([other], "known of the file")
    assert (ending.error, ending.of_threads) == (None, [other])
    ending.take_exceptions([], "known of the file")
    assert (ending.error, ending.of_threads) == ("known of the file", [other])
    ending.take_exceptions([main])
    assert (ending.error, ending.causes, ending.of_threads) == ("a", ("b",), [other])
