from __future__ import annotations

from typing import Any

import pytest

from crossrank.errors import CrossrankError
from crossrank.instrument.config import Config, Window, load


def test_an_empty_environment_gives_the_defaults() -> None:
    given: dict[str, Any] = {"emit": "CROSSNODE", "directory": "crossrank-recording", "nvtx": "1", "ring": 32_768}
    given |= {"flight": True, "print_calls": False, "nsys": False}
    assert load({}, {}) == Config(**given, window=None, node=None, gpu_serial=None, vm_id=None)


def test_every_variable_is_read() -> None:
    texts = {"DIR": "/data/run1", "WINDOW": "10:12:100", "NVTX": "classic", "PRINT": "1", "FLIGHT": "0"}
    texts |= {"NSYS": "1", "NODE": "a", "RING": "7"}
    variables = {f"TRACING_{name}": text for name, text in texts.items()} | {"GPU_SERIAL": "42", "VM_ID": "vm"}
    given: dict[str, Any] = {"directory": "/data/run1", "window": Window(start=10, stop=12, every=100), "ring": 7}
    given |= {"nvtx": "classic", "print_calls": True, "flight": False, "nsys": True, "node": "a"}
    assert load({}, variables | {"TRACING": "ALL"}) == Config(emit="ALL", **given, gpu_serial="42", vm_id="vm")


def test_an_argument_wins_over_the_variable_and_the_new_name_over_the_alias() -> None:
    variables = {"TRACING": "ALL", "TORCH_DISTRIBUTED_TRACING": "NONE", "TORCH_DISTRIBUTED_TRACING_PRINT": "1"}
    assert load({}, variables).emit == "ALL"
    assert load({"tracing": "CROSSNODE"}, variables).emit == "CROSSNODE"
    assert load({}, variables).print_calls
    assert not load({"print_calls": False}, variables).print_calls
    assert load({}, {"TORCH_DISTRIBUTED_TRACING": "NONE"}).emit == "NONE"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"TRACING": "some"}, "TRACING='some' is not one of CROSSNODE, ALL, NONE"),
        ({"TORCH_DISTRIBUTED_TRACING": "x"}, "TORCH_DISTRIBUTED_TRACING='x' is not one of CROSSNODE, ALL, NONE"),
        ({"TRACING_NVTX": "yes"}, "TRACING_NVTX='yes' is not one of 1, 0, classic"),
        ({"TRACING_WINDOW": "12:10"}, "TRACING_WINDOW='12:10': STOP must be greater than START, for example 12:14"),
        (
            {"TRACING_WINDOW": "1:5:3"},
            "TRACING_WINDOW='1:5:3': EVERY counts from START to the next START and must be at least 4",
        ),
        ({"TRACING_RING": "-1"}, "TRACING_RING='-1' is not a whole number from 1 to 1,048,576"),
        ({"TRACING_RING": "30000000"}, "TRACING_RING='30000000' is not a whole number from 1 to 1,048,576"),
        (
            {"TRACING_WINDOW": "1:9999999999999999999"},
            "TRACING_WINDOW='1:9999999999999999999' is not START:STOP or START:STOP:EVERY in steps, for example "
            "10:12 or 10:12:1000",
        ),
        *(
            (
                {"TRACING_HANG_SECONDS": text},
                f"TRACING_HANG_SECONDS='{text}' is not a number of seconds from 0.1 to 10,000,000; 0 turns the hang "
                "watch off",
            )
            for text in ("0.001", "1e300", "nan", "-1")
        ),
    ],
)
def test_a_bad_value_error_names_variable_value_and_allowed_set(variables: dict[str, str], message: str) -> None:
    with pytest.raises(CrossrankError) as caught:
        load({}, variables)
    assert str(caught.value) == message


def test_case_does_not_matter_and_true_is_1() -> None:
    assert load({}, {"TRACING": "all"}).emit == "ALL"
    assert load({}, {"TRACING_PRINT": "True", "TRACING_FLIGHT": "false"}) == Config(print_calls=True, flight=False)
    assert load({"window": (1, 3), "nvtx": False, "nsys": True}, {}) == Config(
        window=Window(start=1, stop=3), nvtx="0", nsys=True
    )


def test_a_bad_argument_is_reported_as_an_argument() -> None:
    with pytest.raises(CrossrankError, match=r"enable\(tracing=\)='SOME' is not one of"):
        load({"tracing": "SOME"}, {})
