"""What each rank is stuck in and whom it waits for, in jobs of a few calls."""

from __future__ import annotations

from typing import Any

import pytest

from crossrank.tools.analysis.diagnosis.p2p import pair_up
from crossrank.tools.analysis.diagnosis.wait_for_graph import wait_for_graph
from crossrank.tools.traces.rank_trace import COMPLETED, RETIRED, SCHEDULED, RankTrace
from tests.unit.analysis.diagnosis.ranks import Call, call, group, job, rank, world

OPEN, DONE = SCHEDULED, COMPLETED
ACTIVE: dict[str, Any] = {"active_only": True}
SECOND = 10**9
FAILED = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:21141."
CUT: dict[str, Any] = {"wrapped": True}


def made(*states: int, first: int = 1, op: str = "all_reduce", **facts: Any) -> list[Call]:
    return [call(op, number, state, **facts) for number, state in enumerate(states, first)]


def send(peer: int, number: int = 1, state: int = OPEN, **facts: Any) -> Call:
    return call("send", number, state, peer=peer, **facts)


def recv(peer: int | None, number: int = 1, state: int = OPEN, **facts: Any) -> Call:
    return call("recv", number, state, peer=peer, inputs=[], outputs=[[8]], **facts)


def stuck(*ranks: RankTrace) -> tuple[dict[int, int], list[str]]:
    """(rank -> row that it is stuck in, who waits in which call for whom, as far as somebody is)"""
    found = job(*ranks)
    graph = wait_for_graph(found, pair_up(found))
    texts = []
    for op in graph.ops:
        others = {"absent": op.absent, "behind": op.behind, "through": op.passed, "unknown": op.unknown}
        said = [f"{name} {sorted(ranks)}" for name, ranks in others.items() if ranks]
        texts.append(", ".join([f"{op.op} {op.seq} of {op.waiting}", *said]))
    return graph.blocked, texts


def of_three(number: int, *calls: Call, **facts: Any) -> RankTrace:
    return rank(number, *calls, groups=(world(3), group("1", 0, 1)), **facts)


def three(*calls: list[Call]) -> list[RankTrace]:
    return [of_three(number, *made) for number, made in enumerate(calls)]


def gloo(number: int, *calls: Call, **facts: Any) -> RankTrace:
    return of_three(number, *calls, backend="gloo", **facts)


def comms(number: int, *calls: Call, **facts: Any) -> RankTrace:
    return of_three(number, *calls, source="comms", numbered_pairs=True, **facts)


def broadcasts(*states: int) -> list[Call]:
    return made(*states, op="broadcast")


SENT_AND_WENT_ON = comms(0, send(1, api="isend"), *made(OPEN), unawaited={0})
SENT_TWICE = comms(0, send(1, api="isend"), send(1, 2), unawaited={0, 1})


