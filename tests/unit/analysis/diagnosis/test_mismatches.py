"""Which calls of a group do not fit, who is the odd one, and how that is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from crossrank.comm import CommRecord
from crossrank.tools.analysis.diagnosis.mismatches import MatchKey, contradiction, find_mismatches, match_key
from tests.unit.analysis.diagnosis.ranks import Call, call, job, rank, world


def record(op: str = "all_reduce", **facts: Any) -> CommRecord:
    return call(op, **facts)[0]


PARTS = [record(inputs=[[2]], outputs=[[4], [2]]), record(inputs=[[3]], outputs=[])]


@pytest.mark.parametrize(
    ("made", "key", "text"),
    [
        (record(dtype="float32"), MatchKey("all_reduce", 8, "float32"), "all_reduce of 8 elements float32"),
        (record("all_gather", outputs=[[4], [2, 3]]), MatchKey("all_gather", 10), "all_gather of 10 elements"),
        (record("all_gather", inputs=[]), MatchKey("all_gather"), "all_gather"),
        (record("all_gather"), MatchKey("all_gather"), "all_gather"),
        (record("broadcast", root=0), MatchKey("broadcast", 8, root=0), "broadcast of 8 elements with root 0"),
        (record("all_to_all"), MatchKey("all_to_all"), "all_to_all"),
        (record("unheard_of", reduce="sum"), MatchKey("unheard_of", 8, reduce="sum"), "unheard_of of 8 elements sum"),
        (
            record(dtype="float32", out_dtype="float16"),
            MatchKey("all_reduce", 8, "float32 into float16"),
            "all_reduce of 8 elements float32 into float16",
        ),
        (record("all_gather", c10d="all_gather_v", outputs=[[9]]), MatchKey("all_gather"), "all_gather"),
        (record("coalesced", inputs=[]), MatchKey(), "coalesced"),
        (
            record("coalesced", inputs=[], members=PARTS),
            MatchKey("coalesced", (6, 3)),
            "coalesced of (6, 3) elements",
        ),
    ],
)
def test_a_call_gives_its_match_key_and_text(made: CommRecord, key: MatchKey, text: str) -> None:
    assert (match_key(made), match_key(made).text) == (key, text)


@pytest.mark.parametrize(
    ("key", "fits"),
    [
        (MatchKey("all_reduce", 8, root=0), True),
        (MatchKey("all_reduce"), True),
        (MatchKey("all_reduce", 8, "float32", 0, "sum"), True),
        (MatchKey("all_reduce", 9, root=0), False),
        (MatchKey("broadcast"), False),
    ],
)
def test_a_field_of_only_one_call_is_not_a_difference(key: MatchKey, fits: bool) -> None:
    this = MatchKey("all_reduce", 8, root=0)
    assert (this.fits(key), key.fits(this)) == (fits, fits)


@pytest.mark.parametrize(
    ("made", "size", "text"),
    [
        (record(outputs=[[8]]), 2, ""),
        (record(outputs=[[9]]), 0, "8 elements in, 9 elements out"),
        (record(), 2, ""),
        (record(inputs=[], outputs=[[9]]), 2, ""),
        (record(outputs=[[9]], members=PARTS), 2, ""),
        (record("broadcast", outputs=[[9]]), 2, ""),
        (record(outputs=[[8]], dtype="float32", out_dtype="float16"), 2, "float32 in, float16 out"),
        (record("all_gather", outputs=[[16]]), 2, ""),
        (record("all_gather", outputs=[[16]]), 3, "8 elements in, 16 elements out"),
        (record("all_gather", outputs=[[16]]), 0, ""),
        (record("all_gather", outputs=[[8], [9]]), 2, ""),
        (record("all_gather", outputs=[[9], [9]]), 2, "8 elements in, 18 elements out"),
        (record("all_gather", inputs=[[4], [4]], outputs=[[8], [9]]), 2, "8 elements in, 17 elements out"),
        (record("reduce_scatter", inputs=[[16]], outputs=[[8]]), 2, ""),
        (record("reduce_scatter", c10d="reduce_scatter_v", inputs=[[16]], outputs=[[9]]), 2, ""),
        (record("all_gather", c10d="all_gather_v", inputs=[[3]], outputs=[[16]]), 2, ""),
        (record("reduce_scatter", inputs=[[8]], outputs=[[16]]), 2, "8 elements in, 16 elements out"),
        (record("reduce_scatter", inputs=[[8], [9]], outputs=[[8]]), 2, ""),
    ],
)
def test_a_contradiction_in_a_call_is_described(made: CommRecord, size: int, text: str) -> None:
    assert contradiction(made, size) == text


SIZES = {"a": [[8]], "b": [[9]], "c": [[10]]}


def calls(letters: str, first: int = 1) -> list[Call]:
    """all_reduces: a letter stands for its size, a capital one for another operation of that size; `-` leaves the
    number out."""
    return [
        call("broadcast" if letter.isupper() else "all_reduce", number, called=number, inputs=SIZES[letter.lower()])
        for number, letter in enumerate(letters, first)
        if letter != "-"
    ]


def all_to_alls(*sides: tuple[int, int]) -> list[list[Call]]:
    """An all_to_all of each rank, by how much goes in and comes out."""
    return [[call("all_to_all", inputs=[[into]], outputs=[[out]])] for into, out in sides]


def split_all_to_alls(*sides: tuple[list[int], list[int]]) -> list[list[Call]]:
    """An all_to_all of each rank, by what it sends to each rank and what it expects of each."""
    made = []
    for sends, expects in sides:
        facts: dict[str, Any] = {"inputs": [[sum(sends), 2]], "outputs": [[sum(expects), 2]]}
        made.append([call("all_to_all", c10d="alltoall_base_", in_split=sends, out_split=expects, **facts)])
    return made


def broadcasts(elements: int, dtype: str) -> list[Call]:
    return [call("broadcast", dtype=dtype, inputs=[[elements]])]


ALL = "by [1] of [0, 1, 2]"
LEFT_OUT = f"{ALL}: rank 1 skipped this call; its next calls match those of the other ranks"
TOO_MANY = f"{ALL}: rank 1 made this call and the other ranks did not; the next calls match again"
ODD = f"{ALL}: rank 0,2: A; rank 1"
OUT_9, OUT_8 = call(outputs=[[9]]), call(outputs=[[8]], dtype="float32", out_dtype="float64")


@pytest.mark.parametrize(
    ("of_ranks", "expected"),
    [
        (("aa", "aa", "aa"), ""),
        (("aa", "a", "aa"), ""),
        (("ab",), ""),
        (("aa", "ab", "aa"), f"size_mismatch all_reduce #2 since 2 {ODD}: B"),
        (("aa", "aA", "aa"), f"type_mismatch all_reduce #2 since 2 {ODD}: broadcast of 8 elements"),
        (("ab", "aa", ""), "size_mismatch all_reduce #2 since 2 by [] of [0, 1]: rank 0: B; rank 1: A"),
        (("aab", "ab", "aab"), f"missing_rank all_reduce #2 since 2 {LEFT_OUT}"),
        (("ab", "aab", "ab"), f"extra_collective all_reduce #2 since 2 {TOO_MANY}"),
        (("abab", "bab", "abab"), f"missing_rank all_reduce #1 since 1 {LEFT_OUT}"),
        (("bab", "abab", "bab"), f"extra_collective all_reduce #1 since 1 {TOO_MANY}"),
        (("abab", "baba", "abab"), f"size_mismatch all_reduce #1 since 1 {ODD}: B"),
        (("aa", "-bb", "aa"), f"size_mismatch all_reduce #2 since 2 {ODD}: B"),
        (
            ("aa", [OUT_9, *calls("b", 2)], "aa"),
            f"size_mismatch all_reduce #1 since 0 {ALL}: rank 1: 8 elements in, 9 elements out",
        ),
        (
            ("a", [OUT_8], ""),
            "dtype_mismatch all_reduce #1 since 0 by [1] of [0, 1]: rank 1: float32 in, float64 out",
        ),
        (
            ([OUT_9], [OUT_9], ""),
            "size_mismatch all_reduce #1 since 0 by [] of [0, 1]: rank 0-1: 8 elements in, 9 elements out",
        ),
        # A broadcast copies bytes: it ends whatever types they have.
        ([broadcasts(8, "float32"), broadcasts(32, "uint8"), ""], ""),
        (
            [broadcasts(8, "float32"), broadcasts(31, "uint8"), ""],
            "size_mismatch broadcast #1 since 0 by [] of [0, 1]: rank 0: broadcast of 8 elements float32; "
            "rank 1: broadcast of 31 elements uint8",
        ),
        # Sizes that repeat say which rank left one out.
        (("abcabcabc", "abcabcac", ""), f"missing_rank all_reduce #8 since 8 {LEFT_OUT.replace(', 2]', ']')}"),
        # Another operation, whatever its own sizes say.
        (
            ("aa", [*calls("a"), call("all_gather", 2, inputs=[[8]], outputs=[[9]])], "aa"),
            f"type_mismatch all_reduce #2 since 0 {ODD}: all_gather of 9 elements",
        ),
        (all_to_alls((8, 8), (9, 8), (7, 8)), ""),
        ([*all_to_alls((8, 8), (9, 8)), ""], ""),
        (
            all_to_alls((8, 8), (9, 8), (8, 8)),
            "size_mismatch all_to_all #1 since 0 by [1] of [0, 1, 2]: the ranks send 25 elements in total and expect "
            "24; rank 1 sends 9, the others 8 each",
        ),
        # What one rank has too few another has too many: the sums are equal.
        (
            split_all_to_alls(([1, 2, 3], [1, 2, 3]), ([2, 1, 1], [3, 1, 0]), ([3, 1, 1], [3, 1, 1])),
            f"size_mismatch all_to_all #1 since 0 {ALL}: "
            "rank 0 sends 4 elements to rank 1, which expects 6; rank 2 sends 2 elements to rank 1, which expects 0",
        ),
        # Of one pair either end may be wrong.
        (
            split_all_to_alls(([1, 2, 1], [1, 1, 1]), ([1, 1, 1], [3, 1, 1]), ([1, 1, 1], [1, 1, 1])),
            "size_mismatch all_to_all #1 since 0 by [] of [0, 1, 2]: "
            "rank 0 sends 4 elements to rank 1, which expects 6",
        ),
        (split_all_to_alls(([1, 2, 1], [1, 1, 1]), ([1, 1, 1], [2, 1, 1]), ([1, 1, 1], [1, 1, 1])), ""),
    ],
)
def test_the_first_mismatched_calls_of_a_group_are_found(of_ranks: Sequence[str | list[Call]], expected: str) -> None:
    made = [calls(one) if isinstance(one, str) else one for one in of_ranks]
    found = find_mismatches(job(*(rank(number, *one, groups=(world(3),)) for number, one in enumerate(made))))
    texts = [
        f"{one.kind} {one.op} #{one.seq} since {one.since} by {list(one.culprits)} of {one.ranks}: {one.text}"
        for one in found
    ]
    for long, letter in (("all_reduce of 8 elements", "A"), ("all_reduce of 9 elements", "B")):
        texts = [text.replace(long, letter) for text in texts]
    assert "; ".join(texts) == expected


@pytest.mark.parametrize(
    ("of_ranks", "accused"),
    [
        (("aaAaaAaaA", "aaAaaAaaa", "aaAaaAaaA", ""), (1,)),  # only rank 1 went another way than before
        (("aaAaaAaaa", "aaAaaAaaA", "aaAaaAaaa", ""), (1,)),  # half of the group went another way, as far as is known
        (("aaaaA", "aaaaa", "aaaaA", ""), (1,)),  # the call is new on two ranks
        (("aaaaA", "aaaaa", "", ""), ()),
        (("aaAaaAaaA", "aaAaaAaaa", "", ""), (1,)),  # of two ranks, one went another way than before
        (("aaaaa", "aaaaa", "aaaaA", ""), (2,)),  # the first call after a loop, which two have not left
    ],
)
def test_one_diverging_rank_of_three_is_named_although_a_fourth_is_missing(
    of_ranks: tuple[str, ...], accused: tuple[int, ...]
) -> None:
    ranks = [rank(one, *calls(made), groups=(world(4),)) for one, made in enumerate(of_ranks) if made]
    assert [(one.kind, one.culprits) for one in find_mismatches(job(*ranks))] == [("type_mismatch", accused)]


@pytest.mark.parametrize(
    "name", ["q" * 10_000, "all\ufffdreduce", "", "\x00" * 8], ids=["long", "no UTF-8", "empty", "0"]
)
def test_a_damaged_name_of_an_operation_differs_from_no_call(name: str) -> None:
    assert match_key(record(name)).fits(match_key(record("all_gather")))
    assert not match_key(record("unheard_of")).fits(match_key(record("all_gather")))


@pytest.mark.parametrize(
    "damaged",
    [
        record(dtype="floatXX"),
        record(dtype="q" * 10_000),
        record(reduce="zum"),
        record("all_reducee", c10d="allreduce_"),
        record("foo", c10d="nccl:foo"),
        record(inputs=[], outputs=[[8]]),
        record(inputs=[[1 << 40, 1 << 40]]),
    ],
    ids=["dtype", "long dtype", "reduction", "operation", "operation of a dump", "no input", "impossible size"],
)
def test_an_unknown_value_differs_from_no_call(damaged: CommRecord) -> None:
    assert match_key(damaged).fits(match_key(record(dtype="float32", reduce="sum")))


def test_a_damaged_type_or_size_contradicts_nothing() -> None:
    assert contradiction(record(dtype="Zloat", out_dtype="float32"), 2) == ""
    assert contradiction(record(outputs=[[1 << 40, 1 << 40]]), 2) == ""
