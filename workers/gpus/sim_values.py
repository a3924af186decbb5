"""Symbols of the simulated library: what a GPU does at the moment."""

import time
from collections.abc import Callable
from typing import Any

import pynvml

from workers.gpus.arguments import (
    INVALID_ARGUMENT,
    NOT_FOUND,
    NOT_SUPPORTED,
    VERSION_MISMATCH,
    Refusal,
    behind,
    fill,
    list_out,
    plain,
)
from workers.gpus.sim_gpu import Gpu, Slice
from workers.gpus.sim_handles import Device, Handles, Symbol

IDLE, POWER_CAP, HW_SLOWDOWN, HW_THERMAL = 0x1, 0x4, 0x8, 0x40
NOT_IN_MIG = 0xFFFFFFFF
BAD_PIDS = (0, 0xFFFFFFFF)
SAMPLING_US = 1_000_000
P0, P8 = 0, 8


def symbols(handles: Handles) -> dict[str, Symbol]:
    return (memory_symbols(handles) | engine_symbols(handles) | power_symbols(handles) | clock_symbols(handles)
            | process_symbols(handles) | health_symbols(handles))


def memory_symbols(handles: Handles) -> dict[str, Symbol]:
    def first(handle: Any, out: Any) -> None:
        total, used, reserved = memory_of(handles.device(handle))
        # The first version counts the driver's own reserve as used.
        fill(out, total=total, used=used + reserved, free=total - used - reserved)

    def second(handle: Any, out: Any) -> None:
        if behind(out).version != pynvml.nvmlMemory_v2:
            raise Refusal(VERSION_MISMATCH)
        total, used, reserved = memory_of(handles.device(handle))
        fill(out, total=total, used=used, reserved=reserved, free=total - used - reserved)

    return {"nvmlDeviceGetMemoryInfo": first, "nvmlDeviceGetMemoryInfo_v2": second}


