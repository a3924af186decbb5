"""The batch of the simulated library: many values of one GPU in one call, each with its own answer."""

from collections.abc import Callable
from typing import Any

import pynvml

from workers.gpus.arguments import NOT_SUPPORTED, Refusal, behind, plain
from workers.gpus.sim_gpu import Gpu
from workers.gpus.sim_handles import Handles, Symbol
from workers.gpus.sim_links import VERSIONS
from workers.gpus.sim_values import with_ecc

ALL_LINKS = 0xFFFFFFFF
KIB = 1024
UINT, ULONGLONG = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
SPEED_MBYTES_PER_S = {2: 25781, 3: 25781, 4: 26562, 5: 53125}
"""What the driver reports for one link, by version."""

COUNTED_LINKS = 12
"""Later ones have no numbers of their own for their errors."""

NEVER_HELD_BACK = (
    pynvml.NVML_FI_DEV_PERF_POLICY_SYNC_BOOST, pynvml.NVML_FI_DEV_PERF_POLICY_BOARD_LIMIT,
    pynvml.NVML_FI_DEV_PERF_POLICY_LOW_UTILIZATION, pynvml.NVML_FI_DEV_PERF_POLICY_RELIABILITY,
    pynvml.NVML_FI_DEV_PERF_POLICY_TOTAL_APP_CLOCKS, pynvml.NVML_FI_DEV_PERF_POLICY_TOTAL_BASE_CLOCKS,
)

Getter = Callable[[Gpu, int], float]
"""GPU and scope -> the value. Refuses what the GPU does not have."""


def symbols(handles: Handles) -> dict[str, Symbol]:
    table = counters() | gauges() | link_fields()

    def field_values(handle: Any, count: Any, out: Any) -> None:
        gpu, values = handles.gpu(handle), behind(out)
        sampled_us = handles.machine.sampled_us
        for place in range(plain(count)):
            answer(gpu, values[place], table, sampled_us)

    return {"nvmlDeviceGetFieldValues": field_values}


def answer(gpu: Gpu, value: Any, table: dict[int, tuple[int, Getter]], sampled_us: int) -> None:
    field = value.fieldId
    value.timestamp = sampled_us
    known = None if field in gpu.condition.hidden_fields or field in gpu.hidden_fields else table.get(field)
    if known is None:
        value.nvmlReturn = NOT_SUPPORTED
        return
    kind, getter = known
    try:
        number = round(getter(gpu, value.scopeId))
    except Refusal as refusal:
        value.nvmlReturn = refusal.code
        return
    value.nvmlReturn, value.valueType = 0, kind
    if kind == UINT:
        value.value.uiVal = number
    else:
        value.value.ullVal = number


def counters() -> dict[int, tuple[int, Getter]]:
    known: dict[int, Getter] = {
        pynvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL: lambda gpu, _: with_ecc(gpu).errors.corrected,
        pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL: lambda gpu, _: with_ecc(gpu).errors.uncorrected,
        pynvml.NVML_FI_DEV_ECC_SBE_AGG_TOTAL: lambda gpu, _: with_ecc(gpu).errors.corrected,
        pynvml.NVML_FI_DEV_ECC_DBE_AGG_TOTAL: lambda gpu, _: with_ecc(gpu).errors.uncorrected,
        pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION: lambda gpu, _: gpu.energy_mj,
        pynvml.NVML_FI_DEV_PERF_POLICY_POWER: lambda gpu, _: gpu.power_violation_ns,
        pynvml.NVML_FI_DEV_PERF_POLICY_THERMAL: lambda gpu, _: gpu.thermal_violation_ns,
        pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES: lambda gpu, _: gpu.pcie_sent,
        pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES: lambda gpu, _: gpu.pcie_received,
        pynvml.NVML_FI_DEV_REMAPPED_COR: lambda gpu, _: 0 * with_ecc(gpu).errors.corrected,
        pynvml.NVML_FI_DEV_REMAPPED_UNC: lambda gpu, _: with_ecc(gpu).errors.rows_uncorrectable,
        pynvml.NVML_FI_DEV_REMAPPED_PENDING: lambda gpu, _: with_ecc(gpu).errors.remap_pending,
        pynvml.NVML_FI_DEV_REMAPPED_FAILURE: lambda gpu, _: 0 * with_ecc(gpu).errors.corrected,
    }
    known |= {field: lambda *_: 0 for field in NEVER_HELD_BACK}
    return {field: (ULONGLONG, getter) for field, getter in known.items()}


