"""GPUs that fail, and strangers on them, on a running portal: the GPU is fenced, its neighbours go on."""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from client.api import Client
from client.errors import Refused
from tests.system.yard import FAULTS, KERNEL_LOG, Yard

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]


class Ward:
    """The node's health as alice, the administrator, sees it."""

    def __init__(self, yard: Yard) -> None:
        self.yard = yard
        self.client: Client = yard.stack.client("alice")
        self.node = self.client.nodes()[0]["name"]

    def gpu(self, index: int) -> dict[str, Any]:
        shown: dict[str, Any] = self.client._json("GET", f"/nodes/{self.node}/health")
        return next(gpu for gpu in shown["gpus"] if gpu["index"] == index)

    def findings(self, index: int) -> list[dict[str, Any]]:
        shown: dict[str, Any] = self.client._json("GET", f"/nodes/{self.node}/health")
        return [one for one in shown["findings"] if one["gpu_index"] == index]

    def becomes(self, index: int, *states: str, timeout_s: float = 30.0) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            gpu = self.gpu(index)
            return gpu if gpu["state"] in states else None

        return self.yard.wait(f"GPU {index} is {' or '.join(states)}", look, timeout_s)

    def release(self, index: int, by: Client | None = None) -> dict[str, Any]:
        gpu = self.gpu(index)
        answer: dict[str, Any] = (by or self.client)._json("POST", f"/gpus/{gpu['uuid']}/release")
        return answer

    def suffer(self, **faults: Any) -> None:
        fresh = self.yard.state_dir / f"{FAULTS}.new"
        fresh.write_text(json.dumps(faults))
        fresh.rename(self.yard.state_dir / FAULTS)

    def log(self, line: str) -> None:
        with (self.yard.state_dir / KERNEL_LOG).open("a") as file:
            file.write(f"4,1,1,-;{line}\n")


@pytest.fixture
def ward(yard: Yard) -> Iterator[Ward]:
    """Afterwards all GPUs are well again, whatever a test left."""
    ward = Ward(yard)
    yield ward
    ward.suffer()
    for index in range(8):
        if ward.becomes(index, "ok", "suspect", "quarantined")["state"] != "ok":
            ward.release(index)
        ward.becomes(index, "ok")


def test_a_lost_gpu_is_fenced_and_its_neighbours_go_on(yard: Yard, ward: Ward) -> None:
    running = yard.count_job(400, 0.05)
    yard.reaches(running, "running")
    ward.suffer(lost=[3])
    ward.becomes(3, "lost")
    assert [ward.gpu(index)["state"] for index in range(8) if index != 3] == ["ok"] * 7
    assert any(one["kind"] in {"lost", "xid"} and one["advice"] for one in ward.findings(3))
    elsewhere = yard.submit("true", gpus=6)
    assert yard.ended(elsewhere)["state"] == "succeeded"
    everything = yard.submit("true", gpus=8)
    yard.wait("it says why it waits", lambda: yard.job(everything)["reason"] and yard.free_gpus() == 6)
    ward.suffer()
    if ward.becomes(3, "ok", "quarantined")["state"] != "ok":
        ward.release(3)
    assert yard.ended(running)["state"] == "succeeded"
    assert yard.ended(everything)["state"] == "succeeded"


def test_a_foreign_process_makes_a_gpu_dirty_until_it_ends(yard: Yard, ward: Ward) -> None:
    uuid = ward.gpu(0)["uuid"]
    stranger = subprocess.Popen(["sleep", "120"], env={"CUDA_VISIBLE_DEVICES": uuid})
    try:
        reason = ward.becomes(0, "dirty")["state_reason"]
        assert reason.startswith(f"Process {stranger.pid} of ") and "sleep 120" in reason
        with pytest.raises(Refused):
            ward.release(0)
        job = yard.submit("sleep 1", gpus=7)
        assert yard.ended(job)["state"] == "succeeded"
        waiting = yard.submit("true", gpus=8)
        yard.wait("it waits", lambda: yard.job(waiting)["reason"])
    finally:
        stranger.kill()
        stranger.wait()
    ward.becomes(0, "ok")
    assert yard.ended(waiting)["state"] == "succeeded"
    assert all(one["resolved_at"] for one in ward.findings(0) if one["kind"] == "foreign")


def test_an_xid_in_the_kernel_log_quarantines_the_gpu_until_an_administrator_releases_it(
    yard: Yard, ward: Ward
) -> None:
    place = next(gpu for gpu in yard.bob.gpus() if gpu["index"] == 5)["pci_bus_id"]
    domain, bus, device = place.partition(".")[0].split(":")
    ward.log(f"NVRM: Xid (PCI:{domain[-4:]}:{bus}:{device}): 64, pid=1, name=x, row remap failed")
    assert ward.becomes(5, "quarantined")["state_reason"].startswith("Xid 64: ")
    finding = next(one for one in ward.findings(5) if one["code"] == 64)
    assert (finding["source"], finding["severity"], finding["resolved_at"]) == ("kernel_log", "critical", None)
    assert yard.free_gpus() == 7
    with pytest.raises(Refused):
        ward.release(5, by=yard.bob)
    ward.release(5)
    assert ward.gpu(5)["state"] == "ok"
    yard.wait("it is on offer again", lambda: yard.free_gpus() == 8)
    job = yard.ended(yard.submit("true", gpus=8))
    assert (job["state"], len(job["attempts"])) == ("succeeded", 1), "what was released is not held against it again"


def test_a_hint_of_a_program_stays_with_its_job(yard: Yard, ward: Ward) -> None:
    job = yard.count_job(60, 0.05)
    yard.reaches(job, "running")
    uuid = yard.job(job)["allocation"][0]["uuid"]
    gpu = next(one for one in yard.bob.gpus() if one["uuid"] == uuid)
    domain, bus, device = gpu["pci_bus_id"].partition(".")[0].split(":")
    ward.log(f"NVRM: Xid (PCI:{domain[-4:]}:{bus}:{device}): 31, pid=1, name=python, MMU Fault")
    yard.wait("the job is told", lambda: any(one["reason"] == "xid_31" for one in yard.bob.events(job)))
    assert ward.gpu(gpu["index"])["state"] == "ok"
    assert yard.ended(job)["state"] == "succeeded"
