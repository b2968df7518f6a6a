"""What is told of jobs of a few calls: roots, what follows from them, and whose fault it is not."""

from __future__ import annotations

from typing import Any

import pytest

from crossrank.tools.analysis.diagnosis.diagnose import diagnose
from crossrank.tools.analysis.diagnosis.evidence import Evidence
from crossrank.tools.analysis.diagnosis.findings import Diagnosis
from crossrank.tools.traces.flight.dump import Frame, Progress
from crossrank.tools.traces.rank_trace import COMPLETED, RETIRED, SCHEDULED, RankTrace
from tests.unit.analysis.diagnosis.moments import CLOSED
from tests.unit.analysis.diagnosis.ranks import Call, call, group, rank, world
from tests.unit.analysis.diagnosis.verdicts import in_short, roots

OPEN = SCHEDULED


def calls(*states: int, first: int = 1, **facts: Any) -> list[Call]:
    return [call("all_reduce", number, state, called=number, **facts) for number, state in enumerate(states, first)]


def of_four(number: int, *made: Call, **facts: Any) -> RankTrace:
    return rank(number, *made, groups=(world(4), group("1", 0, 1), group("2", 2, 3)), **facts)


def diagnosed(*ranks: RankTrace, **options: Any) -> Diagnosis:
    return diagnose(Evidence(list(ranks)), **options)[0]


@pytest.mark.parametrize(
    ("stale", "taken_at", "expected"),
    [
        ((3,), 4 * 10**9, [("not_completed", "default_pg", 2, [3], [])]),
        ((3,), None, [("all_joined_not_completed", "default_pg", 2, [], [3])]),
        ((2, 3), 4 * 10**9, [("all_joined_not_completed", "default_pg", 2, [], [one]) for one in (2, 3)]),
    ],
)
def test_a_last_call_finished_on_most_ranks_hangs_on_the_others(
    stale: tuple[int, ...], taken_at: int | None, expected: list[Any]
) -> None:
    ending = {"taken_at": taken_at}
    ranks = [of_four(one, *calls(COMPLETED, OPEN if one in stale else COMPLETED), ending=ending) for one in range(4)]
    found = diagnosed(*ranks)
    assert (found.verdict, roots(found)) == ("error", expected)
    assert {finding.backend for finding in found.findings} == {"nccl"}


def frozen(number: int, *made: Call) -> RankTrace:
    """A rank of `ProcessGroupNCCL2` in `destroy_process_group`: torch has stopped to note ends."""
    hang = {"reason": "hang", "taken_at": 60 * 10**9}
    return of_four(number, *made, backend="nccl2", dump={"ends_frozen": True}, ending=hang)


def test_calls_of_all_ranks_block_no_rank_if_torch_records_no_ends() -> None:
    sizes = {rank: [[9 if rank == 1 else 8]] for rank in range(4)}
    ranks = [frozen(one, *calls(OPEN, OPEN), call(number=3, state=OPEN, inputs=sizes[one])) for one in range(4)]
    assert roots(diagnosed(*ranks)) == [("size_mismatch", "default_pg", 3, [1], [])]


def test_a_missing_rank_is_named_if_torch_records_no_ends() -> None:
    ranks = [frozen(one, *calls(*[OPEN] * (2 if one == 3 else 4))) for one in range(4)]
    assert roots(diagnosed(*ranks)) == [("missing_rank", "default_pg", 3, [3], [0, 1, 2])]


def test_an_unmatched_send_is_found_if_torch_records_no_ends() -> None:
    sends = [call("send", number, OPEN, number, peer=1) for number in (1, 2, 3)]
    receives = [call("recv", number, OPEN, number, peer=0) for number in (1, 2)]
    found = diagnosed(frozen(0, *sends), frozen(1, *receives), *(frozen(one, *calls(OPEN, pg="2")) for one in (2, 3)))
    assert roots(found) == [("p2p_unmatched", "default_pg", 3, [1], [0])]


def test_a_hung_job_is_incomplete_if_torch_records_no_ends() -> None:
    found = diagnosed(*(frozen(one, *calls(OPEN)) for one in range(4)))
    assert (found.verdict, roots(found)) == ("incomplete", [("not_recorded", "default_pg", None, [], [0, 1, 2, 3])])
    assert "torch records no ends of calls while it destroys a group" in found.findings[0].text


