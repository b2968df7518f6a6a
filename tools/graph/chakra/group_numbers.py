"""Numbers for process groups: the feeders take a group's name for an integer, with 0 for the world.

The world is torch's default group; another one of all ranks orders its communications by itself and has a number.
A number is made from the group's name and members alone, so that ranks converted apart, on different machines or
days, agree on it. Groups that old traces name by an address, which differs between ranks, go by their members.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import msgspec

from crossrank.comm import Group
from crossrank.errors import CrossrankError
from crossrank.tools.graph.linking import LinkedTrace
from crossrank.tools.traces.param_comms import named_by_address

WORLD = "0"
_LARGEST = (1 << 31) - 1
"""The feeders read an int."""


class NumberedGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A group as the traces and `comm_groups.json` have it, and what it was called."""

    number: str
    ranks: tuple[int, ...]
    """Global ranks."""
    pg: str
    desc: str = ""


def number_group(group: Group, world_size: int | None) -> NumberedGroup:
    """The group with its number. Raises `CrossrankError` where its members are not known."""
    if not group.ranks:
        raise CrossrankError(
            f"process group {group.pg!r} has no known members, and a simulator needs them; link with the comms file of "
            "the rank, or a trace with '## process_group:init ##'"
        )
    ranks = tuple(group.ranks)
    by_address = named_by_address(group.pg)
    number = str(1 + zlib.crc32(msgspec.json.encode(["" if by_address else group.pg, ranks])) % _LARGEST)
    if (by_address or group.pg == "0" or group.desc == "default_pg") and world_size is not None:
        number = WORLD if ranks == tuple(range(world_size)) else number
    return NumberedGroup(number=number, ranks=ranks, pg=group.pg, desc=group.desc)


def number_groups(trace: LinkedTrace) -> dict[str, NumberedGroup]:
    """The groups that communications use, by their names."""
    used = {one.record.pg: one.group for one in reversed(trace.communications) if one.group is not None}
    return {pg: number_group(group, trace.world_size) for pg, group in used.items()}


def merge(of_ranks: Iterable[Iterable[NumberedGroup]]) -> dict[str, list[int]]:
    """`comm_groups.json`: number -> global ranks of every group but the world.

    Raises `CrossrankError` where one number stands for two groups.
    """
    merged: dict[str, NumberedGroup] = {}
    for groups in of_ranks:
        for group in groups:
            other = merged.setdefault(group.number, group)
            if other.ranks != group.ranks and group.number != WORLD:
                raise CrossrankError(
                    f"groups {other.pg!r} {list(other.ranks)} and {group.pg!r} {list(group.ranks)} got the same number "
                    f"{group.number}; give one of them another name (group_desc) and record again"
                )
    ordered = sorted(merged.values(), key=lambda group: int(group.number))
    return {group.number: list(group.ranks) for group in ordered if group.number != WORLD}
