"""A real worker: what it finds on its GPUs keeps a job from starting, and what happens to them gets home."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_harness import MiniPortal, NodeProcess, wait_until

from wire.desired import GpuSlot
from wire.reports import GpuInfo
from wire.states import EndReason


@pytest.fixture
def log(tmp_path: Path, node: NodeProcess) -> Path:
    path = tmp_path / "kernel_log"
    path.touch()
    node.env["GPUYARD_KMSG"] = str(path)
    return path


@pytest.fixture
def gpus(portal: MiniPortal, node: NodeProcess, log: Path) -> list[GpuInfo]:
    """Of a node that runs and has read them."""
    node.start()
    portal.wait(lambda: portal.inventories and len(portal.newest) == 8, 30, "readings of all GPUs")
    return portal.inventories[-1].gpus


@pytest.fixture
def stranger(gpus: list[GpuInfo]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that no attempt explains, on GPU 0."""
    process = subprocess.Popen(["sleep", "300"], env={"CUDA_VISIBLE_DEVICES": gpus[0].uuid})
    yield process
    process.kill()
    process.wait()


def slot(gpu: GpuInfo) -> GpuSlot:
    return GpuSlot(uuid=gpu.uuid, index=gpu.index)


def sees(portal: MiniPortal, gpu: GpuInfo, pid: int) -> bool:
    return any(one.pid == pid for one in portal.newest[gpu.uuid].processes or [])


def test_a_job_is_refused_on_a_gpu_that_a_stranger_uses_and_starts_beside_it(
    portal: MiniPortal, gpus: list[GpuInfo], stranger: subprocess.Popen[bytes]
) -> None:
    portal.wait(lambda: sees(portal, gpus[0], stranger.pid), what="the stranger is seen")
    refused = portal.wait_complete(portal.launch("/bin/echo never", gpus=[slot(gpus[0])]))
    (event,) = refused.events
    assert (event.reason, [(one.code, one.gpu_uuid) for one in event.refusals]) == (
        EndReason.PREFLIGHT, [("busy", gpus[0].uuid)])
    assert event.message is not None and f"GPU 0 is used by process {stranger.pid} of " in event.message
    beside = portal.wait_complete(portal.launch("/bin/echo ran", gpus=[slot(gpus[1])]))
    assert beside.state == "succeeded" and beside.logs["rank-0"] == b"ran\n"


def test_a_gpu_that_another_job_just_left_is_free_at_once(portal: MiniPortal, gpus: list[GpuInfo]) -> None:
    first = portal.launch("/bin/sleep 2", gpus=[slot(gpus[0])])
    portal.wait(lambda: portal.newest[gpus[0].uuid].processes, what="the job is seen on the GPU")
    portal.wait_complete(first)
    for _ in range(3):  # the newest reading may still show what has ended
        record = portal.wait_complete(portal.launch("/bin/true", gpus=[slot(gpus[0])]))
        assert record.state == "succeeded", record.events[-1].message


def test_details_and_kernel_errors_get_home_although_the_broker_forgets(
    portal: MiniPortal, gpus: list[GpuInfo], log: Path
) -> None:
    portal.wait(lambda: portal.hardware, 30, "the details of the GPUs")
    assert {gpu.uuid for gpu in portal.hardware[0].gpus} == {gpu.uuid for gpu in gpus}
    portal.pause()
    domain, bus, device = (gpus[2].pci_bus_id or "").partition(".")[0].split(":")
    with log.open("a") as file:
        file.write(f"4,1,1,-;NVRM: Xid (PCI:{domain[-4:]}:{bus}:{device}): 79, pid=1, GPU has fallen off the bus.\n")
    before = portal.unread()
    wait_until(lambda: portal.unread() > before + 4, what="the event is among what nobody read")
    portal.client.flushall()
    portal.resume()
    portal.wait(lambda: portal.health, 30, "the event, sent again")
    assert {(event.gpu_uuid, event.code) for event in portal.health} == {(gpus[2].uuid, 79)}