@pytest.mark.parametrize(("stale", "named"), [((), []), ((1,), [1]), ((0, 1), [])])
def test_a_few_ranks_without_call_ends_are_a_separate_fault_in_a_hang(stale: tuple[int, ...], named: list[int]) -> None:
    ranks = [of_four(one, *calls(*[OPEN if one in stale else COMPLETED] * 3, OPEN)) for one in range(3)]
    found = diagnosed(*ranks, of_four(3, *calls(COMPLETED, COMPLETED, COMPLETED)))
    assert sorted((one.kind, *one.culprit_ranks) for one in found.findings) == sorted(
        [("missing_rank", 3), *(("not_completed", one) for one in named)]
    )


def test_only_the_rank_that_left_is_accused_if_others_wait_in_its_last_call() -> None:
    later = 6 * 10**9
    endings: list[dict[str, Any]] = [
        {"reason": "exit", "taken_at": later, "error": CLOSED},
        {"reason": "SIGTERM", "taken_at": 5},
        {"reason": "hang", "taken_at": later},
        {"reason": "hang", "taken_at": later},
    ]
    states = [(RETIRED, RETIRED), (RETIRED,), (OPEN,), (OPEN,)]
    ranks = [
        of_four(one, *calls(*states[one]), backend="gloo", ending=ending, dump={"all_joined": True})
        for one, ending in enumerate(endings)
    ]

    found = diagnosed(*ranks)

    assert roots(found) == [("missing_rank", "default_pg", 1, [1], [2, 3])]
    assert found.findings[0].text == "rank 1 left the job (SIGTERM) while others were in this call"


def test_a_rank_that_gloo_aborted_for_a_size_mismatch_is_not_accused() -> None:
    aborted = {"reason": "SIGABRT", "taken_at": 5}
    failed = {"reason": "exit", "taken_at": 10**8, "error": CLOSED}
    ended = {"reason": "SIGTERM", "taken_at": 2 * 10**9}
    ranks = [
        of_four(number, call("all_reduce", 1, state, inputs=[[size]]), backend="gloo", ending=ending)
        for number, (state, size, ending) in enumerate(
            [(OPEN, 128, aborted), (RETIRED, 1024, failed), (OPEN, 128, ended), (RETIRED, 128, failed)]
        )
    ]
    assert diagnosed(*ranks).suspect_ranks == [1]


@pytest.mark.parametrize(("idle", "accused"), [(10**8, [1]), (5 * 10**9, [0, 1])])
def test_a_rank_the_launcher_ended_between_calls_is_not_accused(idle: int, accused: list[int]) -> None:
    endings: list[dict[str, Any]] = [
        {"reason": "SIGTERM", "taken_at": idle},
        {"reason": "exit", "taken_at": 5, "error": "ValueError: token id 50257"},
        {"reason": "SIGTERM", "taken_at": idle},
        {"reason": "SIGTERM", "taken_at": idle},
    ]
    states = [(RETIRED,), (RETIRED,), (RETIRED, OPEN), (RETIRED, OPEN)]
    ranks = [
        of_four(one, *calls(*states[one]), backend="gloo", ending=ending, dump={"all_joined": True})
        for one, ending in enumerate(endings)
    ]

    assert roots(diagnosed(*ranks)) == [("missing_rank", "default_pg", 2, accused, [2, 3])]


def test_a_majority_of_missing_ranks_is_named_if_their_dumps_rule_out_other_waits() -> None:
    hung: dict[str, Any] = {"reason": "hang", "taken_at": 9 * 10**9}
    states = [(COMPLETED, COMPLETED, OPEN), *[(COMPLETED, COMPLETED)] * 3]
    facts: dict[str, Any] = {"dump": {"has_status": True}}

    def found(**ending: Any) -> Diagnosis:
        return diagnosed(*[of_four(one, *calls(*made), **facts, **ending) for one, made in enumerate(states)])

    assert roots(found(ending=hung)) == [("missing_rank", "default_pg", 3, [1, 2, 3], [0])]
    assert roots(found()) == [("not_recorded", "default_pg", 3, [], [0])]


