"""Which rank a process is, by what launchers set."""

from __future__ import annotations

import pytest

from crossrank.errors import CrossrankError
from crossrank.replay.run.launcher import RankInfo, detect_launcher, first_node

_PLAIN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}
_OMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def place(environment: dict[str, str], **given: object) -> RankInfo:
    found = detect_launcher(environment, **given)  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (_PLAIN | {"LOCAL_RANK": "1", "MASTER_PORT": "5"}, (1, 2, 1, "a", 5)),
        (_PLAIN, (1, 2, 1, "a", 29500)),
        (_OMPI | {"MASTER_ADDR": "b"}, (3, 4, 1, "b", 29500)),
        (_OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, (3, 4, 1, "127.0.0.1", 29500)),
        ({f"MV2_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")} | {"MV2_COMM_WORLD_RANK": "0"},
         (0, 2, 0, "127.0.0.1", 29500)),
        ({"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MASTER_ADDR": "c"}, (5, 8, 1, "c", 29500)),
        (
            {"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1",
             "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_STEP_NODELIST": "gpu[07-08]"},
            (9, 16, 1, "gpu07", 29500),
        ),
        # mpirun inside a Slurm step, and torchrun inside both
        (_OMPI | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "MASTER_ADDR": "d"}, (3, 4, 1, "d", 29500)),
        (_OMPI | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "e", "MASTER_PORT": "1"}, (0, 2, 0, "e", 1)),
    ],
)  # fmt: skip
def test_a_launcher_gives_a_process_its_rank(environment: dict[str, str], expected: tuple[object, ...]) -> None:
    found = place(environment)
    assert (found.rank, found.world_size, found.local_rank, found.host, found.port) == expected


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[003-007,9],login1", "gpu003"),
        ("a1,a2", "a1"),
        ("rack[1-2]node[3-4]", "rack1node3"),
        ("rack[1-2]node[3-4],login1", "rack1node3"),
        ("node[1-2]-hsn0", "node1-hsn0"),
        ("node[1,3]-hsn[0-1]", "node1-hsn0"),
        ("n1-hsn0,n2-hsn0", "n1-hsn0"),
    ],
)
def test_the_first_node_of_a_slurm_list_is_a_host(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_a_slurm_batch_script_is_not_a_rank() -> None:
    assert detect_launcher({"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_JOB_NODELIST": "gpu[07-08]"}) is None
    assert detect_launcher({}) is None


def test_command_line_options_override_the_variables() -> None:
    found = place({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "5"}, host="h", port=7)
    assert (found.host, found.port) == ("h", 7)


def test_the_agent_of_torchrun_hosts_the_store() -> None:
    base = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "5"}
    assert place(base | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).agent_store
    assert not place(base).agent_store


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (_OMPI, "Open MPI does not set the address of rank 0; set MASTER_ADDR on all ranks"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' is not a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is not below WORLD_SIZE=2"),
    ],
)
def test_invalid_variables_are_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(CrossrankError, match=message):
        detect_launcher(environment)
