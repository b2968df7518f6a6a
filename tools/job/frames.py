"""The calls and collectives of a job as polars frames: one row each, with what equal calls share beside it.

Times are ns on the common clock of the ranks, 0 = not known; `time` and `waiting` are null where they are not known.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from crossrank.tools.job.collectives import Collectives


def _kinds(found: Collectives) -> pl.DataFrame:
    schema = {"op": pl.String, "group": pl.Int64, "locality": pl.String, "source": pl.String}
    rows = [(one.label, one.group, one.locality, one.source) for one in found.kinds]
    return pl.DataFrame(rows, schema=schema, orient="row")


def calls_frame(found: Collectives) -> pl.DataFrame:
    """One row per launch and rank."""
    return _kinds(found)[found.kind].with_columns(
        rank=found.rank,
        step=found.step,
        calls=found.calls,
        unsized=found.unsized_calls,
        collective=found.collective,
        called=found.called,
        began=found.began,
        ended=found.ended,
        waiting=pl.Series(found.waiting).replace(-1, None),
        last_rank=found.last_rank[found.collective],
        expected=found.expected[found.collective],
    )


def collectives_frame(found: Collectives) -> pl.DataFrame:
    """One row per collective or transfer. `bytes` is null where they are not known; bandwidths are in GB/s."""
    sized = np.array([one.sized for one in found.kinds] or [True])[found.of_kind]
    return _kinds(found)[found.of_kind].with_columns(
        bytes=pl.when(pl.Series(sized | (found.bytes > 0))).then(pl.Series(found.bytes)),
        unsized=found.unsized,
        time=pl.Series(found.time).replace(-1, None),
        algbw=pl.Series(found.algbw()).fill_nan(None),
        busbw=pl.Series(found.busbw()).fill_nan(None),
        bound=found.bound,
    )
