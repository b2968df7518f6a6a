"""Which send belongs to which receive, and which are over or alone, by what both ends' files show."""

from __future__ import annotations

from typing import Any

import pytest

from crossrank.tools.analysis.diagnosis.p2p import Pairing, content_text, pair_up
from crossrank.tools.traces.flight.dump import Progress
from crossrank.tools.traces.rank_trace import COMPLETED, RETIRED, SCHEDULED, RankTrace
from tests.unit.analysis.diagnosis.ranks import Call, call, job, rank, world

OPEN = SCHEDULED
CUT: dict[str, Any] = {"dump": {"wrapped": True}}
ACTIVE: dict[str, Any] = {"dump": {"active_only": True}}
COMMS: dict[str, Any] = {"source": "comms", "numbered_pairs": True}


def send(number: int = 1, state: int = OPEN, peer: int | None = 1, **facts: Any) -> Call:
    return call("send", number, state, **dict[str, Any](peer=peer, dtype="float32") | facts)


def recv(number: int = 1, state: int = OPEN, peer: int | None = 0, **facts: Any) -> Call:
    return call("recv", number, state, **dict[str, Any](peer=peer, dtype="float32", inputs=[], outputs=[[8]]) | facts)


def sends(*numbers: int) -> list[Call]:
    return [send(number) for number in numbers]


def recvs(*numbers: int) -> list[Call]:
    return [recv(number) for number in numbers]


def pairs(*rows: tuple[int, int]) -> dict[tuple[int, int], tuple[int, int]]:
    """Rows of rank 0 with those of rank 1, both ways."""
    return {(0, a): (1, b) for a, b in rows} | {(1, b): (0, a) for a, b in rows}


def both(*rows: int) -> set[tuple[int, int]]:
    return {(rank, row) for rank in (0, 1) for row in rows}


DIFFER = Pairing(pairs((0, 0)), sizes_differ=[((0, 0), (1, 0))])
CALLED = [send(3, called=1), send(5, called=2), send(6, called=3)]
CALLED_LATER = [send(3, called=5), send(5, called=6), send(6, called=7)]
ENDED = [recv(number, COMPLETED, ended=1) for number in (1, 2)]


@pytest.mark.parametrize(
    ("sent", "received", "facts", "expected"),
    [
        pytest.param(sends(1, 2), recvs(1), {}, Pairing(pairs((0, 0)), {(0, 1)}), id="in order"),
        pytest.param(sends(0), [], {}, Pairing(alone={(0, 0)}), id="without a number"),
        pytest.param(sends(0), [], COMMS, Pairing(alone={(0, 0)}), id="counted from 0"),
        pytest.param([], [recv(peer=None)], {}, Pairing(), id="from any source"),
        pytest.param(
            [send(tag=1), send(2, tag=2)],
            [recv(tag=2), recv(2, tag=1)],
            *({}, Pairing(pairs((0, 1), (1, 0)))),
            id="tags in another order",
        ),
        pytest.param(
            [send(tag=1)], [recv(tag=2)], {}, Pairing({}, both(0), tags_differ=DIFFER.sizes_differ), id="tags differ"
        ),
        pytest.param([send(tag=1)], [recv()], {}, Pairing(pairs((0, 0))), id="a tag that one does not know"),
        pytest.param([send(inputs=[[2, 4]])], [recv()], {}, Pairing(pairs((0, 0))), id="one size"),
        pytest.param([send(dtype=None)], [recv()], {}, Pairing(pairs((0, 0))), id="a type that one does not know"),
        pytest.param([send(inputs=[[9]])], [recv(1, COMPLETED)], {}, DIFFER, id="sizes differ"),
        pytest.param([send(dtype="float64")], [recv()], {}, DIFFER, id="types"),
        pytest.param(
            *(sends(1, 2), [recv(), recv(2, COMPLETED)], {}),
            Pairing(pairs((0, 0), (1, 1)), done={(0, 0), (0, 1), (1, 0)}),
            id="over on one side, and all before",
        ),
        pytest.param(
            [send(1, RETIRED)], [recv()], {}, Pairing(pairs((0, 0))), id="nothing follows of what was given up"
        ),
        pytest.param(
            *(sends(3, 4), recvs(4, 5), COMMS),
            Pairing(pairs((1, 0)), {(1, 1)}, {(0, 0), (0, 1), (1, 0)}),
            id="counted for the pair",
        ),
        pytest.param(sends(4, 5), [], COMMS, Pairing(alone={(0, 0), (0, 1)}), id="counted, not answered"),
        pytest.param(sends(2), recvs(4), COMMS, Pairing(alone={(1, 0)}), id="from before what the other's file has"),
        pytest.param(sends(3, 4, 5), recvs(4, 5), CUT, Pairing(pairs((1, 0), (2, 1))), id="in step, the rings are cut"),
        pytest.param(sends(4, 5, 6), [], CUT, Pairing(alone={(0, 0), (0, 1), (0, 2)}), id="nothing left"),
        pytest.param(sends(3, 4, 5), recvs(4), CUT, Pairing(pairs((1, 0)), {(0, 2)}), id="in step, and one is ahead"),
        pytest.param(sends(3, 5, 6), recvs(3, 4), CUT, Pairing(pairs((0, 0), (1, 1)), {(0, 2)}), id="from the end"),
        pytest.param(
            *(CALLED, [*ENDED, *recvs(3, 4)], CUT, Pairing(pairs((1, 2), (2, 3)), done={(0, 0)})),
            id="the other side saw ends",
        ),
        pytest.param(
            *(CALLED_LATER, [recv(2, COMPLETED, ended=4), *recvs(3, 4)], CUT),
            Pairing(pairs((0, 1), (1, 2)), {(0, 2)}),
            id="the other side saw one end before",
        ),
    ],
)
def test_sends_and_receives_of_two_ranks_are_paired(
    sent: list[Call], received: list[Call], facts: dict[str, Any], expected: Pairing
) -> None:
    assert pair_up(job(rank(0, *sent, **facts), rank(1, *received, **facts))) == expected