def test_a_rank_that_ended_while_others_wait_on_the_gpu_is_accused() -> None:
    hung: dict[str, Any] = {"reason": "hang", "taken_at": 9 * 10**9}
    for gone in ({"reason": "exit", "taken_at": 10**9}, {"reason": "SIGTERM", "taken_at": 10**9}, {"unseen": True}):
        ranks = [of_four(one, *calls(COMPLETED, OPEN), ending=gone if one == 2 else hung) for one in range(4)]
        assert roots(diagnosed(*ranks)) == [("missing_rank", "default_pg", 2, [2], [0, 1, 3])]
    assert [row[0] for row in roots(diagnosed(*[of_four(one, *calls(OPEN), ending=hung) for one in range(4)]))] == [
        "all_joined_not_completed"
    ]
    given_up = {"reason": "SIGTERM", "taken_at": 10**10}
    late = [of_four(one, *calls(OPEN), ending=given_up if one == 2 else hung) for one in range(4)]
    assert [(row[0], row[3]) for row in roots(diagnosed(*late))] == [("all_joined_not_completed", [])]
    through = [of_four(one, *calls(COMPLETED), ending={"reason": "exit", "taken_at": 10**9}) for one in range(3)]
    (stuck,) = roots(diagnosed(*through, of_four(3, *calls(OPEN), ending=hung)))
    assert (stuck[0], stuck[3]) == ("not_completed", [3])


def test_a_job_is_incomplete_if_one_rank_has_no_recorded_end() -> None:
    def found(**others: Any) -> Diagnosis:
        endings = [others, others, {"unseen": True}, others]
        return diagnosed(*[of_four(one, *calls(COMPLETED), ending=ending) for one, ending in enumerate(endings)])

    ended = found(reason="SIGTERM", taken_at=5 * 10**9)
    assert (ended.verdict, roots(ended)) == ("incomplete", [("dump_missing", "default_pg", None, [2], [])])
    assert found(reason="window", taken_at=5 * 10**9).verdict == "ok"


def test_ranks_the_launcher_ended_before_their_first_call_are_not_accused() -> None:
    endings: list[dict[str, Any]] = [
        {"reason": "exit", "taken_at": 8 * 10**8, "error": "RuntimeError: Connection closed by peer gloo/transport"},
        {"reason": "exit", "taken_at": 5, "error": "FileNotFoundError: /data/train-00001.bin"},
        {"reason": "SIGTERM", "taken_at": 8 * 10**8},
        {"reason": "SIGTERM", "taken_at": 8 * 10**8},
    ]
    ranks = [
        of_four(one, *calls(*([OPEN] if one == 0 else [])), backend="gloo", ending=ending, source="comms")
        for one, ending in enumerate(endings)
    ]
    assert roots(diagnosed(*ranks)) == [("missing_rank", "default_pg", 1, [1], [0])]


def test_a_rank_that_left_after_all_ranks_joined_a_call_is_not_accused() -> None:
    hung = {"reason": "hang", "taken_at": 6 * 10**9, "went_on": True}
    ranks = [of_four(one, *calls(OPEN), backend="gloo", ending=hung, dump={"all_joined": True}) for one in range(3)]
    found = diagnosed(*ranks, of_four(3, *calls(RETIRED), backend="gloo", ending={"reason": "exit"}))
    assert (found.verdict, roots(found)) == ("ok", [])


def test_the_earliest_root_comes_first_and_consequences_have_their_root() -> None:
    later: dict[str, Any] = {"ending": {"taken_at": 60 * 10**9}, "dump": {"has_status": True}}
    pairs = (world(6), group("1", 0, 1), group("2", 2, 3, 4), group("3", 4, 5))
    one, three = (calls(OPEN, pg=pg) for pg in "13")
    second = [call("all_reduce", 1, OPEN, pg="2", called=5)]
    ranks = [
        rank(number, *made, groups=pairs, **later)
        for number, made in enumerate((one, [], [*second], [], [*second, *three], three))
    ]

    found = diagnosed(*ranks)

    assert roots(found) == [("missing_rank", "", 1, [1], [0]), ("missing_rank", "", 1, [3], [2, 4])]
    assert [(*in_short(each), each.awaited_ranks, each.because_of) for each in found.consequences] == [
        ("all_joined_not_completed", "", 1, [], [5], [4], 1)  # rank 4 waits for rank 3
    ]
    assert found.counts == {"ranks": 6, "groups": 4, "calls": 5, "collectives": 3}