def engine_symbols(handles: Handles) -> dict[str, Symbol]:
    def rates(handle: Any, out: Any) -> None:
        percent = percent_of(handles.gpu(handle))
        fill(out, gpu=percent, memory=percent // 2)

    def idle_engine(handle: Any, out: Any, period: Any) -> None:
        percent_of(handles.gpu(handle))
        behind(out).value, behind(period).value = 0, SAMPLING_US

    return {
        "nvmlDeviceGetUtilizationRates": rates,
        "nvmlDeviceGetEncoderUtilization": idle_engine,
        "nvmlDeviceGetDecoderUtilization": idle_engine,
        "nvmlDeviceGetPerformanceState": handles.number(lambda gpu: P0 if gpu.load.processes else P8),
        "nvmlDeviceGetPowerState": handles.number(lambda gpu: P0 if gpu.load.processes else P8),
    }


def power_symbols(handles: Handles) -> dict[str, Symbol]:
    limit = handles.number(lambda gpu: gpu.board.power_limit_w * 1000)
    return {
        "nvmlDeviceGetPowerUsage": handles.number(lambda gpu: gpu.power_mw),
        "nvmlDeviceGetTotalEnergyConsumption": handles.number(lambda gpu: round(gpu.energy_mj)),
        "nvmlDeviceGetEnforcedPowerLimit": limit,
        "nvmlDeviceGetPowerManagementLimit": limit,
        "nvmlDeviceGetPowerManagementDefaultLimit": limit,
        "nvmlDeviceGetPowerManagementLimitConstraints": handles.numbers(
            lambda gpu: (gpu.board.power_min_w * 1000, gpu.board.power_max_w * 1000)),
        "nvmlDeviceGetPowerManagementMode": handles.constant(1),
    }


def clock_symbols(handles: Handles) -> dict[str, Symbol]:
    def clock(getter: Callable[[Gpu, bool], int]) -> Symbol:
        def symbol(handle: Any, kind: Any, out: Any) -> None:
            behind(out).value = getter(handles.gpu(handle), plain(kind) == pynvml.NVML_CLOCK_MEM)
        return symbol

    return {
        "nvmlDeviceGetClockInfo": clock(clock_now),
        "nvmlDeviceGetMaxClockInfo": clock(
            lambda gpu, is_memory: gpu.board.memory_clock_mhz if is_memory else gpu.board.sm_clock_mhz),
        "nvmlDeviceGetCurrentClocksEventReasons": handles.number(throttle_reasons),
        "nvmlDeviceGetCurrentClocksThrottleReasons": handles.number(throttle_reasons),
        "nvmlDeviceGetSupportedClocksEventReasons": handles.constant(0x1FF),
    }


def process_symbols(handles: Handles) -> dict[str, Symbol]:
    def computing(handle: Any, count: Any, out: Any) -> None:
        # A process that ended since the scan: no driver lists the dead.
        found = [one for one in processes_of(handles.device(handle))
                 if one[0] in BAD_PIDS or handles.machine.is_alive(one[0])]
        if list_out(count, out, len(found)):
            for place, (pid, size, instance, compute) in enumerate(found):
                fill(out[place], pid=pid, usedGpuMemory=size, gpuInstanceId=instance, computeInstanceId=compute)
        else:
            raise Refusal(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)

    def nobody(handle: Any, count: Any, _out: Any) -> None:
        handles.device(handle)
        behind(count).value = 0

    def utilization(handle: Any, out: Any, count: Any, _since: Any) -> None:
        shares = busy_processes(handles.gpu(handle))
        if out is None:
            behind(count).value = len(shares)
            raise Refusal(pynvml.NVML_ERROR_INSUFFICIENT_SIZE if shares else NOT_FOUND)
        list_out(count, out, len(shares))
        for place, (pid, share) in enumerate(shares.items()):
            fill(out[place], pid=pid, timeStamp=time.time_ns() // 1000, smUtil=round(100 * share),
                 memUtil=round(50 * share), encUtil=0, decUtil=0)

    versions = ("_v2", "_v3")
    return {
        **{f"nvmlDeviceGetComputeRunningProcesses{version}": computing for version in versions},
        **{f"nvmlDeviceGetMPSComputeRunningProcesses{version}": nobody for version in versions},
        **{f"nvmlDeviceGetGraphicsRunningProcesses{version}": nobody for version in versions},
        "nvmlDeviceGetProcessUtilization": utilization,
    }


def health_symbols(handles: Handles) -> dict[str, Symbol]:
    def temperature(handle: Any, _sensor: Any, out: Any) -> None:
        behind(out).value = round(handles.gpu(handle).temperature_c)

    def temperature_struct(handle: Any, out: Any) -> None:
        fill(out, temperature=round(handles.gpu(handle).temperature_c))

    def ecc_errors(handle: Any, kind: Any, _counter: Any, *rest: Any) -> None:
        errors = with_ecc(handles.gpu(handle)).errors
        behind(rest[-1]).value = (
            errors.uncorrected if plain(kind) == pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED else errors.corrected)

    def violation(handle: Any, policy: Any, out: Any) -> None:
        fill(out, referenceTime=time.time_ns() // 1000, violationTime=violation_ns(handles.gpu(handle), plain(policy)))

    return {
        "nvmlDeviceGetTemperature": temperature,
        "nvmlDeviceGetTemperatureV": temperature_struct,
        "nvmlDeviceGetTemperatureThreshold": lambda handle, kind, out: threshold(handles.gpu(handle), kind, out),
        "nvmlDeviceGetFanSpeed": handles.number(lambda gpu: with_fans(gpu).fan_percent),
        "nvmlDeviceGetFanSpeed_v2": lambda handle, fan, out: fan_speed(handles.gpu(handle), fan, out),
        "nvmlDeviceGetNumFans": handles.number(lambda gpu: gpu.board.fans),
        "nvmlDeviceGetEccMode": handles.numbers(lambda gpu: (int(with_ecc(gpu).board.has_ecc),) * 2),
        "nvmlDeviceGetTotalEccErrors": ecc_errors,
        "nvmlDeviceGetMemoryErrorCounter": ecc_errors,
        "nvmlDeviceGetRemappedRows": handles.numbers(lambda gpu: remapped_rows(with_ecc(gpu))),
        "nvmlDeviceGetViolationStatus": violation,
    }


def memory_of(device: Device) -> tuple[int, int, int]:
    """-> total, used, reserved."""
    if isinstance(device, Slice):
        return device.memory_bytes, device.load.used_bytes, 0
    total, reserved = device.memory_bytes, device.reserved_bytes
    return total, min(device.used_bytes, total - reserved), reserved


def percent_of(gpu: Gpu) -> int:
    if gpu.partition.enabled:
        raise Refusal(NOT_SUPPORTED)
    return round(100 * gpu.load.utilization)


def clock_now(gpu: Gpu, is_memory: bool) -> int:
    if ("memory_clock" if is_memory else "sm_clock") in gpu.condition.hidden_clocks:
        raise Refusal(NOT_SUPPORTED)
    return gpu.board.memory_clock_mhz if is_memory else gpu.sm_clock_mhz


def throttle_reasons(gpu: Gpu) -> int:
    held_back = HW_SLOWDOWN | HW_THERMAL if gpu.condition.throttled else 0
    if not gpu.load.processes:
        return held_back or IDLE
    return held_back | (POWER_CAP if gpu.load.utilization > 0.97 else 0)


def processes_of(device: Device) -> list[tuple[int, int, int, int]]:
    """-> pid, bytes, GPU instance, compute instance."""
    if isinstance(device, Slice):
        return [(pid, size, device.instance, device.compute) for pid, size in device.load.processes]
    if device.partition.enabled:
        return [one for piece in device.slices for one in processes_of(piece)]
    found = [(pid, size, NOT_IN_MIG, NOT_IN_MIG) for pid, size in device.load.processes]
    if device.condition.bad_pids:
        found += [(pid, device.memory_bytes // 50, NOT_IN_MIG, NOT_IN_MIG) for pid in BAD_PIDS]
    return found


def busy_processes(gpu: Gpu) -> dict[int, float]:
    percent_of(gpu)
    return {pid: share for pid, share in gpu.load.shares.items() if share > 0}


def threshold(gpu: Gpu, kind: Any, out: Any) -> None:
    board = gpu.board
    known = {pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN: board.shutdown_c,
             pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN: board.slowdown_c,
             pynvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX: board.slowdown_c - 5}
    if board.has_memory_sensor:
        known[pynvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX] = board.slowdown_c + 3
    if plain(kind) not in known:
        raise Refusal(NOT_SUPPORTED)
    behind(out).value = known[plain(kind)]


def fan_speed(gpu: Gpu, fan: Any, out: Any) -> None:
    if plain(fan) >= with_fans(gpu).board.fans:
        raise Refusal(INVALID_ARGUMENT)
    behind(out).value = gpu.fan_percent


def remapped_rows(gpu: Gpu) -> tuple[int, ...]:
    """-> correctable, uncorrectable, pending, failed."""
    return 0, gpu.errors.rows_uncorrectable, int(gpu.errors.remap_pending), 0


def violation_ns(gpu: Gpu, policy: int) -> int:
    known = {pynvml.NVML_PERF_POLICY_POWER: gpu.power_violation_ns,
             pynvml.NVML_PERF_POLICY_THERMAL: gpu.thermal_violation_ns}
    return round(known.get(policy, 0.0))


def with_ecc(gpu: Gpu) -> Gpu:
    if not gpu.board.has_ecc:
        raise Refusal(NOT_SUPPORTED)
    return gpu


def with_fans(gpu: Gpu) -> Gpu:
    if not gpu.board.fans:
        raise Refusal(NOT_SUPPORTED)
    return gpu