@pytest.mark.parametrize(
    ("ranks", "blocked", "ops"),
    [
        pytest.param(
            *(
                three(made(DONE, OPEN), made(DONE, OPEN), made(DONE)),
                {0: 1, 1: 1},
                ["all_reduce 2 of [0, 1], absent [2]"],
            ),
            id="one has not made it",
        ),
        pytest.param(
            [of_three(0, *made(OPEN)), of_three(1, call(pg="1"), dump=CUT), of_three(2, dump=ACTIVE)],
            *({0: 0}, ["all_reduce 1 of [0], absent [2], unknown [1]"]),
            id="what a ring lost is not known, what is not active was not made",
        ),
        pytest.param(
            *([of_three(0, *broadcasts(OPEN)), of_three(2, dump=ACTIVE)], {0: 0}),
            ["broadcast 1 of [0], absent [1], unknown [2]"],
            id="one has no file, one may be through",
        ),
        pytest.param(
            *(three(broadcasts(OPEN), broadcasts(DONE), [*broadcasts(DONE), *made(OPEN, first=2)]), {0: 0, 2: 1}),
            ["broadcast 1 of [0], through [1, 2]", "all_reduce 2 of [2], absent [0, 1]"],
            id="two are through",
        ),
        pytest.param(
            three([*made(OPEN), *made(OPEN, pg="1")], [*made(OPEN, pg="1"), *made(OPEN)], made(OPEN)),
            *({0: 0, 1: 0, 2: 0}, ["all_reduce 1 of [0, 2], behind [1]", "all_reduce 1 of [1], behind [0]"]),
            id="in another order",
        ),
        pytest.param(
            *(
                three(made(DONE, OPEN), made(OPEN, OPEN), made(OPEN)),
                {0: 1, 1: 1},
                ["all_reduce 2 of [0, 1], absent [2]"],
            ),
            id="what is over for one is over for all",
        ),
        pytest.param(
            *(three([send(1), *made(OPEN)], [*made(OPEN), recv(0)], made(OPEN)), {0: 0, 1: 0, 2: 0}),
            ["send 1 of [0], behind [1]", "all_reduce 1 of [1, 2], behind [0]"],
            id="a receive after a collective",
        ),
        pytest.param(
            *(three([send(1), recv(2)], [recv(0)], []), {0: 0, 1: 0}, ["send 1 of [0, 1], absent [2]"]),
            id="a batch of which one answer lacks",
        ),
        pytest.param(
            three([send(1), recv(2, 2)], [recv(0)], []), {0: 0, 1: 0}, ["send 1 of [0, 1]"], id="two launches"
        ),
        pytest.param(three([recv(None)], [], []), {0: 0}, ["recv 1 of [0], absent [1, 2]"], id="from any source"),
        pytest.param(
            [of_three(0, send(1)), of_three(2)], {0: 0}, ["send 1 of [0], absent [1]"], id="to one without a file"
        ),
        pytest.param(
            *(three([send(1), send(1, 2)], [recv(0), recv(0, 2)], []), {0: 0, 1: 0}, ["send 1 of [0, 1]"]),
            id="both are there",
        ),
        pytest.param(
            *(three([send(2), send(1, 2)], [recv(0)], [recv(1), recv(0)]), {0: 0, 1: 0, 2: 0}),
            ["send 1 of [0, 2], absent [1]", "recv 1 of [1], behind [0]"],
            id="one launch answers, one is later",
        ),
        pytest.param(
            *(three([send(2)], [], [recv(1), recv(0, 2)]), {0: 0, 2: 0}),
            ["send 1 of [0], behind [2]", "recv 1 of [2], absent [1]"],
            id="a receive after another",
        ),
        pytest.param(
            *([comms(0, send(1), send(2)), comms(1), comms(2)], {0: 0}, ["send 1 of [0], absent [1]"]),
            id="counted for each pair, so that one number is no launch",
        ),
        pytest.param(
            [rank(0, send(1, 3), send(1, 4), dump=CUT), rank(1, recv(0, 4), recv(0, 5), dump=CUT)],
            *({0: 0, 1: 0}, ["send 3 of [0]", "recv 4 of [1], behind [0]"]),
            id="what answers it is no longer there",
        ),
        pytest.param(
            *([of_three(0, *made(DONE, OPEN), ending={"error": "ValueError: x"}), of_three(1), of_three(2)], {}, []),
            id="it left by an exception",
        ),
        pytest.param(
            *([SENT_AND_WENT_ON, comms(1), comms(2)], {0: 1}, ["all_reduce 1 of [0], absent [1, 2]"]),
            id="a send that nobody waited for comes last",
        ),
        pytest.param(
            *([SENT_TWICE, comms(1), comms(2)], {0: 0}, ["send 1 of [0], absent [1]"]),
            id="the first of those that nobody waited for",
        ),
    ],
)
def test_blocked_ranks_are_found(ranks: list[RankTrace], blocked: dict[int, int], ops: list[str]) -> None:
    assert stuck(*ranks) == (blocked, ops)