@pytest.mark.parametrize(
    ("first", "completed", "backend", "lost"),
    [(5, 3, "nccl", True), (5, 4, "nccl", False), (1, -1, "nccl", False), (2, -1, "nccl", True), (5, 3, "gloo", False)],
)
def test_a_rank_that_lost_its_first_unfinished_call_is_not_accused(
    first: int, completed: int, backend: str, lost: bool
) -> None:
    dump = {"progress": {0: Progress(first + 1, completed)}, "has_status": True}
    ranks = [rank(one, *calls(OPEN, OPEN, first=first), dump=dump, backend=backend) for one in (0, 1)]
    assert any("has more unfinished calls than its recorder keeps" in note for note in diagnosed(*ranks).notes) == lost


def in_rounds(rounds: int, *one_round: dict[str, Any]) -> list[Call]:
    """Calls that a rank makes again and again, each from a line of its own; all have finished."""
    made, numbers = [], dict.fromkeys(("0", "1"), 0)
    for _ in range(rounds):
        for facts in one_round:
            pg = facts.get("pg", "0")
            numbers[pg] += 1
            made.append(call(number=numbers[pg], **facts))
    return made


def at(line: int) -> tuple[Frame, ...]:
    return (Frame("train", "/job/train.py", line),)


def test_a_rank_that_called_on_another_group_than_before_is_named_while_the_right_one_waits_for_it() -> None:
    mean: dict[str, Any] = {"op": "all_reduce", "pg": "1", "stack": at(21)}
    share: dict[str, Any] = {"op": "broadcast", "root": 0, "stack": at(41)}
    open_mean = call(number=6, state=OPEN, **mean)
    mistaken = call(number=6, state=OPEN, **mean | {"pg": "0"})
    due = call(number=6, state=OPEN, **share)
    ranks = [of_four(0, *in_rounds(5, mean, share), open_mean), of_four(1, *in_rounds(5, mean, share), mistaken)]
    ranks += [of_four(one, *in_rounds(5, share), due) for one in (2, 3)]
    assert roots(diagnosed(*ranks)) == [("type_mismatch", "default_pg", 6, [1], [2, 3])]


def test_a_member_that_left_is_the_cause_of_a_cycle_that_lacks_it() -> None:
    """Two ranks try the call that failed again, so they make other calls than the one that still waits in it."""
    ended, hung = {"reason": "SIGTERM", "taken_at": 100 * 10**9}, {"reason": "hang", "taken_at": 50 * 10**9}
    ranks = [of_four(one, *calls(*[RETIRED] * 7), backend="gloo", ending=dict(ended)) for one in (0, 2)]
    ranks += [of_four(1, *calls(*[RETIRED] * 3, OPEN), backend="gloo", ending=hung)]
    left = of_four(3, *calls(*[RETIRED] * 3), backend="gloo", ending={"reason": "exit", "ended": True})
    assert diagnosed(*ranks, left).suspect_ranks == [3]


def test_a_rank_that_waits_for_a_receive_before_an_earlier_one_of_its_line_is_named() -> None:
    """Rank 1 takes the second of two buffers first; rank 0 sends no more before the first one is acknowledged."""
    receives = [call("recv", number, RETIRED, number, peer=0, source="train.py:19", pg="1") for number in range(1, 9)]
    waits = [call("recv", number, OPEN, number, peer=0, source="train.py:19", pg="1") for number in (9, 10)]
    sends = [call("send", number, RETIRED, number, peer=1, pg="1") for number in range(1, 10)]
    acknowledged = call("recv", 1, OPEN, 11, peer=1, pg="1", source="train.py:42")
    sender = of_four(0, *sends, acknowledged, backend="gloo")
    receiver = of_four(1, *receives, *waits, backend="gloo")
    sender.awaited, receiver.awaited, receiver.waited = {9}, {9}, set(range(8))
    found = diagnosed(sender, receiver, of_four(2, backend="gloo"), of_four(3, backend="gloo"))
    (cycle,) = [one for one in found.findings if one.kind == "p2p_wait_cycle"]
    assert (cycle.culprit_ranks, "it has not waited for rank 1's recv #9" in cycle.text) == ([1], True)
