"""The first line of a comms file: which rank wrote it, on what machine, with which versions and settings."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

import crossrank
from crossrank.instrument.config import Config
from crossrank.instrument.identity.gpu import Gpu, nccl_version
from crossrank.instrument.write.comms_writer import clock
from crossrank.machine import boot_id
from crossrank.recording import SCHEMA


def describe_rank(
    *,
    rank: int,
    world_size: int,
    node: str,
    gpu: Gpu | None,
    config: Config,
    ops: Sequence[str],
    blind_spots: Sequence[str],
) -> dict[str, Any]:
    """The header of this rank, in the fields of `crossrank.recording.Header`."""
    local_rank = os.environ.get("LOCAL_RANK", "")
    return {
        "schema": SCHEMA,
        "rank": rank,
        "world_size": world_size,
        "host": socket.gethostname(),
        "boot_id": boot_id(),
        "node": node,
        "local_rank": int(local_rank) if local_rank.isdigit() else None,
        "pid": os.getpid(),
        "gpu": asdict(gpu) if gpu else None,
        "gpu_serial": config.gpu_serial,
        "vm_id": config.vm_id,
        "clock": clock(),
        "versions": {
            "crossrank": crossrank.__version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            "nccl": nccl_version(),
            "driver": gpu.driver if gpu else None,
        },
        "config": asdict(config),
        "all_calls": True,
        "ops": list(ops),
        "blind_spots": list(blind_spots),
    }
