"""The schema of every table. Names, types and meanings do not change within a version of the format.

`crossrank.load` and `crossrank export` return `TABLES`. Commands answer in `ANSWERS`.

Times are ns since 1970. Tables of one rank use the clock of the rank. Tables of the job use one clock for all ranks.
`pg` and `members` together identify a process group, because several groups may have the same name. A value that is
unknown, or has no meaning for the row, is null.
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
    """What the values reveal about the user; text columns need a class."""


class TableSchema(NamedTuple):
    meaning: str
    of_rank: bool
    """The table has one part per rank."""
    columns: dict[str, Column]
    main: tuple[str, ...] = ()
    """The columns that `crossrank.load` shows, at most a dozen; empty: all. `LoadedJob.table` returns all columns."""

    @property
    def schema(self) -> dict[str, Any]:
        return self.part(*self.columns)

    def part(self, *names: str) -> dict[str, Any]:
        """Return the types of some columns."""
        return {name: self.columns[name].dtype for name in names}

    def select(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Return the columns of the table in order, cast to their types, and `KEYS` if the frame has them. An empty
        text is an unknown one."""
        columns = self.columns | {name: one for name, one in KEYS.items() if name in frame.columns}
        typed = frame.select(pl.col(name).cast(one.dtype) for name, one in columns.items())
        return typed.with_columns(pl.when(pl.selectors.string() != "").then(pl.selectors.string()))

    def rows(self, frame: pl.DataFrame) -> list[Row]:
        """Return `select(frame)` as JSON objects."""
        return self.select(frame).to_dicts()


_RANK = {"rank": Column(_INT, "global rank")}
_CALL = {
    "call": Column(_INT, "number of the call on its rank: its id in the file, or its position if the file has no ids")
}
KEYS = {
    "group": Column(_INT, "number of the process group, the same in all tables"),
    "collective": Column(_INT, "number of the collective or transfer, the same in all tables"),
}
"""Columns to join tables on. They need all ranks: exported tables of one rank lack them, and `arrivals` has them for
each call. With `crossrank.load`, `calls`, `durations` and `waits` have them too."""
_OP = {"op": Column(_TEXT, "operation", privacy=Privacy.API)}
_DESC = Column(_TEXT, "description of the group", privacy=Privacy.GROUP)
_GROUP = {
    "pg": Column(_TEXT, "name of the process group", privacy=Privacy.GROUP),
    "members": Column(_TEXT, "global ranks of the group, such as 0-3,8; empty if unknown"),
}
_SIZE = {"bytes": Column(_INT, "size S of nccl-tests: see crossrank/comm.py", "B", privacy=Privacy.SIZE)}
_PLACE = {
    "locality": Column(_TEXT, "intra_node, nvlink_domain, cross_node or unknown", privacy=Privacy.WORD),
    "source": Column(
        _TEXT, "file.py:line of the user's code that made the call; null if C++ made it", privacy=Privacy.PLACE
    ),
    "step": Column(_INT, "training step; null if unknown"),
}
_SPAN = {
    "began_ns": Column(_INT, "start time on the host", "ns", privacy=Privacy.WALL),
    "ended_ns": Column(_INT, "end time on the host", "ns", privacy=Privacy.WALL),
    "duration_ns": Column(_INT, "duration", "ns"),
}
_SPAN_OF_CALL = {
    "began_ns": Column(_INT, "start time; in a dump, when torch noticed it", "ns", privacy=Privacy.WALL),
    "ended_ns": Column(_INT, "end time; in a dump, when torch noticed it", "ns", privacy=Privacy.WALL),
    "duration_ns": Column(_INT, "duration; in a dump that of torch's events, not end - start", "ns"),
}
_TIMED_BY = {
    "timed_by": Column(
        _TEXT,
        "source of the time: kineto, nsight, flight, inspector, work, replay; null without a measured time",
        privacy=Privacy.WORD,
    )
}
_MEASURED = {
    "ranks": Column(_INT, "ranks with a measured time"),
    "expected": Column(_INT, "ranks of the group, or 2 for a transfer; null if unknown"),
    "called_ns": Column(_INT, "when the host of the first rank made the call", "ns", privacy=Privacy.WALL),
    "arrived_ns": Column(_INT, "last arrival: when communication started on the last rank", "ns", privacy=Privacy.WALL),
    "ended_ns": Column(_INT, "when communication ended on the last rank", "ns", privacy=Privacy.WALL),
    "time_ns": Column(
        _INT, "time without waiting: of the rank with the shortest duration, or from the last arrival to the end", "ns"
    ),
    "is_upper_bound": Column(
        _BOOL,
        "time_ns is an upper bound: ranks or members are unknown, calls share a launch, or clocks differ too much",
    ),
    "algbw_gb_per_s": Column(_FLOAT, "bytes / time", "GB/s"),
    "busbw_gb_per_s": Column(_FLOAT, "algbw x the factor of nccl-tests", "GB/s"),
    "longest_wait_ns": Column(_INT, "longest waiting time of a rank", "ns"),
    "last_rank": Column(_INT, "rank that arrived last"),
}