def gauges() -> dict[int, tuple[int, Getter]]:
    known: dict[int, Getter] = {
        pynvml.NVML_FI_DEV_MEMORY_TEMP: lambda gpu, _: with_sensor(gpu).memory_temperature_c,
        pynvml.NVML_FI_DEV_POWER_AVERAGE: lambda gpu, _: gpu.power_mw,
        pynvml.NVML_FI_DEV_POWER_INSTANT: lambda gpu, _: gpu.power_mw,
        pynvml.NVML_FI_DEV_POWER_MIN_LIMIT: lambda gpu, _: gpu.board.power_min_w * 1000,
        pynvml.NVML_FI_DEV_POWER_MAX_LIMIT: lambda gpu, _: gpu.board.power_max_w * 1000,
        pynvml.NVML_FI_DEV_POWER_DEFAULT_LIMIT: lambda gpu, _: gpu.board.power_limit_w * 1000,
        pynvml.NVML_FI_DEV_POWER_CURRENT_LIMIT: lambda gpu, _: gpu.board.power_limit_w * 1000,
        pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER: lambda gpu, _: gpu.errors.pcie_replays,
        pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: lambda gpu, _: gpu.errors.recovery_action,
        pynvml.NVML_FI_DEV_ECC_CURRENT: lambda gpu, _: gpu.board.has_ecc,
        pynvml.NVML_FI_DEV_ECC_PENDING: lambda gpu, _: gpu.board.has_ecc,
        pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT: lambda gpu, _: gpu.board.nvlinks,
        pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON: speed,
    }
    return {field: (UINT, getter) for field, getter in known.items()}


def link_fields() -> dict[int, tuple[int, Getter]]:
    sums: dict[int, Getter] = {
        getattr(pynvml, f"NVML_FI_DEV_NVLINK_THROUGHPUT_{what}_{way}"): lambda gpu, scope: moved(gpu, scope) / KIB
        for what in ("DATA", "RAW") for way in ("TX", "RX")
    }
    sums |= {pynvml.NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES: moved, pynvml.NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES: moved}
    sums |= {getattr(pynvml, f"NVML_FI_DEV_NVLINK_{kind}_ERROR_COUNT_TOTAL"): lambda gpu, _: link_errors(gpu, ALL_LINKS)
             for kind in ("CRC_FLIT", "CRC_DATA", "REPLAY", "RECOVERY")}
    sums |= {getattr(pynvml, f"NVML_FI_DEV_NVLINK_ERROR_DL_{kind}"): link_errors
             for kind in ("REPLAY", "RECOVERY", "CRC")}
    for kind in ("CRC_FLIT", "CRC_DATA", "REPLAY", "RECOVERY"):
        for link in range(COUNTED_LINKS):
            sums[getattr(pynvml, f"NVML_FI_DEV_NVLINK_{kind}_ERROR_COUNT_L{link}")] = errors_of(link)
    small: dict[int, Getter] = {
        pynvml.NVML_FI_DEV_NVLINK_GET_SPEED: speed,
        pynvml.NVML_FI_DEV_NVLINK_GET_STATE: lambda gpu, link: gpu.link_is_up(with_link(gpu, link)),
        pynvml.NVML_FI_DEV_NVLINK_GET_VERSION: lambda gpu, _: VERSIONS[linked(gpu).board.nvlink_version or 0],
    }
    return ({field: (ULONGLONG, getter) for field, getter in sums.items()}
            | {field: (UINT, getter) for field, getter in small.items()})


def errors_of(link: int) -> Getter:
    return lambda gpu, _: link_errors(gpu, link)


def moved(gpu: Gpu, scope: int) -> float:
    """Bytes, either way."""
    return sum(linked(gpu).link_bytes) if scope == ALL_LINKS else gpu.link_bytes[with_link(gpu, scope)]


def link_errors(gpu: Gpu, scope: int) -> float:
    if scope == ALL_LINKS:
        return sum(linked(gpu).errors.links.values())
    return gpu.errors.links.get(with_link(gpu, scope), 0)


def speed(gpu: Gpu, _scope: int) -> float:
    return SPEED_MBYTES_PER_S[linked(gpu).board.nvlink_version or 0]


def linked(gpu: Gpu) -> Gpu:
    if not gpu.board.nvlinks:
        raise Refusal(NOT_SUPPORTED)
    return gpu


def with_link(gpu: Gpu, link: int) -> int:
    if link >= linked(gpu).board.nvlinks:
        raise Refusal(NOT_SUPPORTED)
    return link


def with_sensor(gpu: Gpu) -> Gpu:
    if not gpu.board.has_memory_sensor:
        raise Refusal(NOT_SUPPORTED)
    return gpu
