"""Finds the GPU of this rank, once it is certain, and reads its cumulative counters through NVML.

It is the device of the process group, or of the first communicated tensor. torch's current device is not reliable:
before the script calls `set_device`, it is device 0 on every rank.

NVML finds a CUDA device by its UUID, never by its index: `CUDA_VISIBLE_DEVICES` renumbers devices for CUDA only.
Without a driver everything here is None, which is logged at debug level.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from crossrank.errors import one_line
from crossrank.instrument.log import log
from crossrank.instrument.unpatched import threading, time


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Identity of a GPU or of a MIG instance. A field that the board or driver does not have is None."""

    index: int | None = None
    """Index of the board in NVML and nvidia-smi."""
    name: str | None = None
    uuid: str | None = None
    serial: str | None = None
    pci_bus_id: str | None = None
    fabric_cluster: str | None = None
    """UUID of the NVLink fabric; GPUs with equal cluster and clique reach each other over NVLink."""
    fabric_clique: int | None = None
    driver: str | None = None

    @property
    def nvlink_domain(self) -> str | None:
        if self.fabric_cluster is None or self.fabric_clique is None:
            return None
        return f"{self.fabric_cluster}:{self.fabric_clique}"


# Cumulative fields of NVML -> our names. Not every GPU has every field.
_COUNTERS = {
    "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX": "nvlink_tx_kib",
    "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX": "nvlink_rx_kib",
    "NVML_FI_DEV_PCIE_COUNT_TX_BYTES": "pcie_tx_bytes",
    "NVML_FI_DEV_PCIE_COUNT_RX_BYTES": "pcie_rx_bytes",
    "NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION": "energy_mj",
}
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvmap", "/dev/kfd")
"""Device files of the drivers of NVIDIA, NVIDIA under WSL, NVIDIA on a Jetson, and AMD."""
_PATIENCE = 2.0
"""Seconds for which the other ranks may wait to learn of this rank's NVLink domain."""
_ALL_LINKS = 0xFFFFFFFF  # scope of the NVLink fields: the sum over all links
_FABRIC_COMPLETED = 3
_NCCL = re.compile(r"(/\S*(?:libnccl|librccl|libtorch_cuda|libtorch_hip)[^/\s]*\.so[^/\s]*)")


class GpuReader:
    """Asks NVML about the CUDA device of this process with that index."""

    def __init__(self, device: int) -> None:
        self.gpu: Gpu | None = None
        self._board: Any = None
        try:
            uuid = _uuid_of(device)
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._find(uuid)
        except Exception as error:
            log.debug("crossrank: NVML is not available, GPU identity is null: %s", one_line(error))

    def _find(self, uuid: str) -> None:
        """Find the device, which may be a MIG part of a GPU. CUDA's UUID does not show which."""
        nvml = self._nvml
        for name in [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]:
            handle = _ask(functools.partial(nvml.nvmlDeviceGetHandleByUUID, name))
            if handle is not None:
                is_part = name.startswith("MIG-")
                self._board = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if is_part else handle
                self.gpu = self._identity(name, handle)
                return

    def counters(self) -> dict[str, int] | None:
        """Return cumulative NVLink and PCIe traffic and energy in the units of the names; None without a board."""
        if self._board is None:
            return None
        nvml = self._nvml
        wanted = [(getattr(nvml, field), name) for field, name in _COUNTERS.items() if hasattr(nvml, field)]
        request = [(field, _ALL_LINKS) if name.startswith("nvlink") else field for field, name in wanted]
        values = _ask(lambda: nvml.nvmlDeviceGetFieldValues(self._board, request))
        if values is None:
            return None
        # The value is a union; every counter asked for here is an unsigned long long.
        return {
            name: int(value.value.ullVal)
            for (_, name), value in zip(wanted, values, strict=True)
            if value.nvmlReturn == nvml.NVML_SUCCESS
        }

    def _identity(self, uuid: str, handle: Any) -> Gpu:
        nvml, board = self._nvml, self._board
        cluster, clique = _ask(lambda: _fabric(nvml, board)) or (None, None)
        return Gpu(
            index=_ask(lambda: nvml.nvmlDeviceGetIndex(board)),
            name=_ask(lambda: nvml.nvmlDeviceGetName(handle)),
            uuid=uuid,
            serial=_ask(lambda: nvml.nvmlDeviceGetSerial(board)),
            pci_bus_id=_ask(lambda: nvml.nvmlDeviceGetPciInfo_v3(board).busId),
            fabric_cluster=cluster,
            fabric_clique=clique,
            driver=_ask(lambda: nvml.nvmlSystemGetDriverVersion()),
        )


