"""Everything that a monitoring system may want to know, as Prometheus reads it.

The names and labels of the GPUs' figures are those of NVIDIA's exporter, so that dashboards made for it work. What is
not known, or too old to speak of now, is left out: a gap, never a zero.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from django.db.models import Max, Prefetch, Sum

from portal.models import Allocation, Gpu, Health
from portal.services import fleet_figures
from portal.services.fleet_figures import Family, Labels
from wire.states import NodeState

STALE_AFTER_S = 60.0
MIB = 1 << 20

Reads = Callable[["Card"], float | None]


@dataclass(frozen=True)
class Card:
    """A GPU with what is said of it at this moment. A silent node's GPUs have nothing to say."""

    gpu: Gpu
    labels: Labels
    latest: dict[str, Any] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)


def text(*, node: str | None = None, now: float | None = None) -> str:
    """The whole page, or the part that speaks of one node's GPUs: for fleets that are read in shares."""
    now = time.time() if now is None else now
    cards = list(cards_of(node, now))
    families = [*gpu_families(cards), *own_families(cards, now)]
    if node is None:
        families += fleet_figures.families(now)
    return "".join(line for family in families for line in family.lines())


# --- the cards --------------------------------------------------------------------------------------------------------
def cards_of(node: str | None, now: float) -> Iterator[Card]:
    active = Allocation.objects.filter(released_at=None).select_related("attempt__job__owner", "attempt__job__project")
    gpus = Gpu.objects.present().select_related("node")
    gpus = gpus.prefetch_related(Prefetch("allocations", active, to_attr="active"))
    rows = list(gpus.filter(node__name=node) if node else gpus)
    by_uuid = {gpu.uuid: gpu for gpu in rows}
    for gpu in rows:
        labels = labels_of(gpu, by_uuid.get(gpu.parent_uuid))
        if gpu.node.state == NodeState.UNREACHABLE:
            yield Card(gpu, labels)
        else:
            fresh = now - float(gpu.latest.get("at") or 0) <= STALE_AFTER_S
            yield Card(gpu, labels, gpu.latest if fresh else {}, gpu.hardware)


def labels_of(gpu: Any, parent: Gpu | None) -> Labels:
    index = (parent or gpu).index
    labels = {
        "gpu": str(index),
        "UUID": gpu.uuid,
        "pci_bus_id": gpu.pci_bus_id or (parent.pci_bus_id if parent else ""),
        "device": f"{gpu.vendor}{index}",
        "modelName": gpu.name,
        "Hostname": gpu.node.hostname or gpu.node.name,
        "DCGM_FI_DRIVER_VERSION": gpu.node.driver,
        "GPU_I_PROFILE": gpu.mig_profile,
        "GPU_I_ID": instance_of(gpu, parent) if parent else "",
        "node": gpu.node.name,
    }
    for allocation in gpu.active[:1]:
        job = allocation.attempt.job
        labels |= {"job": str(job.pk), "user": job.owner.username, "project": job.project.name}
    return {name: value for name, value in labels.items() if value}


def instance_of(gpu: Gpu, parent: Gpu) -> str:
    instances = (parent.hardware.get("mig") or {}).get("instances") or []
    return next((str(one["gpu_instance"]) for one in instances if one.get("uuid") == gpu.uuid), "")


# --- what their driver says -------------------------------------------------------------------------------------------
def live(name: str, divisor: float = 1) -> Reads:
    return lambda card: scaled(card.latest.get(name), divisor)


def lasting(name: str) -> Reads:
    return lambda card: scaled(card.hardware.get(name), 1)


def of_links(name: str) -> Reads:
    """The sum over the links, if any of them tells."""

    def read(card: Card) -> float | None:
        known = [link[name] for link in card.hardware.get("links") or [] if link.get(name) is not None]
        return sum(known) if known else None

    return read


def scaled(value: Any, divisor: float) -> float | None:
    if value is None:
        return None
    return value / divisor if divisor != 1 else float(value) if isinstance(value, bool) else value


def framebuffer_free(card: Card) -> float | None:
    total = card.latest.get("memory_total_bytes") or card.gpu.memory_total_bytes
    used = card.latest.get("memory_used_bytes")
    if total is None or used is None:
        return None
    return max(0, total - used - (card.latest.get("memory_reserved_bytes") or 0)) / MIB


def nvlink_megabytes_per_s(card: Card) -> float | None:
    received, sent = (card.latest.get(f"nvlink_{way}_bytes_per_s") for way in ("received", "transmitted"))
    return (received + sent) / 1e6 if received is not None and sent is not None else None


