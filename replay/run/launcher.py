"""Detects this process's rank from its launcher: torchrun, Open MPI, MVAPICH, MPICH or Slurm."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from crossrank.errors import CrossrankError

KEY = "CROSSRANK_REPLAY_KEY"
DEFAULT_PORT = 29500
_INIT_METHODS = "give tcp://HOST:PORT, file:///PATH or env://, with ?rank=R&world_size=N without a launcher"


# Launcher -> its variables for rank, world size, rank on the node and ranks of the node. The first launcher with a rank
# and a size counts. torchrun is first: it runs inside the steps of the others. Slurm's size is that of the step: a
# batch script is no step, but has SLURM_PROCID=0 too.
LAUNCHERS = {
    "torchrun, or plain variables": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "MVAPICH": tuple(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """One process of a replay."""

    rank: int
    world_size: int
    local_rank: int
    launcher: str
    host: str
    port: int
    agent_store: bool = False
    """torchrun's agent already listens at `host`:`port`."""
    file: str = ""
    """All ranks meet in this file instead of at `host`:`port`."""
    key: bytes = b""
    """Key for the HMAC of the messages between ranks."""
    attempt: str = ""
    """Distinguishes this start of the processes from earlier ones that used the same store."""


def detect_launcher(
    environment: Mapping[str, str], host: str | None = None, port: int | None = None, file: str = ""
) -> RankInfo | None:
    """Return the rank of this process, or None if no launcher started it. `host`, `port` and `file` (where the ranks
    meet) override the variables.

    Raises `CrossrankError` if a variable is no number, or the host of rank 0 is unknown.
    """
    has_agent, is_given = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True", bool(host or port or file)
    for launcher, (rank_name, size_name, local_name, tasks_name) in LAUNCHERS.items():
        if not environment.get(rank_name) or not environment.get(size_name):
            continue
        rank, size = _read_number(environment, rank_name), _read_number(environment, size_name)
        if rank >= size:
            raise CrossrankError(f"{rank_name}={rank} is not below {size_name}={size}; start all ranks the same way")
        port = port or _read_number(environment, "MASTER_PORT", DEFAULT_PORT)
        if not 0 < port < 1 << 16:
            raise CrossrankError(f"MASTER_PORT={port} is not a port from 1 to 65535; set it to a free one")
        # Slurm writes "4(x2)" or "4,2" for several nodes.
        one_node = size == 1 or environment.get(tasks_name) == str(size)
        return RankInfo(
            rank=rank,
            world_size=size,
            local_rank=_read_number(environment, local_name, rank),
            launcher=launcher,
            host="" if file else host or environment.get("MASTER_ADDR") or _find_host(environment, launcher, one_node),
            port=port,
            file=file,
            key=os.fsencode(environment.get(KEY, "")),
            attempt="/".join(environment.get(f"TORCHELASTIC_{name}", "0") for name in ("RUN_ID", "RESTART_COUNT")),
            agent_store=has_agent and not is_given,
        )
    return None


def parse_init_method(url: str | None) -> tuple[str | None, int | None, dict[str, str], str]:
    """Parse a URL like `torch.distributed` does: return (host, port, variables with rank and world size, file).

    Raises `CrossrankError` for a URL that torch would not accept.

    >>> parse_init_method("tcp://node0:29500?rank=1&world_size=4")
    ('node0', 29500, {'RANK': '1', 'WORLD_SIZE': '4'}, '')
    >>> parse_init_method("file:///scratch/meeting")
    (None, None, {}, '/scratch/meeting')
    >>> parse_init_method("env://"), parse_init_method(None)
    ((None, None, {}, ''), (None, None, {}, ''))
    """
    if url is None:
        return None, None, {}, ""
    try:
        parts = urlsplit(url)
        port = parts.port
        query = dict(parse_qsl(parts.query, strict_parsing=True, keep_blank_values=True)) if parts.query else {}
    except ValueError as error:
        raise CrossrankError(f"--init-method {url!r}: {error}; {_INIT_METHODS}") from error
    file = parts.path if parts.scheme == "file" else ""
    is_complete = {"tcp": bool(parts.hostname and port), "file": file.startswith("/"), "env": True}
    if not is_complete.get(parts.scheme, False) or not query.keys() <= {"rank", "world_size"}:
        raise CrossrankError(f"--init-method {url!r}: {_INIT_METHODS}")
    variables = {name.upper(): value for name, value in query.items()}
    return parts.hostname if parts.scheme == "tcp" else None, port, variables, file


def _read_number(environment: Mapping[str, str], name: str, default: int = 0) -> int:
    text = environment.get(name) or str(default)
    if not (text.isascii() and text.isdecimal()):
        raise CrossrankError(f"{name}={text!r} is not a number; start with torchrun, srun or mpirun, or unset it")
    return int(text)


def _find_host(environment: Mapping[str, str], launcher: str, one_node: bool) -> str:
    if one_node:
        return "127.0.0.1"
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if nodes:
        return first_node(nodes)
    raise CrossrankError(
        f"{launcher} does not set the address of rank 0; set MASTER_ADDR on all ranks (mpirun -x MASTER_ADDR=HOST …), "
        "or give --master-ip"
    )


def first_node(nodes: str) -> str:
    """Return the first name in a Slurm list of nodes: from each bracket, the first number.

    >>> first_node("gpu[003-007,9],login1"), first_node("rack[1-2]node[3-4]"), first_node("node[1-2]-hsn0")
    ('gpu003', 'rack1node3', 'node1-hsn0')
    """
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert match is not None
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", match[0])
