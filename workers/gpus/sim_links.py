"""Symbols of the simulated library: how the GPUs are joined, by NVLink and by PCIe."""

from typing import Any

import pynvml

from workers.gpus.arguments import INVALID_ARGUMENT, NOT_SUPPORTED, Refusal, behind, fill, list_out, plain, point_at
from workers.gpus.sim_gpu import Gpu
from workers.gpus.sim_handles import Handles, Symbol

PCIE_LEVELS = {"X": 0, "PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}
SWITCH_BUS_ID = b"00000000:C0:00.0"
VERSIONS = {2: pynvml.NVML_NVLINK_VERSION_2_0, 3: pynvml.NVML_NVLINK_VERSION_3_0, 4: pynvml.NVML_NVLINK_VERSION_4_0,
            5: pynvml.NVML_NVLINK_VERSION_5_0}
"""NVML numbers the versions in its own way."""

def symbols(handles: Handles) -> dict[str, Symbol]:
    return nvlink_symbols(handles) | pcie_symbols(handles) | pair_symbols(handles)


def nvlink_symbols(handles: Handles) -> dict[str, Symbol]:
    def state(handle: Any, link: Any, out: Any) -> None:
        gpu, number = link_of(handles, handle, link)
        behind(out).value = int(gpu.link_is_up(number))

    def version(handle: Any, link: Any, out: Any) -> None:
        gpu, _ = link_of(handles, handle, link)
        behind(out).value = VERSIONS[gpu.board.nvlink_version or 0]

    def remote_type(handle: Any, link: Any, out: Any) -> None:
        is_switch = remote_end(handles, handle, link) is None
        behind(out).value = (
            pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH if is_switch else pynvml.NVML_NVLINK_DEVICE_TYPE_GPU)

    def remote_pci(handle: Any, link: Any, out: Any) -> None:
        peer = remote_end(handles, handle, link)
        fill(out, busId=peer.bus_id.encode() if peer else SWITCH_BUS_ID)

    def errors(handle: Any, link: Any, counter: Any, out: Any) -> None:
        gpu, number = link_of(handles, handle, link)
        if not 0 <= plain(counter) < pynvml.NVML_NVLINK_ERROR_COUNT:
            raise Refusal(INVALID_ARGUMENT)
        behind(out).value = gpu.errors.links.get(number, 0)

    def moved(handle: Any, link: Any, _counter: Any, received: Any, sent: Any) -> None:
        gpu, number = link_of(handles, handle, link)
        behind(received).value = behind(sent).value = round(gpu.link_bytes[number])

    def capability(handle: Any, link: Any, _kind: Any, out: Any) -> None:
        link_of(handles, handle, link)
        behind(out).value = 1

    return {
        "nvmlDeviceGetNvLinkState": state,
        "nvmlDeviceGetNvLinkVersion": version,
        "nvmlDeviceGetNvLinkRemoteDeviceType": remote_type,
        "nvmlDeviceGetNvLinkRemotePciInfo_v2": remote_pci,
        "nvmlDeviceGetNvLinkErrorCounter": errors,
        "nvmlDeviceGetNvLinkUtilizationCounter": moved,
        "nvmlDeviceGetNvLinkCapability": capability,
    }


def pcie_symbols(handles: Handles) -> dict[str, Symbol]:
    def throughput(handle: Any, counter: Any, out: Any) -> None:
        gpu = handles.gpu(handle)
        rate = gpu.pcie_bytes_per_s * gpu.load.utilization * 0.04
        behind(out).value = round(rate / (4 if plain(counter) == pynvml.NVML_PCIE_UTIL_TX_BYTES else 1) / 1024)

    return {
        "nvmlDeviceGetCurrPcieLinkGeneration": handles.number(lambda gpu: gpu.pcie_generation),
        "nvmlDeviceGetCurrPcieLinkWidth": handles.number(lambda gpu: gpu.pcie_width),
        "nvmlDeviceGetMaxPcieLinkGeneration": handles.number(lambda gpu: gpu.board.pcie_generation),
        "nvmlDeviceGetGpuMaxPcieLinkGeneration": handles.number(lambda gpu: gpu.board.pcie_generation),
        "nvmlDeviceGetMaxPcieLinkWidth": handles.number(lambda gpu: gpu.board.pcie_width),
        "nvmlDeviceGetPcieReplayCounter": handles.number(lambda gpu: gpu.errors.pcie_replays),
        "nvmlDeviceGetPcieThroughput": throughput,
    }


def pair_symbols(handles: Handles) -> dict[str, Symbol]:
    topology = handles.machine.topology

    def common_ancestor(first: Any, second: Any, out: Any) -> None:
        behind(out).value = PCIE_LEVELS[topology.pcie_level(handles.gpu(first).index, handles.gpu(second).index)]

    def nearest(handle: Any, level: Any, count: Any, out: Any) -> None:
        gpu = handles.gpu(handle)
        near = [one for one in handles.machine.gpus
                if PCIE_LEVELS[topology.pcie_level(gpu.index, one.index)] == plain(level) and one is not gpu]
        if list_out(count, out, len(near)):
            for place, one in enumerate(near):
                point_at(out, place, handles.of(one))

    def p2p(first: Any, second: Any, index: Any, out: Any) -> None:
        one, other = handles.gpu(first), handles.gpu(second)
        kind = topology.joined(one.index, other.index)
        works = not (one.partition.enabled or other.partition.enabled or one.board.fans)
        if plain(index) == pynvml.NVML_P2P_CAPS_INDEX_NVLINK:
            works = works and kind.startswith("NV")
        behind(out).value = pynvml.NVML_P2P_STATUS_OK if works else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED

    return {
        "nvmlDeviceGetTopologyCommonAncestor": common_ancestor,
        "nvmlDeviceGetTopologyNearestGpus": nearest,
        "nvmlDeviceGetP2PStatus": p2p,
    }


def link_of(handles: Handles, handle: Any, link: Any) -> tuple[Gpu, int]:
    gpu, number = handles.gpu(handle), plain(link)
    if not gpu.board.nvlinks:
        raise Refusal(NOT_SUPPORTED)
    if not 0 <= number < gpu.board.nvlinks:
        raise Refusal(INVALID_ARGUMENT)
    return gpu, number


def remote_end(handles: Handles, handle: Any, link: Any) -> Gpu | None:
    """The GPU at the other end, None for a switch; refuses a link that leads nowhere."""
    gpu, number = link_of(handles, handle, link)
    end = gpu.link_ends[number]
    if end is None:
        raise Refusal(NOT_SUPPORTED)
    return None if end == gpu.index else handles.machine.gpus[end]
