"""GPU identity and counters. No test machine has a GPU: what NVML answers is played by a stand-in module."""

from __future__ import annotations

import ctypes
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from crossrank.instrument import gpu
from crossrank.instrument.gpu import Gpu, GpuReader

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
        return [
            SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=1000)),
            SimpleNamespace(nvmlReturn=3, value=SimpleNamespace(ullVal=0)),
            SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=2000)),
        ]

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
def test_identity_and_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _nvml())
    reader = GpuReader(0)
    assert reader.gpu == Gpu(
        index=5,
        name="NVIDIA GB200",
        uuid=UUID,
        serial=None,
        pci_bus_id="00000008:01:00.0",
        fabric_cluster="ab" + 15 * "00",
        fabric_clique=7,
        driver="580.1",
    )
    assert reader.gpu.nvlink_domain == "ab" + 15 * "00" + ":7"
    assert reader.counters() == {"nvlink_tx_kib": 1000, "energy_mj": 2000}


@pytest.mark.usefixtures("cuda")
def test_a_gpu_outside_a_fabric_has_no_nvlink_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules,
        "pynvml",
        _nvml(nvmlDeviceGetGpuFabricInfoV=lambda handle, info: None),
    )
    found = GpuReader(0).gpu
    assert found is not None
    assert (found.fabric_cluster, found.fabric_clique, found.nvlink_domain) == (None, None, None)


@pytest.mark.usefixtures("cuda")
def test_without_a_driver_everything_is_null_and_one_debug_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "crossrank"):
        reader = GpuReader(0)  # the real pynvml, on a machine without a driver
    if reader.gpu is not None:
        pytest.skip("this machine has an NVIDIA driver")
    assert reader.counters() is None
    assert [record.levelname for record in caplog.records] == ["DEBUG"]


def test_without_cuda_nvml_is_not_even_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuReader(0).gpu is None
