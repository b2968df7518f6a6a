"""Entries of torch's flight recorder for tests, as NCCL notes them; what a test does not name has a default."""

from __future__ import annotations

from typing import Any


def flight_entry(number: int, name: str, seq: int = 0, p2p: int = 0, group: str = "0", **fields: Any) -> dict[str, Any]:
    """A call of a tensor of four floats on each side; `name` has the backend before it where that is not NCCL."""
    sizes: dict[str, Any] = {} if "coalesced" in name else {f"{side}put_sizes": [[4]] for side in ("in", "out")}
    sizes |= {f"{side}put_dtypes": ["Float"] for side in ("in", "out") if sizes}
    numbers = {"record_id": number, "pg_id": int(group), "collective_seq_id": seq, "p2p_seq_id": p2p}
    called = {"profiling_name": name if ":" in name else f"nccl:{name}", "time_created_ns": 1000 + number}
    return numbers | called | {"process_group": (group, "default_pg"), "is_p2p": p2p > 0} | sizes | fields


def flight_dump(entries: Any, ranks: list[int], **content: Any) -> dict[str, Any]:
    """A dump of calls on one group."""
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(ranks)}}
    return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries} | content
