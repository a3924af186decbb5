"""Symbols of the simulated library: the driver, and what each GPU is."""

import re
from typing import Any

import pynvml

from workers.gpus.arguments import NOT_FOUND, NOT_SUPPORTED, Refusal, behind, fill, plain, put, write_text
from workers.gpus.boards import MIB
from workers.gpus.sim_gpu import Gpu, Slice
from workers.gpus.sim_handles import Device, Handles, Symbol

DRIVER_VERSION = b"570.158.01"
NVML_VERSION = b"12." + DRIVER_VERSION
CUDA_VERSION = 12080
CUDA_CORES = {5: 64, 7: 64, 8: 128, 9: 128, 10: 128}
"""Of one multiprocessor, by architecture."""

PROCESS_NAME = b"/usr/bin/python3"


def symbols(handles: Handles) -> dict[str, Symbol]:
    return driver_symbols(handles) | name_symbols(handles) | board_symbols(handles) | place_symbols(handles)


def driver_symbols(handles: Handles) -> dict[str, Symbol]:
    return {
        "nvmlInitWithFlags": lambda _flags: None,
        "nvmlInit_v2": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlErrorString": lambda code: b"simulated error %d" % plain(code),
        "nvmlSystemGetDriverVersion": lambda buffer, size: write_text(buffer, size, DRIVER_VERSION),
        "nvmlSystemGetNVMLVersion": lambda buffer, size: write_text(buffer, size, NVML_VERSION),
        "nvmlSystemGetCudaDriverVersion": lambda out: put(out, CUDA_VERSION),
        "nvmlSystemGetCudaDriverVersion_v2": lambda out: put(out, CUDA_VERSION),
        "nvmlDeviceGetCount": lambda out: put(out, len(handles.machine.gpus)),
        "nvmlDeviceGetCount_v2": lambda out: put(out, len(handles.machine.gpus)),
        "nvmlDeviceGetHandleByIndex_v2": handles.by_index,
        "nvmlDeviceGetHandleByUUID": handles.by_uuid,
        "nvmlDeviceGetHandleByPciBusId_v2": handles.by_pci,
        "nvmlDeviceGetHandleBySerial": lambda serial, out: by_serial(handles, serial, out),
    }


def name_symbols(handles: Handles) -> dict[str, Symbol]:
    return {
        "nvmlDeviceGetUUID": handles.text(lambda device: device.uuid),
        "nvmlDeviceGetName": handles.text(name_of),
        "nvmlDeviceGetSerial": handles.text(serial_of),
        "nvmlDeviceGetVbiosVersion": handles.text(vbios_of),
        "nvmlDeviceGetIndex": handles.number(lambda gpu: gpu.index),
        "nvmlDeviceGetMinorNumber": handles.number(lambda gpu: gpu.index),
        "nvmlDeviceGetPciInfo_v3": lambda handle, out: pci_info(handles.gpu(handle), out),
        "nvmlDeviceGetPciInfo_v2": lambda handle, out: pci_info(handles.gpu(handle), out),
    }


def board_symbols(handles: Handles) -> dict[str, Symbol]:
    return {
        "nvmlDeviceGetBrand": handles.number(
            lambda gpu: pynvml.NVML_BRAND_GEFORCE if gpu.board.fans else pynvml.NVML_BRAND_NVIDIA),
        "nvmlDeviceGetArchitecture": handles.number(lambda gpu: gpu.board.architecture),
        "nvmlDeviceGetCudaComputeCapability": lambda handle, *out: capability(handles.device(handle), *out),
        "nvmlDeviceGetNumGpuCores": handles.number(
            lambda gpu: gpu.board.multiprocessors * CUDA_CORES[gpu.board.architecture]),
        "nvmlDeviceGetVirtualizationMode": handles.number(
            lambda gpu: pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU if gpu.is_guest
            else pynvml.NVML_GPU_VIRTUALIZATION_MODE_NONE),
        "nvmlDeviceGetPersistenceMode": handles.number(lambda gpu: int(not gpu.board.fans)),
        "nvmlDeviceGetComputeMode": handles.constant(pynvml.NVML_COMPUTEMODE_DEFAULT),
        "nvmlDeviceGetDisplayMode": handles.constant(0),
        "nvmlDeviceGetDisplayActive": handles.constant(0),
        "nvmlDeviceGetMultiGpuBoard": handles.constant(0),
        "nvmlDeviceGetBAR1MemoryInfo": lambda handle, out: bar1(handles.gpu(handle), out),
    }


def place_symbols(handles: Handles) -> dict[str, Symbol]:
    def cpus(handle: Any, size: Any, out: Any, _scope: Any = None) -> None:
        write_cpus(handles.gpu(handle), size, out)

    def memory(handle: Any, size: Any, out: Any, _scope: Any) -> None:
        numa = handles.gpu(handle).numa
        if numa // 64 < plain(size):
            behind(out)[numa // 64] = 1 << numa % 64

    return {
        "nvmlDeviceGetCpuAffinity": cpus,
        "nvmlDeviceGetCpuAffinityWithinScope": cpus,
        "nvmlDeviceGetMemoryAffinity": memory,
        "nvmlDeviceGetNumaNodeId": handles.number(lambda gpu: gpu.numa),
    }


def name_of(device: Device) -> str:
    return device.board.name if isinstance(device, Gpu) else f"{device.gpu.board.name} MIG {device.profile}"


def serial_of(device: Device) -> str | None:
    return device.serial if isinstance(device, Gpu) and device.board.has_serial else None


def vbios_of(device: Device) -> str:
    gpu = device.gpu if isinstance(device, Slice) else device
    return f"{80 + 2 * gpu.board.architecture}.00.{gpu.board.nvlinks:02d}.00.01"


def by_serial(handles: Handles, serial: Any, out: Any) -> None:
    wanted = (plain(serial) or b"").decode(errors="replace")
    for gpu in handles.machine.gpus:
        if serial_of(gpu) == wanted:
            return handles.give(out, gpu)
    raise Refusal(NOT_FOUND)


def pci_info(gpu: Gpu, out: Any) -> None:
    fill(out, domain=0, bus=gpu.bus, device=0, pciDeviceId=int(gpu.board.pci_device_id, 16) << 16 | 0x10DE,
         busId=gpu.bus_id.encode(), busIdLegacy=gpu.bus_id[4:].encode())


def capability(device: Device, major: Any, minor: Any) -> None:
    board = device.board if isinstance(device, Gpu) else device.gpu.board
    high, low = board.compute_capability.split(".")
    behind(major).value, behind(minor).value = int(high), int(low)


def bar1(gpu: Gpu, out: Any) -> None:
    total = 256 * MIB if gpu.board.fans else 2 * gpu.memory_bytes
    fill(out, bar1Total=total, bar1Free=total - MIB, bar1Used=MIB)


def write_cpus(gpu: Gpu, size: Any, out: Any) -> None:
    """One bit for each core near the GPU."""
    if not gpu.cpu_affinity:
        raise Refusal(NOT_SUPPORTED)
    words = behind(out)
    for core in cores(gpu.cpu_affinity):
        if core // 64 < plain(size):
            words[core // 64] |= 1 << core % 64


def cores(ranges: str) -> list[int]:
    """`0-3,8` -> 0, 1, 2, 3, 8."""
    ends = [re.split("-", part) for part in ranges.split(",")]
    return [core for end in ends for core in range(int(end[0]), int(end[-1]) + 1)]
