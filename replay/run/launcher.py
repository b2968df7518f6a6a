"""Which rank this process is, as the launcher that started it says: torchrun, Open MPI, MVAPICH, MPICH or Slurm."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from crossrank.errors import CrossrankError

DEFAULT_PORT = 29500
"""What torch and PARAM use where nothing else is said."""


@dataclass(frozen=True)
class Variables:
    """How one launcher tells a process its place."""

    launcher: str
    rank: str
    world_size: str
    local_rank: str
    local_size: str


# The first whose rank and size are both set is taken. torchrun comes first: it runs inside the others' steps. Slurm's
# size is that of the step: a batch script, which is no step, has SLURM_PROCID=0 as well.
LAUNCHERS = (
    Variables("torchrun, or plain variables", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    Variables(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Variables(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    Variables("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Variables("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """One process among those that replay."""

    rank: int
    world_size: int
    local_rank: int
    launcher: str
    host: str
    port: int
    agent_store: bool = False
    """torchrun's agent already listens at `host`:`port`."""
    attempt: str = ""
    """What tells this start of the processes from an earlier one that used the same store."""


def find_place(environment: Mapping[str, str], host: str | None = None, port: int | None = None) -> Place | None:
    """This process's place, or None where no launcher started it. `host` and `port` win over the variables.

    Raises `CrossrankError` where a launcher's variables are no numbers, or nothing says where rank 0 is.
    """
    for row in LAUNCHERS:
        if not environment.get(row.rank) or not environment.get(row.world_size):
            continue
        rank, size = _number(environment, row.rank), _number(environment, row.world_size)
        if rank >= size:
            raise CrossrankError(f"{row.rank}={rank} is not below {row.world_size}={size}; start all ranks alike")
        local = _number(environment, row.local_rank) if environment.get(row.local_rank) else rank
        alone = _tasks_here(environment.get(row.local_size, "")) == size or size == 1
        return Place(
            rank=rank,
            world_size=size,
            local_rank=local,
            launcher=row.launcher,
            host=host or environment.get("MASTER_ADDR") or _first_host(environment, row.launcher, alone),
            port=port or _port(environment),
            attempt=_attempt(environment),
            agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and host is None and port is None,
        )
    return None


def _attempt(environment: Mapping[str, str]) -> str:
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return "/".join(environment.get(name, "0") for name in names)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdecimal()):
        raise CrossrankError(f"{name}={text!r} is no number; start with torchrun, srun or mpirun, or unset it")
    return int(text)


def _port(environment: Mapping[str, str]) -> int:
    port = _number(environment, "MASTER_PORT") if environment.get("MASTER_PORT") else DEFAULT_PORT
    if not 0 < port < 1 << 16:
        raise CrossrankError(f"MASTER_PORT={port} is not a port from 1 to 65535; set it to a free one")
    return port


def _tasks_here(text: str) -> int | None:
    """Processes of this node, where all nodes have as many: Slurm writes "4(x2)" or "4,2"."""
    return int(text) if text.isascii() and text.isdecimal() else None


def _first_host(environment: Mapping[str, str], launcher: str, alone: bool) -> str:
    if alone:
        return "127.0.0.1"
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if nodes:
        return first_node(nodes)
    raise CrossrankError(
        f"{launcher} does not say where rank 0 is; set MASTER_ADDR on all ranks (mpirun -x MASTER_ADDR=HOST …), "
        "or give --master-ip"
    )


def first_node(nodes: str) -> str:
    """The first name in a Slurm list of nodes: of every bracket the first number or range's begin.

    >>> first_node("gpu[003-007,9],login1"), first_node("rack[1-2]node[3-4]"), first_node("node[1-2]-hsn0")
    ('gpu003', 'rack1node3', 'node1-hsn0')
    """
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert match is not None
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", match[0])
