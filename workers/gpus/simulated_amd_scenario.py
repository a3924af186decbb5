"""Plays a fault script on a simulated AMD machine: what its calls answer, and what its boards do."""

import math
from collections.abc import Callable

from workers.gpus.amd_library import DRIVER_NOT_LOADED, UNSUPPORTED
from workers.gpus.fault_script import Item
from workers.gpus.faults import NONE, Delay, Faults, FaultSource, Return, Text
from workers.gpus.simulated_amd_machine import AmdCondition, AmdMachine

FOR_EVER_S = 3600.0
BAD_NAME = b"AMD \xff\xfe\xc3("
PENDING_PAGE = 1
HANGS_IN = ("amdsmi_get_gpu_metrics_info", "amdsmi_get_gpu_memory_usage", "amdsmi_get_gpu_process_list")
RESIDENCIES = frozenset(f"{what}_residency_acc" for what in ("ppt", "socket_thm", "vr_thm", "hbm_thm", "prochot"))

# The value that nometric names: what it is in the table that is read in one go, and the calls that tell it alone.
IN_TABLE = {
    "utilization": {"average_gfx_activity"}, "power": {"current_socket_power", "average_socket_power"},
    "temperature": {"temperature_hotspot"}, "memory_temperature": {"temperature_mem"},
    "sm_clock": {"current_gfxclk", "current_gfxclks"}, "memory_clock": {"current_uclk"},
    "throttle_reasons": {"throttle_status", "indep_throttle_status", *RESIDENCIES}, "pcie": {"pcie_replay_count_acc"},
    "nvlink": {"xgmi_read_data_acc", "xgmi_write_data_acc"},
}
ALONE = {
    "utilization": ["gpu_activity"], "memory": ["gpu_memory_usage", "gpu_vram_usage"], "power": ["power_info"],
    "temperature": ["temp_metric"], "memory_temperature": ["temp_metric"], "sm_clock": ["clock_info"],
    "memory_clock": ["clock_info"], "energy": ["energy_count"], "processes": ["gpu_process_list"],
    "ecc": ["gpu_total_ecc_count", "gpu_ecc_enabled"], "pcie": ["pcie_info"],
    "nvlink": ["link_metrics", "gpu_xgmi_link_status"],
}


class AmdScenario:
    """A source of faults: those of the script, unless `others` has some of its own."""

    def __init__(self, machine: AmdMachine, items: list[Item], others: FaultSource,
                 clock: Callable[[], float], started: float) -> None:
        self._machine, self._items, self._others = machine, items, others
        self._clock, self._started = clock, started
        self._begun: set[str] = set()
        self._changes_at = -math.inf if items else math.inf
        self._faults = NONE

    def __call__(self) -> Faults:
        now_s = self._clock() - self._started
        if now_s >= self._changes_at:
            self._advance(now_s)
        others = self._others()
        return self._faults if others == NONE else others

    def _advance(self, now_s: float) -> None:
        for one in self._items:
            if one.start_s <= now_s and one.words not in self._begun:
                self._begun.add(one.words)
                self._hurt(one)
        on = [one for one in self._items if one.is_on(now_s)]
        for gpu in self._machine.gpus:
            gpu.condition = condition([one for one in on if one.gpu == gpu.index])
        self._faults = faults_of(on, now_s)
        times = [at for one in self._items for at in (one.start_s, one.end_s) if at is not None and at > now_s]
        self._changes_at = min(times, default=math.inf)

    def _hurt(self, one: Item) -> None:
        """What stays when the fault is over."""
        if one.fault == "ecc" and one.gpu is not None:
            gpu = self._machine.gpus[one.gpu]
            gpu.uncorrected += 1
            gpu.bad_pages.append(PENDING_PAGE)


def condition(on: list[Item]) -> AmdCondition:
    faults = {one.fault for one in on}
    return AmdCondition(
        hot="throttle" in faults, slow_link="slowlink" in faults, memory_stuck="memstuck" in faults,
        bad_pids="badpids" in faults, links_down=frozenset(one.number for one in on if one.fault == "nvlinkdown"),
        hidden=frozenset().union(*(IN_TABLE.get(one.metric, set()) for one in on)),
    )


def faults_of(on: list[Item], now_s: float) -> Faults:
    hung = [(one.gpu, FOR_EVER_S if one.end_s is None else one.end_s - now_s) for one in on if one.fault == "hang"]
    return Faults(
        lost=[one.gpu for one in on if one.fault == "lost" and one.gpu is not None],
        returns=[Return(symbol=f"amdsmi_get_{name}", gpu=one.gpu, code=UNSUPPORTED)
                 for one in on for name in ALONE.get(one.metric, [])],
        delays=[Delay(symbol=symbol, gpu=gpu, seconds=seconds) for gpu, seconds in hung for symbol in HANGS_IN],
        texts=[Text(symbol="amdsmi_get_gpu_asic_info", gpu=one.gpu, hex=BAD_NAME.hex())
               for one in on if one.fault == "badname"],
        everything=DRIVER_NOT_LOADED if any(one.fault == "unloaded" for one in on) else None,
    )
