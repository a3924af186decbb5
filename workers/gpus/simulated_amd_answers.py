"""What the simulated binding answers about one GPU: a method per function, without the prefix `amdsmi_`."""

import uuid as uuids
from typing import Any

from workers.gpus.amd_library import UNSUPPORTED
from workers.gpus.simulated_amd_machine import KIB, MEMORY_RISE_C, MIB, NAMESPACE, AmdGpu, AmdMachine
from workers.gpus.simulated_amd_names import (
    AmdSmiClkType,
    AmdSmiLinkType,
    AmdSmiTemperatureMetric,
    AmdSmiTemperatureType,
    AmdSmiVirtualizationMode,
    library_exception,
)

NOT_KNOWN = "N/A"
LINKS_IN_TABLE = 8
ENERGY_RESOLUTION_UJ = 15.259
CORES_PER_NUMA_NODE = 48
SERIAL_OF_OAM = "69233{:07d}"
XGMI_WEIGHT, PCIE_WEIGHT = 15, 20
ECC_BLOCKS = 0x1FFF
IMPOSSIBLE = ((0xFFFFFFFF, 0), (0, 0))
SLOW_SPEED, SLOW_WIDTH = 2500, 4


class Answers:
    def __init__(self, machine: AmdMachine) -> None:
        self.machine = machine

    # Who it is.

    def get_gpu_device_bdf(self, gpu: AmdGpu) -> str:
        return gpu.bus_id

    def get_gpu_device_uuid(self, gpu: AmdGpu) -> str:
        return str(uuids.uuid5(NAMESPACE, gpu.uuid))

    def get_gpu_enumeration_info(self, gpu: AmdGpu) -> dict[str, Any]:
        return {"drm_render": 128 + gpu.index, "drm_card": gpu.index, "hsa_id": gpu.index + 2, "hip_id": gpu.index,
                "hip_uuid": gpu.uuid}

    def get_gpu_asic_info(self, gpu: AmdGpu) -> dict[str, Any]:
        board = gpu.board
        return {"market_name": board.market_name, "vendor_id": "0x1002",
                "vendor_name": "Advanced Micro Devices Inc. [AMD/ATI]", "subvendor_id": "0x1002",
                "device_id": board.device_id, "rev_id": "0x00", "asic_serial": f"0x{gpu.serial:016X}",
                "oam_id": gpu.index // board.dies, "num_compute_units": board.compute_units,
                "target_graphics_version": board.target, "subsystem_id": board.device_id}

    def get_gpu_board_info(self, gpu: AmdGpu) -> dict[str, Any]:
        card = gpu.index // gpu.board.dies
        return {"model_number": "102-G30211-00", "product_serial": SERIAL_OF_OAM.format(gpu.serial % 10**7),
                "fru_id": f"113-{card:04d}", "product_name": f"{gpu.board.market_name} OAM", "manufacturer_name": "AMD"}

    def get_gpu_vbios_info(self, gpu: AmdGpu) -> dict[str, Any]:
        return {"name": gpu.board.market_name, "build_date": "2025/03/14 09:26", "part_number": "113-M3000100-103",
                "version": "022.040.003.043.000001"}

    def get_gpu_driver_info(self, _gpu: AmdGpu) -> dict[str, Any]:
        return {"driver_name": "amdgpu", "driver_version": "6.14.14", "driver_date": "2015/01/01 00:00"}

    def get_gpu_virtualization_mode(self, _gpu: AmdGpu) -> dict[str, Any]:
        return {"mode": AmdSmiVirtualizationMode.BAREMETAL}

    def get_gpu_compute_partition(self, gpu: AmdGpu) -> str:
        return partition_of(gpu)[0]

    def get_gpu_memory_partition(self, gpu: AmdGpu) -> str:
        return partition_of(gpu)[1]

    # What it does.

    def get_gpu_activity(self, gpu: AmdGpu) -> dict[str, Any]:
        busy = round(100 * gpu.utilization)
        return {"gfx_activity": busy, "umc_activity": busy // 2, "mm_activity": NOT_KNOWN}

    def get_gpu_memory_total(self, gpu: AmdGpu, kind: int) -> int:
        return gpu.memory_bytes if kind == 0 else 0

    def get_gpu_memory_usage(self, gpu: AmdGpu, kind: int) -> int:
        return gpu.used_bytes if kind == 0 else 0

    def get_gpu_vram_usage(self, gpu: AmdGpu) -> dict[str, Any]:
        return {"vram_total": gpu.board.memory_mib, "vram_used": gpu.used_bytes // MIB}

    def get_power_info(self, gpu: AmdGpu) -> dict[str, Any]:
        watts = self._card_watts(gpu)
        now, average = (watts, NOT_KNOWN) if is_new(gpu) else (NOT_KNOWN, watts)
        return {"socket_power": watts, "current_socket_power": now, "average_socket_power": average,
                "gfx_voltage": NOT_KNOWN, "soc_voltage": NOT_KNOWN, "mem_voltage": NOT_KNOWN,
                "power_limit": gpu.board.power_cap_w if gpu.reports_power else NOT_KNOWN}

    def get_power_cap_info(self, gpu: AmdGpu) -> dict[str, Any]:
        cap = gpu.board.power_cap_w * 1_000_000 if gpu.reports_power else 0
        return {"power_cap": cap, "default_power_cap": cap, "dpm_cap": 0, "min_power_cap": 0, "max_power_cap": cap}

    def get_energy_count(self, gpu: AmdGpu) -> dict[str, Any]:
        joules = sum(die.energy_j for die in self.machine.card_of(gpu)) if gpu.reports_power else 0.0
        return {"energy_accumulator": round(joules * 1e6 / ENERGY_RESOLUTION_UJ),
                "counter_resolution": ENERGY_RESOLUTION_UJ, "timestamp": round(gpu.ticks * 1e6)}

    def get_temp_metric(self, gpu: AmdGpu, sensor: int, metric: int) -> int:
        board, kinds, metrics = gpu.board, AmdSmiTemperatureType, AmdSmiTemperatureMetric
        known = {(kinds.HOTSPOT, metrics.CURRENT): gpu.temperature_c,
                 (kinds.HOTSPOT, metrics.CRITICAL): board.critical_c,
                 (kinds.HOTSPOT, metrics.EMERGENCY): board.emergency_c,
                 (kinds.VRAM, metrics.CURRENT): gpu.temperature_c + MEMORY_RISE_C}
        if not is_new(gpu):
            known[kinds.EDGE, metrics.CURRENT] = gpu.temperature_c - MEMORY_RISE_C
        value = known.get((kinds(sensor), metrics(metric)))
        if value is None:
            raise library_exception(UNSUPPORTED)
        return round(value)

    def get_clock_info(self, gpu: AmdGpu, kind: int) -> dict[str, Any]:
        board = gpu.board
        now, most = {AmdSmiClkType.GFX: (gpu.sm_clock_mhz, board.sm_clock_mhz),
                     AmdSmiClkType.MEM: (board.memory_clock_mhz, board.memory_clock_mhz)}[AmdSmiClkType(kind)]
        return {"clk": now, "min_clk": board.idle_sm_clock_mhz, "max_clk": most, "clk_locked": False,
                "clk_deep_sleep": NOT_KNOWN}

    def get_gpu_fan_speed(self, _gpu: AmdGpu, _sensor: int) -> int:
        raise library_exception(UNSUPPORTED)  # these boards are cooled by the chassis

    get_gpu_fan_speed_max = get_gpu_fan_speed

    def get_gpu_metrics_info(self, gpu: AmdGpu) -> dict[str, Any]:
        watts, busy = self._card_watts(gpu), round(100 * gpu.utilization)
        table: dict[str, Any] = {
            "common_header.format_revision": 1, "common_header.content_revision": int(gpu.board.metrics[2:]),
            "temperature_edge": NOT_KNOWN if is_new(gpu) else round(gpu.temperature_c - MEMORY_RISE_C),
            "temperature_hotspot": round(gpu.temperature_c),
            "temperature_mem": round(gpu.temperature_c + MEMORY_RISE_C),
            "average_gfx_activity": busy, "average_umc_activity": busy // 2, "average_mm_activity": NOT_KNOWN,
            "current_uclk": gpu.board.memory_clock_mhz,
            "pcie_link_width": gpu.board.pcie_width, "pcie_link_speed": gpu.board.pcie_speed // 100,
        }
        table |= new_table(gpu, watts) if is_new(gpu) else old_table(gpu, watts)
        return table | dict.fromkeys(gpu.condition.hidden & set(table), NOT_KNOWN)

    def get_gpu_process_list(self, gpu: AmdGpu) -> list[dict[str, Any]]:
        return [{"name": NOT_KNOWN, "pid": pid, "mem": size, "engine_usage": {"gfx": 0, "enc": 0},
                 "memory_usage": {"gtt_mem": 0, "cpu_mem": 0, "vram_mem": size}, "cu_occupancy": NOT_KNOWN}
                for pid, size in [*gpu.processes, *(IMPOSSIBLE if gpu.condition.bad_pids else ())]]

    # How it is joined, and how it is.

    def topo_get_numa_node_number(self, gpu: AmdGpu) -> int:
        return gpu.numa

    def get_cpu_affinity_with_scope(self, gpu: AmdGpu, _scope: int) -> list[int]:
        first = gpu.numa * CORES_PER_NUMA_NODE
        mask = ((1 << CORES_PER_NUMA_NODE) - 1) << first
        words = (max(self.machine.topology.numa) + 1) * CORES_PER_NUMA_NODE // 64 + 1
        return [mask >> 64 * place & (1 << 64) - 1 for place in range(words)]

    def topo_get_link_type(self, first: AmdGpu, second: AmdGpu) -> dict[str, Any]:
        hops, kinds = self.machine.topology.hops_between(first.index, second.index), AmdSmiLinkType
        joined = self.machine.topology.joined(first.index, second.index) == "XGMI"
        return {"hops": hops, "type": int(kinds.AMDSMI_LINK_TYPE_XGMI if joined else kinds.AMDSMI_LINK_TYPE_PCIE)}

    def topo_get_link_weight(self, first: AmdGpu, second: AmdGpu) -> int:
        told = self.topo_get_link_type(first, second)
        per_hop = XGMI_WEIGHT if told["type"] == AmdSmiLinkType.AMDSMI_LINK_TYPE_XGMI else PCIE_WEIGHT
        return int(told["hops"]) * per_hop

    def get_link_metrics(self, gpu: AmdGpu) -> dict[str, Any]:
        board = gpu.board
        if not gpu.link_ends:
            raise library_exception(UNSUPPORTED)
        links = [{"bdf": self.machine.gpus[peer].bus_id, "bit_rate": board.xgmi_bit_rate,
                  "max_bandwidth": board.xgmi_max_bandwidth, "link_type": int(AmdSmiLinkType.AMDSMI_LINK_TYPE_XGMI),
                  "read": round(gpu.link_kib[link]), "write": round(gpu.link_kib[link])}
                 for link, peer in enumerate(gpu.link_ends)]
        empty = {"bdf": "0000:00:00.0", "bit_rate": 0, "max_bandwidth": 0, "link_type": 0, "read": 0, "write": 0}
        return {"num_links": len(links), "links": links + [dict(empty)] * (LINKS_IN_TABLE - len(links))}

    def get_gpu_xgmi_link_status(self, gpu: AmdGpu) -> dict[str, Any]:
        states = ["D" if link in gpu.condition.links_down else "U" for link in range(len(gpu.link_ends))]
        return {"status": states, "total_links": len(states)}

    def get_pcie_info(self, gpu: AmdGpu) -> dict[str, Any]:
        board, slow = gpu.board, gpu.condition.slow_link
        speed, width = (SLOW_SPEED, SLOW_WIDTH) if slow else (board.pcie_speed, board.pcie_width)
        return {"pcie_static": {"max_pcie_width": board.pcie_width, "max_pcie_speed": board.pcie_speed,
                                "pcie_interface_version": board.pcie_speed // 8000 + 1, "slot_type": "OAM"},
                "pcie_metric": {"pcie_width": width, "pcie_speed": speed, "pcie_bandwidth": 0,
                                "pcie_replay_count": 0, "pcie_l0_to_recovery_count": 0,
                                "pcie_replay_roll_over_count": 0, "pcie_nak_sent_count": 0,
                                "pcie_nak_received_count": 0,
                                "pcie_lc_perf_other_end_recovery_count": 0}}

    def get_gpu_ecc_enabled(self, _gpu: AmdGpu) -> int:
        return ECC_BLOCKS

    def get_gpu_total_ecc_count(self, gpu: AmdGpu) -> dict[str, Any]:
        return {"correctable_count": gpu.corrected, "uncorrectable_count": gpu.uncorrected, "deferred_count": 0}

    def get_gpu_bad_page_info(self, gpu: AmdGpu) -> list[dict[str, Any]]:
        return [{"value": place, "page_address": 4 * KIB * (place + 1), "page_size": 4 * KIB, "status": status}
                for place, status in enumerate(gpu.bad_pages)]

    def _card_watts(self, gpu: AmdGpu) -> int:
        """Of the whole card, from its first die; the other one answers 0."""
        return round(sum(die.power_w for die in self.machine.card_of(gpu))) if gpu.reports_power else 0


def is_new(gpu: AmdGpu) -> bool:
    """Boards whose table counts how long each limit held them back, and what each link carried."""
    return gpu.board.metrics not in ("1.2", "1.3")


def partition_of(gpu: AmdGpu) -> tuple[str, str]:
    if gpu.board.partition is None:
        raise library_exception(UNSUPPORTED)
    return gpu.board.partition


def new_table(gpu: AmdGpu, watts: int) -> dict[str, Any]:
    empty = [NOT_KNOWN] * (LINKS_IN_TABLE - len(gpu.link_ends))
    carried = [round(kib) for kib in gpu.link_kib] + empty
    return {
        "current_socket_power": watts, "average_socket_power": NOT_KNOWN, "current_gfxclk": NOT_KNOWN,
        "current_gfxclks": [gpu.sm_clock_mhz] * gpu.board.clocks, "throttle_status": NOT_KNOWN,
        "indep_throttle_status": NOT_KNOWN, "pcie_replay_count_acc": 0, "accumulation_counter": round(gpu.ticks),
        "prochot_residency_acc": 0, "ppt_residency_acc": round(gpu.capped_ticks),
        "socket_thm_residency_acc": round(gpu.hot_ticks), "vr_thm_residency_acc": 0, "hbm_thm_residency_acc": 0,
        "xgmi_read_data_acc": carried, "xgmi_write_data_acc": list(carried), "num_partition": 1,
    }


def old_table(gpu: AmdGpu, watts: int) -> dict[str, Any]:
    none = [NOT_KNOWN] * LINKS_IN_TABLE
    return {
        "current_socket_power": NOT_KNOWN, "average_socket_power": watts, "current_gfxclk": gpu.sm_clock_mhz,
        "current_gfxclks": list(none), "throttle_status": gpu.condition.hot, "indep_throttle_status": gpu.condition.hot,
        "pcie_replay_count_acc": NOT_KNOWN, "accumulation_counter": NOT_KNOWN, "prochot_residency_acc": NOT_KNOWN,
        "ppt_residency_acc": NOT_KNOWN, "socket_thm_residency_acc": NOT_KNOWN, "vr_thm_residency_acc": NOT_KNOWN,
        "hbm_thm_residency_acc": NOT_KNOWN, "xgmi_read_data_acc": list(none), "xgmi_write_data_acc": list(none),
        "num_partition": NOT_KNOWN,
    }
