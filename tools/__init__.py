"""Offline: any file of a rank → `traces` → `job` (all ranks) or `graph` (one linked rank) → `analysis` → `output`.

Nothing here imports torch. `cli` is the command line, `commands` has one module per subcommand, `parallel` maps a
function over ranks in processes or on a Dask cluster.
"""