GPU_FIGURES: tuple[tuple[str, str, str, Reads], ...] = (
    ("DCGM_FI_DEV_GPU_UTIL", "gauge", "Share of time in which the GPU was busy, in %.", live("utilization_percent")),
    ("DCGM_FI_DEV_MEM_COPY_UTIL", "gauge", "Share of time in which its memory was busy, in %.",
     live("memory_utilization_percent")),
    ("DCGM_FI_DEV_ENC_UTIL", "gauge", "Use of the encoder, in %.", live("encoder_percent")),
    ("DCGM_FI_DEV_DEC_UTIL", "gauge", "Use of the decoder, in %.", live("decoder_percent")),
    ("DCGM_FI_DEV_FB_USED", "gauge", "Memory in use, in MiB.", live("memory_used_bytes", MIB)),
    ("DCGM_FI_DEV_FB_FREE", "gauge", "Memory that is free, in MiB.", framebuffer_free),
    ("DCGM_FI_DEV_FB_RESERVED", "gauge", "Memory that the driver keeps, in MiB.", live("memory_reserved_bytes", MIB)),
    ("DCGM_FI_DEV_POWER_USAGE", "gauge", "Power drawn, in W.", live("power_mw", 1000)),
    ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "counter", "Energy used since the driver was loaded, in mJ.",
     live("energy_mj")),
    ("DCGM_FI_DEV_GPU_TEMP", "gauge", "Temperature of the GPU, in °C.", live("temperature_c")),
    ("DCGM_FI_DEV_MEMORY_TEMP", "gauge", "Temperature of the memory, in °C.", live("memory_temperature_c")),
    ("DCGM_FI_DEV_SM_CLOCK", "gauge", "Clock of the multiprocessors, in MHz.", live("sm_clock_mhz")),
    ("DCGM_FI_DEV_MEM_CLOCK", "gauge", "Clock of the memory, in MHz.", live("memory_clock_mhz")),
    ("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "counter", "Repeated transfers on PCIe.", live("pcie_replays")),
    ("DCGM_FI_PROF_PCIE_RX_BYTES", "gauge", "Received over PCIe, in bytes per second.",
     live("pcie_received_bytes_per_s")),
    ("DCGM_FI_PROF_PCIE_TX_BYTES", "gauge", "Sent over PCIe, in bytes per second.",
     live("pcie_transmitted_bytes_per_s")),
    ("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", "gauge", "Sent and received over NVLink, in MB per second.",
     nvlink_megabytes_per_s),
    ("DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", "counter", "Broken packets on NVLink.", of_links("crc_errors")),
    ("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", "counter", "Repeated transfers on NVLink.",
     of_links("replay_errors")),
    ("DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL", "counter", "NVLinks that had to be set up anew.",
     of_links("recovery_errors")),
    ("DCGM_FI_DEV_POWER_VIOLATION", "counter", "Time held back by the power limit, in ns.",
     live("power_violation_ns")),
    ("DCGM_FI_DEV_THERMAL_VIOLATION", "counter", "Time held back by heat, in ns.", live("thermal_violation_ns")),
    ("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", "counter", "Corrected memory errors since the driver was loaded.",
     live("ecc_corrected")),
    ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "counter", "Uncorrected memory errors since the driver was loaded.",
     live("ecc_uncorrected")),
    ("DCGM_FI_DEV_ECC_SBE_AGG_TOTAL", "counter", "Corrected memory errors in the life of the card.",
     lasting("ecc_corrected_total")),
    ("DCGM_FI_DEV_ECC_DBE_AGG_TOTAL", "counter", "Uncorrected memory errors in the life of the card.",
     lasting("ecc_uncorrected_total")),
    ("DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", "counter", "Rows of memory replaced for corrected errors.",
     lasting("rows_remapped_correctable")),
    ("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "counter", "Rows of memory replaced for uncorrected errors.",
     lasting("rows_remapped_uncorrectable")),
    ("DCGM_FI_DEV_ROW_REMAP_FAILURE", "gauge", "1 if a row of memory could not be replaced.",
     lasting("row_remap_failed")),
    ("gpuyard_gpu_row_remap_pending", "gauge", "1 if a row of memory is replaced at the next reset.",
     lasting("row_remap_pending")),
)  # fmt: skip


def gpu_families(cards: Iterable[Card]) -> Iterator[Family]:
    cards = list(cards)
    for name, kind, said, read in GPU_FIGURES:
        family = Family(name, kind, said)
        for card in cards:
            family.add(read(card), card.labels)
        yield family


# --- what the portal says of them -------------------------------------------------------------------------------------
def own_families(cards: list[Card], now: float) -> Iterator[Family]:
    state = Family("gpuyard_gpu_state", "gauge", "1 for the state that the GPU is in.")
    age = Family("gpuyard_gpu_reading_age_seconds", "gauge", "Since the newest reading of the GPU.")
    for card in cards:
        state.add(1, card.labels | {"state": card.gpu.state})
        at = card.gpu.latest.get("at")
        age.add(round(max(0.0, now - at), 3) if at else None, card.labels)
    yield from (state, age, *xid_families(cards))


def xid_families(cards: list[Card]) -> tuple[Family, Family]:
    """Counted, with the moment of the newest: a gauge of the last code would stay long after the trouble is over."""
    total = Family("gpuyard_gpu_xid_errors_total", "counter", "Xid errors of the GPU by code.")
    newest = Family("gpuyard_gpu_xid_last_timestamp_seconds", "gauge", "When the Xid error last came.")
    labels = {card.gpu.pk: card.labels for card in cards}
    rows = Health.objects.filter(kind="xid", gpu__in=list(labels), code__isnull=False).order_by("gpu", "code")
    for row in rows.values("gpu", "code").annotate(total=Sum("count"), newest=Max("at")):
        own = labels[row["gpu"]] | {"xid": str(row["code"])}
        total.add(row["total"], own)
        newest.add(row["newest"].timestamp(), own)
    return total, newest
