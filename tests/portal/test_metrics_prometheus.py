"""What Prometheus reads: the exporter's names, honest gaps, and not for everyone."""

import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone
from prometheus_client.parser import text_string_to_metric_families

from portal.models import Allocation, Attempt, Gpu, Health, Job, Node
from portal.services import exposition, tokens
from tests.portal.conftest import GIB, Cast, make_node

TOKEN = "a-token-for-monitoring"
# The names in the list of counters that comes with the exporter, switched on or not.
OFFERED = """
    DCGM_FI_DEV_BOARD_LIMIT_VIOLATION DCGM_FI_DEV_BRAND DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS DCGM_FI_DEV_DEC_UTIL
    DCGM_FI_DEV_ECC_DBE_AGG_TOTAL DCGM_FI_DEV_ECC_DBE_VOL_TOTAL DCGM_FI_DEV_ECC_INFOROM_VER
    DCGM_FI_DEV_ECC_SBE_AGG_TOTAL DCGM_FI_DEV_ECC_SBE_VOL_TOTAL DCGM_FI_DEV_ENC_UTIL DCGM_FI_DEV_FB_FREE
    DCGM_FI_DEV_FB_RESERVED DCGM_FI_DEV_FB_USED DCGM_FI_DEV_GPU_TEMP DCGM_FI_DEV_GPU_UTIL
    DCGM_FI_DEV_INFOROM_IMAGE_VER DCGM_FI_DEV_LOW_UTIL_VIOLATION DCGM_FI_DEV_MEMORY_TEMP DCGM_FI_DEV_MEM_CLOCK
    DCGM_FI_DEV_MEM_COPY_UTIL DCGM_FI_DEV_NVLINK_BANDWIDTH_L0 DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL
    DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL
    DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL
    DCGM_FI_DEV_OEM_INFOROM_VER DCGM_FI_DEV_PCIE_REPLAY_COUNTER DCGM_FI_DEV_POWER_INFOROM_VER DCGM_FI_DEV_POWER_USAGE
    DCGM_FI_DEV_POWER_VIOLATION DCGM_FI_DEV_RELIABILITY_VIOLATION DCGM_FI_DEV_RETIRED_DBE DCGM_FI_DEV_RETIRED_PENDING
    DCGM_FI_DEV_RETIRED_SBE DCGM_FI_DEV_ROW_REMAP_FAILURE DCGM_FI_DEV_SERIAL DCGM_FI_DEV_SM_CLOCK
    DCGM_FI_DEV_SYNC_BOOST_VIOLATION DCGM_FI_DEV_THERMAL_VIOLATION DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION
    DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS DCGM_FI_DEV_VBIOS_VERSION DCGM_FI_DEV_VGPU_LICENSE_STATUS
    DCGM_FI_DEV_XID_ERRORS DCGM_FI_DRIVER_VERSION DCGM_FI_NVML_VERSION DCGM_FI_PROF_DRAM_ACTIVE
    DCGM_FI_PROF_GR_ENGINE_ACTIVE DCGM_FI_PROF_PCIE_RX_BYTES DCGM_FI_PROF_PCIE_TX_BYTES DCGM_FI_PROF_PIPE_FP16_ACTIVE
    DCGM_FI_PROF_PIPE_FP32_ACTIVE DCGM_FI_PROF_PIPE_FP64_ACTIVE DCGM_FI_PROF_PIPE_TENSOR_ACTIVE DCGM_FI_PROF_SM_ACTIVE
    DCGM_FI_PROF_SM_OCCUPANCY
"""


@pytest.fixture
def node(db: None) -> Node:
    return make_node("n1", gpus=2, hostname="rack1-n1", driver="580.65.06")


@pytest.fixture
def gpu(node: Node) -> Gpu:
    gpu = node.gpus.get(index=0)
    gpu.pci_bus_id = "00000000:07:00.0"
    gpu.latest = {
        "uuid": gpu.uuid, "at": time.time(), "utilization_percent": 97.0, "memory_used_bytes": 30 * GIB,
        "memory_reserved_bytes": GIB, "memory_total_bytes": 80 * GIB, "power_mw": 654_321, "temperature_c": 0,
        "energy_mj": 123_456_789_012, "sm_clock_mhz": 1980, "nvlink_received_bytes_per_s": 3e9,
        "nvlink_transmitted_bytes_per_s": 2e9, "pcie_replays": 4, "ecc_corrected": 0,
    }  # fmt: skip
    gpu.hardware = {
        "rows_remapped_uncorrectable": 1, "row_remap_failed": True,
        "links": [{"link": 0, "replay_errors": 2}, {"link": 1, "replay_errors": 3}, {"link": 2}],
    }  # fmt: skip
    gpu.save()
    return gpu


