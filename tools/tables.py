"""The tables and their columns: names, types and meanings, which do not change within a version of the format.

`TABLES` are what `crossrank.load` and `crossrank export` give, `ANSWERS` what commands make of them.

Times are ns since 1970. In tables of one rank they are on its own clock, in those of the job on the clock that all
ranks were put on. `pg` and `members` together name a process group: several may share the name. What is not known, or
has no meaning, is null.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import polars as pl

from crossrank.privacy import Privacy

FORMAT = "crossrank-frames 1"

_INT, _TEXT, _FLOAT, _BOOL = pl.Int64(), pl.String(), pl.Float64(), pl.Boolean()


Row = dict[str, Any]
"""One row of a table, by column."""


class Column(NamedTuple):
    dtype: pl.DataType
    meaning: str
    unit: str = ""
    """ns, B (bytes), or GB/s of 1e9 bytes; empty where it has none."""
    privacy: Privacy = Privacy.NUMBER
    """What its values say of the user; a text has to have a class of its own."""


class TableSchema(NamedTuple):
    meaning: str
    of_rank: bool
    """It has one part for each rank."""
    columns: dict[str, Column]

    @property
    def schema(self) -> dict[str, Any]:
        return self.part(*self.columns)

    def part(self, *names: str) -> dict[str, Any]:
        """The types of some of its columns."""
        return {name: self.columns[name].dtype for name in names}

    def select(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The columns of the table from a frame that has them, in their order, each of its type; also `KEYS`, if the
        frame has them."""
        columns = self.columns | {name: one for name, one in KEYS.items() if name in frame.columns}
        return frame.select(pl.col(name).cast(one.dtype) for name, one in columns.items())

    def rows(self, frame: pl.DataFrame) -> list[Row]:
        """The same as JSON has it."""
        return self.select(frame).to_dicts()


_RANK = {"rank": Column(_INT, "global rank")}
_CALL = {"call": Column(_INT, "number of the call on its rank, as in its file; by its place where a file has none")}
KEYS = {
    "group": Column(_INT, "number of the process group, the same in all tables"),
    "collective": Column(_INT, "number of the collective or transfer, the same in all tables"),
}
"""What joins tables. A rank by itself does not know them: in files the tables of one rank are without, and `arrivals`
has them for each call; in the frames of `crossrank.load` the tables `calls`, `durations` and `waits` have them too."""
_OP = {"op": Column(_TEXT, "operation", privacy=Privacy.API)}
_DESC = Column(_TEXT, "description of the group", privacy=Privacy.GROUP)
_GROUP = {
    "pg": Column(_TEXT, "name of the process group", privacy=Privacy.GROUP),
    "members": Column(_TEXT, "its global ranks, as 0-3,8; empty where they are not known"),
}
_SIZE = {"bytes": Column(_INT, "S of nccl-tests: see crossrank/comm.py", "B", privacy=Privacy.SIZE)}
_PLACE = {
    "locality": Column(_TEXT, "intra_node, nvlink_domain, cross_node or unknown", privacy=Privacy.WORD),
    "source": Column(_TEXT, "file.py:line of the user's code; null where C++ called", privacy=Privacy.PLACE),
    "step": Column(_INT, "iteration"),
}
_SPAN = {
    "began_ns": Column(_INT, "begin", "ns", privacy=Privacy.WALL),
    "ended_ns": Column(_INT, "end", "ns", privacy=Privacy.WALL),
    "duration_ns": Column(_INT, "how long it took", "ns"),
}
_TIMED_BY = {
    "timed_by": Column(_TEXT, "what measured it: kineto, nsight, flight, inspector, work, replay", privacy=Privacy.WORD)
}
_MEASURED = {
    "ranks": Column(_INT, "ranks of which times are known"),
    "expected": Column(_INT, "ranks that take part"),
    "called_ns": Column(_INT, "the first rank's host made the call", "ns", privacy=Privacy.WALL),
    "arrived_ns": Column(_INT, "the last rank's communication began", "ns", privacy=Privacy.WALL),
    "ended_ns": Column(_INT, "the last rank's communication ended", "ns", privacy=Privacy.WALL),
    "time_ns": Column(_INT, "how long it took from the last arrival", "ns"),
    "is_upper_bound": Column(_BOOL, "time_ns is an upper bound: not all ranks were seen, or clocks are too far apart"),
    "algbw_gb_per_s": Column(_FLOAT, "bytes / time", "GB/s"),
    "busbw_gb_per_s": Column(_FLOAT, "algbw x the factor of nccl-tests", "GB/s"),
    "longest_wait_ns": Column(_INT, "how long the first rank waited for the last", "ns"),
    "last_rank": Column(_INT, "who arrived last"),
}

