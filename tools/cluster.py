"""A Dask cluster as an executor: one that runs already, by its address, or one on this machine."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

from crossrank.errors import CrossrankError, one_line

LOCAL = "local"
_SECONDS = "20s"
"""How long a scheduler may take to answer."""


@contextmanager
def dask_executor(address: str, workers: int) -> Iterator[Executor]:
    """An executor on the cluster at `address`; `local` starts `workers` processes here, which end with the block.

    Raises `CrossrankError` where Dask is not installed, or nothing answers.
    """
    try:
        from distributed import Client, LocalCluster
    except ImportError as error:
        raise CrossrankError("--cluster needs Dask; install it with: pip install 'crossrank[cluster]'") from error
    with tempfile.TemporaryDirectory(prefix="crossrank-dask-", ignore_cleanup_errors=True) as scratch:
        if address == LOCAL:
            cluster = LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                dashboard_address=None,
                local_directory=scratch,
                silence_logs=logging.CRITICAL,
            )
        else:
            cluster = None
        try:
            client = Client(cluster if cluster is not None else address, timeout=_SECONDS)
        except Exception as error:  # what it raises depends on the protocol of the address
            raise CrossrankError(
                f"--cluster {address}: no Dask scheduler answers there ({one_line(error)}); "
                "give its address as HOST:PORT, or `local`"
            ) from error
        try:
            # Not pure: the work writes files, and Dask would leave out what it has done before.
            yield client.get_executor(pure=False, retries=2)
        finally:
            client.close()
            if cluster is not None:
                cluster.close()