@pytest.mark.parametrize(
    ("op", "facts", "others", "is_stuck"),
    [
        ("all_reduce", {}, [gloo(1, *made(RETIRED)), gloo(2)], True),
        ("all_reduce", {}, [gloo(1, *made(RETIRED)), gloo(2, *made(RETIRED))], False),
        ("all_reduce", {}, [gloo(1, *made(RETIRED))], False),
        ("all_reduce", {"error": FAILED}, [gloo(1, *made(RETIRED))], True),
        ("all_reduce", {"error": FAILED}, [gloo(1, *made(RETIRED)), gloo(2, dump=CUT)], False),
        ("all_reduce", {}, [gloo(1, *made(RETIRED)), gloo(2, ending={"taken_at": 9})], False),
        ("all_reduce", {}, [gloo(1, *made(RETIRED)), gloo(2, ending={"taken_at": 10})], True),
        ("all_reduce", {}, [gloo(1, *made(RETIRED)), gloo(2, ending={"taken_at": 9, "reason": "exit"})], True),
        ("all_reduce", {}, [gloo(1, *made(RETIRED)), gloo(2, ending={"taken_at": 9, "unseen": True})], True),
        ("broadcast", {}, [gloo(1, *made(RETIRED)), gloo(2)], False),
        ("broadcast", {"error": FAILED}, [gloo(1, *made(RETIRED)), gloo(2)], True),
        ("send", {"error": FAILED}, [gloo(1), gloo(2)], False),
        ("unheard_of", {"error": FAILED}, [gloo(1), gloo(2)], False),
    ],
)
def test_a_rank_is_stuck_in_a_call_that_gloo_gave_up_if_another_rank_is_missing(
    op: str, facts: dict[str, Any], others: list[RankTrace], is_stuck: bool
) -> None:
    first = gloo(0, call(op, 1, RETIRED, called=10, peer=1 if op == "send" else None), ending=facts)
    assert stuck(first, *others)[0].get(0) == (0 if is_stuck else None)


def test_ranks_with_finished_calls_or_without_calls_are_not_stuck() -> None:
    assert stuck(of_three(0, *made(COMPLETED)), of_three(1), of_three(2))[0] == {}
    assert stuck(gloo(0), gloo(1), gloo(2))[0] == {}


@pytest.mark.parametrize(
    ("called", "others", "blocked"),
    [
        ([call(), call(number=1, pg="1", called=5), call(number=2, called=9)], 5 + SECOND, {}),
        ([call(), call(number=1, pg="1", called=5), call(number=2, called=9)], 6 + SECOND, {0: 1}),
        ([call(), call("broadcast", 1, pg="1", called=5), call(number=2, called=9)], 6 + SECOND, {}),
        ([call(pg="1", called=5), call(number=2, pg="1", called=6), call(number=2, called=9)], 7 + SECOND, {0: 1}),
    ],
)
def test_a_thread_is_stuck_if_another_rank_continues_for_long_without_its_call(
    called: list[Call], others: int, blocked: dict[int, int]
) -> None:
    other = comms(1, *made(DONE, DONE), ending={"taken_at": others})
    assert stuck(comms(0, *called), other, comms(2, *made(DONE, DONE)))[0] == blocked


@pytest.mark.parametrize(
    ("op", "root", "unseen", "open_calls", "number", "row"),
    [
        ("all_reduce", None, True, 1, 2, None),
        ("broadcast", 0, True, 1, 2, None),
        ("broadcast", 0, False, 1, 2, 0),
        ("broadcast", 0, True, 1, 1, 0),
        ("broadcast", 0, True, 2, 3, 0),
        ("gather", 0, True, 1, 2, 0),
        ("gather", 1, True, 1, 2, None),
    ],
)
def test_the_last_call_of_a_cut_file_is_finished_if_others_continued(
    op: str, root: int | None, unseen: bool, open_calls: int, number: int, row: int | None
) -> None:
    last = of_three(0, *made(*[OPEN] * open_calls, op=op, root=root), ending={"unseen": unseen}, dump=CUT)
    assert stuck(last, *(of_three(one, call(op, number)) for one in (1, 2)))[0].get(0) == row


def test_ends_seen_only_by_others_count_and_missing_ranks_precede_late_ones() -> None:
    found = job(
        of_three(0, *made(COMPLETED, COMPLETED, OPEN)),
        of_three(1, *made(OPEN, OPEN, OPEN)),
        comms(2, *made(OPEN, OPEN)),
    )
    graph = wait_for_graph(found, pair_up(found))

    assert (graph.missed_ends, graph.targets(0), graph.targets(2)) == ({1: 2}, {2}, set())
    graph.op_of[0].behind.add(1)
    assert graph.targets(0) == {2}
    graph.op_of[0].absent = {0}
    assert graph.targets(0) == set()
    graph.op_of[0].absent = set()
    assert graph.targets(0) == {1}