TABLES = {
    "calls": TableSchema(
        "every call of every rank",
        True,
        {
            **_RANK,
            **_CALL,
            "op": Column(_TEXT, "operation: all_reduce, send, …", privacy=Privacy.API),
            "api": Column(_TEXT, "the public function called; null where C++ called", privacy=Privacy.API),
            **_GROUP,
            "desc": _DESC,
            "number": Column(
                _INT, "n-th collective of its rank on the group, or n-th send (receive) to (from) that peer"
            ),
            "peer": Column(_INT, "the other end of a send or receive"),
            "root": Column(_INT, "root of a broadcast, reduce, gather or scatter"),
            **_SIZE,
            "dtype": Column(_TEXT, "element type", privacy=Privacy.DTYPE),
            "reduce": Column(_TEXT, "reduction", privacy=Privacy.REDUCTION),
            "inputs": Column(_TEXT, "shapes of the inputs, as JSON", privacy=Privacy.SIZE),
            "outputs": Column(_TEXT, "shapes of the outputs, as JSON", privacy=Privacy.SIZE),
            "batch": Column(_INT, "number of the first call of the launch that it went out with"),
            **_PLACE,
            "thread": Column(_INT, "the system's number of the thread that called"),
            "state": Column(_TEXT, "scheduled, started, retired or completed", privacy=Privacy.STATE),
            "called_ns": Column(_INT, "the host made the call", "ns", privacy=Privacy.WALL),
            **_SPAN,
            **_TIMED_BY,
        },
    ),
    "durations": TableSchema(
        "the calls of which a duration was measured",
        True,
        {
            **_RANK,
            **_CALL,
            **_OP,
            **_GROUP,
            **_SIZE,
            **_SPAN,
            **_TIMED_BY,
        },
    ),
    "waits": TableSchema(
        "when a host stood still for communication",
        True,
        {
            **_RANK,
            "call": Column(_INT, "number of the call that it waited for"),
            "op": Column(_TEXT, "its operation", privacy=Privacy.API),
            "source": Column(_TEXT, "where it was made", privacy=Privacy.PLACE),
            "stood": Column(
                _TEXT, "in what the host stood: wait, wait_tensor, or the launch itself", privacy=Privacy.WORD
            ),
            **_SPAN,
        },
    ),
    "steps": TableSchema(
        "iterations of every rank; the last one has no end",
        True,
        {**_RANK, "step": Column(_INT, "iteration"), **_SPAN},
    ),
    "overlap": TableSchema(
        "what a rank did with its time in windows that were traced: duration = computation + exposed + memory + idle",
        False,
        {
            **_RANK,
            "step": Column(_INT, "iteration; null where none are known: the whole window"),
            "began_ns": Column(_INT, "begin", "ns", privacy=Privacy.WALL),
            "duration_ns": Column(_INT, "how long it took", "ns"),
            "computation_ns": Column(_INT, "a kernel (operation of the host) computed", "ns"),
            "communication_ns": Column(_INT, "a kernel (Work) communicated", "ns"),
            "exposed_ns": Column(_INT, "communication while nothing computed", "ns"),
            "memory_ns": Column(_INT, "copies and memsets while neither ran", "ns"),
            "idle_ns": Column(_INT, "nothing ran", "ns"),
            "waiting_ns": Column(_INT, "a call waited for another rank", "ns"),
            "waits_for": Column(_INT, "the rank that was waited for longest"),
            "waits_for_ns": Column(_INT, "how long", "ns"),
            "measured_on": Column(_TEXT, "device or host", privacy=Privacy.WORD),
        },
    ),
    "collectives": TableSchema(
        "collectives, matched over all ranks",
        False,
        {
            **KEYS,
            **_GROUP,
            "number": Column(_INT, "n-th collective of the group"),
            **_OP,
            "root": Column(_INT, "its root"),
            **_SIZE,
            **_PLACE,
            **_MEASURED,
        },
    ),
    "transfers": TableSchema(
        "sends with their receives, joined pair by pair; batches stand by themselves where files do not number pairs",
        False,
        {
            **KEYS,
            **_GROUP,
            "source_rank": Column(_INT, "sender; null where the file does not tell the two ends"),
            "destination_rank": Column(_INT, "receiver; null where the file does not tell the two ends"),
            "number": Column(_INT, "n-th of the pair on the group"),
            "calls": Column(
                _INT,
                "sends and receives of a rank that have one time together, as those of one launch; then an upper bound",
            ),
            **_SIZE,
            **_PLACE,
            **_MEASURED,
        },
    ),
    "arrivals": TableSchema(
        "calls of collectives and transfers: how late the rank came, how long it waited; of a batch the first call",
        False,
        {
            **_RANK,
            **_CALL,
            **KEYS,
            **_OP,
            "step": Column(_INT, "iteration"),
            "late_ns": Column(_INT, "its communication began so long after that of the first rank, on one clock", "ns"),
            "waiting_ns": Column(_INT, "it waited so long for the last rank", "ns"),
            "opens_window": Column(_BOOL, "a rank's window begins with it: its lateness may be that of a profiler"),
        },
    ),
    "groups": TableSchema(
        "process groups",
        False,
        {
            "group": KEYS["group"],
            **_GROUP,
            "desc": Column(_TEXT, "description", privacy=Privacy.GROUP),
            "size": Column(_INT, "how many members it has"),
            "backend": Column(_TEXT, "backend", privacy=Privacy.BACKEND),
            "locality": Column(_TEXT, "intra_node, nvlink_domain, cross_node or unknown", privacy=Privacy.WORD),
            "calls": Column(_INT, "calls on it, summed over ranks"),
            "bytes": Column(
                _INT,
                "S of nccl-tests, summed over ranks; null where that of a call is not known",
                "B",
                privacy=Privacy.SIZE,
            ),
        },
    ),
    "ranks": TableSchema(
        "ranks and what was read of them",
        False,
        {
            **_RANK,
            "host": Column(_TEXT, "host name", privacy=Privacy.HOST),
            "node": Column(_TEXT, "what ranks of one machine share", privacy=Privacy.NODE),
            "path": Column(_TEXT, "the file", privacy=Privacy.PATH),
            **_TIMED_BY,
            "calls": Column(_INT, "calls read"),
            "steps": Column(_INT, "iterations read"),
            "clock_shift_ns": Column(_INT, "what is added to its times to have them on the clock of the job", "ns"),
            "ended_by": Column(
                _TEXT,
                "what ended the process, or the dump was taken for; null where it is not known",
                privacy=Privacy.REASON,
            ),
            "problems": Column(_INT, "parts of the file that could not be read"),
        },
    ),
    "stragglers": TableSchema(
        "who arrives first and last, of collectives and transfers of which all members are known",
        False,
        {
            **_RANK,
            "collectives": Column(_INT, "it took part in"),
            "first": Column(_INT, "of them it arrived at first"),
            "last": Column(_INT, "of them it arrived at last"),
            "waiting_ns": Column(_INT, "time in which one of its calls waited for another rank", "ns"),
            "waited_for_ns": Column(_INT, "time in which another rank waited for it", "ns"),
        },
    ),
}