def hold(cast: Cast, gpu: Gpu, name: str = "train") -> Job:
    job = Job.objects.create(
        owner=cast.bob, project=cast.bob.personal_project, name=name, spec={}, gpu_count=1, state="running"
    )
    attempt = Attempt.objects.create(job=job, number=1, state="running")
    Allocation.objects.create(gpu=gpu, attempt=attempt, rank=0)
    return job


Samples = dict[str, list[tuple[dict[str, str], float]]]


def parsed(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    fitting = [value for own, value in samples[name] if labels.items() <= own.items()]
    assert len(fitting) == 1, (name, samples.get(name))
    return fitting[0]


# --- the GPUs ---------------------------------------------------------------------------------------------------------
def test_figures_and_labels_are_those_of_the_exporter(cast: Cast, gpu: Gpu) -> None:
    job = hold(cast, gpu)
    samples = parsed(exposition.text())
    labels, use = samples["DCGM_FI_DEV_GPU_UTIL"][0]
    assert use == 97
    assert labels == {
        "gpu": "0", "UUID": gpu.uuid, "pci_bus_id": "00000000:07:00.0", "device": "nvidia0",
        "modelName": "NVIDIA H100", "Hostname": "rack1-n1", "DCGM_FI_DRIVER_VERSION": "580.65.06", "node": "n1",
        "job": str(job.pk), "user": "bob", "project": job.project.name,
    }  # fmt: skip
    expected = {
        "DCGM_FI_DEV_FB_USED": 30 * 1024, "DCGM_FI_DEV_FB_FREE": 49 * 1024, "DCGM_FI_DEV_FB_RESERVED": 1024,
        "DCGM_FI_DEV_POWER_USAGE": 654.321, "DCGM_FI_DEV_SM_CLOCK": 1980, "DCGM_FI_DEV_GPU_TEMP": 0,
        "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": 5000, "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS_total": 1,
        "DCGM_FI_DEV_ROW_REMAP_FAILURE": 1, "DCGM_FI_DEV_PCIE_REPLAY_COUNTER_total": 4,
        "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL_total": 5, "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL_total": 0,
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION_total": 123_456_789_012,
    }  # fmt: skip
    for name, wanted in expected.items():
        own = name if name in samples else name.removesuffix("_total")
        assert value(samples, own, UUID=gpu.uuid) == pytest.approx(wanted), name


def test_names_are_those_that_the_exporter_offers() -> None:
    ours = {name for name, *_ in exposition.GPU_FIGURES if name.startswith("DCGM_")}
    assert ours <= set(OFFERED.split())


def test_what_is_not_known_is_left_out_and_zero_is_not(gpu: Gpu) -> None:
    samples = parsed(exposition.text())
    assert "DCGM_FI_DEV_MEMORY_TEMP" not in samples
    assert [labels["UUID"] for labels, _ in samples["DCGM_FI_DEV_GPU_TEMP"]] == [gpu.uuid]
    assert all(math.isfinite(value) for rows in samples.values() for _, value in rows)


def test_an_old_reading_is_not_passed_off_as_new(gpu: Gpu) -> None:
    gpu.latest["at"] = time.time() - 120
    gpu.save()
    samples = parsed(exposition.text())
    assert "DCGM_FI_DEV_GPU_UTIL" not in samples
    assert value(samples, "gpuyard_gpu_reading_age_seconds", UUID=gpu.uuid) == pytest.approx(120, abs=5)


def test_a_silent_node_s_gpus_say_nothing(gpu: Gpu) -> None:
    Node.objects.update(state="unreachable")
    samples = parsed(exposition.text())
    assert not [name for name in samples if name.startswith("DCGM_")]
    assert value(samples, "gpuyard_nodes", state="unreachable") == 1


def test_a_slice_names_its_place_on_the_card(gpu: Gpu) -> None:
    gpu.hardware = {"mig": {"instances": [{"uuid": "MIG-1", "gpu_instance": 7}]}}
    gpu.mig_enabled = True
    gpu.save()
    Gpu.objects.create(node=gpu.node, uuid="MIG-1", index=100, vendor="nvidia", name="NVIDIA H100 MIG 1g.10gb",
                       model="H100", parent_uuid=gpu.uuid, mig_profile="1g.10gb",
                       latest={"at": time.time(), "memory_used_bytes": 5 * GIB})  # fmt: skip
    labels = next(labels for labels, _ in parsed(exposition.text())["DCGM_FI_DEV_FB_USED"] if labels["UUID"] == "MIG-1")
    assert (labels["gpu"], labels["device"], labels["GPU_I_PROFILE"], labels["GPU_I_ID"]) == (
        "0", "nvidia0", "1g.10gb", "7")  # fmt: skip


def test_xids_are_counted_with_the_moment_of_the_newest(gpu: Gpu) -> None:
    at = timezone.now() - timedelta(minutes=5)
    for key, code, count in (("a", 79, 1), ("b", 79, 2), ("c", 48, 1)):
        Health.objects.create(node=gpu.node, gpu=gpu, key=key, kind="xid", code=code, count=count, at=at,
                              severity="critical", message="x")  # fmt: skip
    samples = parsed(exposition.text())
    assert value(samples, "gpuyard_gpu_xid_errors_total", xid="79") == 3
    assert value(samples, "gpuyard_gpu_xid_errors_total", xid="48") == 1
    assert value(samples, "gpuyard_gpu_xid_last_timestamp_seconds", xid="79") == pytest.approx(at.timestamp())


def test_awkward_names_keep_the_page_readable(cast: Cast, gpu: Gpu) -> None:
    Gpu.objects.filter(pk=gpu.pk).update(name='NVIDIA "quoted" \\ back\nline')
    labels, _ = parsed(exposition.text())["DCGM_FI_DEV_GPU_UTIL"][0]
    assert labels["modelName"] == 'NVIDIA "quoted" \\ back\nline'


def test_one_node_can_be_read_alone(gpu: Gpu) -> None:
    make_node("n2", gpus=1)
    text = exposition.text(node="n2")
    assert {labels["node"] for labels, _ in parsed(text)["gpuyard_gpu_state"]} == {"n2"}
    assert "gpuyard_jobs" not in text


def test_a_page_takes_the_same_number_of_queries_for_any_fleet(
    cast: Cast, gpu: Gpu, django_assert_max_num_queries: Callable[[int], Any]
) -> None:
    for number in range(2, 6):
        for each in make_node(f"n{number}", gpus=4).gpus.all():
            hold(cast, each)
    with django_assert_max_num_queries(12):
        exposition.text()


# --- the portal -------------------------------------------------------------------------------------------------------
def test_jobs_nodes_gpus_and_the_queue_are_counted(cast: Cast, gpu: Gpu) -> None:
    hold(cast, gpu)
    now = timezone.now()
    for minutes in (10, 3):
        Job.objects.create(owner=cast.bob, project=cast.bob.personal_project, name="w", spec={}, gpu_count=1,
                           submitted_at=now - timedelta(minutes=minutes))  # fmt: skip
    Job.objects.update(allocated_at=None)
    Job.objects.filter(state="running").update(submitted_at=now - timedelta(seconds=90), allocated_at=now)
    samples = parsed(exposition.text())
    assert value(samples, "gpuyard_jobs", state="waiting") == 2
    assert value(samples, "gpuyard_jobs", state="running") == 1
    assert value(samples, "gpuyard_jobs", state="failed") == 0
    assert value(samples, "gpuyard_nodes", state="ready") == 1
    assert value(samples, "gpuyard_gpus", state="ok") == 2
    assert value(samples, "gpuyard_gpus_held") == 1
    assert value(samples, "gpuyard_queue_longest_wait_seconds") == pytest.approx(600, abs=10)
    assert value(samples, "gpuyard_queue_wait_seconds", quantile="0.5") == pytest.approx(90, abs=1)


# --- who may read it --------------------------------------------------------------------------------------------------
def get(token: str | None) -> Any:
    return Client().get("/metrics", headers={"Authorization": f"Bearer {token}"} if token else {})


def test_an_admin_s_token_and_the_monitoring_token_open_it(cast: Cast, gpu: Gpu, settings: Any) -> None:
    settings.METRICS_TOKEN = TOKEN
    for token in (TOKEN, tokens.issue(cast.alice, "t")):
        response = get(token)
        assert response.status_code == 200
        assert response["Content-Type"].startswith("text/plain; version=0.0.4")
        assert "DCGM_FI_DEV_GPU_UTIL" in parsed(response.content.decode())


def test_nobody_else_gets_in(cast: Cast, gpu: Gpu, settings: Any) -> None:
    for token in (None, "", "wrong", tokens.issue(cast.bob, "t"), TOKEN):
        response = get(token)
        assert (response.status_code, response.json()["type"]) == (401, "not_authenticated")
        assert response["WWW-Authenticate"].startswith("Bearer")
        assert gpu.uuid not in response.content.decode()
