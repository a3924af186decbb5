"""The slow-moving details of an NVIDIA GPU: links, PCIe, memory faults, MIG."""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pynvml

from wire.hardware import GpuHardware, NvLink
from workers.gpus.nvml_identity import Device
from workers.gpus.nvml_mig import MigTables, mig_status
from workers.gpus.nvml_values import FieldKey, Fields, FieldValue, Probe

KIB = 1024
CORRECTED: FieldKey = (pynvml.NVML_FI_DEV_ECC_SBE_AGG_TOTAL, 0)
UNCORRECTED: FieldKey = (pynvml.NVML_FI_DEV_ECC_DBE_AGG_TOTAL, 0)
RECOVERY: FieldKey = (pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, 0)
TRANSMITTED = pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX
RECEIVED = pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX
LINK_ERRORS = {
    "replay_errors": pynvml.NVML_NVLINK_ERROR_DL_REPLAY,
    "recovery_errors": pynvml.NVML_NVLINK_ERROR_DL_RECOVERY,
    "crc_errors": pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT,
}
REMAPS = ("rows_remapped_correctable", "rows_remapped_uncorrectable", "row_remap_pending", "row_remap_failed")


class Details:
    """One whole GPU between two enumerations."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._refused: dict[str, int] = {}
        per_link = [(field, link.link) for link in device.nvlinks for field in (TRANSMITTED, RECEIVED)]
        self._fields = Fields([CORRECTED, UNCORRECTED, RECOVERY, *per_link])
        self._tables = MigTables()

    def read(self) -> GpuHardware:
        probe, handle = Probe(refused=self._refused), self._device.handle
        fields = self._fields.read(handle)
        ecc = probe("ecc_enabled", lambda: pynvml.nvmlDeviceGetEccMode(handle))
        persistence = probe("persistence_mode", lambda: pynvml.nvmlDeviceGetPersistenceMode(handle))
        return GpuHardware(
            uuid=self._device.uuid,
            links=[self._link(link, fields) for link in self._device.nvlinks],
            ecc_enabled=bool(ecc[0]) if ecc else None,
            ecc_corrected_total=counted(probe, "ecc_corrected_total", fields[CORRECTED]),
            ecc_uncorrected_total=counted(probe, "ecc_uncorrected_total", fields[UNCORRECTED]),
            recovery_action=counted(probe, "recovery_action", fields[RECOVERY]),
            persistence_mode=None if persistence is None else bool(persistence),
            mig=mig_status(handle, self._tables),
            **pcie(handle, probe), **remaps(handle, probe),
            missing=probe.missing,
        )

    def _link(self, known: NvLink, fields: dict[FieldKey, FieldValue]) -> NvLink:
        """Only what changes is asked; who is at the other end stays until the next enumeration."""
        handle, probe = self._device.handle, Probe(refused=self._refused)
        active = probe("link_state", partial(pynvml.nvmlDeviceGetNvLinkState, handle, known.link))
        errors = {name: probe(name, partial(pynvml.nvmlDeviceGetNvLinkErrorCounter, handle, known.link, kind))
                  for name, kind in LINK_ERRORS.items()} if active else {}
        return msgspec.structs.replace(
            known, active=None if active is None else bool(active),
            transmitted_bytes=kib(fields.get((TRANSMITTED, known.link))),
            received_bytes=kib(fields.get((RECEIVED, known.link))), **errors,
        )


def counted(probe: Probe, name: str, found: FieldValue) -> int | None:
    if found.value is None:
        probe.missing[name] = found.reason
        return None
    return int(found.value)


def kib(found: FieldValue | None) -> int | None:
    return None if found is None or found.value is None else int(found.value) * KIB


def pcie(handle: Any, probe: Probe) -> dict[str, Any]:
    calls: dict[str, Callable[[Any], int]] = {
        "pcie_generation": pynvml.nvmlDeviceGetCurrPcieLinkGeneration,
        "pcie_width": pynvml.nvmlDeviceGetCurrPcieLinkWidth,
        "pcie_generation_max": pynvml.nvmlDeviceGetMaxPcieLinkGeneration,
        "pcie_width_max": pynvml.nvmlDeviceGetMaxPcieLinkWidth,
    }
    return {name: probe(name, partial(call, handle)) for name, call in calls.items()}


def remaps(handle: Any, probe: Probe) -> dict[str, Any]:
    found = probe(REMAPS[0], lambda: pynvml.nvmlDeviceGetRemappedRows(handle))
    if found is None:
        probe.missing |= dict.fromkeys(REMAPS, probe.missing[REMAPS[0]])
        return {}
    corrected, uncorrected, pending, failed = found
    return dict(zip(REMAPS, (corrected, uncorrected, bool(pending), bool(failed)), strict=True))