@pytest.mark.parametrize("facts", [CUT, ACTIVE, {"numbered_pairs": True}])
def test_first_calls_are_paired_if_both_files_are_whole_and_count_alike(facts: dict[str, Any]) -> None:
    def partner(of_sender: dict[str, Any], of_receiver: dict[str, Any]) -> dict[tuple[int, int], tuple[int, int]]:
        return pair_up(job(rank(0, send(1, COMPLETED), send(3), **of_sender), rank(1, recv(2), **of_receiver))).partner

    assert partner({}, {}) == pairs((0, 0))
    assert partner(facts, {}) == partner({}, facts) == pairs((1, 0))


@pytest.mark.parametrize(("first", "expected"), [(3, pairs((1, 0))), (1, pairs((0, 0), (1, 1)))])
def test_numbers_pair_calls_of_a_larger_group_if_both_ends_share_some(
    first: int, expected: dict[tuple[int, int], tuple[int, int]]
) -> None:
    of_three: dict[str, Any] = CUT | {"groups": (world(3),)}
    found = job(rank(0, *sends(first, first + 1), **of_three), rank(1, *recvs(4, 5), **of_three))
    assert pair_up(found).partner == expected


def progress(enqueued: int, completed: int) -> dict[str, Any]:
    return {"dump": {"active_only": True, "progress": {0: Progress(enqueued, completed)}}}


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (rank(1, **progress(5, 4)), Pairing(alone={(0, 1)}, done={(0, 0)})),
        (rank(1, **progress(5, 5)), Pairing(done={(0, 0), (0, 1)})),
        (rank(1, **ACTIVE), Pairing(alone={(0, 0), (0, 1)})),
        (rank(1, dump={"wrapped": True, "progress": {0: Progress(5, 5)}}), Pairing(alone={(0, 0), (0, 1)})),
    ],
)
def test_a_call_missing_from_the_active_calls_of_its_peer_is_finished(other: RankTrace, expected: Pairing) -> None:
    sender = rank(0, send(4), send(5), dump={"wrapped": True})
    if other.dump.wrapped:
        sender.dump.active_only = False
    assert pair_up(job(sender, other)) == expected


def test_a_peer_without_a_file_answers_only_ranks_that_notice_no_ends() -> None:
    collectives = [call(number=number, state=OPEN) for number in (1, 2, 3)]
    alone = job(rank(0, send(), *collectives, send(2), groups=(world(3),)), rank(2, groups=(world(3),)))
    assert pair_up(alone) == Pairing(alone={(0, 0), (0, 4)})
    done = rank(2, *(call(number=number) for number in (1, 2, 3)), groups=(world(3),))
    blind = job(rank(0, send(), *collectives, send(2), groups=(world(3),)), done)
    assert pair_up(blind) == Pairing(alone={(0, 4)}, done={(0, 0)})


def test_the_content_of_a_transfer_is_described() -> None:
    calls = (
        send(inputs=[[2, 3], [4]], outputs=[[9]]),
        recv(peer=1, inputs=[[9]], outputs=[[5]]),
        send(dtype=None, inputs=[], outputs=[[7]]),
        recv(inputs=[[6]], outputs=[]),
    )
    texts = ["[2, 3] + [4] float32", "[5] float32", "[7]", "[6] float32"]
    assert [content_text(job(rank(0, *calls)), (0, row)) for row in range(4)] == texts