class RankGpu:
    """The GPU of this rank. Calls `on_late` if the GPU becomes known after `begin`."""

    def __init__(self, on_late: Callable[[Gpu], None]) -> None:
        self._on_late = on_late
        self._device: int | None = None
        self._reader: GpuReader | None = None
        self._begun = False
        self._lock = threading.RLock()  # a signal handler may end the recording while its thread holds it
        self.is_open = False
        """Whether the device is still unknown: until it is known, the recorder passes the devices of tensors."""

    @property
    def gpu(self) -> Gpu | None:
        return self._reader.gpu if self._reader is not None else None

    def begin(self) -> None:
        """Set the device, if it is certain already."""
        if self._device is None:
            self._device = bound_device()
            self.is_open = self._device is None and may_use_cuda()
        self.read()
        self._begun = True

    def settle(self, device: str | None) -> None:
        """Set the device from the device of a communicated tensor, such as `cuda:1`."""
        if device is None or not device.startswith("cuda"):
            return
        index = device.partition(":")[2]
        self._device = int(index) if index else torch.cuda.current_device()
        self.is_open = False

    def read(self) -> None:
        """Ask the driver once the device is known."""
        with self._lock:
            if self._reader is not None or self._device is None or not cuda_is_in_use():
                return
            self._reader = GpuReader(self._device)
            if self._begun and self._reader.gpu is not None:
                self._on_late(self._reader.gpu)

    def nvlink_domain(self) -> str | None:
        """Return the NVLink domain; wait a moment for the device to be known."""
        until = time.monotonic() + _PATIENCE
        while self.is_open and time.monotonic() < until:
            time.sleep(0.05)
        self.read()
        return self.gpu.nvlink_domain if self.gpu is not None else None

    def counters(self) -> dict[str, int] | None:
        """Return the cumulative counters of the GPU; None without one."""
        return self._reader.counters() if self._reader is not None else None


def cuda_is_in_use() -> bool:
    """Return whether this process uses its GPU already.

    The recorder never calls `torch.cuda.is_available`: it initialises the driver, and then a forked child cannot use
    CUDA.
    """
    return bool(torch.cuda.is_initialized())


def is_capturing() -> bool:
    """Return whether this thread's stream captures a CUDA graph: a synchronisation would break the capture."""
    return cuda_is_in_use() and bool(torch.cuda.is_current_stream_capturing())


def bound_device() -> int | None:
    """Return the certain CUDA device of this process: that of its process group, the one it has set, or its only one.

    Device 0 is also torch's default, so it is certain only on the first rank of a node.
    """
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    if bound is not None:
        return bound.index if bound.type == "cuda" else None
    if not cuda_is_in_use():
        return None
    current = torch.cuda.current_device()
    is_first = os.environ.get("LOCAL_RANK") == "0" or torch.cuda.device_count() == 1
    return current if current != 0 or is_first else None


def may_use_cuda() -> bool:
    """Return whether this process may use a CUDA device later: torch is built for one, and the node has a driver."""
    is_built = torch.version.cuda is not None or torch.version.hip is not None
    return is_built and any(map(os.path.exists, _DRIVERS))


def nccl_version() -> str | None:
    """Return the version of the loaded NCCL or RCCL, which may differ from the one that torch was built with."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    for path in dict.fromkeys(_NCCL.findall(maps)):
        code = ctypes.c_int()
        with contextlib.suppress(OSError, AttributeError):
            if ctypes.CDLL(path).ncclGetVersion(ctypes.byref(code)) == 0:
                return _nccl_text(code.value)
    return None


def _nccl_text(code: int) -> str:
    """Return an NCCL version number as text: X*10000 + Y*100 + Z, and X*1000 + Y*100 + Z before 2.9.

    >>> _nccl_text(22803), _nccl_text(2804)
    ('2.28.3', '2.8.4')
    """
    major = 10_000 if code >= 10_000 else 1000
    return f"{code // major}.{code % major // 100}.{code % 100}"


def _uuid_of(device: int) -> str:
    """Return the UUID of a CUDA device in CUDA's format. Creates no CUDA context."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _fabric(nvml: Any, board: Any) -> tuple[str, int] | None:
    """Return cluster UUID and clique if the GPU is in a complete NVLink fabric, such as an NVL72."""
    info = nvml.c_nvmlGpuFabricInfo_v2_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(board, ctypes.byref(info))
    cluster = bytes(info.clusterUuid).hex()
    return (cluster, info.cliqueId) if info.state == _FABRIC_COMPLETED and cluster.strip("0") else None


def _ask(question: Callable[[], Any]) -> Any:
    """Return the answer, or None on an error: boards support different queries (a GeForce has no serial)."""
    try:
        answer = question()
    except Exception as error:
        log.debug("crossrank: an NVML query failed: %s", one_line(error))
        return None
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer
