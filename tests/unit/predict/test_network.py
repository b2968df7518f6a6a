"""What a network of two numbers says, how they are found from times, and how far off they are for a kind left out."""

from __future__ import annotations

import pytest

from crossrank.comm import Locality
from crossrank.tools.predict.fit import MeasuredKind, fit_network, leave_one_out
from crossrank.tools.predict.network import ALGORITHMS, Algorithm, Link, Network, bus_bytes, link_of, steps

FAST, SLOW = Link(rate=300.0, latency_ns=2000), Link(rate=50.0, latency_ns=8000)
BOTH = Network(links={"intra_node": FAST, "cross_node": SLOW})


@pytest.mark.parametrize(
    ("op", "size", "of_algorithms"),
    [
        ("all_reduce", 8, (14, 6, 2)),
        ("all_gather", 8, (7, 3, 1)),
        ("reduce_scatter", 5, (4, 3, 1)),
        ("all_to_all", 8, (7, 7, 1)),
        ("barrier", 2, (2, 2, 2)),
        ("send", 2, (1, 1, 1)),
        ("all_reduce", 1, (0, 0, 0)),
    ],
)
def test_steps_depend_on_the_algorithm(op: str, size: int, of_algorithms: tuple[int, ...]) -> None:
    assert tuple(steps(op, size, algorithm) for algorithm in ALGORITHMS) == of_algorithms


def test_a_duration_depends_on_steps_and_bytes() -> None:
    # 2 * 7 steps of 8 us, and 2 * 7/8 of 1 MB at 50 GB/s.
    assert BOTH.duration_ns("all_reduce", 8, bus_bytes("all_reduce", 8, 1_000_000), "cross_node") == 112_000 + 35_000
    assert BOTH.duration_ns("barrier", 8, bus_bytes("barrier", 8, 0), "intra_node") == 28_000
    assert BOTH.duration_ns("send", 2, bus_bytes("send", 2, 300), "intra_node") == 2_001


@pytest.mark.parametrize(
    ("links", "locality", "link"),
    [
        ({"intra_node": FAST, "cross_node": SLOW}, "unknown", SLOW),
        ({"intra_node": FAST, "cross_node": SLOW}, "nvlink_domain", SLOW),
        ({"intra_node": FAST}, "cross_node", None),
        ({"intra_node": FAST}, "unknown", None),
        ({"unknown": FAST}, "cross_node", FAST),
    ],
)
def test_an_intra_node_link_is_not_used_for_other_links(
    links: dict[Locality, Link], locality: Locality, link: Link | None
) -> None:
    assert Network(links=links).link(locality) == link


@pytest.mark.parametrize(("algorithm", "us"), [("ring", 2.75 * 126), ("tree", 2 * (3 * 8 + 3 * 2)), ("direct", 16.0)])
def test_steps_inside_a_node_have_its_latency(algorithm: Algorithm, us: float) -> None:
    network = Network(links=BOTH.links, algorithm=algorithm)
    assert network.duration_ns("all_reduce", 64, 0.0, "cross_node", nodes=8) == us * 1000


def test_an_unknown_operation_has_no_duration() -> None:
    assert BOTH.duration_ns("quantum_reduce", 8, 100, "cross_node") is None


@pytest.mark.parametrize("text", ["", "300", "300GB", "0GB/s", "300GB/s,", "300GB/s,2", "300GB/s,2us,3", "-1GB/s"])
def test_an_invalid_link_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not RATE"):
        link_of(text)


def kind(op: str, bytes: int, size: int = 8, locality: Locality = "cross_node", link: Link = SLOW) -> MeasuredKind:
    """Collectives that take what a ring on `link` takes."""
    carried = bus_bytes(op, size, bytes)
    time = Network(links={locality: link}).duration_ns(op, size, carried, locality)
    assert time is not None
    return MeasuredKind(op=op, size=size, locality=locality, bytes=bytes, bus_bytes=carried, count=3, time_ns=time)


def test_a_fit_finds_the_network_of_the_times() -> None:
    kinds = [kind("all_reduce", size) for size in (1000, 100_000, 10_000_000)]
    kinds += [kind("all_gather", size, locality="intra_node", link=FAST) for size in (5000, 700_000)]
    network = fit_network(kinds, "ring")
    for locality, link in (("cross_node", SLOW), ("intra_node", FAST)):
        found = network.links[locality]  # type: ignore[index]
        assert found.rate == pytest.approx(link.rate)
        assert found.latency_ns == pytest.approx(link.latency_ns)
    assert set(network.of_operations) == {("all_reduce", "cross_node"), ("all_gather", "intra_node")}


def test_a_kind_left_out_is_predicted_from_all_others_of_its_locality() -> None:
    kinds = [kind("all_reduce", 1000), kind("all_gather", 100_000), kind("broadcast", 10_000_000)]
    alone = kind("all_reduce", 1000, locality="intra_node", link=FAST)
    found = leave_one_out([*kinds, alone], "ring")
    assert [one.error for one in found[:3]] == [pytest.approx(0, abs=1e-9)] * 3
    assert (found[3], found[3].error) == (alone, None)


def test_rate_and_latency_are_not_negative() -> None:
    falling = [
        MeasuredKind(op="broadcast", size=2, locality="cross_node", bytes=size, bus_bytes=size, count=1, time_ns=time)
        for size, time in ((1000, 900.0), (2000, 500.0))
    ]
    link = fit_network(falling, "ring").links["cross_node"]
    assert link.rate == float("inf")
    assert 500 < link.latency_ns < 900
    steep = [
        MeasuredKind(op="broadcast", size=2, locality="cross_node", bytes=size, bus_bytes=size, count=1, time_ns=time)
        for size, time in ((1000, 10.0), (2000, 900.0))
    ]
    assert fit_network(steep, "ring").links["cross_node"].latency_ns == 0


def test_barriers_alone_give_a_latency() -> None:
    link = fit_network([kind("barrier", 0)], "ring").links["cross_node"]
    assert link.latency_ns == pytest.approx(8000)
    assert link.rate == float("inf")
