"""Makes the first line of a comms file: rank, node, versions and settings."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import asdict
from typing import Any

import torch

import crossrank
from crossrank.instrument.facts import Facts
from crossrank.instrument.hooks import dispatcher
from crossrank.instrument.identity.gpu import Gpu, nccl_version
from crossrank.instrument.write.comms_writer import clock
from crossrank.machine import boot_id, pid_namespace
from crossrank.recording import SCHEMA
from crossrank.text import writable


def describe_rank(facts: Facts, *, node: str, gpu: Gpu | None, recorder: str, blind_spots: list[str]) -> dict[str, Any]:
    """Return the header of this rank, with the fields of `crossrank.recording.Header`."""
    local_rank = os.environ.get("LOCAL_RANK", "")
    config = facts.config
    return {
        "schema": SCHEMA,
        "rank": facts.rank,
        "world_size": facts.world_size,
        "host": socket.gethostname(),
        "boot_id": boot_id(),
        "node": writable(node),
        "local_rank": int(local_rank) if local_rank.isdigit() else None,
        "pid": os.getpid(),
        "pid_namespace": pid_namespace(),
        "gpu": asdict(gpu) if gpu else None,
        "gpu_serial": writable(config.gpu_serial) if config.gpu_serial else None,
        "vm_id": writable(config.vm_id) if config.vm_id else None,
        "clock": clock(),
        "versions": {
            "crossrank": crossrank.__version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            "nccl": nccl_version(),
            "driver": gpu.driver if gpu else None,
            "recorder": recorder,
        },
        "config": {name: writable(one) if isinstance(one, str) else one for name, one in asdict(config).items()},
        "all_calls": True,
        "ops": dispatcher.ops(),
        "blind_spots": blind_spots,
    }
