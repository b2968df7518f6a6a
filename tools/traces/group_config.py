"""Process groups as torch describes them to its profilers (`pg_config`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec

from crossrank.budget import MEMBERS, Budget
from crossrank.comm import MOST_RANKS, Group, Int, Number
from crossrank.errors import BROKEN
from crossrank.privacy import Privacy
from crossrank.tools.traces.json_document import parse


class ListedGroup(msgspec.Struct):
    pg_name: Annotated[str | int, Privacy.GROUP]
    pg_desc: Annotated[str, Privacy.GROUP] = ""
    backend_config: Annotated[str, Privacy.BACKEND] = ""
    group_size: Number | None = None
    """In execution traces, which list no ranks for a group of all ranks."""
    pg_size: Number = 0
    """In Kineto traces."""
    ranks: Annotated[list[Int] | str, Privacy.NUMBER] = []


def read_groups(config: Any, budget: Budget) -> Iterator[Group]:
    """Yield the groups in a list, or in an object with their names as keys, as some versions of torch write it.

    Groups in another format are skipped. Raises `BudgetError` if they have too many members.
    """
    rows = list(config.values()) if isinstance(config, dict) else config
    for row in rows if isinstance(rows, Sequence) else ():
        try:
            given = msgspec.convert(row, ListedGroup, strict=False)
        except BROKEN:
            continue
        ranks = (parse(given.ranks, list[Int]) or []) if isinstance(given.ranks, str) else given.ranks
        budget.spend(MEMBERS, len(ranks))
        if not ranks and given.group_size is not None:
            ranks = budget.ranks(range(min(given.group_size, MOST_RANKS)))
        yield Group(
            pg=str(given.pg_name),
            size=given.group_size or given.pg_size or len(ranks),
            ranks=ranks or None,
            desc=given.pg_desc,
            backend=given.backend_config,
        )