_TIMES = pl.Struct(dict.fromkeys(("p50", "p95", "max", "total"), _FLOAT))
_RATES = pl.Struct(dict.fromkeys(("p5", "p50", "p95", "max"), _FLOAT))
_SHARES = {
    "computation_ms": Column(_FLOAT, "something computed", "ms"),
    "exposed_ms": Column(_FLOAT, "communication while nothing computed", "ms"),
    "memory_ms": Column(_FLOAT, "copies and memsets while neither ran", "ms"),
    "idle_ms": Column(_FLOAT, "nothing ran", "ms"),
}

ANSWERS = {
    "bandwidth": TableSchema(
        "collectives that agree in what they are grouped by; null stands for what is not grouped by, or not known",
        False,
        {
            "op": Column(_TEXT, "operation; sends and receives are send/recv", privacy=Privacy.API),
            "pg": _GROUP["pg"],
            "desc": _DESC,
            "ranks": Column(_INT, "members of the group"),
            "size_from": Column(_INT, "smallest size of the bucket, S of nccl-tests", "B", privacy=Privacy.SIZE),
            "size_to": Column(_INT, "largest size of the bucket", "B", privacy=Privacy.SIZE),
            "locality": _PLACE["locality"],
            "source": _PLACE["source"],
            "collectives": Column(_INT, "how many there are"),
            "calls": Column(_INT, "calls with times that they are made of, over all ranks"),
            "bytes": Column(_INT, "the sum of S, as far as it is known", "B", privacy=Privacy.SIZE),
            "unsized": Column(_INT, "collectives of which the bytes are not known"),
            "time_us": Column(_TIMES, "times of the collectives, from the last arrival", "us"),
            "kernel_us": Column(_TIMES, "durations on each rank, waiting for others included", "us"),
            "waiting_us": Column(_TIMES, "how long each rank waited; null where ranks cannot be compared", "us"),
            "algbw_gb_per_s": Column(_RATES, "bytes / time over the collectives; 95 % of them reach p5", "GB/s"),
            "busbw_gb_per_s": Column(_RATES, "algbw x the factor of nccl-tests", "GB/s"),
            "line_rate_gb_per_s": Column(_FLOAT, "as the user gives it for the locality", "GB/s"),
            "line_rate_share": Column(_RATES, "busbw / line rate"),
            "upper_bounds": Column(_INT, "collectives of which the time is an upper bound, and the rates lower ones"),
        },
    ),
    "time_of_ranks": TableSchema(
        "what the time of a rank went to, means over its iterations, or windows where none are known",
        False,
        {
            **_RANK,
            "iterations": Column(_INT, "how many were looked at"),
            "duration_ms": Column(_FLOAT, "how long one took", "ms"),
            **_SHARES,
            "communication_ms": Column(_FLOAT, "something communicated", "ms"),
            "waiting_ms": Column(_FLOAT, "a call waited for another rank; null where none can be compared with", "ms"),
            "waits_for": Column(_INT, "the rank that came last in most of the waiting"),
        },
    ),
    "time_of_steps": TableSchema(
        "what the time of an iteration went to, medians over the ranks",
        False,
        {"step": Column(_INT, "iteration"), **_SHARES},
    ),
    "last": TableSchema(
        "ranks that others waited for, of collectives of which all members are known; those that cost most first",
        False,
        {
            **_RANK,
            "last": Column(_INT, "collectives in which it came last"),
            "of": Column(_INT, "those that it took part in"),
            "cost_ms": Column(_FLOAT, "time in which somebody waited for it; waits at the same time count once", "ms"),
        },
    ),
    "waiters": TableSchema(
        "ranks that waited longest in all",
        False,
        {
            **_RANK,
            "waiting_ms": Column(_FLOAT, "time in which one of its calls waited", "ms"),
            "first": Column(_INT, "collectives in which it came first"),
            "of": Column(_INT, "those that it took part in"),
        },
    ),
    "exposed_ranks": TableSchema(
        "how long hosts stood still for communication, those with most first",
        False,
        {
            **_RANK,
            "exposed_ms": Column(_FLOAT, "waits of several threads at a time count once", "ms"),
            "share": Column(_FLOAT, "of the iterations that it is measured in; null where there are none"),
        },
    ),
    "exposed_lines": TableSchema(
        "what was launched at a line of the user's code, and waited for, those with most first",
        False,
        {
            "source": Column(
                _TEXT,
                "where the call was made; (C++) where C++ called, (not known) without a call",
                privacy=Privacy.PLACE,
            ),
            **_OP,
            "stood": Column(
                _TEXT, "in what the host waited: wait, wait_tensor, or the launch itself", privacy=Privacy.WORD
            ),
            "waits": Column(_INT, "how many"),
            "exposed_ms": Column(_FLOAT, "summed over ranks and threads", "ms"),
            "longest_ms": Column(_FLOAT, "the longest", "ms"),
        },
    ),
    "sources": TableSchema(
        "lines of the user's code, those that cost most time first",
        False,
        {
            "source": _PLACE["source"],
            **_OP,
            "calls": Column(_INT, "summed over ranks"),
            "bytes": Column(_INT, "as far as they are known", "B", privacy=Privacy.SIZE),
            "unsized": Column(_INT, "calls of which the bytes are not known"),
            "time_ms": Column(_FLOAT, "of the collectives that have times, from the last arrival", "ms"),
            "waiting_ms": Column(_FLOAT, "summed over ranks", "ms"),
        },
    ),
}
"""What the commands answer in, in JSON a list of objects."""
