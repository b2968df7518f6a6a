"""GPU identity and counters. No test machine has a GPU: what NVML answers is played by a stand-in module."""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossrank.instrument.identity import gpu
from crossrank.instrument.identity.gpu import Gpu, GpuReader

UUID = "GPU-11111111-2222-3333-4444-555555555555"


class _FabricInfo(ctypes.Structure):
    _fields_ = (("clusterUuid", ctypes.c_uint8 * 16), ("cliqueId", ctypes.c_uint32), ("state", ctypes.c_uint))


def _nvml(**changes: Any) -> SimpleNamespace:
    """An NVML that knows one GPU of an NVL72, has no PCIe counters, and refuses a serial."""

    def fabric(handle: str, info: Any) -> None:
        structure = ctypes.cast(info, ctypes.POINTER(_FabricInfo)).contents
        structure.clusterUuid[0] = 0xAB
        structure.cliqueId, structure.state = 7, 3

    def serial(handle: str) -> str:
        raise RuntimeError("Not Supported")

    def values(handle: str, fields: list[Any]) -> list[SimpleNamespace]:
        assert fields == [(138, 0xFFFFFFFF), (139, 0xFFFFFFFF), 83]
        found = ((0, 1000), (3, 0), (0, 2000))
        return [SimpleNamespace(nvmlReturn=code, value=SimpleNamespace(ullVal=value)) for code, value in found]

    module = SimpleNamespace(
        NVML_SUCCESS=0,
        NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX=138,
        NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX=139,
        NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION=83,
        c_nvmlGpuFabricInfo_v2_t=_FabricInfo,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: f"handle of {uuid}",
        nvmlDeviceGetIndex=lambda handle: 5,
        nvmlDeviceGetName=lambda handle: b"NVIDIA GB200",
        nvmlDeviceGetSerial=serial,
        nvmlDeviceGetPciInfo_v3=lambda handle: SimpleNamespace(busId=b"00000008:01:00.0"),
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlDeviceGetGpuFabricInfoV=fabric,
        nvmlDeviceGetFieldValues=values,
    )
    for name, value in changes.items():
        setattr(module, name, value)
    return module


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_uuid_of", lambda device: UUID.removeprefix("GPU-"))


@pytest.mark.usefixtures("cuda")
def test_the_reader_gives_identity_and_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _nvml())
    reader = GpuReader(0)
    fabric: dict[str, Any] = {"fabric_cluster": "ab" + 15 * "00", "fabric_clique": 7}
    about: dict[str, Any] = {"name": "NVIDIA GB200", "uuid": UUID, "pci_bus_id": "00000008:01:00.0", "driver": "580.1"}
    assert reader.gpu == Gpu(index=5, serial=None, **about, **fabric)
    assert reader.gpu.nvlink_domain == "ab" + 15 * "00" + ":7"
    assert reader.counters() == {"nvlink_tx_kib": 1000, "energy_mj": 2000}


@pytest.mark.usefixtures("cuda")
def test_a_gpu_outside_a_fabric_has_no_nvlink_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _nvml(nvmlDeviceGetGpuFabricInfoV=lambda handle, info: None))
    found = GpuReader(0).gpu
    assert found is not None
    assert (found.fabric_cluster, found.fabric_clique, found.nvlink_domain) == (None, None, None)


@pytest.mark.usefixtures("cuda")
def test_a_missing_driver_gives_nulls_and_one_debug_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "crossrank"):
        reader = GpuReader(0)  # the real pynvml, on a machine without a driver
    if reader.gpu is not None:
        pytest.skip("this machine has an NVIDIA driver")
    assert reader.counters() is None
    assert [record.levelname for record in caplog.records] == ["DEBUG"]


@pytest.mark.usefixtures("cuda")
def test_a_mig_instance_is_found_by_its_own_uuid_and_shares_the_board(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = f"handle of MIG-{UUID.removeprefix('GPU-')}"

    def by_uuid(uuid: str) -> str:
        if not uuid.startswith("MIG-"):
            raise RuntimeError("Not Found")
        return f"handle of {uuid}"

    def board_of(handle: str) -> str:
        assert handle == instance
        return "the board"

    module = _nvml(
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetDeviceHandleFromMigDeviceHandle=board_of,
        nvmlDeviceGetIndex={"the board": 2}.__getitem__,
        nvmlDeviceGetSerial={"the board": "1234"}.__getitem__,
        nvmlDeviceGetName={instance: "NVIDIA H100 MIG 1g.10gb"}.__getitem__,
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    found = GpuReader(0).gpu
    assert found is not None
    assert found.uuid == "MIG-" + UUID.removeprefix("GPU-")
    assert (found.index, found.serial, found.name) == (2, "1234", "NVIDIA H100 MIG 1g.10gb")


@pytest.mark.parametrize(
    ("bound", "current", "count", "expected"),
    [
        (torch.device("cuda", 3), 0, 8, 3),  # init_process_group(device_id=…) without set_device
        (torch.device("cpu"), 5, 8, None),
        (None, 5, 8, 5),  # set_device(5)
        (None, 0, 8, None),  # set_device(0), or none at all
        (None, 0, 1, 0),  # CUDA_VISIBLE_DEVICES leaves one
    ],
)
def test_a_device_that_may_be_the_default_is_ignored(
    bound: torch.device | None, current: int, count: int, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=bound)))
    monkeypatch.setattr(gpu, "cuda_is_in_use", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert gpu.bound_device() == expected


def test_the_nccl_version_comes_from_the_loaded_library(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build a library with")
    library = tmp_path / "libnccl.so.2.99"
    source = "int ncclGetVersion(int *version) { *version = 22907; return 0; }"
    subprocess.run([compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=source.encode(), check=True)
    program = (
        "import ctypes, sys\n"
        "from crossrank.instrument.identity.gpu import nccl_version\n"
        "print(nccl_version())\n"
        "ctypes.CDLL(sys.argv[1])\n"
        "print(nccl_version())\n"
    )
    result = subprocess.run([sys.executable, "-c", program, library], capture_output=True, text=True, check=True)
    assert result.stdout == "None\n2.29.7\n"


def test_nvml_is_not_used_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuReader(0).gpu is None


@pytest.mark.parametrize(("cuda", "driver", "may"), [("13.0", True, True), ("13.0", False, False), (None, True, False)])
def test_cuda_may_be_used_if_torch_and_the_machine_support_it(
    cuda: str | None, driver: bool, may: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(gpu, "_DRIVERS", (str(tmp_path if driver else tmp_path / "nowhere"),))
    assert gpu.may_use_cuda() == may
