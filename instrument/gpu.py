"""Which GPU this rank drives, and its cumulative counters, asked of the driver through NVML.

A CUDA device is found in NVML by its UUID, never by its index: `CUDA_VISIBLE_DEVICES` renumbers devices for
CUDA only. Without a driver everything here is None, which is said once at debug level.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from crossrank.errors import one_line

log = logging.getLogger("crossrank")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Identity of one GPU. A field that the board or driver does not give is None."""

    index: int | None = None
    """Index in NVML, which is that of nvidia-smi."""
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


# Names of NVML's cumulative fields -> names of ours. Not every GPU has every field.
_COUNTERS = {
    "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX": "nvlink_tx_kib",
    "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX": "nvlink_rx_kib",
    "NVML_FI_DEV_PCIE_COUNT_TX_BYTES": "pcie_tx_bytes",
    "NVML_FI_DEV_PCIE_COUNT_RX_BYTES": "pcie_rx_bytes",
    "NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION": "energy_mj",
}
_ALL_LINKS = 0xFFFFFFFF  # scope of the NVLink fields: the sum over all links
_FABRIC_COMPLETED = 3


class GpuReader:
    """Asks NVML about the device that torch uses in this process."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._nvml: Any = None
        self.gpu: Gpu | None = None
        uuid = _torch_device_uuid()
        if uuid is None:
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except Exception as error:
            log.debug("crossrank: no NVML, GPU identity is null: %s", one_line(error))
            return
        self.gpu = self._identity(uuid)

    def counters(self) -> dict[str, int] | None:
        """Cumulative NVLink and PCIe traffic and energy in the units of their names; None without a GPU."""
        if self._handle is None:
            return None
        nvml = self._nvml
        wanted = [(getattr(nvml, field), name) for field, name in _COUNTERS.items() if hasattr(nvml, field)]
        try:
            request = [(field, _ALL_LINKS) if name.startswith("nvlink") else field for field, name in wanted]
            values = nvml.nvmlDeviceGetFieldValues(self._handle, request)
        except Exception as error:
            log.debug("crossrank: no GPU counters: %s", one_line(error))
            return None
        # The value is a union; every counter asked for here is an unsigned long long.
        return {
            name: int(value.value.ullVal)
            for (_, name), value in zip(wanted, values, strict=True)
            if value.nvmlReturn == nvml.NVML_SUCCESS
        }

    def _identity(self, uuid: str) -> Gpu:
        nvml, handle = self._nvml, self._handle
        cluster, clique = self._fabric()
        return Gpu(
            index=_ask(lambda: int(nvml.nvmlDeviceGetIndex(handle))),
            name=_ask(lambda: _text(nvml.nvmlDeviceGetName(handle))),
            uuid=uuid,
            serial=_ask(lambda: _text(nvml.nvmlDeviceGetSerial(handle))),
            pci_bus_id=_ask(lambda: _text(nvml.nvmlDeviceGetPciInfo_v3(handle).busId)),
            fabric_cluster=cluster,
            fabric_clique=clique,
            driver=_ask(lambda: _text(nvml.nvmlSystemGetDriverVersion())),
        )

    def _fabric(self) -> tuple[str | None, int | None]:
        """Cluster UUID and clique where the GPU is part of a finished NVLink fabric (an NVL72, say)."""
        nvml = self._nvml

        def ask() -> tuple[str, int] | None:
            info = nvml.c_nvmlGpuFabricInfo_v2_t()
            nvml.nvmlDeviceGetGpuFabricInfoV(self._handle, ctypes.byref(info))
            cluster = bytes(bytearray(info.clusterUuid)).hex()
            if info.state != _FABRIC_COMPLETED or not cluster.strip("0"):
                return None
            return cluster, int(info.cliqueId)

        return _ask(ask) or (None, None)


def cuda_is_in_use() -> bool:
    """Whether this process has begun to use its GPU.

    `torch.cuda.is_available` is not asked anywhere here: it initialises the driver, after which a forked child
    can no longer use CUDA.
    """
    import torch

    return bool(torch.cuda.is_initialized())


def device_is_settled() -> bool:
    """Whether it is known which GPU this process uses, or that its torch can use none."""
    import torch

    return (torch.version.cuda is None and torch.version.hip is None) or cuda_is_in_use()


def _torch_device_uuid() -> str | None:
    """UUID of the current CUDA device; None without one. Never makes a CUDA context of its own."""
    import torch

    if not cuda_is_in_use():
        return None
    try:
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    except Exception as error:
        log.debug("crossrank: the CUDA device has no UUID: %s", one_line(error))
        return None
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _ask(question: Callable[[], Any]) -> Any:
    """The answer, or None: boards differ in what they tell (a GeForce has no serial)."""
    try:
        return question()
    except Exception as error:
        log.debug("crossrank: NVML does not tell: %s", one_line(error))
        return None


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