TABLES = {
    "calls": TableSchema(
        "every call of every rank",
        True,
        {
            **_RANK,
            **_CALL,
            "op": Column(_TEXT, "operation: all_reduce, send, …", privacy=Privacy.API),
            "api": Column(
                _TEXT, "public function that the user called; null if C++ made the call", privacy=Privacy.API
            ),
            **_GROUP,
            "desc": _DESC,
            "number": Column(
                _INT,
                "n-th collective of the group on this rank, or n-th send to (receive from) this peer, as the file "
                "has it; null if it has none",
            ),
            "peer": Column(_INT, "other rank of a send or receive"),
            "root": Column(_INT, "root of a broadcast, reduce, gather or scatter"),
            **_SIZE,
            "dtype": Column(_TEXT, "element type", privacy=Privacy.DTYPE),
            "reduce": Column(_TEXT, "reduction", privacy=Privacy.REDUCTION),
            "inputs": Column(_TEXT, "shapes of the inputs, as JSON", privacy=Privacy.SIZE),
            "outputs": Column(_TEXT, "shapes of the outputs, as JSON", privacy=Privacy.SIZE),
            "batch": Column(_INT, "number of the first call of the same launch"),
            **_PLACE,
            "locality": Column(
                _TEXT,
                "intra_node, nvlink_domain, cross_node or unknown, as the file of the rank says; other tables also use "
                "the nodes of the other ranks",
                privacy=Privacy.WORD,
            ),
            "thread": Column(_INT, "id of the thread that made the call, as the operating system numbers it"),
            "state": Column(_TEXT, "scheduled, started, retired or completed", privacy=Privacy.STATE),
            "called_ns": Column(_INT, "when the host made the call", "ns", privacy=Privacy.WALL),
            **_SPAN_OF_CALL,
            **_TIMED_BY,
        },
        (
            "rank",
            "call",
            "op",
            "pg",
            "bytes",
            "dtype",
            "peer",
            "locality",
            "source",
            "step",
            "duration_ns",
            "collective",
        ),
    ),
    "durations": TableSchema(
        "every call with a measured duration",
        True,
        {
            **_RANK,
            **_CALL,
            **_OP,
            **_GROUP,
            **_SIZE,
            **_SPAN_OF_CALL,
            **_TIMED_BY,
        },
    ),
    "waits": TableSchema(
        "every wait of a host thread for communication",
        True,
        {
            **_RANK,
            "call": Column(
                _INT,
                "number of the call that the thread waited for; at the end of a backward pass, the last of many",
            ),
            "op": Column(_TEXT, "operation of that call", privacy=Privacy.API),
            "source": Column(_TEXT, "source line of that call", privacy=Privacy.PLACE),
            "waited_in": Column(
                _TEXT,
                "where the thread waited: wait, wait_tensor, launch (a blocking call), or backward",
                privacy=Privacy.WORD,
            ),
            **_SPAN,
        },
    ),
    "steps": TableSchema(
        "training steps of every rank; the last one has no end",
        True,
        {
            **_RANK,
            "step": Column(_INT, "training step"),
            **_SPAN,
            "profiler": Column(
                _BOOL, "the profiler of a window started or stopped in it on this rank; null if unknown"
            ),
        },
    ),
    "overlap": TableSchema(
        "time per rank and step in profiled windows: duration = computation + exposed + profiler + memory + idle",
        False,
        {
            **_RANK,
            "step": Column(_INT, "training step; null if unknown: the row is the whole window"),
            "began_ns": Column(
                _INT,
                "start time on the rank's own clock: of the first kernel on a GPU, else on the host",
                "ns",
                privacy=Privacy.WALL,
            ),
            "duration_ns": Column(_INT, "duration", "ns"),
            "computation_ns": Column(_INT, "a kernel ran that computes (without a GPU: an operation)", "ns"),
            "communication_ns": Column(_INT, "a kernel ran that communicates (without a GPU: a Work)", "ns"),
            "exposed_ns": Column(_INT, "communication that computation did not overlap", "ns"),
            "profiler_ns": Column(
                _INT, "exposed too, but the rank waited for others whose profilers started later", "ns"
            ),
            "memory_ns": Column(_INT, "copies and memsets that neither overlapped", "ns"),
            "idle_ns": Column(_INT, "no kernel, copy or operation ran", "ns"),
            "waiting_ns": Column(
                _INT, "a call waited for another rank to arrive; waits in batches are not known", "ns"
            ),
            "waits_for": Column(_INT, "rank that this rank waited for longest"),
            "waits_for_ns": Column(_INT, "waiting time for that rank", "ns"),
            "measured_on": Column(_TEXT, "device or host", privacy=Privacy.WORD),
        },
    ),
    "collectives": TableSchema(
        "collectives, matched over all ranks",
        False,
        {
            **KEYS,
            **_GROUP,
            "number": Column(_INT, "n-th collective of the group: as the files have it, else counted"),
            **_OP,
            "root": Column(_INT, "root rank"),
            **_SIZE,
            **_PLACE,
            **_MEASURED,
        },
        (
            "collective",
            "pg",
            "members",
            "number",
            "op",
            "bytes",
            "source",
            "step",
            "time_ns",
            "busbw_gb_per_s",
            "longest_wait_ns",
            "last_rank",
        ),
    ),
    "transfers": TableSchema(
        "sends matched with their receives, also those of a batch, with times that are bounds (`bandwidth` has a batch "
        "as one launch); a batch is a row of its own if its calls have no numbers",
        False,
        {
            **KEYS,
            **_GROUP,
            "source_rank": Column(_INT, "sending rank; null if the file does not distinguish the two ends"),
            "destination_rank": Column(_INT, "receiving rank; null if the file does not distinguish the two ends"),
            "number": Column(_INT, "n-th transfer of this pair in the group"),
            "calls": Column(
                _INT,
                "sends and receives of a rank that share one measured time; if more than 1, time_ns is an upper bound",
            ),
            **_SIZE,
            **_PLACE,
            **_MEASURED,
        },
        (
            "collective",
            "source_rank",
            "destination_rank",
            "number",
            "bytes",
            "locality",
            "source",
            "step",
            "time_ns",
            "busbw_gb_per_s",
            "longest_wait_ns",
            "last_rank",
        ),
    ),
    "arrivals": TableSchema(
        "arrival of each rank at each collective and transfer; for a batch, its first call",
        False,
        {
            **_RANK,
            **_CALL,
            **KEYS,
            **_OP,
            "step": Column(_INT, "training step"),
            "late_ns": Column(_INT, "how much later than the first rank this rank arrived", "ns"),
            "waiting_ns": Column(
                _INT,
                "waiting time: how much longer the call took than on the last rank to arrive, or from this arrival to "
                "the last one",
                "ns",
            ),
            "opens_window": Column(
                _BOOL, "first call in the window of a rank; the start of the profiler may have delayed it"
            ),
        },
    ),
    "groups": TableSchema(
        "process groups; calls of unknown groups have a row of their own",
        False,
        {
            "group": KEYS["group"],
            **_GROUP,
            "desc": Column(_TEXT, "description", privacy=Privacy.GROUP),
            "size": Column(_INT, "number of ranks"),
            "backend": Column(_TEXT, "backend", privacy=Privacy.BACKEND),
            "locality": Column(_TEXT, "intra_node, nvlink_domain, cross_node or unknown", privacy=Privacy.WORD),
            "calls": Column(
                _INT,
                "calls that are known to be of the group, summed over ranks; null if none is, and calls of unknown "
                "groups may be of it",
            ),
            "bytes": Column(
                _INT,
                "size S of nccl-tests, summed over ranks; null if the size of a call is unknown",
                "B",
                privacy=Privacy.SIZE,
            ),
        },
    ),
    "ranks": TableSchema(
        "ranks, and what crossrank read of each",
        False,
        {
            **_RANK,
            "host": Column(_TEXT, "host name", privacy=Privacy.HOST),
            "node": Column(_TEXT, "name of the node; ranks with the same name are on one node", privacy=Privacy.NODE),
            "path": Column(_TEXT, "file that was read", privacy=Privacy.PATH),
            **_TIMED_BY,
            "calls": Column(_INT, "number of calls read"),
            "steps": Column(_INT, "number of training steps with a start and an end; null if unknown"),
            "clock_shift_ns": Column(
                _INT,
                "offset that aligns the clock of the rank with the clock of the job; null if it is not aligned",
                "ns",
            ),
            "ended_by": Column(
                _TEXT,
                "what ended the process, or why the dump was written; null if unknown",
                privacy=Privacy.REASON,
            ),
            "problems": Column(_INT, "number of parts of the file that crossrank could not read"),
        },
    ),
    "stragglers": TableSchema(
        "how often each rank arrives first and last, in collectives and transfers with all ranks present",
        False,
        {
            **_RANK,
            "collectives": Column(
                _INT,
                "number of collectives and transfers in which the arrival of the rank is compared with all others: "
                "without batches, and without those at the start of a profiler window",
            ),
            "first": Column(_INT, "how often the rank arrived first"),
            "last": Column(_INT, "how often the rank arrived last"),
            "waiting_ns": Column(
                _INT,
                "time in which a call of this rank waited for another rank; waits at the same time count once",
                "ns",
            ),
            "waited_for_ns": Column(
                _INT, "time in which another rank waited for this rank; waits at the same time count once", "ns"
            ),
        },
    ),
}

