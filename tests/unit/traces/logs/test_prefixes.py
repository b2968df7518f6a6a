"""The rank and the host of a line, by the prefixes of launchers."""

from __future__ import annotations

import pytest

from crossrank.tools.traces.logs.prefixes import Origin, labels_of, split


@pytest.mark.parametrize(
    ("line", "origin", "text"),
    [
        ("[rank3]:[E1126 10:00:00 a.cpp:1] text", Origin(rank=3), "[E1126 10:00:00 a.cpp:1] text"),
        ("[default2]:loss 1.0", Origin(local=2), "loss 1.0"),
        ("[default2]:[rank10]: text", Origin(rank=10, local=2), "text"),
        ("[1,5]<stderr>: text", Origin(rank=5), "text"),
        ("(train pid=812, ip=10.0.0.2) text", Origin(host="10.0.0.2", process="812"), "text"),
        ("[pod/worker-1/main] [rank9]: text", Origin(rank=9, host="worker-1"), "text"),
        ("2026-11-26 10:00:00 [rank1]: text", Origin(rank=1), "text"),
        ("[2025-12-01 08:00:00 TP3] text", Origin(rank=3), "text"),
        ("3: text", Origin(), "3: text"),
        ("step 3: loss", Origin(), "step 3: loss"),
    ],
)
def test_prefixes_are_taken_off(line: str, origin: Origin, text: str) -> None:
    assert split(line, Origin(), frozenset()) == (origin, text)


def test_a_label_counts_if_most_lines_have_it() -> None:
    labelled = ["0: a", " 1: b", "10: c", ""]
    assert labels_of(labelled) == {"srun"}
    assert split("10: [rank11]: text", Origin(), labels_of(labelled)) == (Origin(rank=11), "text")
    assert labels_of([*labelled[:2], "epoch", "loss", *labelled[2:]]) == frozenset()
    assert labels_of(["a banner", *labelled, "a summary"]) == {"srun"}  # the launcher's own lines


@pytest.mark.parametrize(
    ("form", "origin"),
    [
        ("2025-09-17T18:10:00.000+02:00 {}", Origin()),
        ("2026-05-05T06:00:30.022Z stdout F {}", Origin()),
        ("Mar 30 06:00:02 ml-box train.sh[8811]: {}", Origin(host="ml-box")),
        ("worker-1: {}", Origin(host="worker-1")),
        ("worker-1  | {}", Origin(host="worker-1")),
        ("bert-worker-1 pytorch | {}", Origin(host="bert-worker-1")),
        ("3: [2026-03-03 12:00:02] {}", Origin(rank=3)),
    ],
    ids=["time", "container", "syslog", "pdsh", "compose", "pods", "srun with times"],
)
def test_a_label_of_most_lines_is_not_part_of_their_text(form: str, origin: Origin) -> None:
    labels = labels_of([form.format("step 1"), form.format("[rank2]: step 2"), form.format("step 3")])
    assert split(form.format("  File x"), Origin(), labels) == (origin, "  File x")
    assert split(form.format("[rank2]: text"), Origin(), labels)[0].rank == 2