_TIMES = pl.Struct(dict.fromkeys(("p50", "p95", "max", "total"), _FLOAT))
_RATES = pl.Struct(dict.fromkeys(("p5", "p50", "p95", "max"), _FLOAT))
_SHARES = {
    "computation_ms": Column(_FLOAT, "computation", "ms"),
    "exposed_ms": Column(_FLOAT, "communication that computation did not overlap", "ms"),
    "profiler_ms": Column(_FLOAT, "exposed too, but the rank waited for others whose profilers started later", "ms"),
    "memory_ms": Column(_FLOAT, "copies and memsets that neither overlapped", "ms"),
    "idle_ms": Column(_FLOAT, "no kernel, copy or operation ran", "ms"),
}

ANSWERS = {
    "bandwidth": TableSchema(
        "collectives grouped by some columns; a column is null if it is not grouped by, or unknown",
        False,
        {
            "op": Column(_TEXT, "operation; sends and receives are send/recv", privacy=Privacy.API),
            "pg": _GROUP["pg"],
            "desc": _DESC,
            "ranks": Column(_INT, "number of ranks of the group; null if unknown"),
            "size_from": Column(_INT, "smallest size of the bucket, S of nccl-tests", "B", privacy=Privacy.SIZE),
            "size_to": Column(_INT, "largest size of the bucket", "B", privacy=Privacy.SIZE),
            "locality": _PLACE["locality"],
            "source": _PLACE["source"],
            "collectives": Column(_INT, "number of collectives and transfers; a batch of transfers is one"),
            "calls": Column(_INT, "calls with a measured time, over all ranks"),
            "bytes": Column(
                _INT, "sum of the known sizes S, once per collective; null if none is known", "B", privacy=Privacy.SIZE
            ),
            "unsized": Column(_INT, "collectives with an unknown size"),
            "time_us": Column(_TIMES, "time of the collectives, from the last arrival", "us"),
            "kernel_us": Column(_TIMES, "duration on each rank, with waiting time", "us"),
            "waiting_us": Column(_TIMES, "waiting time of each rank; null if ranks cannot be compared", "us"),
            "algbw_gb_per_s": Column(_RATES, "bytes / time; 95 % of the collectives reach p5", "GB/s"),
            "busbw_gb_per_s": Column(_RATES, "algbw x the factor of nccl-tests", "GB/s"),
            "line_rate_gb_per_s": Column(_FLOAT, "line rate of the locality, from --line-rate", "GB/s"),
            "line_rate_share": Column(_RATES, "busbw / line rate"),
            "upper_bounds": Column(_INT, "collectives whose time is an upper bound, so their rates are lower bounds"),
        },
    ),
    "time_of_ranks": TableSchema(
        "time per step of each rank, as a mean over its steps, or over windows if steps are unknown",
        False,
        {
            **_RANK,
            "iterations": Column(_INT, "number of steps or windows"),
            "duration_ms": Column(_FLOAT, "duration of a step or window", "ms"),
            **_SHARES,
            "communication_ms": Column(_FLOAT, "communication", "ms"),
            "waiting_ms": Column(_FLOAT, "a call waited for another rank; null if no rank can be compared", "ms"),
            "waits_for": Column(_INT, "rank that this rank waited for longest"),
        },
    ),
    "time_of_steps": TableSchema(
        "time of each training step, as a median over the ranks",
        False,
        {"step": Column(_INT, "training step"), **_SHARES},
    ),
    "last": TableSchema(
        "ranks that others waited for, most expensive first; counts only collectives with all ranks present",
        False,
        {
            **_RANK,
            "last": Column(_INT, "collectives in which the rank arrived last"),
            "of": Column(_INT, "collectives and transfers in which the arrival of the rank is known"),
            "cost_ms": Column(
                _FLOAT, "time in which any rank waited for this rank; simultaneous waits count once", "ms"
            ),
        },
    ),
    "waiters": TableSchema(
        "ranks with the longest total waiting time",
        False,
        {
            **_RANK,
            "waiting_ms": Column(_FLOAT, "time in which a call of the rank waited", "ms"),
            "first": Column(_INT, "collectives in which the rank arrived first"),
            "of": Column(_INT, "collectives and transfers in which the arrival of the rank is known"),
        },
    ),
    "exposed_ranks": TableSchema(
        "exposed communication on the host of each rank, longest first",
        False,
        {
            **_RANK,
            "exposed_ms": Column(_FLOAT, "time in which any thread waited; simultaneous waits count once", "ms"),
            "share": Column(_FLOAT, "share of the duration of the steps; null if there are no steps"),
        },
    ),
    "exposed_lines": TableSchema(
        "exposed communication on the host by source line, longest first",
        False,
        {
            "source": Column(
                _TEXT,
                "source line of the call; (C++) if C++ made it, (not known) if the wait has no call",
                privacy=Privacy.PLACE,
            ),
            **_OP,
            "waited_in": Column(
                _TEXT,
                "where the thread waited: wait, wait_tensor, launch (a blocking call), or backward",
                privacy=Privacy.WORD,
            ),
            "waits": Column(_INT, "number of waits"),
            "exposed_ms": Column(_FLOAT, "summed over ranks and threads", "ms"),
            "longest_ms": Column(_FLOAT, "longest wait", "ms"),
        },
    ),
    "sources": TableSchema(
        "source lines of the user's code, most time first",
        False,
        {
            "source": _PLACE["source"],
            **_OP,
            "calls": Column(_INT, "number of calls, summed over ranks"),
            "bytes": Column(_INT, "sum of the known sizes; null if none is known", "B", privacy=Privacy.SIZE),
            "unsized": Column(_INT, "calls with an unknown size"),
            "time_ms": Column(_FLOAT, "time of the timed collectives, from the last arrival", "ms"),
            "waiting_ms": Column(_FLOAT, "waiting time, summed over ranks", "ms"),
        },
    ),
    "live_groups": TableSchema(
        "process groups of a running job, most bytes first; rates, shares and times are of the last 10 s",
        False,
        {
            "pg": _GROUP["pg"],
            "desc": _DESC,
            "size": Column(_INT, "number of ranks"),
            "calls": Column(_INT, "calls of all ranks since the start of the recording"),
            "bytes": Column(_INT, "size S of all calls since the start of the recording", "B", privacy=Privacy.SIZE),
            "calls_per_s": Column(_FLOAT, "calls of all ranks; null if all are at one time", "1/s"),
            "bytes_per_s": Column(
                _INT, "size S of the calls of all ranks; null if all are at one time", "B/s", privacy=Privacy.SIZE
            ),
            "busbw_gb_per_s": Column(
                _FLOAT, "median over collectives that every member timed; null without TRACING_TIMING=1", "GB/s"
            ),
            "last_rank": Column(_INT, "rank that arrived last in most collectives that all members made"),
            "last_share": Column(_FLOAT, "share of these collectives in which it arrived last"),
            "late_ms": Column(
                _FLOAT,
                "median time from the first rank's arrival to the last one's, by durations, or by the calls of hosts "
                "with one clock; null if neither is known",
                "ms",
            ),
        },
    ),
    "live_ranks": TableSchema(
        "ranks of a running job; medians and shares are of the last 10 s",
        False,
        {
            **_RANK,
            "node": Column(_TEXT, "name of the node", privacy=Privacy.NODE),
            "step": Column(_INT, "current training step; null before the first step ended"),
            "step_ms": Column(_FLOAT, "median duration of a step", "ms"),
            "exposed_share": Column(_FLOAT, "share of the time in which a thread waited for communication"),
            "calls": Column(_INT, "calls since the start of the recording"),
            "silent_s": Column(_FLOAT, "time since the last call; null if the rank made no call, or has ended", "s"),
            "unheard_s": Column(
                _FLOAT,
                "time since the rank last wrote to its file, which a running process does several times a second; null "
                "if the rank has ended",
                "s",
            ),
            "ended": Column(_TEXT, "how the recording of the rank ended; null while it runs", privacy=Privacy.REASON),
        },
    ),
}
"""The tables that commands print. In JSON, a table is a list of objects."""
